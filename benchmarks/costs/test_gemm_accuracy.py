"""How far off matrix products are on rows nobody trained on: seven devices, three engines, four formats.

    python -m pytest benchmarks/costs/test_gemm_accuracy.py -m benchmark_only -s

200 rows of each table train, up to 3,000 others test, three seeds: at random, and with sizes n or k over 8,192 held
back. Errors are |predicted / measured - 1| in per cent, median / 90th percentile, averaged over seeds; coverage is of
90 % intervals. The form was chosen on the tables of H100, B200 and L40S; the others had no say in it. A target is one
of the mean over its tables. vLLM's tables of block-scaled 8-bit products time its launches one by one, which the screen
refuses; they are shown to be so, not counted. Rivals on two tables. Tables of one card by two engines whose 16-bit
kernels are the same library differ by 3 % at the median and 9 to 21 % at the 90th percentile: no model of one of them
can be much nearer to the other.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.costs.rivals import RIVALS
from benchmarks.results import Recorder
from simtune.costs.fit import fit_predictor, split_rows
from simtune.costs.hardware_profile import data_sheet
from simtune.costs.operators import OPERATORS, Setting
from simtune.costs.operators.splits import RANDOM, Split
from simtune.costs.predict import Z90, Predictor
from simtune.costs.tables import Table, read_tables, take
from simtune.costs.tables.screen import Sheet
from simtune.specs.hardware import Facts

pytestmark = pytest.mark.benchmark_only

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (0, 1, 2)
PROFILES = {
    "a100_sxm": "a100-sxm-80g",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200",
    "gb200": "gb200",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
BEYOND = next(split for split in OPERATORS["gemm"].splits if split.name.startswith("dims"))


class Errors(NamedTuple):
    """In per cent, means over the seeds: of the fit, of its base alone; and the share inside 90 % intervals."""

    median: float
    p90: float
    base_median: float
    base_p90: float
    coverage: float

    def __str__(self) -> str:
        fit, base = f"{self.median:.1f} / {self.p90:.1f}", f"{self.base_median:.1f} / {self.base_p90:.1f}"
        return f"{fit:>11} (base {base:>12}) {self.coverage:3.0f} % inside"


@cache
def tables(data_dir: Path, device: str) -> dict[tuple[str, str], Table]:
    """The tables of products of a device, by engine and dtype."""
    found: dict[tuple[str, str], Table] = {}
    for path in sorted((data_dir / "profiles/aiconfigurator_0.12" / device).glob("*_gemm_perf.parquet")):
        for table in read_tables([path]).operators.values():
            rows = np.minimum(table.shape["n"], table.shape["k"]) >= (1024 if device == "l40s" else 0)
            if rows.sum() > 500:
                found[str(table.engine), table.dtype] = take(table, np.flatnonzero(rows))
    return found


@cache
def facts(device: str) -> Facts:
    return Facts.from_file(ROOT / "simtune/hwprofiles" / PROFILES[device] / "facts.yaml")


@cache
def errors(data_dir: Path, device: str, engine: str, dtype: str, split: Split) -> Errors:
    table, rows = tables(data_dir, device)[engine, dtype], []
    sheet = data_sheet(table, facts(device))
    for seed in SEEDS:
        train, test = split_rows(table, split, seed=seed)
        tested = take(table, test)
        fitted = fit_predictor(take(table, train), *sheet_of(sheet))
        base = Predictor(fitted.operator.model_copy(update={"residual": None, "curves": ()}), sheet.processors)
        ratios = [predictor.seconds(**tested.shape) / tested.seconds for predictor in (fitted, base)]
        inside = np.abs(np.log(ratios[0])) <= Z90 * fitted.log_sd(**tested.shape)
        off = [100 * float(q) for ratio in ratios for q in np.quantile(np.abs(ratio - 1), (0.5, 0.9))]
        rows.append((*off, 100 * float(inside.mean())))
    return Errors(*np.mean(rows, axis=0).tolist())


def sheet_of(sheet: Sheet) -> tuple[int, float, float]:
    return sheet.processors, sheet.flops_per_s, sheet.bytes_per_s


def chosen(data_dir: Path, devices: tuple[str, ...], dtypes: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Tables of kernels, not of launches, by device, engine and dtype."""
    return [
        (device, engine, dtype)
        for device in devices
        for engine, dtype in tables(data_dir, device)
        if dtype in dtypes and (engine, dtype) != ("vllm", "fp8_block")
    ]


CARDS = ("h100_sxm", "h200_sxm", "b200_sxm", "gb200", "rtx_pro_6000_server")
TARGETS = {
    "bf16": (CARDS, ("bf16",), (4.5, 14.0)),
    "bf16, n and k from 1,024 on": (("l40s",), ("bf16",), (6.0, 20.0)),
    "8 and 4 bits": (CARDS, ("fp8", "fp8_block", "nvfp4"), (5.0, 16.0)),
}


@pytest.mark.parametrize("split", [RANDOM, BEYOND], ids=lambda split: split.name)
@pytest.mark.parametrize("name", TARGETS)
def test_products(name: str, split: Split, data_dir: Path, record: Recorder) -> None:
    devices, dtypes, at_random = TARGETS[name]
    target = at_random if split is RANDOM else (9.0, 27.0)
    found = []
    for device, engine, dtype in chosen(data_dir, devices, dtypes):
        row = errors(data_dir, device, engine, dtype, split)
        print(f"\n{device:20} {engine:7} {dtype:10} {split.name}: {row}", end="")
        found.append(row)
    mean = Errors(*np.mean(found, axis=0).tolist())
    met = "met" if mean.median <= target[0] and mean.p90 <= target[1] else "MISSED"
    print(
        f"\n  mean of {len(found)}, {name}, {split.name} (target {target[0]:g} / {target[1]:g}, {met}): {mean}", end=""
    )
    for what, percent in (("median", mean.median), ("p90", mean.p90)):
        record(f"GEMM {name}, {split.name}, {what}", percent, "% off", "lower")
    assert mean.coverage >= 85


@pytest.mark.parametrize(("device", "dtype"), [("h200_sxm", "bf16"), ("h200_sxm", "fp8")])
def test_beside_rivals(device: str, dtype: str, data_dir: Path) -> None:
    table = tables(data_dir, device)["vllm", dtype]
    setting = Setting.of(facts(device).device.processors, dtype, None)
    for split in (RANDOM, BEYOND):
        shown = {"ours": errors(data_dir, device, "vllm", dtype, split)[:2]}
        for rival, fit in RIVALS.items():
            off = []
            for seed in SEEDS:
                train, test = split_rows(table, split, seed=seed)
                tested = take(table, test)
                ratio = fit(take(table, train), setting)(tested.shape) / tested.seconds
                off.append(100 * np.quantile(np.abs(ratio - 1), (0.5, 0.9)))
            shown[rival] = tuple(np.mean(off, axis=0))
        words = "  ".join(f"{who} {median:.1f} / {p90:.1f}" for who, (median, p90) in shown.items())
        print(f"\n{device} vllm {dtype}, {split.name}: {words}", end="")
        assert shown["ours"] == min(shown.values())
