"""Electric energy of a run, by the power that data sheets state and the share of time in which GPUs ran steps.

`E = devices * (idle * T + (tdp - idle) * busy * T)` of each instance: power between idle and the rated maximum, linear
in utilisation (Fan, Weber and Barroso, ISCA 2007). A GPU counts as used in full while a step of its instance runs,
which is how NVML counts utilisation. Steps that wait for memory draw less than the rated power, so this is more
than a meter would show; hosts, switches and cooling are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

from simtune.sim.pools import DeployedPool
from simtune.sim.summary import InstanceUse
from simtune.specs.plan import Pool
from simtune.specs.stages import Stage
from simtune.workload.requests import RequestStream


class InstancePower(NamedTuple):
    """Of all GPUs of an instance, a drafter's among them."""

    idle_w: float
    tdp_w: float
    instances: int
    """That the pool begins with: GPUs of those that come to it from other pools are counted there while idle."""
    stage_busy_s: float | None = None
    """Of a stage: seconds in which its servers, the instances, work, all together."""


Power = Mapping[str, InstancePower]
"""By pool, and by `stage NAME`."""


def power_of(
    pools: Sequence[DeployedPool], stages: Sequence[Stage] | None = None, stream: RequestStream | None = None
) -> Power | None:
    """Power of each pool, and of each stage with GPUs, which are those of the pool that it serves; None if a hardware
    profile names no power. Pools that share GPUs share what these draw while idle as they share processors.

    `stream` are the requests that go through the stages.
    """
    power, devices = {}, {}
    for pool in pools:
        device, share = pool.hardware.device, pool.spec.share
        if device.power is None:
            return None
        devices[pool.spec.name] = device.power
        gpus = pool.spec.devices * (1.0 if share is None else share.processors)
        idle_gpus = gpus if share is None else gpus / _shared_processors(pool.spec, pools)
        power[pool.spec.name] = InstancePower(
            device.power.idle_w * idle_gpus,
            device.power.idle_w * idle_gpus + (device.power.tdp_w - device.power.idle_w) * gpus,
            pool.spec.instances,
        )
    for stage in stages or ():
        assert stream is not None
        of = devices[stage.pool]
        busy_s = len(stream) * stage.seconds + stage.seconds_per_token * float(stream.prompt_tokens.sum())
        power[f"stage {stage.name}"] = InstancePower(
            of.idle_w * stage.devices, of.tdp_w * stage.devices, stage.instances, busy_s
        )
    return power


def _shared_processors(pool: Pool, pools: Sequence[DeployedPool]) -> float:
    """Share of the processors that a pool and the one on the same GPUs have together."""
    assert pool.share is not None
    shared = (other.spec for other in pools if other.spec.share is not None)
    both = [other for other in shared if other.share and pool.name in (other.name, other.share.beside)]
    if pool.share.beside is not None:
        both = [pool, *(other.spec for other in pools if other.spec.name == pool.share.beside)]
    return sum(one.share.processors for one in both if one.share is not None)


class Energy(TypedDict, total=False):
    """As a summary has it; empty where power is not known."""

    energy_j: float
    joules_per_token: float | None


def energy_of(power: Power | None, used: Sequence[InstanceUse], duration_s: float, tokens: int, scale: float) -> Energy:
    """Of these instances, which put out so many tokens and stand for `scale` times as many."""
    if power is None:
        return {}
    joules = energy_j(power, used, duration_s)
    return {"energy_j": joules * scale, "joules_per_token": joules / tokens if tokens else None}


def energy_j(power: Power, instances: Sequence[InstanceUse], duration_s: float) -> float:
    """What these instances take in so many seconds."""
    watts = 0.0
    for instance in instances:
        of = power[instance.pool]
        own = of.idle_w if instance.instance < of.instances else 0.0
        watts += own + (of.tdp_w - of.idle_w) * min(1.0, instance.busy)
    joules = watts * duration_s
    for of in power.values():
        if of.stage_busy_s is not None:
            busy_s = min(of.stage_busy_s, of.instances * duration_s)
            joules += of.idle_w * of.instances * duration_s + (of.tdp_w - of.idle_w) * busy_s
    return joules
