"""Operands of timed calls: random, and so large in total that no call finds its operands in a cache.

Weights, keys and values rotate from call to call, since an engine reads them from memory at each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}

COLD = 3
"""Factor of the size of all rotating operands over that of the last-level cache."""

_BLOCK = 1 << 22  # random normal values that are repeated to fill memory


class Operands:
    """Random normal data on a device: a pool for rotating views, and separate tensors."""

    def __init__(self, device: torch.device, cache_bytes: int) -> None:
        self.device, self._cache_bytes = device, cache_bytes
        self._pools: dict[str, Tensor] = {}
        self._normal = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)).to(device)

    def fresh(self, shape: Sequence[int], dtype: str) -> Tensor:
        """Return a separate tensor."""
        flat = torch.empty(prod(shape), dtype=DTYPES[dtype], device=self.device)
        block = (self._normal * 20 if dtype == "int8" else self._normal).to(flat.dtype)
        for start in range(0, len(flat), _BLOCK):
            flat[start : start + _BLOCK] = block[: len(flat) - start]
        return flat.view(*shape)

    def rotating(self, shape: Sequence[int], dtype: str) -> list[Tensor]:
        """Return views of this shape that do not overlap: enough of them to evict each other from the cache."""
        size = prod(shape)
        count = max(1, -(-COLD * self._cache_bytes // max(1, size * DTYPES[dtype].itemsize)))
        count = min(count, 64)
        pool = self._pool(size * count, dtype)
        step = max(size, len(pool) // count // 64 * 64) if count > 1 else size
        return [pool[at * step : at * step + size].view(*shape) for at in range(count) if at * step + size <= len(pool)]

    def whole(self, shape: Sequence[int], dtype: str, least: int = 0) -> Tensor:
        """Return a single view; a size of -1 becomes large enough to be cold, and at least `least`."""
        values = prod(n for n in shape if n > 0)
        if -1 in shape:
            values *= max(least, -(-COLD * self._cache_bytes // (values * DTYPES[dtype].itemsize)))
        return self._pool(values, dtype)[:values].view(*shape)

    def _pool(self, values: int, dtype: str) -> Tensor:
        least = COLD * self._cache_bytes // DTYPES[dtype].itemsize
        if dtype not in self._pools or len(self._pools[dtype]) < values:
            had = len(self._pools.pop(dtype, ()))
            self._pools[dtype] = self.fresh((max(values, least, 2 * had),), dtype)
        return self._pools[dtype]
