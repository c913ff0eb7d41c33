"""From operators to one engine step of a model on a hardware profile.

A step with B decodes and some prefill chunks runs every matrix product once over all its m tokens, decode
attention once over all decodes, prefill attention once per chunk, and the head over the rows that get a
token:

    T_gpu = linear(m) + decode(B, C / B) + sum of prefill(past + tokens) - prefill(past) + overhead +
    head(samples)

summed over all layers and all pipeline stages. The tables were measured under CUDA graphs, so no launch
cost is added, and token counts up to 512 are padded to the sizes for which vLLM captures graphs.
Asynchronous engines hide the host: T = max(T_gpu, T_host); others add it. With pipeline parallelism T_gpu
is the latency of one step through all stages and the sends between them.

Known leanings. To the slow side: a sliding window over sequences of unequal length is taken at their mean
length. To the fast side: quantising activations is taken as fused into the norms, logits are computed for
sampled rows only, and a pipeline stage that is longer than the others does not hold them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simtune.costs.operators import Array
from simtune.costs.predict import Predictor, Profile
from simtune.errors import Infeasible
from simtune.specs.base import DTYPE_BYTES
from simtune.specs.hardware import Hardware, Link
from simtune.specs.model import DenseFeedForward, LayerGroup, Model, MoeFeedForward, SlidingAttention
from simtune.specs.plan import Parallelism, Pool

CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Token counts for which vLLM captures CUDA graphs; a smaller step runs as the next larger one."""

SAMPLING_S = 30e-6
SAMPLING_PASSES = 4
"""Sampling is assumed, not measured: 30 us of small kernels, and four passes over the logits in fp32 at
data-sheet bandwidth (cast, temperature, softmax, draw). The study gives 20-40 us plus an unknown number of
passes."""

KINDS = (
    "gemm",
    "moe",
    "decode_attention",
    "prefill_attention",
    "elementwise",
    "all_reduce",
    "send",
    "head",
    "sampling",
)
"""The parts of a step's GPU time, as `StepModel.breakdown` names them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step works on.

    `context_tokens` and `num_samples` are those of `simtune.costs.protocol.StepCosts`; a chunk is (past,
    new tokens).
    """

    num_decodes: int = 0
    context_tokens: int = 0
    chunks: Sequence[tuple[int, int]] = ()
    num_samples: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(tokens for _, tokens in self.chunks)

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + len(self.chunks)


class AttentionShape(NamedTuple):
    """Attention of one layer on one tensor-parallel rank; window None is full attention."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None


class _Part(NamedTuple):
    """A call made `times` times per step: its kind, and its seconds for given numbers of rows."""

    kind: str
    times: int
    seconds: Callable[[Array], Array]


def check_parallelism(model: Model, parallelism: Parallelism) -> None:
    """Raises Infeasible where vLLM would refuse to shard this model this way."""
    tp, pp = parallelism.tp, parallelism.pp
    where = f"model {model.name} with tp {tp}"
    if pp > model.num_layers:
        raise Infeasible(f"model {model.name}: pp {pp} exceeds its {model.num_layers} layers")
    for group in model.layers:
        heads, kv_heads = group.attention.heads, group.attention.kv_heads
        if heads % tp:
            raise Infeasible(f"{where}: tp must divide the {heads} attention heads")
        if max(kv_heads, tp) % min(kv_heads, tp):
            raise Infeasible(f"{where}: tp must divide the {kv_heads} KV heads or be a multiple of their number")
        for width in _widths(group):
            if width % tp:
                raise Infeasible(f"{where}: tp must divide the feed-forward width {width}")


def _widths(group: LayerGroup) -> list[int]:
    feed_forward = group.feed_forward
    widths = [feed_forward.intermediate_size]
    if isinstance(feed_forward, MoeFeedForward) and feed_forward.shared_intermediate_size:
        widths.append(feed_forward.shared_intermediate_size)
    return widths


def attention_shape(group: LayerGroup, tp: int) -> AttentionShape:
    """What one rank computes; KV heads are repeated where there are fewer of them than ranks."""
    a = group.attention
    window = a.window if isinstance(a, SlidingAttention) else None
    return AttentionShape(a.heads // tp, max(1, a.kv_heads // tp), a.head_dim, window)


def padded_tokens(tokens: Array) -> Array:
    """Token counts as a CUDA graph runs them: the next capture size up to 512, unchanged above."""
    sizes = np.array(CAPTURE_SIZES, dtype=np.float64)
    at = np.searchsorted(sizes, tokens)
    return np.where(at < len(sizes), sizes[np.minimum(at, len(sizes) - 1)], tokens)


class StepModel:
    """GPU and host time of the steps of one model on the devices of one pool.

    Raises Infeasible when the model cannot be sharded as the pool asks, or the profile lacks an operator or
    link.
    """

    def __init__(self, model: Model, hardware: Hardware, pool: Pool) -> None:
        check_parallelism(model, pool.parallelism)
        if pool.parallelism.tp > hardware.device.devices_per_node:
            raise Infeasible(
                f"tp {pool.parallelism.tp} on {hardware.name}: a node has {hardware.device.devices_per_node} "
                "devices, and all-reduce was measured inside one node only; use a smaller tp and more pp"
            )
        self._model, self._hardware, self._pool = model, hardware, pool
        self._tp = pool.parallelism.tp
        self._profile = Profile(hardware)
        self._row_bytes = model.hidden_size * DTYPE_BYTES[model.dtype]
        self._linear = self._linear_parts()
        self._head = self._head_parts()

        kv_dtype = pool.kv_cache.dtype or model.dtype
        self._decode = self._profile.predictor("decode_attention", model.dtype, kv_dtype=kv_dtype)
        self._prefill = self._profile.predictor("prefill_attention", model.dtype, kv_dtype=kv_dtype)
        self.attention: dict[AttentionShape, int] = {}
        """Distinct attention shapes of one rank, with their numbers of layers."""
        for group in model.layers:
            shape = attention_shape(group, self._tp)
            self.attention[shape] = self.attention.get(shape, 0) + group.count
        self.prefill_overhead_s = model.num_layers * self._prefill.overhead_s
        """What each prefill chunk costs besides its share of `prefill`."""

    def linear(self, num_tokens: Array) -> dict[str, Array]:
        """Seconds per kind of all calls that depend on the number of tokens in the step only."""
        return _by_kind(self._linear, padded_tokens(np.asarray(num_tokens, dtype=np.float64)))

    def head(self, num_samples: Array) -> dict[str, Array]:
        """Seconds of the language-model head and of sampling, for at least one row each."""
        return _by_kind(self._head, np.asarray(num_samples, dtype=np.float64))

    def decode(self, num_decodes: int, mean_context: Array) -> Array:
        """Seconds of decode attention in all layers.

        The mean is enough for sequences of unequal length: kernels split the KV evenly over processors, and
        under the base form the batch at its mean never takes less than its longest sequence alone.
        """
        context = np.asarray(mean_context, dtype=np.float64)
        total = np.zeros_like(context)
        for shape, layers in self.attention.items():
            total += layers * self._decode.seconds(
                batch=num_decodes,
                context=context,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                window=context if shape.window is None else shape.window,
            )
        return total

    def prefill(self, num_tokens: Array) -> Array:
        """Seconds of causal attention over prompts of these lengths in all layers, less `prefill_overhead_s`.

        A chunk of t tokens after p cached ones takes prefill(p + t) - prefill(p) + prefill_overhead_s.
        """
        tokens = np.asarray(num_tokens, dtype=np.float64)
        total = np.zeros_like(tokens)
        for shape, layers in self.attention.items():
            seconds = self._prefill.seconds(
                batch=1,
                tokens=tokens,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                window=tokens if shape.window is None else shape.window,
            )
            total += layers * (seconds - self._prefill.overhead_s)
        return total

    def host_s(self, num_seqs: int) -> float:
        """Seconds the engine's host side needs for a step with this many sequences."""
        host = self._hardware.host
        return host.step_s + host.per_sequence_s * num_seqs

    def breakdown(self, batch: Batch) -> dict[str, float]:
        """GPU seconds of one step by kind (`KINDS`); kinds without work are left out."""
        parts: dict[str, float] = {}
        for kind, seconds in self.linear(np.array([batch.num_tokens])).items():
            parts[kind] = float(seconds[0])
        if batch.num_samples:
            for kind, seconds in self.head(np.array([batch.num_samples])).items():
                parts[kind] = float(seconds[0])
        if batch.num_decodes:
            mean = np.array([batch.context_tokens / batch.num_decodes])
            parts["decode_attention"] = float(self.decode(batch.num_decodes, mean)[0])
        if batch.chunks:
            past, new = np.array(batch.chunks, dtype=np.float64).T
            seconds = self.prefill(past + new) - self.prefill(past) + self.prefill_overhead_s
            parts["prefill_attention"] = float(seconds.sum())
        return {kind: parts[kind] for kind in KINDS if kind in parts}

    def seconds(self, batch: Batch) -> float:
        """Seconds of one step, host included."""
        gpu, host = sum(self.breakdown(batch).values()), self.host_s(batch.num_seqs)
        return max(gpu, host) if self._pool.async_scheduling else gpu + host

    def _linear_parts(self) -> list[_Part]:
        model, tp = self._model, self._tp
        parts: list[_Part] = []
        for group in model.layers:
            parts += self._attention_parts(group) + self._feed_forward_parts(group)
            parts.append(self._elementwise("norm", 2 * group.count, 4 * model.hidden_size))  # with the residual added
            if tp > 1:
                parts.append(self._all_reduce(2 * group.count))
        parts.append(self._elementwise("add", 1, 2 * model.hidden_size))  # embedding: one row read, one written
        parts.append(self._elementwise("norm", 1, 4 * model.hidden_size))
        if tp > 1:
            parts.append(self._all_reduce(1))  # the embedding is split over the vocabulary
        parts += self._send_parts()
        return parts

    def _attention_parts(self, group: LayerGroup) -> list[_Part]:
        hidden, layers, shape = self._model.hidden_size, group.count, attention_shape(group, self._tp)
        qk = (shape.heads + shape.kv_heads) * shape.head_dim
        qkv = qk + shape.kv_heads * shape.head_dim
        return [
            self._gemm(layers, qkv, hidden),
            self._gemm(layers, hidden, shape.heads * shape.head_dim),
            self._elementwise("rope", layers, 2 * qk),
        ]

    def _feed_forward_parts(self, group: LayerGroup) -> list[_Part]:
        feed_forward, layers = group.feed_forward, group.count
        if isinstance(feed_forward, DenseFeedForward):
            return self._dense_parts(layers, feed_forward.intermediate_size, feed_forward.gated)
        parts = [self._gemm(layers, feed_forward.experts, self._model.hidden_size, self._model.dtype)]
        if feed_forward.shared_intermediate_size:
            parts += self._dense_parts(layers, feed_forward.shared_intermediate_size, True)
        moe = self._profile.predictor("moe", self._model.weight_dtype)
        fixed = {
            "hidden": self._model.hidden_size,
            "intermediate": feed_forward.intermediate_size // self._tp,
            "experts_per_token": feed_forward.experts_per_token,
            "experts": feed_forward.experts,
            "ep": 1,
        }
        return [*parts, _Part("moe", layers, lambda m: moe.seconds(tokens=m, **fixed))]

    def _dense_parts(self, layers: int, intermediate: int, gated: bool) -> list[_Part]:
        hidden, width, factor = self._model.hidden_size, intermediate // self._tp, 2 if gated else 1
        return [
            self._gemm(layers, factor * width, hidden),
            self._elementwise("activation", layers, (factor + 1) * width),
            self._gemm(layers, hidden, width),
        ]

    def _send_parts(self) -> list[_Part]:
        parallelism = self._pool.parallelism
        across = -(-parallelism.devices // self._hardware.device.devices_per_node) - 1
        parts = []
        for name, times in (("intra_node", parallelism.pp - 1 - across), ("inter_node", across)):
            if times > 0:
                link = self._link(name)
                parts.append(_Part("send", times, self._transfer(link, self._row_bytes)))
        return parts

    def _head_parts(self) -> list[_Part]:
        model, tp = self._model, self._tp
        vocab = -(-model.vocab_size // tp)
        gemm = self._gemm(1, vocab, model.hidden_size, model.dtype)
        parts = [_Part("head", 1, gemm.seconds)]
        if tp > 1:
            gathered = vocab * (tp - 1) * DTYPE_BYTES[model.dtype]
            parts.append(_Part("head", 1, self._transfer(self._link("intra_node"), gathered)))
        pass_s = model.vocab_size * DTYPE_BYTES["fp32"] / self._hardware.device.memory_bytes_per_s
        parts.append(_Part("sampling", 1, lambda n: SAMPLING_S + SAMPLING_PASSES * pass_s * n))
        return parts

    def _gemm(self, times: int, n: int, k: int, dtype: str | None = None) -> _Part:
        gemm = self._profile.predictor("gemm", dtype or self._model.weight_dtype)
        return _Part("gemm", times, lambda m: gemm.seconds(m=m, n=n, k=k))

    def _elementwise(self, variant: str, times: int, width: int) -> _Part:
        operator = self._profile.predictor("elementwise", self._model.dtype, variant=variant)
        return _Part("elementwise", times, lambda m: operator.seconds(rows=m, width=width))

    def _all_reduce(self, times: int) -> _Part:
        all_reduce: Predictor = self._profile.predictor("all_reduce", self._model.dtype)
        return _Part("all_reduce", times, lambda m: all_reduce.seconds(devices=self._tp, bytes=m * self._row_bytes))

    def _transfer(self, link: Link, bytes_per_row: float) -> Callable[[Array], Array]:
        return lambda rows: link.latency_s + rows * (bytes_per_row / link.bytes_per_s)

    def _link(self, name: str) -> Link:
        link = self._hardware.links.get(name)
        if link is None:
            raise Infeasible(
                f"hardware {self._hardware.name}: it has no link {name}, which tp {self._tp} pp "
                f"{self._pool.parallelism.pp} needs; add links.{name} to its profile"
            )
        return link


def _by_kind(parts: Sequence[_Part], rows: Array) -> dict[str, Array]:
    seconds: dict[str, Array] = {}
    for part in parts:
        seconds[part.kind] = seconds.get(part.kind, 0.0) + part.times * part.seconds(rows)
    return seconds
