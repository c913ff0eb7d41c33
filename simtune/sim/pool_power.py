"""Power of the pools of a deployment, by the data sheets of their devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simtune.results.energy import InstancePower, Power
from simtune.sim.encode_stages import EncodeWork
from simtune.sim.pools import DeployedPool
from simtune.specs.pool import Pool
from simtune.specs.stages import Stage
from simtune.workload.requests import RequestStream


def power_of(
    pools: Sequence[DeployedPool],
    stages: Sequence[Stage] | None = None,
    stream: RequestStream | None = None,
    works: Mapping[str, EncodeWork] | None = None,
) -> Power | None:
    """Return the power of each pool, and of each stage with GPUs, which are those of the pool that it serves; None if a
    hardware profile states no power. Pools that share GPUs share what these draw while idle as they share processors.

    `stream` are the requests that go through the stages, and `works` their work where images are encoded.
    """
    power, devices = {}, {}
    for pool in pools:
        device, share = pool.hardware.device, pool.spec.share
        if device.power is None:
            return None
        devices[pool.spec.name] = device.power
        gpus = pool.spec.devices * (1.0 if share is None else share.processors)
        idle_gpus = gpus if share is None else gpus / _shared_processors(pool.spec, pools)
        # Replicas of a target that are not used stay switched on, as do instances that stand by.
        idle_gpus += pool.idle_devices + pool.spec.devices * pool.spec.spare / pool.spec.instances
        power[pool.spec.name] = InstancePower(
            device.power.idle_w * idle_gpus,
            device.power.idle_w * idle_gpus + (device.power.tdp_w - device.power.idle_w) * gpus,
            pool.spec.instances,
        )
    for stage in stages or ():
        assert stream is not None
        of = devices[stage.pool]
        busy_s = len(stream) * stage.seconds + stage.seconds_per_token * float(stream.prompt_tokens.sum())
        if works and stage.name in works:
            busy_s += float(works[stage.name].busy_s.sum())
        power[f"stage {stage.name}"] = InstancePower(
            of.idle_w * stage.devices, of.tdp_w * stage.devices, stage.instances, busy_s
        )
    return power


def _shared_processors(pool: Pool, pools: Sequence[DeployedPool]) -> float:
    """Return the share of the processors that a pool and the one on the same GPUs have together."""
    assert pool.share is not None
    shared = (other_pool.spec for other_pool in pools if other_pool.spec.share is not None)
    neighbours = [
        other_pool
        for other_pool in shared
        if other_pool.share and pool.name in (other_pool.name, other_pool.share.beside)
    ]
    if pool.share.beside is not None:
        neighbours = [pool, *(other_pool.spec for other_pool in pools if other_pool.spec.name == pool.share.beside)]
    return sum(neighbour.share.processors for neighbour in neighbours if neighbour.share is not None)
