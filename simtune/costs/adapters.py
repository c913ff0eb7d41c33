"""Memory and times of LoRA adapters on one tensor-parallel rank.

A step runs two kernels for each product that adapters change (`simtune.costs.adapted_products`), shrink and expand,
over all its tokens with an adapter and the weights of the distinct adapters among them (grouped products, Punica: arXiv
2310.18547); in experts over all rows of those tokens, with the weights of the distinct pairs of adapter and expert.
No table has them: their times are a roofline of the rates and the overhead that are usual for products on the data
sheet (`simtune.costs.estimate`), off by as much.

Stages of a pipeline have slots for their own layers. Each loads its part of an adapter over its own link as a step
reaches it, so that a step waits as long in all as if one rank had all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from simtune.costs.adapted_products import AdaptedProduct, adaptable, adapted_products
from simtune.costs.estimate import estimate, link_of
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.specs.base import DTYPE_BYTES
from simtune.specs.hardware import BaseFit, Hardware
from simtune.specs.model import LayerGroup, Model
from simtune.specs.pool import Parallelism, Pool

ADAPTERS = "adapters"
"""Kind of the products of adapters among those that are redrawn."""
_PARTIAL_BYTES = 4
"""Bytes of a value between shrink and expand: float32."""


def slots_bytes(model: Model, pool: Pool, layers: Iterable[LayerGroup]) -> float:
    """Return the bytes of all slots on each rank that has these layers; 0 without adapters, and for models that are not
    `adaptable`."""
    if pool.lora is None or not adaptable(model, pool):
        return 0.0
    return pool.lora.slots * _adapter_bytes(model, pool, layers)


def _adapter_bytes(model: Model, pool: Pool, layers: Iterable[LayerGroup] | None = None) -> float:
    """Return the bytes of an adapter on each rank, in all layers unless given."""
    assert pool.lora is not None
    rank, products = pool.lora.rank, adapted_products(model, pool, layers)
    return DTYPE_BYTES[model.dtype] * sum(count * product.weights(rank) for product, count in products.items())


@dataclass(frozen=True)
class AdapterCosts:
    """Ticks of loading an adapter, and of the products of the adapters in a step."""

    host_ticks: int
    """Ticks of loading an adapter from host memory: each rank its part, over its own link."""
    storage_ticks: int
    """Ticks that reading it into host memory takes before that."""
    rank: int
    products: Mapping[AdaptedProduct, int]
    value_bytes: float
    fit: BaseFit
    factor: float = 1.0
    """Factor of the times of products, in a world in which they are off."""
    _ticks: dict[tuple[int, int], int] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, model: Model, pool: Pool, hardware: Hardware, factors: Mapping[str, float] | None = None
    ) -> AdapterCosts | None:
        """Return the costs of a pool; None without slots. Raises Infeasible if the hardware has no link `host`."""
        if pool.lora is None:
            return None
        rate, undivided = pool.lora.storage_bytes_per_s, pool.model_copy(update={"parallelism": Parallelism()})
        host_s = _adapter_bytes(model, pool) / link_of(hardware, "host").bytes_per_s
        storage_s = 0.0 if rate is None else _adapter_bytes(model, undivided) / rate
        operator = estimate("gemm", model.dtype, hardware)
        assert operator is not None, f"no rate for {model.dtype}, in which the model runs"
        return cls(
            host_ticks=round(host_s * TICKS_PER_SECOND),
            storage_ticks=round(storage_s * TICKS_PER_SECOND),
            rank=pool.lora.rank,
            products=adapted_products(model, pool),
            value_bytes=DTYPE_BYTES[model.dtype],
            fit=operator.base,
            factor=(factors or {}).get(ADAPTERS, 1.0),
        )

    def load_ticks(self, from_host: int, from_storage: int) -> int:
        """Return the ticks of loads, one after the other."""
        return from_host * self.host_ticks + from_storage * (self.storage_ticks + self.host_ticks)

    def ticks(self, tokens: int, adapters: int) -> int:
        """Return the ticks of the products of a step with `tokens` tokens of `adapters` adapters; 0 without any."""
        if not tokens:
            return 0
        key = tokens, adapters
        if key not in self._ticks:
            seconds = sum(count * self.product_s(x, tokens, adapters) for x, count in self.products.items())
            self._ticks[key] = round(self.factor * seconds * TICKS_PER_SECOND)
        return self._ticks[key]

    def product_s(self, product: AdaptedProduct, tokens: int, adapters: int) -> float:
        """Return the seconds of shrink and expand beside one product; 0 if no step runs it."""
        if not product.rows:
            return 0.0
        outputs, inputs, middle = product.outputs, product.inputs, product.slices * self.rank
        rows, groups = tokens * product.rows, product.visited(tokens, adapters)
        shrink_bytes = self.value_bytes * inputs * (groups * middle + rows) + _PARTIAL_BYTES * rows * middle
        # Expand adds to the outputs of the product, which it reads and writes.
        expand_bytes = self.value_bytes * outputs * (groups * self.rank + 2 * rows) + _PARTIAL_BYTES * rows * middle
        return self._kernel_s(2 * rows * middle * inputs, shrink_bytes) + self._kernel_s(
            2 * rows * self.rank * outputs, expand_bytes
        )

    def _kernel_s(self, flops: float, num_bytes: float) -> float:
        fit = self.fit
        a, b, p = flops / fit.flops_per_s, num_bytes / fit.bytes_per_s, fit.overlap_p
        return float(fit.overhead_s + max(a, b) * (1 + (min(a, b) / max(a, b)) ** p) ** (1 / p))
