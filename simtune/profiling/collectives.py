"""Measurement of collectives and peer transfers: NCCL between GPUs, gloo between processes on a processor.

Every rank is a process that waits for (kind, dtype, bytes) and runs the calls; rank 0 sends the seconds of one. Only
wall time is possible, since most of it is waiting for other ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from simtune.errors import SimtuneError
from simtune.profiling.measurement_plan import MeasurementTask
from simtune.profiling.operands import DTYPES
from simtune.profiling.timing import Measured, Sample, now, summary

COLLECTIVES = ("all_reduce", "all_gather", "send_recv")
_SAMPLES = 9
_SAMPLE_S = 2e-3
_PATIENCE_S = 60.0


class Group:
    """Processes that run collectives, one for each device."""

    def __init__(self, devices: int, kind: str) -> None:
        import torch.multiprocessing as multiprocessing

        self.devices = devices
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(devices):
            parent_end, child_end = context.Pipe()
            arguments = (rank, devices, kind, f"file://{self._folder.name}/meet", child_end)
            self._processes.append(context.Process(target=_rank, args=arguments, daemon=True))
            self._pipes.append(parent_end)
            self._processes[-1].start()
            child_end.close()

    def measure(self, task: MeasurementTask) -> Measured:
        """Time one collective. Raises SimtuneError if a rank is lost or does not answer within a minute."""
        try:
            for pipe in self._pipes:
                pipe.send((task.kind, task.dtype, round(task.shape["bytes"])))
            if not self._pipes[0].poll(_PATIENCE_S):
                raise EOFError
            seconds = self._pipes[0].recv()
        except (EOFError, OSError):
            raise SimtuneError(
                f"{task.operator} over {self.devices} processes: they do not answer; the points measured are kept"
            ) from None
        return summary([Sample(s, True) for s in seconds], "wall")

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            process.terminate()
        self._folder.cleanup()


def _rank(rank: int, devices: int, kind: str, meet: str, pipe: Connection) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=meet, rank=rank, world_size=devices)
    wait: Callable[[], Any] = torch.cuda.synchronize if kind == "cuda" else lambda: None
    while True:
        try:
            name, dtype, size = pipe.recv()
        except EOFError:
            break
        call = _call(
            name, rank, devices, torch.zeros(max(1, size // DTYPES[dtype].itemsize), dtype=DTYPES[dtype]).to(kind)
        )
        count = torch.ones(1)
        seconds = []
        # two trial samples find how often the call is repeated in a sample
        for sample in range(-2, _SAMPLES):
            distributed.barrier()
            start = now()
            for _ in range(int(count)):
                call()
            wait()
            spent = (now() - start) / int(count)
            if sample >= 0:
                seconds.append(spent)
            # All ranks use the repetitions of the first one.
            else:
                count = torch.tensor([max(1.0, min(200.0, _SAMPLE_S / spent))]).to(kind)
                distributed.broadcast(count, 0)
        if rank == 0:
            pipe.send(seconds)
    distributed.destroy_process_group()


def _call(name: str, rank: int, devices: int, data: Tensor) -> Callable[[], Any]:
    """Return the call on this rank. `data` is all that is reduced, gathered or sent."""
    from torch import distributed

    if name == "all_reduce":
        return partial(distributed.all_reduce, data)
    if name == "all_gather":
        part = data[: len(data) // devices].clone()
        gathered = data.new_empty(len(part) * devices)
        # Its older name.
        gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        return partial(gather, gathered, part)
    if rank > 1:
        return lambda: None
    return partial(distributed.send, data, 1) if rank == 0 else partial(distributed.recv, data, 0)
