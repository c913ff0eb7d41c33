"""Errors of fits beyond the largest values that they saw, by operator kind and shape parameter.

A table can only tell how far off a fit is a little beyond a part of its own rows, and that differs from one sample of
rows to the next by more than from one card to another. So where tables of several cards were looked at, their common
error is taken, and the table's own (`Interval.outside`) for other parameters, and on CPUs.
"""

from __future__ import annotations

from simtune.arrays import Array
from simtune.specs.hardware import Interval, Operator, OperatorKind

GROWTH = 0.75
"""Power of (1 + octaves beyond the box) with which the log error grows outside, besides the process's own growth with
distance, by a table's own ranges left out. Of 0.5, 0.75 and 1 it covers best when ranges of the tables of seven GPUs
are left out: benchmarks/costs/test_coverage.py."""

COMMON_GROWTH = 1.0
"""The same power where the common error of all cards is taken. Coverage is 84 % in the first octave beyond and 96 % in
the fifth; with 0.75 it is 86 and 94 %, and fewer tables are covered 80 to 97 %: benchmarks/costs/test_beyond.py."""

BEYOND: dict[OperatorKind, dict[str, float]] = {
    "decode_attention": {"batch": 0.72, "context": 0.72},
    "delta_prefill": {"tokens": 0.59},
    "dsa_context_block": {"tokens": 1.23},
    "dsa_decode_block": {"batch": 1.1, "context": 0.52},
    "encoder_attention": {"tokens": 0.48},
    "gemm": {"k": 0.87, "m": 1.16, "n": 1.16},
    "mla_context_block": {"batch": 0.58, "tokens": 0.81},
    "mla_decode_block": {"batch": 1.4, "context": 0.75},
    "mla_products": {"tokens": 0.93},
    "moe": {"tokens": 1.05},
    "moe_combine": {"tokens": 0.8},
    "moe_dispatch": {"tokens": 0.84},
    "prefill_attention": {"batch": 0.61, "tokens": 0.72},
    "sparse_context_block": {"tokens": 0.61},
    "sparse_decode_block": {"batch": 1.03, "context": 0.63},
}
"""Quantile of |log(measured / predicted)| over sd * (1 + octaves beyond) that holds 90 %, by operator kind and shape
parameter, of all tables, cards and seeds together, each with the same weight. Found by
benchmarks/costs/test_beyond.py."""

BEYOND_FP8_CACHE: dict[OperatorKind, dict[str, float]] = {
    "decode_attention": {"batch": 0.66, "context": 0.84},
    "dsa_context_block": {"tokens": 1.3},
    "dsa_decode_block": {"batch": 1.44, "context": 0.55},
    "mla_context_block": {"batch": 0.62, "tokens": 1.05},
    "mla_decode_block": {"batch": 1.59, "context": 0.88},
    "prefill_attention": {"batch": 0.59, "tokens": 0.72},
    "sparse_context_block": {"tokens": 0.78},
    "sparse_decode_block": {"batch": 1.1, "context": 0.8},
}
"""The same of operators with a KV cache in 8 bits, which is converted on the way: their errors differ from those of
others, above all with many tokens."""


def common_errors(operator: Operator) -> dict[str, float]:
    """Return the common errors for the kind of an operator by shape parameter; empty if there are none."""
    return (BEYOND_FP8_CACHE if operator.kv_dtype == "fp8" else BEYOND).get(operator.kind, {})


def widening_beyond(operator: Operator, interval: Interval, name: str, beyond: Array, *, gpu: bool) -> Array | None:
    """Return the factor of the width of intervals for calls `beyond` octaves outside the range of a parameter.

    None if neither the tables of several cards nor the operator's `interval` tell of this parameter.
    """
    common = common_errors(operator).get(name) if gpu else None
    if common is not None:
        wider: Array = common / interval.quantile * (1 + beyond) ** COMMON_GROWTH
        return wider
    if name not in interval.outside:
        return None
    wider = interval.outside[name] / interval.quantile * (1 + beyond) ** GROWTH
    return wider
