"""Host time of the torch engine on a GPU, measured without a load: how long is a step of decodes beyond its kernels?

A step copies its inputs, launches a graph, waits for the GPU and fetches the tokens; before and after it the scheduler
runs. The time of the GPU alone is that of graphs launched faster than it replays them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.validation.loads import at_once
from simtune.costs.iteration import StepModel, StepWork
from simtune.engine import Request
from simtune.profiling.timing import now
from simtune.sim.deployment import Deployment
from simtune.specs.pool import HostTimes
from simtune.validation.servers.engine_clocks import WallClock
from simtune.validation.servers.executed_scheduler import EngineLoop, TokenShare

ROWS = (1, 4, 8, 16, 32)
CONTEXT = 500
REPEATS, WARM_UP = 40, 5


class DecodeParts(NamedTuple):
    """Median seconds of a step of decodes in a graph, and of its parts, each of them alone."""

    rows: int
    predicted_s: float
    """Of the kernels, by the profile."""
    kernels_s: float
    """Sum of the kernels of a graph, as CUPTI has them: without what lies between them."""
    queued_s: float
    """Of a graph among graphs that wait for the GPU, and of sampling: the GPU alone."""
    replayed_s: float
    """From its launch on an idle GPU until it is done."""
    launch_s: float
    """Until its launch returns to the host."""
    inputs_s: float
    fetch_s: float
    """Sampling, and the copy of tokens to the host."""
    step_s: float
    """A step of the executor, by the wall clock."""
    step_mean_s: float


class _Idle:
    """An executor that computes nothing."""

    def run(self, shares: Sequence[TokenShare]) -> None:
        pass

    def release(self, request: Request) -> None:
        pass


def _timed(call: Callable[[], object]) -> list[float]:
    import torch

    seconds = []
    for _ in range(WARM_UP + REPEATS):
        torch.cuda.synchronize()
        begin = now()
        call()
        seconds.append(now() - begin)
    return seconds[WARM_UP:]


def _queued_s(call: Callable[[], object], times: int = 30) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        call()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def _kernels_s(call: Callable[[], object]) -> float:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    with trace(activities=[ProfilerActivity.CUDA]) as traced:
        call()
    return float(sum(event.self_device_time_total for event in traced.key_averages())) * 1e-6


def decode_parts(executor: Any, plain: StepModel, rows: Sequence[int] = ROWS, spread: float = 0.0) -> list[DecodeParts]:
    """Return the parts of steps of so many decodes behind CONTEXT tokens, or behind contexts that are up to `spread`
    of it shorter or longer. The executor must serve no request, and have as many seats."""
    import torch

    parts = []
    requests = [Request(10**6 + i, 2 * CONTEXT, 10**6) for i in range(max(rows))]
    for n in rows:
        contexts = np.linspace(CONTEXT * (1 - spread), CONTEXT * (1 + spread), n).astype(int).tolist()
        shares = [TokenShare(requests[i], past, 1, samples=True) for i, past in enumerate(contexts)]

        def step(shares: list[TokenShare] = shares) -> None:
            executor.run(shares)

        step()
        graphs = executor._graphs
        size = next(size for size in graphs._sizes if size >= n)
        graph, inputs, logits = graphs._captured[size]

        def replay(graph: Any = graph) -> None:
            graph.replay()
            torch.cuda.synchronize()

        def copy(inputs: Any = inputs, size: int = size) -> None:
            for target in inputs:
                target.copy_(torch.tensor(list(range(size))), non_blocking=True)
            torch.cuda.synchronize()

        def fetch(logits: Any = logits, n: int = n) -> None:
            executor._sample(logits[:n]).flatten().tolist()

        work = StepWork(n, sum(contexts) + n, (), n, max(contexts) + 1)
        steps = _timed(step)
        replayed, launched, inputs_s, fetched = (median(_timed(call)) for call in (replay, graph.replay, copy, fetch))
        parts.append(
            DecodeParts(
                n,
                plain.gpu_s(work),
                _kernels_s(replay),
                _queued_s(graph.replay) + _queued_s(partial(executor._sample, logits[:n])),
                replayed,
                launched,
                inputs_s,
                fetched,
                median(steps),
                mean(steps),
            )
        )
    for request in requests:
        executor.release(request)
        executor._texts.pop(request, None)
    return parts


def scheduler_s(deployment: Deployment, rows: int) -> float:
    """Return the median seconds of a step of so many decodes without an executor."""
    stream = at_once(rows, 3, (64, 65), (200, 201))
    (core,) = deployment.pools[0].cores(1, None)
    served = EngineLoop(core.scheduler, _Idle(), WallClock(), stream).run()
    return median(step.wall_s for step in served.steps if step.work.num_decodes == rows and not step.work.chunks)


def host_times(parts: Sequence[DecodeParts], scheduler: Callable[[int], float]) -> HostTimes:
    """Return the line through the host times of these steps, with the scheduler's."""
    rows = np.array([part.rows for part in parts], dtype=float)
    beyond = np.array([part.step_mean_s - part.queued_s + scheduler(part.rows) for part in parts])
    per_sequence, step = np.polyfit(rows, beyond, 1).tolist()
    return HostTimes(step_s=max(step, 0.0), per_sequence_s=max(per_sequence, 0.0), origin="measured")


def table(parts: Sequence[DecodeParts]) -> str:
    """Return the parts in microseconds."""
    lines = [" ".join(f"{name.removesuffix('_s'):>10}" for name in DecodeParts._fields)]
    lines += [" ".join([f"{part.rows:10}", *(f"{1e6 * s:10.0f}" for s in part[1:])]) for part in parts]
    return "\n".join(lines)
