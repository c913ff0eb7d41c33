"""Softmax attention: prefill, decode and verification of drafts; with grouped heads, and latent (MLA)."""

from __future__ import annotations

import numpy as np

from simtune.arrays import Array, Mask
from simtune.costs.operators.base import OperatorForm, Setting, Shape, Terms, ceil_div
from simtune.costs.operators.splits import RANDOM, above

_EXPONENTIAL = 64
"""Flops that one exponential of the softmax takes as long as, over the 4 of a query, a key and one of head_dim.

An H100 does 4,096 dense 16-bit flops a cycle and multiprocessor, and 16 exponentials (FlashAttention 3,
arXiv:2407.08608): 256 = 4 x 64. Its tables of heads of 64 and 128 say 67. An A100 would be at 32; it is taken for all
GPUs, for tables of others have heads of 128 only, which do not tell.
"""

_HALF_TILE = 64
"""Of 128 keys: what a query computes past its own position, on average, since the diagonal is computed in tiles."""


def _beyond_products(setting: Setting) -> tuple[int, int]:
    """(what the softmax adds to head_dim, keys that a query computes but masks). None on a CPU: points measured on one
    are predicted better without.
    """
    return (_EXPONENTIAL, _HALF_TILE) if setting.processors > 1 else (0, 0)


class _GroupedHeads(OperatorForm):
    """Attention of `heads` query heads that share `kv_heads` KV heads, over the last `window` tokens."""

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        logs = {name: np.log2(x[name]) for name in x if name not in ("kv_heads", "window")}
        logs["group"] = np.log2(x["heads"] / x["kv_heads"])
        logs["window"] = np.log2(np.minimum(x["window"], x["context"]) / x["context"])
        return logs


_LARGER_BATCHES_AND_CONTEXTS = (RANDOM, above("batch", 64, "batch"), above("context", 8192, "context"))
_LONGER_PROMPTS = (RANDOM, above("tokens", 4096, "tokens"))


class PrefillAttention(_GroupedHeads):
    """Causal attention of the last `tokens` of `context` tokens in each of `batch` sequences.

    context == tokens is a whole prompt; context > tokens is a chunk whose past is cached. `window` is how many
    of the latest tokens a query sees; window >= context is full attention. On a GPU flops are those of whole tiles,
    with the exponentials of the softmax, which occupy the processors as long as the products of another 64 of head_dim.
    A block is 128 query rows of one KV head, per processor; it costs the same whatever head_dim.
    """

    shape = ("batch", "tokens", "context", "heads", "kv_heads", "head_dim", "window")
    overhead_s = 12e-6
    block_s = 1e-6
    overlap = 0.5
    splits = _LONGER_PROMPTS

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Flops of the pairs that are computed; queries, outputs, and the KV that they see; tiles of 128 rows."""
        b, s, c, h, hk, d = (x[name] for name in self.shape[:-1])
        pairs = _pairs(c, x["window"]) - _pairs(c - s, x["window"])
        read = np.minimum(c, s + x["window"])
        softmax, masked = _beyond_products(setting)
        return Terms(
            4 * b * h * (d + softmax) * (pairs + masked * s),
            2 * b * d * (setting.dtype_bytes * h * s + setting.kv_bytes * hk * read),
            b * hk * ceil_div(s * (h / hk), 128) / setting.processors,
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """The context over the tokens, and on a GPU how many tiles there are to share out."""
        logs = super().features(x, setting)
        logs["context"] -= logs["tokens"]  # zero for whole prompts
        if setting.processors > 1:
            tiles = np.ceil(x["tokens"] * x["heads"] / x["kv_heads"] / 128)
            logs["tiles"] = np.log2(x["batch"] * x["kv_heads"] * tiles)
        return logs


def _pairs(tokens: Array, window: Array) -> Array:
    """Pairs of a query and a key it sees among the first so many tokens."""
    w = np.minimum(window, tokens)
    pairs: Array = w * (w + 1) / 2 + (tokens - w) * w
    return pairs


_START = 64
"""Keys, about, that a block of decode attention reads while it starts, and so for nothing: kernels read them in tiles
of 64 to 128. Of none, 32 and 64 this says best, on tables of four GPUs, what takes larger batches than were trained on;
longer contexts than were trained on, on the two of them with GDDR memory, none says best."""


def _waited_for(keys: Array, setting: Setting) -> Array:
    """Of so many keys per sequence, those whose reading takes time: all but `_START` of many, on a GPU."""
    return keys * keys / (keys + _START) if setting.processors > 1 else keys


class DecodeAttention(_GroupedHeads):
    """One new token for each of `batch` sequences whose KV is `context` tokens long, itself included.

    A block is one more wave of (sequence, KV head) pairs than the first: each costs microseconds however
    short, and about as many on all GPUs: 3.7 on A100 tables, 4.9 on RTX 4090 ones, 4.1 on RTX PRO 6000 ones. Small
    batches alone, which are one wave, tell nothing of it.
    """

    shape = ("batch", "context", "heads", "kv_heads", "head_dim", "window")
    overhead_s = 11e-6
    block_s = 4e-6
    block_log_sd = 0.3
    overlap = 2.0
    splits = _LARGER_BATCHES_AND_CONTEXTS

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Four flops a query, key and value of head_dim; the KV that is waited for, queries and outputs; waves."""
        b, h, hk, d = x["batch"], x["heads"], x["kv_heads"], x["head_dim"]
        w = np.minimum(x["window"], x["context"])
        return Terms(
            4 * b * h * d * w,
            2 * setting.kv_bytes * b * hk * _waited_for(w, setting) * d + 2 * setting.dtype_bytes * b * h * d,
            ceil_div(b * hk, setting.processors) - 1,
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Whether a window cuts the context and, on a GPU, the keys of all sequences and KV heads."""
        logs = super().features(x, setting)
        logs["windowed"] = np.where(x["window"] < x["context"], 1.0, 0.0)  # another kernel
        if setting.processors > 1:  # a GPU splits them as they fill it
            logs["keys"] = np.log2(x["batch"] * x["kv_heads"] * np.minimum(x["window"], x["context"]))
        return logs

    def imbalanced(self, mixed: Mask, blocks: Array, processors: int) -> Mask:
        """Those without a chunk that kernels do not split along the context: splitting balances the load."""
        return ~mixed & unsplit(blocks, processors)


def unsplit(blocks: Array | float, processors: int) -> Mask:
    """Whether decode attention over so many pairs of a sequence and a KV head leaves each context in one piece.

    FlashAttention 2 splits contexts while the pairs are fewer than 0.8 of two for every processor; so do the tables of
    two devices (188 and 128 processors), in which unequal contexts cost something above that and nothing below.
    """
    return np.asarray(blocks >= 0.8 * 2 * processors)


class MixedAttention(_GroupedHeads):
    """What `batch` decodes over `context` tokens each add to the kernel of a prefill chunk of `tokens` tokens.

    FlashAttention 2, which vLLM runs on devices other than sm_90 and sm_100, gives every row of a step the shape of the
    longest: a decode's heads no longer share the KV they read (their sharing is found again in the cache, as far as it
    reaches), and a tile of queries is laid out for each of the chunk's, though all but one are empty. A block is 128
    query rows of one head, per processor.
    """

    shape = ("batch", "tokens", "context", "heads", "kv_heads", "head_dim", "window")
    overhead_s = 5e-6
    block_s = 1e-6
    overlap = 2.0

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """As decode attention, but each query head reads the KV on its own; tiles as tall as the chunk."""
        b, s, h, d = x["batch"], x["tokens"], x["heads"], x["head_dim"]
        w = np.minimum(x["window"], x["context"])
        return Terms(
            4 * b * h * d * w,
            2 * setting.kv_bytes * b * h * w * d + 2 * setting.dtype_bytes * b * h * d,
            b * h * ceil_div(s, 128) * (d / 128) / setting.processors,
        )

    def imbalanced(self, mixed: Mask, blocks: Array, processors: int) -> Mask:
        """Those with a chunk, in whose kernel no context is split."""
        return mixed


class TreeAttention(_GroupedHeads):
    """`width` query tokens for each of `batch` sequences, all against the same `context` tokens of KV.

    This is how a draft is verified: the KV is read once however wide the draft, and the flops grow with it, so
    that the intensity is about width x heads / kv_heads flops a byte of 16-bit KV. `context` includes the
    draft itself; which of its own tokens a draft token sees (a chain or a tree) is too little to count. With
    width 1 it is decode attention. A block is one more wave of tiles of 128 query rows of one KV head.
    """

    shape = ("batch", "width", "context", "heads", "kv_heads", "head_dim", "window")
    overhead_s = 11e-6
    block_s = 4e-6
    overlap = 2.0

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """As decode attention with `width` queries a sequence against one reading of the KV."""
        b, q, h, hk, d = x["batch"], x["width"], x["heads"], x["kv_heads"], x["head_dim"]
        w = np.minimum(x["window"], x["context"])
        tiles = ceil_div(q * (h / hk), 128)
        return Terms(
            4 * b * q * h * d * w,
            2 * setting.kv_bytes * b * hk * _waited_for(w, setting) * d + 2 * setting.dtype_bytes * b * q * h * d,
            ceil_div(b * hk * tiles, setting.processors) - 1,
        )


class MlaPrefill(OperatorForm):
    """Latent attention over whole prompts, its keys and values spelled out for every head (192 and 128 wide in
    DeepSeek V2 and V3). Flops and blocks count as in `PrefillAttention`.
    """

    shape = ("batch", "tokens", "heads", "qk_dim", "v_dim")
    overhead_s = 12e-6
    block_s = 1e-6
    overlap = 0.5
    splits = _LONGER_PROMPTS

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Scores over qk_dim and sums over v_dim; queries, keys, values and outputs spelled out; tiles."""
        b, s, h, qk, v = (x[name] for name in self.shape)
        softmax, masked = _beyond_products(setting)
        return Terms(
            2 * b * h * (qk + v + 2 * softmax) * (s * (s + 1) / 2 + masked * s),
            2 * setting.dtype_bytes * b * s * h * (qk + v),
            b * h * ceil_div(s, 128) / setting.processors,
        )


class MlaDecode(OperatorForm):
    """Latent attention of one new token for each of `batch` sequences, absorbed: every head reads the same
    cache of `latent` + `rope` values a token (512 + 64), scores it in full and sums its `latent` part.

    The cache is not split over tensor-parallel ranks: `heads` is what one rank has, the bytes are the same on
    each. A block is one more wave of (sequence, 64 heads) pairs than the first.
    """

    shape = ("batch", "context", "heads", "latent", "rope")
    overhead_s = 11e-6
    block_s = 3e-6
    overlap = 2.0
    splits = _LARGER_BATCHES_AND_CONTEXTS

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Every head scores and sums the latents, which are read once; waves of 64 heads."""
        b, s, h, latent, rope = (x[name] for name in self.shape)
        cached, touched = latent + rope, 2 * latent + rope
        return Terms(
            2 * b * h * s * touched,
            setting.kv_bytes * b * s * cached + setting.dtype_bytes * b * h * touched,
            ceil_div(b * ceil_div(h, 64), setting.processors) - 1,
        )
