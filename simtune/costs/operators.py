"""Operators: which shapes describe a call, and how much work the shape implies.

Each operator kind turns shapes into three numbers, the terms of the fitted time
(`simtune.specs.hardware.BaseFit`): flops, bytes moved to and from memory (or over the link), and `blocks`,
the serial units whose fixed cost a roofline does not see. All in SI units, on numpy arrays of equal length.
The formulas are those of section 3 of the cost-model study on H200, A100 and H100 tables; a new kind is a
class here and a line in `OPERATORS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.specs.base import DTYPE_BYTES
from simtune.specs.hardware import OperatorKind

Array = NDArray[np.float64]
Shape = Mapping[str, Array]


class Terms(NamedTuple):
    """Work of calls: flops, bytes, and serial blocks, one number per call."""

    flops: Array
    bytes: Array
    blocks: Array


@dataclass(frozen=True, slots=True)
class Setting:
    """What besides its shape decides the work of a call."""

    processors: int
    dtype_bytes: float
    kv_bytes: float

    @classmethod
    def of(cls, processors: int, dtype: str, kv_dtype: str | None) -> Setting:
        return cls(processors, DTYPE_BYTES[dtype], DTYPE_BYTES[kv_dtype or dtype])


class OperatorTerms(ABC):
    """One operator kind: its shape parameters, its terms, and where the fit starts from."""

    shape: ClassVar[tuple[str, ...]]
    block_s: ClassVar[float]  # prior of the time per block
    overlap: ClassVar[float]  # prior of overlap_p - 1

    @abstractmethod
    def terms(self, x: Shape, setting: Setting) -> Terms:
        """The work of calls of shapes `x`, one array per name in `shape`."""


def _ceil_div(a: Array, b: Array | float) -> Array:
    return np.ceil(a / b)


class Gemm(OperatorTerms):
    """(m, k) times (k, n). A block is a walk along k that nothing hides.

    With fewer tiles of 128 x 128 outputs than a quarter of the processors, a tile walks along k alone, and
    kernels split a long k over idle processors only at the price of a second pass: time grows with k up to
    about 3,072 and then stays. Counting waves of tiles instead, as for attention, gets a fitted cost of next
    to nothing; this term takes the p90 error on held-back rows from 28 to 14 % on the H100 table whose
    residuals suggested it. On three tables that had no say in it, it changes nothing much, a p90 of 19.5, 13.3
    and 14.3 % becoming 19.2, 13.2 and 13.7 %: benchmarks/costs/test_gemm_form.py.
    """

    shape = ("m", "n", "k")
    block_s = 1e-6
    overlap = 2.0

    def terms(self, x: Shape, setting: Setting) -> Terms:
        m, n, k = x["m"], x["n"], x["k"]
        out_bytes = max(2.0, setting.dtype_bytes)  # 8-bit inputs are accumulated and written as 16 bit
        tiles = _ceil_div(m, 128) * _ceil_div(n, 128)
        idle = np.maximum(0, 1 - 4 * tiles / setting.processors)
        return Terms(
            2 * m * n * k,
            setting.dtype_bytes * (m * k + n * k) + out_bytes * m * n,
            np.minimum(1, k / 3072) * idle,
        )


class PrefillAttention(OperatorTerms):
    """Causal attention of `batch` prompts of `tokens` tokens each, none of them cached.

    `window` is how many of the latest tokens a query sees; window >= tokens is full attention. A block is
    128 query rows of one KV head, per processor.
    """

    shape = ("batch", "tokens", "heads", "kv_heads", "head_dim", "window")
    block_s = 1e-6
    overlap = 0.5

    def terms(self, x: Shape, setting: Setting) -> Terms:
        b, s, h, hk, d = x["batch"], x["tokens"], x["heads"], x["kv_heads"], x["head_dim"]
        w = np.minimum(x["window"], s)
        pairs = w * (w + 1) / 2 + (s - w) * w
        return Terms(
            4 * b * h * d * pairs,
            2 * b * s * d * (setting.dtype_bytes * h + setting.kv_bytes * hk),
            b * hk * _ceil_div(s * (h / hk), 128) * (d / 128) / setting.processors,
        )


class DecodeAttention(OperatorTerms):
    """One new token for each of `batch` sequences whose KV is `context` tokens long, itself included.

    A block is one more wave of (sequence, KV head) pairs than the first: each costs microseconds however
    short.
    """

    shape = ("batch", "context", "heads", "kv_heads", "head_dim", "window")
    block_s = 3e-6
    overlap = 2.0

    def terms(self, x: Shape, setting: Setting) -> Terms:
        b, h, hk, d = x["batch"], x["heads"], x["kv_heads"], x["head_dim"]
        w = np.minimum(x["window"], x["context"])
        return Terms(
            4 * b * h * d * w,
            2 * setting.kv_bytes * b * hk * w * d + 2 * setting.dtype_bytes * b * h * d,
            _ceil_div(b * hk, setting.processors) - 1,
        )


class Moe(OperatorTerms):
    """`tokens` tokens through `experts_per_token` of `experts` gated experts, fused, balanced routing.

    `intermediate` is the width on one rank; `ep` ranks share the experts among them. Each token's experts
    are taken as drawn at random, so experts (1 - (1 - k / experts)^tokens) of them are read from memory.
    """

    shape = ("tokens", "hidden", "intermediate", "experts_per_token", "experts", "ep")
    block_s = 1e-6
    overlap = 0.5

    def terms(self, x: Shape, setting: Setting) -> Terms:
        m, hidden, inter, k, e, ep = (x[name] for name in self.shape)
        local = e / ep
        hit = e * (1 - (1 - k / e) ** m) / ep
        active = np.minimum(np.maximum(hit, np.minimum(1, local)), local)
        rows = m * k / ep
        matrices = 3 * hidden * inter
        activation_bytes = 2.0
        return Terms(
            2 * rows * matrices,
            setting.dtype_bytes * active * matrices
            + activation_bytes * (rows * (2 * hidden + 3 * inter) + 2 * m * hidden),
            np.maximum(active, rows / 64) * (2 * inter + hidden) / 128 / setting.processors,
        )


class Elementwise(OperatorTerms):
    """Norms, activations, rotary embedding, addition: `rows` tokens, `width` elements read or written each.

    A block is one row; its own cost beyond the bytes is a fraction of a nanosecond.
    """

    shape = ("rows", "width")
    block_s = 1e-10
    overlap = 2.0

    def terms(self, x: Shape, setting: Setting) -> Terms:
        rows, width = x["rows"], x["width"]
        return Terms(np.zeros_like(rows), setting.dtype_bytes * rows * width, rows)


class AllReduce(OperatorTerms):
    """Sum of `bytes` bytes over `devices` devices, moving the bytes of a ring. A block is one further
    device.
    """

    shape = ("devices", "bytes")
    block_s = 1e-6
    overlap = 0.5

    def terms(self, x: Shape, setting: Setting) -> Terms:
        n, size = x["devices"], x["bytes"]
        return Terms(np.zeros_like(size), 2 * (n - 1) / n * size, n - 1)


OPERATORS: dict[OperatorKind, OperatorTerms] = {
    "gemm": Gemm(),
    "prefill_attention": PrefillAttention(),
    "decode_attention": DecodeAttention(),
    "moe": Moe(),
    "elementwise": Elementwise(),
    "all_reduce": AllReduce(),
}


def operator_key(kind: str, dtype: str, kv_dtype: str | None = None, variant: str | None = None) -> str:
    """Its name in a hardware profile: gemm.bf16, decode_attention.bf16.kv-fp8, elementwise.norm.bf16."""
    parts = [kind] if variant is None else [kind, variant]
    parts.append(dtype)
    if kv_dtype is not None and kv_dtype != dtype:
        parts.append(f"kv-{kv_dtype}")
    return ".".join(parts)
