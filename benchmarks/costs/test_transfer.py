"""How far off a transferred profile is: from one measured device to another whose tables had no part in it.

    python -m pytest benchmarks/costs/test_transfer.py -m benchmark_only -s
    python benchmarks/costs/test_transfer.py ../shared/data > hwprofiles/transfer.yaml

The first prints the errors and holds `hwprofiles/transfer.yaml` against them; the second writes that file. Each shipped
fit is moved to the data sheet of each other device that has tables of its own, and predicts up to 3,000 random rows of
them: the pairs follow from the profiles that are shipped. Pairs to devices without a fit of their own yet are those of
an earlier study, whose predictor is the same; it checked matrix products only.
"""

from __future__ import annotations

import sys
from itertools import permutations
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.costs.cards import CARDS, FOUND_BY, ROOT, log_errors, pair_of
from benchmarks.results import Recorder
from simtune.costs.device_transfer import Pair, TransferError, TransferErrors, known_errors
from simtune.costs.hardware_profile import data_sheet
from simtune.costs.tables import Table, read_tables
from simtune.costs.tables.screen import launches, screen
from simtune.errors import UsageError
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Facts

pytestmark = pytest.mark.benchmark_only

SOURCES = {
    "rtx-4090": ("llmservingsim/rtx4090",),
}
"""Of devices whose tables are not those of `benchmarks.costs.cards`."""

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


def facts_of(name: str) -> Facts:
    return Facts.from_file(ROOT / "simtune/hwprofiles" / name / "facts.yaml")


def measured() -> list[str]:
    """Shipped profiles of processors whose tables are at hand and that are fitted on tables of their own."""
    found = []
    for name in dict.fromkeys((*SOURCES, *CARDS)):
        if (ROOT / "simtune/hwprofiles" / name / "profile.yaml").exists():
            operators = load_hardware(name).operators.values()
            if any(o.provenance.kind in ("measured", "published-tables") for o in operators):
                found.append(name)
    return found


def tables_of(name: str, data_dir: Path) -> dict[str, Table]:
    """The tables of a device without outliers, and without those that cannot be of it."""
    facts, tables = facts_of(name), {}
    found = (
        read_tables([data_dir / "profiles" / folder for folder in SOURCES[name]]).operators
        if name in SOURCES
        else CARDS[name].tables(data_dir)
    )
    for key, table in found.items():
        if (why := launches(table, data_sheet(table, facts))) is not None:
            sys.stderr.write(f"{name} {key}: left out: {why}\n")
            continue
        try:
            tables[key] = screen(table, data_sheet(table, facts))
        except UsageError as error:
            sys.stderr.write(f"{name} {key}: left out: {error}\n")
    return tables


def check(source: str, target: str, tables: dict[str, Table]) -> Pair:
    """The errors of the shipped fit of the source, moved to the target, on the target's tables."""
    shipped, facts = load_hardware(source), facts_of(target)
    errors = log_errors(shipped, tables, facts)
    return pair_of(shipped, facts, {key: off for key, (off, _) in errors.items()})


def all_pairs(data_dir: Path) -> TransferErrors:
    names = measured()
    tables = {name: tables_of(name, data_dir) for name in names}
    checked = [check(source, target, tables[target]) for source, target in permutations(names, 2)]
    studied = [
        Pair(
            source=source,
            target=target,
            source_architecture=source_architecture,
            target_architecture=target_architecture,
            source_memory_bytes_per_s=facts_of(source).device.memory_bytes_per_s,
            target_memory_bytes_per_s=rate,
            found_by=STUDY,
            errors={"gemm.bf16": TransferError(median=median, p90=p90)},
        )
        for source, target, source_architecture, target_architecture, rate, median, p90 in STUDIED
        if not {source, target} <= set(names)
    ]
    return TransferErrors(name="transfer-errors", pairs=(*(p for p in checked if p.errors), *studied))


def test_the_shipped_errors_are_those_of_the_tables(data_dir: Path, record: Recorder) -> None:
    shipped, found = known_errors(), all_pairs(data_dir)
    assert [(p.source, p.target) for p in shipped.pairs] == [(p.source, p.target) for p in found.pairs]
    for stored, pair in zip(shipped.pairs, found.pairs, strict=True):
        print(f"\n{pair.source} to {pair.target} ({pair.found_by})")
        if pair.found_by == FOUND_BY:
            medians = [error.median for error in pair.errors.values()]
            record(f"{pair.source} to {pair.target}, mean of medians", 100 * mean(medians), "% off", "lower")
        for key, error in pair.errors.items():
            worst = "" if error.max is None else f" {100 * error.max:7.1f}"
            print(f"  {key:32} {100 * error.median:6.1f} {100 * error.p90:6.1f}{worst}  % median, p90, max")
            assert stored.errors[key].median == pytest.approx(error.median, rel=0.05, abs=0.003), key
            assert stored.errors[key].p90 == pytest.approx(error.p90, rel=0.05, abs=0.005), key


if __name__ == "__main__":
    comment = f"Written by `python {FOUND_BY} DATA`; fit the profiles again and this file follows."
    sys.stdout.write(all_pairs(Path(sys.argv[1])).to_yaml(comment))
