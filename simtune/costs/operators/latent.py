"""Latent attention (MLA, DeepSeek V2 and V3): its kernels alone, its whole blocks, and sparse attention (DSA) on it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from simtune.arrays import Array, Mask
from simtune.costs.operators.attention import (
    LARGER_BATCHES_AND_CONTEXTS,
    LONGER_PROMPTS,
    beyond_products,
    seen_pairs,
)
from simtune.costs.operators.base import OperatorForm, Setting, Shape, Terms, ceil_div


class MlaPrefill(OperatorForm):
    """Latent attention over whole prompts, with keys and values expanded for every head (192 and 128 wide in
    DeepSeek V2 and V3). Flops and blocks count as in `PrefillAttention`.
    """

    shape = ("batch", "tokens", "heads", "qk_dim", "v_dim")
    overhead_s = 12e-6
    block_s = 1e-6
    overlap = 0.5
    splits = LONGER_PROMPTS

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Scores over qk_dim and sums over v_dim; queries, keys, values and outputs, expanded; tiles."""
        b, s, h, qk, v = (x[name] for name in self.shape)
        softmax, masked = beyond_products(setting)
        return Terms(
            2 * b * h * (qk + v + 2 * softmax) * (s * (s + 1) / 2 + masked * s),
            2 * setting.dtype_bytes * b * s * h * (qk + v),
            b * h * ceil_div(s, 128) / setting.processors,
        )


class MlaDecode(OperatorForm):
    """Latent attention of one new token for each of `batch` sequences, absorbed: every head reads the same
    cache of `latent` + `rope` values a token (512 + 64), scores it in full and sums its `latent` part.

    The cache is not split over tensor-parallel ranks: `heads` are those of one rank, the bytes are the same on
    each. A block is one more wave of (sequence, 64 heads) pairs than the first.
    """

    shape = ("batch", "context", "heads", "latent", "rope")
    overhead_s = 11e-6
    block_s = 3e-6
    overlap = 2.0
    splits = LARGER_BATCHES_AND_CONTEXTS

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Every head scores and sums the latents, which are read once; waves of 64 heads."""
        b, s, h, latent, rope = (x[name] for name in self.shape)
        cached, touched = latent + rope, 2 * latent + rope
        return Terms(
            2 * b * h * s * touched,
            setting.kv_bytes * b * s * cached + setting.dtype_bytes * b * h * touched,
            ceil_div(b * ceil_div(h, 64), setting.processors) - 1,
        )


class LatentProducts(OperatorForm):
    """Products that absorb the expansion of keys or values into queries or outputs: for each of `heads` heads `tokens`
    rows of k values times its own matrix, k by n. A block is a tile of 128 by 128, per processor.
    """

    shape = ("tokens", "heads", "n", "k")
    overhead_s = 4e-6
    block_s = 1e-6
    overlap = 0.5

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """A matrix product for each head."""
        m, h, n, k = (x[name] for name in self.shape)
        return Terms(
            2 * m * h * n * k,
            h * (setting.activation_bytes * m * k + setting.dtype_bytes * n * k + setting.out_bytes * m * n),
            h * ceil_div(m, 128) * ceil_div(n, 128) / setting.processors,
        )


_SIZES = ("heads", "hidden", "q_rank", "latent", "rope", "nope", "v_dim")
"""Sizes of a block: the heads of one rank, the widths that are the same on all ranks, and the width of a head's keys,
without and with a position, and of its values."""
_INDEX = ("index_heads", "index_dim", "topk")
_HEADS_AT_A_TIME = 64
"""Query heads that kernels of absorbed attention multiply at a time, even if there are fewer."""


class _LatentBlock(OperatorForm):
    """A whole attention block on one rank, from hidden states to hidden states: products into queries and latents,
    norms, rotary embedding, attention, the product back. `heads` are those of the rank; the products into the latents
    are not shared among ranks. The dtype is that of the products; attention itself is in 16 bits.
    """

    several_kernels = True
    overhead_s = 60e-6
    overlap = 0.5

    def _work(self, x: Shape, rows: Array, setting: Setting) -> Terms:
        """Return the work of the products over `rows` rows, without attention."""
        h, hidden, q, latent, rope, nope, v = (x[name] for name in _SIZES)
        weights = hidden * (q + latent + rope) + h * (q * (nope + rope) + latent * (nope + v) + v * hidden)
        passed_on = hidden + q + latent + rope + h * (2 * nope + rope + 2 * v)  # written once and read once
        flops, read = 2 * rows * weights, setting.dtype_bytes * weights + 2 * _WORD * rows * passed_on
        if "topk" in x:
            index_weights = x["index_heads"] * (q * x["index_dim"] + hidden) + _indexed(x) * hidden * x["index_dim"]
            flops, read = flops + 2 * rows * index_weights, read + setting.dtype_bytes * index_weights
        return Terms(flops, read, np.zeros_like(rows))

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Sizes, and the rows of the products."""
        logs = {name: np.log2(np.maximum(x[name], 1)) for name in self.shape}
        logs["rows"] = np.log2(x["batch"] * x.get("tokens", np.ones_like(x["batch"])))
        return logs


_WORD = 2  # bytes of an activation


def _indexed(x: Shape) -> Array:
    return np.where(x["index_heads"] > 0, 1.0, 0.0)


def _slower(setting: Setting) -> float:
    """Return the time of a product in 16 bits over that of one in the block's dtype, by their widths."""
    return float(_WORD / 2 ** np.round(np.log2(setting.dtype_bytes)))


def _padded_heads(x: Shape) -> Array:
    return _HEADS_AT_A_TIME * ceil_div(x["heads"], _HEADS_AT_A_TIME)


def _absorbs(x: Shape, setting: Setting) -> Mask:
    """True if so few tokens are taken for decodes, whose heads all read the latents, as in vLLM 0.24.

    Up to 512 tokens by FlashAttention 3, up to 128 by FlashMLA, which it leaves an 8-bit cache to, and only single
    tokens on other chips."""
    few = 1 if setting.chip.capability != 90 else 512 if setting.kv_bytes >= _WORD else 128
    return np.asarray(x["tokens"] <= few)


class MlaContextBlock(_LatentBlock):
    """Block of latent attention for the last `tokens` of `context` tokens of each of `batch` sequences, the others
    cached. Keys and values are expanded for every head, those of the past repeatedly; few tokens read the latents
    instead. A block is a tile of 128 queries of a head, per processor.
    """

    shape = ("batch", "tokens", "context", *_SIZES)
    block_s = 1e-6
    splits = LONGER_PROMPTS

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return the products, and scores and sums of the pairs that see each other, expanded or absorbed."""
        b, s, c = x["batch"], x["tokens"], x["context"]
        h, latent, rope, nope, v = (x[name] for name in ("heads", "latent", "rope", "nope", "v_dim"))
        softmax, masked = beyond_products(setting)
        past = np.maximum(c - s, 0)
        pairs = seen_pairs(c, c) - seen_pairs(past, c)
        products = self._work(x, b * s, setting)
        spelled = 2 * b * h * (nope + rope + v + 2 * softmax) * (pairs + masked * s)
        spelled = spelled + 2 * b * past * latent * h * (nope + v)
        absorbed = 2 * b * _padded_heads(x) * (2 * latent + rope) * (pairs + masked * s)
        attention = np.where(_absorbs(x, setting), absorbed, spelled)
        return Terms(
            products.flops + _slower(setting) * attention,
            products.bytes + setting.kv_bytes * b * c * (latent + rope),
            b * h * ceil_div(s, 128) / setting.processors,
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Return the context over the tokens, and 1 if the latents are read."""
        logs = super().features(x, setting)
        logs["context"] -= logs["tokens"]
        return logs | {"absorbed": np.where(_absorbs(x, setting), 1.0, 0.0)}


class MlaDecodeBlock(_LatentBlock):
    """Block of latent attention for one new token of each of `batch` sequences, absorbed, as `MlaDecode`."""

    shape = ("batch", "context", *_SIZES)
    block_s = 3e-6
    splits = LARGER_BATCHES_AND_CONTEXTS

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """The products, and every head against the latents, 64 heads at a time; waves of those."""
        b, c, latent, rope = (x[name] for name in ("batch", "context", "latent", "rope"))
        products, padded = self._work(x, b, setting), _padded_heads(x)
        return Terms(
            products.flops + _slower(setting) * 2 * b * padded * c * (2 * latent + rope),
            products.bytes + setting.kv_bytes * b * c * (latent + rope),
            ceil_div(b * padded / _HEADS_AT_A_TIME, setting.processors) - 1,
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """The tokens of all contexts."""
        return super().features(x, setting) | {"keys": np.log2(x["batch"] * x["context"])}


class DsaContextBlock(_LatentBlock):
    """Block of sparse attention on latents (DeepSeek-V3.2) for the last `tokens` of `context` tokens.

    An indexer of `index_heads` heads of `index_dim` scores all earlier tokens in 8 bits, and attention sees the `topk`
    best of them, absorbed. A layer that reuses the indices of another has no index heads: 0. A block is a query of
    64 heads, per processor.
    """

    shape = ("batch", "tokens", "context", *_SIZES, *_INDEX)
    block_s = 1e-8
    splits = LONGER_PROMPTS
    not_positive: ClassVar = {"index_heads": (0.0,)}

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """The products, the scores of all pairs, their selection, and attention to those selected."""
        b, s, c, latent, rope = (x[name] for name in ("batch", "tokens", "context", "latent", "rope"))
        products, padded = self._work(x, b * s, setting), _padded_heads(x)
        pairs = seen_pairs(c, c) - seen_pairs(c - s, c)
        chosen = seen_pairs(c, x["topk"]) - seen_pairs(c - s, x["topk"])
        # Twice as fast as in 16 bits.
        scores = x["index_heads"] * x["index_dim"] * pairs / 2
        attention = 2 * b * (padded * (2 * latent + rope) * chosen + scores)
        return Terms(
            products.flops + _slower(setting) * attention,
            products.bytes + b * (setting.kv_bytes * chosen * (latent + rope) + _SCORE_BYTES * _indexed(x) * pairs),
            b * s * padded / _HEADS_AT_A_TIME / setting.processors,
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Return the context over the tokens, and the part of it that is selected."""
        logs = super().features(x, setting)
        logs["seen"] = np.log2(np.minimum(x["context"], x["topk"]))
        logs["whole context"] = np.where(x["context"] <= x["topk"], 1.0, 0.0)
        logs["past"] = np.log2(x["context"] / x["tokens"])
        return logs


_SCORE_BYTES = 8  # of one score, which is written and read


class DsaDecodeBlock(_LatentBlock):
    """Block of sparse attention on latents for one new token of each of `batch` sequences, as `DsaContextBlock`. A
    block is one more wave of (sequence, 64 heads) pairs than the first.
    """

    shape = ("batch", "context", *_SIZES, *_INDEX)
    block_s = 3e-6
    splits = LARGER_BATCHES_AND_CONTEXTS
    not_positive: ClassVar = {"index_heads": (0.0,)}

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """The products, the scores of the context, and attention to the latents that are selected."""
        b, c, latent, rope = (x[name] for name in ("batch", "context", "latent", "rope"))
        products, padded, chosen = self._work(x, b, setting), _padded_heads(x), np.minimum(c, x["topk"])
        scores = x["index_heads"] * x["index_dim"] * c / 2
        index_bytes = _indexed(x) * (x["index_dim"] + _SCORE_BYTES) * c
        return Terms(
            products.flops + _slower(setting) * 2 * b * (padded * chosen * (2 * latent + rope) + scores),
            products.bytes + b * (setting.kv_bytes * chosen * (latent + rope) + index_bytes),
            ceil_div(b * padded / _HEADS_AT_A_TIME, setting.processors) - 1,
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Return the selected part of the context, and the tokens of all contexts."""
        logs = super().features(x, setting)
        logs["seen"] = np.log2(np.minimum(x["context"], x["topk"]))
        return logs | {"keys": np.log2(x["batch"] * x["context"])}
