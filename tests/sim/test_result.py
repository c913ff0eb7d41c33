"""Statistics, objectives, saturation, and the early end of a lost run."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import VllmFcfs
from simtune.results.result import MissBudget, Result
from simtune.results.summary import SloLimit
from simtune.sim.core import EngineCore
from simtune.sim.recorder import Recorder
from simtune.sim.world import World
from simtune.specs.workload import Slo
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream
from tests.sim.worlds import Setting, settings


def served(stream: RequestStream, slo: Slo | None = None, step_s: float = 1.0, seqs: int = 4) -> Result:
    scheduler = VllmFcfs(
        num_blocks=10**6, block_size=16, max_num_seqs=seqs, max_num_batched_tokens=8192, max_model_len=8192
    )
    outcome = World([EngineCore(scheduler, LinearCosts(step_s=step_s))], stream).run()
    return Result(stream, outcome, 2, slo or Slo(), stream.offered_rate_rps)


def test_latencies_are_those_of_the_field() -> None:
    """Two requests in steps of one second: A of 3 tokens from 0 on, B of 1 token from 0.5 on."""
    result = served(stream_of([0.0, 0.5], [10, 20], [3, 1]))
    assert result.ttft_s.tolist() == [1.0, 1.5]
    assert result.tpot_s[0] == 1.0
    assert np.isnan(result.tpot_s[1]), "one token has no time per further token"
    assert result.e2el_s.tolist() == [3.0, 1.5]
    assert result.queue_s.tolist() == [0.0, 0.5]
    summary = result.summary()
    assert summary.metrics["tpot"].count == 1
    assert summary.duration_s == 3.0
    assert summary.output_tokens_per_s == pytest.approx(4 / 3)
    assert summary.output_tokens_per_s_per_gpu == pytest.approx(2 / 3)
    assert summary.offered_rate_rps == 2.0


def test_objectives_by_class_and_statistic() -> None:
    stream = replace(
        stream_of([0.0, 0.0, 10.0, 10.0], [1] * 4, [1, 3, 1, 3]),
        class_index=np.array([0, 1, 0, 1]),
        class_names=("fast", "slow"),
        slos=(Slo(ttft_s={"p50": 0.9}), None),
    )
    result = served(stream, Slo(e2el_s={"p99": 5.0, "mean": 2.0}))
    assert [(x.request_class, x.metric, x.statistic, x.met) for x in result.limits] == [
        ("fast", "ttft", "p50", False),
        ("slow", "e2el", "p99", True),
        ("slow", "e2el", "mean", False),
    ]
    assert not result.meets_slo
    # Single requests are held to the widest limit of a metric: 5 s, not the 2 s of the mean.
    assert result.good.tolist() == [False, True, False, True]
    assert result.slo_attainment == 0.5
    assert "p50 TTFT ≤ 900 ms for fast (it reaches 1,000.0 ms)" in str(result.limits[0])


def test_a_limit_that_is_just_kept_is_kept() -> None:
    result = served(stream_of([0.0], [10], [3]), Slo(ttft_s={"p99": 1.0}, tpot_s={"mean": 1.0}, e2el_s={"p50": 3.0}))
    assert [line.value_s for line in result.limits] == [line.limit_s for line in result.limits]
    assert result.meets_slo
    assert result.good.tolist() == [True]


def test_refused_requests_spoil_the_objective() -> None:
    result = served(stream_of([0.0, 1.0], [10, 9000], [1, 1]), Slo(ttft_s={"p99": 100.0}))
    assert result.refused == 1
    assert not result.meets_slo


@pytest.mark.parametrize(
    ("load", "requests", "steadiness"),
    [
        (0.5, 3000, "stable"),
        (0.8, 3000, "stable"),
        (1.1, 3000, "too short to tell"),
        (1.1, 12_000, "saturated"),
        (1.5, 3000, "saturated"),
    ],
)
def test_overload_is_called_saturated(load: float, requests: int, steadiness: str) -> None:
    gaps = np.random.default_rng(4).exponential(1 / load, requests)
    result = served(stream_of(np.cumsum(gaps).tolist(), [5] * requests, [1] * requests), seqs=1)
    assert result.steadiness == steadiness
    assert result.saturated is (steadiness == "saturated")
    assert result.meets_slo is not result.saturated
    if result.saturated:
        assert all(limit.value_s is None for limit in replace_slo(result, Slo(ttft_s={"p99": 1e6})).limits)


def test_the_goodput_of_what_is_not_stable_is_what_was_finished() -> None:
    """A tenth more than is served: as many in time as are finished, and no more than that."""
    gaps = np.random.default_rng(4).exponential(1 / 1.1, 3000)
    result = served(stream_of(np.cumsum(gaps).tolist(), [5] * 3000, [1] * 3000), Slo(ttft_s={"p99": 1e6}), seqs=1)
    assert result.slo_attainment == 1.0
    assert result.goodput_rps == pytest.approx(3000 / result.duration_s)
    assert result.goodput_rps is not None
    assert result.goodput_rps < 1.01


def replace_slo(result: Result, slo: Slo) -> Result:
    return Result(result.stream, result.outcome, result.num_gpus, slo)


@given(
    settings(),
    st.sampled_from(["ttft_s", "tpot_s", "e2el_s"]),
    st.sampled_from(["p50", "p90", "p99"]),
    st.floats(1e-3, 2.0),
)
@hypothesis_settings(max_examples=150, deadline=None)
def test_giving_up_early_never_changes_the_verdict(world: Setting, metric: str, statistic: str, limit: float) -> None:
    slo = Slo.model_validate({metric: {statistic: limit}})
    whole = Result(world.stream, World(world.make_cores(), world.stream).run(), 1, slo)
    early = Result(
        world.stream, World(world.make_cores(), world.stream, stop_when=MissBudget(world.stream, slo)).run(), 1, slo
    )
    if whole.refused:
        return
    missed = any(not line.met for line in whole.limits if line.value_s is not None)
    if early.outcome.aborted:
        assert missed or whole.saturated
    else:
        assert early.outcome.finish.tolist() == whole.outcome.finish.tolist()
    # It is given up exactly when the order statistic at or below the percentile's place is late.
    values = np.sort(whole.values(metric.removesuffix("_s")))
    if len(values):
        place = math.floor((len(values) - 1) * float(statistic[1:]) / 100)
        late = np.rint(values * TICKS_PER_SECOND) > math.floor(limit * TICKS_PER_SECOND)
        if metric != "tpot_s":  # TPOT is a quotient: a tick more or less is not seen in it
            assert early.outcome.aborted == late[place]


@given(settings(), st.sampled_from(["ttft_s", "tpot_s", "e2el_s"]), st.floats(1e-3, 2.0))
@hypothesis_settings(max_examples=100, deadline=None)
def test_a_mean_is_given_up_only_where_it_is_missed(world: Setting, metric: str, limit: float) -> None:
    slo = Slo.model_validate({metric: {"mean": limit}})
    whole = Result(world.stream, World(world.make_cores(), world.stream).run(), 1, slo)
    stop = MissBudget(world.stream, slo)
    early = World(world.make_cores(), world.stream, stop_when=stop).run()
    if whole.refused:
        return
    mean = whole.statistic(metric.removesuffix("_s"), "mean")
    if early.aborted:
        assert mean is not None
        assert mean > limit
    else:
        assert early.finish.tolist() == whole.outcome.finish.tolist()
        assert mean is None or mean <= limit * (1 + 1e-6)


def test_a_class_is_given_up_for_its_own_requests() -> None:
    """The median of four is lost with the third late one, that of one with the first."""
    stream = replace(
        stream_of([0.0] * 5, [1] * 5, [3] * 5),
        class_index=np.array([0, 0, 0, 0, 1]),
        class_names=("many", "one"),
        slos=(Slo(ttft_s={"p50": 1.0}), None),
    )
    second = TICKS_PER_SECOND
    budget = MissBudget(stream, Slo(e2el_s={"p50": 4.0}))
    given_up = [budget(i, 0, 2 * second, 9 * second) for i in (0, 1)]
    given_up += [budget(2, 0, second, 9 * second), budget(4, 0, 2 * second, 4 * second)]  # both in time
    assert given_up == [False] * 4
    assert budget(3, 0, 2 * second, 9 * second)
    assert MissBudget(stream, Slo(e2el_s={"p50": 4.0}))(4, 0, second, 4 * second + 1)


def test_a_summary_has_no_nan_and_no_number_that_does_not_exist() -> None:
    import json

    result = served(stream_of([0.0], [9000], [1]))
    text = json.dumps(result.summary().to_data(), allow_nan=False)
    assert '"request_throughput_rps": null' in text
    assert result.summary().to_data()["metrics"]["ttft"] == {"unit": "s", "count": 0}


def test_requests_of_the_warm_up_lose_no_limit() -> None:
    """The first two of four requests warm up; the p90 of the others is lost when both are late."""
    stream = replace(stream_of(np.arange(4) * 1.0, [8] * 4, [2] * 4), warm_up=2)
    late = 2 * TICKS_PER_SECOND
    budget = MissBudget(stream, Slo(ttft_s={"p90": 1.0}))
    assert [budget(number, 0, late, late) for number in range(4)] == [False, False, False, True]


def test_a_load_without_families_has_empty_columns_of_them() -> None:
    recorder = Recorder(5)
    assert len(recorder.family_begin) == len(recorder.family_end) == 0
    assert len(recorder.finish) == 5


def test_the_schema_marks_numbers_that_have_intervals() -> None:
    schema = SloLimit.model_json_schema()
    assert schema["properties"]["value_s"]["uncertain"] is True
    assert "uncertain" not in schema["properties"]["limit_s"]
