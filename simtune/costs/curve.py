"""Time along one line of shapes: collectives over bytes, elementwise operators over bytes, one weight matrix over
rows.

Straight in log-log between knots, since 20 sizes per curve support nothing better; linear in x beyond the last knot,
with the slope of the last two, for a link or a memory at full rate; constant below the first.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simtune.arrays import Array
from simtune.specs.hardware import Curve

MAX_KNOTS = 12
FEWEST = 4
"""Number of distinct x below which there is no curve."""

# Deviations of 10 % and more count linearly.
_SCALE = 0.1
# weight of a bend of one knot against its neighbours relative to a deviation
_STIFFNESS = 0.02
_REWEIGHTINGS = 20

_GROWTH = 0.5
"""Share of the growth from a measured group to the next that continues beyond: nearly all of it on L40S, a sixth on RTX
PRO 6000, none under NVLink."""


def seconds(curve: Curve, x: Array) -> Array:
    """Return seconds at x."""
    knots, times = np.array(curve.x), np.array(curve.seconds)
    inside = np.exp(np.interp(np.log(np.maximum(x, knots[0])), np.log(knots), np.log(times)))
    slope = max(0.0, float((times[-1] - times[-2]) / (knots[-1] - knots[-2])))
    beyond: Array = times[-1] + slope * (x - knots[-1])
    return np.where(x > knots[-1], beyond, inside)


def exact(at: Mapping[str, float], x: Array, measured: Array) -> Curve:
    """Return the curve through all measured points; x ascends."""
    return Curve(at=dict(at), x=tuple(x.tolist()), seconds=tuple(measured.tolist()))


def fit_curve(at: Mapping[str, float], x: Array, measured: Array, resolution_s: float = 0.0) -> Curve:
    """Fit the curve of few knots that comes nearest the measured points, outliers counting little.

    At most `MAX_KNOTS` knots, evenly spaced in log x and fewer than two thirds of the distinct x. If times were rounded
    to `resolution_s`, the rounding widens the scale of the loss.
    """
    log_x, log_t = np.log(x), np.log(measured)
    distinct = len(np.unique(x))
    count = max(2, min(MAX_KNOTS, 2 * distinct // 3))
    knots = np.linspace(log_x.min(), log_x.max(), count)
    hats = np.stack([np.interp(log_x, knots, unit) for unit in np.eye(count)], axis=-1)
    bends = _STIFFNESS * np.sqrt(len(x)) * np.diff(np.eye(count), 2, axis=0)
    scale = np.hypot(_SCALE, resolution_s / np.sqrt(12) / measured)
    weight = 1 / scale
    # Soft-L1 by reweighted least squares.
    for _ in range(_REWEIGHTINGS):
        system = np.vstack([hats * weight[:, None], bends])
        level = np.linalg.lstsq(system, np.concatenate([log_t * weight, np.zeros(len(bends))]), rcond=None)[0]
        deviation = (hats @ level - log_t) / scale
        weight = (1 + deviation**2) ** -0.25 / scale
    digits = [(float(f"{x:.6g}"), float(f"{t:.6g}")) for x, t in zip(np.exp(knots), np.exp(level), strict=True)]
    return Curve(at=dict(at), x=tuple(x for x, _ in digits), seconds=tuple(t for _, t in digits))


def stretched(curve: Curve, bytes_ratio: float) -> Curve:
    """Return the curve with the same times for `bytes_ratio` times the bytes: its rate is scaled, its floor stays."""
    return curve.model_copy(update={"x": tuple(float(f"{x * bytes_ratio:.6g}") for x in curve.x)})


def per_rank_s(curves: Mapping[int, Curve]) -> float:
    """Return the latency that each further device adds: the difference of the floors of the smallest and the largest
    group, per device between them.
    """
    low, high = min(curves), max(curves)
    if low == high:
        return 0.0
    return max(0.0, (curves[high].seconds[0] - curves[low].seconds[0]) / (high - low))


def seconds_of_group(curves: Mapping[int, Curve], devices: int, x: Array) -> Array:
    """Seconds of a collective over `devices` devices that moves x bytes.

    The time of an unmeasured size of group, for the same bytes moved, lies on a line in the number of devices between
    the next smaller and the next larger one. Beyond the largest it is that group's time, plus the latency of the
    further devices; but at least `_GROWTH` of the factor by which the last two differ, in logarithms and for every
    doubling of them: groups that leave a socket share a slower link. 8 devices from 2 and 4 are off by 10-11 / 29
    % (median / p90) on cards with NVLink and 13-28 / 29-42 on PCIe, 4 from 2 and 8 by 4-5 / 15-18 and 17-18 / 23-36
    (benchmarks/costs/test_moe_accuracy.py).
    """
    if devices in curves:
        return seconds(curves[devices], x)
    smaller, larger = sorted(n for n in curves if n < devices), sorted(n for n in curves if n > devices)
    if smaller and larger:
        below, above = smaller[-1], larger[0]
        share = (devices - below) / (above - below)
        return (1 - share) * seconds(curves[below], x) + share * seconds(curves[above], x)
    nearest = smaller[-1] if smaller else larger[0]
    time = np.maximum(0, seconds(curves[nearest], x) + (devices - nearest) * per_rank_s(curves))
    if len(smaller) > 1:
        factor = seconds(curves[nearest], x) / seconds(curves[smaller[-2]], x)
        doublings = np.log(devices / nearest) / np.log(nearest / smaller[-2])
        time = np.maximum(time, seconds(curves[nearest], x) * np.maximum(factor, 1) ** (_GROWTH * doublings))
    return time
