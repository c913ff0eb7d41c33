"""How many KV blocks fit, by vLLM's accounting: utilisation x memory - weights - everything else.

Weights and KV bytes per token follow from the model and agree with published start-up logs within about 1
%. What vLLM measures by a dummy run (activations, graphs, contexts) is `other_bytes`, a starting formula
that no log has confirmed beyond one device: single-GPU logs imply 1.2-1.4 GiB, others 0.4-3 GiB, and releases of 2023
up to 14 GiB under tensor parallelism. Where the KV cache is small, give `kv_cache.other_memory_gib` or
`kv_cache.num_blocks` from a log of the engine itself.

What a sequence needs however long it is, the states of linear attention, is set aside for max_num_seqs
sequences. A sliding window is either counted like that, as a whole window for every seat, or in full for every
token, whichever leaves more tokens; engines share one pool of pages among both and do at least as well as the
better of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from simtune.costs.iteration import check_parallelism
from simtune.costs.layers import attention_layer
from simtune.errors import Infeasible
from simtune.specs.base import DTYPE_BYTES, Dtype
from simtune.specs.hardware import Hardware
from simtune.specs.model import LayerGroup, Model, MoeFeedForward
from simtune.specs.plan import Parallelism, Pool

GIB = 1 << 30

SCALE_BYTES = 4
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
    seat_bytes: float
    """Set aside for max_num_seqs sequences, whatever their lengths: states, and windows where that is better."""
    kv_bytes_per_token: float
    block_size: int
    num_blocks: int
    """Blocks requests can use: one less than the engine logs, since vLLM keeps one for itself."""


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


class _Weights(NamedTuple):
    """Bytes per value of a matrix, and per output for its scale."""

    values: float
    scale: float

    @classmethod
    def of(cls, dtype: Dtype) -> _Weights:
        """8-bit weights have a scale for each output, unless for each block; `DTYPE_BYTES` counts those of 4 bits."""
        return cls(DTYPE_BYTES[dtype], SCALE_BYTES if dtype in ("fp8", "int8", "int8_wo") else 0)

    def of_product(self, n: int, k: int) -> float:
        return n * (self.values * k + self.scale)

    def of_feed_forward(self, hidden: int, width: int, tp: int, *, gated: bool) -> float:
        if not width:
            return 0.0
        inputs = 2 if gated else 1
        return self.values * (inputs + 1) * hidden * width / tp + self.scale * (inputs * width / tp + hidden)


def weights_bytes(model: Model, parallelism: Parallelism, stage: int) -> float:
    """Bytes of weights on each rank of a pipeline stage, embeddings and head included where they stand.

    Biases are left out; they are below 1 %. With expert parallelism it is the rank with the most experts.
    """
    tp, pp = parallelism.tp, parallelism.pp
    hidden = model.hidden_size
    plain, head = DTYPE_BYTES[model.dtype], DTYPE_BYTES[model.dtype_of("head")]
    projections, dense = _Weights.of(model.dtype_of("attention")), _Weights.of(model.dtype_of("dense"))
    routed = _Weights.of(model.dtype_of("experts"))
    total = 0.0
    for group in stage_layers(model, pp)[stage]:
        total += sum(projections.of_product(n, k) for n, k in attention_layer(model, group.attention, tp).products)
        total += plain * 2 * hidden
        feed_forward = group.feed_forward
        if isinstance(feed_forward, MoeFeedForward):
            ranks = tp * parallelism.attention_dp
            experts = -(-feed_forward.experts // ranks) if parallelism.expert_parallel else feed_forward.experts / tp
            width = experts * feed_forward.intermediate_size
            # Each slice of an expert has all of the last outputs.
            last = hidden * (experts if parallelism.expert_parallel else feed_forward.experts)
            total += routed.values * 3 * hidden * width + routed.scale * (2 * width + last)
            total += dense.of_feed_forward(hidden, feed_forward.shared_intermediate_size, tp, gated=True)
            total += plain * hidden * feed_forward.experts
        else:
            total += dense.of_feed_forward(hidden, feed_forward.intermediate_size, tp, gated=feed_forward.gated)
    vocab = hidden * -(-model.vocab_size // tp)
    first, last = stage == 0, stage == pp - 1
    total += plain * vocab * first
    total += (head * vocab * (not (model.tie_embeddings and first)) + plain * hidden) * last
    return total


def kv_bytes_per_token(model: Model, parallelism: Parallelism, stage: int, kv_dtype: str) -> float:
    """KV bytes one token takes on each rank of a stage, sliding windows counted in full."""
    return _cache(model, parallelism, stage, kv_dtype, None)[0]


def _cache(
    model: Model, parallelism: Parallelism, stage: int, kv_dtype: str, longest: int | None
) -> tuple[float, float]:
    """(KV bytes per token, bytes per sequence besides) on each rank of a stage.

    With `longest`, the most tokens a sequence has, sliding windows are counted per sequence.
    """
    per_token = per_sequence = 0.0
    for group in stage_layers(model, parallelism.pp)[stage]:
        layer = attention_layer(model, group.attention, parallelism.tp)
        values = layer.values_per_token * DTYPE_BYTES[kv_dtype]
        per_sequence += layer.state_bytes(model.dtype)
        if longest is None or layer.window is None:
            per_token += values
        else:
            per_sequence += values * min(layer.window, longest)
    return per_token, per_sequence


def other_bytes(model: Model, pool: Pool) -> float:
    """Activations of the largest step, logits, graphs, context, communicators, per rank: what the plan was told from a
    log, or else a starting formula.
    """
    if pool.kv_cache.other_memory_gib is not None:
        return pool.kv_cache.other_memory_gib * GIB
    tp, pp = pool.parallelism.tp, pool.parallelism.pp
    tokens = pool.batching.max_num_batched_tokens
    width = max(_active_width(group) for group in model.layers)
    activations = DTYPE_BYTES[model.dtype] * tokens * (2 * width / tp + 6 * model.hidden_size)
    samples = min(pool.batching.max_num_seqs, tokens)
    logits = 2 * DTYPE_BYTES["fp32"] * samples * model.vocab_size / tp
    communicators = COMMUNICATOR_BYTES * ((tp > 1) + (pp > 1) + (pool.parallelism.attention_dp > 1))
    graphs = GRAPHS_BYTES if pool.cuda_graphs else 0.0
    return CONTEXT_BYTES + graphs + activations + logits + communicators


def _active_width(group: LayerGroup) -> int:
    feed_forward = group.feed_forward
    if isinstance(feed_forward, MoeFeedForward):
        return feed_forward.experts_per_token * feed_forward.intermediate_size + feed_forward.shared_intermediate_size
    return feed_forward.intermediate_size


def kv_capacity(
    model: Model,
    hardware: Hardware,
    pool: Pool,
    extra_weights_bytes: float = 0.0,
    extra_kv_bytes_per_token: float = 0.0,
) -> Memory:
    """Memory of the tightest rank of one instance of the pool.

    `extra_weights_bytes` stand on every rank beside the model, such as a draft model's, whose keys and values take
    `extra_kv_bytes_per_token` beside the model's. Raises Infeasible when not even one block is left for requests,
    saying how much is missing and what would help.
    """
    check_parallelism(model, pool.parallelism)
    extra = extra_weights_bytes, extra_kv_bytes_per_token
    ranks = [_rank(model, hardware, pool, stage, *extra) for stage in range(pool.parallelism.pp)]
    tightest = min(ranks, key=lambda rank: rank.num_blocks)
    if tightest.num_blocks < 1:
        raise Infeasible(f"model {model.name} on {hardware.name}: {_shortage(pool, tightest)}")
    return tightest


def _shortage(pool: Pool, rank: Memory) -> str:
    tp, pp = pool.parallelism.tp, pool.parallelism.pp
    if pool.kv_cache.num_blocks is not None:
        return f"kv_cache.num_blocks {pool.kv_cache.num_blocks} leaves none for requests; give at least 2"
    missing = 2 * rank.block_size * rank.kv_bytes_per_token - rank.kv_bytes
    seats = f", {pool.batching.max_num_seqs} seats {rank.seat_bytes / GIB:.2f} GiB" if rank.seat_bytes else ""
    return (
        f"with tp {tp} pp {pp} {missing / GIB:.2f} GiB per device are missing: weights take "
        f"{rank.weights_bytes / GIB:.2f} GiB{seats} and everything else {rank.other_bytes / GIB:.2f} GiB "
        f"of {rank.utilization:.2f} x {rank.total_bytes / GIB:.2f} GiB; more tp or pp, fp8 weights, a higher "
        "kv_cache.memory_utilization or a smaller batching.max_num_batched_tokens would help"
    )


def _rank(
    model: Model, hardware: Hardware, pool: Pool, stage: int, extra_weights_bytes: float, extra_per_token: float
) -> Memory:
    """One rank of a stage, windows counted the better way."""
    longest = pool.max_model_len or model.max_position
    kv_dtype = pool.kv_cache.dtype or model.dtype
    counted = {_cache(model, pool.parallelism, stage, kv_dtype, limit) for limit in (None, longest)}
    ranks = [
        _counted(model, hardware, pool, stage, extra_weights_bytes, per_token + extra_per_token, per_sequence)
        for per_token, per_sequence in counted
    ]
    return max(ranks, key=lambda rank: (rank.num_blocks, rank.kv_bytes))


def _counted(
    model: Model,
    hardware: Hardware,
    pool: Pool,
    stage: int,
    extra_weights_bytes: float,
    per_token: float,
    per_sequence: float,
) -> Memory:
    kv_cache, max_num_seqs = pool.kv_cache, pool.batching.max_num_seqs
    weights = weights_bytes(model, pool.parallelism, stage) + extra_weights_bytes
    other = other_bytes(model, pool)
    total = hardware.device.memory_bytes
    seats = max_num_seqs * per_sequence
    kv_bytes = kv_cache.memory_utilization * total - weights - other - seats
    if per_token == 0 and kv_bytes >= 0:
        # Nothing grows with the tokens: all seats hold requests of any length. They are the cache.
        blocks = 1 + max_num_seqs * -(-(pool.max_model_len or model.max_position) // kv_cache.block_size)
        kv_bytes, seats = seats, 0.0
        per_token = kv_bytes / (blocks * kv_cache.block_size)
    else:
        per_token = per_token or per_sequence / kv_cache.block_size
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
        seat_bytes=seats,
        kv_bytes_per_token=per_token,
        block_size=kv_cache.block_size,
        num_blocks=max(0, blocks - 1),
    )
