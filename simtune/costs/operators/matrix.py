"""Matrix products, and the quantising of their inputs."""

from __future__ import annotations

import numpy as np

from simtune.arrays import Array
from simtune.costs.operators.base import CurveForm, OperatorForm, Setting, Shape, Terms, ceil_div
from simtune.costs.operators.splits import RANDOM, above, unseen


class Gemm(OperatorForm):
    """(m, k) times (k, n). A block is a walk along k that nothing hides.

    The dtype is that of the kernel: bf16 and fp8 are what both inputs are, int8 is 8-bit weights and
    activations (w8a8), int4 is 4-bit weights with their group scales against 16-bit activations (w4a16). Each
    is a kernel of its own with rates of its own, never a scaled bf16 one.

    With fewer tiles of 128 x 128 outputs than a quarter of the processors, a tile walks along k alone, and
    kernels split a long k over idle processors only at the price of a second pass: time grows with k up to
    about 3,072 and then stays. Counting waves of tiles instead, as for attention, gets a fitted cost of next
    to nothing; this term takes the p90 error on held-back rows from 28 to 14 % on the H100 table whose
    residuals suggested it. On three tables that had no say in it, it changes nothing much, a p90 of 19.5, 13.3
    and 14.3 % becoming 19.2, 13.2 and 13.7 %: benchmarks/costs/test_gemm_form.py.
    """

    shape = ("m", "n", "k")
    overhead_s = 4e-6
    block_s = 1e-6
    overlap = 2.0
    curve = CurveForm(shared=("n", "k"), along="m", exact_only=True)
    splits = (RANDOM, unseen("n", "k"), above("dims", 8192, "n", "k"))

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """2 m n k flops; inputs, weights and outputs once; the walk along k as far as processors are idle."""
        m, n, k = x["m"], x["n"], x["k"]
        tiles = ceil_div(m, 128) * ceil_div(n, 128)
        idle = np.maximum(0, 1 - 4 * tiles / setting.processors)
        return Terms(
            2 * m * n * k,
            setting.activation_bytes * m * k + setting.dtype_bytes * n * k + setting.out_bytes * m * n,
            np.minimum(1, k / 3072) * idle,
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Sizes, tiles, and the share of the last wave of tiles that stays empty."""
        tiles = np.ceil(x["m"] / 128) * np.ceil(x["n"] / 128)
        waves = np.ceil(tiles / setting.processors) * setting.processors / tiles
        logs = {name: np.log2(x[name]) for name in self.shape}
        return logs | {"wave loss": np.log2(waves), "tiles": np.log2(tiles)}


class Quantise(OperatorForm):
    """(m, k) activations of 16 bits written in 8, with a scale for each row: 3 m k bytes. A block is a row."""

    shape = ("m", "k")
    overhead_s = 2e-6
    block_s = 1e-10
    overlap = 2.0
    computes = False

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """16 bits read and 8 written for each value, and a block for each row."""
        m, k = x["m"], x["k"]
        return Terms(np.zeros_like(m), (2 + setting.dtype_bytes) * m * k, m)
