"""Short runs before full ones: they rule plans out at a lower rate, and show where the highest rate lies.

Plans are compared on the same requests, where the ratio of their rates differs from that on any by a factor of
`of_ratio(n)` (`simtune.tuner.doubt.draw_spread`). So a run of a quarter of the requests that misses the SLO at
r x of_ratio(n) / of_ratio(n / 4) proves as much as a full one at r. Plans that are far from the best one are ruled out
so, at a quarter of the cost. A short run that meets the SLO proves nothing; the full one follows. Both runs see the
same first requests.

Short runs also show which rate to try next. One whose requests all arrive before the first of them would be answered
shows nothing: on many GPUs no prompt is left to stall their decodes. It counts as missing the SLO there.
"""

from __future__ import annotations

import math
from dataclasses import replace

from simtune.specs.workload import FixedInterval, Gamma, Poisson
from simtune.tuner.question import Question
from simtune.tuner.search.climb import SimulationFinding
from simtune.tuner.space.candidates import Candidate

LIFETIME = 1.0
"""Mean end-to-end latencies that the arrivals of a run last at least, if it shows where the highest rate lies."""
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


def lasting(finding: SimulationFinding, least: float = LIFETIME) -> int:
    """Return the requests with which a short run that meets the SLO would last `least` lifetimes, and a fifth more; 0
    if it does, or misses the SLO."""
    lifetimes = finding.summary.lifetimes
    if not finding.met or lifetimes is None or lifetimes >= least:
        return 0
    return math.ceil(1.2 * least / max(lifetimes, 1e-9) * finding.summary.requests)


def as_shown(finding: SimulationFinding, least: float = LIFETIME) -> SimulationFinding:
    """Return the finding of a short run as it counts for the rate to try next: missed if it lasts less than `least`
    lifetimes."""
    return replace(finding, met=False, strain=None) if lasting(finding, least) else finding
