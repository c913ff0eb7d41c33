"""Device as seen by torch: its properties, its capacity, and the measurement of points.

A GPU and a processor differ only in the timer and in the kernels that are tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from simtune.errors import SimtuneError, UsageError
from simtune.profiling import kernels
from simtune.profiling.collectives import COLLECTIVES, Group
from simtune.profiling.decoder import Decoder
from simtune.profiling.kernels import ATTENTION, CANDIDATES, Attend
from simtune.profiling.measurement_plan import Limits, MeasurementTask, products, step_layers, work
from simtune.profiling.operands import Operands
from simtune.profiling.timing import (
    BUSY,
    WARM_UP_S,
    AmongOthers,
    Call,
    CpuThread,
    CpuWall,
    Measured,
    Sample,
    Timer,
    cpu_timer,
    measure,
    now,
)
from simtune.profiling.torch_device import TorchDevice
from simtune.specs.model import FullAttention, Model

_GPU_WARM_UP_S = 1.0
_SHORT = ("decode_attention", "prefill_attention", "tree_attention", "elementwise", "quantise", "sampling")
"""Kinds of short calls, whose code is not in the caches when a model reaches them."""


class CudaEvents:
    """Timer by events around calls that are queued behind a wait, so that the GPU always has the next call."""

    name = "events"
    shortest_s = 3e-4
    warm_up_s = WARM_UP_S
    # About a millisecond: longer than launching the calls of a short sample.
    _WAIT_CYCLES = 2_000_000

    def sample(self, calls: Sequence[Call], first: int, count: int) -> Sample:
        """See `Timer`; disturbances of a GPU cannot be detected."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(self._WAIT_CYCLES)
        start.record()
        for i in range(first, first + count):
            calls[i % len(calls)]()
        end.record()
        end.synchronize()
        return Sample(start.elapsed_time(end) * 1e-3 / count, True)


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Return a graph of these calls, one after the other."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


class CudaGraph(CudaEvents):
    """Timer by events around a captured graph that contains every call once: no launch is included."""

    name = "graph"

    def __init__(self) -> None:
        self._captured: tuple[Sequence[Call], torch.cuda.CUDAGraph] | None = None

    def sample(self, calls: Sequence[Call], first: int, count: int) -> Sample:
        """See `Timer`; the graph is captured if the calls are new, and replayed as a unit."""
        if self._captured is None or self._captured[0] is not calls:
            self._captured = None
            self._captured = (calls, captured(calls))
        graph = self._captured[1]
        replays = -(-count // len(calls))
        seconds, _ = super().sample([graph.replay], 0, replays)
        return Sample(seconds / len(calls), True)


class TorchRig(TorchDevice):
    """Measures points on one device: cpu, cuda or cuda:i, or a GPU if there is one.

    Raises UsageError if the device is absent, or has no matrix product in a dtype of the models.
    """

    def __init__(self, device: str | None, models: Sequence[Model]) -> None:
        super().__init__(device)
        self._models = {model.name: model for model in models}
        self._timer: Timer
        self._eager: Timer | None = None
        self.clean: float | None = None
        self._operands = Operands(self._device, self._cache_bytes())
        self._check_dtypes()
        self._start()
        self._attend: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._ranks: Group | None = None
        self._decoders: dict[tuple[str, int], Decoder] = {}

    # --- what it is ---------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the fields of the header; those that identify the device come first."""
        return super().describe() | {"timer": self._timer.name, "clean": self.clean}

    @property
    def warning(self) -> str | None:
        """Warning about a present disturbance of this device; None if undisturbed."""
        if not self._cuda and self.clean is not None and isinstance(self._timer, CpuThread):
            return (
                f"the machine is busy: {self.clean:.0%} of trial samples were undisturbed; timing by processor time of "
                "one thread"
            )
        return super().warning

    def _check_dtypes(self) -> None:
        for model in self._models.values():
            for dtype in (model.dtype, model.weight_dtype):
                try:
                    x = self._operands.fresh((32, 64), dtype)
                    kernels.linear(x, self._operands.fresh((64, 64), dtype))
                except (KeyError, RuntimeError, NotImplementedError):
                    raise UsageError(
                        f"{self.name}: torch {torch.__version__} multiplies no matrices in {dtype} there; choose "
                        "another with --dtype"
                    ) from None

    def _start(self) -> None:
        if self._cuda:
            self._timer, self._eager = CudaGraph(), CudaEvents()
            x = self._operands.fresh((4096, 4096), "bf16")
            spent = 0.0
            # Until clocks have risen.
            while spent < _GPU_WARM_UP_S:
                spent += 20 * self._eager.sample([lambda: x @ x], 0, 20).seconds
        else:
            x = self._operands.fresh((256, 256), "fp32")
            self._timer, self.clean = cpu_timer(lambda: x @ x)

    # --- before planning ----------------------------------------------------------------------------------

    def prepare(self, chosen: Mapping[str, str] | None = None) -> dict[str, str]:
        """Choose the kernel of attention for each kind and dtype: the fastest that runs, or those chosen earlier."""
        self._attend = dict(chosen or {})
        for model in self._models.values():
            attention = model.layers[0].attention
            if isinstance(attention, FullAttention):
                for kind in CANDIDATES[self._device.type]:
                    key = f"{kind}.{model.dtype}"
                    if key not in self._attend:
                        self._attend[key] = self._fastest(_trial(kind, model, attention))
        return self._attend

    def _fastest(self, trial: MeasurementTask) -> str:
        times = {}
        for name in CANDIDATES[self._device.type][trial.kind]:
            try:
                calls = kernels.calls(trial, self._operands, self._kernel_of(trial.kind, name))
                times[name] = measure(self._as_in_a_model(trial), calls).seconds
            except (RuntimeError, TypeError, AttributeError, ValueError):
                # No such kernel here.
                continue
        if not times:
            raise SimtuneError(f"{self.name}: no kernel of torch {torch.__version__} runs {trial.operator}")
        return min(times, key=times.__getitem__)

    def limits(self, call_s: float, scale: float) -> Limits:
        """Return the capacity of this device, from three rough measurements."""
        model = next(iter(self._models.values()))
        wide = self._rate(MeasurementTask("gemm", model.dtype, {"m": 256, "n": 2048, "k": 2048}))[0]
        copied = self._rate(MeasurementTask("copy", model.dtype, {"bytes": 1 << 26}, variant="in_memory"))[1]
        attention = model.layers[0].attention
        attended = wide
        if isinstance(attention, FullAttention):
            attended = self._rate(_trial("prefill_attention", model, attention))[0]
        return Limits(_power(self._memory()[1]), call_s, _power(wide), _power(attended), _power(copied), scale)

    def _rate(self, task: MeasurementTask) -> tuple[float, float]:
        flops, moved = work(task)
        seconds = self.measure(task).seconds
        return flops / seconds, moved / seconds

    # --- measuring ----------------------------------------------------------------------------------------

    def measure(self, task: MeasurementTask) -> Measured:
        """Time one point. Raises MemoryError if it does not fit, SimtuneError if the device is lost."""
        try:
            return self._measure(task)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise MemoryError from None
        except RuntimeError as error:
            if "alloc" in str(error):
                raise MemoryError from None
            if self._cuda and "CUDA" in str(error):
                words = str(error).splitlines()[0]
                raise SimtuneError(
                    f"{self.name}: the device does not answer any more ({words}); the points measured are kept: give "
                    "the same command again when it is back"
                ) from None
            raise

    def _measure(self, task: MeasurementTask) -> Measured:
        if task.kind in COLLECTIVES:
            return self._group(task).measure(task)
        if task.kind == "decode_imbalance":
            even, imbalanced = (
                measure(self._timer, kernels.imbalanced_decodes(task, self._operands, evenly=evenly))
                for evenly in (True, False)
            )
            return replace(imbalanced, even_s=even.seconds)
        calls = self._calls(task)
        if task.kind == "host":
            return self._host_of_gpu(task, calls[0]) if self._cuda else self._host(task, calls[0])
        try:
            measured = measure(self._as_in_a_model(task), calls)
        except RuntimeError:
            if self._eager is None:
                raise
            torch.cuda.synchronize()
            # Calls that wait for the host cannot be captured.
            measured = measure(self._eager, calls)
        if measured.timer == "wall" and measured.clean < BUSY / 2:
            # The machine has become busy, and may stay so.
            self._timer = CpuThread()
            measured = measure(self._as_in_a_model(task), calls)
        if measured.timer == "graph" and self._eager is not None:
            measured = replace(measured, eager=measure(self._eager, calls).seconds)
        return replace(measured, kernel=self._kernel(task, calls[0]))

    def _as_in_a_model(self, task: MeasurementTask) -> Timer:
        """Return the timer; on a processor short calls run behind a product whose weights evict all else from
        caches."""
        if self._cuda or task.kind not in _SHORT:
            return self._timer
        return AmongOthers(self._timer, self._products(), _read_first)

    def _products(self) -> list[Call]:
        """Return products of one row with the largest weights of a layer of the first model."""
        model = next(iter(self._models.values()))
        n, k = max(products(model, model.layers[0], 1), key=prod, default=(4096, 4096))
        x = self._operands.fresh((1, k), model.dtype)
        return [partial(F.linear, x, weight) for weight in self._operands.rotating((n, k), model.dtype)]

    def _host(self, task: MeasurementTask, between: Call) -> Measured:
        """Measure work between two steps, and non-kernel work around the layers of the first model and within each."""
        model, rows = next(iter(self._models.values())), round(task.shape["sequences"])
        attention, timer = model.layers[0].attention, AmongOthers(CpuThread(), self._products())
        around = kernels.around_step(rows, model.hidden_size, self._operands, model.dtype)

        def step() -> None:
            between()
            around()

        parts = [(1, measure(timer, [step]))]
        if isinstance(attention, FullAttention):
            heads = attention.heads, attention.kv_heads, attention.head_dim
            within = kernels.around_layer(rows, *heads, self._operands, model.dtype)
            parts.append((model.num_layers, measure(timer, [within])))
        every = {name: sum(n * getattr(m, name) for n, m in parts) for name in ("seconds", "mad", "p10", "p90")}
        return replace(parts[0][1], **every)

    def _host_of_gpu(self, task: MeasurementTask, between: Call) -> Measured:
        """Measure work between two steps; with the launch of a graph of a whole step, and the wait for it beyond what
        the GPU needs, if steps of the first model are measured."""
        model, rows = next(iter(self._models.values())), round(task.shape["sequences"])
        layers = step_layers(model, Limits(self._memory()[0], 0.0, 0.0, 0.0, 0.0))
        if not layers:
            return measure(cpu_timer(between, 5)[0], [between])
        assert self._eager is not None
        shape = {"layers": layers, "decodes": rows, "context": 512, "past": 0, "tokens": 0, "samples": rows}
        graph = captured([self._step(replace(task, kind="step", shape=shape, variant=model.name))])

        def step() -> None:
            between()
            graph.replay()
            torch.cuda.synchronize()

        gpu_s = measure(self._eager, [graph.replay]).seconds
        timed = measure(CpuWall(), [step])
        return replace(timed, **{name: max(0.0, getattr(timed, name) - gpu_s) for name in ("seconds", "p10", "p90")})

    def _group(self, task: MeasurementTask) -> Group:
        """Return the processes for the number of devices of a collective; the last ones are reused."""
        devices = round(task.shape.get("devices", 2))
        if self._ranks is None or self._ranks.devices != devices:
            self.close()
            if self._cuda and torch.cuda.device_count() < devices:
                raise UsageError(f"--tp {devices}: there are {torch.cuda.device_count()} GPUs")
            self._ranks = Group(devices, self._device.type)
        return self._ranks

    def close(self) -> None:
        """End the processes of collectives."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _calls(self, task: MeasurementTask) -> list[Call]:
        if task.kind == "step":
            return [self._step(task)]
        name = self._attend.get(f"{task.kind}.{task.dtype}")
        return kernels.calls(task, self._operands, None if name is None else self._kernel_of(task.kind, name))

    def _kernel_of(self, kind: str, name: str) -> Attend:
        """Return a kernel of attention as it is called on this device."""
        return ATTENTION[name] if self._cuda or kind != "decode_attention" else kernels.apart(ATTENTION[name])

    def _step(self, task: MeasurementTask) -> Call:
        assert task.variant is not None
        key = (task.variant, round(task.shape["layers"]))
        if key not in self._decoders:
            self._decoders = {key: Decoder(self._models[task.variant], key[1], self._operands)}
        decode, prefill = (
            self._kernel_of(kind, self._attend[f"{kind}.{task.dtype}"])
            for kind in ("decode_attention", "prefill_attention")
        )
        return self._decoders[key].step(task.shape, decode, prefill)

    def _kernel(self, task: MeasurementTask, call: Call) -> str | None:
        """Return the kernel that ran, by profiling one call for each operator."""
        if task.kind in ("step", "copy", "host", "decode_imbalance"):
            return None
        if task.operator not in self._names:
            self._names[task.operator] = _longest(call, self._cuda)
        return self._names[task.operator]


def _read_first(call: Any) -> None:
    """Read the first operand of a call, which the call before it wrote."""
    call.args[0].sum()


def _longest(call: Call, cuda: bool) -> str:
    """Return the kernel that took longest; on a processor the operation that torch dispatched."""
    if not cuda:
        with _Dispatched() as dispatched:
            call()
        return str(max(dispatched.seconds, key=dispatched.seconds.__getitem__))
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return str(max(trace.key_averages(), key=lambda e: float(e.self_device_time_total)).key)


class _Dispatched(TorchDispatchMode):  # type: ignore[misc]
    """Seconds of the operations dispatched within it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = now()
        result = func(*args, **(kwargs or {}))
        self.seconds[str(func)] = self.seconds.get(str(func), 0.0) + now() - start
        return result


def _trial(kind: str, model: Model, attention: FullAttention) -> MeasurementTask:
    """Return a medium shape by which a kernel is chosen."""
    heads = {"heads": attention.heads, "kv_heads": attention.kv_heads, "head_dim": attention.head_dim}
    shapes: dict[str, dict[str, float]] = {
        "prefill_attention": {"batch": 1, "tokens": 512, "context": 512, **heads, "window": 512},
        "decode_attention": {"batch": 4, "context": 1024, **heads, "window": 1024},
        "tree_attention": {"batch": 4, "width": 8, "context": 1024, **heads, "window": 1024},
    }
    return MeasurementTask(kind, model.dtype, shapes[kind], model.dtype)


def _power(value: float) -> float:
    """Return the power of two below: rough on purpose, so that runs on one machine have equal plans."""
    return float(2 ** np.floor(np.log2(value)))
