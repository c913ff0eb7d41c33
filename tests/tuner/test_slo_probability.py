"""P(SLO holds) without simulating every world: near what all of them say, and within what is stated of it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import simtune.tuner.doubt.slo_probability
from simtune.results.summary import SloLimit
from simtune.sim.run_basis import pool_bases, timed_steps
from simtune.sim.uncertainty import uncertainty
from simtune.specs.catalog import load_hardware
from simtune.specs.workload import Poisson, Slo
from simtune.tuner.doubt.slo_probability import (
    SloProbability,
    StretchCurve,
    _not_above_missed,
    _of_acceptance,
    _unfelt,
    slo_probability,
)
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.rate_sweep import sweeps
from simtune.tuner.trial import Attempt, Tuned
from tests.tuner.test_search import LOAD, question

WORLDS = 30
"""Of which all are simulated here."""
ONE_CUT: dict[str, Any] = {"tp": (1,), "pp": (1,), "max_num_seqs": (64,), "max_num_batched_tokens": (2048,)}


def stated(tuned: Tuned) -> SloProbability | None:
    return slo_probability(tuned, sweeps(tuned, jobs=1)[0], pool_bases(tuned.deployment, tuned.result))


def share_of_worlds(tuned: Tuned, rate_rps: float | None = None) -> float:
    study, stream = tuned.question.study, tuned.result.stream
    at = stream if rate_rps is None else stream.at_rate(rate_rps)
    return uncertainty(tuned.deployment, at, study.slo, count=WORLDS, seed=study.seed, jobs=1).slo_probability


@pytest.fixture(autouse=True)
def fewer_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simtune.tuner.doubt.slo_probability, "WORLDS", WORLDS)


@pytest.fixture(scope="module")
def searched() -> Tuned:
    asked = question(workload=LOAD.model_copy(update={"requests": 200}), **ONE_CUT)
    return optimize(replace(asked, hardware=(load_hardware("h100-sxm-trtllm"),)), jobs=1)


def test_a_searched_rate_is_as_sure_as_all_worlds_say(searched: Tuned) -> None:
    found = stated(searched)
    assert found is not None
    assert found.simulations == 0, "the sweep of rates says it"
    assert found.low <= share_of_worlds(searched) <= found.high, found
    assert found.probability is not None
    assert 0 < found.low < found.probability < 1, "the highest rate lies at the edge"
    assert found.high - found.low > 0.5, "one draw of a few hundred requests says little of the rate"
    assert found.value is not None
    low, high = found.value
    assert low is not None
    assert high is not None
    assert low < searched.value < high
    for one, limit in zip(found.limits, searched.result.limits, strict=True):
        assert one.low_s is not None
        assert limit.value_s is not None
        assert one.low_s < limit.value_s
        assert one.high_s is None or limit.value_s <= one.high_s * (1 + 1e-5), "at least that of the run, rounded"


def test_the_safe_rate_is_safe(searched: Tuned) -> None:
    found = stated(searched)
    assert found is not None
    assert found.safe_rate_rps is not None
    assert searched.chosen.rate_rps is not None
    assert found.safe_rate_rps < searched.chosen.rate_rps
    assert share_of_worlds(searched, found.safe_rate_rps) >= found.safe_probability - 0.07


def test_a_limit_beyond_the_knots_is_reached_where_the_curve_goes_on_to() -> None:
    curve = StretchCurve.of({-0.1: math.exp(-0.2), 0.0: 1.0, 0.1: math.exp(0.2)})
    assert curve.reached(np.array([0.1, 0.4, -0.3])) == pytest.approx([0.05, 0.2, -0.2])
    assert curve.at(np.array([0.2, -0.2])) == pytest.approx([0.4, -0.3])
    assert curve.reached(np.array([0.3]), less=1.0) == pytest.approx([0.3])
    level = StretchCurve.of({0.0: 1.0, 0.1: 1.0})
    assert level.reached(np.array([0.5])) == np.inf
    piling = StretchCurve.of({0.0: 1.0, 0.1: math.exp(0.2), 0.3: math.inf})
    assert piling.reached(np.array([5.0])) == pytest.approx([0.2])


def test_a_rate_that_only_piles_up_for_ever_is_not_felt_by_a_run_that_keeps_its_limits_beyond_it() -> None:
    ttft = {"class": None, "metric": "ttft", "statistic": "mean", "limit_s": math.e, "value_s": 1.0, "met": True}
    limits = [SloLimit.model_validate(ttft)]
    kept = [StretchCurve.of({0.0: 1.0, 0.1: math.exp(0.3), 0.3: math.exp(0.5)})]
    assert _unfelt([kept[0].with_knot(0.02, 1.02)], kept, limits)
    assert not _unfelt(kept, kept, limits), "nothing was missed"
    missed = [StretchCurve.of({0.0: 1.0, 0.1: math.exp(1.3)})]
    assert not _unfelt([missed[0].with_knot(0.02, 1.02)], missed, limits), "the run misses its limits there too"


def test_few_requests_may_look_as_if_they_piled_up_where_they_do_not() -> None:
    curve = StretchCurve.of({-0.7: math.inf, -0.1: 0.5, 0.0: 1.0, 0.1: math.inf})
    assert curve.stretch.tolist() == [-0.1, 0.0, 0.1]
    assert np.isfinite(curve.latency).tolist() == [True, True, False]


def test_at_a_given_load_a_few_worlds_are_simulated() -> None:
    load = LOAD.model_copy(update={"arrivals": Poisson(rate_rps=16.0), "requests": 200})
    limits = Slo(ttft_s={"p99": 0.5}, tpot_s={"p99": 0.02}, e2el_s={"p90": 5.0})
    loose = optimize(question(workload=load, objective="gpus", slo=limits, **ONE_CUT), jobs=1)
    tpot = loose.result.statistic("tpot", "p99")
    assert tpot is not None
    tight = Slo(tpot_s={"p99": 1.02 * tpot})
    tuned = optimize(question(workload=load, objective="gpus", slo=tight, **ONE_CUT), jobs=1)
    found = stated(tuned)
    assert found is not None
    assert 2 <= found.simulations <= 4
    assert found.low <= share_of_worlds(tuned) <= found.high, found
    assert (found.value, found.safe_rate_rps) == (None, None)
    sure = stated(optimize(question(workload=load, objective="gpus", slo=Slo(tpot_s={"p99": 1.0}), **ONE_CUT), jobs=1))
    assert sure is not None
    assert (sure.probability, sure.low, sure.high, sure.simulations) == (1.0, 1.0, 1.0, 2)


def test_nothing_is_said_where_nothing_is_limited_or_the_search_was_interrupted(searched: Tuned) -> None:
    assert stated(replace(searched, interrupted=True)) is None
    load = LOAD.model_copy(update={"requests": 50})
    assert stated(optimize(question(workload=load, objective="e2el", slo=Slo(), **ONE_CUT), jobs=1)) is None


def test_steps_take_by_kind_what_they_take_in_all(searched: Tuned) -> None:
    """Where the host hides behind the GPU, kernels are the whole step."""
    steps = [*timed_steps(searched.deployment, searched.result)]
    assert len(steps) > 20
    for step, by_kind, seconds in steps:
        assert sum(by_kind.values()) == pytest.approx(seconds, rel=1e-9)
        assert (by_kind["decode_attention"] > 0) == (step.num_decodes > 0)
        assert (by_kind.get("prefill_attention", 0.0) > 0) == bool(step.chunks)


# --- curves -----------------------------------------------------------------------------------------------


def test_a_curve_is_straight_between_its_knots_in_logarithms() -> None:
    curve = StretchCurve.of({0.0: 1.0, 1.0: math.e**2})
    assert curve.at(np.array([-1.0, 0.0, 0.5, 1.0, 2.0])).tolist() == pytest.approx([-1.0, 0.0, 1.0, 2.0, 4.0])
    assert curve.reached(np.array([-1.0, 1.0, 3.0])).tolist() == pytest.approx([-1.0, 0.5, 1.5])
    assert curve.reached(np.array([0.5]), less=1.0).tolist() == pytest.approx([0.5]), "the rest of it doubles by e"


def test_requests_pile_up_half_way_to_the_knot_that_says_so() -> None:
    curve = StretchCurve.of({0.0: 1.0, 0.1: math.exp(0.2), 0.3: math.inf})
    assert curve.at(np.array([0.15, 0.21])).tolist() == pytest.approx([0.3, math.inf])
    assert float(curve.reached(np.array(5.0))) == pytest.approx(0.2)
    only = StretchCurve.of({0.0: 1.0, 0.2: math.inf})
    assert float(only.reached(np.array(1.0))) == pytest.approx(0.1)


def test_noise_that_falls_is_smoothed_and_what_is_known_better_counts() -> None:
    curve = StretchCurve.of({-0.1: 1.1, 0.0: 1.0, 0.1: 1.2})
    assert np.diff(curve.latency).min() >= 0
    sooner = StretchCurve.of({0.0: 1.0, 1.0: math.e}).with_knot(0.1, 0.5)
    assert float(sooner.reached(np.array(0.25))) == pytest.approx(0.05)
    assert sooner.with_knot(0.05, 0.1) is sooner
    assert sooner.gap(0.05) == pytest.approx(0.1)


# --- knots that a search and the acceptance of drafts add ---------------------------------------------------


def limit_of(limit_s: float) -> SloLimit:
    line = {"class": None, "metric": "ttft", "statistic": "mean", "limit_s": limit_s, "value_s": 1.0, "met": True}
    return SloLimit.model_validate(line)


@pytest.mark.parametrize(
    ("missed", "knot"),
    [
        ([], None),
        # A miss at the rate itself, on another draw, or below it, shows nothing of higher rates.
        ([10.0, 9.0], None),
        # The lowest miss above it is at u = 0.1: there latencies over e^u reach the limit, e.
        ([9.0, 10.0, 10 * math.exp(0.3), 10 * math.exp(0.1)], (0.1, 1.1)),
        # At 1.5 the curve goes on to 3, above 1 + 1.5.
        ([10 * math.exp(1.5)], None),
    ],
)
def test_the_limit_that_comes_first_is_reached_where_the_search_saw_a_miss(
    missed: list[float], knot: tuple[float, float] | None
) -> None:
    curves = [StretchCurve.of({0.0: 1.0, 1.0: math.e}), StretchCurve.of({0.0: 1.0, 1.0: math.e**2})]
    attempts = [Attempt(10.0, True), *(Attempt(rate, False) for rate in missed), Attempt(None, False)]
    few: Any = SimpleNamespace(
        rate_rps=10.0,
        tuned=SimpleNamespace(
            chosen=SimpleNamespace(tried=attempts),
            question=SimpleNamespace(study=SimpleNamespace(slo=SimpleNamespace(confidence=None))),
        ),
    )
    limits = [limit_of(math.e), limit_of(math.e)]
    slow, first = _not_above_missed(few, limits, curves)
    assert slow is curves[0], "its limit is reached later"
    if knot is None:
        assert first.stretch.tolist() == [0.0, 1.0]
        assert first.latency.tolist() == [0.0, 2.0]
    else:
        assert first.stretch.tolist() == pytest.approx([0.0, knot[0], 1.0])
        assert first.latency.tolist() == pytest.approx([0.0, knot[1], 2.0])
    few.tuned.question.study.slo.confidence = 0.9
    assert _not_above_missed(few, limits, curves) == curves, "misses with a margin are not those of the plan"


def test_drafts_that_are_kept_less_often_lengthen_a_plan_up_to_its_last_knot() -> None:
    """A standard error less takes each latency to that of u = 0.05, 0 (it falls) and 0.1 (it would be 0.5)."""
    curves = [StretchCurve.of({0.0: 1.0, 0.05: math.exp(0.05), 0.1: math.exp(0.2)})] * 3
    few: Any = SimpleNamespace(fewer_kept=lambda: [math.exp(0.05), 0.5, math.exp(1.4)])
    worlds: Any = SimpleNamespace(acceptance=np.array([-1.0, 0.0, 2.0]))
    added = _of_acceptance(few, curves, worlds)
    assert added.tolist() == [pytest.approx([u, 0.0, -2 * u], abs=1e-9) for u in (0.05, 0.0, 0.1)]
    few.fewer_kept = lambda: None
    assert _of_acceptance(few, curves, worlds).tolist() == [[0.0] * WORLDS] * 3
