"""Fit one operator to measured times, and state how far off the fit is on times that it did not see.

Four steps, each optional but the first: the base parameters; curves for kinds with one size only; a Gaussian
process on the log residuals of the rest; and an interval calibrated on times left out of the fit.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Mask
from simtune.costs import curve
from simtune.costs.beyond import GROWTH
from simtune.costs.operators import OPERATORS, UNKNOWN, Chip, OperatorForm, Setting, Terms
from simtune.costs.operators.splits import RANDOM, Split
from simtune.costs.predict import LEVEL, Z90, Predictor, base_seconds, octaves
from simtune.costs.residual import MAX_POINTS, Process, cover, fit_process
from simtune.costs.tables import HostTable, ImbalanceTable, Table, take
from simtune.specs.hardware import (
    BaseFit,
    Curve,
    HoldOut,
    Interval,
    Operator,
    Provenance,
    Range,
    Residual,
)

TRAIN_POINTS = 200
TEST_POINTS = 3000
BASE_POINTS = 2000
"""Rows the base is fitted on; more of them change its parameters by less than a per cent."""

CALIBRATION_POINTS = 1000
"""Rows that calibrate the interval if a table has more than a residual keeps."""

WARM_POINTS = 100
"""Number of points above which the fits that calibrate an interval start from the lengths of the fit of all points, and
leave out a fifth of them at a time: of 200 random rows of the tables of seven GPUs that covers 86-94 % where 90 are
promised; leaving points out one by one of a process whose lengths depend on all of them covers 81-92. With fewer points
the lengths depend too much on each: then the fits start afresh, and leave out a third."""

_FOLDS, _FEW_FOLDS = 5, 3

OUTSIDE_ROWS = 200
"""Random rows that test how far off a fit is beyond its largest values."""

# share of these rows, about, that are beyond
_LEFT_OUT = 0.3
# Values of a parameter below which there is no range to leave out.
_OUTSIDE_DISTINCT = 4
_OUTSIDE_KEPT = 60  # rows that must be left
_LEAST_OUTSIDE = 0.4
"""Share of the quantile inside below which the quantile of a range left out is not taken. A lucky range tells nothing
about the next; chosen on the tables of seven GPUs, with and without."""

FEW_FAMILIES = 24
"""Weight matrices of two or three models. So few do not predict others; a table that is to has hundreds."""

CENTRES = 0.75
"""Largest share of the rows of a published table that is kept as centres; with half of them errors grow by a tenth."""

_SMALLEST_SD = 1e-4
# Points for which a residual is worth having, and rows a split must train on and test.
_FEWEST = 15
_FEWEST_IMBALANCED = 5
"""Rows for one slope."""
# Deviations of 10 % and more count linearly.
_SCALE = 0.1
# Kernels reach about 70 % of the data sheet.
_SHEET_SHARE = 0.7
_PRIOR_SD = (0.7, 0.7, 0.5, OperatorForm.block_log_sd, 1.0)
"""Standard deviations of log flops_per_s, bytes_per_s, overhead_s, block_s, overlap_p - 1; that of block_s on a GPU is
the operator's own."""
_STARTS = (0.0, -1.5, 1.0)  # shifts of both log rates from the prior
_MAX_EVALUATIONS = 200
# of a log error: one farther off no longer influences the direction of the search
_FARTHEST = 6.0
_TINY = float(np.finfo(float).tiny)
_DIGITS = 6

Rows = NDArray[np.intp]


def fit_operator(
    table: Table,
    processors: int,
    flops_per_s: float,
    bytes_per_s: float,
    provenance: Provenance,
    chip: Chip = UNKNOWN,
) -> tuple[Operator, dict[str, NDArray[Any]]]:
    """Return the operator of a table with all its hold-out errors, and the arrays of its residual by name.

    The rates are those of the data sheet. Tables that the user measured keep their points, as exact curves and in the
    residual; of other tables only fitted numbers are kept.
    """
    sheet = (processors, flops_per_s, bytes_per_s)
    operator, arrays = _fit(table, *sheet, provenance, chip)
    # What is stored was fitted to all rows; how far off such a fit is on rows it never saw is found by fits to a part
    # of them.
    splits = OPERATORS[table.kind].splits
    errors = [e for split in splits if (e := hold_out(table, *sheet, split, chip=chip)) is not None]
    tested: dict[str, Any] = {"hold_out": tuple(errors)}
    if operator.interval is not None and errors:
        tested["interval"] = operator.interval.model_copy(update={"coverage": errors[0].coverage})
    return operator.model_copy(update=tested), arrays


def hold_out(
    table: Table,
    processors: int,
    flops_per_s: float,
    bytes_per_s: float,
    split: Split = RANDOM,
    *,
    train_points: int = TRAIN_POINTS,
    seed: int = 0,
    chip: Chip = UNKNOWN,
) -> HoldOut | None:
    """Return the errors of a fit to rows that the split leaves to it, on rows that the split holds back.

    The fit sees `train_points` random rows (at most half of them for a random split); up to 3,000 others are tested.
    None if the split leaves or tests fewer than 15.
    """
    train, test = split_rows(table, split, train_points, seed)
    if min(len(train), len(test)) < _FEWEST:
        return None
    fitted = fit_predictor(take(table, train), processors, flops_per_s, bytes_per_s, chip)
    held_back = take(table, test)
    ratio = fitted.seconds(**held_back.shape) / held_back.seconds
    error = np.abs(ratio - 1)
    covered = np.abs(np.log(ratio)) <= Z90 * fitted.log_sd(**held_back.shape)
    return HoldOut(
        split=split.name,
        train_points=len(train),
        test_points=len(test),
        median=round(float(np.median(error)), 4),
        p90=round(float(np.quantile(error, 0.9)), 4),
        max=round(float(error.max()), 4),
        coverage=round(float(covered.mean()), 4),
    )


def split_rows(table: Table, split: Split, train_points: int = TRAIN_POINTS, seed: int = 0) -> tuple[Rows, Rows]:
    """Return disjoint (train, test) rows of a split."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(table))
    if split.held is None:
        count = min(train_points, len(table) // 2)
        return order[:count], order[count:][:TEST_POINTS]
    held_back = split.held(table.shape, rng)
    return order[~held_back[order]][:train_points], order[held_back[order]][:TEST_POINTS]


def fit_predictor(
    table: Table, processors: int, flops_per_s: float, bytes_per_s: float, chip: Chip = UNKNOWN
) -> Predictor:
    """Return the predictor that `fit_operator` would store for this table."""
    provenance = Provenance(kind="assumed", source="a test")
    operator, arrays = _fit(table, processors, flops_per_s, bytes_per_s, provenance, chip)
    return Predictor(operator, processors, arrays, chip)


def _fit(
    table: Table, processors: int, flops_per_s: float, bytes_per_s: float, provenance: Provenance, chip: Chip
) -> tuple[Operator, dict[str, NDArray[Any]]]:
    form, setting = OPERATORS[table.kind], Setting.of(processors, table.dtype, table.kv_dtype, chip)
    base = fit_base(_sample(table), processors, flops_per_s, bytes_per_s, chip)
    lines = _lines(table, setting)
    residual: Residual | None = None
    arrays: dict[str, NDArray[Any]] = {}
    # curves replace the residual for kinds that have one size only
    if lines and form.curve is not None and not form.curve.exact_only:
        interval = _curve_interval(lines, table)
    else:
        # Points that the residual never saw are needed to tell how far off it is.
        rows, calibration_rows = _kept_back(table, setting)
        process = _fit_process(rows, base, setting) if len(rows) >= _FEWEST else None
        if process is None:
            interval = _flat_interval(np.log(table.seconds / _base_of(table, base, setting)))
        else:
            # Only some points of the process are stored: intervals must hold for what will be read back.
            stored_process = _condensed(process, rows, base, setting)
            residual, arrays = stored_process.spec(table.key)
            sheet = flops_per_s, bytes_per_s
            full = _Fitted(process, base)
            interval = _residual_interval(rows, calibration_rows, full, stored_process, setting, sheet)
            outside = _outside(table, full, setting, sheet, interval.quantile)
            interval = interval.model_copy(update={"outside": outside})
    operator = Operator(
        kind=table.kind,
        dtype=table.dtype,
        kv_dtype=table.kv_dtype,
        variant=table.variant,
        base=base,
        curves=tuple(_fit_curve(line, table) for line in lines),
        residual=residual,
        interval=interval,
        box=form.box(table.shape),
        joint_box={} if residual is None else _joint_box(table, setting),
        families=_families(table),
        hold_out=(),
        scales="known" if table.known_scales else None,
        launch_s=None if table.launch_s is None else _short(table.launch_s),
        provenance=provenance,
    )
    return operator, arrays


def _joint_box(table: Table, setting: Setting) -> dict[str, Range]:
    """Return ranges of the features that are more than one parameter (`OperatorForm.joint`)."""
    box: dict[str, Range] = {}
    chosen = OPERATORS[table.kind].joint
    for name, feature in _features(table, setting).items():
        alone = table.shape.get(name)
        is_parameter = alone is not None and np.allclose(feature, np.log2(np.maximum(alone, 1)))
        if name in chosen if chosen is not None else not is_parameter:
            box[name] = (_short(float(feature.min())), _short(float(feature.max())))
    return box


def _families(table: Table) -> tuple[dict[str, float], ...]:
    """Return the combinations of the parameters that a curve through a user's points shares, if they are few and each
    was measured at several points."""
    form = OPERATORS[table.kind].curve
    if form is None or not form.exact_only:
        return ()
    values = np.unique(np.column_stack([table.shape[name] for name in form.shared]), axis=0)
    if len(values) > FEW_FAMILIES or len(table) < curve.FEWEST * len(values):
        return ()
    return tuple(dict(zip(form.shared, value, strict=True)) for value in values.tolist())


def _kept_back(table: Table, setting: Setting) -> tuple[Table, Table]:
    """Return the rows to fit a residual on, and random others to calibrate its interval, none of them in a corner."""
    if len(table) <= MAX_POINTS:
        return table, take(table, np.empty(0, dtype=np.intp))
    corners = cover(_features(table, setting), MAX_POINTS // 2)
    # Corners stay in the fit: without them the rows kept back would be outside of it.
    inner = np.random.default_rng(0).permutation(np.setdiff1d(np.arange(len(table)), corners))
    calibration_rows = inner[: min(CALIBRATION_POINTS, len(table) // 5)]
    return take(table, np.setdiff1d(np.arange(len(table)), calibration_rows)), take(table, calibration_rows)


def _fit_process(table: Table, base: BaseFit, setting: Setting, like: Process | None = None) -> Process | None:
    """Fit the process to all rows, or to `MAX_POINTS` that cover them; `like` is a process of nearly the same rows."""
    by_name, z = _features(table, setting), np.log(table.seconds / _base_of(table, base, setting))
    if len(table) > MAX_POINTS:
        chosen = cover(by_name, MAX_POINTS)
        by_name, z = {name: x[chosen] for name, x in by_name.items()}, z[chosen]
    return fit_process(by_name, z, like)


def _condensed(process: Process, table: Table, base: BaseFit, setting: Setting) -> Process:
    """Return the process to store: itself if it has all the points of a user's table, otherwise a condensed one.

    Rows of published tables may not be stored, so their process keeps centres instead.
    """
    # A user's own points may be stored, and an exact process is nearer to them.
    if table.origin.kind == "measured" and len(table) <= MAX_POINTS:
        return process
    z = np.log(table.seconds / _base_of(table, base, setting))
    count = min(MAX_POINTS, int(CENTRES * len(table)))
    return process.condensed(_features(table, setting), z, count)


def _features(table: Table, setting: Setting) -> dict[str, Array]:
    return OPERATORS[table.kind].features(table.shape, setting)


def _base_of(table: Table, base: BaseFit, setting: Setting) -> Array:
    return base_seconds(OPERATORS[table.kind].terms(table.shape, setting), **base.model_dump())


class _CurveRows(NamedTuple):
    """Rows that one curve passes through, in ascending x."""

    at: dict[str, float]
    x: Array
    seconds: Array


def _lines(table: Table, setting: Setting) -> list[_CurveRows]:
    """Return the rows of a table, grouped by the parameters that one curve shares; none for kinds without curves.

    Exact curves pass only through rows that the user measured: published rows are not ours to keep.
    """
    form = OPERATORS[table.kind]
    if form.curve is None or (form.curve.exact_only and table.origin.kind != "measured"):
        return []
    shared = form.curve.shared
    x = form.curve.x(table.shape, form.terms(table.shape, setting))
    values = np.column_stack([np.zeros(len(table)), *(table.shape[name] for name in shared)])
    lines = []
    for value in np.unique(values, axis=0):
        rows = np.flatnonzero((values == value).all(1))
        rows = rows[np.argsort(x[rows], kind="stable")]
        if len(np.unique(x[rows])) >= curve.FEWEST:
            at = dict(zip(shared, value[1:].tolist(), strict=True))
            lines.append(_CurveRows(at, x[rows], table.seconds[rows]))
    return lines


def _fit_curve(line: _CurveRows, table: Table) -> Curve:
    if table.origin.kind == "measured" and len(np.unique(line.x)) == len(line.x):
        return curve.exact(*line)
    return curve.fit_curve(*line, table.resolution_s)


class _Fitted(NamedTuple):
    """A base, and the process of its residuals."""

    process: Process
    base: BaseFit


class _Scores(NamedTuple):
    """Log errors on rows that a fit did not see, and the sd that its process predicts there."""

    off: Array
    sd: Array


def _scores(process: Process, base: BaseFit, rows: Table, setting: Setting) -> _Scores:
    x = process.standardised(_features(rows, setting))
    return _Scores(np.log(rows.seconds / _base_of(rows, base, setting)) - process.mean(x), process.sd(x))


def _scores_without(
    table: Table, held: Mask, near: _Fitted | None, setting: Setting, sheet: tuple[float, float]
) -> _Scores | None:
    """Return scores of the rows held back, by a fit of all others that starts from `near` if given; None if no feature
    varies in the others."""
    rows = take(table, np.flatnonzero(~held))
    base = fit_base(rows, setting.processors, *sheet, setting.chip, near=None if near is None else near.base)
    fitted = _fit_process(rows, base, setting, None if near is None else near.process)
    if fitted is None:
        return None
    return _scores(_condensed(fitted, rows, base, setting), base, take(table, np.flatnonzero(held)), setting)


def _residual_interval(
    rows: Table,
    rest: Table,
    full: _Fitted,
    kept: Process,
    setting: Setting,
    sheet: tuple[float, float],
) -> Interval:
    """Calibrate an interval by log errors in units of the predicted sd: of rows that the process did not see, or,
    without any, of its own rows as predicted from the others.

    Unseen rows are better if there are some: the points of a large table cover it, and are not a sample of it.
    """
    method: Literal["cross-validation", "split"] = "split"
    if len(rest):
        scores = [_scores(kept, full.base, rest, setting)]
    else:
        method = "cross-validation"
        few = len(rows) < WARM_POINTS
        folds = _FEW_FOLDS if few else _FOLDS
        fold = np.random.default_rng(0).permutation(len(rows)) % folds
        near = None if few else full
        without = (_scores_without(rows, fold == i, near, setting, sheet) for i in range(folds))
        scores = [fold_scores for fold_scores in without if fold_scores is not None] or [
            _scores(kept, full.base, rows, setting)
        ]
    off, sd = (np.concatenate(column) for column in zip(*scores, strict=True))
    quantile = conformal_quantile(np.abs(off) / sd)
    return Interval(method=method, quantile=_short(quantile), log_sd=_short(float(np.median(sd)) * quantile / Z90))


def _outside(
    table: Table, full: _Fitted, setting: Setting, sheet: tuple[float, float], inside: float
) -> dict[str, float]:
    """Return, by shape parameter, the quantile of log errors beyond its largest values, in units of the predicted sd
    and of how far beyond they are (`GROWTH`): those values are left out of a fit of the others.

    Parameters with few values, and tables with few rows, give no quantile.
    """
    some = np.random.default_rng(0).permutation(len(table))[:OUTSIDE_ROWS]
    rows = take(table, np.sort(some))
    quantiles = {}
    for name, values in rows.shape.items():
        distinct = np.unique(values)
        if len(distinct) < _OUTSIDE_DISTINCT:
            continue
        shares = np.array([(values > value).mean() for value in distinct[:-1]])
        limit = distinct[int(np.abs(shares - _LEFT_OUT).argmin())]
        beyond = values > limit
        if beyond.sum() < _FEWEST or (~beyond).sum() < _OUTSIDE_KEPT:
            continue
        scores = _scores_without(rows, beyond, full, setting, sheet)
        if scores is not None:
            grown = scores.sd * (1 + octaves(values[beyond], limit)) ** GROWTH
            quantile = conformal_quantile(np.abs(scores.off) / grown)
            quantiles[name] = _short(max(quantile, _LEAST_OUTSIDE * inside))
    return quantiles


def _curve_interval(lines: list[_CurveRows], table: Table) -> Interval:
    """Calibrate an interval by every second row of every line, predicted by a curve through the others."""
    off = []
    for line in lines:
        for first in (0, 1):
            half_curve = _fit_curve(_CurveRows(line.at, line.x[first::2], line.seconds[first::2]), table)
            off.append(np.log(line.seconds[1 - first :: 2] / curve.seconds(half_curve, line.x[1 - first :: 2])))
    return _flat_interval(np.concatenate(off))


def _flat_interval(log_errors: Array) -> Interval:
    log_sd = conformal_quantile(np.abs(log_errors)) / Z90
    return Interval(method="split", quantile=_short(Z90), log_sd=_short(max(log_sd, _SMALLEST_SD)))


def conformal_quantile(scores: Array, level: float = LEVEL) -> float:
    """Return the (n + 1) level smallest of n scores, or their maximum: a new score is below it with probability `level`
    if it is exchangeable with them.

    Between two ranks it is interpolated, and the probability approximate: the next whole rank of 16 scores is their
    maximum, which 94 % are below.
    """
    ranks = np.arange(1, len(scores) + 1)
    return float(np.interp((len(scores) + 1) * level, ranks, np.sort(scores)))


def _sample(table: Table) -> Table:
    rows = np.random.default_rng(0).permutation(len(table))[:BASE_POINTS]
    return take(table, np.sort(rows))


def _short(value: float) -> float:
    """Round to six significant digits: more would only look exact."""
    return float(f"{value:.{_DIGITS}g}")


def fit_base(
    table: Table,
    processors: int,
    flops_per_s: float,
    bytes_per_s: float,
    chip: Chip = UNKNOWN,
    *,
    near: BaseFit | None = None,
) -> BaseFit:
    """Maximum a posteriori fit of the base parameters; the rates are those of the data sheet.

    Minimises a soft-L1 loss of log(predicted / measured) plus Gaussian priors on the logarithms of the
    parameters: rates at 70 % of the data sheet, overhead at 0.9 of the shortest time (the kind's own if the shortest
    were launches), block time, overlap and, if a kernel goes ahead, its time per value by the operator kind. They keep
    a fit on a few dozen points sane; a few hundred overrule them. If times were rounded, the rounding widens the scale
    of the loss. The search runs from several starts, or only from `near`, a fit of nearly the same rows.
    """
    from scipy.optimize import least_squares

    operator = OPERATORS[table.kind]
    terms = operator.terms(table.shape, Setting.of(processors, table.dtype, table.kv_dtype, chip))
    log_measured, sd = np.log(table.seconds), np.array(_PRIOR_SD)
    scale = np.hypot(_SCALE, table.resolution_s / np.sqrt(12) / table.seconds)
    sheet = (_SHEET_SHARE * flops_per_s, _SHEET_SHARE * bytes_per_s)
    # If the shortest rows were launches, the shortest of the others tells nothing of the overhead.
    overhead_s = 0.9 * float(table.seconds.min()) if table.launch_s is None else operator.overhead_s
    prior = np.log([*sheet, overhead_s, operator.block_s, operator.overlap])
    if processors > 1:
        sd[3] = operator.block_log_sd
    if np.any(terms.ahead):
        prior, sd = np.append(prior, np.log(operator.ahead_s)), np.append(sd, operator.ahead_log_sd)

    def residuals(theta: Array) -> Array:
        deviation = np.clip(np.log(_seconds(terms, theta)) - log_measured, -_FARTHEST, _FARTHEST) / scale
        soft = deviation * np.sqrt(2 / (1 + np.sqrt(1 + deviation**2)))
        return np.concatenate([soft, (theta - prior) / sd])

    def slopes(theta: Array) -> Array:
        seconds = _seconds(terms, theta)
        off = np.log(seconds) - log_measured
        root = np.sqrt(1 + (off / scale) ** 2)
        of_soft = np.where(np.abs(off) < _FARTHEST, np.sqrt((1 + root) / 2) / root / scale / seconds, 0.0)
        return np.concatenate([of_soft[:, None] * base_slopes(terms, theta), np.diag(1 / sd)])

    starts = [prior + shift * (np.arange(len(prior)) < 2) for shift in _STARTS]
    starts = starts if near is None else [_logarithms(near, len(prior))]
    fits = [least_squares(residuals, at, slopes, method="lm", max_nfev=_MAX_EVALUATIONS) for at in starts]
    best = np.exp(min(fits, key=lambda fit: float(fit.cost)).x)
    best[4] += 1
    return BaseFit(**{name: _short(value) for name, value in zip(BaseFit.model_fields, best, strict=False)})


def _seconds(terms: Terms, theta: Array) -> Array:
    flops_per_s, bytes_per_s, overhead_s, block_s, overlap, *ahead = np.exp(theta)
    return base_seconds(terms, flops_per_s, bytes_per_s, overhead_s, block_s, 1 + overlap, *ahead)


def _logarithms(base: BaseFit, count: int) -> Array:
    """Return the first `count` numbers of a base as `fit_base` varies them, none of them 0."""
    values: Array = np.array([getattr(base, name) for name in BaseFit.model_fields][:count])
    values[4] -= 1
    logarithms: Array = np.log(np.maximum(values, _TINY))
    return logarithms


def base_slopes(terms: Terms, theta: Array) -> Array:
    """Return (calls, parameters) derivatives of `base_seconds` with respect to theta: the logarithms of its parameters,
    of overlap_p less 1, and of ahead_s only if there is one.
    """
    flops_per_s, bytes_per_s, overhead_s, block_s, overlap, *ahead = np.exp(theta)
    p = 1 + overlap
    a, b = terms.flops / flops_per_s, terms.bytes / bytes_per_s
    longer = np.maximum(np.maximum(a, b), _TINY)
    share = np.minimum(a, b) / longer
    power = share**p
    work_s = longer * (1 + power) ** (1 / p)
    # share of the derivative by both logarithms that falls to the shorter of the two
    lesser = power / (1 + power)
    by_a = np.where(a >= b, 1 - lesser, lesser)
    by_p = lesser * np.log(np.maximum(share, _TINY)) / p - np.log1p(power) / p**2
    columns = [-work_s * by_a, -work_s * (1 - by_a), np.full(len(a), overhead_s), block_s * terms.blocks]
    columns += [work_s * by_p * overlap, *(ahead_s * terms.ahead for ahead_s in ahead)]
    return np.stack(columns, axis=-1)


def fit_imbalance(table: ImbalanceTable, form: OperatorForm, processors: int) -> float | None:
    """Fit seconds per token by which the longest context of a batch exceeds the mean, by least squares on the relative
    error; None if no rows show it, or the kind does not depend on it.
    """
    rows = form.imbalanced(table.mixed, table.blocks, processors)
    if rows.sum() < _FEWEST_IMBALANCED:
        return None
    balanced_s = table.balanced_s[rows]
    x, y = table.excess_tokens[rows] / balanced_s, table.imbalanced_s[rows] / balanced_s - 1
    slope = float(x @ y / (x @ x))
    return _short(slope) if slope > 0 else None


def fit_host(table: HostTable) -> tuple[float, float]:
    """Fit (seconds per step, seconds per sequence), both >= 0, by robust least squares on the relative error."""
    from scipy.optimize import least_squares, nnls

    def relative_error(theta: Array) -> Array:
        predicted: Array = theta[0] + theta[1] * table.num_seqs
        return predicted / table.seconds - 1

    terms = np.column_stack([np.ones(len(table.seconds)), table.num_seqs]) / table.seconds[:, None]
    start, _ = nnls(terms, np.ones(len(table.seconds)))
    shortest = float(table.seconds.min())
    scale = (shortest, shortest / float(table.num_seqs.max()))
    fit = least_squares(relative_error, start, bounds=(0, np.inf), x_scale=scale, loss="soft_l1", f_scale=_SCALE)
    return float(fit.x[0]), float(fit.x[1])
