"""Time of one engine step of a model on a hardware profile, from its operators.

A step with B decodes and some prefill chunks runs every matrix product once over all its m tokens, decode
attention once over all decodes, prefill attention once over all chunks, and the head over the rows that get a
token:

    T_gpu = linear(m) + decode(B, C / B) + overhead + max(longest of [prefill(past + tokens) - prefill(past) +
    past(past)], sum of [among(past + tokens) - among(past) + past(past)]) + head(samples)

summed over all layers and all pipeline stages. The tables were measured under CUDA graphs, so no launch cost is added,
and token counts up to 512 are padded to the sizes for which vLLM captures graphs. Without graphs nothing is padded, and
no step is shorter than the launches of its kernels: max(T_gpu, T_launch). The same holds of steps with prompts if an
engine has graphs of decode steps only, and of steps larger than the largest graph (`graph_sizes`). Asynchronous engines
hide the host: T = max(T_gpu, T_host), or of a step larger than the largest graph max(T_gpu, T_host + T_launch); others
add it. Where an engine's own log has corrected steps of this kind (`simtune.costs.calibration`),
T = scale * T_gpu + offset replaces both. With pipeline parallelism T_gpu is the latency of one step through all stages
and the sends between them.

The cost of experts under a plan, and of exchanging tokens with those of other ranks, is in `simtune.costs.experts`.
With data-parallel attention all groups are taken to have as many tokens as this one, to which engines pad them; the
time that experts save because padding tokens activate none is in `simtune.costs.protocol.GroupCosts`.

Known biases. To the slow side: a sliding window over sequences of unequal length is taken at their mean length. To
the fast side: unless `quantising` of the pool is `apart`, activations are quantised inside norms and activation
functions, and by a separate kernel only behind attention; reading the past of a chunk of few tokens is not counted,
nor what a kernel takes for each short prompt of many; logits are computed for sampled rows only; a pipeline stage
that is longer than the others does not hold them up. Under the base form the mean context of a batch is enough (see
`StepModel.decode`); a residual on top of it may make one long sequence alone slower than the batch at its mean, and
that floor is not applied. The cost of unequal contexts that kernels do not split is counted only if tables show it
and the longest context is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np

from simtune.arrays import Array, Mask
from simtune.costs.adapters import ADAPTERS
from simtune.costs.afd import BatchPart, FeedForwardDevices, attention_side
from simtune.costs.encoder import ENCODER
from simtune.costs.host import HostCosts
from simtune.costs.launches import Launches
from simtune.costs.offload import HostWork, floor_s
from simtune.costs.predict import Profile
from simtune.costs.prefill_context import gathered_keys
from simtune.costs.sharding import check_parallelism
from simtune.costs.step_attention import StepAttention
from simtune.costs.step_calls import (
    StepCall,
    StepCalls,
    equal_layers,
    exposed,
    hidden_kinds,
    in_halves,
    overlapped,
    with_shared,
)
from simtune.specs.hardware import Correction, Hardware, Operator
from simtune.specs.model import Model
from simtune.specs.pool import OverlapThresholds, Pool

CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Token counts for which vLLM captures CUDA graphs; a smaller step runs as the next larger one."""

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
    "all_to_all",
    "moe_dispatch",
    "moe_combine",
)
"""Parts of a step's GPU time, as `StepModel.breakdown` names them."""

HOST = "host"
"""Part of a step that its kernels do not account for: the host's time that nothing hides, and waiting for launches."""

REDRAWN_KINDS = (*KINDS, HOST, ADAPTERS, ENCODER)
"""Parts of a step whose times have an error, by which they are redrawn."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of one step.

    `context_tokens` and `num_samples` are those of `simtune.costs.protocol.StepCosts`; a chunk is (past,
    new tokens).
    """

    num_decodes: int = 0
    context_tokens: int = 0
    chunks: Sequence[tuple[int, int]] = ()
    num_samples: int = 0
    longest_context: int = 0
    """KV tokens of the decode that reads most; 0 if unknown: then all are taken to read the mean."""
    shared_tokens: int = 0
    """Leading tokens of every decode's context that are the same for all, and are read once for all of them."""
    draft_tokens: int = 0
    """Drafts that the decodes verify, besides a token each; only logs of whole steps have them."""

    @property
    def num_tokens(self) -> int:
        """Tokens of decodes, their drafts and chunks."""
        return self.num_decodes + self.draft_tokens + sum(tokens for _, tokens in self.chunks)

    @property
    def num_seqs(self) -> int:
        """Sequences that decode or prefill."""
        return self.num_decodes + len(self.chunks)


def padded_tokens(tokens: Array, largest: float = inf) -> Array:
    """Token counts as a CUDA graph runs them: the next capture size up to 512, unchanged above that and above the
    largest graph."""
    sizes = np.array([size for size in CAPTURE_SIZES if size <= largest], dtype=np.float64)
    at = np.searchsorted(sizes, tokens)
    return np.where(at < len(sizes), sizes[np.minimum(at, len(sizes) - 1)], tokens) if len(sizes) else tokens


def _shared_out(tokens: Array, groups: int) -> Array:
    """Return the tokens of the group that has most of them, if each has its share."""
    return tokens if groups == 1 else np.ceil(tokens / groups)


def _chosen(first: Mask, these: Mapping[str, Array], those: Mapping[str, Array]) -> dict[str, Array]:
    """Return, by kind, the times of `these` where `first` is true, and those of `those` elsewhere."""
    return {kind: np.where(first, these[kind], seconds) for kind, seconds in those.items()}


class StepModel:
    """GPU and host time of the steps of one model on the devices of one pool.

    `factors` multiply the times of kinds (`REDRAWN_KINDS`), to draw a world in which they are off. `profile` replaces
    that of the hardware, to record which operators are used. Raises Infeasible when the model cannot be sharded as the
    pool asks, or the profile lacks an operator or link.
    """

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        pool: Pool,
        *,
        factors: Mapping[str, float] | None = None,
        profile: Profile | None = None,
    ) -> None:
        model = model.with_weights(pool.weight_dtype)
        check_parallelism(model, pool)
        full_model, model = model, attention_side(model, pool)
        self._model, self._hardware, self._pool = model, hardware, pool
        self._factors = factors or {}
        self._profile = profile or Profile(hardware, in_step=True)
        layers = equal_layers(model, pool.parallelism.tp)
        self._cp, self._groups = pool.parallelism.context_ranks, pool.parallelism.prompt_groups
        factors_of = self._factor("decode_attention"), self._factor("prefill_attention")
        self.attention = StepAttention.of(model, pool, layers, self._profile, *factors_of)
        self._apart = FeedForwardDevices.of(full_model, hardware, pool, self._profile)
        calls = StepCalls(model, hardware, pool, self._profile, layers, self.attention.layers)
        self._gathered = gathered_keys(model, pool, self._profile, layers)
        self._beside = (pool.shared_experts_beside or 0) if self._apart is None else 0
        self._linear, self._routed, self._head = calls.linear(shared=not self._beside), calls.routed(), calls.head()
        self._shared = calls.shared() if self._beside else []
        self.sharing = calls.sharing(self._factor("moe"))
        """Layers in which tokens of a sequence share experts, which `linear` does not know; None if there are none."""
        windows = {equal.attention.window for equal in layers}
        self.windows = {window for window in windows if window is not None}
        """Sliding windows in tokens."""
        self._overlap, self._thresholds = pool.overlap, pool.overlap_thresholds or OverlapThresholds()
        if pool.overlap is not None:
            # a model without any collective of the hidden kinds has nothing to hide, and its batch is not halved
            talks = any(part.kind in hidden_kinds(pool.overlap) for part in (*self._linear, *self._routed))
            self._overlap = pool.overlap if talks else None
        self._host_work = HostWork.of(model, hardware, pool)
        self.host = HostCosts.of(pool, hardware, self._factor(HOST))
        self.exposed_s = partial(self.host.exposed_s, hides=pool.hides_host)
        # one kernel of attention in each layer, and all other calls
        every = (*self._linear, *self._shared, *self._routed, *self._head)
        kernels = model.num_layers + sum(part.times for part in every)
        self.launches = Launches.of(
            model, pool, kernels, self._factor(HOST), floor_s(self._host_work), self.attention.launch_s
        )

    @property
    def routes(self) -> bool:
        """True if any layer has routed experts, or feed-forward blocks on devices of their own."""
        return bool(self._routed) or self._apart is not None

    @property
    def fitted(self) -> dict[str, Operator]:
        """Operators of the profile that steps of this model and pool call, by their keys."""
        return dict(self._profile.fitted)

    @property
    def estimated(self) -> set[str]:
        """Operators that no fit covers, by their keys in a profile: their times come from a data sheet."""
        return set(self._profile.estimated)

    @property
    def differs_with_prompts(self) -> bool:
        """True if the calls by the tokens of a step are others in steps with prompts."""
        return self.overlaps or self._groups > 1

    @property
    def overlaps(self) -> bool:
        """True if communication hides in some steps; which ones depends on whether they have prompts."""
        return self._overlap is not None

    def linear(self, num_tokens: Array, prompts: bool = False) -> dict[str, Array]:
        """Seconds per kind of all calls by the tokens of the step and, by `differs_with_prompts`, its prompts."""
        return self.padded(num_tokens, prompts) | self.routed(num_tokens, prompts)

    def padded(self, num_tokens: Array, prompts: bool = False) -> dict[str, Array]:
        """Seconds of the kinds in `linear` whose calls are as large as the CUDA graph of the step."""
        if self._apart is not None:
            of_part = self._linear_s(self._graph_tokens(self._of_part(num_tokens)))
            return {kind: self._apart.parts * seconds for kind, seconds in of_part.items()}
        by_kind, tokens = partial(self._linear_s, prompts=prompts), self._graph_tokens(num_tokens, prompts)
        if self._overlap is None:
            return by_kind(tokens)
        hides = overlapped(self._overlap, np.asarray(num_tokens, dtype=np.float64), prompts, self._thresholds)
        if not hides.any():
            return by_kind(tokens)
        halves, _ = exposed(in_halves(self._overlap, by_kind, tokens), hidden=hidden_kinds(self._overlap))
        return _chosen(hides, halves, by_kind(tokens))

    def _graph_tokens(self, num_tokens: Array, prompts: bool = False) -> Array:
        tokens = np.asarray(num_tokens, dtype=np.float64)
        tokens = _shared_out(tokens, self._cp * (self._groups if prompts else 1))
        return padded_tokens(tokens, self.launches.largest_graph)

    def routed(self, num_tokens: Array, prompts: bool = False) -> dict[str, Array]:
        """Seconds of the kinds in `linear` that no padding makes longer: routed experts and their exchanges."""
        tokens = np.asarray(num_tokens, dtype=np.float64)
        if self._apart is not None:
            return self._waited(self._apart, tokens)
        # Every group sends its share of the tokens to the experts, in steps without prompts too.
        tokens = _shared_out(tokens, self._groups)
        undivided = self._by_kind(self._routed, tokens)
        if self._overlap is None or not self._routed:
            return undivided
        hides = overlapped(self._overlap, np.asarray(num_tokens, dtype=np.float64), prompts, self._thresholds)
        if not hides.any():
            return undivided
        hidden = hidden_kinds(self._overlap)
        linear_s = partial(self._linear_s, prompts=prompts)
        beside = in_halves(self._overlap, linear_s, self._graph_tokens(num_tokens, prompts))
        _, room = exposed(beside, hidden=hidden)
        halves = in_halves(self._overlap, partial(self._by_kind, self._routed), tokens)
        return _chosen(hides, exposed(halves, room, hidden)[0], undivided)

    def _linear_s(self, tokens: Array, prompts: bool = False) -> dict[str, Array]:
        """Seconds by kind of calls of `tokens` rows of a group of ranks, without routed experts."""
        by_kind = self._by_kind((*self._linear, *self._gathered) if prompts else self._linear, tokens)
        if not self._shared:
            return by_kind
        to_experts = tokens if prompts else _shared_out(tokens, self._groups)
        shared, routed = self._by_kind(self._shared, tokens), self._by_kind(self._routed, to_experts)["moe"]
        return with_shared(by_kind, shared, np.where(tokens <= self._beside, routed, 0.0))

    def head(self, num_samples: Array) -> dict[str, Array]:
        """Seconds of the language-model head and of sampling, for at least one row each."""
        return self._by_kind(self._head, np.asarray(num_samples, dtype=np.float64))

    def decode(self, num_decodes: int | Array, mean_context: Array, width: int = 1, chunk: int = 0) -> Array:
        """Seconds of decode attention in all layers, with `width` query tokens for each sequence.

        With `chunk` it is the time that decodes of one token add to a step whose longest prefill chunk has `chunk`
        tokens; the same as alone unless the profile has measured it.

        The mean is enough for sequences of unequal length: kernels split the KV evenly over processors, and under the
        base form the batch at its mean never takes less than its longest sequence alone, but for the keys that each of
        the others reads while it starts (START_KEYS).
        """
        context = np.asarray(mean_context, dtype=np.float64)
        if self._apart is not None:
            return self._apart_decode_s(self._apart, num_decodes, context, width, chunk)
        if self._host_work is not None and self._host_work.per_context_s:
            # Both sides attend at once, and the step waits for the slower one.
            on_device = np.maximum(1.0, self._host_work.on_device * context)
            attention = self.attention.decode(num_decodes, on_device, width, chunk)
            return np.maximum(attention, self._host_work.beyond(num_decodes, context, self._room(num_decodes, width)))
        return self.attention.decode(num_decodes, context, width, chunk)

    def _of_part(self, num_tokens: int | Array) -> Array:
        assert self._apart is not None
        return np.maximum(1.0, np.asarray(num_tokens, dtype=np.float64) / self._apart.parts)

    def _part(self, apart: FeedForwardDevices, num_tokens: int | Array, attention_s: Array | float = 0.0) -> BatchPart:
        """Return one part of a step whose decodes attend for `attention_s` seconds."""
        tokens = self._of_part(num_tokens)
        linear = self._linear_s(self._graph_tokens(tokens))
        attention_device_s: Array = np.sum(list(linear.values()), axis=0) + attention_s
        return apart.part(attention_device_s, tokens)

    def _waited(self, apart: FeedForwardDevices, tokens: Array) -> dict[str, Array]:
        """Seconds by which a step outlasts its attention devices: waiting for the other devices, and transfers."""
        part = self._part(apart, tokens)
        beyond = part.step_s(apart.parts) - apart.parts * part.attention
        computing = np.clip(apart.parts * (part.feed_forward - part.attention), 0.0, beyond)
        return {"moe": self._factor("moe") * computing, "send": self._factor("send") * (beyond - computing)}

    def _apart_decode_s(
        self, apart: FeedForwardDevices, num_decodes: int | Array, context: Array, width: int, chunk: int
    ) -> Array:
        """Seconds by which attention makes a step of decodes longer than its matrix products do."""
        decodes = np.asarray(num_decodes, dtype=np.float64)
        attends = self.attention.decode(np.maximum(1.0, decodes / apart.parts), context, width, chunk)
        with_it = self._part(apart, decodes * width, attends).step_s(apart.parts)
        return with_it - self._part(apart, decodes * width).step_s(apart.parts)

    def _room(self, num_decodes: int | Array, width: int) -> Array:
        """Seconds of a pure decode step without its attention, in which another device may attend."""
        rows = np.asarray(num_decodes, dtype=np.float64) * width
        total: Array = np.sum([*self.linear(rows).values(), *self.head(rows).values()], axis=0)
        return total

    def breakdown(self, batch: StepWork) -> dict[str, float]:
        """GPU seconds of one step by kind (`KINDS`); kinds without work are left out."""
        by_tokens = self.linear(np.array([batch.num_tokens]), bool(batch.chunks))
        parts = {kind: float(seconds[0]) for kind, seconds in by_tokens.items()}
        if batch.num_samples:
            for kind, seconds in self.head(np.array([batch.num_samples])).items():
                parts[kind] = float(seconds[0])
        if batch.num_decodes:
            # shared tokens are read once for all decodes: they are timed like a chunk below
            mean = np.array([batch.context_tokens / batch.num_decodes - batch.shared_tokens])
            longest = max((new for _, new in batch.chunks), default=0)
            decode_s = float(self.decode(batch.num_decodes, mean, chunk=longest)[0])
            excess = max(0.0, batch.longest_context - float(mean[0]))
            imbalance_s = float(self.attention.imbalance_s(np.array([float(batch.num_decodes)]), longest > 0)[0])
            parts["decode_attention"] = decode_s + excess * imbalance_s
            if batch.shared_tokens:
                parts["decode_attention"] += self.attention.shared_s(batch.shared_tokens, batch.num_decodes)
        if batch.chunks:
            past, new = np.array(batch.chunks, dtype=np.float64).T
            parts["prefill_attention"] = float(self.attention.chunks_s(past, new, np.zeros(len(new), int), 1)[0])
        return {kind: parts[kind] for kind in KINDS if kind in parts}

    def correction(self, with_chunks: bool) -> Correction | None:
        """Return the correction from an engine's log of steps with prompt tokens, or without; None if there is none."""
        calibration = self._hardware.calibration
        if calibration is None:
            return None
        return calibration.prefill if with_chunks else calibration.decode

    def gpu_s(self, batch: StepWork) -> float:
        """Seconds of the kernels and collectives of one step, or of launching them if that takes longer."""
        return max(sum(self.breakdown(batch).values()), self.launches.least_s(batch.num_tokens, bool(batch.chunks)))

    def seconds(self, batch: StepWork) -> float:
        """Seconds of one step, host included."""
        return self.with_host_s(self.gpu_s(batch), batch)

    def with_host_s(self, gpu: float, batch: StepWork) -> float:
        """Seconds of one step whose kernels and collectives take `gpu` seconds."""
        correction = self.correction(bool(batch.chunks))
        if correction is not None:
            return correction.scale * gpu + correction.offset_s
        # One thread prepares a step and launches its kernels (vLLM's gpu_model_runner.py; with one GPU it schedules
        # too: uniproc_executor.py), so launches that no graph saves come on top of the host's other work.
        host_s = self.host.seconds(batch.num_seqs) + self.launches.launched_s(batch.num_tokens, bool(batch.chunks))
        return max(gpu + self.exposed_s(batch.num_seqs), host_s)

    def beyond_kernels_s(self, kernels: float, batch: StepWork) -> float:
        """Seconds of one step beyond those of its kernels and collectives: launches, and the host that nothing hides; 0
        where an engine's own log corrects the step."""
        if self.correction(bool(batch.chunks)) is not None:
            return 0.0
        least = self.launches.least_s(batch.num_tokens, bool(batch.chunks))
        return self.with_host_s(max(kernels, least), batch) - kernels

    def _factor(self, kind: str) -> float:
        return self._factors.get(kind, 1.0)

    def _by_kind(self, parts: Sequence[StepCall], rows: Array) -> dict[str, Array]:
        seconds: dict[str, Array] = {}
        for part in parts:
            seconds[part.kind] = seconds.get(part.kind, 0.0) + part.times * part.seconds(rows)
        return {kind: self._factor(kind) * total for kind, total in seconds.items()}
