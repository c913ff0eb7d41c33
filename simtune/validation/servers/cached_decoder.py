"""A decoder with a KV cache, made of the calls that `simtune profile` measures one by one.

Grouped-query attention, RMS norms, gated feed-forward, rotary positions; random weights. Tokens of all requests of a
step go through every matrix product together, as in any engine. Keys and values stand in rows, one for each seat:
torch has no kernel that reads scattered pages on a processor, and gathering them would take longer than reading them.
The scheduler counts its blocks all the same; memory that no token has reached is not taken.

On a processor the attention of each sequence is a call of its own, so that short contexts are not padded to the longest
one; on a GPU, where launches are expensive, decodes share one call, padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from simtune.engine import Request
from simtune.errors import UsageError
from simtune.profiling import kernels
from simtune.profiling.kernels import ATTENTION, Attend
from simtune.profiling.measurement_plan import products
from simtune.profiling.operands import DTYPES, Operands
from simtune.specs.model import DenseFeedForward, FullAttention, Model, SlidingAttention
from simtune.validation.servers.executed_scheduler import Share

ROPE_BASE = 10_000.0


class DecoderLayer(NamedTuple):
    """Weights of one layer."""

    norms: tuple[Tensor, Tensor]
    products: list[Tensor]


def greedy(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row."""
    return logits.argmax(-1, keepdim=True)


class CachedDecoder:
    """An executor of steps: see `simtune.validation.servers.executed_scheduler.Executor`."""

    def __init__(
        self,
        model: Model,
        *,
        seats: int,
        max_model_len: int,
        device: str = "cpu",
        attention: str = "sdpa",
        sample: Callable[[Tensor], Tensor] = kernels.sample,
        together: bool | None = None,
        seed: int = 0,
    ) -> None:
        """`attention` is the kernel of decodes by its name in `simtune.profiling.kernels`, as in the header of a
        profile's measurements. Raise UsageError for a model with other layers."""
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
        shape = (2, seats, self._attention.kv_heads, max_model_len, self._attention.head_dim)
        dtype = DTYPES[model.kv_dtype or model.dtype]
        self._cache = [torch.zeros(shape, dtype=dtype, device=self._device) for _ in self._layers]
        self._rows: dict[Request, int] = {}
        self._free = list(range(seats))[::-1]
        self._texts: dict[Request, list[int]] = {}

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

    def run(self, shares: Sequence[Share]) -> None:
        """Run a forward pass over all tokens of a step, and sample a token for each share that samples."""
        ids: list[int] = []
        positions: list[int] = []
        spans: list[_Span] = []
        for share in shares:
            end = share.past + share.tokens
            ids += self.text(share.request)[share.past : end]
            positions += range(share.past, end)
            spans.append(_Span(self._row(share.request), len(ids) - share.tokens, share.past, share.tokens))
        logits = self._forward(torch.tensor(ids), torch.tensor(positions), spans, [s.samples for s in shares])
        if logits is not None:
            sampled = iter(self._sample(logits).flatten().tolist())
            for share in shares:
                if share.samples:
                    self.text(share.request).append(next(sampled))

    def _forward(self, ids: Tensor, positions: Tensor, spans: list[_Span], samples: list[bool]) -> Tensor | None:
        a, rows = self._attention, len(ids)
        assert isinstance(a, FullAttention)
        heads, hk, d = a.heads, a.kv_heads, a.head_dim
        positions = positions.to(self._device)
        groups = [(group, self._mask(group)) for group in self._groups(spans)]
        seats = torch.tensor([span.row for span in spans for _ in range(span.tokens)], device=self._device)
        x = self._head[ids.to(self._device)]
        residual = torch.zeros_like(x)
        cos, sin = self._cos[positions], self._sin[positions]
        for cache, layer in zip(self._cache, self._layers, strict=True):
            qkv, out, gate_up, down = layer.products
            projected = kernels.linear(kernels.norm(x, residual, layer.norms[0]), qkv).view(rows, heads + 2 * hk, d)
            rotated = kernels.rope(projected[:, : heads + hk], cos, sin)
            kernels.keep(cache, seats, positions, rotated[:, heads:], projected[:, heads + hk :])
            attended = [self._attend_to(cache, rotated[:, :heads], *group) for group in groups]
            x = kernels.linear(torch.cat(attended) if len(attended) > 1 else attended[0], out)
            hidden = kernels.linear(kernels.norm(x, residual, layer.norms[1]), gate_up)
            x = kernels.linear(kernels.activation(hidden), down)
        last = [span.first + span.tokens - 1 for span, sampled in zip(spans, samples, strict=True) if sampled]
        if not last:
            return None
        return kernels.linear(kernels.norm(x, residual, self._norm)[last], self._head)

    def _groups(self, spans: list[_Span]) -> list[list[_Span]]:
        """Return the spans whose attention is one call: one by one, or neighbours that decode together."""
        if not self._together:
            return [[span] for span in spans]
        groups: list[list[_Span]] = []
        for span in spans:
            if groups and span.tokens == groups[-1][-1].tokens == 1:
                groups[-1].append(span)
            else:
                groups.append([span])
        return groups

    def _mask(self, group: list[_Span]) -> Any:
        """Return the mask of a group that is one span; None for larger groups."""
        _, _, past, tokens = group[0]
        return None if len(group) > 1 else kernels.sees(tokens, past + tokens, past + tokens, self._device)

    def _attend_to(self, cache: Tensor, q: Tensor, group: list[_Span], mask: Any) -> Tensor:
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

    def _attend_together(self, cache: Tensor, q: Tensor, group: list[_Span]) -> Tensor:
        rows = torch.tensor([span.row for span in group], device=self._device)
        ends = torch.tensor([span.past + 1 for span in group], device=self._device)
        longest = max(span.past for span in group) + 1
        k, v = (part[:, :, :longest].index_select(0, rows) for part in cache)
        mask = (torch.arange(longest, device=self._device) < ends[:, None])[:, None, None]
        first = group[0].first
        return kernels.sdpa(q[first : first + len(group)].unsqueeze(2), k, v, mask).reshape(len(group), -1)


class _Span(NamedTuple):
    """Tokens of a share among those of its step."""

    row: int
    first: int
    past: int
    tokens: int


def check_layers(model: Model) -> None:
    """Raise UsageError for a model that the decoder cannot run."""
    for group in model.layers:
        attention, feed_forward = group.attention, group.feed_forward
        plain = type(attention) is FullAttention and not (attention.output_gate or attention.sinks)
        dense = isinstance(feed_forward, DenseFeedForward) and feed_forward.gated
        if not (plain and dense) or isinstance(attention, SlidingAttention) or attention != model.layers[0].attention:
            raise UsageError(
                f"{model.name}: the torch engine runs full attention with gated dense feed-forward layers only; name a "
                "model of such layers"
            )
    if model.weight_dtype != model.dtype:
        raise UsageError(f"{model.name}: the torch engine runs weights in the dtype of activations ({model.dtype})")
