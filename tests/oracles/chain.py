"""Chains in closed form: what rounds yield, how long answers take, the best length, and the best rule to stop by.

With a_j the probability that position j is kept if all before it were, and survival S_j = a_1 ... a_j, a round yields
Omega = 1 + S_1 + ... + S_g tokens on average (Leviathan et al., arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from simtune.arrays import Array
from simtune.tuner.drafting.chain import expected_tokens, stopped, survival

_EQUAL = 1e-12
"""Survivals are products in some order; nearer than this they are the same."""


def iid(acceptance: float, length: int) -> Array:
    """The same acceptance at every position."""
    return np.full(length, acceptance)


def beta(a: float, b: float, length: int) -> Array:
    """Conditional acceptance over requests whose own acceptance is drawn from Beta(a, b): it rises.

    Putting the mean a / (a + b) at every position instead understates what a round yields.
    """
    j = np.arange(length, dtype=np.float64)
    return (a + j) / (a + b + j)


def accepted_pmf(conditional: ArrayLike) -> Array:
    """P(exactly j draft tokens are kept), j = 0 ... g."""
    alive = np.concatenate([[1.0], survival(conditional), [0.0]])
    pmf: Array = alive[:-1] - alive[1:]
    return pmf


def mean_seconds(num_tokens: int, conditional: ArrayLike, draft_s: float, target_s: float) -> float:
    """Mean seconds until exactly num_tokens tokens are out, each draft token taking draft_s and each
    verification target_s.

    The last rounds are cut, for nobody drafts beyond the end: with n tokens to go a round drafts at most n - 1.
    Exact, by recursion over the tokens that are left.
    """
    longest = len(np.asarray(conditional))
    seconds = np.zeros(num_tokens + 1)
    pmfs = [accepted_pmf(np.asarray(conditional)[:k]) for k in range(longest + 1)]
    for left in range(1, num_tokens + 1):
        k = min(longest, left - 1)
        # j kept draft tokens and one of the target leave left - 1 - j.
        seconds[left] = k * draft_s + target_s + pmfs[k] @ seconds[left - 1 - k : left][::-1]
    return float(seconds[num_tokens])


def best_length(conditional: ArrayLike, seconds: ArrayLike) -> tuple[int, float]:
    """(draft tokens, tokens per second) with the highest rate, where a round with k draft tokens takes
    `seconds[k]`. The shortest of equals.
    """
    tokens = 1.0 + np.concatenate([[0.0], np.cumsum(survival(conditional))])
    rates = tokens / np.asarray(seconds, dtype=np.float64)
    best = int(np.flatnonzero(rates >= rates.max() * (1 - _EQUAL))[0])
    return best, float(rates[best])


def marginal_length(conditional: ArrayLike, draft_s: float, target_s: float) -> int:
    """`best_length` where each draft token costs draft_s, verification included, on top of target_s.

    Draft token k + 1 pays iff S_(k+1) > rho draft_s, with rho the best rate itself: a fixed point, reached from
    below in a few turns. Exact for costs that are affine (or convex, with the next token's cost).
    """
    alive = survival(conditional)
    length = 0
    while True:
        rate = (1.0 + alive[:length].sum()) / (target_s + length * draft_s)
        longer = int(np.count_nonzero(alive > rate * draft_s + _EQUAL))
        if longer == length:
            return length
        length = longer


class Stopping(NamedTuple):
    """One request at a time: revealed acceptances, seconds per draft token and per round, the longest draft."""

    rate: Sequence[float]
    share: Sequence[float]
    draft_s: float
    """Of one more draft token: drafting it and what it adds to the verification."""
    target_s: float
    longest: int

    def tokens_per_s(self, survive: float) -> float:
        """Of the rule that drafts on while survival stays at or above `survive`."""
        drafted = stopped(self.rate, self.share, self.longest, survive)
        return (1.0 + drafted.accepted) / (self.target_s + self.draft_s * float(drafted.at_least.sum()))

    def look_ahead(self) -> tuple[float, float]:
        """(survival to keep, tokens per second) of one-step look-ahead, the best rule there is.

        Drafting the next token pays iff the survival it leaves is worth its time: survival >= rho draft_s, with
        rho the rate of the rule itself. Survival only falls, so looking one step ahead is enough (a monotone
        stopping problem): stop when P(some rejection) >= 1 - rho draft_s, the rule of SpecDec++ (arXiv 2405.19715).
        """
        rate = 1.0 / self.target_s
        while True:
            better = self.tokens_per_s(rate * self.draft_s)
            if better <= rate * (1 + _EQUAL):
                return rate * self.draft_s, rate
            rate = better

    def optimum(self) -> float:
        """Tokens per second of the best rule of any form, by dynamic programming: what `look_ahead` is held to."""
        rate = 1.0 / self.target_s
        while True:
            tokens, seconds = self._policy(rate)
            better = tokens / seconds
            if better <= rate * (1 + _EQUAL):
                return rate
            rate = better

    def _policy(self, price: float) -> tuple[float, float]:
        """(tokens, seconds) of the round that earns most when a second costs `price` tokens."""

        @cache
        def after(k: int, alive: float) -> tuple[float, float]:
            tokens = seconds = 0.0
            if k == self.longest:
                return tokens, seconds
            for a, s in zip(self.rate, self.share, strict=True):
                more_tokens, more_seconds = after(k + 1, round(alive * a, 12))
                more_tokens, more_seconds = more_tokens + alive * a, more_seconds + self.draft_s
                if more_tokens > price * more_seconds:
                    tokens, seconds = tokens + s * more_tokens, seconds + s * more_seconds
            return tokens, seconds

        tokens, seconds = after(0, 1.0)
        return 1.0 + tokens, self.target_s + seconds


def goodput(conditionals: Sequence[ArrayLike], draft_s: float, target_s: float) -> float:
    """Tokens per second of a batch whose requests draft chains of their own (SmartSpec, arXiv 2406.14066)."""
    return sum(expected_tokens(c) for c in conditionals) / (draft_s + target_s)
