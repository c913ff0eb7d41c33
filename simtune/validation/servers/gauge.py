"""How slow a shared processor is now: a fixed loop, timed again and again, against what it took at first.

Neighbours take memory bandwidth and caches, which processor time does not show: the same step may take half as long
again. A matrix product over weights that no cache holds, like those of a decoding model, takes longer by about as
much. Of one with many rows only the part does that reads weights: of r rows 1 / (1 + r / h), where h rows take as long
to compute as the weights to read. Knows nothing of simtune, for it also runs beside engines in interpreters of their
own.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Any

EVERY = 8
"""Steps after which it looks again."""
FIRST = 9
"""Times it looks for its reference."""
_ROWS, _WIDTH, _WEIGHTS, _COPIES = 4, 1024, 4096, 4
_MANY_ROWS = 256


class Gauge:
    """Called before every step; says how many times as long things take as by its reference."""

    def __init__(self, reference_s: float | None = None) -> None:
        """`reference_s` is that of an earlier gauge on the same machine; else it is what the loop takes now."""
        import torch

        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(_ROWS, _WIDTH, generator=generator)
        self._weights = [torch.randn(_WEIGHTS, _WIDTH, generator=generator) for _ in range(_COPIES)]
        self._at = 0
        self._latest: deque[float] = deque(maxlen=3)
        self.look()
        here = median(self.look() for _ in range(FIRST))
        self.reference_s = reference_s or here
        many = torch.randn(_MANY_ROWS, _WIDTH, generator=generator)
        computing = median(self._seconds(many) for _ in range(3)) / _MANY_ROWS
        self._even = here / computing

    def __call__(self, rows: int = 0) -> float:
        """1 where it is as it was. Of a step whose products have so many rows; without, of what only reads weights."""
        if self._at % EVERY == 0:
            self._latest.append(self.look())
        self._at += 1
        return 1 + (median(self._latest) / self.reference_s - 1) / (1 + rows / self._even)

    def look(self) -> float:
        """Seconds of the loop now."""
        return self._seconds(self._x)

    def _seconds(self, x: Any) -> float:
        start = time.thread_time()
        for weight in self._weights:
            x @ weight.T
        return time.thread_time() - start
