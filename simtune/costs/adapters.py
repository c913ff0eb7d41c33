"""Memory and products of LoRA adapters on one tensor-parallel rank.

An adapter of rank r adds to a product (n, k) of s matrices side by side (queries, keys and values: 3) the products A,
of (s r, k), and B, of (n, r) in all. A is whole on each rank where the outputs are divided, and so is B where the
inputs are, as in vLLM without --fully-sharded-loras (`create_lora_weights` in vllm/lora/layers/base_linear.py, 0.33).
So with (n, k) of the rank a slot takes r (n + s k) values for each product.

A step runs two kernels for each product, shrink and expand, over all its tokens with an adapter and the weights of the
distinct adapters among them (grouped products, Punica: arXiv 2310.18547). No table has them: their times are a roofline
of the rates and the overhead that are usual for products on the data sheet (`simtune.costs.estimate`), off by as much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from simtune.costs.estimate import estimate, link_of
from simtune.costs.layers import attention_layer
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.specs.base import DTYPE_BYTES
from simtune.specs.hardware import BaseFit, Hardware
from simtune.specs.model import DenseFeedForward, FullAttention, LayerGroup, Model, SlidingAttention
from simtune.specs.pool import Parallelism, Pool

ADAPTERS = "adapters"
"""Kind of the products of adapters among those that are redrawn."""
_PARTIAL_BYTES = 4
"""Bytes of a value between shrink and expand: float32."""


class AdaptedProduct(NamedTuple):
    """Product of a rank that adapters change: `slices` matrices side by side, with `outputs` rows in all."""

    outputs: float
    inputs: float
    slices: int

    def weights(self, rank: int) -> float:
        """Return the values of an adapter."""
        return rank * (self.outputs + self.slices * self.inputs)


def adapted_products(model: Model, pool: Pool) -> Counter[AdaptedProduct]:
    """Return the products on each rank that the adapters of a pool change, each with the number of its layers."""
    assert pool.lora is not None
    products: Counter[AdaptedProduct] = Counter()
    for group in model.layers:
        for product in _of_layer(model, group, pool.parallelism.tp, pool.lora.targets == "all"):
            products[product] += group.count
    return products


def _of_layer(model: Model, group: LayerGroup, tp: int, feed_forward: bool) -> Iterator[AdaptedProduct]:
    (n, k), (outputs, inputs) = attention_layer(model, group.attention, tp).products
    yield AdaptedProduct(n, k, 3)
    yield AdaptedProduct(outputs, inputs, 1)
    if feed_forward and isinstance(group.feed_forward, DenseFeedForward):
        width, beside = group.feed_forward.intermediate_size / tp, 1 + group.feed_forward.gated
        yield AdaptedProduct(beside * width, model.hidden_size, beside)
        yield AdaptedProduct(model.hidden_size, width, 1)


def slots_bytes(model: Model, pool: Pool) -> float:
    """Return the bytes of all slots on each rank; 0 without adapters, and for models that are not `adaptable`."""
    if pool.lora is None or not adaptable(model, pool):
        return 0.0
    return pool.lora.slots * _adapter_bytes(model, pool)


def adaptable(model: Model, pool: Pool) -> bool:
    """True if all layers have the products that adapters of the pool change: those of full or windowed attention, and
    with targets `all` those of dense feed-forward blocks."""
    assert pool.lora is not None
    attentions = [group.attention for group in model.layers]
    if not all(isinstance(a, FullAttention | SlidingAttention) and a.q_lora_rank is None for a in attentions):
        return False
    return pool.lora.targets == "attention" or all(isinstance(g.feed_forward, DenseFeedForward) for g in model.layers)


def _adapter_bytes(model: Model, pool: Pool) -> float:
    assert pool.lora is not None
    rank, products = pool.lora.rank, adapted_products(model, pool)
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
        """Return the seconds of shrink and expand beside one product."""
        outputs, inputs, slices = product
        middle = slices * self.rank
        shrink_bytes = self.value_bytes * inputs * (adapters * middle + tokens) + _PARTIAL_BYTES * tokens * middle
        # Expand adds to the outputs of the product, which it reads and writes.
        expand_bytes = (
            self.value_bytes * outputs * (adapters * self.rank + 2 * tokens) + _PARTIAL_BYTES * tokens * middle
        )
        return self._kernel_s(2 * tokens * middle * inputs, shrink_bytes) + self._kernel_s(
            2 * tokens * self.rank * outputs, expand_bytes
        )

    def _kernel_s(self, flops: float, num_bytes: float) -> float:
        fit = self.fit
        a, b, p = flops / fit.flops_per_s, num_bytes / fit.bytes_per_s, fit.overlap_p
        return float(fit.overhead_s + max(a, b) * (1 + (min(a, b) / max(a, b)) ** p) ** (1 / p))
