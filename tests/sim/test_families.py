"""Request graphs: who follows whom, who is aborted, and what order statistics say of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simtune
from simtune.costs.ticks import to_ticks
from simtune.engine import POLICIES
from simtune.errors import SpecError, UsageError
from simtune.results.result import Result
from simtune.runs.request_columns import requests_table
from simtune.sim.deployment import deploy
from simtune.sim.plan_parts import OwnCosts
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.workload import Slo, Workload
from simtune.workload.requests import build_stream

STEP_S = 0.01


class Constant:
    """Every step takes the same."""

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """(ticks, how they grow, for how many steps that holds)."""
        return to_ticks(STEP_S), 0, 1 << 60

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        """Ticks of any other step."""
        return to_ticks(STEP_S)


def workload(graph: list[dict[str, Any]], **fields: Any) -> Workload:
    whole = {"arrivals": {"kind": "fixed", "rate_rps": 0.01}, "prompt": 32, "output": 10, **fields, "graph": graph}
    for node in (whole, *graph):
        for key in ("prompt", "output"):
            if isinstance(node.get(key), int):
                node[key] = {"kind": "fixed", "tokens": node[key]}
    return Workload.model_validate({"name": "w", **whole})


def simulated(load: Workload, families: int, *, single_steps: bool = False, **batching: Any) -> Result:
    seats = batching.pop("seats", 4096)
    pool = {
        "hardware": "h100-sxm",
        "instances": batching.pop("instances", 1),
        "async_scheduling": batching.pop("asynchronous", False),
        "batching": {"max_num_seqs": seats, "max_num_batched_tokens": 1 << 17, **batching},
        "kv_cache": {"num_blocks": 1 << 17},
        "max_model_len": 65536,
    }
    plan = Plan.model_validate({"name": "p", "model": "llama-3.1-8b", "pools": [pool]}, strict=False)
    deployment = deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"), OwnCosts(Constant()))
    return deployment.simulate(build_stream(load, None, requests=families, seed=0), single_steps=single_steps)


def spans(result: Result) -> Any:
    """Seconds from the arrival of each family to its last answer."""
    assert result.stream.graph is not None
    size = result.stream.graph.size
    return np.nanmax(result.finish_s.reshape(-1, size), axis=1) - result.arrival_s.reshape(-1, size)[:, 0]


def exponential(mean: float) -> dict[str, Any]:
    """Quantiles of an exponential distribution, finely."""
    levels = [*np.linspace(0, 0.99, 400).tolist(), *(1 - np.geomspace(0.0099, 1e-5, 200)).tolist(), 1.0]
    tokens = [max(1.0, -mean * math.log1p(-level)) if level < 1 else mean * 13 for level in levels]
    return {"kind": "quantiles", "levels": levels, "tokens": tokens}


# --- order statistics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("branches", "first"), [(8, 1), (8, 3), (8, 8), (4, 2)])
def test_the_mth_of_k_exponential_branches_comes_at_its_order_statistic(branches: int, first: int) -> None:
    """E[m-th of k] = T (H_k - H_(k-m)), and all that was aborted stops there."""
    mean = 200.0
    load = workload([{"name": "tries", "count": branches, "first": first, "output": exponential(mean)}])
    result = simulated(load, 4000)
    harmonic = [0.0, *np.cumsum(1 / np.arange(1, branches + 1)).tolist()]
    expected = mean * STEP_S * (harmonic[branches] - harmonic[branches - first])
    assert spans(result).mean() == pytest.approx(expected, rel=0.02)
    both_in_one_step = 4000 * (branches - first) - len(result.outcome.stopped)
    assert 0 <= both_in_one_step < 0.03 * 4000 * branches
    tokens = result.stream.output_tokens[result.completed].sum() + sum(result.outcome.stopped.values())
    each = sum(harmonic[branches] - harmonic[branches - min(i, first)] for i in range(1, branches + 1))
    assert tokens / 4000 == pytest.approx(mean * each, rel=0.02)


def test_a_graph_takes_its_longest_path() -> None:
    """plan -> (a, b) -> sum: with equal steps, the tokens of the longest way and a prompt's step for each node."""
    load = workload(
        [
            {"name": "sum", "after": ["a", "b"], "reads": ["a", "b"], "output": 7},
            {"name": "plan", "output": 5},
            {"name": "a", "after": ["plan"], "inherits": "plan", "count": 3, "output": 40},
            {"name": "b", "after": ["plan"], "inherits": "plan", "output": 90, "delay_s": 0.5},
        ]
    )
    result = simulated(load, 3)
    assert spans(result) == pytest.approx((5 + 90 + 7) * STEP_S + 0.5)
    names = [result.stream.class_names[i] for i in result.stream.class_index]
    prompts = dict(zip(names, result.stream.prompt_tokens, strict=True))
    assert prompts == {"plan": 32, "a": 32 + 5 + 32, "b": 69, "sum": 32 + 3 * 40 + 90}


def test_parts_of_a_prompt_that_come_one_by_one_are_computed_as_they_come() -> None:
    """The last of four parts comes after 3 s: what is left then is one step; a part behind a late one waits for it."""
    parts = [{"name": f"p{i}", "from_s": float(i), "after": [f"p{i - 1}"] if i else [], "output": 1} for i in range(4)]
    for i, part in enumerate(parts[1:]):
        part["inherits"] = f"p{i}"
    result = simulated(workload(parts), 2)
    assert result.arrival_s[:4] == pytest.approx([0, 1, 2, 3])
    assert result.ttft_s == pytest.approx(STEP_S)
    assert result.stream.prompt_tokens[:4].tolist() == [32, 32 + 33, 64 + 34, 96 + 35]


def test_one_node_is_the_workload_without_a_graph() -> None:
    lengths = {"prompt": {"kind": "lognormal", "mean_tokens": 200, "sigma": 1, "max_tokens": 4000}}
    arrivals = {"kind": "poisson", "rate_rps": 3}
    load = workload([{"name": "all"}], arrivals=arrivals, **lengths)
    plain = load.model_copy(update={"graph": None})
    one, other = simulated(load, 300, seats=4), simulated(plain, 300, seats=4)
    for name in ("arrival", "scheduled", "first_token", "finish"):
        assert (getattr(one.outcome, name) == getattr(other.outcome, name)).all()
    assert one.offered_rate_rps == other.offered_rate_rps


def test_samples_share_their_prompt_and_children_their_parents_text() -> None:
    graph = [
        {"name": "root", "count": 2, "prompt": 64, "output": 32},
        {"name": "child", "after": ["root"], "inherits": "root", "count": 2, "prompt": 16, "output": 16},
    ]
    stream = build_stream(workload(graph), None, requests=2, seed=0)
    assert stream.hash_ids is not None
    first, second, child, other = stream.hash_ids[:4]
    assert first[:4] == second[:4]
    assert not set(first[4:]) & set(second[4:])
    assert child[:6] == first
    assert other[:6] == second
    assert not set(child) & {name for names in stream.hash_ids[4:] for name in names}


# --- laws -----------------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    for i in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 4))
        after = sorted(draw(st.sets(st.sampled_from([n["name"] for n in nodes]))) if nodes else ())
        nodes.append(
            {
                "name": f"n{i}",
                "count": count,
                "after": after,
                "first": draw(st.none() | st.integers(1, count)),
                "delay_s": draw(st.sampled_from([0.0, 0.013, 0.5])),
                "prompt": {"kind": "lognormal", "mean_tokens": 60, "sigma": 1.0, "max_tokens": 400},
                "output": {"kind": "lognormal", "mean_tokens": 30, "sigma": 1.0, "max_tokens": 200},
            }
        )
    return nodes


@settings(max_examples=20, deadline=None)
@given(
    graphs(),
    st.integers(2, 9),
    st.sampled_from(["vllm-fcfs", "sarathi", "vllm-priority"]),
    st.booleans(),
    st.sampled_from([{"kind": "poisson", "rate_rps": 1.0}, {"kind": "closed_loop", "users": 3}]),
)
def test_every_branch_is_answered_or_aborted_and_jumps_are_exact(
    graph: list[dict[str, Any]], seats: int, policy: str, asynchronous: bool, arrivals: dict[str, Any]
) -> None:
    load = workload(graph, arrivals=arrivals)
    own = {"asynchronous": asynchronous and policy != "sarathi"}
    jumped = simulated(load, 12, seats=seats, policy=policy, instances=2, **own)
    single = simulated(load, 12, seats=seats, policy=policy, instances=2, single_steps=True, **own)
    for name in ("arrival", "scheduled", "first_token", "finish"):
        assert (getattr(jumped.outcome, name) == getattr(single.outcome, name)).all()
    outcome, stream = jumped.outcome, jumped.stream
    assert outcome.stopped == single.outcome.stopped
    assert stream.graph is not None
    assert int(jumped.completed.sum()) + len(outcome.stopped) == len(stream)
    assert all(0 <= tokens < stream.output_tokens[number] for number, tokens in outcome.stopped.items())
    assert (outcome.arrival >= 0).all()
    size, begin = stream.graph.size, stream.graph.begin
    finish = np.where(outcome.finish >= 0, outcome.finish, np.iinfo(np.int64).max).reshape(-1, size)
    arrival = outcome.arrival.reshape(-1, size)
    for node, after in enumerate(stream.graph.after):
        for other in after:
            answers = np.sort(finish[:, begin[other] : begin[other] + stream.graph.count[other]], axis=1)
            over = answers[:, stream.graph.first[other] - 1]
            assert (arrival[:, begin[node]] >= over + stream.graph.delay[node]).all(), "sent before what it waits for"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_lets_go_of_what_is_aborted(policy: str) -> None:
    tries = {"name": "tries", "count": 5, "first": 2, "output": exponential(60)}
    graph: list[dict[str, Any]] = [tries, {"name": "sum", "after": ["tries"]}]
    result = simulated(workload(graph, arrivals={"kind": "closed_loop", "users": 3}), 20, seats=6, policy=policy)
    assert int(result.completed.sum()) + len(result.outcome.stopped) == 20 * 6
    assert result.outcome.stopped
    assert not result.unserved


def test_who_comes_later_than_the_next_family_does_not_turn_the_clock_back() -> None:
    """Every node of a family waits for half a second, in which the next families come."""
    timed = [{"name": "a", "from_s": 0.5}, {"name": "b", "delay_s": 0.75}]
    graph: list[dict[str, Any]] = [*timed, {"name": "c", "after": ["a"]}]
    arrivals = {"kind": "fixed", "rate_rps": 10}
    result = simulated(workload(graph, arrivals=arrivals), 20)
    families = np.arange(20) / 10
    assert result.arrival_s[0::3] == pytest.approx(families + 0.5)
    assert result.arrival_s[1::3] == pytest.approx(families + 0.75)
    assert result.arrival_s[2::3] == pytest.approx(result.finish_s[0::3])
    assert result.e2el_s == pytest.approx(10 * STEP_S, abs=2 * STEP_S), "newcomers join at the end of a step"


@pytest.mark.parametrize("first", [1, 2])
def test_a_node_whose_requests_no_engine_takes_is_over_at_once(first: int) -> None:
    """Prompts longer than the model's context: who waited for their answers is sent when they are refused."""
    long = {"name": "long", "count": 2, "first": first, "prompt": 70_000}
    result = simulated(workload([long, {"name": "next", "after": ["long"]}]), 2)
    assert result.refused == 4
    assert result.completed.tolist() == [False, False, True] * 2
    assert result.arrival_s == pytest.approx([0, 0, 0, 100, 100, 100])


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ("[{name: a, after: [c]}, {name: b, after: [a]}, {name: c, after: [b]}]", "graph.0.after: a waits for itself"),
        ("[{name: a, count: 3, first: 4}]", "graph.0.first: a has 3 branches, so no 4 can be joined"),
        ("[{name: a}, {name: b, after: [aa]}]", "graph.1.after: no node is called 'aa', did you mean a"),
        ("[{name: a}, {name: a}]", "graph.1.name: two nodes are called a"),
        ("[{name: a}, {name: b, inherits: a}]", "graph.1.inherits: b does not wait for a"),
        ("[{name: a, count: 2, first: 1}, {name: b, after: [a], reads: [a]}]", "graph.1.reads: which answers of a"),
        ("[{name: a, count: 2}, {name: b, after: [a], inherits: a, count: 3}]", "graph.1.count: a has 2 texts"),
        ("[{name: a}]\nclasses: [{name: x}]", "classes: a request graph has its own"),
    ],
)
def test_graphs_that_cannot_run_are_refused_with_their_place(graph: str, message: str) -> None:
    text = (
        "schema: simtune/workload@1\nname: w\narrivals: {kind: poisson, rate_rps: 1}\n"
        f"prompt: {{kind: fixed, tokens: 5}}\noutput: {{kind: fixed, tokens: 5}}\ngraph: {graph}\n"
    )
    with pytest.raises(SpecError) as caught:
        Workload.from_text(text)
    assert message in str(caught.value)


def test_instances_that_come_and_go_do_not_go_with_a_graph() -> None:
    pool = {"hardware": "h100-sxm", "instances": 2, "batching": {"max_num_seqs": 8, "max_num_batched_tokens": 512}}
    events = [{"kind": "failure", "at_s": 1.0, "pool": "mixed", "instance": 0}]
    plan = Plan.model_validate({"name": "p", "model": "llama-3.1-8b", "pools": [pool], "events": events}, strict=False)
    with pytest.raises(UsageError, match="events and a request graph are mutually exclusive; remove the events"):
        simtune.simulate(workload([{"name": "a"}]), plan=plan, costs=Constant(), requests=2)


# --- latency of a family ----------------------------------------------------------------------------------


def fork_join(**fields: Any) -> Workload:
    """A root of 10 tokens, three branches of 20, and a join of 5: (10 + 20 + 5) steps of 10 ms from root to join."""
    graph = [
        {"name": "root", "output": 10},
        {"name": "branch", "after": ["root"], "count": 3, "output": 20},
        {"name": "join", "after": ["branch"], "output": 5, "delay_s": 0.5},
    ]
    return workload(graph, **fields)


def test_a_family_takes_from_its_arrival_until_its_join() -> None:
    result = simulated(fork_join(), 4)
    assert result.values("family") == pytest.approx([0.35 + 0.5] * 4, abs=2e-3)
    assert result.family_s.tolist() == np.repeat(result.values("family"), 5).tolist()
    summary = result.summary()
    family = summary.metrics["family"]
    assert family.count == 4
    assert family.mean == pytest.approx(0.85, abs=2e-3)
    assert family.p99 is not None
    e2el_p99 = summary.metrics["e2el"].p99
    assert e2el_p99 is not None
    assert e2el_p99 < 0.25
    table = requests_table(result)
    assert table["family_s"] == result.family_s.tolist()


def test_a_limit_of_families_is_judged_and_counts_in_goodput() -> None:
    result = simulated(fork_join(), 4)
    for limit_s, met in ((1.0, True), (0.5, False)):
        judged = dataclasses.replace(result, slo=Slo(family_s={"p95": limit_s}))
        assert (judged.meets_slo, judged.limits[0].met) == (met, met)
        assert judged.slo_attainment == float(met)
    assert str(judged.limits[0]).startswith("p95 Family ≤ 500 ms")


def test_loads_without_a_graph_have_no_families() -> None:
    result = simulated(workload([{"name": "a", "output": 10}]), 2)
    plain = dataclasses.replace(result, stream=dataclasses.replace(result.stream, graph=None))
    assert "family" not in plain.summary().metrics
    assert "family_s" not in requests_table(plain)
    with pytest.raises(
        UsageError, match=r"slo.family_s limits families of a request graph or sessions, and this load has none"
    ):
        _ = dataclasses.replace(plain, slo=Slo(family_s={"p95": 1.0})).limits
