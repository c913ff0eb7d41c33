"""How slow a shared processor is now: a fixed loop, timed again and again, against what it took at first.

Neighbours take memory bandwidth and caches, which processor time does not show: the same step may take half as long
again. A matrix product over weights that no cache holds, like those of a decoding model, takes longer by about as
much. Knows nothing of simtune, for it also runs beside engines in interpreters of their own.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median

EVERY = 8
"""Steps after which it looks again."""
FIRST = 9
"""Times it looks for its reference."""
_ROWS, _WIDTH, _WEIGHTS, _COPIES = 4, 1024, 4096, 4


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
        self._look()
        self.reference_s = reference_s or median(self._look() for _ in range(FIRST))

    def __call__(self) -> float:
        """1 where it is as it was."""
        if self._at % EVERY == 0:
            self._latest.append(self._look())
        self._at += 1
        return median(self._latest) / self.reference_s

    def _look(self) -> float:
        start = time.thread_time()
        for weight in self._weights:
            self._x @ weight.T
        return time.thread_time() - start
