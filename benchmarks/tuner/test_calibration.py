"""Whether stated probabilities come true: "this plan beats that one with P", over truths that are drawn.

    python -m pytest benchmarks/tuner/test_calibration.py -m benchmark_only -s

Random studies are searched on profiles as they are, and their best plans are compared in worlds, as `simtune optimize
--worlds` does. Then the truth is drawn 50 times for every study, by other draws than those of the worlds, and all plans
are simulated in it: how often is the one worth more than the other (ties half) where P was stated? Most plans are too
far apart for any doubt; so each pair is asked at a price of the second, drawn around that at which both are worth the
same as predicted. Pairs of which all worlds say the same say nothing, and are left out. Truths of four kinds:

* as stated: a normal error of every kind of operator, as large as `spreads` says, and one of acceptance;
* skewed: errors as large, but exponential, long on the side of slow operators;
* by shape: one normal error of every operator, as large for each single call as the profile says of its shape, where
  worlds have one size for all calls of a kind, and errors of their own for parts that one operator does (`head` is a
  GEMM);
* half by shape: half of that variance is each shape's own, alike for shapes that are less than about an octave apart.

The first is what is claimed, and asked of all studies; the others, asked of some, say what the claim is worth where its
assumptions do not hold.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, count, pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import simtune.costs.iteration
from benchmarks.results import Recorder
from simtune.api import load_question
from simtune.arrays import Array
from simtune.costs.operators import Chip, operator_key
from simtune.costs.predict import Predictor, Profile
from simtune.errors import Infeasible
from simtune.results.result import WHOLE
from simtune.sim.drawn_worlds import Blueprint, PerturbedWorld, spreads
from simtune.specs.acceptance import PerPosition
from simtune.specs.hardware import Hardware, OperatorKind
from simtune.specs.workload import Slo
from simtune.tuner.bounds.best_case import sustained_rps
from simtune.tuner.doubt.confidence import Confidence, RivalPlan, confidence, highest, judge
from simtune.tuner.doubt.robust import contenders
from simtune.tuner.drafting import Draft
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from tests.tuner.test_exhaustive import random_question

pytestmark = pytest.mark.benchmark_only

STUDIES, ELSEWHERE, TRUTHS, WORLDS = 12, 3, 50, 40
"""Studies, and those of which truths of the other kinds are drawn; truths and worlds of each."""
PLANS = 4
"""Plans of a study that are compared, each with each."""
AROUND = 1.5
"""Standard deviations of the gap up to which a price makes up for it."""
SPECULATION = Path(__file__).resolve().parents[2] / "examples" / "speculation" / "study.yaml"
SMALLER = [
    "search.requests=100",
    "slo.tpot_s.p99=0.03",
    "search.max_num_seqs=[64]",
    "search.max_num_batched_tokens=[2048]",
]
BINS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
ENOUGH = 100
"""Judgements in a bin, those of two pairs: of fewer the share says little."""
SKEWED, BY_SHAPE, HALF = "skewed", "by shape", "half by shape"
STATED = "as stated"
OTHERS = (SKEWED, BY_SHAPE, HALF)


@dataclass(frozen=True)
class Off(Mapping[str, float]):
    """Errors of one truth in units of their spread, by the name of what is off; drawn when first asked for."""

    seed: int
    skewed: bool = False

    def __getitem__(self, name: str) -> float:
        draw = np.random.default_rng((self.seed, crc32(name.encode())))
        return float(draw.exponential() - 1 if self.skewed else draw.standard_normal())

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class TruePredictor(Predictor):
    """An operator that is off by what its profile says of each shape; with `off` None it is as predicted."""

    known: dict[tuple[Any, ...], tuple[Array, Array]] = {}  # noqa: RUF012 - what profiles say is the same in all truths

    def __init__(self, plain: Predictor, hardware: Hardware, off: Off | None, own_share: float) -> None:
        device = hardware.device
        super().__init__(plain.operator, device.processors, hardware.arrays, Chip.of(device))
        operator = plain.operator
        self._key = operator_key(operator.kind, operator.dtype, operator.kv_dtype, operator.variant)
        self._on = f"{hardware.name} {operator.residual is None} {not operator.curves}"
        self._off, self._own_share = off, own_share

    def seconds(self, **shape: Any) -> Array:
        """See `Predictor.seconds`."""
        columns = np.broadcast_arrays(*(np.asarray(x, dtype=float) for x in shape.values()))
        asked = (self._on, self._key, *shape, columns[0].shape, *(x.tobytes() for x in columns))
        if asked not in self.known:
            self.known[asked] = super().seconds(**shape), self.log_sd(**shape)
        seconds, log_sd = self.known[asked]
        if self._off is None:
            return seconds.copy()
        error: float | Array = math.sqrt(1 - self._own_share) * self._off[self._key.split(".")[0]]
        if self._own_share:
            error = error + math.sqrt(self._own_share) * self._of_shape(columns, self._off.seed)
        return np.asarray(seconds * np.exp(log_sd * error))

    def _of_shape(self, columns: Sequence[Array], seed: int, waves: int = 64) -> Array:
        """A smooth random field over logs of the shape with variance one, by random waves."""
        draw = np.random.default_rng((seed, crc32(self._key.encode()), 1))
        sizes = np.log2(np.maximum(np.stack(columns, axis=-1), 1))
        frequency, phase = draw.standard_normal((sizes.shape[-1], waves)), draw.uniform(0, 2 * np.pi, waves)
        return np.asarray(math.sqrt(2 / waves) * np.cos(sizes @ frequency + phase).sum(axis=-1))


@contextmanager
def operators_off(off: Off | None, own_share: float = 0.0) -> Iterator[None]:
    """What is compiled meanwhile is compiled of operators that are off."""

    class TrueProfile(Profile):
        def predictor(
            self, kind: OperatorKind, dtype: str, *, kv_dtype: str | None = None, variant: str | None = None
        ) -> Predictor:
            return TruePredictor(
                super().predictor(kind, dtype, kv_dtype=kv_dtype, variant=variant), self.hardware, off, own_share
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simtune.costs.iteration, "Profile", TrueProfile)
        yield


def worth(
    plan: RivalPlan, log_sd: Mapping[str, float], slo: Slo, kind: str, off: Mapping[str, float], step: float
) -> float:
    """What a plan is worth in a truth; the same ladder of rates as worlds have."""
    blueprint, acceptance = Blueprint.of(plan.deployment), off["acceptance"]
    if isinstance(off, Off) and kind in (BY_SHAPE, HALF):
        with operators_off(off, 0.5 if kind == HALF else 0.0):
            deployment = blueprint.deploy(PerturbedWorld(None, acceptance))
    else:
        factors = {name: math.exp(sd * off[name]) for name, sd in log_sd.items()}
        with operators_off(None):
            deployment = blueprint.deploy(PerturbedWorld(factors, acceptance))
    sustained = sustained_rps(deployment, plan.stream)
    if plan.rate_rps is None:
        if sustained < (plan.stream.offered_rate_rps or 0.0):
            return 0.0
        result = deployment.simulate(plan.stream, slo, cores=plan.cores)
        value = 1 / plan.weight if plan.worth == "weight" else 1 / float(np.nanmean(result.e2el_s))
        return value if result.meets_slo else 0.0

    def meets(rung: int) -> bool:
        if step**rung > sustained:
            return False
        stream = plan.stream.at_rate(step**rung)
        return deployment.simulate(stream, slo, cores=plan.cores, until_lost=WHOLE).meets_slo

    rung = highest(meets, math.floor(math.log(plan.rate_rps) / math.log(step) + 1e-9))
    return 0.0 if rung is None else step**rung / plan.weight


def doubted(draft: Draft) -> Draft:
    """A drafter whose acceptance is known to five points."""
    acceptance = draft.drafting.acceptance
    assert isinstance(acceptance.rates, PerPosition)
    rates = acceptance.rates.model_copy(update={"standard_error": (0.05,) * len(acceptance.rates.conditional)})
    return replace(draft, drafting=replace(draft.drafting, acceptance=acceptance.model_copy(update={"rates": rates})))


def questions() -> Iterator[Question]:
    """Random ones, and one whose acceptance is in doubt."""
    asked = load_question(str(SPECULATION), SMALLER)
    yield replace(asked, drafts=tuple(map(doubted, asked.drafts)))
    for seed in count(3000):
        yield random_question(seed, 8)


@dataclass(frozen=True)
class Judged:
    """A pair of plans: what was stated, and in what share of the truths it was so."""

    study: str
    stated: float
    true: Mapping[str, float]


@dataclass(frozen=True)
class Compared:
    """What the plans of a study are worth: rows of plans, columns of worlds or of truths."""

    study: str
    as_predicted: Array
    in_worlds: Array
    in_truths: Mapping[str, Array]

    def pairs(self, draw: np.random.Generator) -> Iterator[Judged]:
        """Those of which worlds differ, each at a price that is drawn."""
        for a, b in combinations(range(len(self.as_predicted)), 2):
            price = self._price(a, b, draw)
            (against,) = judge(["a", "b"], np.array([self.in_worlds[a], self.in_worlds[b] / price]), {}).versus
            if 0 < against.probability < 1 and against.gap != (0.0, 0.0):
                true = {
                    kind: float(np.mean((own > its / price) + 0.5 * (own == its / price)))
                    for kind, values in self.in_truths.items()
                    for own, its in [(values[a], values[b])]
                }
                yield Judged(self.study, against.probability, true)

    def _price(self, a: int, b: int, draw: np.random.Generator) -> float:
        """Of the second plan, about that at which it is worth as much; 1 where one is worth nothing."""
        near = draw.uniform(-AROUND, AROUND)
        if not min(self.as_predicted[a], self.as_predicted[b]):
            return 1.0
        both = (self.in_worlds[a] > 0) & (self.in_worlds[b] > 0)
        spread = float(np.std(np.log(self.in_worlds[b][both] / self.in_worlds[a][both]))) if both.any() else 0.0
        return float(self.as_predicted[b] / self.as_predicted[a]) * math.exp(near * spread)


def offs(seed: int, kind: str) -> list[Off]:
    """The truths of a study."""
    return [Off(7919 * truth + seed, kind == SKEWED) for truth in range(TRUTHS)]


def in_worlds(plans: Sequence[RivalPlan], question: Question) -> Array:
    """What plans are worth in the worlds of `confidence`: as it hands it to `judge`."""
    seen: list[Array] = []

    def spied(names: Sequence[str], values: Array, errors: Mapping[str, Array]) -> Confidence:
        seen.append(values)
        return judge(names, values, errors)

    study = question.study
    with pytest.MonkeyPatch.context() as patch, operators_off(None):  # which remembers what was predicted
        patch.setattr("simtune.tuner.doubt.confidence.judge", spied)
        confidence(
            plans, study.slo, worlds=WORLDS, seed=study.seed, tolerance=study.search.rate_tolerance, jobs=1
        )  # fmt: skip
    return seen[0]


def compared(question: Question, kinds: Sequence[str]) -> Compared | None:
    """The chosen plan of a study and runners-up; None where there is no plan, or only one."""
    try:
        tuned = optimize(question, jobs=1)
    except Infeasible:
        return None
    plans, study = contenders(tuned, PLANS - 1), question.study
    if len(plans) < 2:
        return None
    log_sds = []
    for plan in plans:
        stream = plan.stream if plan.rate_rps is None else plan.stream.at_rate(plan.rate_rps)
        log_sds.append(spreads(plan.deployment, plan.deployment.simulate(stream, study.slo, cores=plan.cores)))

    def worths(kind: str, truths: Sequence[Mapping[str, float]]) -> Array:
        step = 1 + study.search.rate_tolerance
        return np.array(
            [[worth(*one, study.slo, kind, off, step) for off in truths] for one in zip(plans, log_sds, strict=True)]
        )

    return Compared(
        study.name,
        worths(STATED, [defaultdict(float)])[:, 0],
        in_worlds(plans, question),
        {kind: worths(kind, offs(study.seed, kind)) for kind in kinds},
    )


def judged() -> list[Judged]:
    """Pairs of plans of as many studies as are asked for."""
    pairs: list[Judged] = []
    studies = 0
    for number, question in enumerate(questions()):
        those = compared(question, (STATED, *(OTHERS if studies < ELSEWHERE else ())))
        more = [] if those is None else [*those.pairs(np.random.default_rng(number))]
        pairs, studies = pairs + more, studies + bool(more)
        print(f"{question.study.name}: {len(more)} pairs, {time.process_time():.0f} CPU-s so far", flush=True)
        if studies == STUDIES:
            return pairs
    raise AssertionError("there are always more questions")


def test_stated_probabilities_come_true(record: Recorder) -> None:
    begun = time.process_time()
    pairs = judged()
    took_s = time.process_time() - begun
    print(
        f"\n{len(pairs)} pairs of plans of {STUDIES} studies, {WORLDS} worlds, {TRUTHS} truths each, {took_s:.0f} CPU s"
    )
    for kind in (STATED, *OTHERS):
        those = [pair for pair in pairs if kind in pair.true]
        worst = worst_bin(kind, np.array([p.stated for p in those]), np.array([p.true[kind] for p in those]))
        record(f"worst bin, truths {kind}", 100 * worst, "points", "lower")
        assert kind != STATED or (len(pairs) >= 40 and worst <= 0.10)


def worst_bin(kind: str, stated: Array, true: Array) -> float:
    """How far stated and true are apart at most, of all pairs and of bins with enough of them; prints all."""
    print(f"{kind}: {len(stated)} pairs, stated {stated.mean():.1%} on average, true {true.mean():.1%}")
    worst = abs(float(stated.mean() - true.mean()))
    for low, high in pairwise(BINS):
        those = (stated >= low) & (stated < high)
        if those.any():
            said, came, events = stated[those].mean(), true[those].mean(), int(those.sum()) * TRUTHS
            print(
                f"  {low:4.0%} to {high:4.0%}: {int(those.sum()):3} pairs, {events:5} judgements, "
                f"stated {said:6.1%}, true {came:6.1%}"
            )
            worst = max(worst, abs(float(said - came))) if events >= ENOUGH else worst
    return worst
