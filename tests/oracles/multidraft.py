"""Several candidates for one position: how likely each rule takes one of them.

`p` is what the target would sample from, `q` the drafter; k candidates. All results are exact. What a tree needs,
the probability that the candidate of each rank is taken, is what `spec_infer` and `without_replacement` return.
"""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
from numpy.typing import ArrayLike

from simtune.arrays import Array

_NOTHING = 1e-15


def one(p: ArrayLike, q: ArrayLike) -> float:
    """A single candidate: sum of min(p, q)."""
    return float(np.minimum(p, q).sum())


def greedy(p: ArrayLike, q: ArrayLike, k: int) -> Array:
    """By rank, where the candidates are the drafter's k likeliest tokens and the target samples its own."""
    return np.asarray(p, dtype=np.float64)[np.argsort(-np.asarray(q, dtype=np.float64), kind="stable")[:k]]


def spec_infer(p: ArrayLike, q: ArrayLike, k: int) -> Array:
    """By rank, k independent candidates tried in turn, the target's remainder after each rejection (SpecInfer,
    arXiv 2305.09781). Which token failed does not matter to what is left.
    """
    left, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    taken, rejected = np.zeros(k), 1.0
    for rank in range(k):
        accept = one(left, q)
        taken[rank] = rejected * accept
        rejected *= 1 - accept
        left = _normal(np.maximum(left - q, 0))
    return taken


def without_replacement(p: ArrayLike, q: ArrayLike, k: int) -> Array:
    """By rank, candidates that differ: after a rejection the drafter forgets the token too (RSD, arXiv
    2402.14160; Sequoia, arXiv 2402.12374).

    The expectation over which token failed is enumerated: time grows as vocabulary ^ k.
    """
    taken = np.zeros(k)

    def attempt(p: Array, q: Array, rank: int, probability: float) -> None:
        if rank == k or probability < _NOTHING or q.sum() < _NOTHING:
            return
        left = _normal(np.maximum(p - q, 0))
        for token in np.flatnonzero(q):
            accept = min(1.0, p[token] / q[token])
            taken[rank] += probability * q[token] * accept
            if accept < 1:
                others = q.copy()
                others[token] = 0
                attempt(left, _normal(others), rank + 1, probability * q[token] * (1 - accept))

    attempt(np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64), 0, 1.0)
    return taken


def k_seq(p: ArrayLike, q: ArrayLike, k: int) -> tuple[float, float]:
    """(probability that one is taken, rho) of SpecTr's sequential rule (arXiv 2310.15141).

    A candidate x passes with min(1, p / (rho q)); rho solves 1 - (1 - b)^k = rho b with b = sum of min(q, p / rho).
    """
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)

    def passes(rho: float) -> float:
        return one(p / rho, q)

    low, high = 1.0, float(k)
    for _ in range(200):
        middle = (low + high) / 2
        b = passes(middle)
        low, high = (middle, high) if 1 - (1 - b) ** k > middle * b else (low, middle)
    return 1 - (1 - passes(high)) ** k, high


def optimum(p: ArrayLike, q: ArrayLike, k: int, *, replacement: bool) -> float:
    """The most any rule can reach: 1 + min over sets H of tokens of p(H) - P(all k candidates lie in H).

    It equals the optimum of the transport problem between candidates and output (arXiv 2502.18779). All sets are
    tried: for small vocabularies.
    """
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)

    def within(tokens: tuple[int, ...]) -> float:
        if replacement:
            return float(q[list(tokens)].sum()) ** k
        total = 0.0
        for order in permutations(tokens, k):
            probability, left = 1.0, 1.0
            for token in order:
                probability *= q[token] / left
                left -= q[token]
            total += probability
        return total

    sets = (tokens for size in range(1, len(p) + 1) for tokens in combinations(range(len(p)), size))
    return 1 + min(0.0, min(float(p[list(tokens)].sum()) - within(tokens) for tokens in sets))


def _normal(x: Array) -> Array:
    total = x.sum()
    return x / total if total > _NOTHING else np.zeros_like(x)
