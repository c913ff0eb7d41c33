"""How far are the kernels of one release from those of another on the same card, and do intervals know?

    python -m pytest benchmarks/costs/test_releases.py -m benchmark_only -s

Tables of vLLM 0.19, 0.24 and 0.25 to 0.31, of SGLang 0.5.14 and 0.5.17 to 0.5.20, and of TensorRT-LLM 1.3.0rc20 and
rc23. The numbers are those of `simtune.costs.releases.RELEASE_LOG_SD`; a card is judged by what they are without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.arrays import Array
from simtune.costs.hardware_profile import usable
from simtune.costs.operators import Chip
from simtune.costs.other_engines import load_kernels
from simtune.costs.predict import Z90, Predictor
from simtune.costs.releases import RELEASE_LOG_SD
from simtune.costs.software import release_of_software
from simtune.costs.tables import Table, read_tables, take
from simtune.errors import UsageError
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Facts, Hardware

pytestmark = pytest.mark.benchmark_only

PROFILES = Path(__file__).resolve().parents[2] / "simtune/hwprofiles"
FEWEST = 30
QUANTILE = 0.7
"""As of transfers between devices and of other engines."""
ROWS = 1500
OLD, NEW = "aiconfigurator_0.12", "aisimulate_0.13"
WANTED, COVERED = (6.0, 18.0), (0.80, 0.97)
"""Median and 90th percentile of the error in per cent; share of rows in their 90 % interval."""


class Releases(NamedTuple):
    """Two folders with tables of an engine on a card, and the profile fitted on the older ones."""

    card: str
    engine: str
    older: str
    newer: str
    profile: str | None = None
    preset: str | None = None
    """Preset of the newer release."""


PAIRS = (
    Releases("h100-sxm", "vllm", "aiconfigurator/h100_sxm", f"{OLD}/h100_sxm"),
    Releases("h100-sxm", "vllm", f"{OLD}/h100_sxm", f"{NEW}/h100_sxm", "h100-sxm", "vllm-0.33"),
    Releases("b200", "vllm", f"{OLD}/b200_sxm", f"{NEW}/b200_sxm", "b200", "vllm-0.28"),
    Releases("h100-sxm", "sglang", f"{OLD}/h100_sxm", f"{NEW}/h100_sxm", "h100-sxm-sglang", "sglang-0.5.23"),
    Releases("b200", "sglang", f"{OLD}/b200_sxm", f"{NEW}/b200_sxm", "b200-sglang", "sglang-0.5.23"),
    Releases("h100-sxm", "trtllm", f"{OLD}/h100_sxm", f"{NEW}/h100_sxm", "h100-sxm-trtllm", "trtllm-1.4"),
    Releases("h200-sxm", "trtllm", f"{OLD}/h200_sxm", f"{NEW}/h200_sxm", "h200-sxm-trtllm", "trtllm-1.4"),
    Releases("b200", "trtllm", f"{OLD}/b200_sxm", f"{NEW}/b200_sxm", "b200-trtllm", "trtllm-1.4"),
)


@cache
def usable_tables(card: str, engine: str, folder: Path) -> dict[str, Table]:
    """Tables of an engine's own kernels that can be of the card."""
    facts = Facts.from_file(PROFILES / card / "facts.yaml")
    try:
        found = usable(read_tables([folder], engine), facts)
    except UsageError:
        return {}
    return {key: table for key, table in found.operators.items() if table.engine is not None}


def both(pair: Releases, data_dir: Path) -> Iterator[tuple[str, Table, Table]]:
    """Key, older and newer table of each operator that both have in different releases."""
    older, newer = (usable_tables(pair.card, pair.engine, data_dir / "profiles" / f) for f in (pair.older, pair.newer))
    for key in sorted(older.keys() & newer.keys()):
        if older[key].software != newer[key].software and release_of_software(newer[key].software):
            yield key, older[key], newer[key]


def log_ratios(older: Table, newer: Table) -> Array:
    """Logarithms of the times of the newer table over those of the older one, on the shapes of both."""
    rows = [
        dict(zip(map(tuple, np.column_stack(list(t.shape.values())).tolist()), t.seconds, strict=True))
        for t in (older, newer)
    ]
    common = sorted(rows[0].keys() & rows[1].keys())
    ratios: Array = np.log([rows[1][shape] / rows[0][shape] for shape in common])
    return ratios


@cache
def drifts(data_dir: Path) -> tuple[tuple[str, str, float], ...]:
    """(card, kind, log sd) of every operator of all pairs."""
    found = []
    for pair in PAIRS:
        for _, older, newer in both(pair, data_dir):
            ratios = log_ratios(older, newer)
            if len(ratios) >= FEWEST:
                found.append((pair.card, older.kind, float(np.quantile(np.abs(ratios), 0.9)) / Z90))
    return tuple(found)


def log_sds(data_dir: Path, without: str | None = None) -> dict[str, float]:
    """Log error by kind, on all cards but one."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for card, kind, log_sd in drifts(data_dir):
        if card != without:
            by_kind[kind].append(log_sd)
    return {kind: float(np.quantile(found, QUANTILE)) for kind, found in sorted(by_kind.items())}


def test_log_errors_of_other_releases(data_dir: Path, record: Recorder) -> None:
    found = log_sds(data_dir)
    for kind, value in found.items():
        record(kind, value, "log sd", "lower")
    print(f"\n{ {kind: round(value, 3) for kind, value in found.items()} }")
    assert found == pytest.approx(RELEASE_LOG_SD, abs=0.006)


def errors(hardware: Hardware, key: str, table: Table) -> tuple[Array, Array]:
    """Log errors of an operator of a profile on rows of a table, and their sd."""
    rows = take(table, np.random.default_rng(0).permutation(len(table))[:ROWS])
    predictor = Predictor(
        hardware.operators[key], hardware.device.processors, hardware.arrays, Chip.of(hardware.device)
    )
    return np.log(predictor.seconds(**rows.shape) / rows.seconds), predictor.log_sd(**rows.shape)


def test_a_newer_release_by_the_older_one_and_by_the_nearest(data_dir: Path, record: Recorder) -> None:
    """By the older one with the widening that the other cards tell; by the nearest on the rows that it was fitted on,
    so that its hold-outs count and not these."""
    covered = []
    for pair in PAIRS:
        if pair.profile is None:
            continue
        before, nearest = load_hardware(pair.profile), load_kernels(pair.card, pair.preset)
        without = log_sds(data_dir, pair.card)
        off_all, held_out = [], []
        for key, _, newer in both(pair, data_dir):
            if key not in before.operators:
                continue
            off, sd = errors(before, key, newer)
            width = np.hypot(sd, without.get(newer.kind, median(without.values())))
            share, plain = (float(np.mean(np.abs(off) <= Z90 * w)) for w in (width, sd))
            covered.append(COVERED[0] <= share <= COVERED[1])
            tested = [h for h in nearest.operators[key].hold_out if h.split in ("random", "every second size")]
            mine = f"{100 * tested[0].median:.1f} / {100 * tested[0].p90:.1f} %" if tested else "-"
            error = 100 * np.abs(np.expm1(off))
            off_all.append((np.median(error), np.quantile(error, 0.9)))
            held_out += [(100 * h.median, 100 * h.p90) for h in tested[:1]]
            print(
                f"\n{pair.card} {key}, {before.operators[key].provenance.software} for {newer.software}: "
                f"{np.median(error):.1f} / {np.quantile(error, 0.9):.1f} %, {plain:.0%} covered, {share:.0%} widened; "
                f"nearest, held out: {mine}",
                end="",
            )
        for name, found in (("older", off_all), ("nearest", held_out)):
            middle, p90 = np.mean(found, axis=0)
            record(f"{pair.card} {pair.engine} by the {name}, median", float(middle), "% off", "lower")
            record(f"{pair.card} {pair.engine} by the {name}, p90", float(p90), "% off", "lower")
            print(f"\n== {pair.card} {pair.engine} by the {name}: {middle:.1f} / {p90:.1f} %", end="")
    print(f"\n80-97 % covered in {np.mean(covered):.0%} of {len(covered)}")
    record("older, widened: covered 80-97 %", 100 * float(np.mean(covered)), "% of operators", "higher")
