"""Fit the base parameters of one operator to measured times, and say how far off the fit is on times it did
not see.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simtune.costs.operators import OPERATORS, Array, Setting, Terms
from simtune.costs.predict import base_seconds
from simtune.costs.tables import HostTable, Table, take
from simtune.specs.hardware import BaseFit, HoldOut

TRAIN_POINTS = 200
TEST_POINTS = 3000

_SCALE = 0.1  # deviations of 10 % and more count linearly
_SHEET_SHARE = 0.7  # kernels reach about 70 % of the data sheet
_PRIOR_SD = np.array([0.7, 0.7, 0.5, 1.5, 1.0])  # of log flops_per_s, bytes_per_s, overhead_s, block_s, overlap_p - 1
_STARTS = (0.0, -1.5, 1.0)  # shifts of both log rates from the prior
_MAX_EVALUATIONS = 200


def fit_base(table: Table, processors: int, flops_per_s: float, bytes_per_s: float) -> BaseFit:
    """Maximum a posteriori fit of the five base parameters; the rates are those of the data sheet.

    Minimises a soft-L1 loss of log(predicted / measured) plus Gaussian priors on the logarithms of the
    parameters: rates at 70 % of the data sheet, overhead at 0.9 of the shortest time, block time and
    overlap as the operator kind says. The priors keep a fit on a few dozen points sane; a few hundred
    overrule them. Where times were rounded, the rounding widens the scale of the loss.
    """
    from scipy.optimize import least_squares

    operator = OPERATORS[table.kind]
    terms = operator.terms(table.shape, Setting.of(processors, table.dtype, table.kv_dtype))
    log_measured = np.log(table.seconds)
    scale = np.hypot(_SCALE, table.resolution_s / np.sqrt(12) / table.seconds)
    sheet = (_SHEET_SHARE * flops_per_s, _SHEET_SHARE * bytes_per_s)
    prior = np.log([*sheet, 0.9 * table.seconds.min(), operator.block_s, operator.overlap])

    def residuals(theta: Array) -> Array:
        deviation = np.clip(np.log(_seconds(terms, theta)) - log_measured, -6, 6) / scale
        soft = np.sign(deviation) * np.sqrt(2 * (np.sqrt(1 + deviation**2) - 1))
        return np.concatenate([soft, (theta - prior) / _PRIOR_SD])

    fits = [
        least_squares(residuals, prior + np.array([shift, shift, 0, 0, 0]), max_nfev=_MAX_EVALUATIONS)
        for shift in _STARTS
    ]
    best = np.exp(min(fits, key=lambda fit: float(fit.cost)).x)
    return BaseFit(flops_per_s=best[0], bytes_per_s=best[1], overhead_s=best[2], block_s=best[3], overlap_p=1 + best[4])


def _seconds(terms: Terms, theta: Array) -> Array:
    flops_per_s, bytes_per_s, overhead_s, block_s, overlap = np.exp(theta)
    return base_seconds(terms, flops_per_s, bytes_per_s, overhead_s, block_s, 1 + overlap)


def hold_out(
    table: Table,
    processors: int,
    flops_per_s: float,
    bytes_per_s: float,
    *,
    unseen: Sequence[str] = (),
    train_points: int = TRAIN_POINTS,
    seed: int = 0,
) -> HoldOut:
    """Errors of a fit on `train_points` random rows (at most half of them), on up to 3,000 rows it did not
    see.

    With `unseen` parameter names, a fifth of all their combinations is held back, and the test is on these
    alone.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(table))
    train, test = order, order
    if unseen:
        _, group = np.unique(np.column_stack([table.shape[name] for name in unseen]), axis=0, return_inverse=True)
        group = group.ravel()
        held = np.isin(group, rng.permutation(group.max() + 1)[: (group.max() + 1) // 5])
        train, test = order[~held[order]], order[held[order]]
    count = min(train_points, len(table) // 2)
    train = train[:count]
    test = (test if unseen else test[count:])[:TEST_POINTS]
    fit = fit_base(take(table, train), processors, flops_per_s, bytes_per_s)
    held_back = take(table, test)
    terms = OPERATORS[table.kind].terms(held_back.shape, Setting.of(processors, table.dtype, table.kv_dtype))
    error = np.abs(base_seconds(terms, **fit.model_dump()) / held_back.seconds - 1)
    return HoldOut(
        split="unseen (" + ", ".join(unseen) + ")" if unseen else "random",
        train_points=len(train),
        test_points=len(test),
        median=float(np.median(error)),
        p90=float(np.quantile(error, 0.9)),
        max=float(error.max()),
    )


def fit_host(table: HostTable) -> tuple[float, float]:
    """(seconds per step, seconds per sequence), both >= 0, by robust least squares on the relative error."""
    from scipy.optimize import least_squares

    def relative_error(theta: Array) -> Array:
        predicted: Array = theta[0] + theta[1] * table.num_seqs
        return predicted / table.seconds - 1

    start = float(table.seconds.min())
    scale = (start, start / float(table.num_seqs.max()))
    fit = least_squares(relative_error, [start, 0.0], bounds=(0, np.inf), x_scale=scale, loss="soft_l1", f_scale=_SCALE)
    return float(fit.x[0]), float(fit.x[1])
