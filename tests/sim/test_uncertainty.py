"""Redrawn worlds: shared errors, the same for every plan, and intervals shaped like the summary."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from simtune.costs.iteration import HOST, KINDS
from simtune.costs.predict import Profile
from simtune.results.summary import Uncertain, Uncertainty
from simtune.sim.deployment import Deployment, default_plan, deploy
from simtune.sim.drafting import Drafting
from simtune.sim.drawn_worlds import DrawnWorlds, spreads
from simtune.sim.run_basis import pool_bases
from simtune.sim.uncertainty import intervals, uncertainty
from simtune.specs.acceptance import Acceptance, BetaMixture, PerPosition, PerRank
from simtune.specs.base import Record, Seq
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.speculation import Speculation
from simtune.specs.workload import Lognormal, Poisson, Slo, Workload
from simtune.workload.requests import RequestStream, build_stream

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
LOAD = Workload(
    name="load",
    arrivals=Poisson(rate_rps=12.0),
    prompt=Lognormal(mean_tokens=900, sigma=0.7, max_tokens=4000),
    output=Lognormal(mean_tokens=120, sigma=0.8, max_tokens=1000),
)


@pytest.fixture(scope="module")
def deployed() -> tuple[Deployment, RequestStream]:
    stream = build_stream(LOAD, None, requests=300, seed=0)
    return deploy(default_plan(MODEL, HARDWARE, stream), MODEL, HARDWARE), stream


def test_a_world_is_one_error_per_operator_kind() -> None:
    log_sd = Profile(HARDWARE).kind_log_sd()
    drawn = DrawnWorlds.of(4000, seed=1).worlds(log_sd)
    assert set(drawn[0].factors or ()) == set(KINDS), (
        "a kind that the profile lacks has the error of a data sheet, not none"
    )
    factors = [world.factors or {} for world in drawn]
    for kind in KINDS:
        logs = np.log([of_world[kind] for of_world in factors])
        assert logs.mean() == pytest.approx(0, abs=4 * log_sd[kind] / 4000**0.5)
        assert logs.std() == pytest.approx(log_sd[kind], rel=0.05)
    gemm, decode = (np.log([of_world[kind] for of_world in factors]) for kind in ("gemm", "decode_attention"))
    assert abs(np.corrcoef(gemm, decode)[0, 1]) < 0.05
    assert DrawnWorlds.of(10, seed=1).worlds(log_sd) == drawn[:10], "more worlds are more of the same"
    assert DrawnWorlds.of(10, seed=2).worlds(log_sd) != drawn[:10]


def test_spreads_are_those_of_the_shapes_that_were_simulated(deployed: tuple[Deployment, RequestStream]) -> None:
    """Few tokens a step and many differ in how sure products are; a kind without time has its typical error."""
    deployment, stream = deployed
    result = deployment.simulate(stream)
    found, typical = spreads(deployment, result), Profile(HARDWARE).kind_log_sd()
    assert set(found) == {*KINDS, HOST}
    assert found["moe"] == typical["moe"], "this model has no experts"
    (bases,) = pool_bases(deployment, result).values()
    assert found["gemm"] == bases["gemm"].log_sd != typical["gemm"]
    assert min(found.values()) > 0


def test_factors_slow_a_deployment_down(deployed: tuple[Deployment, RequestStream]) -> None:
    deployment, stream = deployed
    slower = deploy(deployment.plan, MODEL, HARDWARE, factors=dict.fromkeys(KINDS, 1.5))
    plain, slow = deployment.simulate(stream), slower.simulate(stream)
    assert slow.e2el_s.mean() > 1.3 * plain.e2el_s.mean()
    same = deploy(deployment.plan, MODEL, HARDWARE, factors=dict.fromkeys(KINDS, 1.0)).simulate(stream)
    assert same.outcome.finish.tolist() == plain.outcome.finish.tolist()


def test_intervals_hold_the_point_and_follow_the_summary(deployed: tuple[Deployment, RequestStream]) -> None:
    deployment, stream = deployed
    slo = Slo(tpot_s={"p99": deployment.simulate(stream).statistic("tpot", "p99") or 0.0})
    found = uncertainty(deployment, stream, slo, count=40, seed=0, jobs=1)
    summary = deployment.simulate(stream, slo).summary().to_data()

    def check(intervals: Any, point: Any, path: str) -> int:
        if isinstance(intervals, dict):
            return sum(check(intervals[k], point[k], f"{path}.{k}") for k in intervals)
        if intervals and isinstance(intervals[0], dict):
            return sum(check(a, b, path) for a, b in zip(intervals, point, strict=True))
        low, high = intervals
        assert low <= high, path
        return 1

    assert check(found.intervals, summary, "") > 30
    for metric in ("ttft", "tpot", "e2el"):
        low, high = found.intervals["metrics"][metric]["mean"]
        assert low < summary["metrics"][metric]["mean"] < high
    assert 0.1 < found.slo_probability < 0.9, (
        "a limit set at the point estimate is met in some worlds and missed in others"
    )
    assert found.saturated_probability == 0.0
    json.dumps(found.to_data(), allow_nan=False)


def test_the_same_on_any_number_of_processes(deployed: tuple[Deployment, RequestStream]) -> None:
    deployment, stream = deployed
    told: list[int] = []
    alone = uncertainty(deployment, stream, count=20, seed=3, jobs=1, each=told.append)
    assert uncertainty(deployment, stream, count=20, seed=3, jobs=2) == alone
    assert told == [*range(1, 21)], "who waits hears of every world"


class Part(Record):
    """A number that worlds change, and one that they do not."""

    off: Uncertain[float | None] = None
    fixed: int = 0


class Whole(Record):
    """Parts as they may stand in a record."""

    part: Part | None = None
    named: dict[str, Part] = {}  # noqa: RUF012 (pydantic copies it)
    listed: Seq[Part] = ()


def test_an_unbounded_number_is_the_largest() -> None:
    def interval(values: list[float | None]) -> Any:
        return intervals([Part(off=value, fixed=1) for value in values])["off"]

    assert interval([1.0, 2.0, 3.0]) == [1.0, 3.0]
    assert interval([float(i) for i in range(100)]) == [5.0, 94.0]
    assert interval([1.0] * 10 + [None] * 10) == [1.0, None]
    assert interval([None] * 3) == [None, None]


def test_intervals_are_nested_as_the_records_and_of_what_the_first_world_has() -> None:
    low, high, absent = Part(off=1.0, fixed=1), Part(off=2.0, fixed=2), Part()
    assert intervals([Whole(part=low, listed=(low, low)), Whole(part=high, listed=(low, high))]) == {
        "part": {"off": [1.0, 2.0]},
        "listed": [{"off": [1.0, 1.0]}, {"off": [1.0, 2.0]}],
    }
    assert intervals([Whole(named={"a": low}), Whole(named={"a": absent})]) == {"named": {"a": {"off": [1.0, None]}}}
    assert intervals([Whole(part=low), Whole()]) == {"part": {"off": [1.0, 1.0]}}
    assert intervals([absent, low]) == {}


def test_an_interval_is_found_by_its_keys() -> None:
    told = Uncertainty(
        worlds=20,
        level=0.9,
        saturated_probability=0.0,
        slo_probability=1.0,
        intervals={"metrics": {"ttft": {"mean": [1.0, None]}}},
    )
    assert told.of("metrics", "ttft", "mean") == (1.0, None)
    assert told.of("metrics", "ttft") is None
    assert told.of("metrics", "tpot", "mean") is None
    assert told.of("metrics", "ttft", "mean", "low") is None


def test_acceptance_is_off_by_its_own_standard_error() -> None:
    """Where drafts are kept more often, answers come sooner: the interval is wider than with rates known exactly."""
    drafted = {
        "drafter": {"kind": "eagle", "method": "eagle3"},
        "scheme": {"kind": "chain", "tokens": 3},
        "acceptance": "made-up",
    }
    stream = build_stream(LOAD, None, requests=200, seed=0)
    plan = default_plan(MODEL, HARDWARE, stream)
    pool = plan.pools[0].model_copy(update={"speculation": Speculation.model_validate(drafted, strict=False)})
    plan = plan.model_copy(update={"pools": (pool,)})
    widths = []
    for error in (0.0, 0.1):
        rates = PerPosition(conditional=(0.7, 0.7, 0.7), standard_error=(error,) * 3)
        acceptance = Acceptance(name="made-up", origin="assumed", source="this test", rates=rates)
        deployment = deploy(plan, MODEL, HARDWARE, drafting=Drafting(acceptance))
        found = uncertainty(deployment, stream, count=20, seed=0, jobs=1)
        low, high = found.intervals["metrics"]["tpot"]["mean"]
        widths.append(high - low)
    assert widths[1] > 1.1 * widths[0]


@pytest.mark.parametrize(
    ("rates", "up"),
    [
        (PerPosition(conditional=(0.5, 0.98), standard_error=(0.1, 0.1)), (0.6, 1.0)),
        (PerPosition(conditional=(0.5, 0.98)), (0.5, 0.98)),
        (BetaMixture(a=3.0, b=1.0, standard_error=(0.4, 0.0)), (0.775, 3.1 / 4 + 0.0)),
    ],
)
def test_rates_are_shifted_within_what_is_possible(rates: PerPosition | BetaMixture, up: tuple[float, float]) -> None:
    assert rates.shifted(1.0).chain(1)[0] == pytest.approx(up[0])
    if isinstance(rates, PerPosition):
        assert rates.shifted(1.0).chain(2)[1] == pytest.approx(up[1])


def test_ranks_that_would_exceed_one_are_scaled_down() -> None:
    rates = PerRank(probability=((0.7, 0.25),), standard_error=((0.1, 0.1),))
    (row,) = rates.shifted(1.0).probability
    assert sum(row) == pytest.approx(1)
    assert row[0] / row[1] == pytest.approx(0.8 / 0.35)
