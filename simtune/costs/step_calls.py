"""Calls of one engine step: products, small operations, collectives, and how communication hides behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from simtune.arrays import Array, Mask
from simtune.costs.experts import Experts, SharingLayers
from simtune.costs.layers import AttentionCosts, AttentionLayer, attention_layer
from simtune.costs.operators import operator_key
from simtune.costs.over_nodes import RankCollective
from simtune.costs.predict import Predictor, Profile
from simtune.specs.base import ACTIVATION_BYTES, DTYPE_BYTES, Dtype
from simtune.specs.hardware import Hardware, OperatorKind
from simtune.specs.model import (
    DenseFeedForward,
    FeedForward,
    HyperConnections,
    LayerGroup,
    Model,
    MoeFeedForward,
    NoFeedForward,
)
from simtune.specs.pool import Overlap, OverlapThresholds, Pool

COMMUNICATION = frozenset({"all_reduce", "send", "all_to_all", "moe_dispatch", "moe_combine"})
"""Kinds that occupy links and not processors."""

Behind = Literal["norm", "activation", "attention"]
"""The operation that produces the inputs of a product."""


class EqualLayers(NamedTuple):
    """Equal layers, on one rank."""

    attention: AttentionLayer
    feed_forward: FeedForward
    number: int
    projections: Dtype
    """Number format of the attention's products."""


class StepCall(NamedTuple):
    """A call made `times` times per step: its kind, and its seconds for given numbers of rows."""

    kind: str
    times: int
    seconds: Callable[[Array], Array]


def equal_layers(model: Model, tp: int) -> list[EqualLayers]:
    """Return the layers of a model on one of tp ranks, equal ones together."""
    equal: dict[LayerGroup, int] = {}
    for group in model.layers:
        kind = group.model_copy(update={"count": 1})
        equal[kind] = equal.get(kind, 0) + group.count
    layers = [(model.of_group(group), group, count) for group, count in equal.items()]
    return [
        EqualLayers(
            attention_layer(group_model, group.attention, tp),
            group.feed_forward,
            count,
            group_model.dtype_of("attention"),
        )
        for group_model, group, count in layers
    ]


_HYPER: tuple[OperatorKind, OperatorKind] = ("hyper_pre", "hyper_post")
_MIXED_IN = "bf16"
"""Format of residual streams."""


def _mixed_s(operator: Predictor, shape: Mapping[str, int], tokens: Array) -> Array:
    return operator.seconds(tokens=tokens, **shape)


EXCHANGE = frozenset({"all_to_all", "moe_dispatch", "moe_combine"})
"""Kinds in which ranks exchange tokens with the experts of others."""


def hidden_kinds(overlap: Overlap) -> frozenset[str]:
    """Kinds of communication that hide: two batches take turns about the exchange with experts only."""
    return EXCHANGE if overlap == "two_batches" else COMMUNICATION


def overlapped(overlap: Overlap, tokens: Array, prompts: bool, thresholds: OverlapThresholds) -> Mask:
    """True for steps of `tokens` tokens in which communication hides, with `prompts` or of decodes alone; two batches
    from the thresholds on (`check_ubatch_thresholds` in vllm/v1/worker/ubatch_utils.py)."""
    if overlap == "two_batches":
        enough: Mask = tokens >= (thresholds.prefill_tokens if prompts else thresholds.decode_tokens)
        return enough
    return np.full(tokens.shape, prompts or overlap == "ladder")


def exposed(
    by_kind: Mapping[str, Array], room: Array | float = 0.0, hidden: Set[str] = COMMUNICATION
) -> tuple[dict[str, Array], Array]:
    """Return seconds by kind if the `hidden` kinds of communication hide behind computation, and the unused
    computation.

    T = max(computation + room, communication) - room: the kinds that hide keep the part that nothing hides.
    """
    total: Array = np.sum([seconds for kind, seconds in by_kind.items() if kind not in COMMUNICATION], axis=0) + room
    busy: Array = np.sum([seconds for kind, seconds in by_kind.items() if kind in hidden], axis=0) + 0.0 * total
    exposed_share = np.divide(np.maximum(busy - total, 0.0), busy, out=np.zeros_like(total), where=busy > 0)
    spare_s = np.maximum(total - busy, 0.0)
    return {kind: seconds * exposed_share if kind in hidden else seconds for kind, seconds in by_kind.items()}, spare_s


def with_shared(by_kind: Mapping[str, Array], shared: Mapping[str, Array], hides_s: Array) -> dict[str, Array]:
    """Return seconds by kind with those of shared experts added, as far as they exceed the seconds of routed experts
    beside which they run."""
    total: Array = np.sum(list(shared.values()), axis=0)
    exposed_share = np.maximum(0.0, total - hides_s) / total
    return {kind: by_kind.get(kind, 0.0) + exposed_share * shared.get(kind, 0.0) for kind in {**by_kind, **shared}}


def in_halves(overlap: Overlap, seconds: Callable[[Array], dict[str, Array]], tokens: Array) -> dict[str, Array]:
    """Seconds by kind of a step whose tokens are processed in two halves, unless nothing is split (ladder)."""
    if overlap == "ladder":
        return seconds(tokens)
    return {kind: 2 * half for kind, half in seconds(np.maximum(1.0, tokens / 2)).items()}


_FUSED_MIB: dict[str, dict[int, float]] = {"sm_90": {2: 64, 4: 2, 8: 0.5}, "sm_100": {2: 64, 4: 32, 8: 1}}
"""MiB up to which an all-reduce of a number of ranks includes the norm after it (vLLM 0.16,
allreduce_rms_fusion.py)."""


def fused_bytes(architecture: str | None, ranks: int) -> float:
    """Bytes up to which an all-reduce includes the norm after it; 0 if no kernel does."""
    sizes = _FUSED_MIB.get("sm_100" if architecture == "sm_103" else architecture or "", {})
    return sizes.get(ranks, 0.0) * (1 << 20)


class StepCalls:
    """The calls of the steps of one model on the devices of one pool."""

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        pool: Pool,
        profile: Profile,
        layers: Sequence[EqualLayers],
        attention: Sequence[tuple[int, AttentionCosts]],
    ) -> None:
        self._model, self._hardware, self._pool = model, hardware, pool
        self._profile, self._layers, self._attention = profile, layers, attention
        self._tp = pool.parallelism.tp
        self._row_bytes = model.hidden_size * DTYPE_BYTES[model.dtype]
        self._kv_dtype = pool.kv_cache.dtype or model.kv_dtype or model.dtype
        self._fused_tokens = 0.0
        if "norm" in pool.fused and self._tp > 1:
            self._fused_tokens = fused_bytes(hardware.device.architecture, self._tp) / self._row_bytes

    def linear(self, *, shared: bool = True) -> list[StepCall]:
        """Return the calls by the tokens of a step, without routed experts, and without shared ones if asked to."""
        model, tp = self._model, self._tp
        parts: list[StepCall] = []
        for layers, (_, costs) in zip(self._layers, self._attention, strict=True):
            attention, feed_forward, count, dtype = layers
            parts += self._attention_parts(attention, count, costs, dtype)
            parts += self._feed_forward_parts(feed_forward, count)
            if shared:
                parts += self._shared_parts(feed_forward, count)
            sublayers = count * (bool(attention.products) + (feed_forward.kind != "none"))
            norms = model.norms_per_sublayer * sublayers
            # with the fused kernel the norm after each sublayer's all-reduce is a call apart, see below
            separate = norms - sublayers if self._fused_tokens else norms
            # 4 widths: the norm adds the residual, so it reads and writes two tensors
            parts.append(self._elementwise("norm", separate, 4 * model.hidden_size))
            if self._fused_tokens:
                parts.append(self._unless_fused(self._elementwise("norm", sublayers, 4 * model.hidden_size)))
            parts += self._residual_parts(sublayers)
            if tp > 1:
                parts.append(self._all_reduce(sublayers))
            if attention.norm_sums:
                parts.append(self._all_reduce(count, attention.norm_sums * DTYPE_BYTES["fp32"]))
        parts.append(self._embedding())
        parts.append(self._elementwise("norm", 1, 4 * model.hidden_size))
        if tp > 1:
            # the embedding is split over the vocabulary
            parts.append(self._all_reduce(1))
        parts += self._send_parts()
        runtime = self._pool.studied.runtime
        if runtime is not None:
            floor_s = runtime.kernels_per_layer * model.num_layers * runtime.kernel_floor_s
            parts.append(StepCall("elementwise", 1, lambda m: np.full_like(m, floor_s)))
        return parts

    def _attention_parts(
        self, layer: AttentionLayer, layers: int, costs: AttentionCosts, dtype: Dtype
    ) -> list[StepCall]:
        """Return the calls besides the attention of a layer, less those that its times include."""
        elsewhere = costs.includes | (set(self._pool.fused) & {"rope"})
        small = [(variant, width) for variant, width in layer.small if variant not in elsewhere]
        parts = [self._elementwise(variant, layers, width) for variant, width in small]
        if layer.written_width and self._is_measured("kv_write"):
            parts.append(self._elementwise("kv_write", layers, layer.written_width))
        if costs.products is not None:
            return [*parts, StepCall("gemm", layers, costs.products)]
        if not layer.products:
            return parts
        *into, out = layer.products
        parts = [*(self._gemm(layers, n, k, dtype) for n, k in into), *parts]
        parts.append(self._gemm(layers, *out, dtype, behind="attention"))
        if dtype in ACTIVATION_BYTES and not self._quantises(dtype) and "attention" not in self._pool.fused:
            parts.append(self._quantised_apart(self._quantising(dtype), layers, layer.output_width))
        if layer.query_width and self._pool.quantising != "fused" and self._kv_dtype in ACTIVATION_BYTES:
            parts.append(self._quantised_apart(self._quantise("fp8", "static"), layers, layer.query_width))
        return parts

    def _quantised_apart(self, quantise: Predictor, times: int, width: int) -> StepCall:
        return StepCall("elementwise", times, lambda m: quantise.seconds(m=m, k=width))

    def _residual_parts(self, sublayers: int) -> list[StepCall]:
        """Return the calls by which sublayers are joined, if not by the sum that their norms add."""
        residual, hidden = self._model.residual, self._model.hidden_size
        if residual is None:
            return []
        streams = residual.streams if isinstance(residual, HyperConnections) else 1
        if streams > 1 and all(self._profile.measured(kind, _MIXED_IN, _MIXED_IN) for kind in _HYPER):
            mixing = [self._profile.predictor(kind, _MIXED_IN) for kind in _HYPER]
            shape = {"streams": streams, "hidden": hidden}
            return [StepCall("elementwise", sublayers, partial(_mixed_s, operator, shape)) for operator in mixing]
        weighing = self._gemm(sublayers, residual.weights, streams * hidden, self._model.dtype)
        return [weighing, self._elementwise("residual", sublayers, residual.values(hidden))]

    def _feed_forward_parts(self, feed_forward: FeedForward, layers: int) -> list[StepCall]:
        if isinstance(feed_forward, DenseFeedForward):
            return self._dense_parts(layers, feed_forward.intermediate_size, feed_forward.gated)
        if isinstance(feed_forward, NoFeedForward):
            return []
        hidden, latent = self._model.hidden_size, feed_forward.latent_size
        parts = [self._gemm(layers, feed_forward.experts, hidden, self._model.dtype)]
        if latent:
            # every rank has both products whole
            parts += [self._gemm(layers, latent, hidden), self._gemm(layers, hidden, latent)]
        return parts

    def _shared_parts(self, feed_forward: FeedForward, layers: int) -> list[StepCall]:
        if not isinstance(feed_forward, MoeFeedForward) or not feed_forward.shared_intermediate_size:
            return []
        shared, dtype = feed_forward.shared_intermediate_size, self._model.dtype_of("shared")
        return self._dense_parts(layers, shared, feed_forward.gated, dtype)

    def shared(self) -> list[StepCall]:
        """Return the calls of shared experts, which are among the linear ones unless those are asked for without."""
        return [part for layers in self._layers for part in self._shared_parts(layers.feed_forward, layers.number)]

    def routed(self) -> list[StepCall]:
        """Return routed experts, and the exchange of tokens with them."""
        return [
            StepCall(kind, layers.number, seconds)
            for layers in self._layers
            if isinstance(layers.feed_forward, MoeFeedForward)
            for kind, seconds in Experts(self._model, layers.feed_forward, self._profile, self._pool).parts()
        ]

    def sharing(self, factor: float) -> SharingLayers | None:
        """Return the layers in which tokens of a sequence share experts; None if there are none, or communication hides
        behind them."""
        layers = [
            (factor * layers.number, Experts(self._model, layers.feed_forward, self._profile, self._pool))
            for layers in self._layers
            if isinstance(layers.feed_forward, MoeFeedForward) and layers.feed_forward.neighbour_reuse
        ]
        return SharingLayers(layers) if layers and self._pool.overlap is None else None

    def _dense_parts(self, layers: int, intermediate: int, gated: bool, dtype: Dtype | None = None) -> list[StepCall]:
        hidden, width, factor = self._model.hidden_size, intermediate // self._tp, 2 if gated else 1
        return [
            self._gemm(layers, factor * width, hidden, dtype),
            self._elementwise("activation", layers, (factor + 1) * width),
            self._gemm(layers, hidden, width, dtype, behind="activation"),
        ]

    def _send_parts(self) -> list[StepCall]:
        parallelism, dtype = self._pool.parallelism, self._model.dtype
        nodes = -(-parallelism.tp * parallelism.pp // self._hardware.device.devices_per_node)
        across = min(nodes, parallelism.pp) - 1
        parts = []
        for link, times in ((None, parallelism.pp - 1 - across), ("inter_node", across)):
            if times > 0:
                send = self._profile.predictor("send_recv", dtype, variant=link)
                parts.append(StepCall("send", times, partial(self._send, send)))
        return parts

    def _send(self, send: Predictor, rows: Array) -> Array:
        return send.seconds(bytes=rows * self._row_bytes)

    def head(self) -> list[StepCall]:
        """Return the calls by the sampled rows."""
        model, tp = self._model, self._tp
        vocab = -(-model.vocab_size // tp)
        gemm = self._gemm(1, vocab, model.hidden_size, model.dtype_of("head"))
        parts = [StepCall("head", 1, gemm.seconds)]
        if tp > 1:
            gather = RankCollective(self._profile, "all_gather", model.dtype, tp)
            row_bytes = vocab * tp * DTYPE_BYTES[model.dtype]
            parts.append(StepCall("head", 1, lambda n: gather.seconds(n * row_bytes)))
        sampling = self._profile.predictor("sampling", "fp32")
        parts.append(StepCall("sampling", 1, lambda n: sampling.seconds(rows=n, vocab=model.vocab_size)))
        return parts

    def _gemm(self, times: int, n: int, k: int, dtype: str | None = None, *, behind: Behind = "norm") -> StepCall:
        """Return a product, with quantising its inputs if it needs quantised ones and the operation before does not."""
        dtype = dtype or self._model.weight_dtype
        gemm = self._profile.predictor("gemm", dtype)
        timed = self._quantises(dtype)
        apart = self._pool.quantising == "apart" and behind != "attention" and dtype in ACTIVATION_BYTES
        if not timed and not apart:
            return StepCall("gemm", times, lambda m: gemm.seconds(m=m, n=n, k=k))
        quantise = self._quantising(dtype)

        def seconds(m: Array) -> Array:
            full_s, quantising_s = gemm.seconds(m=m, n=n, k=k), quantise.seconds(m=m, k=k)
            # if the product was timed with quantising, that is subtracted, at most half of the total
            without, with_it = (
                (np.maximum(full_s - quantising_s, full_s / 2), full_s) if timed else (full_s, full_s + quantising_s)
            )
            return np.where(self._quantised(m, behind), without, with_it)

        return StepCall("gemm", times, seconds)

    def _quantised(self, tokens: Array, behind: Behind) -> Mask | bool:
        """True if the operation before a product quantises its inputs, in steps of `tokens` tokens."""
        if behind == "attention":
            return "attention" in self._pool.fused
        if self._pool.quantising != "apart":
            return True
        return tokens <= self._fused_tokens if behind == "norm" else False

    def _quantising(self, dtype: str) -> Predictor:
        """Return the predictor of quantising to a format, by known scales if its products were timed with them."""
        known_scales = self._profile.predictor("gemm", dtype).operator.scales == "known"
        return self._quantise(dtype, "static" if known_scales else None)

    def _quantise(self, dtype: str, variant: str | None) -> Predictor:
        """Return the predictor of quantising to a format, or to fp8 if only that was measured: both read the same
        inputs.

        The scales are computed if no other variant was measured.
        """
        measured = self._profile.hardware.operators
        ways = [(to, how) for how in dict.fromkeys((variant, None)) for to in (dtype, "fp8")]
        measured_ways = (way for way in ways if operator_key("quantise", way[0], variant=way[1]) in measured)
        to, how = next(measured_ways, (dtype, None))
        return self._profile.predictor("quantise", to, variant=how)

    def _quantises(self, dtype: str) -> bool:
        """True if products of a format were timed including the quantising of their inputs."""
        return self._profile.predictor("gemm", dtype).operator.base.ahead_s > 0

    def _is_measured(self, variant: str) -> bool:
        """True if the profile has times of a small operation, which kernel tables of engines include elsewhere."""
        return self._profile.measured("elementwise", self._model.dtype, self._model.dtype, variant)

    def _embedding(self) -> StepCall:
        """Return the lookup of embeddings (one row is read, two written) and angles; a row read and one written where
        no profile has it."""
        if self._is_measured("embedding"):
            return self._elementwise("embedding", 1, 3 * self._model.hidden_size)
        return self._elementwise("add", 1, 2 * self._model.hidden_size)

    def _elementwise(self, variant: str, times: int, width: int) -> StepCall:
        operator = self._profile.predictor("elementwise", self._model.dtype, variant=variant)
        return StepCall("elementwise", times, lambda m: operator.seconds(rows=m, width=width))

    def _unless_fused(self, norm: StepCall) -> StepCall:
        """Return a norm after an all-reduce, with no time if the all-reduce is small enough to include it."""
        return StepCall(norm.kind, norm.times, lambda m: np.where(m <= self._fused_tokens, 0.0, norm.seconds(m)))

    def _all_reduce(self, times: int, row_bytes: float | None = None) -> StepCall:
        """Return all-reduces of rows with that many bytes, those of hidden states unless given."""
        all_reduce = RankCollective(self._profile, "all_reduce", self._model.dtype, self._tp)
        row = self._row_bytes if row_bytes is None else row_bytes
        return StepCall("all_reduce", times, lambda m: all_reduce.seconds(m * row))
