"""How sure a choice is: shares of worlds, what to measure next, and stated probabilities that come true."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtr

from simtune.costs.function import StepFunction
from simtune.errors import UsageError
from simtune.sim.deployment import deploy
from simtune.sim.drawn_worlds import ACCEPTANCE, DrawnWorlds
from simtune.sim.plan_parts import OwnCosts
from simtune.specs.workload import Poisson, Slo
from simtune.tuner.doubt.confidence import Confidence, RivalPlan, confidence, highest, judge
from simtune.tuner.doubt.robust import contenders as contenders_of
from simtune.tuner.doubt.robust import of_search, robust
from simtune.tuner.search.best_first import optimize
from tests.tuner import truths
from tests.tuner.test_search import LOAD, question

RNG = np.random.default_rng(0)


def normals(*names: str, count: int = 4000) -> dict[str, Any]:
    return {name: RNG.standard_normal(count) for name in names}


# --- what the worlds say ----------------------------------------------------------------------------------


def test_ties_are_halves_and_gaps_are_relative() -> None:
    values = np.array([[2.0, 2.0, 2.0, 2.0], [1.0, 2.0, 4.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    said = judge(["a", "b", "c"], values, {})
    b, c = said.versus
    assert (b.candidate, b.probability, c.probability) == ("b", 0.5, 1.0)
    assert b.gap == (-0.5, 1.0)
    assert c.gap == (None, None), "more than nothing is more without bound"
    assert said.best == 0.75
    assert said.nearest == b
    assert (said.right, said.to_measure) == (None, ()), "four worlds are too few for a line"
    assert judge(["a"], values[:1], {}).nearest is None
    both_miss = judge(["a", "b"], np.zeros((2, 3)), {})
    assert both_miss.versus[0].probability == 0.5
    assert both_miss.versus[0].gap == (0.0, 0.0)


def test_the_robust_plan_is_best_where_things_go_badly() -> None:
    z = RNG.standard_normal(400)
    said = judge(["bold", "steady"], np.array([10 + 3 * z, 9 + 0.1 * z]), {"gemm": z})
    assert said.robust(0.1) == "steady"
    assert said.robust(0.75) == "bold"
    assert said.versus[0].probability == pytest.approx(ndtr(1 / 2.9), abs=0.05)


def test_what_to_measure_is_what_would_settle_it() -> None:
    """Against fixing each error for good, world by world: the line's answer is the same."""
    z = normals("gemm", "decode_attention", "elementwise")
    slopes = {"gemm": 0.2, "decode_attention": 1.0, "elementwise": 0.02}
    gap = 0.3 + sum(b * z[name] for name, b in slopes.items()) + 0.1 * RNG.standard_normal(4000)
    said = judge(["a", "b"], np.array([100 + gap, np.full(4000, 100.0)]), z)
    assert [m.error for m in said.to_measure] == ["decode_attention", "gemm", "elementwise"]
    variance = sum(b * b for b in slopes.values()) + 0.01
    assert said.right == pytest.approx(ndtr(0.3 / math.sqrt(variance)), abs=0.02)
    for one in said.to_measure:
        b = slopes[one.error]
        means = 0.3 + b * RNG.standard_normal(20000)
        left = math.sqrt(variance - b * b)
        assert one.right_after == pytest.approx(np.mean(ndtr(np.abs(means) / left)), abs=0.02)
        assert one.share == pytest.approx(b * b / variance, abs=0.02)


def test_shared_errors_make_a_choice_surer(oracle_dir: Path) -> None:
    """The oracle's two plans: 95 % of the error shared, or none of it; the same mean gap."""
    oracle = json.loads((oracle_dir / "stats.json").read_text())
    both = oracle["common_random_numbers"]
    gap = both["mean_a"] - both["mean_b"]
    for case in ("p_beats_shared_error", "p_beats_independent_error"):
        a = both["mean_a"] + oracle[case]["sd_diff"] * RNG.standard_normal(20000)
        said = judge(["a", "b"], np.array([a, np.full(20000, both["mean_a"] - gap)]), {})
        assert said.versus[0].probability == pytest.approx(oracle[case]["p_a_better"], abs=0.04)


@pytest.mark.parametrize("top", [-300, -7, 0, 1, 2, 3, 5, 90, 399])
def test_the_highest_rung_is_found_from_anywhere(top: int) -> None:
    for near in (-3, 0, 2, 40):
        asked: list[int] = []
        assert highest(lambda rung, asked=asked: asked.append(rung) or rung <= top, near) == top  # type: ignore[misc]
        assert len(asked) == len(set(asked)) < 22


def test_a_ladder_that_never_meets_has_no_rung() -> None:
    assert highest(lambda rung: False, 0) is None
    top = highest(lambda rung: True, 0)
    assert top is not None
    assert top >= 400


def test_stated_probabilities_come_true() -> None:
    """50 truths: of each somebody measured a profile, by errors of known size, chose by it, and said how sure."""
    rng = np.random.default_rng(3)
    slopes = {"gemm": (1.0, 0.7), "decode_attention": (0.5, 0.9), "all_reduce": (0.0, 0.3)}
    log_sd, stated, right = 0.08, [], []
    for world in range(50):
        truth, measured = ({k: log_sd * rng.standard_normal() for k in slopes} for _ in range(2))
        base = rng.normal(0, 0.04)
        drawn = DrawnWorlds.of(60, seed=world).errors

        def value(plan: int, off: dict[str, Any], base: float = base) -> Any:
            return np.exp(base * plan - sum(s[plan] * off[k] for k, s in slopes.items()))

        profile = {k: truth[k] + measured[k] for k in slopes}
        predicted = [float(value(plan, profile)) for plan in (0, 1)]
        order = [0, 1] if predicted[0] >= predicted[1] else [1, 0]
        errors = {k: drawn[k] for k in slopes}
        redrawn = np.array([value(p, {k: profile[k] + log_sd * errors[k] for k in slopes}) for p in order])
        said = judge(["chosen", "rival"], redrawn, errors)
        stated.append(said.versus[0].probability)
        right.append(float(value(order[0], truth) > value(order[1], truth)))
    assert np.mean(stated) == pytest.approx(np.mean(right), abs=0.1)
    sure = np.array(stated) > np.median(stated)
    for part in (sure, ~sure):
        assert np.mean(np.array(stated)[part]) == pytest.approx(np.mean(np.array(right)[part]), abs=0.15)
    assert min(stated) < 0.75 < 0.95 < max(stated)


# --- by simulation ----------------------------------------------------------------------------------------


def contenders(device: Any) -> list[RivalPlan]:
    stream = truths.stream()
    return [RivalPlan(d.plan.name, d, stream, None, worth="e2el") for d in truths.deployments(device)]


@pytest.fixture(scope="module")
def said() -> Confidence:
    return confidence(contenders(truths.true_device()), Slo(), worlds=16, jobs=1)


def test_two_plans_in_the_same_worlds(said: Confidence) -> None:
    assert said.worlds == 16
    assert 0.2 < said.versus[0].probability < 1
    first = said.to_measure[0]
    assert first.error in ("all_reduce", "gemm"), "what the one plan has, and what the two share unequally"
    assert first.right_after >= (said.right or 0)
    for point in first.points:
        assert point.operator.startswith(first.error)
        assert point.hardware == "made-up"
        assert point.log_sd == pytest.approx(truths.LOG_SD)
        assert f"{point.operator} " in str(point)
    assert all("k=" in str(p) or "bytes=" in str(p) for p in first.points)
    lines = said.lines()
    assert lines[0].startswith("16 redrawn worlds")
    assert "beats tp1x2 with" in lines[1]
    assert lines[2].startswith(f"measure next: {first.error}")
    assert Confidence.model_validate(said.to_data()) == said
    json.dumps(said.to_data(), allow_nan=False)


def test_the_same_on_any_number_of_processes(said: Confidence) -> None:
    assert confidence(contenders(truths.true_device()), Slo(), worlds=16, jobs=2) == said


def test_a_plan_against_itself_is_even() -> None:
    one, _ = contenders(truths.true_device())
    said = confidence([one, one], Slo(), worlds=4, jobs=1)
    assert said.versus[0].probability == 0.5
    assert said.versus[0].gap == (0.0, 0.0)


def test_what_misses_the_slo_is_worth_nothing() -> None:
    said = confidence(contenders(truths.true_device()), Slo(ttft_s={"p99": 1e-6}), worlds=3, jobs=1)
    assert [q.at(0.5) for q in said.quantiles] == [0.0, 0.0]
    assert said.best == 1.0


def test_costs_from_outside_cannot_be_redrawn() -> None:
    own = deploy(
        truths.plan(1, 1), truths.MODEL, truths.true_device(), OwnCosts(StepFunction(lambda b, c, chunks: 0.01))
    )
    with pytest.raises(UsageError, match="brought from outside"):
        confidence([RivalPlan("own", own, truths.stream(20), None, worth="e2el")], Slo(), worlds=2, jobs=1)
    with pytest.raises(UsageError, match="no plan to judge"):
        confidence([], Slo(), worlds=2)


def test_a_rate_at_the_capacity_lies_within_the_interval_of_the_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without errors every world is the predicted one, so that the interval is the headline itself."""
    monkeypatch.setattr("simtune.tuner.doubt.confidence.spreads", lambda deployment, run: {})
    load = LOAD.model_copy(update={"requests": 60})
    one_card: dict[str, Any] = {
        "devices": 1,
        "tp": (1,),
        "pp": (1,),
        "max_num_seqs": (64,),
        "max_num_batched_tokens": (2048,),
    }
    tuned = optimize(question(workload=load, slo=Slo(ttft_s={"p50": 60.0}), **one_card), jobs=1)
    assert tuned.chosen.bounded_by == "capacity"
    quantiles = of_search(tuned, worlds=2, jobs=1).quantiles[0]
    assert quantiles.at(0.05) == quantiles.at(0.95) == pytest.approx(tuned.value)


def test_of_a_search() -> None:
    """By rate: in worlds with no error at all the values are those of the search."""
    load = LOAD.model_copy(update={"requests": 120})
    tuned = optimize(question(workload=load, max_num_seqs=(64,), pp=(1,)), jobs=1)
    said = of_search(tuned, worlds=3, rivals=1, jobs=1)
    named = [q.candidate for q in said.quantiles]
    chosen, (other,) = tuned.rows[0], [row for row in tuned.rows if row.candidate.name == named[1]]
    assert named == [chosen.candidate.name, other.candidate.name]
    assert 0.4 * tuned.value < said.quantiles[0].at(0.5) < 1.6 * tuned.value
    assert ACCEPTANCE not in {m.error for m in said.to_measure}, "nobody drafts"
    assert robust(tuned, said, 0.5) is tuned or said.robust(0.5) == other.candidate.name
    worst = judge([q.candidate for q in said.quantiles], np.array([[1.0, 5.0], [2.0, 2.0]]), {})
    steady = robust(tuned, worst, 0.1)
    assert steady.chosen is other
    assert (steady.chosen.status, chosen.status) == ("chosen", "feasible")
    assert "10% quantile of 2 redrawn worlds" in steady.chosen.reason
    assert steady.deployment.plan.name == steady.chosen.candidate.name == steady.deployment.plan.name
    assert steady.result.meets_slo


def test_rivals_need_not_have_been_simulated() -> None:
    """Those that could come nearest, by a bound or by a simulation; none that must do what another one does."""
    tuned = optimize(question(max_num_seqs=(8, 64, 128), pp=(1,), devices=2), jobs=1)
    rows = {row.candidate.name: row for row in tuned.rows}
    chosen, *rivals = contenders_of(tuned, 99)
    assert chosen.name == tuned.chosen.candidate.name
    assert any(rows[rival.name].simulations == 0 for rival in rivals)
    assert not any(rows[rival.name].same_as for rival in rivals)
    reach = [rival.rate_rps / rival.weight for rival in rivals if rival.rate_rps is not None]
    assert len(reach) == len(rivals)
    assert reach == sorted(reach, reverse=True)
    nobody = judge(["alone"], np.ones((1, 5)), {})
    assert nobody.lines() == ["5 redrawn worlds: there is no other plan to compare with"]


def test_a_plan_that_never_meets_the_slo_takes_nobodys_place() -> None:
    """Worth most in redrawn worlds, but as predicted not within the SLO at any rate: the chosen one stays as it is."""
    tuned = optimize(question(workload=LOAD.model_copy(update={"requests": 60}), max_num_seqs=(64,), pp=(1,)), jobs=1)
    chosen, other = tuned.rows[:2]
    asked = replace(tuned.question, study=tuned.question.study.model_copy(update={"slo": Slo(ttft_s={"p99": 1e-6})}))
    worst = judge([chosen.candidate.name, other.candidate.name], np.array([[1.0, 1.0], [2.0, 2.0]]), {})
    before = (other.status, other.reason, other.summary)
    stricter = replace(tuned, question=asked)
    assert robust(stricter, worst, 0.5) is stricter
    assert (other.status, other.reason, other.summary) == before
    assert chosen.status == "chosen"


@pytest.mark.parametrize(
    ("objective", "worth"),
    [("e2el", "e2el"), ("gpus", "weight"), *((name, name) for name in ("joules_per_token", "makespan"))],
)
def test_at_a_given_load_those_that_were_simulated_come_first(objective: str, worth: str) -> None:
    batch = objective == "makespan"
    load = LOAD.model_copy(update={"requests": 60, "batch": batch, "arrivals": Poisson(rate_rps=20.0)})
    asked = question(objective=objective, workload=load, max_num_seqs=(16, 64), pp=(1,), devices=2)
    tuned = optimize(asked, jobs=1)
    rows = {row.candidate.name: row for row in tuned.rows}
    chosen, *rivals = contenders_of(tuned, 99)
    assert chosen.name == tuned.chosen.candidate.name
    assert {c.worth for c in (chosen, *rivals)} == {worth}
    assert all(c.rate_rps is None for c in (chosen, *rivals)), "the load is given"
    seen = [rows[rival.name].summary is not None for rival in rivals]
    assert seen == sorted(seen, reverse=True), "what was simulated comes before what is only bounded"
    if objective == "gpus":
        assert [c.weight for c in (chosen, *rivals)] == [rows[c.name].candidate.num_gpus for c in (chosen, *rivals)]
    if objective == "joules_per_token":
        assert all(seen), "what idle GPUs draw ranks nobody"
    other = next(row for row in tuned.rows[1:] if row.candidate.name == rivals[0].name)
    worst = judge([chosen.name, rivals[0].name], np.array([[1.0, 1.0], [2.0, 2.0]]), {})
    steady = robust(tuned, worst, 0.5)
    result = asked.deploy(other.candidate, tuned.deployment.max_model_len).simulate(asked.stream(other.candidate))
    assert steady.chosen is other
    assert steady.result.offered_rate_rps == result.offered_rate_rps, "at the load of the study"
    assert steady.result.e2el_s.tolist() == result.e2el_s.tolist()


@pytest.mark.parametrize("requests", [30, 300])
def test_worlds_without_errors_are_what_the_search_saw(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few requests, too, that are over before it is felt that they pile up: a rate beyond what is sustained counts
    nowhere."""
    none = DrawnWorlds({name: np.zeros(2) for name in DrawnWorlds.of(2, 0).errors})
    monkeypatch.setattr(DrawnWorlds, "of", lambda count, seed: none)
    load = LOAD.model_copy(update={"requests": requests})
    tuned = optimize(question(workload=load, max_num_seqs=(64,), pp=(1,)), jobs=1)
    chosen, *rivals = of_search(tuned, worlds=2, rivals=1, jobs=1).quantiles
    assert tuned.value / 1.05 < chosen.at(0.5) <= tuned.bound * 1.001
    assert all(rival.at(0.5) <= tuned.bound * 1.001 for rival in rivals)


@pytest.mark.slow
def test_stated_probabilities_come_true_by_simulation() -> None:
    """The same with simulated plans, and errors of operators where the worlds draw errors of kinds."""
    rng = np.random.default_rng(11)
    stated, right = [], []
    stream = truths.stream()
    for world in range(50):
        truth = truths.profile_of(truths.true_device(), rng.standard_normal(20))
        profile = truths.profile_of(truth, rng.standard_normal(20))
        predicted = [np.nanmean(d.simulate(stream).e2el_s) for d in truths.deployments(profile)]
        order = sorted((0, 1), key=lambda i: predicted[i])
        plans = contenders(profile)
        said = confidence([plans[i] for i in order], Slo(), worlds=30, seed=world, jobs=1)
        actual = [np.nanmean(d.simulate(stream).e2el_s) for d in truths.deployments(truth)]
        stated.append(said.versus[0].probability)
        right.append(float(actual[order[0]] < actual[order[1]]))
    assert np.mean(stated) == pytest.approx(np.mean(right), abs=0.1)
    sure = np.array(stated) > np.median(stated)
    for part in (sure, ~sure):
        assert np.mean(np.array(stated)[part]) == pytest.approx(np.mean(np.array(right)[part]), abs=0.15)
