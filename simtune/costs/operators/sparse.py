"""Softmax attention to a part of the earlier tokens: a window, and the best or all of their entries.

An entry is the cached vector of `ratio` tokens (1: of every token). An indexer of `index_heads` heads scores a key of
`index_dim` values, stored in `index_bytes`, for every `pool` tokens; the best `topk` entries are attended to. Without
index heads all entries are, up to `topk`. The kinds are block-sparse attention (MSA), compressed attention (CSA and HCA
of DeepSeek V4) and latent attention with pooled indexer keys (GLM 5.3 Flash). Whole blocks are fitted on tables, in
which products are included; the variant of a block is the name of its attention. Attention alone was never measured:
its times are those of the bytes and flops counted here, at the data sheet's rates.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from simtune.arrays import Array
from simtune.costs.operators.attention import (
    LARGER_BATCHES_AND_CONTEXTS,
    LONGER_PROMPTS,
    beyond_products,
    seen_pairs,
)
from simtune.costs.operators.base import OperatorForm, Setting, Shape, Terms, ceil_div

_PARTS = (
    *("heads", "kv_heads", "width", "cached", "window", "ratio", "topk"),
    *("index_heads", "index_dim", "index_bytes", "pool", "block"),
)
"""Query and KV heads of a rank; the values a query head computes with for each entry (scores and sums), and those read
of an entry and KV head; the selection; the indexer."""
_SCORE_BYTES = 8  # of one score, which is written and read
_HEADS_AT_A_TIME = 64


class _Sparse(OperatorForm):
    overlap = 0.5
    not_positive: ClassVar = dict.fromkeys(("window", "topk", "index_heads", "index_dim", "index_bytes"), (0.0,))


class SparseDecode(_Sparse):
    """Attention of one new token for each of `batch` sequences to its window and its chosen entries.

    A block is one more wave of (sequence, KV head, 64 heads) than the first.
    """

    shape = ("batch", "context", *_PARTS)
    overhead_s = 15e-6
    block_s = 3e-6
    overlap = 2.0
    splits = LARGER_BATCHES_AND_CONTEXTS

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return the scores of all index keys, and attention to the window and the entries that are chosen."""
        b, c, h, hk, width, cached = (x[name] for name in ("batch", "context", "heads", "kv_heads", "width", "cached"))
        attended = np.minimum(c, x["window"]) + np.minimum(c / x["ratio"], x["topk"])
        scored = np.where(x["index_heads"] > 0, c / x["pool"], 0.0)
        waves = hk * ceil_div(h / hk, _HEADS_AT_A_TIME)
        return Terms(
            b * (2 * h * width * attended + 2 * x["index_heads"] * x["index_dim"] * scored),
            b * (setting.kv_bytes * hk * cached * attended + (x["index_bytes"] + _SCORE_BYTES / x["block"]) * scored)
            + setting.dtype_bytes * b * h * width,
            np.maximum(ceil_div(b * waves, setting.processors) - 1, 0),
        )


class SparsePrefill(_Sparse):
    """Attention over whole prompts of `tokens` tokens. A block is a tile of 128 queries of a head, per processor."""

    shape = ("batch", "tokens", *_PARTS)
    overhead_s = 20e-6
    block_s = 1e-6
    splits = LONGER_PROMPTS

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return the scores of all pairs, and attention of every token to its window and its chosen entries."""
        b, s, h, hk, width, cached = (x[name] for name in ("batch", "tokens", "heads", "kv_heads", "width", "cached"))
        ratio, scored = x["ratio"], np.where(x["index_heads"] > 0, s * (s + 1) / 2 / x["pool"], 0.0)
        # the number of entries grows by one every `ratio` tokens, up to topk
        chosen = seen_pairs(s, x["topk"] * ratio) / ratio
        softmax, masked = beyond_products(setting)
        pairs = seen_pairs(s, x["window"]) + chosen + masked * s
        return Terms(
            b * (2 * h * (width + 2 * softmax) * pairs + 2 * x["index_heads"] * x["index_dim"] * scored),
            b * (setting.kv_bytes * hk * cached * s + _SCORE_BYTES / x["block"] * scored)
            + 2 * setting.dtype_bytes * b * s * h * width,
            b * h * ceil_div(s, 128) / setting.processors,
        )


_WORD = 2  # bytes of an activation

_BLOCK_PARTS = (*_PARTS, "weights", "passed")
"""Parts of a whole block: also the weights of a rank, and the values per token that its products read and write."""


class _SparseBlock(_Sparse):
    """Whole block of a layer on one rank, from hidden states to hidden states, products included."""

    several_kernels = True
    overhead_s = 40e-6

    def _products(self, x: Shape, rows: Array, setting: Setting) -> tuple[Array, Array]:
        """Return flops and bytes of the products of `rows` tokens: every weight once, values in 16 bits."""
        return 2 * rows * x["weights"], setting.dtype_bytes * x["weights"] + 2 * _WORD * rows * x["passed"]

    def _scores(self, x: Shape, keys: Array) -> Array:
        """Return the flops of scoring keys, as many as take that long in 16 bits: those of 8 bits are twice as fast."""
        return x["index_heads"] * x["index_bytes"] * keys

    def _slower(self, setting: Setting) -> float:
        """Return the time of a product in 16 bits over that of one in the block's dtype, by their widths."""
        return float(_WORD / 2 ** np.round(np.log2(setting.dtype_bytes)))

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Sizes, the rows of all sequences, and the entries that a token attends to."""
        logs = {name: np.log2(np.maximum(x[name], 1)) for name in self.shape}
        entries = x["context"] / x["ratio"]
        logs["rows"] = np.log2(x["batch"] * x.get("tokens", np.ones_like(x["batch"])))
        logs["chosen"] = np.log2(np.maximum(np.minimum(entries, x["topk"]), 1))
        logs["all chosen"] = np.where(entries <= x["topk"], 1.0, 0.0)
        logs["windowed"] = np.where(x["context"] <= x["window"], 1.0, 0.0)
        return logs


class SparseDecodeBlock(_SparseBlock):
    """Whole block for one new token of each of `batch` sequences, as `SparseDecode`."""

    shape = ("batch", "context", *_BLOCK_PARTS)
    block_s = 3e-6
    overlap = 2.0
    joint: ClassVar = ("rows", "chosen", "all chosen", "keys", "windowed")
    splits = LARGER_BATCHES_AND_CONTEXTS

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return the products, the scores of all index keys, and attention to the window and the chosen entries."""
        b, c, h, hk = (x[name] for name in ("batch", "context", "heads", "kv_heads"))
        attended = np.minimum(c, x["window"]) + np.minimum(c / x["ratio"], x["topk"])
        scored = np.where(x["index_heads"] > 0, c / x["pool"], 0.0)
        flops, moved = self._products(x, b, setting)
        attention = b * (2 * h * x["width"] * attended + self._scores(x, scored))
        return Terms(
            flops + self._slower(setting) * attention,
            moved
            + b
            * (setting.kv_bytes * hk * x["cached"] * attended + (x["index_bytes"] + _SCORE_BYTES / x["block"]) * scored)
            + _WORD * b * h * x["width"],
            np.maximum(ceil_div(b * hk * ceil_div(h / hk, _HEADS_AT_A_TIME), setting.processors) - 1, 0),
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Return the tokens of all contexts as well."""
        return super().features(x, setting) | {"keys": np.log2(x["batch"] * x["context"])}


class SparseContextBlock(_SparseBlock):
    """Whole block for the last `tokens` of `context` tokens of each of `batch` sequences, the others cached. A block is
    a query of 64 heads, per processor.
    """

    shape = ("batch", "tokens", "context", *_BLOCK_PARTS)
    block_s = 1e-8
    joint: ClassVar = ("rows", "chosen", "all chosen", "context", "windowed")
    splits = LONGER_PROMPTS

    def _padded_heads(self, x: Shape) -> Array:
        """Return the heads that kernels compute: 64 at a time of those that read one vector as key and value."""
        together = _HEADS_AT_A_TIME * ceil_div(x["heads"], _HEADS_AT_A_TIME)
        return np.where(x["width"] > x["cached"], together, x["heads"])

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return the products, the scores of all pairs, and attention of every token to its window and its entries."""
        b, s, c, h, hk = (x[name] for name in ("batch", "tokens", "context", "heads", "kv_heads"))
        past = np.maximum(c - s, 0)
        scored = np.where(x["index_heads"] > 0, (seen_pairs(c, c) - seen_pairs(past, c)) / x["pool"], 0.0)
        reach = x["topk"] * x["ratio"]
        chosen = (seen_pairs(c, reach) - seen_pairs(past, reach)) / x["ratio"]
        pairs = seen_pairs(c, x["window"]) - seen_pairs(past, x["window"])
        softmax, masked = beyond_products(setting)
        attention = 2 * self._padded_heads(x) * (x["width"] + 2 * softmax) * (pairs + chosen + masked * s)
        scores = self._scores(x, scored)
        flops, moved = self._products(x, b * s, setting)
        read = setting.kv_bytes * hk * x["cached"] * (np.minimum(c, s + x["window"]) + c / x["ratio"])
        return Terms(
            flops + self._slower(setting) * b * (attention + scores),
            moved + b * (read + _SCORE_BYTES / x["block"] * scored) + 2 * _WORD * b * s * h * x["width"],
            b * s * hk * ceil_div(h / hk, _HEADS_AT_A_TIME) / setting.processors,
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Return the context over the tokens, and the pairs that are scored."""
        logs = super().features(x, setting)
        logs["context"] -= logs["tokens"]
        return logs
