"""A controller moves instances between prefill and decode: by hand, under constant load, and as a plan says it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simtune.costs.compiled import LinearCosts
from simtune.errors import SpecError
from simtune.results.outcome import Outcome
from simtune.results.result import Result
from simtune.sim.deployment import deploy
from simtune.sim.plan_parts import OwnCosts
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream

COLUMNS = ("scheduled", "first_token", "transferred", "finish")


def plan_of(control: dict[str, Any] | None, prefills: int = 1, decodes: int = 3) -> Plan:
    """Prefill instances that take one prompt at a time."""
    shared = {"hardware": "h100-sxm", "kv_cache": {"num_blocks": 4096}, "max_model_len": 8192}
    one, many = ({"max_num_seqs": seats, "max_num_batched_tokens": tokens} for seats, tokens in ((1, 8192), (64, 64)))
    pools = [
        {"name": "p", "role": "prefill", "instances": prefills, "batching": one},
        {"name": "d", "role": "decode", "instances": decodes, "batching": many},
    ]
    plan = {
        "name": "apart",
        "model": "llama-3.1-8b",
        "pools": [{**shared, **pool} for pool in pools],
        "link": {"bytes_per_s": 1e15, "setup_s": 0.0, "descriptor_s": 0.0},
        "router": {"kind": "least_outstanding"},
        **({} if control is None else {"control": control}),
    }
    return Plan.model_validate(plan, strict=False)


def run(plan: Plan, stream: RequestStream, **how: Any) -> Result:
    """A step takes 1 ms, and each token in it another."""
    costs = OwnCosts(LinearCosts(step_s=1e-3, per_token_s=1e-3))
    return deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"), costs).simulate(stream, **how)


def every_second(requests: int, prompt: int, output: int, gap_s: float = 1.0) -> RequestStream:
    return stream_of((np.arange(requests) * gap_s).tolist(), [prompt] * requests, [output] * requests)


def same(one: Outcome, other: Outcome) -> bool:
    return all(getattr(one, name).tolist() == getattr(other, name).tolist() for name in COLUMNS)


def test_one_that_never_asks_changes_nothing() -> None:
    stream = every_second(200, 900, 50, gap_s=0.3)
    control = {"every_s": 0.05, "prefill": {"high": 1e6}, "decode": {"high": 1e6}}
    with_it, without = run(plan_of(control), stream), run(plan_of(None), stream)
    assert with_it.outcome.role_switches == 0
    assert without.outcome.role_switches is None
    assert with_it.summary().energy_j == without.summary().energy_j, "places that stay empty draw nothing"
    assert same(with_it.outcome, without.outcome)
    assert with_it.summary().role_switches == 0


def test_no_instance_switches_under_a_constant_load_that_both_pools_can_bear() -> None:
    """A prompt of 0.9 s every second, for one prefill instance: nobody ever waits."""
    control = {"every_s": 0.1, "prefill": {"high": 1.0}, "decode": {"high": 1.0}}
    result = run(plan_of(control), every_second(100, 899, 100))
    assert result.outcome.role_switches == 0
    assert result.queue_s.max() == 0.0


def test_a_prefill_pool_that_falls_behind_gets_instances_until_it_keeps_up_and_keeps_them() -> None:
    """Prompts of 1.8 s every second need two instances. The queue of the one there is grows by 4 requests in 9 s; four
    looks later a decode instance goes, and is there 3 s after: then 6 or 7 wait for two, which is below what would ask
    for a third. From then on the queue shrinks, and the decode pool never asks for its instance."""
    control = {"every_s": 0.5, "patience": 4, "switch_s": 3.0, "prefill": {"high": 4.0}, "decode": {"high": 1.0}}
    stream = every_second(200, 1799, 100)
    result, fixed = run(plan_of(control), stream), run(plan_of(None), stream)
    assert result.outcome.role_switches == 1
    served = {core.instance for core in result.outcome.cores if core.pool == "p" and core.busy}
    assert served == {0, 3}  # the place of the last decode instance
    assert fixed.queue_s[-1] > 150
    assert result.queue_s[-1] < 1
    assert result.completed.all()


def test_an_idle_instance_is_up_in_its_new_role_as_long_after_the_look_as_switching_takes() -> None:
    """Four prompts of 5 s at once. At the first look, 1 s, three wait; the decode instance that goes is idle, and takes
    prompts from 1 + 4 s on. Those that wait were dealt out before, so it serves who comes after that."""
    control = {"every_s": 1.0, "switch_s": 4.0, "prefill": {"high": 2.0}, "decode": {"high": 1e6}}
    at = [0.0] * 4 + [4.999, 5.001]
    result = run(plan_of(control, decodes=2), stream_of(at, [9999 // 2] * 6, [2] * 6))
    assert result.outcome.role_switches == 1
    assert result.scheduled_s[4] > 20 - 1e-9  # behind the four of the first instance
    assert result.scheduled_s[5] == pytest.approx(5.001, abs=1e-9)


def test_load_that_turns_from_prompts_to_answers_takes_instances_there_and_back() -> None:
    control = {
        "every_s": 0.25,
        "prefill": {"watch": "under_way", "low": 1.0, "high": 3.0},
        "decode": {"watch": "under_way", "low": 4.0, "high": 20.0},
    }
    prompts = [2000] * 60 + [10] * 200
    answers = [2] * 60 + [2000] * 200
    at = np.concatenate([np.arange(60) * 0.8, 60 + np.arange(200) * 0.03])
    stream = stream_of(at.tolist(), prompts, answers)
    plan = plan_of(control, prefills=2, decodes=2)
    result = run(plan, stream)
    assert (result.outcome.role_switches or 0) >= 2
    assert result.completed.all()
    used = {(core.pool, core.instance) for core in result.outcome.cores if core.busy}
    assert {("p", 3), ("d", 0), ("d", 1)} <= used
    stepped = run(plan, stream, single_steps=True)
    assert same(result.outcome, stepped.outcome)


def test_who_waits_to_be_sent_to_a_decode_instance_counts_as_waiting_there() -> None:
    """One decode instance with 64 seats, and 70 short prompts at once: at the first look 6 wait for a seat. They were
    dealt out before another comes, with which it is 3 for each."""
    control = {"every_s": 0.5, "prefill": {"high": 1e6}, "decode": {"high": 5.5}}
    result = run(plan_of(control, prefills=3, decodes=1), stream_of([0.0] * 70, [1] * 70, [40] * 70))
    assert result.outcome.role_switches == 1
    assert result.completed.all()


def test_a_pool_keeps_the_instances_it_is_to_keep() -> None:
    control = {"every_s": 0.1, "prefill": {"high": 1.0}, "decode": {"high": 1e6, "least": 2}}
    result = run(plan_of(control), every_second(60, 4000, 10))
    assert result.outcome.role_switches == 1


@pytest.mark.parametrize(("longer", "switches"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("taking", ["prefill", "decode"])
def test_after_a_move_looks_are_counted_from_none(taking: str, longer: int, switches: int) -> None:
    """One instance has too much to do for 5.6 s, or for 6.3 s, and three of the other role are idle. After the third
    look, at 3 s, one of them is taken; the next one is due after three more, at 6 s."""
    other = "decode" if taking == "prefill" else "prefill"
    pressure = {taking: {"watch": "under_way", "high": 0.4}, other: {"high": 1e6}}
    control = {"every_s": 1.0, "patience": 3, "switch_s": 0.001, **pressure}
    if taking == "prefill":  # prompts of 0.7 s
        plan, stream = plan_of(control), stream_of([0.0] * (8 + longer), [699] * (8 + longer), [2] * (8 + longer))
    else:  # steps of 9 ms
        plan, stream = plan_of(control, 3, 1), stream_of([0.0] * 8, [1] * 8, [622 + 78 * longer] * 8)
    result = run(plan, stream)
    assert result.finish_s.max() == pytest.approx(5.6 + 0.7 * longer, abs=0.05)
    assert result.outcome.role_switches == switches


@pytest.mark.parametrize(
    ("prefill", "message"),
    [
        ("{low: 3, high: 2}", "control.prefill.high: high (2) must be above low (3)"),
        ("{high: 2, watch: tokens}", "control.prefill.watch: must be one of waiting, under_way"),
        ("{high: 2, least: 3}", "control.prefill.least: pool p is to keep 3 instances and begins with 2"),
    ],
)
def test_a_controller_that_makes_no_sense_is_refused_with_its_place(prefill: str, message: str) -> None:
    text = (
        f"{plan_of(None, prefills=2).to_yaml()}control: {{every_s: 1.0, decode: {{high: 1.0}}, prefill: {prefill}}}\n"
    )
    with pytest.raises(SpecError) as error:
        Plan.from_text(text, "p.yaml")
    assert message in str(error.value)


def test_only_equal_instances_take_each_other_s_role_and_events_leave_them_alone() -> None:
    control = {"every_s": 1.0, "prefill": {"high": 1.0}, "decode": {"high": 1.0}}
    data = plan_of(control).model_dump(mode="json", exclude_none=True)
    data["pools"][0]["parallelism"]["tp"] = 2
    with pytest.raises(ValueError, match="an instance of pool p is 2 x h100-sxm, one of d 1 x h100-sxm"):
        Plan.model_validate(data, strict=False)
    mixed = {**data, "pools": [{**data["pools"][0], "role": "mixed"}]}
    with pytest.raises(ValueError, match=r"between one prefill and one decode pool; found p \(mixed\)"):
        Plan.model_validate(mixed, strict=False)
    data = plan_of(control).model_dump(mode="json", exclude_none=True)
    data["events"] = [{"kind": "failure", "at_s": 1.0, "pool": "p", "instance": 0}]
    with pytest.raises(ValueError, match="by events or by a controller, not both"):
        Plan.model_validate(data, strict=False)
    data = plan_of(control, decodes=1).model_dump(mode="json", exclude_none=True)
    for pool, beside in zip(data["pools"], ({}, {"beside": "p"}), strict=True):
        pool["kv_cache"]["memory_utilization"] = 0.4
        pool["share"] = {"processors": 0.5, "bandwidth": 0.5, **beside}
    with pytest.raises(ValueError, match="instances on shares of the same GPUs keep their roles"):
        Plan.model_validate(data, strict=False)
