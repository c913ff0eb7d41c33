"""Base of all operator kinds: the terms of their work, and the priors from which a fit of their time starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from simtune.arrays import Array, Mask
from simtune.costs.operators.splits import RANDOM, Split
from simtune.specs.base import ACTIVATION_BYTES, DTYPE_BYTES
from simtune.specs.hardware import Device, Range

Shape = Mapping[str, Array]


class Terms(NamedTuple):
    """Work of calls: flops, bytes and serial blocks, one number per call; for kinds that have one, also the values
    that a kernel ahead of the call goes through before the call can start.
    """

    flops: Array
    bytes: Array
    blocks: Array
    ahead: Array = np.zeros(1)


@dataclass(frozen=True, slots=True)
class Chip:
    """Facts that decide which kernels a device runs, and what they find in its cache; None if not given."""

    architecture: str | None = None
    cache_bytes: float | None = None
    """Bytes of the last cache that all processors share."""
    in_step: bool = False
    """True if calls are those of an engine's step, in which every layer has keys, values and states of its own, so that
    none of them is left in the cache; a table times one batch repeatedly."""

    @classmethod
    def of(cls, device: Device, *, in_step: bool = False) -> Chip:
        """Return the chip of a device's facts."""
        return cls(device.architecture, device.cache_bytes, in_step)

    @property
    def capability(self) -> int | None:
        """Compute capability, as 90 for sm_90 and sm_90a; None if the device is not NVIDIA's."""
        digits = "".join(c for c in (self.architecture or "").removeprefix("sm_") if c.isdigit())
        return int(digits) if (self.architecture or "").startswith("sm_") and digits else None


UNKNOWN = Chip()


@dataclass(frozen=True, slots=True)
class Setting:
    """Properties besides its shape that decide the work of a call."""

    processors: int
    dtype_bytes: float
    kv_bytes: float
    activation_bytes: float
    """Bytes of a value that a matrix product reads beside its weights: 2 if only the weights are quantised."""
    chip: Chip = UNKNOWN

    @classmethod
    def of(cls, processors: int, dtype: str, kv_dtype: str | None, chip: Chip = UNKNOWN) -> Setting:
        """Return the setting of these dtypes; the KV cache has the operator's dtype unless another is given."""
        width = DTYPE_BYTES[dtype]
        kv_width = DTYPE_BYTES[kv_dtype or dtype]
        return cls(processors, width, kv_width, ACTIVATION_BYTES.get(dtype, max(2.0, width)), chip)

    @property
    def quantised(self) -> bool:
        """True if a matrix product reads activations of fewer bits than 16, which a kernel has to quantise first."""
        return self.activation_bytes < 2

    @property
    def out_bytes(self) -> float:
        """Bytes of a value that a matrix product writes: 8-bit inputs are accumulated and written as 16 bits."""
        return max(2.0, self.dtype_bytes)


_FROM_CACHE = 0.4
"""Time of a byte read from the last cache over that of one from memory: 0.35 and 0.4 on cards with GDDR memory, whose
attention it describes (L40S, RTX PRO 6000); those with HBM hardly show it."""
# share of the cache in which data that is read repeatedly stays
_CACHE_SHARE = 0.8
_SHARP = 4.0


def slowness(held: Array, setting: Setting) -> Array:
    """Return the time of a byte over that of one from memory, for `held` bytes that are read repeatedly; 1 if the size
    of the cache is unknown."""
    if setting.chip.cache_bytes is None:
        return np.ones_like(held)
    missed = 1 / (1 + (_CACHE_SHARE * setting.chip.cache_bytes / np.maximum(held, 1)) ** _SHARP)
    slowly: Array = missed + _FROM_CACHE * (1 - missed)
    return slowly


def first_slowness(held: Array, setting: Setting) -> Array:
    """Return the slowness of bytes that a call reads for the first time: 1 in an engine's step."""
    return np.ones_like(held) if setting.chip.in_step else slowness(held, setting)


@dataclass(frozen=True, slots=True)
class CurveForm:
    """Rule that assigns calls to curves, and the axis of a curve."""

    shared: tuple[str, ...] = ()
    """Shape parameters that all calls of a curve have in common."""
    along: str | None = None
    """The shape parameter along the curve; None for the bytes moved.

    Bytes moved, not bytes of the buffer: at equal bytes moved a ring of any size takes the same time but for its
    latency.
    """
    exact_only: bool = False
    """True: curves only through a user's own points, beside a residual that predicts all other shapes; else a curve
    replaces the residual."""

    @property
    def of_groups(self) -> bool:
        """True if each curve is of one number of devices, so that other numbers follow from the measured ones."""
        return self.shared == ("devices",)

    def x(self, shape: Shape, terms: Terms) -> Array:
        """Return the positions of calls of these shapes and terms along their curves."""
        return terms.bytes if self.along is None else shape[self.along]


class OperatorForm(ABC):
    """Operator kind: its shape parameters, the terms of its work, the priors of a fit, the features of its
    residual, and the tests of a fit.

    A new kind is a subclass in the file of its family, a line in `OPERATORS`, and its name in
    `simtune.specs.hardware.OperatorKind`.
    """

    shape: ClassVar[tuple[str, ...]]
    """Parameters that distinguish calls, in the order of tables."""
    ordered: ClassVar[tuple[str, ...]] = ()
    """Parameters, if any, with which times grow: of two calls, the one that is nowhere smaller takes longer."""
    overhead_s: ClassVar[float]
    """Seconds of one call if nothing was measured."""
    block_s: ClassVar[float]
    """Prior of the time per block."""
    block_log_sd: ClassVar[float] = 1.5
    """Standard deviation of the logarithm of that prior."""
    overlap: ClassVar[float]
    """Prior of overlap_p - 1."""
    ahead_s: ClassVar[float] = 0.0
    """Prior of the time per value that a kernel ahead of the call goes through; 0 for kinds without one."""
    ahead_log_sd: ClassVar[float] = 1.5
    """Standard deviation of the logarithm of that prior."""
    computes: ClassVar[bool] = True
    """False: the kind only moves bytes, and needs no peak rate of its dtype."""
    link: ClassVar[bool] = False
    """True: its bytes move between devices, not to and from memory."""
    several_kernels: ClassVar[bool] = False
    """True: a call is a whole block of kernels, whose launches a table may show as a floor below which no row is."""
    starts_with_latency: ClassVar[bool] = False
    """True: if nothing was measured, a call's overhead is the latency of the link."""
    curve: ClassVar[CurveForm | None] = None
    """None: no curve describes it."""
    joint: ClassVar[tuple[str, ...] | None] = None
    """Features whose measured ranges bound what was measured, besides those of the parameters; None for all features
    that are more than the logarithm of one parameter."""
    splits: ClassVar[tuple[Split, ...]] = (RANDOM,)
    """Splits that test a fit; the coverage on the first is recorded in its interval."""
    not_positive: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    """Values that parameters may have in tables although no size has such a value."""

    @abstractmethod
    def terms(self, x: Shape, setting: Setting) -> Terms:
        """The work of calls of shapes `x`, one array per name in `shape`."""

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Return the features that the residual may depend on, one array per feature: the logarithms of the shape
        parameters unless the kind overrides this.
        """
        return {name: np.log2(np.maximum(x[name], 1)) for name in self.shape}

    def box(self, x: Shape) -> dict[str, Range]:
        """Range of every shape parameter of measured calls, in which a fit does not extrapolate."""
        return {name: (float(column.min()), float(column.max())) for name, column in x.items()}

    def imbalanced(self, mixed: Mask, blocks: Array, processors: int) -> Mask:
        """Select, among measured batches of unequal contexts, those that show the cost of load imbalance: none here.

        `mixed` are those with a prefill chunk in the same kernel; `blocks` are pairs of a sequence and a KV head.
        """
        return np.zeros_like(mixed)


def ceil_div(a: Array, b: Array | float) -> Array:
    """a / b, rounded up."""
    return np.ceil(a / b)


def last_wave(tiles: Array, processors: int) -> Array:
    """Logarithm of the tiles that whole waves have room for over `tiles`."""
    idle: Array = np.log2(ceil_div(tiles, processors) * processors / tiles)
    return idle
