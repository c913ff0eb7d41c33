"""Service stages: queues with known answers, pipelines, and plans around them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.errors import SpecError, UsageError
from simtune.results.result import Result
from simtune.sim.deployment import deploy
from simtune.sim.plan_parts import OwnCosts
from simtune.sim.stations import serve
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.stages import Stage
from simtune.specs.workload import Workload
from simtune.workload.requests import build_stream
from tests.oracles.stations import serve as by_simpy
from tests.sim.test_families import Constant

GENERATOR = np.random.default_rng(7)
ARRIVALS = np.cumsum(GENERATOR.exponential(1.0, 40000))
"""Poisson, one a second."""


def stage(name: str, **fields: Any) -> Stage:
    return Stage.model_validate({"name": name, "pool": "mixed", **fields})


def test_one_server_of_fixed_times_waits_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1 at load 0.7: rho / (2 (1 - rho)) of the service time."""
    ends = serve([stage("a", seconds=0.7)], ARRIVALS, np.ones(len(ARRIVALS), dtype=np.int64))["a"]
    wait = (ends - ARRIVALS - 0.7).mean()
    assert wait == pytest.approx(0.7 * 0.7 / (2 * 0.3), rel=0.05)


def test_two_exponential_servers_in_a_row_are_two_queues_of_their_own() -> None:
    """Burke: what leaves an M/M/1 queue is Poisson; both stages sojourn 1 / (mu - lambda)."""
    tokens = np.maximum(1, GENERATOR.exponential(10000.0, len(ARRIVALS))).astype(np.int64)
    first = serve([stage("a", seconds_per_token=0.5e-4)], ARRIVALS, tokens)["a"]
    again = np.maximum(1, GENERATOR.exponential(10000.0, len(ARRIVALS))).astype(np.int64)
    second = serve([stage("b", seconds_per_token=0.5e-4)], first, again)["b"]
    assert (first - ARRIVALS).mean() == pytest.approx(1.0, rel=0.05)
    assert (second - first).mean() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("seed", range(4))
def test_stages_are_those_of_simpy(seed: int) -> None:
    """Some stages in a row, side by side and joined, in parts, with several servers."""
    draws = np.random.default_rng(seed)
    behind: tuple[list[str], ...] = ([], ["a"], ["a"], ["b", "c"])
    parts, names = int(draws.integers(1, 4)), ("a", "b", "c", "d")
    stages = [
        stage(name, seconds=float(draws.uniform(0, 0.3)), seconds_per_token=float(draws.uniform(0, 2e-3)), parts=parts,
              instances=int(draws.integers(1, 4)), after=after)
        for name, after in zip(names, behind, strict=True)
    ]  # fmt: skip
    arrival_s, tokens = np.cumsum(draws.exponential(0.3, 150)), draws.integers(1, 400, 150)
    ours, theirs = serve(stages, arrival_s, tokens), by_simpy(stages, arrival_s, tokens)
    for name in names:
        assert ours[name] == pytest.approx(theirs[name], abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=4), st.integers(1, 12))
def test_a_pipeline_takes_the_sum_and_the_longest_again_for_each_further_part(times: list[float], parts: int) -> None:
    stages = [
        stage(f"s{i}", seconds=seconds, parts=parts, after=[f"s{i - 1}"] if i else [])
        for i, seconds in enumerate(times)
    ]
    ends = serve(stages, np.array([3.0]), np.array([100]))
    expected = 3.0 + (sum(times) + (parts - 1) * max(times)) / parts
    assert ends[stages[-1].name][0] == pytest.approx(expected)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.floats(0, 3), st.integers(1, 500)), min_size=1, max_size=40))
def test_no_more_are_served_at_a_time_than_there_are_servers(instances: int, load: list[tuple[float, int]]) -> None:
    arrivals, tokens = np.cumsum([gap for gap, _ in load]), np.array([n for _, n in load])
    ends = serve([stage("a", instances=instances, seconds_per_token=0.01)], arrivals, tokens)["a"]
    free = [-math.inf] * instances
    for at, n, end in zip(arrivals, tokens, ends, strict=True):
        begin = max(float(at), min(free))
        assert end == pytest.approx(begin + 0.01 * n)
        free[free.index(min(free))] = begin + 0.01 * n


def simulated(stages: list[dict[str, Any]], arrivals: dict[str, Any] | None = None) -> Result:
    pool = {
        "hardware": "h100-sxm",
        "instances": 1,
        "batching": {"max_num_seqs": 8, "max_num_batched_tokens": 2048},
        "kv_cache": {"num_blocks": 4096},
        "max_model_len": 8192,
    }
    plan = Plan.model_validate({"name": "p", "model": "llama-3.1-8b", "pools": [pool], "stages": stages}, strict=False)
    load = Workload.model_validate(
        {
            "name": "w",
            "arrivals": arrivals or {"kind": "poisson", "rate_rps": 2.0},
            "prompt": {"kind": "lognormal", "mean_tokens": 300, "sigma": 1.0, "max_tokens": 4000},
            "output": {"kind": "fixed", "tokens": 20},
        }
    )
    deployment = deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"), OwnCosts(Constant()))
    return deployment.simulate(build_stream(load, None, requests=200, seed=0))


def test_stages_that_take_no_time_change_nothing() -> None:
    plain = simulated([])
    through = simulated([{"name": "a", "pool": "mixed"}, {"name": "b", "pool": "mixed", "place": "beside"}])
    for name in ("arrival", "scheduled", "first_token", "finish"):
        assert (getattr(plain.outcome, name) == getattr(through.outcome, name)).all()


def test_a_stage_before_adds_its_time_and_one_beside_only_where_it_is_longer() -> None:
    plain = simulated([])
    before = simulated([{"name": "a", "pool": "mixed", "instances": 1000, "seconds": 0.25, "devices": 2}])
    assert before.e2el_s == pytest.approx(plain.e2el_s + 0.25, abs=1e-6)
    assert before.num_gpus == 2001
    beside = simulated([{"name": "a", "pool": "mixed", "instances": 1000, "seconds": 0.25, "place": "beside"}])
    assert beside.e2el_s == pytest.approx(np.maximum(plain.e2el_s, 0.25), abs=1e-6)


def test_requests_that_overtake_each_other_in_a_stage_keep_their_own_times() -> None:
    result = simulated([{"name": "a", "pool": "mixed", "instances": 50, "seconds_per_token": 0.01}])
    assert (result.ttft_s >= 0.01 * result.stream.prompt_tokens).all()
    assert result.completed.all()
    assert not (np.diff(result.arrival_s) >= 0).all()


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("[{name: a, pool: encoder}]", "stages.0.pool: stage a serves no pool: there is no 'encoder'"),
        ("[{name: a}]", "stages.0.pool"),
        ("[{name: a, pool: mixed, after: [b]}]", "stages.0.after: a goes on with 'b', which is no earlier stage"),
        ("[{name: a, pool: mixed}, {name: a, pool: mixed}]", "stages.1.name: two stages are called a"),
        (
            "[{name: a, pool: mixed, parts: 3}, {name: b, pool: mixed, parts: 2, after: [a]}]",
            "stages.1.parts: a has 3 parts",
        ),
    ],
)
def test_stages_that_lead_nowhere_are_refused_with_their_place(stages: str, message: str) -> None:
    text = (
        "schema: simtune/plan@1\nname: p\nmodel: llama-3.1-8b\n"
        "pools: [{hardware: h100-sxm, instances: 1, batching: {max_num_seqs: 8, max_num_batched_tokens: 512}}]\n"
        f"stages: {stages}\n"
    )
    with pytest.raises(SpecError) as caught:
        Plan.from_text(text)
    assert message in str(caught.value)


def test_a_stage_that_ends_after_the_end_of_the_clock_is_named() -> None:
    reading = {"name": "read", "pool": "mixed", "seconds_per_token": 1e9}
    slow: list[dict[str, Any]] = [reading, {"name": "guard", "pool": "mixed"}]
    with pytest.raises(UsageError, match=r"plan p: stages: requests leave read after up to .* counts to 49"):
        simulated(slow)


def test_users_who_wait_for_answers_do_not_go_through_stages() -> None:
    with pytest.raises(UsageError, match="use open arrivals"):
        simulated([{"name": "a", "pool": "mixed", "seconds": 1}], {"kind": "closed_loop", "users": 2})
