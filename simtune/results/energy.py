"""Electric energy of a run, by the power that data sheets state and the share of time in which GPUs ran steps.

`E = devices * (idle * T + (tdp - idle) * busy * T)` of each instance: power between idle and the rated maximum, linear
in utilisation (Fan, Weber and Barroso, ISCA 2007). A GPU counts as used in full while a step of its instance runs,
which is how NVML counts utilisation. Steps that wait for memory draw less than the rated power, so this is more
than a meter would show; hosts, switches and cooling are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

from simtune.results.summary import InstanceUse


class InstancePower(NamedTuple):
    """Power of all GPUs of an instance, including a drafter's."""

    idle_w: float
    tdp_w: float
    instances: int
    """Instances that the pool begins with; while idle, GPUs that come from other pools are counted there. Those of an
    autoscaled pool count while its instances hold them."""
    stage_busy_s: float | None = None
    """Busy seconds of all servers of a stage together; None for a pool."""


Power = Mapping[str, InstancePower]
"""Power by pool, and by `stage NAME`."""


class Energy(TypedDict, total=False):
    """Energy fields of a summary; empty if power is not known."""

    energy_j: float
    joules_per_token: float | None


def energy_of(power: Power | None, used: Sequence[InstanceUse], duration_s: float, tokens: int, scale: float) -> Energy:
    """Return the energy of these instances, which generated `tokens` tokens and stand for `scale` times as many."""
    if power is None:
        return {}
    joules = energy_j(power, used, duration_s)
    return {"energy_j": joules * scale, "joules_per_token": joules / tokens if tokens else None}


def energy_j(power: Power, instances: Sequence[InstanceUse], duration_s: float) -> float:
    """Return the joules that these instances use in `duration_s` seconds."""
    watts = 0.0
    for instance in instances:
        of = power[instance.pool]
        held_share = float(instance.instance < of.instances) if instance.held is None else instance.held
        idle_w = of.idle_w * held_share
        busy = instance.busy if instance.busy_gpus is None else instance.busy_gpus
        watts += idle_w + (of.tdp_w - of.idle_w) * min(1.0, busy)
    joules = watts * duration_s
    for of in power.values():
        if of.stage_busy_s is not None:
            busy_s = min(of.stage_busy_s, of.instances * duration_s)
            joules += of.idle_w * of.instances * duration_s + (of.tdp_w - of.idle_w) * busy_s
    return joules
