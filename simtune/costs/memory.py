"""Number of KV blocks that fit, by vLLM's accounting: utilisation x memory - weights - everything else.

Weights and KV bytes per token follow from the model and agree with published start-up logs within about 1
%. The part that vLLM measures by a dummy run is `other_bytes`: activations, the sampler, memory outside torch, and
graphs in releases that count them. Its constants are those of published logs of single releases (`RELEASES`) and stay
within 0.3 GiB of them on H100; other devices, quantised experts and many ranks are less certain. If the KV cache is
small, give `kv_cache.other_memory_gib` or `kv_cache.num_blocks` from a log of the engine itself.

Memory that a sequence needs however long it is, the states of linear attention, is reserved for max_num_seqs
sequences; SGLang reserves a share of memory, and its seats are the sequences that have states in it. A sliding window
is either counted in the same way, as a whole window for every seat, or in full for every token, whichever leaves more
tokens; engines share one pool of pages among both and do at least as well as the better of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from simtune.costs.adapters import slots_bytes
from simtune.costs.encoder_memory import encoder_memory
from simtune.costs.layers import attention_layer
from simtune.costs.sharding import check_parallelism
from simtune.errors import Infeasible
from simtune.specs.base import DTYPE_BYTES, Dtype
from simtune.specs.hardware import Hardware
from simtune.specs.model import DenseFeedForward, HyperConnections, LayerGroup, Model, MoeFeedForward
from simtune.specs.pool import Parallelism, Pool

GIB = 1 << 30

SCALE_BYTES = 4
GRAPHS_BYTES = 0.84 * GIB
"""Memory that vLLM estimates for the graphs of Llama-3.1-8B at 51 sizes; larger models and more ranks take up to 5
GiB."""
STEP_BYTES = 0.14 * GIB
"""Buffers of a step besides those that grow with tokens."""
EXPERT_COMMUNICATOR_BYTES = 0.4 * GIB
"""Communicators of groups of ranks beside those of tp: with data-parallel attention, or dividing prompts."""


class Release(NamedTuple):
    """Bytes that vLLM counts besides weights and KV cache, from a release on."""

    since: tuple[int, int]
    non_torch_bytes: float
    """Bytes of one device alone, outside torch."""
    tensor_parallel_bytes: float
    """Additional bytes outside torch if ranks reduce together, however many."""
    sampler_bytes: float
    """Bytes for each entry of the logits of max_num_seqs sequences, which no rank shares: copies, sorting,
    probabilities."""
    counts_graphs: bool


RELEASES = (
    Release((0, 0), 0.9 * GIB, 0.4 * GIB, 37, False),
    Release((0, 7), 0.13 * GIB, 1.85 * GIB, 37, False),
    Release((0, 17), 0.25 * GIB, 1.85 * GIB, 14, False),
    Release((0, 21), 0.25 * GIB, 1.85 * GIB, 14, True),
)
"""Until 0.7 all that was in use on a device counted, its CUDA context too. Sources: start-up logs of vLLM 0.19 and one
model through 0.15 to 0.18 on H100 (llm-d-planner, accuracy report), of 0.10 (logs of Qwen3-8B and Qwen3-Next), of 2023
(vllm pull request 2031); graphs count since 0.21, as that release says when it starts."""
NEWEST = (0, 24)


def release_of(version: tuple[int, int]) -> Release:
    """Return the accounting of a version of vLLM."""
    return max((release for release in RELEASES if release.since <= version), key=lambda release: release.since)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the tightest rank of an instance. All sizes in bytes."""

    total_bytes: float
    utilization: float
    weights_bytes: float
    other_bytes: float
    kv_bytes: float
    """Bytes left for the KV cache, or the size of the cache that `kv_cache.num_blocks` asks for."""
    seats: int
    """Sequences that memory is reserved for: max_num_seqs, or as many as have states (kv_cache.state_memory_ratio)."""
    seat_bytes: float
    """Bytes reserved for these sequences, whatever their lengths: states, and windows if that leaves more tokens."""
    kv_bytes_per_token: float
    block_size: int
    num_blocks: int
    """Blocks that requests can use: one less than the engine logs, since vLLM reserves one for itself."""


def stage_layers(model: Model, pp: int) -> list[list[LayerGroup]]:
    """Return the layers of each pipeline stage in order, as even as possible, the longer stages first."""
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
        """Return the bytes of a dtype: 8-bit weights have a scale for each output, except block formats; the entries of
        `DTYPE_BYTES` for 4 bits include their scales."""
        return cls(DTYPE_BYTES[dtype], SCALE_BYTES if dtype in ("fp8", "int8", "int8_wo") else 0)

    def of_product(self, n: int, k: int) -> float:
        return n * (self.values * k + self.scale)

    def of_feed_forward(self, hidden: int, width: int, tp: int, *, gated: bool) -> float:
        if not width:
            return 0.0
        inputs = 2 if gated else 1
        return self.values * (inputs + 1) * hidden * width / tp + self.scale * (inputs * width / tp + hidden)


def weights_bytes(model: Model, parallelism: Parallelism, stage: int) -> float:
    """Bytes of weights on each rank of a pipeline stage, with embeddings and head on the stages that have them.

    With expert parallelism it is the rank with the most experts.
    """
    tp, pp = parallelism.tp, parallelism.pp
    hidden = model.hidden_size
    plain, head = DTYPE_BYTES[model.dtype], DTYPE_BYTES[model.dtype_of("head")]
    total = 0.0
    of_groups: dict[int, list[float]] = {}
    for group in stage_layers(model, pp)[stage]:
        if id(group) not in of_groups:
            of_groups[id(group)] = list(_layer_bytes(model, parallelism, group))
        # Added part by part: the sum is rounded as if no layer were like another.
        for part in of_groups[id(group)]:
            total += part
    vocab = hidden * -(-model.vocab_size // tp)
    first, last = stage == 0, stage == pp - 1
    total += plain * (vocab + hidden * model.learned_positions) * first
    # a tied head is stored with the embeddings if one stage has both
    total += (head * vocab * (not (model.tie_embeddings and first)) + plain * model.norm_parameters) * last
    return total


def _layer_bytes(model: Model, parallelism: Parallelism, group: LayerGroup) -> Iterator[float]:
    """Yield the bytes of the parts of one layer on each rank: projections, norms, then the feed-forward block."""
    tp, hidden = parallelism.tp, model.hidden_size
    plain, dense = DTYPE_BYTES[model.dtype], _Weights.of(model.dtype_of("dense"))
    projections = _Weights.of(model.of_group(group).dtype_of("attention"))
    yield sum(projections.of_product(n, k) for n, k in attention_layer(model, group.attention, tp).products)
    feed_forward = group.feed_forward
    norms = group.sublayers * (model.norms_per_sublayer * model.norm_parameters + model.residual_parameters)
    yield plain * (norms + group.attention.vectors(hidden) + feed_forward.vectors(hidden) / tp)
    if isinstance(feed_forward, MoeFeedForward):
        yield routed_bytes(model, feed_forward, parallelism)
        read = feed_forward.latent_size or hidden
        if feed_forward.latent_size:
            yield dense.of_product(read, hidden) + dense.of_product(hidden, read)
        shared = feed_forward.shared_intermediate_size
        shared_weights = _Weights.of(model.dtype_of("shared"))
        yield shared_weights.of_feed_forward(hidden, shared, tp, gated=feed_forward.gated)
        # The router is not divided: every rank routes its own tokens.
        yield plain * hidden * feed_forward.experts
    elif isinstance(feed_forward, DenseFeedForward):
        yield dense.of_feed_forward(hidden, feed_forward.intermediate_size, tp, gated=feed_forward.gated)


def routed_bytes(model: Model, feed_forward: MoeFeedForward, parallelism: Parallelism) -> float:
    """Bytes of the routed experts of one layer on each rank."""
    routed = _Weights.of(model.dtype_of("experts"))
    # Experts are spread over all groups of tp ranks; each group holds everything else.
    ranks = parallelism.tp * parallelism.expert_groups
    num_experts = feed_forward.experts + (parallelism.expert_replicas or 0)
    experts = -(-num_experts // ranks) if parallelism.expert_parallel else num_experts / ranks
    width = experts * feed_forward.intermediate_size
    # Each slice of an expert has all of the last outputs.
    read = feed_forward.latent_size or model.hidden_size
    last = read * (experts if parallelism.expert_parallel else feed_forward.experts)
    inputs = 1 + feed_forward.gated
    return routed.values * (inputs + 1) * read * width + routed.scale * (inputs * width + last)


def kv_bytes_per_token(model: Model, parallelism: Parallelism, stage: int, kv_dtype: str) -> float:
    """KV bytes of one token on each rank of a stage, sliding windows counted in full."""
    return _cache(model, parallelism, stage, kv_dtype, None)[0]


def _cache(
    model: Model, parallelism: Parallelism, stage: int, kv_dtype: str, longest: int | None, held: float = 1.0
) -> tuple[float, float]:
    """(KV bytes per token, bytes per sequence besides) on each rank of a stage.

    With `longest`, the most tokens a sequence has, sliding windows are counted per sequence. `held` is the share of the
    keys and values that a policy stores.
    """
    per_token = per_sequence = 0.0
    layers: dict[int, tuple[float, float, float]] = {}
    for group in stage_layers(model, parallelism.pp)[stage]:
        if id(group) not in layers:
            layer = attention_layer(model, group.attention, parallelism.tp)
            values = layer.values_per_token * DTYPE_BYTES[kv_dtype] * held + layer.index_bytes
            in_full = longest is None or layer.window is None
            window = 0.0 if longest is None or layer.window is None else values * min(layer.window, longest)
            layers[id(group)] = values if in_full else 0.0, layer.state_bytes(model.dtype), window
        of_token, state, window = layers[id(group)]
        per_token += of_token
        per_sequence += state
        per_sequence += window
    return per_token, per_sequence


def other_bytes(model: Model, pool: Pool, *, last_stage: bool = True, version: tuple[int, int] = NEWEST) -> float:
    """Bytes per rank of activations of the largest step, sampler, graphs and communicators.

    Taken from `kv_cache.other_memory_gib` if the plan states it from a log; otherwise a formula for a version of vLLM.
    Ranks before the last pipeline stage do not sample.
    """
    if pool.kv_cache.other_memory_gib is not None:
        return pool.kv_cache.other_memory_gib * GIB
    release, parallelism = release_of(version), pool.parallelism
    outside = release.non_torch_bytes
    outside += release.tensor_parallel_bytes * (parallelism.tp > 1)
    outside += EXPERT_COMMUNICATOR_BYTES * (parallelism.expert_groups > 1)
    graphs = GRAPHS_BYTES if pool.cuda_graphs and release.counts_graphs else 0.0
    activations = _activation_bytes(model, pool, release.sampler_bytes if last_stage else 0.0)
    encoder = encoder_memory(model, pool)
    return outside + graphs + max(activations + encoder.kept, encoder.inside)


def _activation_bytes(model: Model, pool: Pool, sampler_bytes: float) -> float:
    """Peak bytes of a step of max_num_batched_tokens: in its widest feed-forward block, or in the sampler after it.

    Kernels for experts keep their workspace allocated: both products of every token and expert.
    """
    parallelism, tp = pool.parallelism, pool.parallelism.tp
    tokens = pool.batching.max_num_batched_tokens / (parallelism.context_ranks * parallelism.prompt_groups)
    per_value, hidden = DTYPE_BYTES[model.dtype], model.hidden_size
    widths = [_widths(group, hidden, pool) for group in model.layers]
    streams = model.residual.streams if isinstance(model.residual, HyperConnections) else 1
    inside = per_value * tokens * (max(width for width, _ in widths) / tp + (1 + streams) * hidden)
    samples = min(pool.batching.max_num_seqs, tokens)
    behind = sampler_bytes * samples * model.vocab_size + per_value * tokens * hidden
    workspace = per_value * tokens * max(workspace for _, workspace in widths)
    return STEP_BYTES + workspace + max(inside, behind)


def _widths(group: LayerGroup, hidden: int, pool: Pool) -> tuple[float, float]:
    """Values per token: inside a feed-forward block over all ranks, and in the workspace of experts on one."""
    feed_forward, tp, groups = group.feed_forward, pool.parallelism.tp, pool.parallelism.expert_groups
    if isinstance(feed_forward, DenseFeedForward):
        return (2 + feed_forward.gated) * feed_forward.intermediate_size, 0.0
    if not isinstance(feed_forward, MoeFeedForward):
        return 0.0, 0.0
    inputs, width = 1 + feed_forward.gated, feed_forward.intermediate_size
    expert_parallel = pool.parallelism.expert_parallel
    width = width if expert_parallel else width // (tp * groups)
    visits = feed_forward.experts_per_token * (
        1 / tp if expert_parallel else groups
        # Slices see the tokens of all groups.
    )
    workspace = visits * (max(inputs * width, feed_forward.latent_size or hidden) + width)
    return (1 + inputs) * feed_forward.shared_intermediate_size, workspace


def kv_capacity(
    model: Model,
    hardware: Hardware,
    pool: Pool,
    extra_weights_bytes: float = 0.0,
    extra_kv_bytes_per_token: float = 0.0,
    *,
    version: tuple[int, int] = NEWEST,
) -> Memory:
    """Return the memory of the tightest rank of one instance of the pool.

    `extra_weights_bytes` are on every rank besides the model, such as a draft model's, whose keys and values take
    `extra_kv_bytes_per_token` besides the model's. `version` is that of the vLLM whose accounting is used. Raises
    Infeasible if not even one block is left for requests; the message states how much is missing and what would help.
    """
    model = model.with_weights(pool.weight_dtype)
    check_parallelism(model, pool)
    last = pool.parallelism.pp - 1
    ranks = []
    attention_model = model if pool.studied.afd is None else model.without_feed_forward()
    for stage in range(pool.parallelism.pp):
        overhead_bytes = other_bytes(attention_model, pool, last_stage=stage == last, version=version)
        weights = (
            _on_device(model, pool) * weights_bytes(attention_model, pool.parallelism, stage) + extra_weights_bytes
        )
        of_slots = slots_bytes(model, pool, stage_layers(model, pool.parallelism.pp)[stage])
        weights += encoder_memory(model, pool).weights + of_slots
        ranks.append(_rank(model, hardware, pool, stage, (weights, overhead_bytes), extra_kv_bytes_per_token))
    tightest = min(ranks, key=lambda rank: rank.num_blocks)
    tightest = replace(tightest, seats=min(rank.seats for rank in ranks))
    if tightest.num_blocks < 1 or tightest.seats < 1:
        raise Infeasible(f"model {model.name} on {hardware.name}: {_shortage(pool, tightest)}")
    return tightest


def _shortage(pool: Pool, rank: Memory) -> str:
    tp, pp = pool.parallelism.tp, pool.parallelism.pp
    if pool.kv_cache.num_blocks is not None:
        return f"kv_cache.num_blocks {pool.kv_cache.num_blocks} leaves none for requests; give at least 2"
    # one block is the engine's own, so that requests need a second one
    missing_bytes = 2 * rank.block_size * rank.kv_bytes_per_token - rank.kv_bytes
    seats = f", {rank.seats} seats {rank.seat_bytes / GIB:.2f} GiB" if rank.seat_bytes else ""
    share = "" if pool.kv_cache.memory_utilization_of == "free" else f"{rank.utilization:.2f} x "
    return (
        f"with tp {tp} pp {pp} {missing_bytes / GIB:.2f} GiB per device are missing: weights take "
        f"{rank.weights_bytes / GIB:.2f} GiB{seats} and everything else {rank.other_bytes / GIB:.2f} GiB "
        f"of {share}{rank.total_bytes / GIB:.2f} GiB; more tp or pp, fp8 weights, a higher "
        "kv_cache.memory_utilization or a smaller batching.max_num_batched_tokens would help"
    )


def _rank(
    model: Model, hardware: Hardware, pool: Pool, stage: int, taken: tuple[float, float], extra_per_token: float
) -> Memory:
    """Return one rank of a stage whose weights and other memory are `taken`; windows are counted the better way."""
    longest = pool.max_model_len or model.max_position
    kv_dtype = pool.kv_cache.dtype or model.kv_dtype or model.dtype
    stored_share = 1.0 if pool.studied.kv_policy is None else pool.studied.kv_policy.held(kv_dtype)
    # each rank stores its share of every sequence
    stored_share /= pool.parallelism.context_ranks * pool.parallelism.decode_ranks
    at_host = 0.0 if pool.studied.offload is None else pool.studied.offload.kv_cache
    stored_share *= 1 - at_host
    counted = {_cache(model, pool.parallelism, stage, kv_dtype, limit, stored_share) for limit in (None, longest)}
    # the smaller counts states alone; the difference to the larger are windows
    states = min(per_sequence for _, per_sequence in counted)
    ranks = [
        _counted(hardware, pool, longest, taken, per_token + extra_per_token, (states, per_sequence - states))
        for per_token, per_sequence in counted
    ]
    rank = max(ranks, key=lambda rank: (rank.num_blocks, rank.kv_bytes))
    return _within_host(rank, pool, at_host) if at_host else rank


def _on_device(model: Model, pool: Pool) -> float:
    """Share of the weights' bytes on a device, with room for two layers of those that the host sends."""
    if pool.studied.offload is None:
        return 1.0
    sent = pool.studied.offload.weights * (1 - pool.studied.offload.computed)
    return min(1.0, 1 - pool.studied.offload.weights + 2 * sent / model.num_layers)


def _within_host(rank: Memory, pool: Pool, at_host: float) -> Memory:
    """Limit the blocks to those that the host has memory for; all ranks store their part of a block there."""
    assert pool.studied.offload is not None
    assert pool.studied.offload.memory_gib is not None
    ranks = pool.parallelism.devices // pool.parallelism.pp
    block_bytes = ranks * rank.block_size * rank.kv_bytes_per_token * at_host / (1 - at_host)
    return replace(rank, num_blocks=min(rank.num_blocks, int(pool.studied.offload.memory_gib * GIB // block_bytes)))


def _counted(
    hardware: Hardware,
    pool: Pool,
    longest: int,
    taken: tuple[float, float],
    per_token: float,
    per_sequence: tuple[float, float],
) -> Memory:
    """Return the memory of a rank; `per_sequence` are the bytes of a sequence's states, and of its windows."""
    kv_cache = pool.kv_cache
    weights, overhead_bytes = taken
    total, share = hardware.device.memory_bytes, kv_cache.memory_utilization
    # TensorRT-LLM takes its share of what weights and all else leave; vLLM and SGLang pay these out of their share.
    if kv_cache.memory_utilization_of == "free":
        available = share * (total - weights - overhead_bytes)
    else:
        available = share * total - weights - overhead_bytes
    num_seats, seats = _seats(pool, available, *per_sequence)
    # Of a process with two pools each has a part of the cache beside weights that are there once.
    of_cache = None if pool.share is None else pool.share.kv_cache
    kv_bytes = (available - seats) * (of_cache or 1.0)
    if per_token == 0 and kv_bytes >= 0:
        # Nothing grows with the tokens: all seats accept requests of any length. The seats are the cache.
        blocks = 1 + num_seats * -(-longest // kv_cache.block_size)
        kv_bytes, seats = seats, 0.0
        per_token = kv_bytes / (blocks * kv_cache.block_size)
    else:
        per_token = per_token or sum(per_sequence) / kv_cache.block_size
        blocks = int(kv_bytes // (kv_cache.block_size * per_token))
    # The count of an engine's own log is better than any accounting.
    if kv_cache.num_blocks is not None:
        blocks = kv_cache.num_blocks
        kv_bytes = blocks * kv_cache.block_size * per_token
    return Memory(
        total_bytes=total,
        utilization=kv_cache.memory_utilization,
        weights_bytes=weights,
        other_bytes=overhead_bytes,
        kv_bytes=kv_bytes,
        seats=num_seats,
        seat_bytes=seats,
        kv_bytes_per_token=per_token,
        block_size=kv_cache.block_size,
        # vLLM reserves one block for itself
        num_blocks=max(0, blocks - 1),
    )


def _seats(pool: Pool, held: float, state: float, windows: float) -> tuple[int, float]:
    """Return the sequences that have memory for their states and windows, and the bytes reserved for them.

    With a `state_memory_ratio` r, r / (1 + r) of what is `held` for states, keys and values is cut into states (SGLang:
    `_handle_max_mamba_cache` and `resolve_max_num_reqs` of python/sglang/srt/mem_cache/kv_cache_configurator.py).
    """
    most, ratio = pool.batching.max_num_seqs, pool.kv_cache.state_memory_ratio
    if ratio is None or not state:
        return most, most * (state + windows)
    states = max(0, int(held * ratio / (1 + ratio) // state))
    seats = min(most, states // (pool.kv_cache.states_per_seat or 1))
    return seats, states * state + seats * windows
