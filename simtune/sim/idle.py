"""Settings of a plan that have no effect, each with the reason and a remedy.

Settings of a shipped engine preset that have no effect under a given tensor parallelism or role are no mistake of the
user, and are not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from simtune.costs.iteration import StepModel
from simtune.costs.step_calls import fused_bytes
from simtune.errors import plural
from simtune.sim.deployment import Deployment
from simtune.sim.pools import DeployedPool
from simtune.specs.catalog import load_engine, names
from simtune.specs.model import Model, MoeFeedForward
from simtune.specs.pool import Pool

Why = Callable[[DeployedPool, Model], str | None]


def idle_settings(deployment: Deployment) -> Iterator[str]:
    """Yield for each setting without effect its key, the reason, and the remedy."""
    model = deployment.model
    for at, pool in enumerate(deployment.pools):
        preset = _preset(pool, model)
        for key, why in IDLE.items():
            reason = why(pool, model)
            if reason is not None and not _as_preset(_value(pool.spec, key), preset.get(key)):
                yield f"pools.{at}.{key}: {reason}"


def _value(spec: Pool, key: str) -> Any:
    """Return a setting of a pool, or of one of its blocks if the key has two parts."""
    block, _, field = key.partition(".")
    return getattr(getattr(spec, block), field) if field else getattr(spec, block)


def _preset(pool: DeployedPool, model: Model) -> dict[str, Any]:
    """Return the settings of the pool's engine preset; empty if the pool names no shipped engine."""
    engine, pp = pool.spec.engine, pool.spec.parallelism.pp
    return load_engine(engine).settings(pool.hardware.device, model, pp) if engine in names("engine") else {}


def _as_preset(value: Any, preset: Any) -> bool:
    plain = value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
    return preset is not None and plain == (tuple(preset) if isinstance(preset, list) else preset)


def _fused(pool: DeployedPool, model: Model) -> str | None:
    tp = pool.spec.parallelism.tp
    if "norm" not in pool.spec.fused or fused_bytes(pool.hardware.device.architecture, tp):
        return None
    if tp == 1:
        return "tp 1 has no all-reduce that could hold a norm; leave norm out, or raise tp"
    return f"no all-reduce of {tp} {pool.hardware.device.name} holds a norm; leave norm out"


def _expert_exchange(pool: DeployedPool, model: Model) -> str | None:
    if pool.spec.expert_exchange == "deepep":
        return None  # the default
    if not any(isinstance(layers.feed_forward, MoeFeedForward) for layers in model.layers):
        return f"{model.name} has no routed experts; leave it out"
    parallelism = pool.spec.parallelism
    if parallelism.attention_dp == 1:
        return "one group has all tokens and exchanges none; leave it out, or raise parallelism.attention_dp"
    if not parallelism.expert_parallel:
        return "slices of experts gather all tokens anyway; leave it out, or set parallelism.expert_parallel"
    return None


def _front_end(pool: DeployedPool, model: Model) -> str | None:
    if pool.spec.front_end is None or pool.spec.role != "decode":
        return None
    return "requests come to a decode pool from prefill pools, past a front end of its own; leave it out"


def _exposed_host(pool: DeployedPool, model: Model) -> str | None:
    if pool.spec.exposed_host is None or pool.spec.schedules_async:
        return None
    return "without asynchronous scheduling all of the host's time is exposed; leave it out, or set async_scheduling"


def _overlap(pool: DeployedPool, model: Model) -> str | None:
    if pool.spec.overlap is None or StepModel(model, pool.hardware, pool.spec).overlaps:
        return None
    if pool.spec.overlap == "two_batches":
        return "no tokens are exchanged with experts of other ranks; leave it out, or set parallelism.expert_parallel"
    return "the GPUs of an instance send one another nothing; leave it out, or raise parallelism.tp"


def _chunk_pipeline(pool: DeployedPool, model: Model) -> str | None:
    if pool.spec.batching.chunk_pipeline is None or pool.spec.parallelism.pp > 1:
        return None
    return "one stage computes one chunk after the other; leave it out, or raise parallelism.pp"


def _expert_replicas(pool: DeployedPool, model: Model) -> str | None:
    # Replicas are also the room for experts of ranks that leave.
    if not pool.spec.parallelism.expert_replicas or pool.spec.parallelism.elastic_experts:
        return None
    blocks = [layers.feed_forward for layers in model.layers]
    if any(isinstance(block, MoeFeedForward) and block.routing_skew for block in blocks):
        return None
    return f"routing of {model.name} has no skew, so every expert has the same load; leave it out, or set routing_skew"


def _target_replicas(pool: DeployedPool, model: Model) -> str | None:
    if not pool.idle_devices:
        return None
    assert pool.spec.speculation is not None
    num_used, tp = pool.spec.speculation.scheme.shape.replicas, pool.spec.parallelism.tp
    idle = pool.idle_devices // tp
    return (
        f"{num_used} of {num_used + idle} replicas give the most tokens per second, and more would only make verdicts "
        f"later; the other {plural(pool.idle_devices, 'GPU')} are idle, but are paid for and draw power; set "
        f"scheme.replicas to {num_used}"
    )


IDLE: dict[str, Why] = {
    "fused": _fused,
    "expert_exchange": _expert_exchange,
    "front_end": _front_end,
    "exposed_host": _exposed_host,
    "overlap": _overlap,
    "batching.chunk_pipeline": _chunk_pipeline,
    "parallelism.expert_replicas": _expert_replicas,
    "speculation": _target_replicas,
}
"""Checks by key of a pool: each returns why the key has no effect, or None if it has one or is not given."""
