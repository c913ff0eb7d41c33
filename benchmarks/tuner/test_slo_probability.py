"""Whether P(SLO holds), as every search states it, is what 200 simulated worlds say, and what it costs.

    python -m pytest benchmarks/tuner/test_slo_probability.py -m benchmark_only -s

The studies of examples/ with fewer requests, two of them on a card whose operators are carried over from another one,
some at a given load, and random small ones. Of each the chosen plan is simulated in the very worlds that were drawn
(`simtune.sim.uncertainty`): the share that keeps the SLO is to lie between the stated ends. So is, less strictly, the
share at the rate that is stated as the safe one, and the ends of the intervals of latencies.
"""

from __future__ import annotations

import math
import time
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.api import load_question
from simtune.errors import Infeasible
from simtune.sim.run_basis import pool_bases
from simtune.sim.uncertainty import uncertainty
from simtune.tuner.doubt.slo_probability import WORLDS, SloProbability, slo_probability
from simtune.tuner.question import Question
from simtune.tuner.search.front import answer
from simtune.tuner.search.rate_sweep import sweeps
from simtune.tuner.trial import Tuned
from tests.tuner.test_exhaustive import random_question

pytestmark = pytest.mark.benchmark_only

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FEWER = ["search.requests=1000"]
ONE_GPU = ["search.tp=[1]", "search.pp=[1]"]
STUDIES = {
    "quickstart": ("quickstart", FEWER),
    "code-completion": ("code-completion", [*FEWER, "search.tp=[2,4]", "search.pp=[1]"]),
    "llama-70b": ("llama-70b", [*FEWER, "search.tp=[4,8]", "search.pp=[1]"]),
    "speculation": ("speculation", FEWER),
    "closed-loop": ("closed-loop", ()),
    "carried over": ("quickstart", [*FEWER, *ONE_GPU, "hardware.profile=mi300x"]),
    "carried over, given load": ("quickstart", [*FEWER, *ONE_GPU, "hardware.profile=mi300x", "objective=gpus"]),
    "given load": ("quickstart", [*FEWER, *ONE_GPU, "objective=gpus", "slo.tpot_s.p99=0.0125"]),
}
RANDOM = 8
"""Random studies that have limits and an answer."""
SETTLED = 0.05
"""So much less than is stated may keep the SLO at the safe rate, in the middle of the studies."""


class Held(NamedTuple):
    """What was stated of a study, beside all worlds simulated."""

    study: str
    stated: SloProbability
    worlds: float
    """Share that keep the SLO."""
    safe: float | None
    """The same at the rate that is said to be safe."""
    ends: float
    """Largest log ratio of a finite end of a limit's interval to that of the worlds."""
    cost: float
    """CPU time over that of the search."""

    @property
    def inside(self) -> bool:
        return self.stated.low - 1e-9 <= self.worlds <= self.stated.high + 1e-9

    def __str__(self) -> str:
        o = self.stated
        safe = "" if self.safe is None else f"; at the safe rate {self.safe:.1%}"
        return (
            f"{self.study:26} stated {o.probability:6.1%} ({o.low:6.1%} to {o.high:6.1%}), "
            f"worlds {self.worlds:6.1%} {'inside' if self.inside else 'OUTSIDE'}{safe}; ends off by {self.ends:.1%}; "
            f"{o.simulations} simulations, {self.cost:.1%} of the search"
        )


def questions() -> dict[str, Question]:
    those = {
        name: load_question(str(EXAMPLES / folder / "study.yaml"), settings)
        for name, (folder, settings) in STUDIES.items()
    }
    return those | {f"random {seed}": random_question(seed, 8) for seed in islice(count(4000), 3 * RANDOM)}


def held(name: str, question: Question) -> Held | None:
    """None where no plan keeps the SLO."""
    begun = time.process_time()
    try:
        tuned = answer(question, jobs=1)
    except Infeasible:
        return None
    searched = time.process_time()
    sweep, bases = sweeps(tuned, jobs=1)[0], pool_bases(tuned.deployment, tuned.result)
    swept = time.process_time()
    stated = slo_probability(tuned, sweep, bases)
    said = time.process_time()
    assert stated is not None
    safe = None if stated.safe_rate_rps is None else _worlds(tuned, stated.safe_rate_rps)[0]
    share, ends = _worlds(tuned, None)
    apart = [
        abs(math.log(mine / theirs))
        for own, of_worlds in zip(stated.limits, ends, strict=True)
        for mine, theirs in zip((own.low_s, own.high_s), of_worlds, strict=True)
        if mine and theirs
    ]
    return Held(name, stated, share, safe, max(apart, default=0.0), (said - swept) / (searched - begun))


def _worlds(tuned: Tuned, rate_rps: float | None) -> tuple[float, list[list[float | None]]]:
    """(share that keeps the SLO, the interval of each limit) of the worlds, all simulated."""
    study, stream = tuned.question.study, tuned.result.stream
    at = stream if rate_rps is None else stream.at_rate(rate_rps)
    drawn = uncertainty(tuned.deployment, at, study.slo, count=WORLDS, seed=study.seed, jobs=1)
    return drawn.slo_probability, [one["value_s"] for one in drawn.intervals["slo"]]


def test_stated_probabilities_are_those_of_all_worlds(record: Recorder) -> None:
    those: list[Held] = []
    for name, question in questions().items():
        if sum(one.study.startswith("random") for one in those) == RANDOM:
            break
        one = held(name, question)
        if one is not None:
            those.append(one)
            print(one, flush=True)
    inside = float(np.mean([one.inside for one in those]))
    apart = [abs(one.stated.probability - one.worlds) for one in those]
    safe = [one.safe for one in those if one.safe is not None]
    print(
        f"{len(those)} studies: {inside:.0%} inside, off by {max(apart):.1%} at most, {np.mean(apart):.1%} on average"
    )
    record("P of all worlds inside what is stated", inside, "of studies", "higher")
    record("P off at most", 100 * max(apart), "points", "lower")
    record("worst P at the safe rate", min(safe), "of worlds", "higher")
    record("cost, median", float(np.median([one.cost for one in those])), "of the search", "lower")
    assert len(those) >= 12
    assert inside >= 0.9
    assert np.median(safe) >= 0.9 - SETTLED
