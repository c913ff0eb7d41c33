"""Ways to hold rows of a table back, to test a fit on what it did not see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from simtune.arrays import Array, Mask


class Split(NamedTuple):
    """A way to hold rows back: which ones, none of them trained on, where training takes from all the others.

    `random` has no held rows of its own: it tests on whatever was not trained on.
    """

    name: str
    held: Callable[[Mapping[str, Array], np.random.Generator], Mask] | None


def unseen(*names: str) -> Split:
    """A fifth of all combinations of these parameters held back whole."""

    def fifth(shape: Mapping[str, Array], rng: np.random.Generator) -> Mask:
        _, group = np.unique(np.column_stack([shape[name] for name in names]), axis=0, return_inverse=True)
        group = group.ravel()
        held: Mask = np.isin(group, rng.permutation(group.max() + 1)[: (group.max() + 1) // 5])
        return held

    return Split(f"unseen ({', '.join(names)})", fifth)


def above(what: str, limit: float, *names: str) -> Split:
    """Rows with any of these parameters above the limit held back."""

    def beyond(shape: Mapping[str, Array], rng: np.random.Generator) -> Mask:
        held: Mask = np.max([shape[name] for name in names], axis=0) > limit
        return held

    return Split(f"{what} > {limit:g} trained below", beyond)


def _every_second(shape: Mapping[str, Array], rng: np.random.Generator) -> Mask:
    """Every second size of every group but the smallest and the largest."""
    sizes = shape["bytes"]
    held = np.zeros(len(sizes), dtype=np.bool_)
    for n in np.unique(shape["devices"]):
        rows = np.flatnonzero(shape["devices"] == n)
        held[rows[np.argsort(sizes[rows])][1:-1:2]] = True
    return held


RANDOM = Split("random", None)
EVERY_SECOND = Split("every second size", _every_second)
