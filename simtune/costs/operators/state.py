"""Linear attention and state-space layers (Mamba2, gated delta net): a state of constant size per sequence.

Each of `heads` heads has a matrix of key_dim x value_dim values, in the profile's KV dtype. Mamba2 calls
them heads, state size and head dimension.
"""

from __future__ import annotations

import numpy as np

from simtune.arrays import Array
from simtune.costs.operators.base import OperatorForm, Setting, Shape, Terms, ceil_div, first_slowness
from simtune.costs.operators.splits import RANDOM, above

CHUNK = 64
"""Tokens that prefill kernels process at once as a matrix product."""


class LinearPrefill(OperatorForm):
    """`tokens` new tokens for each of `batch` sequences, chunk by chunk, the state passed on between them.

    Within a chunk every token meets the others, 2 x 64 x (key_dim + value_dim) flops a token and head; the
    state is read and updated, 4 x key_dim x value_dim. Linear in tokens, whatever came before. A block is the
    walk of one head along its chunks, per processor.
    """

    shape = ("batch", "tokens", "heads", "key_dim", "value_dim")
    overhead_s = 15e-6
    block_s = 1e-6
    overlap = 0.5

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return the work: quadratic within chunks, a state between them; inputs and outputs once; walks along the
        chunks."""
        b, s, h, dk, dv = (x[name] for name in self.shape)
        return Terms(
            b * s * h * (4 * dk * dv + 2 * CHUNK * (dk + dv)),
            2 * setting.dtype_bytes * b * s * h * (dk + dv) + 2 * setting.kv_bytes * b * h * dk * dv,
            ceil_div(b * h, setting.processors) * s / CHUNK,
        )


class LinearDecode(OperatorForm):
    """Linear attention of one new token for each of `batch` sequences: every state is read and written once.

    A block is one more wave of (sequence, head) pairs than the first.
    """

    shape = ("batch", "heads", "key_dim", "value_dim")
    overhead_s = 4e-6
    block_s = 1e-7
    overlap = 2.0

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Every state is updated, read and written once; waves of (sequence, head) pairs."""
        b, h, dk, dv = (x[name] for name in self.shape)
        return Terms(
            4 * b * h * dk * dv,
            2 * setting.kv_bytes * b * h * dk * dv + 2 * setting.dtype_bytes * b * h * (dk + dv),
            np.ceil(b * h / setting.processors) - 1,
        )


class DeltaPrefill(OperatorForm):
    """Gated delta rule over `tokens` new tokens of each of `batch` sequences, chunk by chunk; `heads` value heads share
    `key_heads` key heads. Within a chunk tokens meet each other twice as often as in `LinearPrefill`, since the
    contribution of earlier tokens is subtracted first. A block is the walk of one head along its chunks, per processor.
    """

    shape = ("batch", "tokens", "heads", "key_heads", "key_dim", "value_dim")
    overhead_s = 15e-6
    block_s = 1e-6
    overlap = 0.5
    splits = (RANDOM, above("tokens", 4096, "tokens"))

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return the work: quadratic within chunks, a state between them; inputs and outputs once; walks along the
        chunks."""
        b, s, h, hk, dk, dv = (x[name] for name in self.shape)
        return Terms(
            b * CHUNK * ceil_div(s, CHUNK) * h * (6 * dk * dv + 4 * CHUNK * (dk + dv)),
            2 * setting.dtype_bytes * b * s * (hk * dk + h * dv) + 2 * setting.kv_bytes * b * h * dk * dv,
            ceil_div(b * h, setting.processors) * ceil_div(s, CHUNK),
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Sizes, walks, and the tokens of all of them."""
        return super().features(x, setting) | {
            "walks": np.log2(x["batch"] * x["heads"]),
            "rows": np.log2(x["batch"] * x["tokens"]),
        }


class DeltaDecode(OperatorForm):
    """Gated delta rule for one new token of each of `batch` sequences, as `LinearDecode`."""

    shape = ("batch", "heads", "key_heads", "key_dim", "value_dim")
    overhead_s = 4e-6
    block_s = 1e-7
    overlap = 2.0
    splits = (RANDOM, above("batch", 64, "batch"))

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Every state is updated, read and written once; waves of (sequence, head) pairs."""
        b, h, hk, dk, dv = (x[name] for name in self.shape)
        states = setting.kv_bytes * b * h * dk * dv
        return Terms(
            6 * b * h * dk * dv,
            2 * states * first_slowness(states, setting) + 2 * setting.dtype_bytes * b * (hk * dk + h * dv),
            np.ceil(b * h / setting.processors) - 1,
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Sizes, and the states of all sequences."""
        return super().features(x, setting) | {"states": np.log2(x["batch"] * x["heads"])}


class KdaPrefill(OperatorForm):
    """Delta rule with a decay for every key channel over `tokens` new tokens of each of `batch` sequences, as
    `DeltaPrefill`, of which every head has keys of its own. Within a chunk products of keys are weighted by channel, so
    that none is shared between tokens, and the decays are read as well. No table was fitted.
    """

    shape = ("batch", "tokens", "heads", "key_dim", "value_dim")
    overhead_s = 15e-6
    block_s = 1e-6
    overlap = 0.5
    splits = (RANDOM, above("tokens", 4096, "tokens"))

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return the work: quadratic within chunks, a state between them; inputs, decays and outputs once."""
        b, s, h, dk, dv = (x[name] for name in self.shape)
        return Terms(
            b * CHUNK * ceil_div(s, CHUNK) * h * (6 * dk * dv + 4 * CHUNK * (2 * dk + dv)),
            2 * setting.dtype_bytes * b * s * h * (2 * dk + dv) + 2 * setting.kv_bytes * b * h * dk * dv,
            ceil_div(b * h, setting.processors) * ceil_div(s, CHUNK),
        )


class KdaDecode(OperatorForm):
    """Delta rule with a decay for every key channel, for one new token of each of `batch` sequences, as
    `DeltaDecode`."""

    shape = ("batch", "heads", "key_dim", "value_dim")
    overhead_s = 4e-6
    block_s = 1e-7
    overlap = 2.0
    splits = (RANDOM, above("batch", 64, "batch"))

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Every state is updated, read and written once; waves of (sequence, head) pairs."""
        b, h, dk, dv = (x[name] for name in self.shape)
        states = setting.kv_bytes * b * h * dk * dv
        return Terms(
            7 * b * h * dk * dv,
            2 * states * first_slowness(states, setting) + 2 * setting.dtype_bytes * b * h * (2 * dk + dv),
            np.ceil(b * h / setting.processors) - 1,
        )


class ConvPrefill(OperatorForm):
    """Causal convolution of width `width` over `tokens` new tokens of each of `batch` sequences, for every one of
    `channels` channels. A block is the walk of a sequence along tiles of 8 tokens, for 64 channels, per processor.
    """

    shape = ("batch", "tokens", "channels", "width")
    overhead_s = 4e-6
    block_s = 1e-7
    overlap = 2.0
    splits = (RANDOM, above("tokens", 4096, "tokens"))
    computes = False

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return the work: every value read and written once, and the last ones of each sequence stored."""
        b, s, channels, width = (x[name] for name in self.shape)
        return Terms(
            np.zeros_like(b),
            setting.dtype_bytes * b * channels * (2 * s + width - 1),
            b * ceil_div(channels, 64) * ceil_div(s, 8) / setting.processors,
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Sizes, and the tokens of all sequences."""
        return super().features(x, setting) | {"rows": np.log2(x["batch"] * x["tokens"])}


class ConvDecode(OperatorForm):
    """Causal convolution for one new token of each of `batch` sequences: the last `width` - 1 inputs are read and
    moved on (writing them takes no time that tables would show). A block is one more wave of 64 channels of a sequence.
    """

    shape = ("batch", "channels", "width")
    overhead_s = 3e-6
    block_s = 1e-7
    overlap = 2.0
    splits = (RANDOM, above("batch", 64, "batch"))
    computes = False

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return the work: the stored inputs of each channel, and one value in and out."""
        b, channels, width = (x[name] for name in self.shape)
        stored_bytes = setting.dtype_bytes * b * channels * (width - 1)
        return Terms(
            np.zeros_like(b),
            stored_bytes * first_slowness(stored_bytes, setting) + 2 * setting.dtype_bytes * b * channels,
            ceil_div(b * ceil_div(channels, 64), setting.processors) - 1,
        )
