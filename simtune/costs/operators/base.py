"""What every operator kind has in common: the terms of its work, and where a fit of its time starts from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from simtune.arrays import Array
from simtune.specs.base import DTYPE_BYTES

Shape = Mapping[str, Array]


class Terms(NamedTuple):
    """Work of calls: flops, bytes, and serial blocks, one number per call."""

    flops: Array
    bytes: Array
    blocks: Array


@dataclass(frozen=True, slots=True)
class Setting:
    """What besides its shape decides the work of a call."""

    processors: int
    dtype_bytes: float
    kv_bytes: float

    @classmethod
    def of(cls, processors: int, dtype: str, kv_dtype: str | None) -> Setting:
        return cls(processors, DTYPE_BYTES[dtype], DTYPE_BYTES[kv_dtype or dtype])

    @property
    def activation_bytes(self) -> float:
        """Of what a matrix product reads beside its weights: 16 bits where only the weights are 4-bit."""
        return 2.0 if self.dtype_bytes < 1 else self.dtype_bytes

    @property
    def out_bytes(self) -> float:
        """Of what a matrix product writes: 8-bit inputs are accumulated and written as 16 bits."""
        return max(2.0, self.dtype_bytes)


class OperatorTerms(ABC):
    """One operator kind: its shape parameters, its terms, and where the fit starts from."""

    shape: ClassVar[tuple[str, ...]]
    overhead_s: ClassVar[float]  # of one call where nothing was measured
    block_s: ClassVar[float]  # prior of the time per block
    block_log_sd: ClassVar[float] = 1.5  # how far off that may be
    overlap: ClassVar[float]  # prior of overlap_p - 1
    computes: ClassVar[bool] = True  # False: it only moves bytes, and no peak rate of its dtype is needed
    link: ClassVar[bool] = False  # True: its bytes move between devices, not to and from memory

    @abstractmethod
    def terms(self, x: Shape, setting: Setting) -> Terms:
        """The work of calls of shapes `x`, one array per name in `shape`."""


def ceil_div(a: Array, b: Array | float) -> Array:
    return np.ceil(a / b)
