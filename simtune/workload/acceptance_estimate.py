"""Estimation of acceptance from what engines count: rates, and their standard errors.

All estimates are plain counts. R_j, the rounds that accepted at least j draft tokens, fall from R_0, all rounds; the
conditional acceptance is a_j = R_j / R_(j-1), a binomial share with standard error sqrt(a_j (1 - a_j) / R_(j-1)).
Functions raise ValueError if the counts cannot have come from any engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from simtune.arrays import Array
from simtune.specs.acceptance import BetaMixture, PerPosition, PerRank


def from_counters(drafts: float, accepted: Sequence[float]) -> PerPosition:
    """Estimate acceptance from vLLM's counters: rounds that drafted, and drafts accepted at each position.

    The second count is unconditional: a draft at position 3 is accepted only if those at 1 and 2 were. Every round must
    have drafted as many tokens as there are positions; otherwise see `from_windows`.
    """
    return _conditional([drafts, *accepted])


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the counts between two readings of the same counters. Counters never fall."""
    for name, value in after.items():
        if value < before.get(name, 0.0):
            raise ValueError(
                f"{name} falls from {before[name]:g} to {value:g}: the engine was restarted in between, or the files "
                "are in the wrong order; give two readings of one run, the earlier first"
            )
    if absent := sorted(set(before) - set(after)):
        raise ValueError(f"{absent[0]} is counted in the first reading and missing in the second")
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def from_histogram(rounds: Mapping[int, float] | Sequence[float], window: int | None = None) -> PerPosition:
    """Estimate acceptance from the number of rounds that accepted exactly j draft tokens, j = 0 ... g.

    Missing entries are zero. All rounds must have drafted `window` tokens, as many as the largest entry unless given.
    """
    counts = dict(rounds) if isinstance(rounds, Mapping) else dict(enumerate(rounds))
    if not counts or min(counts) < 0 or min(counts.values()) < 0:
        raise ValueError("a histogram needs counts, none of them negative, of 0 or more accepted tokens")
    longest = max(counts)
    if window is not None and window < longest:
        raise ValueError(f"rounds that accepted {longest} draft tokens cannot have drafted {window}")
    per_count = [counts.get(j, 0.0) for j in range((window or longest) + 1)]
    return _conditional(np.cumsum(per_count[::-1])[::-1].tolist())


def from_windows(rounds: Iterable[tuple[int, int]]) -> PerPosition:
    """Estimate acceptance from (accepted, drafted) of each round if their windows differ: the Kaplan-Meier estimate.

    At position j only rounds that drafted j tokens and accepted the j - 1 before are at risk. Counting all rounds
    instead is far too low, .52 for .70.
    """
    pairs = np.array(list(rounds), dtype=np.int64).reshape(-1, 2)
    accepted, drafted = pairs.T
    if len(pairs) == 0 or (accepted > drafted).any() or (accepted < 0).any():
        raise ValueError("a round cannot accept more draft tokens than it drafted")
    rates, errors = [], []
    for j in range(1, int(drafted.max(initial=0)) + 1):
        at_risk = int(((drafted >= j) & (accepted >= j - 1)).sum())
        if at_risk == 0:
            break
        rates.append(float(((drafted >= j) & (accepted >= j)).sum() / at_risk))
        errors.append(_binomial_error(rates[-1], at_risk))
    if not rates:
        raise ValueError("no round drafted a token")
    return PerPosition(conditional=tuple(rates), standard_error=tuple(errors))


def from_mean_length(length: float, window: int, rounds: float | None = None) -> PerPosition:
    """Estimate acceptance from the mean tokens per round, the bonus token included, with `window` drafts in each round.

    A single number determines one: the same acceptance a at every position, the root of 1 + a + ... + a^window =
    length. The standard error needs the number of rounds; it is that of the mean length over the slope of this sum.
    """
    from scipy.optimize import brentq

    if not 1 <= length <= window + 1:
        raise ValueError(
            f"a mean of {length:g} tokens per round is impossible with {window} draft tokens: "
            f"it lies between 1 and {window + 1}"
        )
    powers = np.arange(window + 1)

    def excess(a: float) -> float:
        return float(np.power(a, powers).sum()) - length

    a = float(brentq(excess, 0.0, 1.0, xtol=1e-15))
    errors = None
    if rounds:
        alive = np.power(a, powers)
        pmf = alive - np.append(alive[1:], 0.0)
        variance = float(pmf @ powers**2 - (pmf @ powers) ** 2)
        slope = float((powers[1:] * np.power(a, powers[1:] - 1)).sum())
        errors = (math.sqrt(variance / rounds) / slope,) * window
    return PerPosition(conditional=(a,) * window, standard_error=errors)


def from_requests(histograms: Sequence[Sequence[float]]) -> BetaMixture:
    """Estimate the spread of acceptance between requests from one histogram per request, as for `from_histogram`.

    Maximum likelihood of Beta(a, b), given that request i accepted s_i draft tokens and lost f_i: a beta-binomial.
    Standard errors are those of the curvature at the maximum.
    """
    from scipy.optimize import minimize
    from scipy.special import betaln

    if len(histograms) < 2:
        raise ValueError("the spread between requests needs histograms of at least two requests")
    accepted = np.array([sum(j * n for j, n in enumerate(h)) for h in histograms], dtype=np.float64)
    lost = np.array([sum(h[:-1]) for h in histograms], dtype=np.float64)

    def loss(log_ab: Array) -> float:
        a, b = np.exp(log_ab)
        return -float((betaln(a + accepted, b + lost) - betaln(a, b)).sum())

    fit = minimize(loss, [1.0, 0.5], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-8})
    a, b = (float(x) for x in np.exp(fit.x))
    errors = np.array([a, b]) * standard_errors(loss, fit.x)
    return BetaMixture(a=a, b=b, standard_error=tuple(errors.tolist()) if np.isfinite(errors).all() else None)


def from_ranks(taken: Sequence[Sequence[float]], reached: Sequence[Sequence[float]]) -> PerRank:
    """Estimate acceptance from the number of times the candidate of each depth and rank was taken, and the number of
    rounds that reached that depth with at least that number of candidates.
    """
    rates, errors = [], []
    for depth, (hits, rounds) in enumerate(zip(taken, reached, strict=True), start=1):
        if len(hits) != len(rounds) or any(not 0 <= h <= n or n <= 0 for h, n in zip(hits, rounds, strict=True)):
            raise ValueError(f"depth {depth}: candidates taken more often than rounds reached them, or never reached")
        row = [h / n for h, n in zip(hits, rounds, strict=True)]
        rates.append(tuple(row))
        errors.append(tuple(_binomial_error(a, n) for a, n in zip(row, rounds, strict=True)))
    return PerRank(probability=tuple(rates), standard_error=tuple(errors))


def from_top_k(accuracy: Sequence[Sequence[float]]) -> PerRank:
    """Estimate acceptance from cumulative accuracies: `accuracy[d][k]`, the token is among the k + 1 likeliest at depth
    d + 1."""
    rows = []
    for depth, row in enumerate(accuracy, start=1):
        ranks = np.diff(np.array([0.0, *row]))
        if (ranks < 0).any():
            raise ValueError(f"depth {depth}: accuracy falls with more candidates, which cumulative accuracy cannot")
        rows.append(tuple(ranks.tolist()))
    return PerRank(probability=tuple(rows))


def _conditional(at_least: Sequence[float]) -> PerPosition:
    """Estimate acceptance from R_0, R_1, ... R_g."""
    if len(at_least) < 2 or at_least[0] <= 0:
        raise ValueError("there is no round that drafted anything")
    for j, (before, now) in enumerate(pairwise(at_least), start=1):
        if not 0 <= now <= before:
            raise ValueError(
                f"position {j} was accepted {now:g} times and the one before {before:g} times: a draft is accepted "
                "only if all before it were, so counts cannot rise"
            )
    # Positions that no round reached are unknown, not 0.
    reached = [(a, b) for a, b in pairwise(at_least) if a > 0]
    rates = [now / before for before, now in reached]
    errors = [_binomial_error(rate, before) for rate, (before, _) in zip(rates, reached, strict=True)]
    return PerPosition(conditional=tuple(rates), standard_error=tuple(errors))


def _binomial_error(share: float, trials: float) -> float:
    return math.sqrt(max(0.0, share * (1 - share)) / trials)


def standard_errors(loss: Callable[[Array], float], at: Array) -> Array:
    """Standard errors of maximum-likelihood estimates in the coordinates of `loss`.

    They are the inverse of its curvature, by differences.
    """
    step = 1e-3
    size = len(at)
    hessian = np.empty((size, size))
    for i in range(size):
        for j in range(size):
            e, f = step * np.eye(size)[i], step * np.eye(size)[j]
            hessian[i, j] = (loss(at + e + f) - loss(at + e - f) - loss(at - e + f) + loss(at - e - f)) / (4 * step**2)
    with np.errstate(invalid="ignore"):
        errors: Array = np.sqrt(np.diag(np.linalg.pinv(hessian)))
    return errors
