"""Decoder of a model's shapes with random weights, built from the calls that are also measured one by one.

Its whole steps are compared with the sum of operators. Weights have separate memory; keys and values are views into the
operands, different ones in every layer, since their content costs nothing and their size does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from simtune.profiling import kernels
from simtune.profiling.kernels import Attend
from simtune.profiling.measurement_plan import products
from simtune.profiling.operands import Operands
from simtune.profiling.timing import Call
from simtune.specs.model import FullAttention, Model


class Decoder:
    """First layers of a model with plain attention and a gated feed-forward, and its head."""

    def __init__(self, model: Model, layers: int, operands: Operands) -> None:
        group = model.layers[0]
        assert isinstance(group.attention, FullAttention)
        self.attention, self.dtype, self.operands = group.attention, model.dtype, operands
        self.layers = [
            [operands.fresh((n, k), model.weight_dtype) for n, k in products(model, group, 1)] for _ in range(layers)
        ]
        self.norm = operands.fresh((model.hidden_size,), model.dtype)
        self.head = operands.fresh((model.vocab_size, model.hidden_size), model.dtype)
        self.embedding = self.head

    def _caches(self, decode: Attend, shape: tuple[int, int, int, int, int]) -> list[Tensor]:
        """Return caches (2, sequences, kv_heads, positions, head_dim), stored as the kernel of decodes reads them."""
        if decode is not kernels.varlen_evenly:
            return self.operands.rotating(shape, self.dtype)
        parts, sequences, kv_heads, positions, head_dim = shape
        by_token = (parts, sequences, positions, kv_heads, head_dim)
        return [cache.transpose(2, 3) for cache in self.operands.rotating(by_token, self.dtype)]

    def step(self, shape: Mapping[str, float], decode: Attend, prefill: Attend) -> Call:
        """Return a call that runs one step: decodes of one context, and one chunk behind its past."""
        decodes, context, past, new, samples = (
            round(shape[name]) for name in ("decodes", "context", "past", "tokens", "samples")
        )
        a, operands, rows = self.attention, self.operands, decodes + new
        heads, hk, d = a.heads, a.kv_heads, a.head_dim
        ids = torch.randint(len(self.embedding), (rows,), device=operands.device)
        cos, sin = (operands.fresh((rows, 1, d // 2), self.dtype) for _ in range(2))
        mask = kernels.sees(new, past + new, past + new, operands.device) if new else None
        caches = self._caches(decode, (2, max(decodes, 1), hk, max(context, 1), d))
        chunks = operands.rotating((2, 1, hk, past + max(new, 1), d), self.dtype)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = []
            if decodes:
                cache = caches[layer % len(caches)]
                for cached, fresh in zip(cache, (k, v), strict=True):
                    cached[:, :, -1] = fresh[:decodes]
                out = decode(q[:decodes].unsqueeze(2), cache[0], cache[1], None)
                parts.append(out.reshape(decodes, heads * d))
            if new:
                cache = chunks[layer % len(chunks)]
                for cached, fresh in zip(cache, (k, v), strict=True):
                    cached[0, :, past:] = fresh[decodes:].transpose(0, 1)
                out = prefill(q[decodes:].transpose(0, 1).unsqueeze(0), cache[0], cache[1], mask)
                parts.append(out[0].transpose(0, 1).reshape(new, heads * d))
            return torch.cat(parts) if len(parts) > 1 else parts[0]

        def call() -> Tensor:
            x = self.embedding[ids]
            residual = torch.zeros_like(x)
            for at, (qkv, out, gate_up, down) in enumerate(self.layers):
                projected = kernels.linear(kernels.norm(x, residual, self.norm), qkv).view(rows, heads + 2 * hk, d)
                rotated = kernels.rope(projected[:, : heads + hk], cos, sin)
                attended = attend(at, rotated[:, :heads], rotated[:, heads:], projected[:, heads + hk :])
                x = kernels.linear(attended, out)
                hidden = kernels.linear(kernels.norm(x, residual, self.norm), gate_up)
                x = kernels.linear(kernels.activation(hidden), down)
            last = kernels.norm(x, residual, self.norm)[-samples:]
            return kernels.sample(kernels.linear(last, self.head))

        return call
