"""What every operator kind has in common: the terms of its work, and where a fit of its time starts from."""

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
    """Work of calls: flops, bytes, and serial blocks, one number per call; and, for kinds that have them, the values
    that a kernel ahead of the call goes through before it can start.
    """

    flops: Array
    bytes: Array
    blocks: Array
    ahead: Array = np.zeros(1)


@dataclass(frozen=True, slots=True)
class Chip:
    """What tells which kernels a device runs, and what they find in its cache; nothing where nobody said."""

    architecture: str | None = None
    cache_bytes: float | None = None
    """Of the last cache that all processors share."""
    in_step: bool = False
    """Whether calls are those of an engine's step, where every layer has keys, values and states of its own, so that
    nothing of them is left in the cache; a table times one batch again and again."""

    @classmethod
    def of(cls, device: Device, *, in_step: bool = False) -> Chip:
        """Of a device's facts."""
        return cls(device.architecture, device.cache_bytes, in_step)

    @property
    def capability(self) -> int | None:
        """90 of sm_90 and sm_90a; None for what is not NVIDIA's."""
        digits = "".join(c for c in (self.architecture or "").removeprefix("sm_") if c.isdigit())
        return int(digits) if (self.architecture or "").startswith("sm_") and digits else None


UNKNOWN = Chip()


@dataclass(frozen=True, slots=True)
class Setting:
    """What besides its shape decides the work of a call."""

    processors: int
    dtype_bytes: float
    kv_bytes: float
    activation_bytes: float
    """Of what a matrix product reads beside its weights: 16 bits where only the weights are quantised."""
    chip: Chip = UNKNOWN

    @classmethod
    def of(cls, processors: int, dtype: str, kv_dtype: str | None, chip: Chip = UNKNOWN) -> Setting:
        """By dtypes; the KV cache has the operator's own unless it is given."""
        width = DTYPE_BYTES[dtype]
        kv_width = DTYPE_BYTES[kv_dtype or dtype]
        return cls(processors, width, kv_width, ACTIVATION_BYTES.get(dtype, max(2.0, width)), chip)

    @property
    def quantised(self) -> bool:
        """Whether a matrix product reads activations of fewer bits than 16, which something has to quantise."""
        return self.activation_bytes < 2

    @property
    def out_bytes(self) -> float:
        """Of what a matrix product writes: 8-bit inputs are accumulated and written as 16 bits."""
        return max(2.0, self.dtype_bytes)


_FROM_CACHE = 0.4
"""Time of a byte that the last cache holds over that of one from memory: 0.35 and 0.4 on cards with GDDR memory, whose
attention it describes (L40S, RTX PRO 6000); those with HBM hardly show it."""
_CACHE_SHARE = 0.8  # of the cache, in which what is read over and over stays
_SHARP = 4.0


def slowness(held: Array, setting: Setting) -> Array:
    """Of what is read over and over, `held` bytes in all, the time of a byte over that of one from memory; 1 where the
    cache is not known."""
    if setting.chip.cache_bytes is None:
        return np.ones_like(held)
    missed = 1 / (1 + (_CACHE_SHARE * setting.chip.cache_bytes / np.maximum(held, 1)) ** _SHARP)
    slowly: Array = missed + _FROM_CACHE * (1 - missed)
    return slowly


def first_slowness(held: Array, setting: Setting) -> Array:
    """The same of what a call reads for the first time: 1 in an engine's step."""
    return np.ones_like(held) if setting.chip.in_step else slowness(held, setting)


@dataclass(frozen=True, slots=True)
class CurveForm:
    """Which calls lie on one curve, and what the curve runs over."""

    shared: tuple[str, ...] = ()
    """Shape parameters that all calls of a curve have in common."""
    along: str | None = None
    """The shape parameter it runs over; None for the bytes moved.

    Bytes moved, not bytes of the buffer: at equal bytes moved a ring of any size takes the same time but for its
    latency.
    """
    exact_only: bool = False
    """Curves only through a user's own points, beside a residual that answers for all other shapes; else a curve takes
    the place of the residual."""

    @property
    def of_groups(self) -> bool:
        """Whether each curve is of one number of devices, so that other numbers follow from those measured."""
        return self.shared == ("devices",)

    def x(self, shape: Shape, terms: Terms) -> Array:
        """Where calls of these shapes and terms lie along their curves."""
        return terms.bytes if self.along is None else shape[self.along]


class OperatorForm(ABC):
    """One operator kind, all that is known of it: shape parameters, the terms of its work, where a fit starts from,
    what its residual depends on, how a fit is tested.

    A new kind is a subclass in the file of its family, a line in `OPERATORS`, and its name in
    `simtune.specs.hardware.OperatorKind`.
    """

    shape: ClassVar[tuple[str, ...]]
    """Parameters by which calls are told apart, in the order of tables."""
    ordered: ClassVar[tuple[str, ...]] = ()
    """Parameters, if any, with which times grow: of two calls the one that is nowhere smaller takes longer."""
    overhead_s: ClassVar[float]
    """Of one call where nothing was measured."""
    block_s: ClassVar[float]
    """Prior of the time per block."""
    block_log_sd: ClassVar[float] = 1.5
    """How far off that may be."""
    overlap: ClassVar[float]
    """Prior of overlap_p - 1."""
    ahead_s: ClassVar[float] = 0.0
    """Prior of the time per value that a kernel ahead of it goes through; 0 for kinds that have none."""
    ahead_log_sd: ClassVar[float] = 1.5
    """How far off that may be."""
    computes: ClassVar[bool] = True
    """False: it only moves bytes, and no peak rate of its dtype is needed."""
    link: ClassVar[bool] = False
    """True: its bytes move between devices, not to and from memory."""
    starts_with_latency: ClassVar[bool] = False
    """True: where nothing was measured, a call's overhead is the latency of the link."""
    curve: ClassVar[CurveForm | None] = None
    """None: no curve describes it."""
    joint: ClassVar[tuple[str, ...] | None] = None
    """Features whose measured ranges bound what was measured, besides those of the parameters; None is all that are
    more than the logarithm of one parameter."""
    splits: ClassVar[tuple[Split, ...]] = (RANDOM,)
    """How a fit of it is tested; the coverage on the first stands in its interval."""
    not_positive: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    """Values that parameters may have in tables although no size is like that."""

    @abstractmethod
    def terms(self, x: Shape, setting: Setting) -> Terms:
        """The work of calls of shapes `x`, one array per name in `shape`."""

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """What the residual may depend on, one array per feature: the logarithms of the shape parameters unless the
        kind knows better.
        """
        return {name: np.log2(np.maximum(x[name], 1)) for name in self.shape}

    def box(self, x: Shape) -> dict[str, Range]:
        """Range of every shape parameter of measured calls, in which a fit does not extrapolate."""
        return {name: (float(column.min()), float(column.max())) for name, column in x.items()}

    def imbalanced(self, mixed: Mask, blocks: Array, processors: int) -> Mask:
        """Of measured batches of unequal contexts, those that tell what load imbalance costs this kind: none.

        `mixed` are those with a prefill chunk in the same kernel, `blocks` their pairs of a sequence and a KV head.
        """
        return np.zeros_like(mixed)


def ceil_div(a: Array, b: Array | float) -> Array:
    """a / b, rounded up."""
    return np.ceil(a / b)


def last_wave(tiles: Array, processors: int) -> Array:
    """Logarithm of what whole waves of so many tiles come to over what the tiles do."""
    idle: Array = np.log2(ceil_div(tiles, processors) * processors / tiles)
    return idle
