"""Softmax attention with grouped heads: prefill, decode and verification of drafts.

The kernel decides how work is laid out on processors. If the architecture of a chip is known, the kernel follows from
it and from the dtype of the KV cache (`kernels_of`), as vLLM chooses; for others nothing is assumed.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np

from simtune.arrays import Array, Mask
from simtune.costs.operators.base import (
    OperatorForm,
    Setting,
    Shape,
    Terms,
    ceil_div,
    first_slowness,
    last_wave,
    slowness,
)
from simtune.costs.operators.splits import RANDOM, above

_EXPONENTIAL = 64
"""Flops that take as long as one exponential of the softmax, over the 4 of a query, a key and one of head_dim.

An H100 does 4,096 dense 16-bit flops a cycle and multiprocessor, and 16 exponentials (FlashAttention 3,
arXiv:2407.08608): 256 = 4 x 64. Its tables of heads of 64 and 128 give 67. An A100 would be at 32; 64 is taken for all
GPUs, since tables of others have heads of 128 only, which cannot tell the two apart.
"""

_TWICE_AS_FAST = frozenset({103})
"""Capabilities whose processors do twice as many exponentials a cycle: sm_103, by NVIDIA's text on Blackwell Ultra."""

_HALF_TILE = 64
"""Keys of a tile of 128 that a query computes past its own position, on average: the diagonal is computed in tiles."""


def beyond_products(setting: Setting) -> tuple[int, int]:
    """Return (size that the softmax adds to head_dim, keys that a query computes but masks).

    Both are 0 on a CPU: points measured on one are predicted better without.
    """
    if setting.processors == 1:
        return 0, 0
    return _EXPONENTIAL // (2 if setting.chip.capability in _TWICE_AS_FAST else 1), _HALF_TILE


class Kernels(NamedTuple):
    """Layout of work by an engine's attention kernels on a chip."""

    rows: int
    """Queries that a prefill kernel processes at a time."""
    shares: bool
    """True if the query heads of one KV head fill a tile of prefill together."""
    splits: bool
    """True if prefill is divided so that no tile is waited for."""
    walks: bool
    """True if decode without grouped heads, or with a window, walks along each context in one piece, a query head at a
    time."""


FLASH_ATTENTION_2 = Kernels(rows=64, shares=False, splits=False, walks=True)
FLASH_ATTENTION_3 = Kernels(rows=128, shares=True, splits=True, walks=False)
FLASH_INFER = Kernels(rows=64, shares=True, splits=False, walks=False)
TENSORRT_LLM = Kernels(rows=128, shares=False, splits=False, walks=False)


def kernels_of(setting: Setting) -> Kernels | None:
    """Return the kernels that vLLM 0.24 runs; None if the architecture is unknown.

    FlashAttention 3 on sm_90, TensorRT-LLM's on sm_100 and sm_103, FlashAttention 2 on other chips, which has no 8-bit
    KV cache and leaves that to FlashInfer.
    """
    capability = setting.chip.capability
    if capability is None or setting.processors == 1:
        return None
    if capability == 90:
        return FLASH_ATTENTION_3
    if 100 <= capability < 110:
        return TENSORRT_LLM
    return FLASH_ATTENTION_2 if setting.kv_bytes >= 2 else FLASH_INFER


def _head_features(x: Shape) -> dict[str, Array]:
    """Features by which kernels are chosen: a window, heads that are not a power of two wide, and very wide heads."""
    d = x["head_dim"]
    return {
        "windowed": np.where(x["window"] != x["context"], 1.0, 0.0),
        "padded head": np.ceil(np.log2(d)) - np.log2(d),
        "wide head": np.where(d > _WIDEST, 1.0, 0.0),
    }


_USUAL = 128  # head_dim that kernels are tuned for
_WIDEST = 256  # head_dim of FlashAttention
_WIDEST_GROUP = 32  # heads of a KV head that TensorRT-LLM's XQA takes


class _GroupedHeads(OperatorForm):
    """Attention of `heads` query heads that share `kv_heads` KV heads, over the last `window` tokens.

    Where all tokens are seen `window` is the context; a window that is longer is another kernel all the same.
    """

    joint: ClassVar[tuple[str, ...]] = ("group", "window", "windowed", "padded head", "wide head")

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        logs = {name: np.log2(x[name]) for name in x if name not in ("kv_heads", "window")}
        logs["group"] = np.log2(x["heads"] / x["kv_heads"])
        logs["window"] = np.log2(np.minimum(x["window"], x["context"]) / x["context"])
        return logs

    def _work(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Flops, bytes, heads, and what tensor cores leave empty of a group: they take heads by eights.

        Most are about sums of other features, but a residual of few rows predicts better with them: 200 random rows of
        56 tables by 6 % at the 90th percentile.
        """
        terms, group = self.terms(x, setting), x["heads"] / x["kv_heads"]
        return {
            "flops": np.log2(terms.flops),
            "bytes": np.log2(terms.bytes),
            "kv heads": np.log2(x["kv_heads"]),
            "all heads": np.log2(x["batch"] * x["heads"]),
            "eights": np.log2(8 * ceil_div(group, 8) / group),
        }


LARGER_BATCHES_AND_CONTEXTS = (RANDOM, above("batch", 64, "batch"), above("context", 8192, "context"))
LONGER_PROMPTS = (RANDOM, above("tokens", 4096, "tokens"))


class PrefillAttention(_GroupedHeads):
    """Causal attention of the last `tokens` of `context` tokens in each of `batch` sequences.

    context == tokens is a whole prompt; context > tokens is a chunk whose past is cached. `window` is how many
    of the latest tokens a query sees; window == context is full attention. On a GPU flops are those of whole tiles,
    with the exponentials of the softmax, which occupy the processors as long as the products of another 64 of head_dim.
    A block is a tile of query rows, per processor; it costs the same whatever head_dim.

    Where the kernels are known (`kernels_of`), tiles are as tall as theirs and filled up to whole ones. A tile that no
    other processor helps with is waited for: the tile that sees most keys comes on top of an even share of all flops.
    And the new keys and values are written to the cache, which tables of engines include.
    """

    shape = ("batch", "tokens", "context", "heads", "kv_heads", "head_dim", "window")
    overhead_s = 12e-6
    block_s = 1e-6
    overlap = 0.5
    joint = (*_GroupedHeads.joint, "context", "seen", "single token", "tiles")
    splits = LONGER_PROMPTS

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Flops of the pairs that are computed; queries, outputs, and the KV that they see; tiles of queries."""
        b, s, c, h, hk, d = (x[name] for name in self.shape[:-1])
        pairs = seen_pairs(c, x["window"]) - seen_pairs(c - s, x["window"])
        read = np.minimum(c, s + x["window"])
        softmax, masked = beyond_products(setting)
        flops = 4 * b * h * (d + softmax) * (pairs + masked * s)
        kv_bytes = setting.kv_bytes * hk * read
        kernels, tiles = kernels_of(setting), _tiles(x, setting)
        if kernels is not None:
            flops = flops * (tiles.rows * tiles.number / np.maximum(s * h / tiles.heads, 1))
            if not kernels.splits:
                most_keys = np.minimum(c, x["window"] + tiles.rows)
                flops = flops + 4 * (d + softmax) * tiles.rows * most_keys * setting.processors
            kv_bytes = kv_bytes + (setting.dtype_bytes + setting.kv_bytes) * hk * s
        return Terms(
            flops,
            2 * b * d * (setting.dtype_bytes * h * s + kv_bytes),
            b * tiles.heads * tiles.number / setting.processors,
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """The context over the tokens, the keys a query sees at most, and on a GPU how many tiles there are to share
        out, what the last wave of them leaves empty, and the work itself."""
        logs = super().features(x, setting) | _head_features(x)
        # Zero for whole prompts.
        logs["context"] -= logs["tokens"]
        logs["seen"] = np.log2(np.minimum(x["window"], x["context"]))
        # a chunk of one token runs the decode kernel
        logs["single token"] = np.where(x["tokens"] == 1, 1.0, 0.0)
        if setting.processors > 1:
            tiles = _tiles(x, setting)
            number = x["batch"] * tiles.heads * tiles.number
            logs |= self._work(x, setting) | {
                "tiles": np.log2(number),
                "last wave": last_wave(number, setting.processors),
            }
        return logs


class _Tiles(NamedTuple):
    """Tiles of one sequence: heads that have tiles of their own, rows of a tile, and tiles of each such head."""

    heads: Array
    rows: int
    number: Array


def _tiles(x: Shape, setting: Setting) -> _Tiles:
    kernels = kernels_of(setting)
    rows = 128 if kernels is None else kernels.rows
    h, hk, s = x["heads"], x["kv_heads"], x["tokens"]
    if kernels is None or kernels.shares:
        heads = hk
    # A single token is decoded, and then heads do share.
    else:
        heads = np.where((s == 1) & shares_keys(x, setting), hk, h)
    return _Tiles(heads, rows, ceil_div(s * (h / heads), rows))


def seen_pairs(tokens: Array, window: Array) -> Array:
    """Return the pairs of a query and a key it sees among the first `tokens` tokens."""
    w = np.minimum(window, tokens)
    pairs: Array = w * (w + 1) / 2 + (tokens - w) * w
    return pairs


START_KEYS = 64
"""Keys, about, that a block of decode attention reads while it starts, and so for nothing: kernels read them in tiles
of 64 to 128. Of 0, 32 and 64, 64 predicts larger batches than the fit saw best, on tables of four GPUs; for longer
contexts than the fit saw, 0 is best on the two of them with GDDR memory."""


def _waited_for(keys: Array, setting: Setting) -> Array:
    """Return the keys per sequence whose reading takes time: all but `START_KEYS` of many, on a GPU."""
    return keys * keys / (keys + START_KEYS) if setting.processors > 1 else keys


def shares_keys(x: Shape, setting: Setting) -> Mask:
    """True where the query heads of one KV head read it together when they decode."""
    kernels = kernels_of(setting)
    if kernels is None or not kernels.walks:
        return np.ones(np.shape(x["heads"]), dtype=np.bool_)
    together: Mask = (x["heads"] > x["kv_heads"]) & (x["window"] == x["context"])
    return together


_WALK_ROWS, _WALK_START = 64, 128
"""FlashAttention 2 walks along keys in tiles of 64 query rows, though all but one are empty, on one processor: 0.15 ns
a key and value of head_dim on L40S and RTX PRO 6000, which is 70 % of that processor's products. The first 128 keys
cost nothing on top of a call."""
_HIDDEN = 512
"""Keys of a context at which the cost of a further wave is half hidden behind reading; FlashAttention 3 hides none."""
_COMBINE = 20
"""Pieces of a split context that take as long to combine as a wave takes."""
_KEYS_OF_SPLIT = {64: 256, 128: 128}  # by head_dim; 64 of wider heads


def _pieces(x: Shape, pairs: Array, processors: int) -> Array:
    """Return the pieces into which FlashAttention 2 cuts each context, about (`num_splits_heuristic`): two for each
    processor, while there are as many tiles of keys, at most 128."""
    d = x["head_dim"]
    keys = np.where(d <= 64, _KEYS_OF_SPLIT[64], np.where(d <= 128, _KEYS_OF_SPLIT[128], 64))
    most = np.minimum(np.minimum(ceil_div(x["context"], keys), 2 * processors / np.maximum(pairs, 1)), 128)
    return np.where(unsplit(pairs, processors), 1.0, np.maximum(np.floor(most), 1.0))


class DecodeAttention(_GroupedHeads):
    """Attention of one new token for each of `batch` sequences whose KV is `context` tokens long, that token included.

    A block is one more wave of (sequence, KV head) pairs than the first: each costs microseconds however
    short, and about as many on all GPUs: 3.7 on A100 tables, 4.9 on RTX 4090 ones, 4.1 on RTX PRO 6000 ones. Small
    batches alone, which are one wave, do not show it.

    FlashAttention 2 splits contexts only for grouped heads that see all tokens, and then combines the pieces. Otherwise
    every query head walks along its context alone, whatever the batch, and finds what other heads of its group read
    still in the cache, if the cache can store one head of all sequences (`shares_keys`).
    """

    shape = ("batch", "context", "heads", "kv_heads", "head_dim", "window")
    overhead_s = 11e-6
    block_s = 4e-6
    block_log_sd = 0.3
    overlap = 2.0
    joint = (*_GroupedHeads.joint, "wide group", "no group", "keys", "together", "from memory")
    splits = LARGER_BATCHES_AND_CONTEXTS

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Four flops a query, key and value of head_dim; the KV that is waited for, queries and outputs; waves."""
        b, h, hk, d = x["batch"], x["heads"], x["kv_heads"], x["head_dim"]
        w, processors = np.minimum(x["window"], x["context"]), setting.processors
        kernels, together = kernels_of(setting), shares_keys(x, setting)
        readers = b * np.where(together, hk, h)
        flops, waves = 4 * b * h * d * w, ceil_div(readers, processors) - 1
        if kernels is not None and not kernels.splits:
            waves = waves * _HIDDEN / (w + _HIDDEN)
        if kernels is not None and kernels.walks:
            walk = 4 * _WALK_ROWS * d * w * w / (w + _WALK_START) * processors * ceil_div(readers, processors)
            flops = np.where(together, flops, walk)
            waves = waves + np.where(together, _pieces(x, readers, processors) - 1, 0) / _COMBINE
        once = 2 * setting.kv_bytes * b * hk * _waited_for(w, setting) * d
        rereads = np.where(together, 1.0, h / hk) - 1
        head = 2 * setting.kv_bytes * b * w * d
        read = once * (first_slowness(hk * head, setting) + rereads * slowness(head, setting))
        return Terms(flops, read + 2 * setting.dtype_bytes * b * h * d, waves)

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """A window, the width of heads, groups too wide for a kernel or of one and, on a GPU, the keys of all sequences
        and KV heads, whether they are read together, and whether they are found in the cache; waves of (sequence, KV
        head) pairs, what the last of them leaves empty, and the work itself."""
        logs = super().features(x, setting) | _head_features(x)
        logs["wide group"] = np.where(x["heads"] > _WIDEST_GROUP * x["kv_heads"], 1.0, 0.0)
        logs["no group"] = np.where(x["heads"] == x["kv_heads"], 1.0, 0.0)
        # A GPU splits them as they fill it.
        if setting.processors > 1:
            pairs = x["batch"] * x["kv_heads"]
            keys = pairs * np.minimum(x["window"], x["context"])
            logs |= self._work(x, setting) | {
                "keys": np.log2(keys),
                "last wave": last_wave(pairs, setting.processors),
                "waves": np.log2(np.maximum(pairs / setting.processors, 1)),
                "seen": np.log2(np.minimum(x["window"], x["context"])),
                "beyond 128": np.where(x["head_dim"] > _USUAL, 1.0, 0.0),
            }
            logs["together"] = np.where(shares_keys(x, setting), 1.0, 0.0)
            logs["from memory"] = first_slowness(2 * setting.kv_bytes * keys * x["head_dim"], setting)
        return logs

    def imbalanced(self, mixed: Mask, blocks: Array, processors: int) -> Mask:
        """Select batches without a chunk that kernels do not split along the context: splitting balances the load."""
        return ~mixed & unsplit(blocks, processors)


def unsplit(blocks: Array | float, processors: int) -> Mask:
    """True if decode attention over `blocks` pairs of a sequence and a KV head leaves each context in one piece.

    FlashAttention 2 splits contexts while the pairs are fewer than 0.8 of two for every processor; so do the tables of
    two devices (188 and 128 processors), in which unequal contexts cost something above that and nothing below.
    """
    return np.asarray(blocks >= 0.8 * 2 * processors)


class MixedAttention(_GroupedHeads):
    """Attention of `batch` decodes over `context` tokens each inside the kernel of a prefill chunk of `tokens` tokens.

    FlashAttention 2, which vLLM runs on devices other than sm_90 and sm_100, gives every row of a step the shape of the
    longest: a decode's heads no longer share the KV they read (repeated reads hit the cache, as far as it reaches), and
    a tile of queries is laid out for each query of the chunk, though all but one are empty. A block is 128 query rows
    of one head, per processor.
    """

    shape = ("batch", "tokens", "context", "heads", "kv_heads", "head_dim", "window")
    overhead_s = 5e-6
    block_s = 1e-6
    overlap = 2.0

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return the work of decode attention, but with each query head reading the KV alone; tiles as tall as the
        chunk."""
        b, s, h, d = x["batch"], x["tokens"], x["heads"], x["head_dim"]
        w = np.minimum(x["window"], x["context"])
        return Terms(
            4 * b * h * d * w,
            2 * setting.kv_bytes * b * h * w * d + 2 * setting.dtype_bytes * b * h * d,
            b * h * ceil_div(s, 128) * (d / 128) / setting.processors,
        )

    def imbalanced(self, mixed: Mask, blocks: Array, processors: int) -> Mask:
        """Select batches with a chunk, in whose kernel no context is split."""
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
        """Return the work of decode attention with `width` queries a sequence against one reading of the KV."""
        b, q, h, hk, d = x["batch"], x["width"], x["heads"], x["kv_heads"], x["head_dim"]
        w = np.minimum(x["window"], x["context"])
        tiles = ceil_div(q * (h / hk), 128)
        return Terms(
            4 * b * q * h * d * w,
            2 * setting.kv_bytes * b * hk * _waited_for(w, setting) * d + 2 * setting.dtype_bytes * b * q * h * d,
            ceil_div(b * hk * tiles, setting.processors) - 1,
        )


class EncoderAttention(OperatorForm):
    """Attention of all `tokens` tokens of each of `batch` images to one another, without a cache or a mask. A block is
    a tile of 128 queries of a head, per processor.
    """

    shape = ("batch", "tokens", "heads", "head_dim")
    overhead_s = 8e-6
    block_s = 1e-6
    overlap = 0.5
    splits = LONGER_PROMPTS

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Every query and key in whole tiles of 128; queries, keys, values and outputs once."""
        b, s, h, d = (x[name] for name in self.shape)
        softmax, _ = beyond_products(setting)
        tile = 128 if setting.processors > 1 else 1
        queries = tile * ceil_div(s, tile)
        return Terms(
            4 * b * h * (d + softmax) * queries * queries,
            4 * setting.dtype_bytes * b * h * s * d,
            b * h * ceil_div(s, 128) / setting.processors,
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Sizes, tiles, and what the last of them leaves empty."""
        tiles = np.ceil(x["tokens"] / 128)
        return super().features(x, setting) | {
            "tiles": np.log2(x["batch"] * x["heads"] * tiles),
            "padding": np.log2(128 * tiles / x["tokens"]),
        }
