"""Softmax attention to a part of the earlier tokens: a window, and the best or all of their entries.

An entry is the cached vector of `ratio` tokens (1: of every token). An indexer of `index_heads` heads scores a key of
`index_dim` values, stored in `index_bytes`, for every `pool` tokens; the best `topk` entries are attended to. Without
index heads all entries are, up to `topk`. The kinds are block-sparse attention (MSA), compressed attention (CSA and HCA
of DeepSeek V4) and latent attention with pooled indexer keys (GLM 5.3 Flash). No table was fitted: times are those of
the bytes and flops counted here, at the data sheet's rates.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from simtune.costs.operators.attention import (
    LARGER_BATCHES_AND_CONTEXTS,
    LONGER_PROMPTS,
    beyond_products,
    seen_pairs,
)
from simtune.costs.operators.base import OperatorForm, Setting, Shape, Terms, ceil_div

_PARTS = (
    *("heads", "kv_heads", "width", "cached", "window", "ratio", "topk"),
    *("index_heads", "index_dim", "index_bytes", "pool"),
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
            b * (setting.kv_bytes * hk * cached * attended + (x["index_bytes"] + _SCORE_BYTES) * scored)
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
            b * (setting.kv_bytes * hk * cached * s + _SCORE_BYTES * scored)
            + 2 * setting.dtype_bytes * b * s * h * width,
            b * h * ceil_div(s, 128) / setting.processors,
        )
