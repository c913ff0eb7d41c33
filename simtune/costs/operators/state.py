"""Linear attention and state-space layers (Mamba2, gated delta net): a state of constant size per sequence.

Each of `heads` heads keeps a matrix of key_dim x value_dim values, kept in the profile's KV dtype. Mamba2 calls
them heads, state size and head dimension.
"""

from __future__ import annotations

import numpy as np

from simtune.costs.operators.base import OperatorForm, Setting, Shape, Terms, ceil_div

CHUNK = 64
"""Tokens that prefill kernels treat at once as a matrix product."""


class LinearPrefill(OperatorForm):
    """`tokens` new tokens for each of `batch` sequences, chunk by chunk, the state handed on between them.

    Within a chunk every token meets the others, 2 x 64 x (key_dim + value_dim) flops a token and head; the
    state is read and updated, 4 x key_dim x value_dim. Linear in tokens, whatever came before. A block is the
    walk of one head along its chunks, per processor.
    """

    shape = ("batch", "tokens", "heads", "key_dim", "value_dim")
    overhead_s = 15e-6
    block_s = 1e-6
    overlap = 0.5

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Within chunks quadratic, between them a state; inputs and outputs once; the walk along the chunks."""
        b, s, h, dk, dv = (x[name] for name in self.shape)
        return Terms(
            b * s * h * (4 * dk * dv + 2 * CHUNK * (dk + dv)),
            2 * setting.dtype_bytes * b * s * h * (dk + dv) + 2 * setting.kv_bytes * b * h * dk * dv,
            ceil_div(b * h, setting.processors) * s / CHUNK,
        )


class LinearDecode(OperatorForm):
    """One new token for each of `batch` sequences: every state is read and written, whatever the context.

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
