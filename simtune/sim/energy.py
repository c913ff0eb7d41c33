"""Electric energy of a run, by the power that data sheets state and the share of time in which GPUs ran steps.

`E = devices * (idle * T + (tdp - idle) * busy * T)` of each instance: power between idle and the rated maximum, linear
in utilisation (Fan, Weber and Barroso, ISCA 2007). A GPU counts as used in full while a step of its instance runs,
which is how NVML counts utilisation. Steps that wait for memory draw less than the rated power, so this is more
than a meter would show; hosts, switches and cooling are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypedDict

from simtune.sim.pools import DeployedPool
from simtune.sim.summary import InstanceUse


class InstancePower(NamedTuple):
    """Of all GPUs of an instance, a drafter's among them."""

    idle_w: float
    tdp_w: float
    instances: int
    """That the pool begins with: GPUs of those that come to it from other pools are counted there while idle."""


Power = Mapping[str, InstancePower]
"""By pool."""


def power_of(pools: Iterable[DeployedPool]) -> Power | None:
    """Of each pool; None where a hardware profile names no power."""
    power = {}
    for pool in pools:
        device, share = pool.hardware.device, pool.spec.share
        gpus = pool.spec.devices * (1.0 if share is None else share.processors)
        if device.power is None:
            return None
        power[pool.spec.name] = InstancePower(
            device.power.idle_w * gpus, device.power.tdp_w * gpus, pool.spec.instances
        )
    return power


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
    return watts * duration_s
