"""Matrix products, and the quantising of their inputs."""

from __future__ import annotations

import numpy as np

from simtune.arrays import Array
from simtune.costs.operators.base import CurveForm, OperatorForm, Setting, Shape, Terms, ceil_div
from simtune.costs.operators.splits import RANDOM, above, unseen

_TILE = (256, 128)
"""Outputs that two processors compute together."""

_SPLIT = 3072  # of k; what a split over idle processors leaves, and the unit of a block
# Values that take as long to quantise as what comes on top for a row.
_ROW = 1024
_ROW_TILES = (1, 16, 64, 128, 256)


class Gemm(OperatorForm):
    """Product of (m, k) and (k, n). A block is 3,072 values of a walk along k that nothing hides.

    The dtype is that of the kernel: with bf16 both inputs are bf16, fp8, fp8_block and nvfp4 are 8- and 4-bit inputs
    with a scale per tensor or channel, per 128 x 128 or per 16 values, int8 is 8-bit weights and activations (w8a8),
    int4 is 4-bit weights with their group scales against 16-bit activations (w4a16). Each is a separate kernel with
    separate rates, never a scaled bf16 one.

    Every processor walks along k for one tile of outputs at a time. In the last wave of tiles, the only one of small
    products, some of them idle, and that share of a walk is time that neither flops nor bytes explain. Kernels of 16
    bits split a long k over idle processors, at the price of a second pass: at most 3,072 values of the walk remain.
    Kernels of 8 and 4 bits do not split; if they need quantised activations, another kernel quantises them first.

    Chosen on the tables of three cards, checked on those of four others; errors of the base alone there, on 200
    random rows and on sizes over 8,192 from those below, before and after: bf16 6.9 / 21 and 10 / 24 % became 6.5 / 21
    and 7.3 / 21 %, 8 and 4 bits 16 / 48 and 26 / 70 % became 8.6 / 27 and 12 / 34 %; the residual on top is judged in
    benchmarks/costs/test_gemm_accuracy.py, tables of whole models in benchmarks/costs/test_gemm_form.py. Whole waves of
    the best of several tiles in place of the flops were worse, and so were tiles of 64, 128 and 256 square.
    """

    shape = ("m", "n", "k")
    ordered = shape
    overhead_s = 4e-6
    block_s = 1e-6
    overlap = 2.0
    ahead_s = 1e-12
    curve = CurveForm(shared=("n", "k"), along="m", exact_only=True)
    splits = (RANDOM, unseen("n", "k"), above("dims", 8192, "n", "k"))

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return 2 m n k flops; inputs, weights and outputs once; walks along k in the idle part of the last wave of
        tiles; m (k + 1024) values to quantise, with 1024 for the fixed time of each row.
        """
        m, n, k = x["m"], x["n"], x["k"]
        waves = ceil_div(m, _TILE[0]) * ceil_div(n, _TILE[1]) / setting.processors
        walked = k if setting.quantised else np.minimum(k, _SPLIT)
        return Terms(
            2 * m * n * k,
            setting.activation_bytes * m * k + setting.dtype_bytes * n * k + setting.out_bytes * m * n,
            walked / _SPLIT * (np.ceil(waves) - waves),
            m * (k + _ROW) if setting.quantised else np.zeros_like(m),
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Return sizes, bytes, tiles, and the empty share of the last wave of tiles; for 8 and 4 bits also row
        features.

        Some of these kernels pad rows to 16 or, in a pair of processors, to 256, and change tiles at 16 to 256.
        """
        m = x["m"]
        tiles = ceil_div(m, 128) * ceil_div(x["n"], 128)
        waves = np.ceil(tiles / setting.processors) * setting.processors / tiles
        logs = {name: np.log2(x[name]) for name in self.shape}
        logs |= {"wave loss": np.log2(waves), "tiles": np.log2(tiles), "bytes": np.log2(self.terms(x, setting).bytes)}
        if not setting.quantised:
            return logs
        return logs | {
            "whole 16": (m % 16 == 0) * 1.0,
            "padding": np.log2(ceil_div(m, 256) * 256 / np.maximum(m, 256)),
            "row tile": np.searchsorted(_ROW_TILES, m, side="left") * 1.0,
        }


class Quantise(OperatorForm):
    """Quantising of (m, k) activations of 16 bits to 8, with a scale for each row: 3 m k bytes. A block is a row."""

    shape = ("m", "k")
    overhead_s = 2e-6
    block_s = 1e-10
    overlap = 2.0
    computes = False

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return 16 bits read and 8 written for each value, and a block for each row."""
        m, k = x["m"], x["k"]
        return Terms(np.zeros_like(m), (2 + setting.dtype_bytes) * m * k, m)
