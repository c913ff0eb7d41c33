"""Chains of drafts: tokens that a round of g draft tokens yields, with and without early stopping.

With a_j the probability that position j is kept if all before it were, and survival S_j = a_1 ... a_j, a round
yields on average

    Omega = 1 + S_1 + ... + S_g

tokens, the last being the correction or the bonus of the target (Leviathan et al., arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from simtune.arrays import Array

_EQUAL = 1e-12
"""Survivals are products in some order; a difference below this counts as none."""


def survival(conditional: ArrayLike) -> Array:
    """Return S_1 ... S_g: the probabilities that at least 1 ... g draft tokens are kept."""
    alive: Array = np.multiply.accumulate(np.asarray(conditional, dtype=np.float64))
    return alive


def expected_tokens(conditional: ArrayLike) -> float:
    """Return Omega: mean tokens of a round, including the target's own."""
    return 1.0 + float(survival(conditional).sum())


class StoppedRound(NamedTuple):
    """Outcome of a stopping rule in one round of one request."""

    accepted: float
    """Mean draft tokens kept."""
    at_least: Array
    """P(at least k tokens are drafted), k = 1 ... longest."""


def stopped(rate: Sequence[float], share: Sequence[float], longest: int, survive: float) -> StoppedRound:
    """Return the outcome of drafting while the survival, the next token included, is at least `survive`.

    The acceptance of each token is `rate[i]` with probability `share[i]`, independently, and known before the
    token is drafted.
    """
    accepted, at_least = 0.0, np.zeros(longest)
    states = {1.0: 1.0}
    for k in range(longest):
        following: dict[float, float] = {}
        for alive, probability in states.items():
            for a, s in zip(rate, share, strict=True):
                after = alive * a
                if after >= survive - _EQUAL:
                    accepted += probability * s * after
                    at_least[k] += probability * s
                    key = round(after, 12)
                    following[key] = following.get(key, 0.0) + probability * s
        states = following
    return StoppedRound(accepted, at_least)


def stopped_by_request(rate: Sequence[float], share: Sequence[float], longest: int, survive: float) -> StoppedRound:
    """Return the outcome as in `stopped`, if the acceptance belongs to the request and is the same for all of its
    tokens."""
    alive = np.asarray(rate, dtype=np.float64)[:, None] ** np.arange(1, longest + 1)
    drafted = alive >= survive - _EQUAL
    shares = np.asarray(share, dtype=np.float64)
    return StoppedRound(float(shares @ (alive * drafted).sum(axis=1)), shares @ drafted)
