"""A decoder with a KV cache, made of the calls that `simtune profile` measures one by one.

Grouped-query attention, RMS norms, gated feed-forward, rotary positions; random weights. Tokens of all requests of a
step go through every matrix product together, as in any engine. Keys and values stand in rows, one for each seat:
torch has no kernel that reads scattered pages on a processor, and gathering them would take longer than reading them.
The scheduler counts its blocks all the same; memory that no token has reached is not taken.

On a processor the attention of each sequence is a call of its own, so that short contexts are not padded to the longest
one. On a GPU, where launches are expensive, all sequences share one call in 16 bits, without padding, and steps of
decodes alone can be replayed as CUDA graphs (`simtune.validation.servers.decode_graphs`); in 32 bits decodes share one,
padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from simtune.engine import Request
from simtune.errors import UsageError
from simtune.profiling import kernels
from simtune.profiling.kernels import ATTENTION, Attend
from simtune.profiling.measurement_plan import products
from simtune.profiling.operands import DTYPES, Operands
from simtune.specs.model import DenseFeedForward, FullAttention, Model, SlidingAttention
from simtune.validation.servers.decode_graphs import DecodeGraphs, Decodes
from simtune.validation.servers.executed_scheduler import TokenShare

ROPE_BASE = 10_000.0

AttendInCache = Callable[[Tensor, Tensor], Tensor]
"""Attention of the queries (tokens, heads, d) of a step to a layer's cache, as (tokens, heads x d)."""


class DecoderLayer(NamedTuple):
    """Weights of one layer."""

    norms: tuple[Tensor, Tensor]
    products: list[Tensor]


def greedy(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row."""
    return logits.argmax(-1, keepdim=True)


class CachedDecoder:
    """An executor of steps: see `simtune.validation.servers.executed_scheduler.Executor`."""

    def __init__(  # noqa: PLR0913 - one for each option
        self,
        model: Model,
        *,
        seats: int,
        max_model_len: int,
        device: str = "cpu",
        attention: str = "sdpa",
        sample: Callable[[Tensor], Tensor] = kernels.sample,
        together: bool | None = None,
        graphs: bool = False,
        seed: int = 0,
    ) -> None:
        """`attention` is the kernel of decodes by its name in `simtune.profiling.kernels`, as in the header of a
        profile's measurements; with `graphs` steps of decodes alone are captured and replayed.

        Raise UsageError for a model with other layers, and for graphs elsewhere than on a GPU in 16 bits."""
        check_layers(model)
        torch.set_grad_enabled(False)
        # Threads that wait for shared cores only spin.
        torch.set_num_threads(1)
        self._model, self._device = model, torch.device(device)
        self._attend: Attend = ATTENTION[attention]
        self._prefill: Attend = kernels.sdpa
        self._sample, self._seed = sample, seed
        self._together = self._device.type == "cuda" if together is None else together
        self._attention = model.layers[0].attention
        assert isinstance(self._attention, FullAttention)
        self._weights(Operands(self._device, 1 << 20))
        self._positions(max_model_len)
        self._longest = max_model_len
        dtype = DTYPES[model.kv_dtype or model.dtype]
        # Kernels for sequences of unequal lengths exist on GPUs and in 16 bits only.
        self._varlen = self._device.type == "cuda" and dtype.itemsize == 2
        self._cache = [self._layer_cache(seats, dtype) for _ in self._layers]
        if graphs and not self._varlen:
            raise UsageError(
                f"{model.name}: the torch engine captures graphs on a GPU in 16 bits; set cuda_graphs: false"
            )
        self._graphs = DecodeGraphs(self._decode_logits, seats, self._device) if graphs else None
        self._rows: dict[Request, int] = {}
        # Reversed, so that pop hands out the lowest row first.
        self._free = list(range(seats))[::-1]
        self._texts: dict[Request, list[int]] = {}

    def _layer_cache(self, seats: int, dtype: torch.dtype) -> Tensor:
        """Return a cache (2, rows, kv_heads, positions, head_dim) of one layer."""
        a = self._attention
        assert isinstance(a, FullAttention)
        if not self._varlen:
            return torch.zeros((2, seats, a.kv_heads, self._longest, a.head_dim), dtype=dtype, device=self._device)
        # Stored token by token, as `kernels.varlen` reads it; padded rows of a graph write to the row after all seats.
        shape = (2, seats + 1, self._longest, a.kv_heads, a.head_dim)
        return torch.zeros(shape, dtype=dtype, device=self._device).transpose(2, 3)

    def _weights(self, operands: Operands) -> None:
        model = self._model

        def weight(n: int, k: int) -> Tensor:
            return operands.fresh((n, k), model.weight_dtype).mul_(k**-0.5)

        def norm() -> Tensor:
            return torch.ones(model.hidden_size, dtype=DTYPES[model.dtype], device=self._device)

        self._layers = [
            DecoderLayer((norm(), norm()), [weight(n, k) for n, k in products(model, group, 1)])
            for group in model.layers
            for _ in range(group.count)
        ]
        self._norm, self._head = norm(), weight(model.vocab_size, model.hidden_size)

    def _positions(self, longest: int) -> None:
        half = self._attention.head_dim // 2  # type: ignore[union-attr]
        rates = ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(longest, dtype=torch.float64), rates).unsqueeze(1)
        dtype = DTYPES[self._model.dtype]
        self._cos, self._sin = (f(angles).to(self._device, dtype) for f in (torch.cos, torch.sin))

    # --- requests ---------------------------------------------------------------------------------------------

    def text(self, request: Request) -> list[int]:
        """Return the tokens of a request: its prompt, drawn from a seed and its number, and the tokens sampled so
        far."""
        if request not in self._texts:
            rng = np.random.default_rng((self._seed, request.id))
            self._texts[request] = rng.integers(self._model.vocab_size, size=request.prompt_tokens).tolist()
        return self._texts[request]

    def release(self, request: Request) -> None:
        """Free the row of a request."""
        row = self._rows.pop(request, None)
        if row is not None:
            self._free.append(row)
        if request.emitted >= request.output_tokens:
            self._texts.pop(request, None)

    def _row(self, request: Request) -> int:
        if request not in self._rows:
            self._rows[request] = self._free.pop()
        return self._rows[request]

    # --- steps ------------------------------------------------------------------------------------------------

    def run(self, shares: Sequence[TokenShare]) -> None:
        """Run a forward pass over all tokens of a step, and sample a token for each share that samples."""
        ids: list[int] = []
        positions: list[int] = []
        spans: list[_TokenSpan] = []
        for share in shares:
            end = share.past + share.tokens
            ids += self.text(share.request)[share.past : end]
            positions += range(share.past, end)
            spans.append(_TokenSpan(self._row(share.request), len(ids) - share.tokens, share.past, share.tokens))
        if self._graphs is not None and all(span.tokens == 1 for span in spans):
            logits: Tensor | None = self._graphs.run(ids, positions, [span.row for span in spans])
        else:
            logits = self._forward(torch.tensor(ids), torch.tensor(positions), spans, [s.samples for s in shares])
        if logits is not None:
            sampled = iter(self._sample(logits).flatten().tolist())
            for share in shares:
                if share.samples:
                    self.text(share.request).append(next(sampled))

    def _forward(self, ids: Tensor, positions: Tensor, spans: list[_TokenSpan], samples: list[bool]) -> Tensor | None:
        rows = torch.tensor([span.row for span in spans for _ in range(span.tokens)], device=self._device)
        attend = self._attend_varlen(*self._varlen_spans(spans)) if self._varlen else self._attend_in_groups(spans)
        hidden = self._hidden(ids.to(self._device), positions.to(self._device), rows, attend)
        last = [span.first + span.tokens - 1 for span, sampled in zip(spans, samples, strict=True) if sampled]
        return kernels.linear(hidden[last], self._head) if last else None

    def _decode_logits(self, decodes: Decodes) -> Tensor:
        """Return the logits of a step of decodes alone; every shape depends on their number only."""
        ends = torch.arange(len(decodes.ids) + 1, dtype=torch.int32, device=self._device)
        attend = self._attend_varlen(ends, decodes.rows, decodes.positions + 1, 1)
        return kernels.linear(self._hidden(decodes.ids, decodes.positions, decodes.rows, attend), self._head)

    def _hidden(self, ids: Tensor, positions: Tensor, rows: Tensor, attend: AttendInCache) -> Tensor:
        """Return the normed output (tokens, hidden_size) of all layers; `attend` returns the attention of queries to a
        layer's cache."""
        a = self._attention
        assert isinstance(a, FullAttention)
        heads, hk, d = a.heads, a.kv_heads, a.head_dim
        x = self._head[ids]
        residual = torch.zeros_like(x)
        cos, sin = self._cos[positions], self._sin[positions]
        for cache, layer in zip(self._cache, self._layers, strict=True):
            qkv, out, gate_up, down = layer.products
            normed = kernels.norm(x, residual, layer.norms[0])
            projected = kernels.linear(normed, qkv).view(len(ids), heads + 2 * hk, d)
            rotated = kernels.rope(projected[:, : heads + hk], cos, sin)
            kernels.keep(cache, rows, positions, rotated[:, heads:], projected[:, heads + hk :])
            x = kernels.linear(attend(cache, rotated[:, :heads]), out)
            hidden = kernels.linear(kernels.norm(x, residual, layer.norms[1]), gate_up)
            x = kernels.linear(kernels.activation(hidden), down)
        return kernels.norm(x, residual, self._norm)

    def _varlen_spans(self, spans: list[_TokenSpan]) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return the arguments of `_attend_varlen` for the spans of a step."""
        ends = [span.first for span in spans] + [spans[-1].first + spans[-1].tokens]
        rows, lengths = [span.row for span in spans], [span.past + span.tokens for span in spans]
        on_device = [torch.tensor(values, device=self._device) for values in (rows, lengths)]
        most = max(span.tokens for span in spans)
        return torch.tensor(ends, dtype=torch.int32, device=self._device), *on_device, most

    def _attend_varlen(self, ends: Tensor, rows: Tensor, lengths: Tensor, most: int) -> AttendInCache:
        """Return attention of all sequences of a step in one call."""
        starts = F.pad(rows * self._longest, (0, 1)).to(torch.int32)
        spans = kernels.Spans(ends, starts, lengths.to(torch.int32), most, self._longest)

        def attend(cache: Tensor, q: Tensor) -> Tensor:
            k, v = (part.transpose(1, 2).flatten(0, 1) for part in cache)
            return kernels.varlen(q, k, v, spans).reshape(len(q), -1)

        return attend

    def _attend_in_groups(self, spans: list[_TokenSpan]) -> AttendInCache:
        """Return attention of a step with a call for each group of its spans."""
        groups = [(group, self._mask(group)) for group in self._groups(spans)]

        def attend(cache: Tensor, q: Tensor) -> Tensor:
            attended = [self._attend_to(cache, q, *group) for group in groups]
            return torch.cat(attended) if len(attended) > 1 else attended[0]

        return attend

    def _groups(self, spans: list[_TokenSpan]) -> list[list[_TokenSpan]]:
        """Return the spans whose attention is one call: one by one, or neighbours that decode together."""
        if not self._together:
            return [[span] for span in spans]
        groups: list[list[_TokenSpan]] = []
        for span in spans:
            if groups and span.tokens == groups[-1][-1].tokens == 1:
                groups[-1].append(span)
            else:
                groups.append([span])
        return groups

    def _mask(self, group: list[_TokenSpan]) -> Any:
        """Return the mask of a group that is one span; None for larger groups."""
        _, _, past, tokens = group[0]
        return None if len(group) > 1 else kernels.sees(tokens, past + tokens, past + tokens, self._device)

    def _attend_to(self, cache: Tensor, q: Tensor, group: list[_TokenSpan], mask: Any) -> Tensor:
        """Return the attention output (tokens, heads x head_dim) of the spans of a group."""
        if len(group) > 1:
            return self._attend_together(cache, q, group)
        ((row, first, past, tokens),) = group
        end = past + tokens
        k, v = cache[0, row : row + 1, :, :end], cache[1, row : row + 1, :, :end]
        if tokens == 1:
            return self._attend(q[first].view(1, -1, 1, q.shape[-1]), k, v, None).reshape(1, -1)
        return (
            self._prefill(q[first : first + tokens].transpose(0, 1).unsqueeze(0), k, v, mask)[0]
            .transpose(0, 1)
            .reshape(tokens, -1)
        )

    def _attend_together(self, cache: Tensor, q: Tensor, group: list[_TokenSpan]) -> Tensor:
        rows = torch.tensor([span.row for span in group], device=self._device)
        ends = torch.tensor([span.past + 1 for span in group], device=self._device)
        longest = max(span.past for span in group) + 1
        k, v = (part[:, :, :longest].index_select(0, rows) for part in cache)
        mask = (torch.arange(longest, device=self._device) < ends[:, None])[:, None, None]
        first = group[0].first
        return kernels.sdpa(q[first : first + len(group)].unsqueeze(2), k, v, mask).reshape(len(group), -1)


class _TokenSpan(NamedTuple):
    """Tokens of a share among those of its step."""

    row: int
    first: int
    past: int
    tokens: int


def check_layers(model: Model) -> None:
    """Raise UsageError for a model that the decoder cannot run."""
    for group in model.layers:
        attention, feed_forward = group.attention, group.feed_forward
        plain = isinstance(attention, FullAttention) and attention.like_llama and model.residual is None
        dense = isinstance(feed_forward, DenseFeedForward) and feed_forward.gated
        if not (plain and dense) or isinstance(attention, SlidingAttention) or attention != model.layers[0].attention:
            raise UsageError(
                f"{model.name}: the torch engine runs full attention with gated dense feed-forward layers only; name a "
                "model of such layers"
            )
    if model.weight_dtype != model.dtype:
        raise UsageError(f"{model.name}: the torch engine runs weights in the dtype of activations ({model.dtype})")
