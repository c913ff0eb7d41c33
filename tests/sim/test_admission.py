"""Servers that reject requests because too many are in flight or wait, beside closed forms and worlds by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from simtune.costs.compiled import LinearCosts
from simtune.errors import UsageError
from simtune.results.result import Result
from simtune.sim.audit import violations
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.streamed import StreamedLoad, simulate_streamed
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.workload import FixedLength, Poisson, Slo, Workload
from simtune.testing.clusters import stream_of
from simtune.tuner.bounds import PlanBounds, attainment_bound
from simtune.workload.requests import RequestStream
from tests.tuner.test_bounds import poisson

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
STEP_S = 2**-7
"""A whole number of ticks."""


def plan_of(instances: int = 1, seats: int = 8, pool: dict[str, Any] | None = None, **limits: int) -> Plan:
    settings = {
        "hardware": "h100-sxm",
        "instances": instances,
        "batching": {"max_num_seqs": seats, "max_num_batched_tokens": 20_000, **limits},
        "kv_cache": {"num_blocks": 10_000},
        "max_model_len": 20_000,
        "async_scheduling": False,
    }
    return Plan.model_validate({"name": "p", "model": MODEL.name, "pools": [settings | (pool or {})]}, strict=False)


def deployed(costs: LinearCosts, plan: Plan) -> Deployment:
    return deploy(plan, MODEL, HARDWARE, costs)


def simulated(stream: RequestStream, costs: LinearCosts | None = None, **plan: Any) -> Result:
    return deployed(costs or LinearCosts(STEP_S), plan_of(**plan)).simulate(stream)


def rejected(result: Result) -> list[int]:
    assert result.outcome.rejected is not None
    numbers: list[int] = result.outcome.rejected.tolist()
    return numbers


def test_requests_in_flight_are_counted_until_their_last_token() -> None:
    """Two at a time: request 0 ends with step 3, at which instant request 3 is admitted."""
    stream = stream_of(STEP_S * np.array([0.0, 0.1, 0.2, 3.0, 3.1]), [8] * 5, [3, 50, 3, 3, 3])
    result = simulated(stream, max_num_queued_reqs=2)
    assert rejected(result) == [2, 4]
    assert result.finish_s[[0, 3]] == pytest.approx([3 * STEP_S, 6 * STEP_S])
    assert np.isnan(result.first_token_s[[2, 4]]).all()
    assert not list(violations(plan_of(max_num_queued_reqs=2), (), result))


def test_prompts_are_counted_in_full_until_their_first_token() -> None:
    """Budget of 64 tokens: the prompt of 150 takes three steps. One more is admitted below the limit, however long."""
    stream = stream_of(STEP_S * np.array([0.0, 0.1, 0.2, 2.5, 4.01]), [150, 40, 8, 8, 8], [9] * 5)
    result = simulated(stream, max_num_queued_tokens=160, pool={"batching": {
        "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_num_queued_tokens": 160,
    }})  # fmt: skip
    assert rejected(result) == [2, 3]
    assert result.first_token_s[0] == pytest.approx(3 * STEP_S)


def test_sglang_counts_requests_that_wait() -> None:
    stream = stream_of(STEP_S * np.array([0.0, 0.1, 0.2, 0.3, 3.1]), [8] * 5, [3] * 5)
    result = simulated(stream, seats=1, max_queued_requests=2)
    assert rejected(result) == [3]


@pytest.mark.parametrize(
    ("limit", "expected"), [({"max_num_queued_reqs": 3}, [3, 4, 5]), ({"max_queued_requests": 1}, [4, 5])]
)
def test_cores_of_an_instance_share_the_limit_of_vllm_and_not_that_of_sglang(
    limit: dict[str, Any], expected: list[int]
) -> None:
    """Two virtual engines with a seat each."""
    stages: dict[str, Any] = {"parallelism": {"pp": 2}}
    late = stream_of([0.0, 0.0, *[0.001] * 4], [8] * 6, [5] * 6)
    assert rejected(simulated(late, seats=2, pool=stages, **limit)) == expected
    at_once = stream_of([0.0] * 4, [8] * 4, [5] * 4)
    assert rejected(simulated(at_once, instances=2, max_num_queued_reqs=1)) == [2, 3]


def blocking(load: float, places: int) -> float:
    """M/M/1/K: probability that an arrival finds all places taken."""
    return (1 - load) * load**places / (1 - load ** (places + 1))


def erlang_b(load: float, servers: int) -> float:
    terms = [load**n / math.factorial(n) for n in range(servers + 1)]
    return terms[-1] / sum(terms)


def noise(share: float, requests: int) -> float:
    """Three standard errors of a share, three times those of independent draws: rejections come in runs."""
    return 9 * math.sqrt(share * (1 - share) / requests)


@pytest.mark.parametrize(("rate_rps", "places"), [(0.8, 3), (1.5, 6)])
def test_one_seat_and_exponential_prompts_are_m_m_1_k(rate_rps: float, places: int) -> None:
    requests, rng = 8_000, np.random.default_rng(places)
    prompts = np.maximum(1, np.rint(rng.exponential(1000.0, requests))).clip(max=19_000).astype(np.int64)
    arrivals = np.cumsum(rng.exponential(1 / rate_rps, requests))
    stream = stream_of(arrivals, prompts, np.ones(requests, dtype=np.int64))
    result = simulated(stream, LinearCosts(0.0, 1e-3), seats=1, max_num_queued_reqs=places)
    expected = blocking(rate_rps * prompts.mean() * 1e-3, places)
    assert len(rejected(result)) / requests == pytest.approx(expected, abs=noise(expected, requests))


def test_as_many_places_as_seats_are_erlangs_loss_formula() -> None:
    """Steps of constant length serve all at once; a request waits half a step for its first one."""
    requests, step_s, tokens, rate_rps, seats = 8_000, 1e-3, 500, 12.0, 8
    arrivals = np.cumsum(np.random.default_rng(4).exponential(1 / rate_rps, requests))
    stream = stream_of(arrivals, np.ones(requests, dtype=np.int64), np.full(requests, tokens))
    result = simulated(stream, LinearCosts(step_s), seats=seats, max_num_queued_reqs=seats)
    expected = erlang_b(rate_rps * (tokens + 0.5) * step_s, seats)
    assert len(rejected(result)) / requests == pytest.approx(expected, abs=noise(expected, requests))


@given(st.integers(0, 30), st.integers(1, 12), st.sampled_from(["max_num_queued_reqs", "max_num_queued_tokens"]))
@settings(max_examples=8, deadline=None)
def test_jumps_reject_as_single_steps_do(seed: int, limit: int, key: str) -> None:
    stream = poisson(40, 60.0, 100, 15, seed)
    limits: dict[str, Any] = {key: limit if key == "max_num_queued_reqs" else 100 * limit}
    deployment = deployed(LinearCosts(5e-3, 2e-5), plan_of(instances=2, seats=4, **limits))
    jumps, steps = deployment.simulate(stream), deployment.simulate(stream, single_steps=True)
    assert rejected(jumps) == rejected(steps)
    assert np.array_equal(jumps.outcome.finish, steps.outcome.finish)
    assert not list(violations(deployment.plan, (), jumps))


def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    stream = poisson(80, 60.0, 100, 15, 1)
    free, limited = simulated(stream), simulated(stream, max_num_queued_reqs=80)
    assert rejected(limited) == []
    assert np.array_equal(free.outcome.finish, limited.outcome.finish)
    assert "rejections" not in free.summary().model_fields_set
    assert limited.summary().rejections is not None


def test_rejected_requests_miss_the_slo() -> None:
    """Half of them find no place. The others are fast, but the SLO is not met, and goodput counts half."""
    stream = poisson(400, 100.0, 8, 20, 3)
    result = simulated(stream, seats=64, max_num_queued_reqs=10)
    result.slo = Slo.model_validate({"ttft_s": {"p99": 10.0}})
    share = len(rejected(result)) / 400
    summary = result.summary()
    assert 0.3 < share < 0.8
    assert not result.meets_slo
    assert summary.slo_attainment == pytest.approx(1 - share)
    assert summary.unserved == 0
    assert summary.rejections is not None
    assert summary.rejections.share == pytest.approx(share)
    assert result.steadiness != "saturated"
    assert (
        attainment_bound(deployed(LinearCosts(STEP_S), plan_of(max_num_queued_reqs=10)), stream, result.slo)
        >= 1 - share
    )


def test_no_bound_counts_on_the_order_of_arrival_if_requests_may_be_rejected() -> None:
    stream = poisson(40, 50.0, 8, 20, 3)
    deployments = [deployed(LinearCosts(STEP_S), plan) for plan in (plan_of(), plan_of(max_num_queued_reqs=10))]
    assert [PlanBounds(deployment, stream).first_come for deployment in deployments] == [True, False]


def test_rejections_are_counted_by_class() -> None:
    stream = poisson(200, 100.0, 8, 20, 3)
    stream.class_index[::4] = 1
    stream = RequestStream(**{
        **{name: getattr(stream, name) for name in stream.__dataclass_fields__},
        "class_names": ("chat", "batch"), "slos": (None, None),
    })  # fmt: skip
    result = simulated(stream, seats=64, max_num_queued_reqs=10)
    rejections = result.summary().rejections
    assert rejections is not None
    by_class = {row.request_class: row.requests for row in rejections.classes}
    assert by_class == {"chat": result.num_rejected(0), "batch": result.num_rejected(1)}
    assert sum(by_class.values()) == rejections.requests == len(rejected(result))
    assert result.num_rejected(1) == sum(number % 4 == 0 for number in rejected(result))


def test_streamed_runs_count_the_same() -> None:
    workload = Workload(
        name="w", arrivals=Poisson(rate_rps=100.0), prompt=FixedLength(tokens=8), output=FixedLength(tokens=20)
    )
    load = StreamedLoad(workload, None, requests=500, seed=2)
    (stream,) = load.chunks()
    deployment = deployed(LinearCosts(STEP_S), plan_of(seats=64, max_num_queued_reqs=10))
    streamed, kept = simulate_streamed(deployment, load), deployment.simulate(stream)
    assert streamed.num_rejected() == kept.num_rejected() > 0
    assert streamed.summary().unserved == 0
    assert streamed.summary().slo_attainment == pytest.approx(kept.summary().slo_attainment)


def test_clients_that_do_not_think_are_refused_if_they_could_be_rejected() -> None:
    loop = stream_of(None, [8] * 20, [5] * 20, users=4)
    assert rejected(simulated(loop, max_num_queued_reqs=4)) == []
    reachable: list[dict[str, Any]] = [{"max_num_queued_reqs": 3}, {"max_num_queued_tokens": 100}]
    for limits in reachable:
        with pytest.raises(UsageError, match=r"set arrivals.think_s, or remove the limits of the queue"):
            simulated(loop, **limits)
    thinking = stream_of(None, [8] * 20, [5] * 20, users=4, think_s=0.001)
    assert rejected(simulated(thinking, max_num_queued_reqs=3))


@pytest.mark.parametrize(("role", "key"), [("decode", "max_num_queued_reqs"), ("prefill", "max_queued_requests")])
def test_pools_without_new_requests_have_no_limit(role: str, key: str) -> None:
    with pytest.raises(ValidationError, match="remove it"):
        plan_of(pool={"role": role}, **{key: 4})


def test_a_load_of_which_no_request_fits_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"every request is longer than max_model_len \(20000 tokens\)"):
        simulated(stream_of([0.0, 1.0], [30_000, 20_001], [3, 3]))
