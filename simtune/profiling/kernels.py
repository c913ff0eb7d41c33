"""Calls that are timed, using torch alone; `decoder` builds whole steps out of them.

If torch has several kernels for one operation, `CANDIDATES` names them; the rig tries each on the device and uses the
fastest of those that run. Nothing here depends on a version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from simtune.costs.tables.own import SHAPES
from simtune.profiling.measurement_plan import MeasurementTask
from simtune.profiling.operands import DTYPES, Operands
from simtune.profiling.timing import Call

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""Function of queries (b, h, q, d), keys and values (b, hk, kv, d) and a mask: None, or a result of `sees`."""

PAGE = 16
"""Tokens of one page of a scattered KV cache, as in engines."""


# --- matrix products --------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return (m, k) times the transpose of (n, k); 8-bit ones write 16 bits, of int8 32."""
    if weight.dtype == torch.float8_e4m3fn:
        scale = _one(x.device)
        return torch._scaled_mm(x, weight.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    if weight.dtype == torch.int8:
        return torch._int_mm(x, weight.t())
    return F.linear(x, weight)


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows in 8 bits, and the scale of each."""
    top = 127.0 if dtype == torch.int8 else float(torch.finfo(dtype).max)
    scale = x.abs().amax(-1, keepdim=True).float() / top
    return (x / scale).to(dtype), scale


def moe(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Gated experts: rows sorted by expert, one product for each expert that was chosen (or one for all of them)."""
    order = chosen.flatten().argsort()
    rows = x[order // chosen.shape[1]]
    counts = torch.bincount(chosen.flatten(), minlength=len(gate_up))
    if x.is_cuda:
        ends = counts.cumsum(0).to(torch.int32)
        hidden = activation(torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends))
        out = torch._grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    else:
        parts = rows.split(counts.tolist())
        out = torch.cat(
            [linear(activation(linear(part, gate_up[e])), down[e]) for e, part in enumerate(parts) if len(part)]
        )
    return torch.zeros_like(x).index_add_(0, order // chosen.shape[1], out)


# --- attention --------------------------------------------------------------------------------------------


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Attention of torch; `mask` "causal" for whole prompts."""
    gqa = q.shape[1] != k.shape[1]
    if isinstance(mask, str):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)


def sdpa_grouped(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Attention with query heads that share a KV head as rows of one head, so that keys and values are read once."""
    b, h, n, d = q.shape
    groups = h // k.shape[1]
    if mask is not None:
        mask = mask.repeat(groups, 1)
    return F.scaled_dot_product_attention(q.reshape(b, -1, groups * n, d), k, v, attn_mask=mask).reshape(b, h, n, d)


def matmul(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Attention as two plain products with a softmax between."""
    b, h, n, d = q.shape
    groups = h // k.shape[1]
    scores = torch.matmul(q.reshape(b, -1, groups * n, d), k.transpose(-1, -2)) * d**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask.repeat(groups, 1), float("-inf"))
    return torch.matmul(torch.softmax(scores, -1), v).reshape(b, h, n, d)


def _within(attend: Attend, backend: str) -> Attend:
    """Restrict `attend` to one of torch's backends; the result raises if the backend has no kernel for the call."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def chosen(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            return attend(q, k, v, mask)

    return chosen


def apart(attend: Attend) -> Attend:
    """Return attention with a call for each sequence, as engines do on a processor: contexts of unequal length are not
    padded, and launches cost nothing."""

    def one_by_one(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return torch.cat([attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], mask) for i in range(len(q))])

    return one_by_one


class Spans(NamedTuple):
    """Places of the queries of each sequence among all queries of a call, and of its context in a cache."""

    ends: Tensor
    """int32 (n + 1): queries of sequence i are those from `ends[i]` to `ends[i + 1]`."""
    starts: Tensor
    """int32 (n + 1): tokens at which contexts begin; the last is not used."""
    lengths: Tensor
    """int32 (n): tokens of contexts, those of the queries included."""
    most: int
    """Most queries of a sequence, or more."""
    longest: int
    """Tokens of the longest context, or more."""


def varlen(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """Return the attention (queries, heads, d) of sequences of different length, none of them padded.

    Queries are (queries, heads, d), keys and values (tokens, kv_heads, d); the last query of a sequence sees its whole
    context. This is FlashAttention: on a GPU, in 16 bits.
    """
    causal = spans.most > 1
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, spans.ends, spans.starts, spans.most, spans.longest, 0.0, causal, False, seqused_k=spans.lengths
    )[0]
    return attended


def varlen_evenly(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Attention by `varlen` of one query to contexts of one length each; without a copy if keys and values are stored
    token by token."""
    batch, context = len(q), k.shape[2]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=q.device)
    flat_k, flat_v = (part.transpose(1, 2).flatten(0, 1) for part in (k, v))
    return varlen(q.squeeze(2), flat_k, flat_v, Spans(ends, ends * context, lengths, 1, context)).unsqueeze(2)


def keep(cache: Tensor, rows: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
    """Write keys and values (m, hk, d) of some tokens into a cache (2, rows, hk, positions, d)."""
    cache[0][rows, :, positions] = k
    cache[1][rows, :, positions] = v


_FUSED = {
    f"{name}.{backend.split('_')[0].lower()}": _within(attend, backend)
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
    for name, attend in (("sdpa", sdpa), ("sdpa_grouped", sdpa_grouped))
}
ATTENTION: dict[str, Attend] = {
    "sdpa": sdpa,
    "sdpa_grouped": sdpa_grouped,
    "matmul": matmul,
    "varlen": varlen_evenly,
    **_FUSED,
}
CANDIDATES: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        "prefill_attention": ("sdpa",),
        "decode_attention": ("sdpa", "sdpa_grouped", "matmul"),
        "tree_attention": ("sdpa_grouped", "matmul"),
    },
    "cuda": {
        "prefill_attention": ("sdpa", "sdpa.flash", "sdpa.cudnn"),
        "decode_attention": ("varlen", "sdpa.flash", "sdpa_grouped.flash", "sdpa_grouped.cudnn", "matmul"),
        "tree_attention": ("sdpa_grouped", "sdpa_grouped.efficient", "matmul"),
    },
}
"""Kernels of attention worth trying, by kind of device."""


def sees(tokens: int, context: int, window: int, device: torch.device) -> Any:
    """Return the mask of the last `tokens` of `context` tokens, each of which sees the latest `window` up to itself."""
    if tokens == 1 and window >= context:
        return None
    if tokens == context and window >= context:
        return "causal"
    if device.type == "cuda" and window >= context:
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(tokens, context)
    mask = torch.ones(tokens, context, dtype=torch.bool, device=device).tril(context - tokens)
    return mask if window >= context else mask.triu(context - tokens - window + 1)


def tree_mask(width: int, context: int, device: torch.device) -> Tensor:
    """Mask of a binary tree of `width` drafted tokens behind the context: each sees the context and its ancestors."""
    mask = torch.ones(width, context, dtype=torch.bool, device=device)
    mask[:, context - width :] = False
    for node in range(width):
        ancestor = node
        while ancestor >= 0:
            mask[node, context - width + ancestor] = True
            ancestor = (ancestor + 1) // 2 - 1
    return mask


# --- small operations -------------------------------------------------------------------------------------


def norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Add to the residual in place, and return its norm."""
    return F.rms_norm(residual.add_(x), weight.shape, weight, 1e-5)


def activation(gate_up: Tensor) -> Tensor:
    """Return SiLU of the first half of (rows, 2 width), times the second."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotated heads: x (m, heads, d), cos and sin (m, 1, d / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def sample(logits: Tensor) -> Tensor:
    """Return a token for each row: cast, temperature, softmax and draw."""
    return torch.multinomial(torch.softmax(logits.float() / 0.8, -1), 1)


# --- calls ------------------------------------------------------------------------------------------------


def calls(task: MeasurementTask, operands: Operands, attend: Attend | None) -> list[Call]:
    """Return calls of this shape with different operands: enough of them to evict each other from caches."""
    return _CALLS[task.kind](task, operands, attend)


def _gemm(task: MeasurementTask, operands: Operands, attend: Attend | None) -> list[Call]:
    m, n, k = _sizes(task)
    x = operands.fresh((m, k), task.dtype)
    return [partial(linear, x, weight) for weight in operands.rotating((n, k), task.dtype)]


def _quantise(task: MeasurementTask, operands: Operands, attend: Attend | None) -> list[Call]:
    x = operands.fresh(_sizes(task), "bf16")
    return [partial(quantise, x, DTYPES[task.dtype])]


def _prefill(task: MeasurementTask, operands: Operands, attend: Attend | None) -> list[Call]:
    b, tokens, context, h, hk, d, window = _sizes(task)
    assert attend is not None
    q, mask = operands.fresh((b, h, tokens, d), task.dtype), sees(tokens, context, window, operands.device)
    return [partial(attend, q, k, v, mask) for k, v in operands.rotating((2, b, hk, context, d), task.dtype)]


def _decode(task: MeasurementTask, operands: Operands, attend: Attend | None) -> list[Call]:
    b, context, h, hk, d, window = _sizes(task)
    assert attend is not None
    q, context_seen = operands.fresh((b, h, 1, d), task.dtype), min(window, context)
    if task.variant == "paged":
        return _paged(q, operands, attend, (b, context_seen, hk, d), task)
    if attend is varlen_evenly:
        tokens = operands.rotating((2, b, context_seen, hk, d), task.dtype)
        return [partial(attend, q, k.transpose(1, 2), v.transpose(1, 2), None) for k, v in tokens]
    return [partial(attend, q, k, v, None) for k, v in operands.rotating((2, b, hk, context_seen, d), task.dtype)]


def imbalanced_decodes(
    task: MeasurementTask, operands: Operands, attend: Attend | None = None, *, evenly: bool = False
) -> list[Call]:
    """Return decodes by `varlen` of contexts of the task's mean, one of them the longest; `evenly`, all of the mean."""
    b, context, longest, h, hk, d = _sizes(task)
    fewer = (b * context - longest) // max(1, b - 1)
    lengths = [context] * b if evenly else [longest, *[max(1, fewer)] * (b - 1)]
    ends = torch.arange(b + 1, dtype=torch.int32, device=operands.device)
    spans = Spans(ends, ends * longest, torch.tensor(lengths, dtype=torch.int32, device=operands.device), 1, longest)
    q = operands.fresh((b, h, d), task.dtype)
    caches = operands.rotating((2, b * longest, hk, d), task.dtype)
    return [partial(varlen, q, k, v, spans) for k, v in caches]


def _paged(
    q: Tensor, operands: Operands, attend: Attend, shape: tuple[int, int, int, int], task: MeasurementTask
) -> list[Call]:
    """Return calls that gather pages in random order first: an upper bound, since torch lacks a paged kernel."""
    b, context, hk, d = shape
    pages = -(-context // PAGE)
    pool = operands.whole((2, -1, PAGE, hk, d), task.dtype, b * pages)
    order = torch.randperm(pool.shape[1], device=operands.device)

    def call(chosen: Tensor) -> Tensor:
        k, v = (part.index_select(0, chosen).view(b, pages * PAGE, hk, d)[:, :context].transpose(1, 2) for part in pool)
        return attend(q, k, v, None)

    usable = len(order) // (b * pages) * b * pages
    return [partial(call, chosen) for chosen in order[:usable].split(b * pages)[:64]]


def _tree(task: MeasurementTask, operands: Operands, attend: Attend | None) -> list[Call]:
    b, width, context, h, hk, d, _ = _sizes(task)
    assert attend is not None
    q, mask = operands.fresh((b, h, width, d), task.dtype), tree_mask(width, context, operands.device)
    return [partial(attend, q, k, v, mask) for k, v in operands.rotating((2, b, hk, context, d), task.dtype)]


def _moe(task: MeasurementTask, operands: Operands, attend: Attend | None) -> list[Call]:
    from simtune.costs.operators.moe import visit_probabilities

    tokens, hidden, width, per_token, experts = _sizes(task)[:5]
    x = operands.fresh((tokens, hidden), task.dtype)
    likely = torch.tensor(visit_probabilities(experts, per_token, float(task.shape["skew"])), dtype=torch.float32)
    weights = operands.whole((3 * experts * width * hidden,), task.dtype)
    gate_up = weights[: 2 * experts * width * hidden].view(experts, 2 * width, hidden)
    down = weights[2 * experts * width * hidden :].view(experts, hidden, width)
    routed = [torch.multinomial(likely.expand(tokens, -1), per_token).to(operands.device) for _ in range(5)]
    return [partial(moe, x, chosen, gate_up, down) for chosen in routed]


def _elementwise(task: MeasurementTask, operands: Operands, attend: Attend | None) -> list[Call]:
    rows, width = _sizes(task)
    if task.variant == "norm":
        x, weight = operands.fresh((rows, width // 4), task.dtype), operands.fresh((width // 4,), task.dtype)
        residual = operands.fresh((rows, width // 4), task.dtype)
        return [partial(norm, x, residual, weight)]
    if task.variant == "rope":
        d = 128 if width % 256 == 0 else 64
        heads = operands.fresh((rows, width // 2 // d, d), task.dtype)
        cos, sin = (operands.fresh((rows, 1, d // 2), task.dtype) for _ in range(2))
        return [partial(rope, heads, cos, sin)]
    if task.variant in _IN_ENGINES:
        return _IN_ENGINES[task.variant](rows, width, operands, task.dtype)
    if task.variant == "activation":
        gate_up = operands.fresh((rows, 2 * width // 3), task.dtype)
        return [partial(activation, gate_up)]
    a, b = (operands.fresh((rows, width // 3), task.dtype) for _ in range(2))
    return [partial(torch.add, a, b)]


def _kv_writes(rows: int, width: int, operands: Operands, dtype: str) -> list[Call]:
    """Return the writing of keys and values, `width` values read or written for each row, to caches by turns."""
    d = 128 if width % 512 == 0 else 64
    heads = width // 4 // d
    seats = torch.arange(rows, device=operands.device)
    at = torch.zeros_like(seats)
    k, v = (operands.fresh((rows, heads, d), dtype) for _ in range(2))
    # stored token by token, as engines on GPUs store them
    caches = operands.rotating((2, rows, PAGE, heads, d), dtype)
    return [partial(keep, cache.transpose(2, 3), seats, at, k, v) for cache in caches]


def _embeddings(rows: int, width: int, operands: Operands, dtype: str) -> list[Call]:
    """Return the lookup of embeddings and angles, with an empty residual; a row of width / 3 values is read."""
    table, angles = operands.fresh((1 << 15, width // 3), dtype), operands.fresh((1 << 12, 1, 64), dtype)
    ids = torch.randint(1 << 15, (rows,), device=operands.device)
    positions = ids % (1 << 12)

    def call() -> None:
        torch.zeros_like(table[ids])
        _ = angles[positions], angles[positions]

    return [call]


_IN_ENGINES = {"kv_write": _kv_writes, "embedding": _embeddings}
"""Small operations of an engine's step that are kernels on a device apart; on a processor they count as host work."""


def _sampling(task: MeasurementTask, operands: Operands, attend: Attend | None) -> list[Call]:
    logits = operands.fresh(_sizes(task), task.dtype)
    return [partial(sample, logits)]


def _copy(task: MeasurementTask, operands: Operands, attend: Attend | None) -> list[Call]:
    (size,) = _sizes(task)
    on_device = operands.rotating((size // 4,), "fp32")
    if task.variant == "in_memory":
        target = torch.empty_like(on_device[0])
        return [partial(target.copy_, source) for source in on_device]
    on_host = torch.empty(size // 4, pin_memory=True)
    if task.variant == "to_device":
        return [partial(target.copy_, on_host, non_blocking=True) for target in on_device]
    return [partial(on_host.copy_, source, non_blocking=True) for source in on_device]


def _host(task: MeasurementTask, operands: Operands, attend: Attend | None) -> list[Call]:
    """Return the work of a plain engine between two steps: lists to tensors, a page a sequence, tokens to lists."""
    (n,) = _sizes(task)
    lengths, pages = [1000 + i for i in range(n)], [list(range(64)) for _ in range(n)]
    out = torch.zeros(n, 1, dtype=torch.long, device=operands.device)

    def call() -> None:
        tokens: Sequence[int] = out.flatten().tolist()
        for i in range(n):
            lengths[i] += 1
            pages[i][-1] = lengths[i] // PAGE
        for values in (tokens, lengths, [length - 1 for length in lengths], pages):
            torch.tensor(values).to(operands.device, non_blocking=True)

    return [call]


def around_step(rows: int, hidden: int, operands: Operands, dtype: str) -> Call:
    """Return the work around the layers of a step of `rows` decodes that is no kernel: an engine looks up embeddings
    and angles, and picks the rows to sample."""
    table, angles = operands.fresh((1024, hidden), dtype), operands.fresh((1024, 1, 64), dtype)
    chosen = list(range(rows))

    def call() -> None:
        ids = torch.tensor(chosen, device=operands.device)
        x = table[ids]
        torch.zeros_like(x)
        _ = angles[ids], angles[ids]
        _ = x[chosen]

    return call


def around_layer(rows: int, heads: int, kv_heads: int, head_dim: int, operands: Operands, dtype: str) -> Call:
    """Return the same work within a layer: writing keys and values to the cache."""
    cache = operands.fresh((2, rows, kv_heads, PAGE, head_dim), dtype)
    projected = operands.fresh((rows, heads + 2 * kv_heads, head_dim), dtype)
    seats = torch.arange(rows, device=operands.device)
    positions = torch.zeros(rows, dtype=torch.long, device=operands.device)
    return partial(
        keep, cache, seats, positions, projected[:, heads : heads + kv_heads], projected[:, heads + kv_heads :]
    )


def _sizes(task: MeasurementTask) -> tuple[int, ...]:
    """Return the task's shape, in the order in which its kind names it."""
    return tuple(round(task.shape[name]) for name in SHAPES[task.kind])


_CALLS: dict[str, Callable[[MeasurementTask, Operands, Attend | None], list[Call]]] = {
    "gemm": _gemm,
    "quantise": _quantise,
    "prefill_attention": _prefill,
    "decode_attention": _decode,
    "decode_imbalance": imbalanced_decodes,
    "tree_attention": _tree,
    "moe": _moe,
    "elementwise": _elementwise,
    "sampling": _sampling,
    "copy": _copy,
    "host": _host,
}
