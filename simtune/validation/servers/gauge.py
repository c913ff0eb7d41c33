"""Slowness of a shared processor: a fixed loop, timed again and again, compared with its time at the start.

Neighbours take memory bandwidth and caches, which processor time does not show: the same step may take half as long
again. A matrix product over weights that no cache holds, like those of a decoding model, slows down by about as much.
In a product with many rows only the part that reads weights slows down: with r rows the share 1 / (1 + r / h), where h
rows take as long to compute as the weights to read. Imports no simtune module, because it also runs beside engines in
interpreters of their own.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Any

EVERY = 8
"""Steps after which the gauge is read again."""
FIRST = 9
"""Readings of the loop for its reference."""
_ROWS, _WIDTH, _WEIGHTS, _COPIES = 4, 1024, 4096, 4
_MANY_ROWS = 256


class Gauge:
    """Factor on the time of the fixed loop since its reference; called before every step."""

    def __init__(self, reference_s: float | None = None) -> None:
        """`reference_s` is that of an earlier gauge on the same machine; otherwise the current time of the loop."""
        import torch

        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(_ROWS, _WIDTH, generator=generator)
        self._weights = [torch.randn(_WEIGHTS, _WIDTH, generator=generator) for _ in range(_COPIES)]
        self._at = 0
        self._latest: deque[float] = deque(maxlen=3)
        self.look()
        current_s = median(self.look() for _ in range(FIRST))
        self.reference_s = reference_s or current_s
        many = torch.randn(_MANY_ROWS, _WIDTH, generator=generator)
        computing = median(self._seconds(many) for _ in range(3)) / _MANY_ROWS
        self._even = current_s / computing

    def __call__(self, rows: int = 0) -> float:
        """Return the slowness, 1 if nothing has changed.

        With `rows` it is that of a step whose products have this number of rows; without, of work that only reads
        weights.
        """
        if self._at % EVERY == 0:
            self._latest.append(self.look())
        self._at += 1
        return 1 + (median(self._latest) / self.reference_s - 1) / (1 + rows / self._even)

    def look(self) -> float:
        """Return the seconds that the loop takes now."""
        return self._seconds(self._x)

    def _seconds(self, x: Any) -> float:
        start = time.thread_time()
        for weight in self._weights:
            x @ weight.T
        return time.thread_time() - start
