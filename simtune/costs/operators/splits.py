"""Ways to hold rows of a table back, to test a fit on rows that it did not see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from simtune.arrays import Array, Mask


class Split(NamedTuple):
    """A way to hold rows back: `held` selects them; a fit takes its rows from all the others.

    `random` selects none: it tests on all rows that the fit did not take.
    """

    name: str
    held: Callable[[Mapping[str, Array], np.random.Generator], Mask] | None


def unseen(*names: str) -> Split:
    """Return a split that holds back a fifth of all combinations of these parameters."""

    def fifth(shape: Mapping[str, Array], rng: np.random.Generator) -> Mask:
        _, group = np.unique(np.column_stack([shape[name] for name in names]), axis=0, return_inverse=True)
        group = group.ravel()
        held_back: Mask = np.isin(group, rng.permutation(group.max() + 1)[: (group.max() + 1) // 5])
        return held_back

    return Split(f"unseen ({', '.join(names)})", fifth)


def above(what: str, limit: float, *names: str) -> Split:
    """Return a split that holds back rows with any of these parameters above the limit."""

    def beyond(shape: Mapping[str, Array], rng: np.random.Generator) -> Mask:
        held_back: Mask = np.max([shape[name] for name in names], axis=0) > limit
        return held_back

    return Split(f"{what} > {limit:g} trained below", beyond)


def _every_second(shape: Mapping[str, Array], rng: np.random.Generator) -> Mask:
    """Select every second size of every group but the smallest and the largest."""
    sizes = shape["bytes"]
    held_back = np.zeros(len(sizes), dtype=np.bool_)
    for n in np.unique(shape["devices"]):
        rows = np.flatnonzero(shape["devices"] == n)
        held_back[rows[np.argsort(sizes[rows])][1:-1:2]] = True
    return held_back


RANDOM = Split("random", None)
EVERY_SECOND = Split("every second size", _every_second)
