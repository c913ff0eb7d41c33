"""Routed experts of a layer under a plan: the rows that reach a rank, its kernel, and the exchange of tokens.

Without data-parallel attention every rank has all tokens: it computes the sums of its own experts, and the usual
all-reduce adds them up. With it tokens are dispatched: each goes once to every rank that has an expert for it, and the
outputs of the experts are combined on the token's rank (DeepEP, github.com/deepseek-ai/DeepEP). A rank's kernel then
sees no rows but those of its own experts. Either way a step waits for the busiest rank
(`simtune.costs.operators.moe.rank_load`).

Only real tokens activate experts: rows that pad a step to the size of a CUDA graph are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from simtune.arrays import Array
from simtune.costs.expert_replicas import busiest_share
from simtune.costs.operators import operator_key
from simtune.costs.operators.moe import rank_load, received
from simtune.costs.predict import Predictor, Profile
from simtune.specs.base import ACTIVATION_BYTES, DTYPE_BYTES
from simtune.specs.hardware import OperatorKind
from simtune.specs.model import Model, MoeFeedForward
from simtune.specs.pool import Pool

LOW_LATENCY_TOKENS = 256
"""Tokens of a rank up to which DeepEP's low-latency kernels exchange them, as in the published tables and by default in
vLLM (`VLLM_MOE_DP_CHUNK_SIZE`); the high-throughput kernels exchange more."""

_MODES = ("low_latency", "high_throughput")
"""Kernels of DeepEP for few tokens of a rank and for many, as variants of exchanges and of the experts behind them."""

_EXCHANGED = "bf16"
"""The dtype in which exchanges were measured and are stored; the width of a row is one of their parameters."""

SecondsOf = Callable[[Array], Array]
"""Seconds of calls, by the real tokens in each group of ranks."""


def independent_tokens(tokens: Array, sequences: Array, visited: float, reuse: float) -> Array:
    """Return the number of independent tokens that wake as many experts as neighbouring tokens of `sequences`
    sequences, each of which visits the share `visited` of the experts; see `simtune.costs.shared_experts`."""
    if visited >= 1:
        return tokens
    per_neighbour = np.log1p(-(1 - reuse) * visited) / np.log1p(-visited)
    alone = np.minimum(tokens, sequences)
    independent: Array = alone + (tokens - alone) * per_neighbour
    return independent


def _placed(spec: MoeFeedForward, replicas: int | None, ep: int) -> float | None:
    """Return the rows of the busiest rank over the mean if experts are placed by their load; None if they are not."""
    if replicas is None:
        return None
    return busiest_share(spec.experts, spec.experts_per_token, ep, spec.routing_skew, replicas)


class Experts:
    """Times of one layer's routed experts on the rank that has most to do, and of exchanging tokens with them."""

    def __init__(self, model: Model, feed_forward: MoeFeedForward, profile: Profile, pool: Pool) -> None:
        parallelism = pool.parallelism
        self._hidden, self._spec, self._profile = feed_forward.latent_size or model.hidden_size, feed_forward, profile
        self._dtype, self._weights = model.dtype, model.dtype_of("experts")
        if pool.expert_activations == "mxfp8" and self._weights == "mxfp4":
            self._weights = "mxfp4_mxfp8"
        self._kernel, self._most_flops_per_s = profile.predictor("moe", self._weights), pool.expert_flops_per_s
        self._groups, self._tp = parallelism.expert_groups, parallelism.tp
        self._whole = parallelism.expert_parallel
        self._locality = pool.studied.expert_locality or 0.0
        self._ranks = self._tp * self._groups
        self._ep = self._ranks if self._whole else 1
        self._placed = _placed(feed_forward, parallelism.expert_replicas, self._ep)
        self._gathers = self._groups > 1 and (not self._whole or pool.expert_exchange == "all_gather")

    def parts(self) -> Iterator[tuple[str, SecondsOf]]:
        """Yield (kind of `simtune.costs.iteration.KINDS`, seconds of one call in each layer)."""
        yield "moe", self._kernel_s
        if self._gathers:
            yield from self._gathering()
        elif self._groups > 1 and self._locality < 1:
            yield from self._exchanges()

    def shared_s(self, tokens: Array, sequences: Array) -> Array:
        """Seconds by which `tokens` tokens of `sequences` sequences take less than those of different sequences.

        The kernel takes as long as for the tokens that wake as many experts, or as its rows take to be multiplied.
        """
        spec, most = self._spec, self._kernel.operator.base.flops_per_s
        few = independent_tokens(tokens, sequences, spec.experts_per_token / spec.experts, spec.neighbour_reuse)
        rows = self._groups * tokens * spec.experts_per_token / self._ep
        width = spec.intermediate_size if self._whole else spec.intermediate_size / self._ranks
        computed = 6 * rows * self._hidden * width / most
        saved: Array = np.maximum(0.0, self._kernel_s(tokens) - np.maximum(self._kernel_s(few), computed))
        return saved

    def _kernel_s(self, tokens: Array) -> Array:
        spec, ep = self._spec, self._ep
        everybodys = self._groups * tokens
        load = rank_load(everybodys, spec.experts, spec.experts_per_token, ep, spec.routing_skew, self._placed)
        width = spec.intermediate_size if self._whole else spec.intermediate_size // self._ranks
        shape = {
            "hidden": self._hidden,
            # Measured kernels are gated, with three matrices: two are treated as three narrower ones of as many values.
            "intermediate": width if spec.gated else 2 * width // 3,
            "skew": spec.routing_skew,
        }
        if self._groups == 1 or self._gathers:
            routed: dict[str, float] = {
                "experts_per_token": spec.experts_per_token,
                "experts": spec.experts,
                "ep": ep,
            }
            return self._computed(self._kernel, tokens=everybodys * load, **routed, **shape)
        local = received(everybodys * load, spec.experts, spec.experts_per_token, ep)
        routed = {"experts_per_token": local.experts_per_token, "experts": spec.experts / ep, "ep": 1}
        few, many = self._dispatched
        seconds = self._computed(few, tokens=local.tokens, **routed, **shape)
        if few is many:
            return seconds
        beyond = self._computed(many, tokens=local.tokens, **routed, **shape)
        return np.where(tokens / self._tp <= LOW_LATENCY_TOKENS, seconds, beyond)

    @cached_property
    def _dispatched(self) -> tuple[Predictor, Predictor]:
        """Kernels for rows that DeepEP's low-latency kernels brought, and for those that the others did: where these
        were not measured, the kernel for all tokens of a rank."""
        few, many = (self._measured("moe", mode, self._weights) for mode in _MODES)
        return few or self._kernel, many or self._kernel

    def _computed(self, kernel: Predictor, **shape: Any) -> Array:
        """Seconds of a kernel, or of the three products at the plan's own rate if that is slower."""
        seconds: Array = kernel.seconds(**shape)
        if self._most_flops_per_s is None:
            return seconds
        rows = shape["tokens"] * shape["experts_per_token"] / shape["ep"]
        computed: Array = 6 * rows * shape["hidden"] * shape["intermediate"] / self._most_flops_per_s
        return np.maximum(seconds, computed)

    def _gathering(self) -> Iterator[tuple[str, SecondsOf]]:
        """Yield inputs in the format that the experts read and sums in that of activations, of the tokens of all
        groups."""
        values = DTYPE_BYTES[self._dtype]
        collectives: tuple[tuple[str, OperatorKind, float], ...] = (
            ("moe_dispatch", "all_gather", min(values, ACTIVATION_BYTES.get(self._weights, values))),
            ("moe_combine", "reduce_scatter", values),
        )
        for kind, part, width in collectives:
            collective = self._profile.predictor(part, self._dtype)
            yield kind, partial(self._gathering_s, collective, self._hidden * width)

    def _gathering_s(self, collective: Predictor, row_bytes: float, tokens: Array) -> Array:
        return collective.seconds(devices=self._ranks, bytes=self._groups * tokens * row_bytes)

    def _exchanges(self) -> Iterator[tuple[str, SecondsOf]]:
        """Yield dispatch in the format that the experts read, combine in that of activations.

        Several nodes were never measured: the data sheet of the link between them is used.
        """
        values = DTYPE_BYTES[self._dtype]
        widths: tuple[tuple[OperatorKind, float], ...] = (
            ("moe_dispatch", min(values, ACTIVATION_BYTES.get(self._weights, values))),
            ("moe_combine", values),
        )
        nodes = -(-self._ep // self._profile.hardware.device.devices_per_node)
        for kind, width in widths:
            row_bytes = self._hidden * width * (1 - self._locality)
            backends = {name: f for name in _MODES if (f := self._measured(kind, name, _EXCHANGED))}
            if nodes > 1:
                between = self._profile.predictor(kind, _EXCHANGED, variant="inter_node")
                yield kind, partial(self._exchange_s, between, between, row_bytes, nodes)
            elif backends:
                few = backends.get("low_latency") or backends["high_throughput"]
                many = backends.get("high_throughput") or backends["low_latency"]
                yield kind, partial(self._exchange_s, few, many, row_bytes, nodes)
            else:
                yield (
                    "all_to_all",
                    partial(self._all_to_all_s, self._profile.predictor("all_to_all", self._dtype), row_bytes),
                )

    def _measured(self, kind: OperatorKind, mode: str, dtype: str) -> Predictor | None:
        """Return the operator of these kernels; None if the profile has no fit of it."""
        if operator_key(kind, dtype, variant=mode) not in self._profile.hardware.operators:
            return None
        return self._profile.predictor(kind, dtype, variant=mode)

    def _exchange_s(self, few: Predictor, many: Predictor, row_bytes: float, nodes: int, tokens: Array) -> Array:
        """Seconds by the operator `few` up to `LOW_LATENCY_TOKENS` tokens of a rank, by `many` above.

        Of many tokens each goes once to every node that has an expert for it, and to its experts from there, as
        DeepEP's high-throughput kernels forward them; few go to each expert on their own.
        """
        spec, rank_tokens = self._spec, tokens / self._tp
        call: dict[str, Any] = {
            "tokens": rank_tokens,
            "row_bytes": row_bytes,
            "experts": spec.experts,
            "ep": self._ep,
            "nodes": nodes,
        }
        few_s = few.seconds(experts_per_token=spec.experts_per_token, **call)
        if nodes == 1:
            many_s = many.seconds(experts_per_token=spec.experts_per_token, **call)
        else:
            arrived = received(rank_tokens, spec.experts, spec.experts_per_token, nodes).tokens
            many_s = many.seconds(experts_per_token=nodes * arrived / rank_tokens, **call)
        return np.where(rank_tokens <= LOW_LATENCY_TOKENS, few_s, many_s)

    def _all_to_all_s(self, exchange: Predictor, row_bytes: float, tokens: Array) -> Array:
        copies = min(self._spec.experts_per_token, self._ep)
        return exchange.seconds(devices=self._ep, bytes=tokens / self._tp * copies * row_bytes)


class SharingLayers(NamedTuple):
    """Layers in which tokens of a sequence share experts: the number of equal ones, and their experts."""

    layers: Sequence[tuple[float, Experts]]

    def saved_s(self, tokens: Array, sequences: Array) -> Array:
        """Seconds by which routed experts take less if the tokens of a step are those of `sequences` sequences."""
        saved: Array = np.sum([number * experts.shared_s(tokens, sequences) for number, experts in self.layers], axis=0)
        return saved
