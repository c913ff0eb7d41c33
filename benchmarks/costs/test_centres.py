"""What to keep of a large table: the exact process of as many rows as it may have, or that many centres of all rows.

    python -m pytest benchmarks/costs/test_centres.py -m benchmark_only -s

On 3,000 random rows, or half of them, that neither has seen, of the published A100 and H100 tables. The choice was made
here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.arrays import Array
from simtune.costs.fit import BASE_POINTS, fit_base, split_rows
from simtune.costs.operators import OPERATORS, Setting
from simtune.costs.operators.splits import RANDOM
from simtune.costs.predict import base_seconds
from simtune.costs.residual import MAX_POINTS, cover, fit_process
from simtune.costs.tables import Table, read_tables, take
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import BaseFit

pytestmark = pytest.mark.benchmark_only


@pytest.mark.parametrize(
    ("folder", "profile"), [("a100_sxm", "a100-sxm-80g"), ("h100_sxm", "h100-sxm")], ids=["A100", "H100"]
)
def test_rows_or_centres(folder: str, profile: str, data_dir: Path, record: Recorder) -> None:
    device = load_hardware(profile).device
    for key, table in read_tables([data_dir / "profiles/aiconfigurator" / folder]).operators.items():
        if OPERATORS[table.kind].link or table.dtype == "int4":
            continue
        setting = Setting.of(device.processors, table.dtype, table.kv_dtype)
        test, train = (take(table, rows) for rows in split_rows(table, RANDOM, len(table) // 2)[::-1])
        sample = take(train, np.arange(min(BASE_POINTS, len(train))))  # rows of a random split are in no order
        base = fit_base(sample, device.processors, device.flops_per_s[table.dtype], device.memory_bytes_per_s)

        def base_of(rows: Table, base: BaseFit = base, setting: Setting = setting) -> Array:
            return base_seconds(OPERATORS[rows.kind].terms(rows.shape, setting), **base.model_dump())

        by_name, z = OPERATORS[table.kind].features(train.shape, setting), np.log(train.seconds / base_of(train))
        chosen = cover(by_name, MAX_POINTS)
        exact = fit_process({name: x[chosen] for name, x in by_name.items()}, z[chosen])
        assert exact is not None
        errors = {}
        for name, process in (("rows", exact), ("centres", exact.condensed(by_name, z, MAX_POINTS))):
            correction = process.mean(process.standardised(OPERATORS[table.kind].features(test.shape, setting)))
            off = np.abs(base_of(test) * np.exp(correction) / test.seconds - 1)
            errors[name] = 100 * np.quantile(off, (0.5, 0.9))
        print(f"\n{profile} {key}: " + ", ".join(f"{n} {a:.1f} / {b:.1f} %" for n, (a, b) in errors.items()), end="")
        for what, percent in zip(("median", "p90"), errors["centres"], strict=True):
            record(f"{profile} {key}, centres, {what}", percent, "% off", "lower")
        assert errors["centres"][0] <= errors["rows"][0]
