"""Steps of decodes alone as CUDA graphs: captured once for each number of rows, replayed with the rows padded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from simtune.costs.iteration import CAPTURE_SIZES


class Decodes(NamedTuple):
    """Inputs of a step that decodes one token of each of its requests."""

    ids: Tensor
    positions: Tensor
    rows: Tensor
    """Rows of the cache, one for each request."""


class DecodeGraphs:
    """Graphs of `logits` for the numbers of rows that engines capture, up to the seats."""

    def __init__(self, logits: Callable[[Decodes], Tensor], seats: int, device: torch.device) -> None:
        """`logits` returns the logits of a step in kernels alone. Rows from `seats` on are spare ones of the cache.

        Graphs are captured at their first use, so that `logits` need not be ready before.
        """
        self._logits, self._seats, self._device = logits, seats, device
        self._sizes = [size for size in CAPTURE_SIZES if size < seats] + [seats]
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Decodes, Tensor]] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def _capture(self) -> None:
        # The largest first, so that the others use its memory.
        for size in reversed(self._sizes):
            self._captured[size] = self._graph(size)

    def run(self, ids: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Return the logits (n, vocabulary) of n decodes, which hold until the next run."""
        n = len(ids)
        if not self._captured:
            self._capture()
        size = next(size for size in self._sizes if size >= n)
        graph, inputs, logits = self._captured[size]
        padding = size - n
        for target, values, spare in zip(inputs, (ids, positions, rows), (0, 0, self._seats), strict=True):
            target.copy_(torch.tensor([*values, *[spare] * padding]), non_blocking=True)
        graph.replay()
        return logits[:n]

    def _graph(self, size: int) -> tuple[torch.cuda.CUDAGraph, Decodes, Tensor]:
        inputs = Decodes(*(torch.zeros(size, dtype=torch.long, device=self._device) for _ in Decodes._fields))
        inputs.rows.fill_(self._seats)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # A first call may allocate and choose kernels, which no capture allows.
            self._logits(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = self._logits(inputs)
        return graph, inputs, logits
