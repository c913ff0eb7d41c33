"""Predicted seconds of one operator, and the way to find the right operator in a hardware profile.

Everything downstream calls `Predictor.seconds(**shape)` and nothing else, whatever stands behind it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simtune.costs.operators import OPERATORS, Array, Setting, Terms, operator_key
from simtune.errors import Infeasible
from simtune.specs.hardware import BaseFit, Hardware, Operator, OperatorKind

_SAME_KERNELS = {"fp16": "bf16"}
"""Both are two bytes wide and run at the same rate on every device with tables here."""


def base_seconds(
    terms: Terms, flops_per_s: float, bytes_per_s: float, overhead_s: float, block_s: float, overlap_p: float
) -> Array:
    """t = overhead + (a^p + b^p)^(1/p) + block * N, with a = flops / flops_per_s and b = bytes / bytes_per_s.

    p = 1 adds compute and memory time, a large p overlaps them completely.
    """
    a, b = terms.flops / flops_per_s, terms.bytes / bytes_per_s
    longer, shorter = np.maximum(a, b), np.minimum(a, b)
    share = shorter / np.maximum(longer, np.finfo(float).tiny)
    return overhead_s + longer * (1 + share**overlap_p) ** (1 / overlap_p) + block_s * terms.blocks


class Predictor:
    """Time of one operator as a function of its shape parameters (`simtune.costs.operators`)."""

    def __init__(self, operator: Operator, processors: int) -> None:
        self.overhead_s = operator.base.overhead_s
        self._base = operator.base
        self._box = operator.box
        self._operator = OPERATORS[operator.kind]
        self._setting = Setting.of(processors, operator.dtype, operator.kv_dtype)

    def seconds(self, **shape: ArrayLike) -> Array:
        """Seconds of calls of these shapes; scalars and arrays broadcast against each other."""
        fit: BaseFit = self._base
        return base_seconds(
            self._operator.terms(self._arrays(shape), self._setting),
            fit.flops_per_s,
            fit.bytes_per_s,
            fit.overhead_s,
            fit.block_s,
            fit.overlap_p,
        )

    def inside(self, **shape: ArrayLike) -> NDArray[np.bool_]:
        """Whether every parameter lies within the range that was measured; outside it the fit
        extrapolates.
        """
        arrays = self._arrays(shape)
        inside = np.ones(np.broadcast_shapes(*(x.shape for x in arrays.values())), dtype=np.bool_)
        for name, (low, high) in self._box.items():
            inside &= (arrays[name] >= low) & (arrays[name] <= high)
        return inside

    def _arrays(self, shape: dict[str, Any]) -> dict[str, Array]:
        assert set(shape) == set(self._operator.shape), f"{sorted(shape)} given, {self._operator.shape} wanted"
        arrays = np.broadcast_arrays(*(np.asarray(shape[name], dtype=np.float64) for name in self._operator.shape))
        return dict(zip(self._operator.shape, arrays, strict=True))


class Profile:
    """The operators of a hardware profile, by what a model needs."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware

    def predictor(
        self, kind: OperatorKind, dtype: str, *, kv_dtype: str | None = None, variant: str | None = None
    ) -> Predictor:
        """The predictor of an operator. Raises Infeasible naming the operator the profile lacks, and the
        remedy.

        fp16 is answered from the bf16 tables.
        """
        dtype = _SAME_KERNELS.get(dtype, dtype)
        if kv_dtype is not None:
            kv_dtype = _SAME_KERNELS.get(kv_dtype, kv_dtype)
        key = operator_key(kind, dtype, kv_dtype, variant)
        operator = self.hardware.operators.get(key)
        if operator is None:
            has = ", ".join(sorted(k for k in self.hardware.operators if k.startswith(kind)))
            raise Infeasible(
                f"hardware {self.hardware.name}: no operator {key}, which this model needs; "
                + (f"of that kind it has {has}" if has else f"it has no {kind} operator at all")
                + "; choose another dtype or hardware, or fit one from tables with `simtune fit`"
            )
        return Predictor(operator, self.hardware.device.processors)
