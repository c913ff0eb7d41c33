"""Predicted seconds of one operator, how far off they may be, and the way to find the right operator in a
hardware profile.

All users call `Predictor.seconds(**shape)` and nothing else, whether a fit or a data sheet predicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simtune.arrays import Array, Mask
from simtune.costs import curve
from simtune.costs.beyond import widening_beyond
from simtune.costs.estimate import estimate
from simtune.costs.operators import OPERATORS, UNKNOWN, Chip, CurveForm, OperatorForm, Setting, Terms, operator_key
from simtune.costs.residual import Process
from simtune.costs.stated_links import under_stated_link
from simtune.errors import Infeasible, Problem, SpecError
from simtune.specs.hardware import ARRAYS, Arrays, Hardware, Operator, OperatorKind, Residual

LEVEL = 0.9
Z90 = NormalDist().inv_cdf((1 + LEVEL) / 2)

OUTSIDE = 1.5
"""Factor of the width of intervals outside the measured box if a fit had too few rows to leave ranges out."""

DATA_SHEET_LOG_SD = 0.35
"""Log error if nothing was measured: 75 % of the data sheet's rates plus 5 us are 9-16 % off at the median
and 30-76 % at p90 over five GPUs (AIConfigurator's tables), and log(1.76) = 0.35 x 1.645."""


class Basis(IntEnum):
    """Source of a predicted time, the surest first."""

    MEASURED = 0
    """This very shape was measured on this device."""
    INTERPOLATED = 1
    """The shape lies among measured shapes."""
    EXTRAPOLATED = 2
    """The shape lies outside the measured shapes."""
    CARRIED_OVER = 3
    """Measured on another device, and moved to this one by the data sheets."""
    OTHER_ENGINE = 4
    """Kernels of another engine than the one that runs, on this device or carried over to it."""
    DATA_SHEET = 5
    """Not measured by anybody, or assumed."""

    @property
    def words(self) -> str:
        """The name in reports."""
        return "kernels of another engine" if self is Basis.OTHER_ENGINE else self.name.lower().replace("_", " ")


_NOT_MEASURED_HERE = {
    "transferred": Basis.CARRIED_OVER,
    "data-sheet": Basis.DATA_SHEET,
    "assumed": Basis.DATA_SHEET,
}
"""Basis by the provenance of an operator; with other provenances it depends on the shape."""

JOINT_SLACK = 0.1
"""Share of the range of a joint feature by which a shape may leave it; what lies beyond is outside. Few points seldom
meet the ends of a ratio."""

_SAME_POINT = 1e-4
"""Difference of standardised features, which are stored in single precision, up to which a shape is that of a point."""

_SAME_KERNELS = {"fp16": "bf16"}
"""Both are two bytes wide and run at the same rate on every device with tables here."""


def base_seconds(
    terms: Terms,
    flops_per_s: float,
    bytes_per_s: float,
    overhead_s: float,
    block_s: float,
    overlap_p: float,
    ahead_s: float = 0.0,
) -> Array:
    """t = overhead + (a^p + b^p)^(1/p) + block * N + ahead * V, with a = flops / flops_per_s, b = bytes / bytes_per_s.

    p = 1 adds compute and memory time, a large p overlaps them completely.
    """
    a, b = terms.flops / flops_per_s, terms.bytes / bytes_per_s
    longer, shorter = np.maximum(a, b), np.minimum(a, b)
    share = shorter / np.maximum(longer, np.finfo(float).tiny)
    serial_s = block_s * terms.blocks + (ahead_s * terms.ahead if ahead_s else 0.0)
    return overhead_s + longer * (1 + share**overlap_p) ** (1 / overlap_p) + serial_s


class Predictor:
    """Time of one operator as a function of its shape parameters (`simtune.costs.operators`).

    A measured curve through the shape answers where there is one; otherwise the base times what the residual
    process says. Outside the measured box that correction fades to nothing within the process's own lengths, and
    the base is left; there is no step at the edge, where the base alone is up to 3.7 times as far off
    (benchmarks/costs/test_outside.py). `arrays` are those of the profile. Raises SpecError when they do not fit
    the operator.
    """

    def __init__(
        self,
        operator: Operator,
        processors: int,
        arrays: Mapping[str, NDArray[Any]] | None = None,
        chip: Chip = UNKNOWN,
    ) -> None:
        self.operator = operator
        self.overhead_s, self.chip = operator.base.overhead_s, chip
        self._base = operator.base.model_dump()
        self._form = OPERATORS[operator.kind]
        self._setting = Setting.of(processors, operator.dtype, operator.kv_dtype, chip)
        _check_names(operator, self._form, self._setting, arrays)
        self.arrays = Arrays({}) if arrays is None else arrays
        self._curve_form = self._form.curve or CurveForm()
        self._curves = {tuple(c.at[name] for name in self._curve_form.shared): c for c in operator.curves}

    def seconds(self, **shape: ArrayLike) -> Array:
        """Seconds of calls of these shapes; scalars and arrays broadcast against each other."""
        x = self._columns(shape)
        terms = self._form.terms(x, self._setting)
        base = np.asarray(base_seconds(terms, **self._base))
        if self._process is not None:
            # A call without work takes its overhead, no more.
            work = terms.bytes > 0
            base[work] *= np.exp(self._process.mean(self._standardised(x, work)))
        return self._along_curves(x, terms, base) if self._curves else base

    def works(self, **shape: ArrayLike) -> Mask:
        """True if a call moves any bytes; a call that moves none takes the overhead of a call."""
        moves: Mask = self._form.terms(self._columns(shape), self._setting).bytes > 0
        return moves

    def inside(self, **shape: ArrayLike) -> Mask:
        """True if every parameter lies within the measured range, and so do the products and ratios of parameters that
        the residual depends on: a chunk after a cached past is outside of whole prompts.

        Collectives need a measured number of devices, and if few combinations were measured, the shape must be one of
        them. Elsewhere the fit extrapolates.
        """
        return self._inside(self._columns(shape))

    def basis(self, **shape: ArrayLike) -> NDArray[np.intp]:
        """Return a `Basis` for each call."""
        x = self._columns(shape)
        basis_of_all = _NOT_MEASURED_HERE.get(self.operator.provenance.kind)
        if self.operator.other_engine is not None and basis_of_all != Basis.DATA_SHEET:
            basis_of_all = Basis.OTHER_ENGINE
        if basis_of_all is not None:
            return np.full(_size(x), basis_of_all, dtype=np.intp)
        basis = np.where(self._inside(x), Basis.INTERPOLATED, Basis.EXTRAPOLATED).astype(np.intp)
        # rows of published tables are not stored in the profile, so their shapes never count as measured
        if self.operator.provenance.kind == "measured":
            basis[self._is_own_point(x)] = Basis.MEASURED
        return basis

    def log_sd(self, **shape: ArrayLike) -> Array:
        """Standard deviation of log(measured / predicted), scaled so that 1.645 of it hold 90 %.

        Normalised by conformal scores of points that the fit did not see; outside the measured box by those of ranges
        that it did not see, and wider the farther outside. An unmeasured operator gets `DATA_SHEET_LOG_SD`, and so do
        collectives over a number of devices that was not measured, or measured on another device: links and switches
        differ more than processors.
        """
        x = self._columns(shape)
        interval = self.operator.interval
        sd = np.full(_size(x), typical_log_sd(self.operator) if interval is None else interval.log_sd)
        if interval is not None and self._process is not None:
            everywhere = np.ones(sd.shape, dtype=np.bool_)
            sd[...] = interval.quantile / Z90 * self._process.sd(self._standardised(x, everywhere)).reshape(sd.shape)
        sd *= self._widening(x)
        if interval is not None:
            sd = np.hypot(sd, interval.carried_log_sd)
        if self._form.link:
            unknown = ~self._known_group(x) | (self.operator.provenance.kind == "transferred")
            sd = np.where(unknown, np.maximum(sd, DATA_SHEET_LOG_SD), sd)
        return sd

    def _widening(self, x: dict[str, Array]) -> Array:
        """Factor of the width of intervals over that inside, besides the process's own growing uncertainty: the largest
        among the parameters outside."""
        interval, within = self.operator.interval, self._inside(x)
        widening = np.zeros(_size(x))
        for name, (low, high) in self.operator.box.items():
            beyond = np.maximum(octaves(x[name], high), octaves(low, x[name]))
            factor: Array | float | None = None
            if interval is not None:
                on_gpu = self._setting.processors > 1
                factor = widening_beyond(self.operator, interval, name, beyond, gpu=on_gpu)
            factor = OUTSIDE if factor is None else factor
            widening = np.where(beyond > 0, np.maximum(widening, factor), widening)
        return np.where(within, 1.0, np.where(widening > 0, widening, OUTSIDE))

    def interval(self, *, level: float = LEVEL, **shape: ArrayLike) -> tuple[Array, Array]:
        """(low, high) seconds that hold a measured time with probability `level`.

        Calibrated at 90 %; other levels assume a normal log error.
        """
        seconds = self.seconds(**shape)
        factor = np.exp(NormalDist().inv_cdf((1 + level) / 2) * self.log_sd(**shape))
        return seconds / factor, seconds * factor

    @cached_property
    def _process(self) -> Process | None:
        return None if self.operator.residual is None else _process_of(self.operator.residual, self.arrays)

    def _standardised(self, x: dict[str, Array], calls: Mask) -> Array:
        """(calls, features) of the residual process."""
        assert self._process is not None
        chosen = {name: column[calls] for name, column in x.items()}
        return self._process.standardised(self._form.features(chosen, self._setting))

    def _along_curves(self, x: dict[str, Array], terms: Terms, seconds: Array) -> Array:
        at = self._curve_form.x(x, terms)
        if self._curve_form.of_groups:
            by_devices = {int(n): c for (n,), c in self._curves.items()}
            for n in np.unique(x["devices"]):
                rows = x["devices"] == n
                seconds[rows] = curve.seconds_of_group(by_devices, int(n), at[rows])
            return seconds
        for values, fitted_curve in self._curves.items():
            rows = np.ones(seconds.shape, dtype=np.bool_)
            for name, value in zip(self._curve_form.shared, values, strict=True):
                rows &= x[name] == value
            if rows.any():
                seconds[rows] = curve.seconds(fitted_curve, at[rows])
        return seconds

    def _inside(self, x: dict[str, Array]) -> Mask:
        operator = self.operator
        inside = np.ones(_size(x), dtype=np.bool_)
        for name, (low, high) in operator.box.items():
            inside &= (x[name] >= low) & (x[name] <= high)
        if operator.joint_box:
            with np.errstate(divide="ignore", invalid="ignore"):  # of calls without work
                features = self._form.features(x, self._setting)
            for name, (low, high) in operator.joint_box.items():
                slack = _SAME_POINT + JOINT_SLACK * (high - low)
                inside &= (features[name] >= low - slack) & (features[name] <= high + slack)
        if operator.families:
            in_family = np.zeros_like(inside)
            for family in operator.families:
                in_family |= np.all([x[name] == value for name, value in family.items()], axis=0)
            inside &= in_family
        return inside & self._known_group(x)

    def _known_group(self, x: dict[str, Array]) -> Mask:
        """True if this number of devices was measured, or if the kind does not depend on it or has no curves."""
        if not (self._curve_form.of_groups and self._curves):
            return np.ones(_size(x), dtype=np.bool_)
        return np.isin(x["devices"], [n for (n,) in self._curves])

    def _is_own_point(self, x: dict[str, Array]) -> Mask:
        """True if a shape is a measured one: a knot of an exact curve, or a point of the process."""
        is_point = np.zeros(_size(x), dtype=np.bool_)
        along = self._curve_form.x(x, self._form.terms(x, self._setting))
        for values, fitted_curve in self._curves.items():
            rows = np.isin(along, fitted_curve.x)
            for name, value in zip(self._curve_form.shared, values, strict=True):
                rows &= x[name] == value
            is_point |= rows
        if self._process is not None:
            at = self._standardised(x, np.ones_like(is_point)).reshape(is_point.size, -1)
            nearest = [np.abs(self._process.points - row).max(axis=1).min() for row in at]
            is_point |= (np.array(nearest) < _SAME_POINT).reshape(is_point.shape)
        return is_point

    def _columns(self, shape: dict[str, Any]) -> dict[str, Array]:
        names = self._form.shape
        assert set(shape) == set(names), f"{sorted(shape)} given, {names} wanted"
        columns = [np.asarray(shape[name], dtype=np.float64) for name in names]
        if all(x.size == 1 for x in columns):
            # One call, as of a single step: broadcasting takes longer than predicting it.
            widest = max((x.shape for x in columns), key=len)
            return {name: x.reshape(widest) for name, x in zip(names, columns, strict=True)}
        return dict(zip(names, np.broadcast_arrays(*columns), strict=True))


def octaves(x: ArrayLike, limit: ArrayLike) -> Array:
    """Octaves by which x lies above a limit; 0 below it. Values below 1 count as 1."""
    above: Array = np.log2(np.maximum(x, 1) / np.maximum(limit, 1))
    return np.maximum(above, 0.0)


def _size(x: Mapping[str, Array]) -> tuple[int, ...]:
    """Shape of the columns of a shape, which are all alike."""
    return next(iter(x.values())).shape


def typical_log_sd(operator: Operator) -> float:
    """Standard deviation of the log error of an operator inside its box, one number."""
    if operator.interval is not None:
        return float(np.hypot(operator.interval.log_sd, operator.interval.carried_log_sd))
    if operator.hold_out:
        return float(np.log1p(operator.hold_out[0].p90)) / Z90
    return DATA_SHEET_LOG_SD


class Profile:
    """Operators of a hardware profile, found by the needs of a model."""

    def __init__(self, hardware: Hardware, *, in_step: bool = False) -> None:
        """Take the operators of `hardware`.

        `in_step`: calls are those of an engine's step, which find no keys and values in the cache; otherwise they are
        those of tables, which time one batch repeatedly.
        """
        self.hardware, self._in_step = hardware, in_step
        self.estimated: set[str] = set()
        """Keys of the operators asked for that no fit covers: their times come from the data sheet."""
        self.fitted: dict[str, Operator] = {}
        """Operators asked for that a fit covers, by their keys."""

    @property
    def processors(self) -> int:
        """Streaming multiprocessors of the device, or 1 for a CPU."""
        return self.hardware.device.processors

    def predictor(
        self, kind: OperatorKind, dtype: str, *, kv_dtype: str | None = None, variant: str | None = None
    ) -> Predictor:
        """Return the predictor of an operator; from the data sheet if the profile has no fit of it.

        fp16 is answered from the bf16 tables. Raises Infeasible, which names the operator and the remedy, if the
        device has no rate for its dtype.
        """
        dtype = _SAME_KERNELS.get(dtype, dtype)
        if kv_dtype is not None:
            kv_dtype = _SAME_KERNELS.get(kv_dtype, kv_dtype)
        key = operator_key(kind, dtype, kv_dtype, variant)
        operator = self.hardware.operators.get(key)
        if operator is None:
            operator = estimate(kind, dtype, self.hardware, kv_dtype=kv_dtype, variant=variant)
            self.estimated.add(key)
        else:
            operator = self.fitted[key] = under_stated_link(operator, self.hardware)
        if operator is None:
            has = ", ".join(sorted(k for k in self.hardware.operators if k.startswith(kind)))
            raise Infeasible(
                f"hardware {self.hardware.name}: no operator {key}, which this model needs; "
                + (f"of that kind it has {has}" if has else f"it has no {kind} operator at all")
                + f", and its data sheet no rate for {dtype}; choose another dtype or hardware, or fit one from tables "
                "with `simtune fit`"
            )
        device = self.hardware.device
        return Predictor(operator, device.processors, self.hardware.arrays, Chip.of(device, in_step=self._in_step))

    def measured(self, kind: OperatorKind, dtype: str, kv_dtype: str, variant: str | None = None) -> bool:
        """True if the profile has a fit of the operator, so that `predictor` does not use the data sheet."""
        same = _SAME_KERNELS.get
        return operator_key(kind, same(dtype, dtype), same(kv_dtype, kv_dtype), variant) in self.hardware.operators

    def kind_log_sd(self) -> dict[str, float]:
        """Typical log error of each kind in a step's breakdown (`simtune.costs.iteration.KINDS`): the median
        over the profile's operators of that kind.

        One error is shared by all calls of a kind, so this is what a world is drawn with where a run says nothing of
        the kind (`simtune.costs.basis`). The head is a matrix product. What the profile has no operator of rests on
        the data sheet.
        """
        by_kind: dict[str, list[float]] = {}
        for operator in self.hardware.operators.values():
            by_kind.setdefault(operator.kind, []).append(typical_log_sd(operator))
        sds = dict.fromkeys((*OPERATORS, "send"), DATA_SHEET_LOG_SD)
        sds |= {kind: median(log_sds) for kind, log_sds in by_kind.items()}
        return sds | {"head": sds["gemm"]}


def _check_names(
    operator: Operator, form: OperatorForm, setting: Setting, arrays: Mapping[str, NDArray[Any]] | None
) -> None:
    """Raise SpecError for a shape parameter or a feature that calls of the operator's kind do not have."""
    for key, why in (*_unknown_shapes(operator, form), *_unknown_features(operator, setting)):
        raise SpecError(Problem(_profile_beside(arrays), why, f"operators: {key}"))


def _unknown_shapes(operator: Operator, form: OperatorForm) -> Iterator[tuple[str, str]]:
    names = [("box", name) for name in operator.box]
    names += [("families", name) for family in operator.families for name in family]
    for key, name in names:
        if name not in form.shape:
            yield key, f"{operator.kind} has no {name}; it has {', '.join(form.shape)}"
    shared = () if form.curve is None else form.curve.shared
    for at, name in product((fitted_curve.at for fitted_curve in operator.curves), shared):
        if name not in at:
            yield "curves.at", f"a curve of {operator.kind} is at no {name}"


@lru_cache(maxsize=256)
def _feature_names(kind: OperatorKind, setting: Setting) -> tuple[str, ...]:
    """Return the features of the calls of a kind of operator."""
    form = OPERATORS[kind]
    return tuple(form.features({name: np.ones(1) for name in form.shape}, setting))


def _unknown_features(operator: Operator, setting: Setting) -> Iterator[tuple[str, str]]:
    features = _feature_names(operator.kind, setting)
    names = [("joint_box", name) for name in operator.joint_box]
    names += [] if operator.residual is None else [("residual: features", name) for name in operator.residual.features]
    for key, name in names:
        if name not in features:
            yield key, f"{operator.kind} has no feature {name}; it has {', '.join(features)}"


def _profile_beside(arrays: Mapping[str, NDArray[Any]] | None) -> str:
    """Return the profile's file if `arrays` are those of a file; otherwise its usual name."""
    return str(Path(str(arrays)).with_name("profile.yaml")) if isinstance(arrays, Arrays) else "profile.yaml"


def load_residuals(hardware: Hardware) -> int:
    """Return the number of operators of a profile that have a residual.

    Raises SpecError if the arrays of a residual do not match it.
    """
    residuals = [operator.residual for operator in hardware.operators.values() if operator.residual is not None]
    for residual in residuals:
        _process_of(residual, hardware.arrays)
    return len(residuals)


def _process_of(spec: Residual, arrays: Mapping[str, NDArray[Any]]) -> Process:
    """Return the process of a residual. Raises SpecError if the arrays do not match the spec."""
    derived: dict[Any, Process] = arrays.derived if isinstance(arrays, Arrays) else {}
    try:
        if spec not in derived:
            derived[spec] = Process.load(spec, arrays[f"{spec.array}.points"], arrays[f"{spec.array}.weights"])
        return derived[spec]
    except ValueError as error:
        raise SpecError(Problem(str(arrays) if isinstance(arrays, Arrays) else ARRAYS, str(error))) from None
