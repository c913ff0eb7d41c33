"""Products that LoRA adapters change, on one rank: those of attention, of feed-forward blocks, and of experts.

An adapter of rank r adds to a product (n, k) of s matrices side by side (queries, keys and values: 3) the products A,
of (s r, k), and B, of (n, r) in all. A is whole on each rank where the outputs are divided, and so is B where the
inputs are, as in vLLM without --fully-sharded-loras (`create_lora_weights` in vllm/lora/layers/base_linear.py, 0.33).
So with (n, k) of the rank a slot takes r (n + s k) values for each product.

Latent attention: adapters change the products into the latents, which every rank has as a whole, and those out of the
queries' latent and of the outputs. A slot has room for the product that expands keys and values too, but vLLM 0.33
never runs it: attention keeps the product that it was made with (`MLACommonBaseImpl.kv_b_proj` in
vllm/model_executor/layers/attention/mla_attention.py), and decodes with weights that were absorbed as the model was
loaded.

Experts: an adapter has A and B for every expert of a rank, and one for the router (`FusedMoEWithLoRA` in
vllm/lora/layers/fused_moe.py). Their kernels compute a row for each expert that a token visits, with the weights of
each pair of adapter and expert among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from simtune.costs.layers import attention_layer
from simtune.specs.model import (
    Attention,
    DenseFeedForward,
    FeedForward,
    FullAttention,
    LayerGroup,
    MlaAttention,
    Model,
    MoeFeedForward,
    SlidingAttention,
)
from simtune.specs.pool import Parallelism, Pool


class AdaptedProduct(NamedTuple):
    """Product of a rank that adapters change: `slices` matrices side by side, with `outputs` rows in all."""

    outputs: float
    inputs: float
    slices: int
    copies: float = 1
    """Number of such products beside one another, of which a row takes one: experts of the rank."""
    rows: float = 1
    """Rows of the rank for each token: experts that it visits there. No rows: a slot has the matrices, no step runs
    them."""

    def weights(self, rank: int) -> float:
        """Return the values of an adapter."""
        return self.copies * rank * (self.outputs + self.slices * self.inputs)

    def visited(self, tokens: float, adapters: int) -> float:
        """Return the expected pairs of adapter and copy among the rows of `tokens` tokens, equally many of each
        adapter, whose rows choose their copies evenly and independently."""
        if self.copies <= 1:
            return adapters
        rows = tokens * self.rows / adapters
        pairs: float = adapters * self.copies * (1 - (1 - 1 / self.copies) ** rows)
        return pairs


def adapted_products(model: Model, pool: Pool, layers: Iterable[LayerGroup] | None = None) -> Counter[AdaptedProduct]:
    """Return the products on each rank that the adapters of a pool change, each with the number of its layers: those
    of all `layers`, or of the model unless given."""
    assert pool.lora is not None
    products: Counter[AdaptedProduct] = Counter()
    of_group: dict[int, list[AdaptedProduct]] = {}
    for group in model.layers if layers is None else layers:
        if id(group) not in of_group:
            of_group[id(group)] = list(_of_layer(model, group, pool.parallelism, pool.lora.targets == "all"))
        for product in of_group[id(group)]:
            products[product] += group.count if layers is None else 1
    return products


def adaptable(model: Model, pool: Pool) -> bool:
    """True if all layers have products that adapters of the pool are known to change: those of full, windowed or latent
    attention, and with targets `all` those of dense feed-forward blocks or of experts."""
    assert pool.lora is not None
    if not all(_attention_is_adaptable(group.attention) for group in model.layers):
        return False
    return pool.lora.targets == "attention" or all(_is_adaptable(group.feed_forward) for group in model.layers)


def has_latents(model: Model) -> bool:
    """True if the model has latent attention."""
    return any(isinstance(group.attention, MlaAttention) for group in model.layers)


def has_experts(model: Model) -> bool:
    """True if the model has experts."""
    return any(isinstance(group.feed_forward, MoeFeedForward) for group in model.layers)


def _attention_is_adaptable(attention: Attention) -> bool:
    if isinstance(attention, MlaAttention):
        # An indexer and a gate have linear layers of their own, which engines adapt by rules that were not read.
        return attention.index_topk is None and not attention.output_gate
    return isinstance(attention, FullAttention | SlidingAttention) and attention.q_lora_rank is None


def _is_adaptable(feed_forward: FeedForward) -> bool:
    if isinstance(feed_forward, MoeFeedForward):
        return feed_forward.latent_size is None
    return isinstance(feed_forward, DenseFeedForward)


def _of_layer(
    model: Model, group: LayerGroup, parallelism: Parallelism, feed_forward: bool
) -> Iterator[AdaptedProduct]:
    """Yield the products of a layer; with `feed_forward` those of that block too."""
    yield from _of_attention(model, group.attention, parallelism.tp)
    block, hidden = group.feed_forward, model.hidden_size
    if not feed_forward:
        return
    if isinstance(block, DenseFeedForward):
        yield from _of_dense(hidden, block.intermediate_size / parallelism.tp, gated=block.gated)
        return
    assert isinstance(block, MoeFeedForward), f"adapters change nothing in a feed-forward block of {block.kind}"
    # Every rank routes its tokens itself.
    yield AdaptedProduct(block.experts, hidden, 1)
    ranks = parallelism.tp * parallelism.expert_groups
    by_expert = parallelism.expert_parallel
    copies = -(-block.experts // ranks) if by_expert else block.experts
    rows = block.experts_per_token * copies / block.experts
    width = block.intermediate_size / (1 if by_expert else ranks)
    for product in _of_dense(hidden, width, gated=block.gated):
        yield product._replace(copies=copies, rows=rows)
    if block.shared_intermediate_size:
        yield from _of_dense(hidden, block.shared_intermediate_size / parallelism.tp, gated=block.gated)


def _of_attention(model: Model, attention: Attention, tp: int) -> Iterator[AdaptedProduct]:
    products = attention_layer(model, attention, tp).products
    if not isinstance(attention, MlaAttention):
        (n, k), (outputs, inputs) = products
        yield AdaptedProduct(n, k, 3)
        yield AdaptedProduct(outputs, inputs, 1)
        return
    *into, (expanded, latent), (outputs, inputs) = products
    # Side by side: the products into both latents, if queries have one.
    yield AdaptedProduct(*into[0], 2 if attention.q_lora_rank is not None else 1)
    yield AdaptedProduct(*into[1], 1)
    yield AdaptedProduct(expanded, latent, 1, rows=0)
    yield AdaptedProduct(outputs, inputs, 1)


def _of_dense(hidden: int, width: float, *, gated: bool) -> Iterator[AdaptedProduct]:
    beside = 1 + gated
    yield AdaptedProduct(beside * width, hidden, beside)
    yield AdaptedProduct(hidden, width, 1)
