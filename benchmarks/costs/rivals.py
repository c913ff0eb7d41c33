"""What the trusted predictor is compared with. Each takes a table and returns seconds for other shapes.

All see the raw shape parameters; the roofline sees the flops and bytes that `simtune.costs.operators` counts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from simtune.arrays import Array
from simtune.costs.operators import OPERATORS, Setting
from simtune.costs.tables import Table

Rival = Callable[[Table, Setting], Callable[[dict[str, Array]], Array]]


def roofline(table: Table, setting: Setting) -> Callable[[dict[str, Array]], Array]:
    """max(flops / P, bytes / B) with both rates fitted robustly."""
    from scipy.optimize import least_squares

    operator = OPERATORS[table.kind]

    def seconds(shape: dict[str, Array], log_rates: Array) -> Array:
        terms = operator.terms(shape, setting)
        longer: Array = np.maximum(terms.flops / np.exp(log_rates[0]), terms.bytes / np.exp(log_rates[1]))
        return longer

    def log_error(log_rates: Array) -> Array:
        error: Array = np.log(np.maximum(seconds(table.shape, log_rates), 1e-12) / table.seconds)
        return error

    fits = [
        least_squares(log_error, np.log([flops_per_s, bytes_per_s]), loss="soft_l1", f_scale=0.1)
        for flops_per_s, bytes_per_s in ((5e14, 2e12), (1e14, 1e12), (5e14, 2e11))
    ]
    best = min(fits, key=lambda fit: float(fit.cost)).x
    return lambda shape: seconds(shape, best)


def interpolation(table: Table, setting: Setting) -> Callable[[dict[str, Array]], Array]:
    """Linear in log-log on the measured points and the nearest point outside their hull; in more than four
    dimensions the eight nearest, weighted by the inverse square of their distance.
    """
    from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator
    from scipy.spatial import cKDTree

    varying = [name for name, x in table.shape.items() if np.ptp(x) > 0]
    jitter = np.random.default_rng(0).normal(0, 1e-6, (len(table), len(varying)))

    def logs(shape: dict[str, Array]) -> Array:
        return np.column_stack([np.log2(shape[name] + (name == "skew")) for name in varying])

    points, values = logs(table.shape) + jitter, np.log(table.seconds)
    if len(varying) == 1:
        order = np.argsort(points[:, 0])
        return lambda shape: np.exp(np.interp(logs(shape)[:, 0], points[order, 0], values[order]))
    if len(varying) > 4:
        tree = cKDTree(points)

        def nearby(shape: dict[str, Array]) -> Array:
            distance, at = tree.query(logs(shape), 8)
            weight = 1 / (np.asarray(distance) + 1e-9) ** 2
            weighted: Array = np.exp((weight * values[at]).sum(1) / weight.sum(1))
            return weighted

        return nearby
    linear, nearest = LinearNDInterpolator(points, values), NearestNDInterpolator(points, values)

    def between(shape: dict[str, Array]) -> Array:
        x = logs(shape)
        inside = linear(x)
        return np.exp(np.where(np.isnan(inside), nearest(x), inside))

    return between


def forest(table: Table, setting: Setting) -> Callable[[dict[str, Array]], Array]:
    """A random forest on raw sizes and raw times, as Vidur's: 250 trees, depth 32."""
    ensemble = pytest.importorskip("sklearn.ensemble", reason="the forest needs the extra `bench`: scikit-learn")
    trees = ensemble.RandomForestRegressor(n_estimators=250, max_depth=32, random_state=0)
    trees.fit(np.column_stack(list(table.shape.values())), table.seconds)
    return lambda shape: trees.predict(np.column_stack(list(shape.values())))


RIVALS: dict[str, Rival] = {"roofline": roofline, "log-log": interpolation, "forest": forest}
