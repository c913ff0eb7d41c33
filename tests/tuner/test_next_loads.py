"""Runs that tell plans apart: as sure as normal numbers say, chosen by what they tell, stretched like worlds."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
from scipy.special import ndtr

from simtune.costs.iteration import REDRAWN_KINDS
from simtune.errors import UsageError
from simtune.sim.drawn_worlds import ACCEPTANCE, Blueprint, DrawnWorlds, PerturbedWorld
from simtune.specs.workload import Poisson
from simtune.testing.clusters import stream_of
from simtune.tuner.doubt.leaders import PlanErrors, drawn_latencies, leaders
from simtune.tuner.doubt.next_loads import (
    ENOUGH,
    NOISIER,
    LoadOption,
    LoadsOfStudy,
    _explained,
    choose,
    conditioned,
    noises,
    right_after,
)
from simtune.tuner.space.expressible import space_for
from simtune.tuner.trial import Trial
from simtune.workload.requests import build_stream
from tests.tuner.test_search import LOAD, question

WORLDS = 4000
TELLING, SILENT, OTHER = (LoadOption("rate", share) for share in (0.9, 0.5, 0.3))


def normals(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, WORLDS))


def test_how_sure_a_choice_is_after_a_mean_is_measured() -> None:
    """Against the two normal numbers themselves."""
    z, rest = normals(2)
    gap, noise = 0.03 + 0.05 * z + 0.02 * rest, 0.02
    assert right_after(gap, [], noise) == pytest.approx(ndtr(0.03 / math.hypot(0.05, 0.02)), abs=0.02)
    posterior = 0.05**2 / (1 + noise**2)
    means = 0.03 + math.sqrt(posterior) * normals(1, 1)[0]
    left = math.sqrt(0.05**2 + 0.02**2 - posterior)
    assert right_after(gap, [("tpot", z)], noise) == pytest.approx(np.mean(ndtr(np.abs(means) / left)), abs=0.01)
    assert right_after(gap, [("tpot", normals(1, 2)[0])], noise) == pytest.approx(right_after(gap, [], noise), abs=0.01)
    assert right_after(np.full(WORLDS, 0.1), [("tpot", z)], noise) == 1.0, "nothing is in doubt"


def test_a_noisy_mean_explains_what_its_signal_is_of_all_that_varies() -> None:
    """The share is 1 / (1 + noise^2) of each mean by itself; that of TTFT is three times as noisy."""
    a, b, unseen = normals(3)
    gap = 0.05 * a + 0.03 * b + 0.02 * unseen
    for noise in (0.02, 0.5, 2.0):
        tpot, ttft = 0.05**2 / (1 + noise**2), 0.03**2 / (1 + (3 * noise) ** 2)
        assert _explained(gap, [("tpot", a)], noise) == pytest.approx(tpot, rel=0.06)
        assert _explained(gap, [("tpot", a), ("ttft", b)], noise) == pytest.approx(tpot + ttft, rel=0.06)
    twice = 0.05**2 / (1 + 2.0**2 / 2)
    assert _explained(gap, [("tpot", a), ("tpot", a)], 2.0) == pytest.approx(twice, rel=0.06), "the noise is halved"
    assert _explained(gap, [("tpot", normals(1, 3)[0])], 0.5) == pytest.approx(0.0, abs=1e-5), "by chance alone"


def test_the_run_that_tells_is_made_first_and_others_are_left_out() -> None:
    a, b, noise = normals(3)
    values = [0.05 * a, 0.05 * b, np.full(WORLDS, -9.0)]
    seen = {
        (plan, option): {"tpot": 0.05 * (error if option == TELLING else noise)}
        for plan, error in ((0, a), (1, b))
        for option in (SILENT, TELLING)
    }
    right, runs = choose(values, seen, 0.01)
    assert right == pytest.approx(0.5, abs=0.03)
    assert {run.plan for run in runs} == {0, 1}
    assert {run.option for run in runs[:2]} == {TELLING}
    sure = [run.right_after for run in runs]
    assert sure == sorted(sure)
    assert sure[1] > 0.85, "both plans were seen"


def test_if_no_run_helps_both_plans_are_checked_where_they_differ_most() -> None:
    z = normals(2)
    values = [1.0 + 0.01 * z[0], 0.01 * z[0]]
    seen = {
        (plan, option): {"ttft": apart * plan + 0.1 * z[plan]}
        for plan in (0, 1)
        for option, apart in ((SILENT, 0.1), (TELLING, 0.5))
    }
    right, runs = choose(values, seen)
    assert right > ENOUGH
    assert [(run.plan, run.option) for run in runs] == [(0, TELLING), (1, TELLING)]


def test_measurements_move_values_as_normal_numbers_do() -> None:
    """Mean and spread after two measurements are those of the exact posterior."""
    z = normals(2)
    values = np.array([1 + 0.1 * z[0], 2 + 0.1 * z[0] + 0.1 * z[1]])
    predicted, noise = np.array([0.1 * z[0], 0.3 * z[1]]), noises(["tpot", "ttft"], 0.05)
    assert noise.tolist() == [0.05, 0.05 * NOISIER["ttft"]]
    after = conditioned(values, predicted, np.array([0.08, -0.3]), noise, 0)
    gains = [0.1**2 / (0.1**2 + 0.05**2), 0.3**2 / (0.3**2 + 0.15**2)]
    moved = [gains[0] * 0.08, gains[0] * 0.08 + gains[1] * -0.3 / 3]
    spread = [0.1 * math.sqrt(1 - gains[0]), 0.1 * math.sqrt(2 - gains[0] - gains[1])]
    assert after.mean(axis=1) == pytest.approx([1 + moved[0], 2 + moved[1]], abs=0.005)
    assert after.std(axis=1) == pytest.approx(spread, rel=0.05)


def still(count: int = 1) -> DrawnWorlds:
    """Worlds without errors."""
    return DrawnWorlds({name: np.zeros(count) for name in DrawnWorlds.of(1, 0).errors})


def test_latencies_are_those_of_a_world_in_which_everything_takes_longer() -> None:
    q = question(tp=(1,), max_num_seqs=(8,), max_num_batched_tokens=(2048,), devices=1)
    (candidate,) = space_for(q).candidates
    deployment = q.deploy(candidate, 4096)
    stream = build_stream(LOAD, None, requests=60, seed=0).at_rate(2.0)
    longer = 0.2
    logs = drawn_latencies(deployment, stream, still(3), np.array([-0.2, 0.0, longer]), {})
    slow = Blueprint.of(deployment).deploy(PerturbedWorld(dict.fromkeys(REDRAWN_KINDS, math.exp(longer))))
    for metric in ("ttft", "tpot"):
        predicted = deployment.simulate(stream).statistic(metric, "mean")
        simulated = slow.simulate(stream).statistic(metric, "mean")
        assert predicted is not None
        assert simulated is not None
        assert logs[metric][1] == pytest.approx(math.log(predicted))
        # The host's time is the same in both worlds, and no kernel.
        assert logs[metric][2] == pytest.approx(math.log(simulated), abs=0.05)
        assert logs[metric][0] < logs[metric][1] < logs[metric][2]


def test_users_who_never_pause_get_latencies_that_change_in_proportion() -> None:
    """Errors of a plan and of all kinds add up: latencies are e^(a + s z) times as long as predicted."""
    q = question(tp=(1,), max_num_seqs=(8,), max_num_batched_tokens=(2048,), devices=1)
    (candidate,) = space_for(q).candidates
    deployment = q.deploy(candidate, 4096)
    stream = stream_of(None, [500] * 40, [30] * 40, users=4)
    z, of_plan = np.array([-1.0, 0.0, 0.5, 1.0]), np.array([0.3, 0.1, -0.2, 0.0])
    alike = DrawnWorlds({name: 0 * z if name == ACCEPTANCE else z for name in DrawnWorlds.of(1, 0).errors})
    logs = drawn_latencies(deployment, stream, alike, of_plan, dict.fromkeys(REDRAWN_KINDS, 0.05))
    result = deployment.simulate(stream)
    assert set(logs) == {"ttft", "tpot"}
    for metric, seconds in logs.items():
        predicted = result.statistic(cast(Any, metric), "mean")
        assert predicted is not None
        assert seconds == pytest.approx(math.log(predicted) + of_plan + 0.05 * z, abs=1e-6)


def test_values_keep_the_rate_of_the_search_and_loads_are_of_one_server() -> None:
    q = question(workload=LOAD.model_copy(update={"requests": 100}), tp=(1,), pp=(1,), max_num_seqs=(8, 64), devices=2,
                 max_num_batched_tokens=(2048,))  # fmt: skip
    rows = [
        Trial(candidate, status, "", rate_rps=rate, best=rate / 2)
        for candidate, status, rate in zip(
            sorted(space_for(q).candidates, key=lambda c: -c.decoding.max_num_seqs)[:2],
            ("chosen", "feasible"),
            (8.0, 2.0),
            strict=True,
        )
    ]
    plans = leaders(q, rows, PlanErrors(still(), 0, 0.0))
    assert [plan.value for plan in plans] == [4.0, 1.0]
    assert [float(np.exp(plan.log_values[0])) for plan in plans] == pytest.approx([4.0, 1.0])
    assert [(plan.gpus, plan.servers) for plan in plans] == [(1, 2), (1, 2)]
    loads = LoadsOfStudy(q, plans)
    load = loads.of(plans[0], LoadOption("rate", 0.5))
    assert load.rate_rps == 2.0, "half of what one of two servers receives"
    assert set(load.stream.prompt_tokens.tolist()) == {load.prompt_tokens}
    assert loads.of(plans[0], LoadOption("trace", 1.0)).stream.target_rate_rps == pytest.approx(4.0)
    assert loads.of(plans[1], LoadOption("users", 0.0)).users == 1
    users = loads.of(plans[0], LoadOption("users", 0.8)).users
    assert users is not None
    assert users > 1


def test_only_rates_within_an_slo_are_told_apart() -> None:
    q = question(workload=LOAD.model_copy(update={"arrivals": Poisson(rate_rps=1.0)}), objective="e2el")
    rows = [Trial(candidate, "chosen", "") for candidate in space_for(q).candidates[:1]]
    with pytest.raises(UsageError, match="objective e2el: plans are told apart by the highest rate"):
        leaders(q, rows, PlanErrors(still(), 0, 0.0))
