"""The torch engine: the scheduler of a plan runs a decoder of the model's shapes, on a processor or a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from simtune.engine import Request
from simtune.errors import UsageError
from simtune.results.result import Result
from simtune.sim.deployment import Deployment
from simtune.specs.plan import Plan
from simtune.specs.workload import Slo
from simtune.validation.client.measured_run import Clock, EngineFacts, MeasuredFacts, MeasuredRun
from simtune.validation.loads import warm_up
from simtune.validation.servers.engine_clocks import CLOCKS, EngineClock, ProcessorClock
from simtune.validation.servers.executed_scheduler import EngineLoop, Executor, MeasuredStep, QueueLength, TokenShare
from simtune.validation.servers.in_process import TokenTimes, check_clock, queue_samples, redeployed, version_of
from simtune.validation.servers.server import SYNCHRONOUS_ONLY
from simtune.workload.requests import RequestStream

INSTALL = "the torch engine needs torch, which is not installed: pip install torch (or 'simtune[gpu]')"


@dataclass(frozen=True)
class MeasuredServing:
    """Measurements of an engine under a load, in the columns of a simulation, and its steps."""

    result: Result
    steps: list[MeasuredStep]
    queues: list[QueueLength]


def executor(deployment: Deployment, device: str = "cpu", **options: Any) -> Executor:
    """Return the decoder of a plan, with random weights.

    Raise UsageError if torch or a layer is missing, and if weights, keys and values do not fit into the device.
    """
    try:
        from simtune.validation.servers.cached_decoder import CachedDecoder
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(INSTALL) from None
    pool = deployment.pools[0]
    seats = pool.spec.batching.max_num_seqs
    graphs = {"graphs": pool.spec.cuda_graphs and device.startswith("cuda"), **options}
    try:
        return CachedDecoder(deployment.model, seats=seats, max_model_len=pool.max_model_len, device=device, **graphs)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        raise UsageError(
            f"plan {deployment.plan.name}: weights, and keys and values of {seats} seats of {pool.max_model_len} "
            f"tokens, do not fit into {device}; lower max_num_seqs or max_model_len"
        ) from None


def check(deployment: Deployment) -> None:
    """Raise UsageError if the plan has settings that one synchronous instance without a prefix cache does not
    support."""
    pool = deployment.pools[0].spec
    wrong = {
        "several pools or instances": deployment.num_cores > 1 or deployment.plan.pools[0].devices > 1,
        "speculation": pool.speculation is not None,
        "weight_dtype": pool.weight_dtype is not None,
        "prefix_caching": pool.kv_cache.prefix_caching,
        "preemption: swap": pool.kv_cache.preemption == "swap",
        SYNCHRONOUS_ONLY: pool.schedules_async,
    }
    has = [name for name, present in wrong.items() if present]
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
    """Serve a stream of requests for real. The scheduler is made as for a simulation of the same plan.

    `clock` is that of this thread's processor time unless given. Raise UsageError for a plan that `check` refuses.
    """
    check(deployment)
    (core,) = deployment.pools[0].cores(1, None)
    served = EngineLoop(core.scheduler, executor, clock or ProcessorClock(), stream).run()
    rate = stream.offered_rate_rps
    return MeasuredServing(Result(stream, served.outcome, 1, slo or Slo(), rate), served.steps, served.queues)


class TorchEngine:
    """The torch engine for any plan: see `simtune.validation.servers.server.Engine`."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        device: str = "cpu",
        clock: Clock = "cpu",
        clocks: Mapping[str, Callable[[], EngineClock]] = CLOCKS,
        make: Callable[[Deployment, str], Executor] | None = None,
    ) -> None:
        """`deployment` contains model and hardware; `make` returns the executor of a plan on a device, by default the
        decoder.

        Raise UsageError for a plan that `check` refuses, if torch is not installed, and for processor time of another
        device than the processor.
        """
        check(deployment)
        check_clock(device, clock)
        if make is None and find_spec("torch") is None:
            raise UsageError(INSTALL)
        self._deployment, self._device, self._clock = deployment, device, clock
        self._make_clock, self._make = clocks[clock], make or executor
        self._plan: Plan | None = None
        self._executor: Executor | None = None

    def run(self, plan: Plan, stream: RequestStream, *, label: str, seed: int = 0) -> MeasuredRun:
        """See `Engine.run`. The decoder does not depend on the tokens of prompts, so `seed` has no effect."""
        deployment = redeployed(plan, self._deployment)
        if self._executor is None or plan != self._plan:
            check(deployment)
            # Weights and keys and values of two plans may not fit.
            self.close()
            self._executor, self._plan = self._make(deployment, self._device), plan
            serve(deployment, warm_up(stream), self._executor, clock=self._make_clock())
        clock, times = self._make_clock(), TokenTimes(len(stream))
        serving = serve(deployment, stream, _Stamped(self._executor, clock, times), clock=clock)
        outcome = serving.result.outcome
        facts = MeasuredFacts(
            label=label,
            engine=EngineFacts(
                engine="torch", version=version_of("torch"), model=deployment.model.name, device=self._device
            ),
            clock=self._clock,
            preemptions=int(outcome.preemptions.sum()),
            queues=queue_samples(serving.queues),
        )
        return times.measured(stream, outcome.arrival.tolist(), facts)

    def check(self, plan: Plan) -> None:
        """See `Engine.check`."""
        check(redeployed(plan, self._deployment))

    def close(self) -> None:
        """Release weights, keys and values."""
        self._executor, self._plan = None, None
        # A decoder and its graphs refer to each other.
        gc.collect()


class _Stamped:
    """An executor whose tokens are timed."""

    def __init__(self, executor: Executor, clock: EngineClock, times: TokenTimes) -> None:
        self._executor, self._clock, self._times = executor, clock, times

    def run(self, shares: Sequence[TokenShare]) -> None:
        self._executor.run(shares)
        now = self._clock.now()
        for share in shares:
            if share.samples:
                self._times.came(share.request.id, now)

    def release(self, request: Request) -> None:
        self._executor.release(request)
