"""How many KV blocks fit, by vLLM's accounting: utilisation x memory - weights - everything else.

Weights and KV bytes per token follow from the model and agree with published start-up logs within about 1
%. What vLLM measures by a dummy run (activations, graphs, contexts) is `other_bytes`, a starting formula
that no log has confirmed beyond one device: single-GPU logs imply 1.2-1.4 GiB, others 0.4-3 GiB. Where the
KV cache is small, give `kv_cache.num_blocks` from a log of the engine itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from simtune.costs.iteration import attention_shape, check_parallelism
from simtune.errors import Infeasible
from simtune.specs.base import DTYPE_BYTES
from simtune.specs.hardware import Hardware
from simtune.specs.model import LayerGroup, Model, MoeFeedForward
from simtune.specs.plan import Parallelism, Pool

GIB = 1 << 30

CONTEXT_BYTES = 0.6 * GIB
GRAPHS_BYTES = 0.5 * GIB
COMMUNICATOR_BYTES = 0.4 * GIB


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the tightest rank of an instance. All sizes in bytes."""

    total_bytes: float
    utilization: float
    weights_bytes: float
    other_bytes: float
    kv_bytes: float
    """Left for the KV cache, or the size of the cache asked for by `kv_cache.num_blocks`."""
    kv_bytes_per_token: float
    block_size: int
    num_blocks: int
    """Blocks requests can use: one less than the engine logs, since vLLM keeps one for itself."""

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size


def stage_layers(model: Model, pp: int) -> list[list[LayerGroup]]:
    """The layers of each pipeline stage in order, as evenly as they go, the longer stages first."""
    layers = [group for group in model.layers for _ in range(group.count)]
    size, longer = divmod(len(layers), pp)
    stages, start = [], 0
    for stage in range(pp):
        end = start + size + (stage < longer)
        stages.append(layers[start:end])
        start = end
    return stages


def weights_bytes(model: Model, parallelism: Parallelism, stage: int) -> float:
    """Bytes of weights on each rank of a pipeline stage, embeddings and head included where they stand.

    Biases and quantisation scales are left out; they are below 1 %.
    """
    tp, pp = parallelism.tp, parallelism.pp
    hidden = model.hidden_size
    plain, matrix = DTYPE_BYTES[model.dtype], DTYPE_BYTES[model.weight_dtype]
    total = 0.0
    for group in stage_layers(model, pp)[stage]:
        shape = attention_shape(group, tp)
        total += matrix * hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
        total += plain * 2 * hidden
        feed_forward = group.feed_forward
        if isinstance(feed_forward, MoeFeedForward):
            gated = feed_forward.experts * feed_forward.intermediate_size + feed_forward.shared_intermediate_size
            total += matrix * 3 * hidden * gated / tp + plain * hidden * feed_forward.experts
        else:
            total += matrix * (3 if feed_forward.gated else 2) * hidden * feed_forward.intermediate_size / tp
    embedding = plain * hidden * -(-model.vocab_size // tp)
    first, last = stage == 0, stage == pp - 1
    total += embedding * first
    total += (embedding * (not (model.tie_embeddings and first)) + plain * hidden) * last
    return total


def kv_bytes_per_token(model: Model, parallelism: Parallelism, stage: int, kv_dtype: str) -> float:
    """KV bytes one token takes on each rank of a stage. Sliding-window layers are counted in full."""
    values = 0
    for group in stage_layers(model, parallelism.pp)[stage]:
        shape = attention_shape(group, parallelism.tp)
        values += 2 * shape.kv_heads * shape.head_dim
    return values * DTYPE_BYTES[kv_dtype]


def other_bytes(model: Model, pool: Pool) -> float:
    """Activations of the largest step, logits, graphs, context, communicators: a starting formula, per
    rank.
    """
    tp, pp = pool.parallelism.tp, pool.parallelism.pp
    tokens = pool.batching.max_num_batched_tokens
    width = max(_active_width(group) for group in model.layers)
    activations = DTYPE_BYTES[model.dtype] * tokens * (2 * width / tp + 6 * model.hidden_size)
    samples = min(pool.batching.max_num_seqs, tokens)
    logits = 2 * DTYPE_BYTES["fp32"] * samples * model.vocab_size / tp
    communicators = COMMUNICATOR_BYTES * ((tp > 1) + (pp > 1))
    return CONTEXT_BYTES + GRAPHS_BYTES + activations + logits + communicators


def _active_width(group: LayerGroup) -> int:
    feed_forward = group.feed_forward
    if isinstance(feed_forward, MoeFeedForward):
        return feed_forward.experts_per_token * feed_forward.intermediate_size + feed_forward.shared_intermediate_size
    return feed_forward.intermediate_size


def kv_capacity(model: Model, hardware: Hardware, pool: Pool) -> Memory:
    """Memory of the tightest rank of one instance of the pool.

    Raises Infeasible when not even one block is left for requests, saying how much is missing and what
    would help.
    """
    check_parallelism(model, pool.parallelism)
    ranks = [_rank(model, hardware, pool, stage) for stage in range(pool.parallelism.pp)]
    tightest = min(ranks, key=lambda rank: rank.num_blocks)
    if tightest.num_blocks < 1:
        raise Infeasible(f"model {model.name} on {hardware.name}: {_shortage(pool, tightest)}")
    return tightest


def _shortage(pool: Pool, rank: Memory) -> str:
    tp, pp = pool.parallelism.tp, pool.parallelism.pp
    if pool.kv_cache.num_blocks is not None:
        return f"kv_cache.num_blocks {pool.kv_cache.num_blocks} leaves none for requests; give at least 2"
    missing = 2 * rank.block_size * rank.kv_bytes_per_token - rank.kv_bytes
    return (
        f"with tp {tp} pp {pp} {missing / GIB:.2f} GiB per device are missing: weights take "
        f"{rank.weights_bytes / GIB:.2f} GiB and everything else {rank.other_bytes / GIB:.2f} GiB "
        f"of {rank.utilization:.2f} x {rank.total_bytes / GIB:.2f} GiB; more tp or pp, fp8 weights, a higher "
        "kv_cache.memory_utilization or a smaller batching.max_num_batched_tokens would help"
    )


def _rank(model: Model, hardware: Hardware, pool: Pool, stage: int) -> Memory:
    kv_cache, parallelism = pool.kv_cache, pool.parallelism
    weights = weights_bytes(model, parallelism, stage)
    other = other_bytes(model, pool)
    per_token = kv_bytes_per_token(model, parallelism, stage, kv_cache.dtype or model.dtype)
    total = hardware.device.memory_bytes
    kv_bytes = kv_cache.memory_utilization * total - weights - other
    blocks = int(kv_bytes // (kv_cache.block_size * per_token))
    if kv_cache.num_blocks is not None:
        blocks = kv_cache.num_blocks
        kv_bytes = blocks * kv_cache.block_size * per_token
    return Memory(
        total_bytes=total,
        utilization=kv_cache.memory_utilization,
        weights_bytes=weights,
        other_bytes=other,
        kv_bytes=kv_bytes,
        kv_bytes_per_token=per_token,
        block_size=kv_cache.block_size,
        num_blocks=max(0, blocks - 1),
    )
