"""The torch engine: a plan's own scheduler runs a decoder of the model's shapes, on a processor or a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simtune.errors import UsageError
from simtune.sim.deployment import Deployment
from simtune.sim.requests import RequestStream
from simtune.sim.result import Result
from simtune.specs.workload import Slo
from simtune.validation.engines.clocks import EngineClock, ProcessorClock
from simtune.validation.engines.serving import EngineLoop, Executor, MeasuredStep

INSTALL = "the torch engine needs torch, which is not installed: pip install torch (or 'simtune[gpu]')"


@dataclass(frozen=True)
class MeasuredServing:
    """What an engine did under a load, in the columns of a simulation, and its steps."""

    result: Result
    steps: list[MeasuredStep]


def executor(deployment: Deployment, device: str = "cpu", **options: Any) -> Executor:
    """The decoder that a plan asks for, with random weights. Raises UsageError where torch or a layer is missing."""
    try:
        from simtune.validation.engines.decoder import CachedDecoder
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(INSTALL) from None
    pool = deployment.pools[0]
    seats = pool.spec.batching.max_num_seqs
    return CachedDecoder(deployment.model, seats=seats, max_model_len=pool.max_model_len, device=device, **options)


def check(deployment: Deployment) -> None:
    """Raises UsageError where the plan has what one synchronous instance without a prefix cache has not."""
    pool = deployment.pools[0].spec
    wrong = {
        "several pools or instances": deployment.num_cores > 1 or deployment.plan.pools[0].devices > 1,
        "speculation": pool.speculation is not None,
        "prefix_caching": pool.kv_cache.prefix_caching,
        "preemption: swap": pool.kv_cache.preemption == "swap",
        "async_scheduling (set it to false)": pool.schedules_async,
    }
    has = [name for name, there in wrong.items() if there]
    if has:
        raise UsageError(f"plan {deployment.plan.name}: the torch engine has no {', '.join(has)}")


def serve(
    deployment: Deployment,
    stream: RequestStream,
    executor: Executor,
    *,
    clock: EngineClock | None = None,
    slo: Slo | None = None,
) -> MeasuredServing:
    """Serve a stream of requests for real. The scheduler is made as it is for a simulation of the same plan.

    `clock` is that of this thread's processor time unless given. Raises UsageError for a plan that `check` refuses.
    """
    check(deployment)
    (core,) = deployment.pools[0].cores(1, None)
    served = EngineLoop(core.scheduler, executor, clock or ProcessorClock(), stream).run()
    rate = stream.offered_rate_rps
    return MeasuredServing(Result(stream, served.outcome, 1, slo or Slo(), rate), served.steps)
