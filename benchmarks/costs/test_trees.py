"""Trees on the features of the process, in its place: how far off are they on rows that neither saw?

    python -m pytest benchmarks/costs/test_trees.py -m benchmark_only -s

Both are fitted to the log of what the same base leaves over of the same rows, three seeds: random rows, and rows beyond
a size that training rows do not pass. Boosted trees (300 of 31 leaves) and extremely randomised trees (300) have
scikit-learn's defaults otherwise. The process is also fitted with lengths from 1,000 rows, not 500; its centres stay
500. Errors are |predicted / measured - 1| in per cent, median / p90, means over seeds.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.arrays import Array
from simtune.costs import fit
from simtune.costs.operators import OPERATORS, Setting
from simtune.costs.operators.splits import RANDOM
from simtune.costs.predict import Predictor, base_seconds
from simtune.costs.residual import MAX_POINTS
from simtune.costs.tables import Table, read_tables, take

pytestmark = pytest.mark.benchmark_only

PROCESSORS = 132
SHEETS = {"bf16": (989e12, 3.35e12), "fp8": (1979e12, 3.35e12), "fp8_block": (1979e12, 3.35e12)}
FOLDER = "profiles/aiconfigurator/h100_sxm"
KEYS = ("gemm.bf16", "gemm.fp8_block", "prefill_attention.bf16", "decode_attention.bf16", "moe.bf16", "moe.fp8_block")
POINTS, SEEDS = (200, 4000), (0, 1, 2)
Fit = Callable[[Array, Array], Callable[[Array], Array]]


def boosted(x: Array, z: Array) -> Callable[[Array], Array]:
    ensemble = pytest.importorskip("sklearn.ensemble", reason="trees need the extra `bench`: scikit-learn")
    model = ensemble.HistGradientBoostingRegressor(max_iter=300, min_samples_leaf=5, random_state=0)
    predict: Callable[[Array], Array] = model.fit(x, z).predict
    return predict


def randomised(x: Array, z: Array) -> Callable[[Array], Array]:
    ensemble = pytest.importorskip("sklearn.ensemble", reason="trees need the extra `bench`: scikit-learn")
    model = ensemble.ExtraTreesRegressor(n_estimators=300, random_state=0)
    predict: Callable[[Array], Array] = model.fit(x, z).predict
    return predict


TREES: dict[str, Fit] = {"boosted trees": boosted, "randomised trees": randomised}


@pytest.fixture(scope="module")
def tables(data_dir: Path) -> dict[str, Table]:
    return dict(read_tables([data_dir / FOLDER]).operators)


def longer(table: Table, sheet: tuple[float, float]) -> Predictor:
    """The process with its lengths, signal and noise from 1,000 rows."""
    of_few = fit._fit_process

    def of_more(*arguments: Any, **options: Any) -> Any:
        with mock.patch("simtune.costs.fit.MAX_POINTS", 2 * MAX_POINTS):
            return of_few(*arguments, **options)

    with mock.patch("simtune.costs.fit._fit_process", of_more):
        return fit.fit_predictor(table, PROCESSORS, *sheet)


def _features(table: Table, setting: Setting) -> Array:
    return np.column_stack(list(OPERATORS[table.kind].features(table.shape, setting).values()))


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("key", KEYS)
def test_trees_in_place_of_the_process(key: str, points: int, tables: dict[str, Table], record: Recorder) -> None:
    if key not in tables:
        pytest.skip(f"{key}: no table in {FOLDER}")
    table, sheet = tables[key], SHEETS[tables[key].dtype]
    form, setting = OPERATORS[table.kind], Setting.of(PROCESSORS, table.dtype, table.kv_dtype)
    for split in dict.fromkeys([RANDOM, *form.splits]):
        errors: dict[str, list[Array]] = {}
        fit_s: dict[str, float] = {}
        for seed in SEEDS:
            train, test = fit.split_rows(table, split, points, seed)
            if min(len(train), len(test)) < 50:
                continue
            trained, tested = take(table, train), take(table, test)
            begin = time.process_time()
            process = fit.fit_predictor(trained, PROCESSORS, *sheet)
            fit_s["process"] = fit_s.get("process", 0.0) + time.process_time() - begin
            base = process.operator.base.model_dump()
            predicted = {"process": process.seconds(**tested.shape)}
            if len(trained) >= 2000:
                predicted["process, lengths from 1,000"] = longer(trained, sheet).seconds(**tested.shape)
            trained_s, tested_s = (base_seconds(form.terms(rows.shape, setting), **base) for rows in (trained, tested))
            predicted["base alone"] = tested_s
            x, z = _features(trained, setting), np.log(trained.seconds / trained_s)
            for name, grown in TREES.items():
                begin = time.process_time()
                predict = grown(x, z)
                fit_s[name] = fit_s.get(name, 0.0) + time.process_time() - begin
                predicted[name] = tested_s * np.exp(predict(_features(tested, setting)))
                if seed == SEEDS[-1] and split is RANDOM:
                    record(f"{key}, {points} rows, {name}: size", len(pickle.dumps(predict)) / 1024, "KiB", "lower")
            for name, seconds in predicted.items():
                off = np.abs(seconds / tested.seconds - 1)
                errors.setdefault(name, []).append(100 * np.quantile(off, (0.5, 0.9)))
        if not errors:
            continue
        means = {name: np.mean(of_seeds, axis=0) for name, of_seeds in errors.items()}
        words = (
            f"{name} {m:.1f} / {p:.1f}, {fit_s.get(name, 0.0) / len(SEEDS):.1f} s" for name, (m, p) in means.items()
        )
        print(f"\n{key}, {points} rows, {split.name}: " + "; ".join(words), end="")
        for name, (m, p) in means.items():
            record(f"{key}, {points} rows, {split.name}, {name}: median", m, "% off", "lower")
            record(f"{key}, {points} rows, {split.name}, {name}: p90", p, "% off", "lower")
