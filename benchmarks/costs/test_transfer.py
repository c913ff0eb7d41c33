"""How far off a transferred profile is: from one measured device to another whose tables had no part in it.

    python -m pytest benchmarks/costs/test_transfer.py -m benchmark_only -s
    python benchmarks/costs/test_transfer.py ../shared/data > hwprofiles/transfer.yaml

The first prints the errors and holds `hwprofiles/transfer.yaml` against them; the second writes that file. Each shipped
fit is moved to the data sheet of another device and predicts up to 3,000 random rows of that device's tables. The pairs
within one architecture and to devices without tables here are those of an earlier study, whose predictor is the
same; it checked matrix products only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.costs.predict import Predictor
from simtune.costs.profile import Facts, data_sheet
from simtune.costs.tables import read_tables, take
from simtune.costs.tables.screen import screen
from simtune.costs.transfer import Pair, TransferError, TransferErrors, known_errors, transfer
from simtune.specs.catalog import load_hardware

pytestmark = pytest.mark.benchmark_only

ROOT = Path(__file__).resolve().parents[2]
ROWS = 3000
FOUND_BY = "benchmarks/costs/test_transfer.py"

SOURCES = {
    "h100-sxm": ("aiconfigurator/h100_sxm", "vidur/h100"),
    "a100-sxm-80g": ("aiconfigurator/a100_sxm", "vidur/a100"),
    "rtx-4090": ("llmservingsim/rtx4090",),
}
CHECKED = (
    ("h100-sxm", "a100-sxm-80g"),
    ("a100-sxm-80g", "h100-sxm"),
    ("h100-sxm", "rtx-4090"),
    ("a100-sxm-80g", "rtx-4090"),
)

STUDY = (
    "an earlier study on AIConfigurator's tables of both devices: GEMM bf16, residual of the source on the roofline of "
    "the target"
)
STUDIED = (
    ("h100-sxm", "h200-sxm", "sm_90", "sm_90", 4.8e12, 0.050, 0.13),
    ("h200-sxm", "h100-sxm", "sm_90", "sm_90", 3.35e12, 0.058, 0.15),
    ("h200-sxm", "b200", "sm_90", "sm_100", 7.7e12, 0.094, 0.24),
    ("h200-sxm", "l40s", "sm_90", "sm_89", 8.64e11, 0.18, 0.62),
)
"""Architectures, memory rate of the target, median and 90th percentile of transfers between public tables."""

NOTHING_KNOWN = TransferErrors(
    name="none",
    pairs=(
        Pair(
            source="a",
            target="b",
            source_architecture="a",
            target_architecture="b",
            target_memory_bytes_per_s=1,
            found_by="nobody",
            errors={"gemm.bf16": TransferError(median=0, p90=0)},
        ),
    ),
)
"""The predictions looked at here do not depend on what is known of their errors."""


def facts_of(name: str) -> Facts:
    return Facts.from_file(ROOT / "hwprofiles" / name / "facts.yaml")


def check(source: str, target: str, data_dir: Path) -> Pair:
    """The errors of the shipped fit of the source, moved to the target, on the target's tables."""
    facts, shipped = facts_of(target), load_hardware(source)
    moved = transfer(shipped, facts, NOTHING_KNOWN)
    tables = read_tables([data_dir / "profiles" / folder for folder in SOURCES[target]]).operators
    errors = {}
    for key in sorted(set(tables) & set(moved.operators)):
        table = screen(tables[key], data_sheet(tables[key], facts))
        rows = take(table, np.random.default_rng(0).permutation(len(table))[:ROWS])
        predicted = Predictor(moved.operators[key], facts.device.processors, moved.arrays).seconds(**rows.shape)
        off = np.abs(predicted / rows.seconds - 1)
        quantiles = {"median": np.median(off), "p90": np.quantile(off, 0.9), "max": off.max()}
        errors[key] = TransferError(points=len(rows), **{k: round(float(v), 3) for k, v in quantiles.items()})
    architectures = shipped.device.architecture, facts.device.architecture
    assert architectures[0] is not None
    assert architectures[1] is not None
    return Pair(
        source=source,
        target=target,
        source_architecture=architectures[0],
        target_architecture=architectures[1],
        target_memory_bytes_per_s=facts.device.memory_bytes_per_s,
        found_by=FOUND_BY,
        errors=errors,
    )


def all_pairs(data_dir: Path) -> TransferErrors:
    studied = [
        Pair(
            source=source,
            target=target,
            source_architecture=source_architecture,
            target_architecture=target_architecture,
            target_memory_bytes_per_s=rate,
            found_by=STUDY,
            errors={"gemm.bf16": TransferError(median=median, p90=p90)},
        )
        for source, target, source_architecture, target_architecture, rate, median, p90 in STUDIED
    ]
    return TransferErrors(name="transfer-errors", pairs=(*(check(*pair, data_dir) for pair in CHECKED), *studied))


def test_the_shipped_errors_are_those_of_the_tables(data_dir: Path, record: Recorder) -> None:
    shipped, found = known_errors(), all_pairs(data_dir)
    assert [(p.source, p.target) for p in shipped.pairs] == [(p.source, p.target) for p in found.pairs]
    for stored, pair in zip(shipped.pairs, found.pairs, strict=True):
        print(f"\n{pair.source} to {pair.target} ({pair.found_by})")
        if pair.found_by == FOUND_BY:
            medians = [error.median for error in pair.errors.values()]
            record(f"{pair.source} to {pair.target}, mean of medians", 100 * float(np.mean(medians)), "% off", "lower")
        for key, error in pair.errors.items():
            worst = "" if error.max is None else f" {100 * error.max:7.1f}"
            print(f"  {key:32} {100 * error.median:6.1f} {100 * error.p90:6.1f}{worst}  % median, p90, max")
            assert stored.errors[key].median == pytest.approx(error.median, rel=0.05, abs=0.003), key
            assert stored.errors[key].p90 == pytest.approx(error.p90, rel=0.05, abs=0.005), key


if __name__ == "__main__":
    comment = f"Written by `python {FOUND_BY} DATA`; fit the profiles again and this file follows."
    sys.stdout.write(all_pairs(Path(sys.argv[1])).to_yaml(comment))
