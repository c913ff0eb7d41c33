"""Autoscaled pools: by hand, against a small simulation of their own, and as a plan states them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import to_ticks
from simtune.errors import SpecError, UsageError
from simtune.results.outcome import Outcome, PoolInstances
from simtune.results.result import Result
from simtune.runs.price import price
from simtune.sim import autoscaler
from simtune.sim.audit import violations
from simtune.sim.autoscaler import Estimate, PoolReading, _Work, estimate, wanted
from simtune.sim.deployment import deploy
from simtune.sim.families import check_graph_runs
from simtune.sim.plan_parts import OwnCosts
from simtune.sim.streamed import StreamedLoad, simulate_streamed
from simtune.specs.autoscaling import SaturationRule, SlaRule
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.workload import FixedLength, Piecewise, Segment, Workload
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream, build_stream
from tests.sim.scaled_queues import Rule, ScaledQueues, scaling_of

COLUMNS = ("scheduled", "first_token", "transferred", "finish", "core")
MODEL, EXPERTS, HARDWARE = load_model("llama-3.1-8b"), load_model("qwen3-30b-a3b"), load_hardware("h100-sxm")
ONE_AT_A_TIME = {"max_num_seqs": 1, "max_num_batched_tokens": 8192}
MANY = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}


def plan_of(
    autoscaling: dict[str, Any] | None, *, instances: int = 1, batching: dict[str, int] | None = None, **keys: Any
) -> Plan:
    """A plan of one pool, with more keys of the pool."""
    pool = {
        "hardware": "h100-sxm",
        "instances": instances,
        "kv_cache": {"num_blocks": 4096},
        "max_model_len": 8192,
        "batching": batching or ONE_AT_A_TIME,
        **({} if autoscaling is None else {"autoscaling": autoscaling}),
        **keys,
    }
    plan = {"name": "scaled", "model": "llama-3.1-8b", "pools": [pool], "router": {"kind": "least_outstanding"}}
    return Plan.model_validate(plan, strict=False)


def run(plan: Plan, stream: RequestStream, model: Model = MODEL, **how: Any) -> Result:
    """A step takes 1 ms, and each token in it another."""
    costs = OwnCosts(LinearCosts(step_s=1e-3, per_token_s=1e-3))
    return deploy(plan, model, HARDWARE, costs).simulate(stream, **how)


def scaled(result: Result) -> PoolInstances:
    (instances,) = result.outcome.scaled
    return instances


def counts(result: Result) -> list[tuple[float, int, int]]:
    """(second, accepting, held) after each change."""
    return [(round(tick / 2**40, 6), accepting, holding) for tick, accepting, holding in scaled(result).counts]


def at_rate(rates: Sequence[tuple[float, float]], prompt: int = 198, output: int = 1) -> RequestStream:
    """Requests at even intervals, (seconds, requests per second) after one another; each alone takes 0.2 s."""
    at: list[float] = []
    begin = 0.0
    for seconds, rate in rates:
        at += (begin + np.arange(round(seconds * rate)) / rate + 1e-3).tolist()
        begin += seconds
    return stream_of(at, [prompt] * len(at), [output] * len(at))


RATE = {"kind": "rate", "requests_per_s": 4.0}


def test_a_constant_load_never_scales() -> None:
    scaling = {"rule": RATE, "startup_s": 5.0, "max_instances": 8, "every_s": 10.0}
    stream = at_rate([(200, 7.5)])
    result, fixed = run(plan_of(scaling, instances=2), stream), run(plan_of(None, instances=2), stream)
    assert counts(result) == [(0.0, 2, 2)]
    assert (scaled(result).starts, scaled(result).drains) == (0, 0)
    assert result.outcome.finish.tolist() == fixed.outcome.finish.tolist()


@pytest.mark.parametrize("rate", [4.0, 6.0, 8.0, 8.1, 11.9])
def test_a_step_load_settles_at_the_load_over_the_capacity_after_the_start_up(rate: float) -> None:
    """1 request/s for 100 s, then `rate`: the look at 110 s is the first that reads the new rate."""
    scaling = {"rule": RATE, "startup_s": 7.0, "max_instances": 8, "every_s": 10.0}
    result = run(plan_of(scaling), at_rate([(100, 1.0), (100, rate)]))
    needed_now = math.ceil(rate / 4.0)
    started = [] if needed_now == 1 else [(110.0, 1, needed_now), (117.0, needed_now, needed_now)]
    assert counts(result) == [(0.0, 1, 1), *started]
    assert result.completed.all()


# --- beside queues that are simulated apart ---------------------------------------------------------------

RULES = st.one_of(
    st.builds(Rule, st.just("rate"), st.just("under_way"), st.floats(1, 12)),
    st.builds(
        Rule,
        st.just("thresholds"),
        st.sampled_from(["waiting", "under_way"]),
        st.just(1.0),
        st.sampled_from([2.0, 3.0, 5.0]),
        st.sampled_from([0.0, 1.0]),
    ),
    st.builds(
        Rule,
        st.just("target"),
        st.sampled_from(["waiting", "under_way"]),
        st.floats(0.5, 4),
        tolerance=st.sampled_from([0.0, 0.1, 0.5]),
    ),
)


@settings(max_examples=60)
@given(
    rule=RULES,
    every_s=st.sampled_from([0.5, 1.0, 2.3]),
    startup_s=st.sampled_from([0.0, 0.7, 1.0, 4.1]),
    window_s=st.sampled_from([0.0, 3.0]),
    least=st.integers(1, 2),
    spare=st.integers(0, 4),
    seed=st.integers(0, 10**6),
)
def test_random_worlds_equal_queues_that_are_simulated_apart(
    rule: Rule, every_s: float, startup_s: float, window_s: float, least: int, spare: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    gaps = random.exponential(random.choice([0.05, 0.1, 0.3, 1.0], size=4).repeat(40))
    prompts = random.choice([99, 299, 499], size=len(gaps)).tolist()
    stream = stream_of(np.cumsum(gaps).tolist(), prompts, [1] * len(gaps))
    most, begin = least + spare, least + int(random.integers(spare + 1))
    limits = {"startup_s": startup_s, "min_instances": least, "max_instances": most, "stabilise_s": window_s}
    plan = plan_of(scaling_of(rule, every_s, **limits), instances=begin, async_scheduling=False)
    result = run(plan, stream)
    alone = {
        prompt: int(run(plan_of(None), stream_of([0.0], [prompt], [1])).outcome.finish[0]) for prompt in {*prompts}
    }
    apart = ScaledQueues(
        rule, to_ticks(every_s), to_ticks(startup_s), to_ticks(window_s), begin=begin, least=least, most=most
    )
    over = apart.run(result.outcome.arrival.tolist(), [alone[prompt] for prompt in prompts])
    assert result.outcome.finish.tolist() == over
    of_run = scaled(result)
    assert of_run.counts == tuple(row for row in apart.log if row[0] <= of_run.end)
    event(f"starts: {min(of_run.starts, 3)}+, drains: {min(of_run.drains, 3)}+")


# --- jumps ------------------------------------------------------------------------------------------------

WATCHING: list[dict[str, Any]] = [
    {"kind": "rate", "requests_per_s": 2.0},
    {"kind": "thresholds", "watch": "waiting", "up": 1, "down": 0},
    {"kind": "thresholds", "watch": "kv_cache", "up": 0.3, "down": 0.1},
    {"kind": "thresholds", "watch": "prompt_tokens", "up": 300, "down": 50},
    {"kind": "target", "watch": "under_way", "load": 3},
    {"kind": "target", "watch": "kv_cache", "load": 0.25, "tolerance": 0.0},
    {"kind": "target", "watch": "kv_demand", "load": 0.4},
    {"kind": "saturation", "kv_cache": 0.5, "waiting": 2, "waiting_spare": 1},
    {"kind": "sla", "ttft_s": 0.15, "tpot_s": 0.0055},
    {"kind": "sla", "ttft_s": 0.2},
]


def same(first: Outcome, second: Outcome) -> bool:
    return all(getattr(first, name).tolist() == getattr(second, name).tolist() for name in COLUMNS)


@settings(max_examples=80)
@given(
    rule=st.sampled_from(WATCHING),
    every_s=st.sampled_from([0.05, 0.4, 1.0]),
    startup_s=st.sampled_from([0.0, 0.25, 1.0]),
    roles=st.sampled_from(["mixed", "prefill-decode"]),
    policy=st.sampled_from(["vllm-fcfs", "sglang", "tensorrt-llm"]),
    parallelism=st.sampled_from([{}, {"pp": 2}, {"attention_dp": 2}]),
    async_scheduling=st.booleans(),
    blocks=st.sampled_from([65, 257]),
    front_end=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_jumps_equal_single_steps(
    rule: dict[str, Any],
    every_s: float,
    startup_s: float,
    roles: str,
    policy: str,
    parallelism: dict[str, Any],
    async_scheduling: bool,
    blocks: int,
    front_end: bool,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    scaling = {"rule": rule, "every_s": every_s, "startup_s": startup_s, "max_instances": 3, "stabilise_s": 0.0}
    pool = {
        "hardware": "h100-sxm",
        "instances": 1,
        "kv_cache": {"num_blocks": blocks, "prefix_caching": False},
        "max_model_len": 256,
        "batching": {"policy": policy, "max_num_seqs": 6, "max_num_batched_tokens": 128},
        "autoscaling": scaling,
        "parallelism": parallelism if roles == "mixed" else {},
        "async_scheduling": async_scheduling,
    }
    if front_end:
        pool["front_end"] = {"request_s": 0.02, "token_s": 1e-4}
    pairs = [("mixed", "mixed")] if roles == "mixed" else [("p", "prefill"), ("d", "decode")]
    plan = Plan.model_validate(
        {
            "name": "jumps",
            "model": "llama-3.1-8b",
            "pools": [{**pool, "name": name, "role": role} for name, role in pairs],
            "router": {"kind": str(random.choice(["round_robin", "least_tokens"]))},
            **({} if roles == "mixed" else {"link": {"bytes_per_s": 1e9, "setup_s": 1e-3, "descriptor_s": 0.0}}),
        },
        strict=False,
    )
    gaps = random.exponential(random.choice([0.02, 0.1, 0.5], size=3).repeat(20))
    prompts, outputs = random.integers(5, 120, len(gaps)), random.integers(1, 120, len(gaps))
    stream = stream_of(np.cumsum(gaps).tolist(), prompts.tolist(), outputs.tolist())
    model = EXPERTS if "attention_dp" in plan.pools[0].parallelism.model_fields_set else MODEL
    jumped, stepped, recorded = (
        run(plan, stream, model, **how) for how in ({}, {"single_steps": True}, {"record": True})
    )
    for run_again in (stepped, recorded):
        assert same(jumped.outcome, run_again.outcome)
        assert jumped.outcome.scaled == run_again.outcome.scaled
        assert jumped.outcome.steps == run_again.outcome.steps
    assert jumped.completed.all(), "draining loses no request"
    assert not list(violations(plan, [], jumped))
    event(f"{rule['kind']} {rule.get('watch', '')}: {min(2, sum(of.drains for of in jumped.outcome.scaled))}+ drained")


# --- rules by hand ----------------------------------------------------------------------------------------


def test_a_load_beyond_all_instances_starts_them_all_and_no_more() -> None:
    scaling = {"rule": RATE, "startup_s": 1.0, "max_instances": 3, "every_s": 10.0}
    result = run(plan_of(scaling), at_rate([(60, 40.0)]))
    assert counts(result)[:3] == [(0.0, 1, 1), (10.0, 1, 3), (11.0, 3, 3)]
    assert max(holding for _, _, holding in counts(result)) == 3


def test_an_instance_that_drains_keeps_its_gpus_until_its_last_request_ends() -> None:
    """A long answer on each of two instances; the look at 10 s drains the newer one, whose answer ends at 40 s."""
    scaling = {"rule": RATE, "startup_s": 1.0, "max_instances": 3, "every_s": 10.0, "stabilise_s": 0.0}
    stream = stream_of([0.0, 0.1, 15.0, 25.0, 35.0], [98] * 5, [20_000, 19_951, 2, 2, 2])
    plan = plan_of(scaling, instances=2, batching=MANY, max_model_len=32_768, kv_cache={"num_blocks": 8192})
    result = run(plan, stream)
    drained = [row for row in counts(result) if row[1:] != (2, 2)]
    assert drained[0] == (10.0, 1, 2)
    assert drained[1][1:] == (1, 1)
    assert drained[1][0] == pytest.approx(result.finish_s[1], abs=1e-3)
    assert drained[1][0] > 40.0
    assert set(result.outcome.core[2:].tolist()) == {0}, "nothing new goes to an instance that drains"
    held_s = [ticks / 2**40 for ticks in scaled(result).held_ticks]
    assert held_s == pytest.approx([scaled(result).end / 2**40, result.finish_s[1], 0.0], abs=1e-3)


def test_requests_that_wait_at_a_drained_instance_go_elsewhere_and_count_as_one_arrival_each() -> None:
    """Nine requests of 1 s at once on three instances, then nothing: each runs one, and two wait. The look at 1.5 s
    asks for one; those that wait at the two that go are sent to the one that stays, the newest instance's first."""
    rule = {"kind": "rate", "requests_per_s": 100.0}
    scaling = {"rule": rule, "startup_s": 0.0, "max_instances": 3, "every_s": 1.5}
    result = run(plan_of(scaling, instances=3), stream_of([0.0] * 9, [998] * 9, [1] * 9))
    assert result.outcome.core.tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 0]
    assert np.round(result.finish_s, 2).tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 5.0, 4.0]
    assert counts(result) == [(0.0, 3, 3), (1.5, 1, 3), (pytest.approx(2.0, abs=0.01), 1, 1)]


def test_thresholds_start_one_at_a_time_and_wait_for_it() -> None:
    """Ten requests of 1 s at once for one instance: one runs, nine wait. Looks at 0.4 and 0.8 s come before the first
    new instance is up; it serves nothing, since all were dealt out before."""
    rule = {"kind": "thresholds", "watch": "waiting", "up": 4, "down": 0}
    scaling = {"rule": rule, "startup_s": 1.0, "max_instances": 9, "every_s": 0.4}
    result = run(plan_of(scaling), stream_of([0.0] * 10, [998] * 10, [1] * 10))
    assert counts(result)[:5] == [(0.0, 1, 1), (0.4, 1, 2), (1.4, 2, 2), (1.6, 2, 3), (2.6, 3, 3)]


def test_a_target_is_not_corrected_within_its_tolerance_and_only_after_the_window() -> None:
    """21 and 22 requests under way for two instances that are to have 10 each: 5 % and 10 % more change nothing, 23 do;
    a load that goes is followed when the larger numbers are older than the window."""
    rule = {"kind": "target", "watch": "under_way", "load": 10}
    scaling = {"rule": rule, "startup_s": 0.0, "max_instances": 9, "every_s": 1.0, "stabilise_s": 4.0}
    at = [0.0] * 21 + [1.5, 2.5]
    result = run(plan_of(scaling, instances=2, batching=MANY), stream_of([*at, 30.0], [8] * 24, [300] * 23 + [1]))
    assert counts(result)[:2] == [(0.0, 2, 2), (3.0, 3, 3)]
    under_way = [int(((result.arrival_s < t) & (result.finish_s > t)).sum()) for t in range(30)]
    last_s = max(t for t in range(30) if under_way[t] > 20)
    assert under_way[last_s + 1] <= 10
    assert counts(result)[2][0] == last_s + 4 + 1
    assert counts(result)[2][1:] == (1, 1)


@pytest.mark.parametrize(
    ("waiting", "kv_cache", "asked"),
    [
        ([0, 0], [0.1, 0.1], 1),  # one could take over: 0.2 of 0.8, 0.1 to spare
        ([0, 0], [0.4, 0.35], 2),  # one would have 0.75 of 0.8
        ([0, 0], [0.75, 0.72], 3),  # less than 0.1 to spare on average
        ([3, 2], [0.1, 0.1], 3),  # fewer than 3 of 5 to spare on average
        ([5, 0], [0.1, 0.1], 2),  # one is saturated and does not count; the other stays
        ([5, 5], [0.1, 0.9], 3),  # all are saturated
    ],
)
def test_saturation_as_its_source_states_it(waiting: list[float], kv_cache: list[float], asked: int) -> None:
    reading = PoolReading(2, True, 0, 1, {"waiting": waiting, "kv_cache": kv_cache})
    assert wanted(SaturationRule(), reading) == asked
    unsettled = PoolReading(2, False, 0, 1, {"waiting": waiting, "kv_cache": kv_cache})
    assert wanted(SaturationRule(), unsettled) == 2


@pytest.mark.parametrize(
    ("estimates", "asked"),
    [
        # (TTFT, of the prompt alone, TPOT, fits) now, and with one instance less; limits of 1 s and 50 ms
        ([((1.1, 0.1, 0.01, True), (1.5, 0.1, 0.02, True)), ((0.9, 0.1, 0.01, True), (1.5, 0.1, 0.02, True))], 2),
        ([((1.1, 0.1, 0.01, True), (1.5, 0.1, 0.02, True)), ((1.2, 0.1, 0.01, True), (1.5, 0.1, 0.02, True))], 3),
        ([((0.1, 0.1, 0.06, True), (0.1, 0.1, 0.07, True)), ((0.1, 0.1, 0.06, True), (0.1, 0.1, 0.07, True))], 3),
        ([((0.3, 0.1, 0.01, True), (0.8, 0.1, 0.039, True)), ((0.1, 0.1, 0.01, True), (0.1, 0.1, 0.02, True))], 1),
        ([((0.3, 0.1, 0.01, True), (0.83, 0.1, 0.03, True)), ((0.1, 0.1, 0.01, True), (0.1, 0.1, 0.02, True))], 2),
        ([((0.3, 0.1, 0.01, True), (0.8, 0.1, 0.041, True)), ((0.1, 0.1, 0.01, True), (0.1, 0.1, 0.02, True))], 2),
        ([((0.1, 0.1, 0.01, True), (0.1, 0.1, 0.02, False)), ((0.1, 0.1, 0.01, True), (0.1, 0.1, 0.02, True))], 2),
    ],
)
def test_sla_as_its_source_states_it(estimates: list[Any], asked: int) -> None:
    read = [replace(Estimate(*now), after=Estimate(*after)) for now, after in estimates]
    rule = SlaRule(ttft_s=1.0, tpot_s=0.05)
    assert wanted(rule, PoolReading(2, True, 0, 1, {}, read)) == asked
    assert wanted(rule, PoolReading(2, False, 0, 1, {}, read)) == 2


def test_estimates_are_those_of_the_step_costs() -> None:
    """A step takes 1 ms, and each token in it another: 250 tokens by 100 take 101 + 101 + 51 ms."""
    deployment = deploy(plan_of(None, batching=MANY), MODEL, HARDWARE, OwnCosts(LinearCosts(1e-3, 1e-3)))
    (core,) = deployment.pools[0].cores(1, None)
    core.scheduler.max_num_batched_tokens = 104
    idle = estimate(core, _Work(0, 0, 0), 50)
    assert idle.ttft_s == idle.alone_s == pytest.approx(0.051)
    assert (idle.tpot_s, idle.fits) == (0.0, True)
    # Four decodes take four tokens of each step.
    busy = estimate(core, _Work(4, 400, 200), 50)
    assert busy.ttft_s == pytest.approx(0.105 + 0.105 + 0.055)
    assert busy.alone_s == pytest.approx(0.055)
    assert busy.tpot_s == pytest.approx(0.005)
    assert not estimate(core, _Work(4, 4096 * 16, 0), 50).fits


@pytest.mark.parametrize("batching", [{"max_num_seqs": 4, "max_num_batched_tokens": 4}, MANY])
def test_estimates_stay_within_the_tables_of_step_costs(batching: dict[str, int]) -> None:
    """Compiled costs end at the seats and at the longest request; the work of an instance less may lie beyond."""
    plan = plan_of(None, batching=batching, max_model_len=512)
    (core,) = deploy(plan, MODEL, HARDWARE).pools[0].cores(1, None)
    for decodes, tokens, waiting, prompt in product((0, 3, 4, 64, 900), (0, 10**3, 10**6), (0, 10**5), (0, 7, 512)):
        read = estimate(core, _Work(decodes, tokens, waiting), prompt)
        assert 0.0 <= read.alone_s <= read.ttft_s < 1e6
        assert (read.tpot_s > 0) == (decodes > 0)


def test_an_sla_starts_an_instance_when_it_is_missed_and_drains_it_when_it_is_not_needed() -> None:
    """Ten requests/s take 0.1 s of prefill each, and more for their answers: one instance falls behind."""
    rule = {"kind": "sla", "ttft_s": 1.0}
    scaling = {"rule": rule, "startup_s": 2.0, "max_instances": 8, "every_s": 1.0, "stabilise_s": 5.0}
    plan, stream = plan_of(scaling, batching=MANY), at_rate([(60, 10.0), (100, 1.0)], prompt=98, output=10)
    result, fixed = run(plan, stream), run(plan_of(None, batching=MANY), stream)
    under_load = result.arrival_s < 60
    assert fixed.ttft_s[under_load].max() > 4.0, "the queue grows as long as the load lasts"
    assert result.ttft_s[under_load].max() < 2.5, "the limit, the next look, and the start-up"
    first_s = counts(result)[1][0]
    assert counts(result)[1:3] == [(first_s, 1, 2), (first_s + 2.0, 2, 2)]
    assert result.ttft_s[result.arrival_s < first_s - 1.0].max() > 1.0
    assert scaled(result).starts == scaled(result).drains == 2, "once its queue is gone one instance seems enough"


def test_prefill_and_decode_pools_scale_by_themselves() -> None:
    """Prompts of 0.9 s need two prefill instances at 2 requests/s; one decode instance is enough for their answers."""
    shared = {"hardware": "h100-sxm", "instances": 1, "kv_cache": {"num_blocks": 4096}, "max_model_len": 8192}
    rules = {"prefill": {"kind": "rate", "requests_per_s": 1.0}, "decode": {"kind": "rate", "requests_per_s": 4.0}}
    pools = [
        {
            **shared,
            "name": role,
            "role": role,
            "batching": ONE_AT_A_TIME if role == "prefill" else MANY,
            "autoscaling": {"rule": rule, "startup_s": 3.0, "max_instances": 4, "every_s": 10.0},
        }
        for role, rule in rules.items()
    ]
    link = {"bytes_per_s": 1e15, "setup_s": 0.0, "descriptor_s": 0.0}
    plan = Plan.model_validate(
        {"name": "apart", "model": MODEL.name, "pools": pools, "link": link, "router": {"kind": "least_outstanding"}},
        strict=False,
    )
    result = run(plan, at_rate([(50, 0.5), (50, 2.0)], prompt=898, output=20))
    prefill, decode = result.outcome.scaled
    assert (prefill.pool, decode.pool) == ("prefill", "decode")
    assert [row[1:] for row in prefill.counts] == [(1, 1), (1, 2), (2, 2)]
    assert [round(row[0] / 2**40, 3) for row in prefill.counts] == [0.0, 60.0, 63.0]
    assert decode.counts == ((0, 1, 1),)
    assert result.completed.all()
    assert not list(violations(plan, [], result))


def test_a_pool_that_may_not_scale_is_the_pool_without_autoscaling() -> None:
    scaling = {"rule": {"kind": "target", "watch": "kv_demand", "load": 0.2}, "startup_s": 1.0, "max_instances": 2}
    stream = at_rate([(30, 9.0)], output=30)
    plans = (
        plan_of({**scaling, "min_instances": 2}, instances=2, batching=MANY),
        plan_of(None, instances=2, batching=MANY),
    )
    with_it, without = (run(plan, stream) for plan in plans)
    assert same(with_it.outcome, without.outcome)
    summaries = with_it.summary(), without.summary()
    assert summaries[0].energy_j == summaries[1].energy_j
    assert summaries[0].output_tokens_per_s_per_gpu == summaries[1].output_tokens_per_s_per_gpu
    (use,) = summaries[0].autoscaling
    assert use.gpu_hours == use.gpu_hours_of_most == pytest.approx(2 * use.hours)


# --- what a run costs -------------------------------------------------------------------------------------


def test_gpu_hours_energy_and_price_are_those_of_the_gpus_held() -> None:
    scaling = {"rule": RATE, "startup_s": 20.0, "max_instances": 4, "every_s": 10.0}
    plan = plan_of(scaling)
    result = run(plan, at_rate([(100, 1.0), (100, 7.0), (200, 1.0)]))
    end_s = scaled(result).end / 2**40
    # The second instance is started at 110 s; the look at 210 s is the first that reads 1 request/s.
    second_s = 100.0
    summary = result.summary()
    (use,) = summary.autoscaling
    assert use.gpu_hours == pytest.approx((end_s + second_s) / 3600, rel=1e-3)
    assert use.gpu_hours_of_most == pytest.approx(4 * end_s / 3600)
    assert (use.fewest, use.most, use.starts, use.drains) == (1, 2, 1, 1)
    assert summary.output_tokens_per_s is not None
    assert summary.output_tokens_per_s_per_gpu == pytest.approx(summary.output_tokens_per_s / use.mean_instances)
    assert [round(instance.held or 0.0, 3) for instance in summary.instances] == [1.0, round(second_s / end_s, 3), 0, 0]
    power = HARDWARE.device.power
    assert power is not None
    busy_s = sum(core.busy for core in result.outcome.cores) / 2**40
    expected_j = power.idle_w * (end_s + second_s) + (power.tdp_w - power.idle_w) * busy_s
    assert summary.energy_j == pytest.approx(expected_j, rel=1e-3)
    costs = OwnCosts(LinearCosts(step_s=1e-3, per_token_s=1e-3))
    paid = price(deploy(plan, MODEL, HARDWARE, costs), summary)
    assert paid is not None
    assert HARDWARE.device.price_per_hour_usd is not None
    assert paid.run_usd == pytest.approx(use.gpu_hours * HARDWARE.device.price_per_hour_usd)
    assert paid.run_usd_of_most == pytest.approx(use.gpu_hours_of_most * HARDWARE.device.price_per_hour_usd)
    assert paid.per_hour_usd == pytest.approx((paid.run_usd or 0.0) / use.hours)


def test_streamed_runs_scale_alike() -> None:
    load = Workload(
        name="w",
        requests=600,
        arrivals=Piecewise(segments=(Segment(for_s=30, rate_rps=1.0), Segment(for_s=30, rate_rps=9.0))),
        prompt=FixedLength(tokens=198),
        output=FixedLength(tokens=5),
    )
    rule = {"kind": "target", "watch": "under_way", "load": 2}
    plan = plan_of({"rule": rule, "startup_s": 2.0, "max_instances": 5, "every_s": 3.0, "stabilise_s": 6.0})
    deployment = deploy(plan, MODEL, HARDWARE, OwnCosts(LinearCosts(step_s=1e-3, per_token_s=1e-3)))
    streamed = simulate_streamed(deployment, StreamedLoad(load, None, requests=600, seed=0))
    assert streamed.outcome.scaled == deployment.simulate(build_stream(load, None, requests=600, seed=0)).outcome.scaled
    assert streamed.outcome.scaled[0].starts > 1


def test_an_audit_sees_counts_that_do_not_agree() -> None:
    plan = plan_of({"rule": RATE, "startup_s": 1.0, "max_instances": 3, "every_s": 10.0})
    result = run(plan, at_rate([(30, 7.0)]))
    assert not list(violations(plan, [], result))
    of = scaled(result)
    ticks = (of.held_ticks[0], of.held_ticks[1] - 1, *of.held_ticks[2:])
    for changed, words in (
        ({"held_ticks": ticks}, "instances of pool mixed hold GPUs for"),
        ({"held_ticks": (1, *of.held_ticks[1:])}, "instance 0 of pool mixed runs steps on GPUs that it does not hold"),
        ({"counts": ((0, 1, 4),)}, "pool mixed has 1 instances on the GPUs of 4 at tick 0"),
        ({"counts": ((0, 0, 1),)}, "pool mixed has 0 instances on the GPUs of 1 at tick 0"),
    ):
        result.outcome.scaled = (of._replace(**changed),)
        assert any(violation.startswith(words) for violation in violations(plan, [], result)), words


# --- what makes no sense ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("{rule: {kind: rate, requests_per_s: 0}, startup_s: 1, max_instances: 2}", "rule.requests_per_s: must be"),
        ("{rule: {kind: rate, requests_per_s: 1}, max_instances: 2}", "startup_s: is required and missing"),
        (
            "{rule: {kind: slo, ttft_s: 1}, startup_s: 1, max_instances: 2}",
            "rule: unknown kind 'slo': one of rate, thresholds, target, saturation, sla",
        ),
        (
            "{rule: {kind: thresholds, watch: waiting, up: 2, down: 2}, startup_s: 1, max_instances: 2}",
            "rule.up: up (2) must be above down (2)",
        ),
        (
            "{rule: {kind: target, watch: tokens, load: 2}, startup_s: 1, max_instances: 2}",
            "rule.watch: must be one of waiting, under_way, prompt_tokens, kv_cache, kv_demand",
        ),
        ("{rule: {kind: sla}, startup_s: 1, max_instances: 2}", "rule: has no limit; give ttft_s, tpot_s or both"),
        (
            "{rule: {kind: saturation, waiting: 3}, startup_s: 1, max_instances: 2}",
            "rule: waiting_spare (3) must be below waiting (3)",
        ),
        (
            "{rule: {kind: rate, requests_per_s: 1}, startup_s: 1, min_instances: 3, max_instances: 2}",
            "max_instances: 2 instances at most are fewer than min_instances (3)",
        ),
    ],
)
def test_autoscaling_that_makes_no_sense_is_refused_with_its_place(scaling: str, message: str) -> None:
    text = plan_of(None).to_yaml().replace("  instances: 1\n", f"  instances: 1\n  autoscaling: {scaling}\n")
    assert "autoscaling" in text
    with pytest.raises(SpecError) as error:
        Plan.from_text(text, "p.yaml")
    assert f"pools.0.autoscaling.{message}" in str(error.value)


def test_autoscaling_without_a_limit_is_refused() -> None:
    with pytest.raises(SpecError) as error:
        Plan.from_text(plan_of({"rule": RATE, "startup_s": 1.0, "max_instances": 2}).to_yaml().replace("max_inst", "#"))
    assert "pools.0.autoscaling: lacks max_instances, which is required unless ranks come and go" in str(error.value)


def test_what_does_not_go_with_autoscaling_is_refused() -> None:
    scaling = {"rule": {"kind": "target", "watch": "kv_cache", "load": 0.5}, "startup_s": 1.0, "max_instances": 4}
    data = plan_of(scaling).model_dump(mode="json", exclude_none=True)
    events = [{"kind": "failure", "at_s": 1.0, "pool": "mixed", "instance": 0}]
    with pytest.raises(ValueError, match="cannot be combined with events of the plan; remove one of the two"):
        Plan.model_validate({**data, "events": events}, strict=False)
    with pytest.raises(ValueError, match="the pool begins with 5, and autoscaling keeps 1 to 4; change either"):
        plan_of(scaling, instances=5)
    share = {"processors": 0.5, "bandwidth": 0.5}
    with pytest.raises(ValueError, match="instances on shares of the same GPUs cannot come and go alone"):
        plan_of(scaling, share=share)
    drafts = {
        "drafter": {"kind": "ngram", "lookup_max": 3},
        "scheme": {"kind": "chain", "tokens": 2},
        "acceptance": "a",
    }
    with pytest.raises(ValueError, match="the tokens of requests that draft cannot be watched"):
        plan_of(scaling, speculation=drafts)
    plan_of({**scaling, "rule": RATE}, speculation=drafts)
    with pytest.raises(UsageError, match="autoscaling and a request graph are mutually exclusive"):
        check_graph_runs(plan_of({**scaling, "rule": RATE}))


def test_a_policy_that_states_no_tokens_is_watched_by_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy from outside may derive from neither base class of the built-in ones."""
    monkeypatch.setattr(autoscaler, "running_tokens", lambda scheduler: -1)
    scaling = {"rule": {"kind": "target", "watch": "kv_cache", "load": 0.5}, "startup_s": 1.0, "max_instances": 4}
    with pytest.raises(
        UsageError, match="autoscaling reads the tokens of running requests, which policy vllm-fcfs does not"
    ):
        run(plan_of(scaling), stream_of([0.0], [8], [2]))
