"""Instances whose ranks come and go with their load: by hand, against a small simulation of their own, and as a plan
states them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
from simtune.errors import Infeasible, SpecError
from simtune.results.outcome import Outcome, PoolInstances
from simtune.results.result import Result
from simtune.runs.price import price
from simtune.sim.audit import violations
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.plan_parts import OwnCosts
from simtune.sim.streamed import StreamedLoad, simulate_streamed
from simtune.specs.catalog import load_hardware
from simtune.specs.plan import Plan
from simtune.specs.routing import RoundRobinRouting
from simtune.specs.workload import FixedLength, Piecewise, Segment, Workload
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream, build_stream
from tests.costs.made_up import hardware, model, moe
from tests.oracles.scaled_ranks import ScaledRanks
from tests.sim.scaled_queues import Rule, scaling_of
from tests.sim.test_autoscaling import WATCHING

EXPERTS = model(feed_forward=moe())
HARDWARE = hardware(host_step_s=1e-4)
H100 = load_hardware("h100-sxm")
MOST = 4
"""Ranks of an instance; two of them have room for all experts."""
COLUMNS = ("scheduled", "first_token", "transferred", "finish", "core", "resent")


class ByRanks:
    """Steps of 12 ms on one rank, of 12 / n ms on n of them."""

    def __init__(self, ranks: int = MOST, per_token_s: float = 0.0) -> None:
        self._per_token_s = per_token_s
        self._costs = LinearCosts(step_s=0.012 / ranks, per_token_s=per_token_s)

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        return self._costs.decode(num_decodes, context_tokens)

    def mixed(self, *step: Any) -> int:
        return self._costs.mixed(*step)

    def with_ranks(self, ranks: int) -> ByRanks:
        return ByRanks(ranks, self._per_token_s)


def pool_of(autoscaling: dict[str, Any] | None, **keys: Any) -> dict[str, Any]:
    return {
        "hardware": "h100-sxm",
        "instances": 1,
        "parallelism": {"attention_dp": MOST, "expert_parallel": True, "expert_replicas": 24, "elastic_experts": True},
        "batching": {"max_num_seqs": 2, "max_num_batched_tokens": 512},
        "kv_cache": {"num_blocks": 4096},
        "max_model_len": 4096,
        "async_scheduling": False,
        **({} if autoscaling is None else {"autoscaling": autoscaling}),
        **keys,
    }


def plan_of(autoscaling: dict[str, Any] | None, *events: dict[str, Any], **keys: Any) -> Plan:
    """A plan of one pool, with more keys of the pool."""
    data = {
        "name": "ranks",
        "model": "tiny",
        "pools": [pool_of(autoscaling, **keys)],
        "router": {"kind": "least_outstanding"},
        "events": list(events),
    }
    return Plan.model_validate(data, strict=False)


def deployed(plan: Plan, per_token_s: float = 0.0) -> Deployment:
    return deploy(plan, EXPERTS, H100, OwnCosts(ByRanks(per_token_s=per_token_s)))


def run(plan: Plan, stream: RequestStream, **how: Any) -> Result:
    return deployed(plan).simulate(stream, **how)


def scaled(result: Result) -> PoolInstances:
    (ranks,) = result.outcome.scaled
    return ranks


def counts(result: Result) -> list[tuple[float, int, int]]:
    """(second, accepting, held) after each change."""
    return [(round(tick / 2**40, 6), accepting, holding) for tick, accepting, holding in scaled(result).counts]


def at_rate(*rates: tuple[float, float]) -> RequestStream:
    """Requests at even intervals, (seconds, requests per second) after one another."""
    at: list[float] = []
    begin = 0.0
    for seconds, rate in rates:
        at += (begin + np.arange(round(seconds * rate)) / rate + 1e-3).tolist()
        begin += seconds
    return stream_of(at, [8] * len(at), [5] * len(at))


def scale(ranks: int, at_s: float, pause_s: float) -> dict[str, Any]:
    return {"kind": "scale", "pool": "mixed", "instance": 0, "ranks": ranks, "at_s": at_s, "pause_s": pause_s}


RATE = {"kind": "rate", "requests_per_s": 4.0}
BY_RATE = {"rule": RATE, "startup_s": 7.0, "min_ranks": 1, "pause_s": 2.0, "every_s": 10.0}


# --- by hand ------------------------------------------------------------------------------------------------


def test_a_constant_load_never_scales() -> None:
    stream = at_rate((100, 7.5))
    result = run(plan_of({**BY_RATE, "initial_ranks": 2}), stream)
    assert counts(result) == [(0.0, 2, 2)]
    assert (scaled(result).starts, scaled(result).drains, result.outcome.rank_turns) == (0, 0, ())
    fixed = run(plan_of(None, scale(2, 0.0, 0.0)), stream)
    assert same(result.outcome, fixed.outcome)


@pytest.mark.parametrize("rate", [4.0, 6.0, 8.0, 8.1, 15.9, 30.0])
def test_a_step_load_settles_at_the_load_over_the_capacity_after_start_and_pause(rate: float) -> None:
    """1 request/s for 100 s, then `rate`: the look at 110 s is the first that reads the new rate."""
    result = run(plan_of(BY_RATE), at_rate((100, 1.0), (100, rate)))
    needed_now = min(MOST, math.ceil(rate / RATE["requests_per_s"]))  # type: ignore[operator]
    started = [] if needed_now == 1 else [(110.0, 1, needed_now), (119.0, needed_now, needed_now)]
    assert counts(result) == [(0.0, 1, 1), *started]
    assert result.completed.all()
    assert [(turn.at / 2**40, turn.ranks, turn.pause / 2**40) for turn in result.outcome.rank_turns] == [
        (117.0, needed_now, 2.0) for _ in started[:1]
    ]


def test_as_many_at_least_as_at_most_are_a_fixed_number_to_the_tick() -> None:
    random = np.random.default_rng(0)
    at = np.cumsum(random.exponential(0.01, 300)).tolist()
    stream = stream_of(at, random.integers(1, 400, 300).tolist(), random.integers(1, 60, 300).tolist())
    still = {"rule": {"kind": "target", "watch": "under_way", "load": 1.0}, "startup_s": 1.0, "min_ranks": MOST}
    scaling, fixed = (run(plan_of(autoscaling), stream) for autoscaling in (still, None))
    assert same(scaling.outcome, fixed.outcome)
    assert scaling.outcome.steps == fixed.outcome.steps
    (use,) = scaling.summary().autoscaling
    assert use.gpu_hours == use.gpu_hours_of_most == pytest.approx(MOST * use.hours)
    assert scaling.summary().energy_j == fixed.summary().energy_j


def test_ranks_that_join_do_so_as_by_an_event() -> None:
    """The only change is one to four ranks, 17 s after the look that asks for them."""
    stream = at_rate((10, 1.0), (40, 20.0))
    scaling = {**BY_RATE, "startup_s": 3.7, "every_s": 11.0, "stabilise_s": 1000.0}
    result = run(plan_of(scaling), stream)
    (turn,) = result.outcome.rank_turns
    assert turn.ranks == MOST
    by_event = run(plan_of(None, scale(1, 0.0, 0.0), scale(MOST, turn.at / TICKS_PER_SECOND, 2.0)), stream)
    assert same(result.outcome, by_event.outcome)
    assert by_event.outcome.rank_turns[-1] == turn


def test_a_rank_that_drains_keeps_its_gpus_until_the_instance_goes_on_without_it() -> None:
    """Four ranks with an answer each, steps of 3 ms. The look at 1 s asks for one rank; the last answer of the three
    that go ends at 2.7 s, the pause 2 s later. The answer that stays goes on with steps of 12 ms."""
    rule = {"kind": "target", "watch": "under_way", "load": 100.0}
    scaling = {
        "rule": rule, "startup_s": 1.0, "min_ranks": 1, "initial_ranks": MOST, "pause_s": 2.0, "every_s": 1.0,
        "stabilise_s": 0.0,
    }  # fmt: skip
    result = run(plan_of(scaling), stream_of([0.0] * 4 + [1.501, 2.8], [8] * 6, [1200, 600, 900, 300, 1, 1]))
    assert result.outcome.core.tolist() == [0, 1, 2, 3, 0, 0], "nothing new goes to ranks that drain"
    assert result.outcome.resent.tolist() == [0] * 6
    assert counts(result) == [(0.0, 4, 4), (1.0, 1, 4), (4.7, 1, 1)]
    ends_s = [4.7 + 300 * 0.012, 1.8, 2.7, 0.9]
    assert result.finish_s[:4].tolist() == pytest.approx(ends_s)
    # Of the requests that come later one is computed in the next step, the other one in that after the pause.
    assert result.finish_s[4:].tolist() == pytest.approx([1.503 + 0.003, 4.7 + 2 * 0.012])
    held_s = [ticks / 2**40 for ticks in scaled(result).held_ticks]
    assert held_s == pytest.approx([scaled(result).end / 2**40, 4.7, 4.7, 4.7])
    busy_s = scaled(result).busy_ticks[0] / 2**40
    assert busy_s == pytest.approx(4 * 2.7 + (ends_s[0] - 4.7))


def test_a_pause_follows_from_the_bytes_of_experts_unless_it_is_stated() -> None:
    """Two ranks hold 4 of 8 experts of 3 x 64 x 32 values in each of two layers; half of these were there before."""
    autoscaling = {"rule": RATE, "startup_s": 7.0, "min_ranks": 2, "every_s": 10.0, "initial_ranks": 3}
    parallelism = {**pool_of(None)["parallelism"], "expert_replicas": 8}
    plan = plan_of(autoscaling, parallelism=parallelism, hardware="made-up")
    result = deploy(plan, EXPERTS, HARDWARE).simulate(at_rate((30, 1.0)))
    (turn,) = result.outcome.rank_turns
    assert turn.ranks == 2
    assert turn.pause / 2**40 == pytest.approx(2 * 4 * 3 * 64 * 32 * 2 * 0.5 / 1e8)


def test_instances_scale_their_ranks_each_by_its_own_load() -> None:
    """10 requests/s to two instances of one rank each: in turn the first looks read 5 requests/s in each, and 10 in the
    first one if that is idle whenever a request comes."""
    plan = plan_of({**BY_RATE, "startup_s": 1.0, "every_s": 5.0}, instances=2)
    of_first = run(plan, at_rate((40, 10.0)))
    assert of_first.outcome.rank_turns[0].ranks == 3
    assert {turn.instance for turn in of_first.outcome.rank_turns} == {0}
    result = run(plan.model_copy(update={"router": RoundRobinRouting()}), at_rate((40, 10.0)))
    assert {(turn.instance, turn.ranks) for turn in result.outcome.rank_turns} == {(0, 2), (1, 2)}
    assert counts(result)[0] == (0.0, 2, 2)
    assert counts(result)[-1][1:] == (4, 4)
    (use,) = result.summary().autoscaling
    assert use.mean_ranks == pytest.approx(MOST * use.mean_instances)


# --- beside a simulation of its own -------------------------------------------------------------------------

RULES = st.one_of(
    st.builds(Rule, st.just("rate"), st.just("under_way"), st.floats(1, 40)),
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


@settings(max_examples=150)
@given(
    rule=RULES,
    every_s=st.sampled_from([0.1, 0.25, 0.6]),
    startup_s=st.sampled_from([0.0, 0.07, 0.25, 1.1]),
    pause_s=st.sampled_from([0.0, 0.03, 0.4]),
    window_s=st.sampled_from([0.0, 0.5]),
    least=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_random_worlds_equal_ranks_that_are_simulated_apart(
    rule: Rule, every_s: float, startup_s: float, pause_s: float, window_s: float, least: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    gaps = random.exponential(random.choice([0.002, 0.01, 0.03, 0.2], size=4).repeat(30))
    outputs = random.choice([1, 5, 40], size=len(gaps)).tolist()
    stream = stream_of(np.cumsum(gaps).tolist(), [8] * len(gaps), outputs)
    first = int(random.integers(least, MOST + 1))
    limits = {
        "startup_s": startup_s, "min_ranks": least, "initial_ranks": first, "pause_s": pause_s,
        "stabilise_s": window_s,
    }  # fmt: skip
    plan = plan_of(scaling_of(rule, every_s, **limits))
    apart = ScaledRanks(
        rule, to_ticks(every_s), to_ticks(startup_s), to_ticks(window_s), to_ticks(pause_s),
        step=[to_ticks(0.012 / n) for n in range(1, MOST + 1)], first=first, least=least, seats=2,
    )  # fmt: skip
    result = run(plan, stream)
    over = apart.run(result.outcome.arrival.tolist(), outputs)
    assert result.outcome.finish.tolist() == over
    of_run = scaled(result)
    assert of_run.counts == tuple(row for row in apart.log if row[0] <= of_run.end)
    ticks = [*(tick for tick, _, _ in of_run.counts[1:]), of_run.end]
    integral = sum(held * (until - at) for (at, _, held), until in zip(of_run.counts, ticks, strict=True))
    (use,) = result.summary().autoscaling
    assert use.gpu_hours == pytest.approx(integral / TICKS_PER_SECOND / 3600)
    event(f"starts: {min(of_run.starts, 3)}+, drains: {min(of_run.drains, 3)}+")


# --- jumps --------------------------------------------------------------------------------------------------


def same(first: Outcome, second: Outcome) -> bool:
    return all(getattr(first, name).tolist() == getattr(second, name).tolist() for name in COLUMNS)


@settings(max_examples=120)
@given(
    rule=st.sampled_from(WATCHING),
    every_s=st.sampled_from([0.05, 0.4, 1.0]),
    startup_s=st.sampled_from([0.0, 0.25, 1.0]),
    pause_s=st.sampled_from([0.0, 0.01, 0.3]),
    roles=st.sampled_from(["mixed", "prefill-decode"]),
    policy=st.sampled_from(["vllm-fcfs", "sglang", "tensorrt-llm"]),
    async_scheduling=st.booleans(),
    compiled=st.booleans(),
    instances=st.integers(1, 2),
    blocks=st.sampled_from([65, 257]),
    seed=st.integers(0, 10**6),
)
def test_jumps_equal_single_steps_and_no_request_is_lost(
    rule: dict[str, Any],
    every_s: float,
    startup_s: float,
    pause_s: float,
    roles: str,
    policy: str,
    async_scheduling: bool,
    compiled: bool,
    instances: int,
    blocks: int,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    least = int(random.integers(1, MOST))
    scaling = {
        "rule": rule, "every_s": every_s, "startup_s": startup_s, "pause_s": pause_s, "stabilise_s": 0.0,
        "min_ranks": least, "initial_ranks": int(random.integers(least, MOST + 1)),
    }  # fmt: skip
    pool = pool_of(
        scaling,
        hardware="made-up",
        instances=instances,
        kv_cache={"num_blocks": blocks, "prefix_caching": False},
        max_model_len=256,
        batching={"policy": policy, "max_num_seqs": 6, "max_num_batched_tokens": 128},
        async_scheduling=async_scheduling,
    )
    pairs = [("mixed", "mixed")] if roles == "mixed" else [("p", "prefill"), ("d", "decode")]
    plan = Plan.model_validate(
        {
            "name": "jumps",
            "model": "tiny",
            "pools": [{**pool, "name": name, "role": role} for name, role in pairs],
            "router": {"kind": str(random.choice(["round_robin", "least_tokens"]))},
            **({} if roles == "mixed" else {"link": {"bytes_per_s": 1e9, "setup_s": 1e-3, "descriptor_s": 0.0}}),
        },
        strict=False,
    )
    gaps = random.exponential(random.choice([0.002, 0.02, 0.3], size=3).repeat(25))
    prompts, outputs = random.integers(5, 120, len(gaps)), random.integers(1, 120, len(gaps))
    stream = stream_of(np.cumsum(gaps).tolist(), prompts.tolist(), outputs.tolist())
    costs = None if compiled else OwnCosts(ByRanks(per_token_s=2e-4))
    deployment = deploy(plan, EXPERTS, HARDWARE, costs)
    jumped, stepped, recorded = (
        deployment.simulate(stream, single_steps=single, record=record)
        for single, record in ((False, False), (True, False), (False, True))
    )
    for run_again in (stepped, recorded):
        assert same(jumped.outcome, run_again.outcome)
        assert jumped.outcome.scaled == run_again.outcome.scaled
        assert jumped.outcome.rank_turns == run_again.outcome.rank_turns
        assert jumped.outcome.steps == run_again.outcome.steps
    assert jumped.completed.all(), "draining loses no request"
    assert not jumped.outcome.resent.any()
    assert all(turn.lost == 0 for turn in jumped.outcome.rank_turns)
    assert not list(violations(plan, [], jumped))
    for of in jumped.outcome.scaled:
        assert sum(of.busy_ticks) <= sum(of.held_ticks)
    event(f"{rule['kind']} {rule.get('watch', '')}: {min(2, sum(of.drains for of in jumped.outcome.scaled))}+ drained")


# --- what a run costs ---------------------------------------------------------------------------------------


def test_gpu_hours_and_price_are_those_of_the_ranks_over_time() -> None:
    """One rank, from 110 s on a second one that steps from 119 s on; the look at 210 s is the first that reads the low
    rate again, and the second rank is idle then, so that it goes at 212 s."""
    plan = plan_of(BY_RATE)
    result = run(plan, at_rate((100, 1.0), (100, 7.0), (200, 1.0)))
    assert counts(result) == [(0.0, 1, 1), (110.0, 1, 2), (119.0, 2, 2), (210.0, 1, 2), (212.0, 1, 1)]
    end_s, second_s = scaled(result).end / 2**40, 212.0 - 110.0
    summary = result.summary()
    (use,) = summary.autoscaling
    assert use.gpu_hours == pytest.approx((end_s + second_s) / 3600)
    assert use.gpu_hours_of_most == pytest.approx(MOST * end_s / 3600)
    assert (use.fewest, use.most, use.starts, use.drains) == (1, 2, 1, 1)
    assert use.mean_ranks == pytest.approx((end_s + second_s) / end_s)
    assert use.mean_ranks is not None
    assert use.mean_instances == pytest.approx(use.mean_ranks / MOST)
    assert summary.output_tokens_per_s is not None
    assert summary.output_tokens_per_s_per_gpu == pytest.approx(summary.output_tokens_per_s / use.mean_ranks)
    assert "1 to 2 ranks" in use.sentence
    (instance,) = summary.instances
    assert instance.held == pytest.approx((end_s + second_s) / (MOST * end_s))
    paid = price(deployed(plan), summary)
    assert paid is not None
    assert H100.device.price_per_hour_usd is not None
    assert paid.run_usd == pytest.approx(use.gpu_hours * H100.device.price_per_hour_usd)
    assert paid.run_usd_of_most == pytest.approx(use.gpu_hours_of_most * H100.device.price_per_hour_usd)
    assert paid.per_hour_usd == pytest.approx((paid.run_usd or 0.0) / use.hours)


def test_energy_of_a_busy_instance_counts_each_rank_for_its_time() -> None:
    """An answer on each of four ranks, all of the time: four are busy until the pause, then one is."""
    rule = {"kind": "target", "watch": "under_way", "load": 100.0}
    scaling = {
        "rule": rule, "startup_s": 1.0, "min_ranks": 1, "initial_ranks": MOST, "pause_s": 2.0, "every_s": 1.0,
        "stabilise_s": 0.0,
    }  # fmt: skip
    result = run(plan_of(scaling), stream_of([0.0] * 4, [8] * 4, [1200, 600, 900, 300]))
    power = H100.device.power
    assert power is not None
    end_s = result.finish_s[0]
    held_s, busy_s = 4 * 4.7 + (end_s - 4.7), 4 * 2.7 + (end_s - 4.7)
    assert result.summary().energy_j == pytest.approx(power.idle_w * held_s + (power.tdp_w - power.idle_w) * busy_s)


def test_streamed_runs_scale_alike() -> None:
    load = Workload(
        name="w",
        requests=600,
        arrivals=Piecewise(segments=(Segment(for_s=30, rate_rps=1.0), Segment(for_s=10, rate_rps=90.0))),
        prompt=FixedLength(tokens=198),
        output=FixedLength(tokens=5),
    )
    rule = {"kind": "target", "watch": "under_way", "load": 1}
    scaling = {"rule": rule, "startup_s": 0.2, "min_ranks": 1, "pause_s": 0.1, "every_s": 0.3, "stabilise_s": 0.6}
    deployment = deployed(plan_of(scaling))
    streamed = simulate_streamed(deployment, StreamedLoad(load, None, requests=600, seed=0))
    drawn = deployment.simulate(build_stream(load, None, requests=600, seed=0))
    assert streamed.outcome.scaled == drawn.outcome.scaled
    assert streamed.outcome.rank_turns == drawn.outcome.rank_turns
    assert scaled(drawn).starts > 1


def test_an_audit_sees_counts_of_ranks_that_do_not_agree() -> None:
    plan = plan_of(BY_RATE)
    result = run(plan, at_rate((30, 7.0)))
    assert not list(violations(plan, [], result))
    of = scaled(result)
    for changed, words in (
        ({"held_ticks": (of.held_ticks[0] - 1, *of.held_ticks[1:])}, "ranks of pool mixed hold GPUs for"),
        (
            {"held_ticks": (1, *of.held_ticks[1:])},
            "rank 0 of instance 0 of pool mixed runs steps on GPUs that it does not hold",
        ),
        ({"counts": ((0, 1, 5),)}, "pool mixed has 1 ranks on the GPUs of 5 at tick 0"),
        ({"counts": ((0, 0, 1),)}, "pool mixed has 0 ranks on the GPUs of 1 at tick 0"),
    ):
        result.outcome.scaled = (of._replace(**changed),)
        assert any(violation.startswith(words) for violation in violations(plan, [], result)), words


# --- what makes no sense ------------------------------------------------------------------------------------

_RULE = "rule: {kind: rate, requests_per_s: 1}, startup_s: 1"


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (f"{{{_RULE}, min_ranks: 0}}", "min_ranks: must be"),
        (f"{{{_RULE}, min_ranks: 5}}", "min_ranks: an instance has at most 4 ranks, and this is 5; lower it, or raise"),
        (f"{{{_RULE}, min_ranks: 2, initial_ranks: 6}}", "initial_ranks: an instance has at most 4 ranks"),
        (
            f"{{{_RULE}, min_ranks: 2, initial_ranks: 1}}",
            "initial_ranks: 1 ranks are fewer than min_ranks (2); raise it",
        ),
        (
            f"{{{_RULE}, min_ranks: 2, max_instances: 3}}",
            "max_instances: instances do not come and go if ranks do; remove it, or min_ranks",
        ),
        (f"{{{_RULE}, min_ranks: 2, min_instances: 2}}", "min_instances: instances do not come and go if ranks do"),
        (f"{{{_RULE}, max_instances: 2, pause_s: 1}}", "pause_s: has no effect unless ranks come and go"),
        (f"{{{_RULE}, max_instances: 2, initial_ranks: 1}}", "initial_ranks: has no effect unless ranks come and go"),
        (f"{{{_RULE}, pause_s: 1}}", "pause_s: has no effect unless ranks come and go; set min_ranks, or remove it"),
    ],
)
def test_scaling_of_ranks_that_makes_no_sense_is_refused_with_its_place(scaling: str, message: str) -> None:
    text = plan_of(None).to_yaml().replace("  instances: 1\n", f"  instances: 1\n  autoscaling: {scaling}\n")
    assert "autoscaling" in text
    with pytest.raises(SpecError) as error:
        Plan.from_text(text, "p.yaml")
    assert f"pools.0.autoscaling.{message}" in str(error.value)


def test_what_does_not_go_with_ranks_that_come_and_go_is_refused() -> None:
    with pytest.raises(ValueError, match="requires instances that go on with fewer ranks; set attention_dp above 1"):
        plan_of(BY_RATE, parallelism={"attention_dp": MOST, "expert_parallel": True})
    with pytest.raises(ValueError, match="requires instances that go on with fewer ranks"):
        plan_of(BY_RATE, parallelism={"tp": 2})
    with pytest.raises(ValueError, match="cannot be combined with events of the plan; remove one of the two"):
        plan_of(BY_RATE, scale(2, 1.0, 0.0))
    with pytest.raises(ValueError, match="cannot be combined with autoscaling; remove one of the two"):
        plan_of(BY_RATE, spare=1)
    tight = {**pool_of(None)["parallelism"], "expert_replicas": 8}
    with pytest.raises(Infeasible, match=r"with 1 of 4 data-parallel ranks .*expert_replicas to at least 24"):
        deployed(plan_of(BY_RATE, parallelism=tight))
    with pytest.raises(Infeasible, match="events or autoscaling change the number of ranks, and step costs from out"):
        deploy(plan_of(BY_RATE), EXPERTS, H100, OwnCosts(LinearCosts(step_s=1.0)))


def test_a_plan_of_ranks_is_read_as_it_was_written() -> None:
    plan = plan_of({**BY_RATE, "initial_ranks": 2})
    assert Plan.from_text(plan.to_yaml()) == plan
