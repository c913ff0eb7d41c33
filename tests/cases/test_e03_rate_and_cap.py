"""A client that sends at a rate and holds requests back beyond so many under way, as load tools do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import simpy

from simtune.costs.compiled import LinearCosts
from simtune.engine import VllmFcfs
from simtune.errors import UsageError
from simtune.results.result import Result
from simtune.runs.request_columns import requests_table
from simtune.sim.core import EngineCore
from simtune.sim.streamed import StreamedLoad
from simtune.sim.world import World
from simtune.specs.workload import Workload
from simtune.workload.load import load_facts
from simtune.workload.requests import RequestStream, build_stream

SEATS = 8


def load(requests: int = 100, cap: int | None = 50, kind: str = "poisson", rate: float = 50.0, **more: Any) -> Workload:
    arrivals = {"kind": kind, "rate_rps": rate, "max_in_flight": cap, **({"cv": 2.0} if kind == "gamma" else {})}
    fixed = {"prompt": {"kind": "fixed", "tokens": 100}, "output": {"kind": "fixed", "tokens": 20}}
    return Workload.model_validate({"name": "w", "requests": requests, "arrivals": arrivals, **fixed, **more})


def stream_of(workload: Workload) -> RequestStream:
    return build_stream(workload, None, requests=workload.requests, seed=1)


def simulated(stream: RequestStream, seats: int = SEATS, costs: LinearCosts | None = None) -> Result:
    scheduler = VllmFcfs(
        num_blocks=10**6, block_size=16, max_num_seqs=seats, max_num_batched_tokens=10**6, max_model_len=10**5
    )
    world = World([EngineCore(scheduler, costs or LinearCosts(0.02, 1e-5))], stream)
    return Result(stream, world.run(), num_gpus=1, offered_rate_rps=stream.target_rate_rps)


def by_simpy(due_s: Sequence[float], cap: int, seats: int, service_s: float) -> list[tuple[float, float]]:
    """Return when each request is sent and finished: a semaphore in the client, seats in the server."""
    env, times = simpy.Environment(), [(0.0, 0.0)] * len(due_s)
    client, server = simpy.Resource(env, cap), simpy.Resource(env, seats)

    def one(number: int) -> Any:
        yield env.timeout(due_s[number])
        with client.request() as slot:
            yield slot
            sent_s = env.now
            with server.request() as seat:
                yield seat
                yield env.timeout(service_s)
            times[number] = sent_s, env.now

    for number in range(len(due_s)):
        env.process(one(number))
    env.run()
    return times


@pytest.mark.parametrize("kind", ["poisson", "gamma", "fixed"])
@pytest.mark.parametrize("cap", [1, 3, 20, 1000])
def test_it_sends_and_finishes_as_a_semaphore_before_the_server_does(kind: str, cap: int) -> None:
    stream = stream_of(load(200, cap, kind, rate=12.0))
    # a seat at a time and one token each: a request takes its prompt, whatever else waits
    single = RequestStream(
        **{f: getattr(stream, f) for f in stream.__dataclass_fields__} | {"output_tokens": np.ones(200, dtype=np.int64)}
    )
    result = simulated(single, seats=1, costs=LinearCosts(0.0, 1e-3))
    assert stream.due_s is not None
    sent_s, finish_s = np.array(by_simpy(stream.due_s.tolist(), cap, 1, 0.1)).T
    assert result.arrival_s == pytest.approx(sent_s, abs=1e-7)
    assert result.finish_s == pytest.approx(finish_s, abs=1e-7)
    assert result.held_s == pytest.approx(sent_s - stream.due_s, abs=1e-7)


def test_one_that_is_held_back_is_sent_the_moment_one_finishes() -> None:
    result = simulated(stream_of(load()))
    held = result.held_s > 0
    assert held.sum() > 20
    assert set(result.outcome.arrival[held].tolist()) <= set(result.outcome.finish.tolist())
    begins, ends = np.sort(result.arrival_s), np.sort(result.finish_s)
    under_way = np.arange(1, 101) - np.searchsorted(ends, begins, side="right")
    assert under_way.max() == 50
    assert result.ttft_s == pytest.approx(result.first_token_s - result.arrival_s), "counted from when it was sent"


def test_no_rate_saturates_and_latencies_have_a_value() -> None:
    capped, free = (simulated(stream_of(load(2000, cap, rate=60.0))) for cap in (16, None))
    assert free.steadiness == "saturated"
    assert capped.steadiness is None
    assert not capped.saturated
    summary = capped.summary()
    assert summary.held_back is not None
    assert summary.held_back.max_in_flight == 16
    assert summary.held_back.share > 0.9
    assert summary.offered_rate_rps == pytest.approx(stream_of(load(2000, 16, rate=60.0)).target_rate_rps)
    assert summary.request_throughput_rps == pytest.approx(free.summary().request_throughput_rps, rel=0.02)
    assert summary.metrics["ttft"].p99 is not None
    assert summary.metrics["ttft"].p99 < 2.0
    assert "held_back" not in free.summary().model_fields_set


def test_a_cap_that_never_binds_changes_nothing() -> None:
    capped, free = (simulated(stream_of(load(500, cap, rate=2.0))) for cap in (400, None))
    for column in ("arrival", "first_token", "finish"):
        assert getattr(capped.outcome, column).tolist() == getattr(free.outcome, column).tolist()
    held = capped.summary().held_back
    assert held is not None
    assert (held.share, held.max_s) == (0.0, 0.0)


def test_another_rate_is_the_same_pattern_stretched() -> None:
    stream = stream_of(load())
    assert stream.due_s is not None
    assert stream.target_rate_rps is not None
    twice = stream.at_rate(2 * stream.target_rate_rps)
    assert twice.due_s == pytest.approx(stream.due_s / 2)
    assert twice.users == 50


def test_the_table_of_requests_and_the_facts_of_the_load_show_it() -> None:
    capped, free = (simulated(stream_of(load(60, cap))) for cap in (5, None))
    table = requests_table(capped)
    assert table["held_s"] == pytest.approx(capped.held_s.tolist())
    assert "held_s" not in requests_table(free)
    facts = load_facts(capped.stream, capped.stream.users, capped.stream.due_s)
    assert (facts.users, facts.max_in_flight) == (None, 5)
    assert facts.rate_rps == pytest.approx(capped.stream.target_rate_rps)


def test_what_needs_a_rate_of_arrivals_refuses_it() -> None:
    with pytest.raises(UsageError, match=r"max_in_flight.*leave --stream out"):
        StreamedLoad(load(), None, requests=100, seed=0)
    with pytest.raises(ValueError, match="remove max_in_flight"):
        load(graph=[{"name": "root"}])
