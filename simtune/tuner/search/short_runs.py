"""Short runs before full ones: they rule plans out at a lower rate, and show where the highest rate lies.

A run of n requests that misses the SLO at a rate r proves that no draw keeps it above r x allowance(n)
(`simtune.tuner.doubt.draw_spread`). So a run of a quarter of the requests that misses at r x allowance(n) /
allowance(n / 4) proves as much as a full one at r: the error that the certificate states is the same. Plans that are
far from the best one are ruled out so, at a quarter of the cost. A short run that meets the SLO proves nothing; the
full one follows. Both runs see the same first requests.
"""

from __future__ import annotations

from simtune.specs.workload import FixedInterval, Gamma, Poisson
from simtune.tuner.doubt.draw_spread import allowance
from simtune.tuner.question import Question
from simtune.tuner.space.candidates import Candidate

SHORTER = 4
"""Factor between the lengths of runs."""
LEAST = 400
"""Fewest requests of a short run: the spread between draws was not measured below."""


def short_lengths(question: Question, candidate: Candidate) -> tuple[int, ...]:
    """Return the requests of the short runs of a plan, the fewest first; empty if short runs do not resemble full ones.

    They do not if a rate changes over time, if requests come only when others are answered, or if prompts share
    prefixes: a cache that was filled for a shorter time finds less, so that a short run may miss what a full one meets.
    """
    load = question.workload
    steady = isinstance(load.arrivals, Poisson | Gamma | FixedInterval) and not load.waits_for_answers
    shared = question.sends_families or load.batch or question.stream(candidate, requests=1).hash_ids is not None
    if not steady or shared or question.trace is not None:
        return ()
    lengths, requests = list[int](), question.requests // SHORTER
    while requests >= LEAST:
        lengths.insert(0, requests)
        requests //= SHORTER
    return tuple(lengths)


def lower_rate(rate_rps: float, requests: int, shorter: int) -> float:
    """Return the rate at which a miss of a run of `shorter` requests proves as much as one of `requests` requests."""
    return rate_rps * allowance(requests) / allowance(shorter)
