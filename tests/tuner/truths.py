"""Synthetic truths and profiles that are off by known errors: where stated probabilities can be checked."""

from __future__ import annotations

import math

import numpy as np

from simtune.sim.deployment import Deployment, deploy
from simtune.specs.hardware import Hardware, Interval, Operator, Provenance
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, KvCache, Parallelism, Pool
from simtune.specs.workload import Lognormal, Poisson, Workload
from simtune.workload.requests import RequestStream, build_stream
from tests.costs.made_up import hardware, model

LOG_SD = 0.2
FITTED = Provenance(kind="published-tables", source="made up")
MODEL = model(layers=8, hidden=256, heads=8, kv_heads=4)
LOAD = Workload(
    name="load",
    arrivals=Poisson(rate_rps=6.0),
    prompt=Lognormal(mean_tokens=120, sigma=0.6, max_tokens=500),
    output=Lognormal(mean_tokens=40, sigma=0.6, max_tokens=200),
)


def scaled(operator: Operator, factor: float) -> Operator:
    """The operator taking `factor` times as long, and known to be off by LOG_SD."""
    base = operator.base.model_copy(
        update={
            "flops_per_s": operator.base.flops_per_s / factor,
            "bytes_per_s": operator.base.bytes_per_s / factor,
            "overhead_s": operator.base.overhead_s * factor,
            "block_s": operator.base.block_s * factor,
        }
    )
    interval = Interval(method="split", quantile=1.645, log_sd=LOG_SD)
    return operator.model_copy(update={"base": base, "interval": interval, "provenance": FITTED})


def true_device() -> Hardware:
    """One on which sending between two devices takes about as long as two of them save."""
    device = profile_of(hardware(memory_bytes=1e9, overhead_s=2e-5), np.zeros(20))
    sending = scaled(device.operators["all_reduce.bf16"], 3.1)
    return device.model_copy(update={"operators": {**device.operators, "all_reduce.bf16": sending}})


def profile_of(truth: Hardware, errors: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Hardware:
    """What somebody measured of a device: every kind of operator is off by so many times LOG_SD."""
    kinds = sorted({o.kind for o in truth.operators.values()})
    factor = {kind: math.exp(LOG_SD * error) for kind, error in zip(kinds, errors, strict=False)}
    return truth.model_copy(
        update={"operators": {key: scaled(o, factor[o.kind]) for key, o in truth.operators.items()}}
    )


def plan(tp: int, instances: int) -> Plan:
    pool = Pool(
        hardware="made-up",
        instances=instances,
        parallelism=Parallelism(tp=tp),
        batching=Batching(max_num_seqs=32, max_num_batched_tokens=512),
        kv_cache=KvCache(num_blocks=2000),
        max_model_len=1024,
    )
    return Plan(name=f"tp{tp}x{instances}", model="tiny", pools=(pool,))


def stream(requests: int = 120) -> RequestStream:
    return build_stream(LOAD, None, requests=requests, seed=0)


def deployments(device: Hardware) -> list[Deployment]:
    """Two ways to use two GPUs: one instance over both, or one on each."""
    return [deploy(plan(2, 1), MODEL, device), deploy(plan(1, 2), MODEL, device)]
