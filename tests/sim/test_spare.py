"""Instances that stand by: they are paid for, idle, and take the place of those that fail, first come first."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import yaml
from hypothesis import event, given
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.emit import engine_files
from simtune.errors import SpecError
from simtune.results.result import Result
from simtune.runs.price import price
from simtune.sim.deployment import deploy
from simtune.sim.plan_parts import OwnCosts
from simtune.sim.wiring import wire
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.plan_words import of_plan
from simtune.specs.workload import Slo
from simtune.testing.clusters import stream_of

COLUMNS = ("scheduled", "first_token", "finish", "core", "resent")
MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
STREAM = stream_of([0.1 * i for i in range(100)], [150] * 100, [20] * 100)


def plan_of(instances: int, spare: int, events: list[dict[str, Any]] | None = None, **keys: Any) -> Plan:
    pool = {
        "hardware": "h100-sxm",
        "instances": instances,
        "spare": spare,
        "kv_cache": {"num_blocks": 4096},
        "max_model_len": 8192,
        "batching": {"max_num_seqs": 8, "max_num_batched_tokens": 1024},
        **keys,
    }
    plan = {"name": "p", "model": "llama-3.1-8b", "pools": [pool], "router": {"kind": "least_outstanding"}}
    return Plan.model_validate({**plan, "events": events or []}, strict=False)


def run(plan: Plan, **how: Any) -> Result:
    """A step takes 5 ms, and each token in it 0.1 ms."""
    return deploy(plan, MODEL, HARDWARE, OwnCosts(LinearCosts(5e-3, 1e-4))).simulate(STREAM, **how)


def failure(instance: int, at_s: float, recover_s: float | None = None) -> dict[str, Any]:
    return {"kind": "failure", "pool": "mixed", "instance": instance, "at_s": at_s, "recover_s": recover_s}


def start(instance: int, at_s: float) -> dict[str, Any]:
    return {"kind": "start", "pool": "mixed", "instance": instance, "at_s": 0.0, "delay_s": at_s}


def same(first: Result, second: Result) -> bool:
    return all(getattr(first.outcome, c).tolist() == getattr(second.outcome, c).tolist() for c in COLUMNS)


def test_an_instance_that_nothing_replaces_changes_no_time_but_is_paid_for_and_idle() -> None:
    without, result = run(plan_of(2, 0)), run(plan_of(2, 1))
    assert same(result, without)
    assert (without.num_gpus, result.num_gpus) == (2, 3)
    assert result.summary().request_throughput_rps == without.summary().request_throughput_rps
    dollars = [price(deploy(p, MODEL, HARDWARE), run(p).summary()) for p in (plan_of(2, 0), plan_of(2, 1))]
    assert dollars[0] is not None
    assert dollars[1] is not None
    assert dollars[1].per_hour_usd == pytest.approx(1.5 * dollars[0].per_hour_usd)
    power = HARDWARE.device.power
    assert power is not None
    more_j = [run(plan_of(2, spare)).summary().energy_j for spare in (0, 1)]
    assert more_j[0] is not None
    assert more_j[1] is not None
    assert more_j[1] - more_j[0] == pytest.approx(power.idle_w * result.duration_s)


def test_it_takes_the_place_of_one_that_fails_as_if_it_started_then() -> None:
    replaced = run(plan_of(2, 1, [failure(0, 3.05)]))
    assert same(replaced, run(plan_of(3, 0, [start(2, 3.05), failure(0, 3.05)])))
    assert replaced.outcome.resent.any()
    arrived = STREAM.arrival_s
    assert arrived is not None
    assert set(replaced.outcome.core[arrived < 3.0].tolist()) >= {0, 1}
    assert set(replaced.outcome.core[arrived >= 3.1].tolist()) == {1, 2}


def test_one_that_recovers_stands_by_until_it_is_needed() -> None:
    """Instance 0 is back at 4 s, and up from 6 s on, when 1 fails; 1 is back at 7 s, and nothing needs it."""
    result = run(plan_of(2, 1, [failure(0, 3.0, 1.0), failure(1, 6.0, 1.0)]))
    arrived = STREAM.arrival_s
    assert arrived is not None
    for begin, end, serving in ((4.0, 5.9, {1, 2}), (6.0, 20.0, {0, 2})):
        assert set(result.outcome.core[(arrived >= begin) & (arrived < end)].tolist()) == serving


def test_an_instance_that_fails_while_no_other_stands_by_comes_back_itself() -> None:
    failures = [failure(0, 2.0, 3.0), failure(1, 3.0, 3.0)]
    late = run(plan_of(2, 1, failures))
    arrived = STREAM.arrival_s
    assert arrived is not None
    assert set(late.outcome.core[(arrived >= 3.0) & (arrived < 5.0)].tolist()) == {2}
    assert set(late.outcome.core[arrived >= 5.0].tolist()) == {0, 2}
    assert same(run(plan_of(2, 0, failures)), run(plan_of(2, 0, failures), single_steps=True))


@given(data=st.data(), instances=st.integers(1, 3), spare=st.integers(1, 3))
def test_never_more_are_up_than_the_pool_has_and_no_fewer_than_it_could_have(
    data: st.DataObject, instances: int, spare: int
) -> None:
    """Beside a count of its own: up are as many as there are of all that have not failed, at most `instances`."""
    failures, busy = [], [0.0] * instances
    for _ in range(data.draw(st.integers(1, 6))):
        instance = data.draw(st.integers(0, instances - 1))
        at_s = busy[instance] + data.draw(st.integers(1, 8)) / 4
        recover_s = data.draw(st.integers(1, 12)) / 4
        busy[instance] = at_s + recover_s
        failures.append(failure(instance, at_s, recover_s))
    plan = plan_of(instances, spare, failures)
    deployment = deploy(plan, MODEL, HARDWARE, OwnCosts(LinearCosts(5e-3, 1e-4)))
    changes = wire(plan, MODEL, deployment.pools, STREAM, Slo(), 0).changes
    up = set(range(instances))
    ticks = sorted({change.tick for change in changes})
    for tick, until in pairwise([*ticks, ticks[-1] + 2**40]):
        for change in changes:
            if change.tick == tick:
                places = {core.instance for core in change.cores}
                assert places <= up if not change.up else not places & up
                up = up | places if change.up else up - places
        middle_s = (tick + min(until, tick + 2)) / 2 / 2**40
        down = sum(f["at_s"] <= middle_s < f["at_s"] + f["recover_s"] for f in failures)
        assert len(up) == min(instances, instances + spare - down)
        event(f"{len(up) - instances} of {spare} spare")
    result = deployment.simulate(STREAM)
    assert result.completed.all()
    assert same(result, deployment.simulate(STREAM, single_steps=True))


def test_all_of_them_are_started_and_named() -> None:
    plan = plan_of(2, 1, None, engine="vllm-0.33")
    script = next(text for text in engine_files(plan, MODEL, 8, {}).values() if text.startswith("#!/bin/sh"))
    assert script.count("\nstart ") == 3
    assert "2 x (tp 1, pp 1), and 1 to stand by" in script
    assert of_plan(plan).words().startswith("2 servers of 1 GPU and 1 to stand by")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"spare": -1}, "pools.0.spare: must be greater than or equal to 0"),
        (
            {"autoscaling": {"rule": {"kind": "rate", "requests_per_s": 4.0}, "startup_s": 1.0, "max_instances": 4}},
            "pools.0.spare: cannot be combined with autoscaling; remove one of the two",
        ),
        (
            {"events": [{"kind": "start", "pool": "mixed", "instance": 0, "at_s": 1.0}]},
            "events.0: cannot be combined with spare of pool mixed, which replaces what fails; remove one",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_at_its_key(change: dict[str, Any], problem: str) -> None:
    data = plan_of(2, 1).to_data()
    events = change.pop("events", [])
    data = {**data, "events": events, "pools": [{**data["pools"][0], **change}]}
    with pytest.raises(SpecError) as caught:
        Plan.from_text(yaml.safe_dump(data), "plan.yaml")
    assert problem in str(caught.value)
