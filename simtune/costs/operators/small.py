"""Operators that only move bytes in memory: norms, activations, rotary embedding, addition, sampling."""

from __future__ import annotations

import numpy as np

from simtune.costs.operators.base import CurveForm, OperatorForm, Setting, Shape, Terms


class Elementwise(OperatorForm):
    """Norms, activations, rotary embedding, addition: `rows` tokens, `width` elements read or written each.

    A block is one row; its own cost beyond the bytes is a fraction of a nanosecond.
    """

    shape = ("rows", "width")
    overhead_s = 2e-6
    block_s = 1e-10
    overlap = 2.0
    computes = False
    curve = CurveForm()

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return every value once, and a block for each row."""
        rows, width = x["rows"], x["width"]
        return Terms(np.zeros_like(rows), setting.dtype_bytes * rows * width, rows)


class Sampling(OperatorForm):
    """A token for each of `rows` rows of `vocab` logits: cast, temperature, softmax and draw, one pass over
    the logits each. A block is one row.

    Four passes, and 30 us of small kernels around them, are assumed: known are 20-40 us and an unknown number of
    passes. A sort for top-k or top-p comes on top.
    """

    shape = ("rows", "vocab")
    overhead_s = 30e-6
    block_s = 1e-10
    overlap = 2.0
    computes = False

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return four passes over the logits, and a block for each row."""
        rows, vocab = x["rows"], x["vocab"]
        return Terms(np.zeros_like(rows), 4 * setting.dtype_bytes * rows * vocab, rows)


class _Hyper(OperatorForm):
    """Mixing of `streams` residual streams of `hidden` values around a sublayer (mHC, `HyperConnections`)."""

    shape = ("tokens", "streams", "hidden")
    overhead_s = 8e-6
    block_s = 1e-10
    overlap = 1.0


class HyperPre(_Hyper):
    """Input of a sublayer from all streams: a product with the weights of each token, normalised, and their sum. A
    block is a token."""

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return the product; every stream once, the weights, and the input."""
        m, streams, hidden = (x[name] for name in self.shape)
        weights = streams * (streams + 2) * streams * hidden
        return Terms(2 * m * weights, setting.dtype_bytes * m * (streams + 1) * hidden + _SINGLE * weights, m)


_SINGLE = 4  # bytes of a weight, which is not quantised


class HyperPost(_Hyper):
    """Streams after a sublayer: mixed with one another, and its output added to each. A block is a token."""

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return the sums; every stream read and written, and the output."""
        m, streams, hidden = (x[name] for name in self.shape)
        return Terms(2 * m * streams * streams * hidden, setting.dtype_bytes * m * (2 * streams + 1) * hidden, m)
