"""Intervals: what is planted is covered as often as promised, however the interval was calibrated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simtune.arrays import Array
from simtune.costs.fit import conformal_quantile, fit_predictor
from simtune.costs.operators import OPERATORS, Setting
from simtune.costs.predict import Z90, base_seconds
from simtune.costs.tables import Origin, Table
from simtune.specs.hardware import OperatorKind

PROCESSORS, FLOPS, BYTES = 100, 8e14, 3e12
BASE = {"flops_per_s": 6e14, "bytes_per_s": 2.2e12, "overhead_s": 5e-6, "block_s": 2e-6, "overlap_p": 2.0}


def measured(rows: int, seed: int, kind: OperatorKind = "gemm") -> Table:
    """Matrix products, or all-reduces of four devices, with a bend the base does not know, and heavy-tailed
    noise of about 5 %.
    """
    rng = np.random.default_rng(seed)

    def sizes(low: float, high: float) -> Array:
        return np.rint(np.exp(rng.uniform(np.log(low), np.log(high), rows)))

    if kind == "gemm":
        shape = {"m": sizes(1, 8192), "n": sizes(64, 16384), "k": sizes(64, 16384)}
        bend = 0.3 * np.sin(np.log2(shape["m"]))
    else:
        shape = {"devices": np.full(rows, 4.0), "bytes": sizes(256, 2**30)}
        bend = 0.1 * np.sin(np.log2(shape["bytes"]) / 3)
    exact = base_seconds(OPERATORS[kind].terms(shape, Setting.of(PROCESSORS, "bf16", None)), **BASE)
    noise = 0.03 * rng.standard_t(4, rows)
    return Table(kind, "bf16", shape, exact * np.exp(bend + noise), Origin("made up", None), ("x",))


@pytest.mark.parametrize(
    ("rows", "kind", "method"),
    [
        (20, "gemm", "cross-validation"),
        (60, "gemm", "cross-validation"),
        (200, "gemm", "cross-validation"),
        (900, "gemm", "split"),
        (80, "all_reduce", "split"),
    ],
)
def test_ninety_per_cent_hold_ninety_per_cent(rows: int, kind: OperatorKind, method: str) -> None:
    coverage, widths = [], []
    for seed in range(4):
        predictor = fit_predictor(measured(rows, seed, kind), PROCESSORS, FLOPS, BYTES)
        interval = predictor.operator.interval
        assert interval is not None
        assert interval.method == method
        fresh = measured(1500, 100 + seed, kind)
        inside = predictor.inside(**fresh.shape)
        off = np.abs(np.log(predictor.seconds(**fresh.shape) / fresh.seconds))
        sd = predictor.log_sd(**fresh.shape)
        coverage.append(float((off <= Z90 * sd)[inside].mean()))
        widths.append(interval.log_sd / float(np.median(sd[inside])))
    assert 0.85 <= np.mean(coverage) <= 0.97
    assert np.median(widths) == pytest.approx(1, abs=0.4), "the one number is typical"


def test_more_points_are_surer() -> None:
    few, many = (fit_predictor(measured(n, 0), PROCESSORS, FLOPS, BYTES).operator.interval for n in (40, 400))
    assert few is not None
    assert many is not None
    assert many.log_sd < 0.8 * few.log_sd


def test_conformal_quantiles_by_hand() -> None:
    """Of n scores the 0.9 (n + 1) smallest, between two of them where that is no whole number; of fewer than nine the
    largest.
    """
    scores = np.random.default_rng(0).permutation(np.arange(1.0, 100.0))
    assert conformal_quantile(scores) == 90.0
    assert conformal_quantile(np.arange(1.0, 10.0)) == 9.0
    assert conformal_quantile(np.arange(1.0, 17.0)) == pytest.approx(15.3)
    assert conformal_quantile(np.array([3.0, 1.0])) == 3.0


def test_ranges_left_out_say_how_errors_grow_beyond() -> None:
    """Beyond the largest m the bend goes on, which nobody measured."""
    table = measured(300, 0)
    fitted = fit_predictor(table, PROCESSORS, FLOPS, BYTES)
    interval = fitted.operator.interval
    assert interval is not None
    assert set(interval.outside) == {"m", "n", "k"}
    high = fitted.operator.box["m"][1]
    sd = fitted.log_sd(m=high * np.array([1, 2, 8, 64]), n=1024, k=1024)
    assert (np.diff(sd) > 0).all(), "the farther outside, the less is known"
    far = measured(2000, 1)
    beyond = {name: 16 * x if name == "m" else x for name, x in far.shape.items()}
    bend = 0.3 * np.sin(np.log2(beyond["m"]))
    setting = Setting.of(PROCESSORS, "bf16", None)
    exact = base_seconds(OPERATORS["gemm"].terms(beyond, setting), **BASE) * np.exp(bend)
    outside = beyond["m"] > high
    off = np.abs(np.log(fitted.seconds(**beyond) / exact))
    assert 0.8 <= float((off <= Z90 * fitted.log_sd(**beyond))[outside].mean()) <= 1


def test_few_products_measured_often_are_families() -> None:
    """Two weight matrices at many sizes of batch; as many products as rows are no family."""
    table = measured(200, 0)
    shape = {**table.shape, "n": np.repeat([1024.0, 4096.0], 100), "k": np.repeat([4096.0, 1024.0], 100)}
    few = fit_predictor(replace(table, shape=shape), PROCESSORS, FLOPS, BYTES)
    assert few.operator.families == ({"n": 1024.0, "k": 4096.0}, {"n": 4096.0, "k": 1024.0})
    assert not fit_predictor(measured(20, 0), PROCESSORS, FLOPS, BYTES).operator.families
