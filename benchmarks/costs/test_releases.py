"""Errors of the kernels of one release for those of another on the same card, and coverage of their intervals.

    python -m pytest benchmarks/costs/test_releases.py -m benchmark_only -s

Tables of vLLM 0.19, 0.24 and 0.25 to 0.31, of SGLang 0.5.14 and 0.5.17 to 0.5.20, and of TensorRT-LLM 1.3.0rc20 and
rc23, on one card and on two of one architecture, from one of which the older kernels are carried over. The numbers are
those of `simtune.costs.releases.RELEASE_LOG_SD`; a card is judged by what they are without it on either side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.arrays import Array
from simtune.costs.device_transfer import transfer
from simtune.costs.fit import fit_predictor
from simtune.costs.hardware_profile import data_sheet, usable
from simtune.costs.operators import Chip
from simtune.costs.other_engines import load_kernels
from simtune.costs.predict import LEVEL, Z90, Predictor
from simtune.costs.releases import RELEASE_LOG_SD
from simtune.costs.software import engine_of, release_of_software
from simtune.costs.tables import Table, read_tables, take
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Facts, Hardware

pytestmark = pytest.mark.benchmark_only

PROFILES = Path(__file__).resolve().parents[2] / "simtune/hwprofiles"
QUANTILE, LEAST_QUANTILE = 0.6, 0.3
"""Quantile of the needed widths of a kind, and of those of all kinds on one card, the least that any kind gets: 90 % of
the rows of cards left out are in their intervals then (0.5: 85 %, 0.7: 92 %)."""
ROWS, POINTS = 1500, 1000
OLD, NEW = "aiconfigurator_0.12", "aisimulate_0.13"
COVERED = (0.80, 0.97)
"""Wanted share of rows in their 90 % interval."""


class Releases(NamedTuple):
    """A card and an engine with tables of two releases: the profile fitted on the older ones, and the preset of the
    newer release."""

    card: str
    engine: str
    profile: str
    preset: str


PAIRS = (
    Releases("h100-sxm", "vllm", "h100-sxm", "vllm-0.33"),
    Releases("b200", "vllm", "b200", "vllm-0.28"),
    Releases("h100-sxm", "sglang", "h100-sxm-sglang", "sglang-0.5.23"),
    Releases("b200", "sglang", "b200-sglang", "sglang-0.5.23"),
    Releases("h100-sxm", "trtllm", "h100-sxm-trtllm", "trtllm-1.4"),
    Releases("h200-sxm", "trtllm", "h200-sxm-trtllm", "trtllm-1.4"),
    Releases("b200", "trtllm", "b200-trtllm", "trtllm-1.4"),
)
FOLDERS = {
    "h100-sxm": "h100_sxm",
    "h200-sxm": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "b300": "b300_sxm",
    "gb300": "gb300",
}
SISTERS = (
    ("h200-sxm", "h100-sxm"),
    ("h100-sxm", "h200-sxm"),
    *((source, card) for source in ("b200", "gb200") for card in ("b200", "b300", "gb300") if source != card),
)
"""Cards of one architecture: the older release was measured on the first, the newer one on the second."""
ELSEWHERE = ("moe_dispatch", "moe_combine")
"""Kinds between cards, whose profiles hold libraries of other engines."""


class Drift(NamedTuple):
    """Kernels of an older release on rows of a newer one: log errors, and the sd that they were expected to have."""

    source: str
    card: str
    engine: str
    key: str
    kind: str
    off: Array
    sd: Array
    shipped: bool = True
    """True if the older kernels are those of a shipped profile."""

    @property
    def needed(self) -> float:
        """Further log error with which 90 % of the rows are in their intervals."""
        squares = (np.abs(self.off) / Z90) ** 2 - self.sd**2
        return float(np.quantile(np.sqrt(np.maximum(squares, 0)), LEVEL))

    def covered(self, log_sd: float) -> float:
        """Share of rows in intervals that are wider by this log error."""
        return float(np.mean(np.abs(self.off) <= Z90 * np.hypot(self.sd, log_sd)))

    def width(self, log_sd: float) -> float:
        """Median sd of such intervals."""
        return float(np.median(np.hypot(self.sd, log_sd)))


@cache
def usable_tables(card: str, engine: str, folder: Path) -> dict[str, Table]:
    """Tables of an engine's own kernels that can be of the card."""
    if not any(folder.glob(f"{engine}_*")):
        return {}
    found = usable(read_tables([folder], engine), facts_of(card))
    return {key: table for key, table in found.operators.items() if table.engine is not None}


def facts_of(card: str) -> Facts:
    """Facts of a card."""
    return Facts.from_file(PROFILES / card / "facts.yaml")


def newer_tables(hardware: Hardware, card: str, engine: str, data_dir: Path) -> Iterator[tuple[str, Table]]:
    """Key and newer table of each operator of a profile that the card has in another release of the engine."""
    for key, table in sorted(usable_tables(card, engine, data_dir / "profiles" / NEW / FOLDERS[card]).items()):
        if key not in hardware.operators or table.kind in ELSEWHERE:
            continue
        before, after = hardware.operators[key].provenance.software, table.software
        releases = release_of_software(before), release_of_software(after)
        if engine_of(before) == engine_of(after) == engine and releases[1] and releases[0] != releases[1]:
            yield key, table


def errors(predictor: Predictor, table: Table) -> tuple[Array, Array]:
    """Log errors of an operator on rows of a table, and their sd."""
    rows = take(table, np.random.default_rng(0).permutation(len(table))[:ROWS])
    return np.log(predictor.seconds(**rows.shape) / rows.seconds), predictor.log_sd(**rows.shape)


def predictor_of(hardware: Hardware, key: str) -> Predictor:
    """Predictor of an operator of a profile."""
    device = hardware.device
    return Predictor(hardware.operators[key], device.processors, hardware.arrays, Chip.of(device))


@cache
def drifts(data_dir: Path) -> tuple[Drift, ...]:
    """Every operator of all pairs of releases, on one card and on two of one architecture."""
    found = [*_of_vllm_0_19(data_dir)]
    moves = [(pair.card, pair.card, pair.engine) for pair in PAIRS]
    moves += [(*sisters, engine) for sisters in SISTERS for engine in ("vllm", "sglang", "trtllm")]
    for source, card, engine in moves:
        profile = source if engine == "vllm" else f"{source}-{engine}"
        if not (PROFILES / profile).exists():
            continue
        hardware = load_hardware(profile)
        moved = hardware if source == card else transfer(hardware, facts_of(card))
        for key, table in newer_tables(hardware, card, engine, data_dir):
            if key in moved.operators:
                off, sd = errors(predictor_of(moved, key), table)
                found.append(Drift(source, card, engine, key, table.kind, off, sd))
    return tuple(found)


def _of_vllm_0_19(data_dir: Path) -> Iterator[Drift]:
    """Kernels of vLLM 0.19, which no profile has, on rows of 0.24."""
    card, facts = "h100-sxm", facts_of("h100-sxm")
    older, newer = (
        usable_tables(card, "vllm", data_dir / "profiles" / folder / "h100_sxm") for folder in ("aiconfigurator", OLD)
    )
    for key in sorted(older.keys() & newer.keys()):
        rows = take(older[key], np.random.default_rng(1).permutation(len(older[key]))[:POINTS])
        sheet, chip = data_sheet(rows, facts), Chip.of(facts.device)
        fitted = fit_predictor(rows, sheet.processors, sheet.flops_per_s, sheet.bytes_per_s, chip)
        yield Drift(card, card, "vllm", key, newer[key].kind, *errors(fitted, newer[key]), shipped=False)


def log_sds(found: Iterable[Drift]) -> dict[str, float]:
    """Log error by kind."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    on_one_card = []
    for drift in found:
        by_kind[drift.kind].append(drift.needed)
        if drift.source == drift.card:
            on_one_card.append(drift.needed)
    least = float(np.quantile(on_one_card, LEAST_QUANTILE))
    widths = {kind: float(np.quantile(sds, QUANTILE)) for kind, sds in sorted(by_kind.items())}
    return {kind: max(width, least) for kind, width in widths.items()}


def in_hindsight(judged: Iterable[Drift]) -> float:
    """Share of operators that the best log error of each kind covers as wanted, known their rows."""
    by_kind: dict[str, list[Drift]] = defaultdict(list)
    for drift in judged:
        by_kind[drift.kind].append(drift)
    most = 0
    for of_kind in by_kind.values():
        hits = [
            sum(COVERED[0] <= drift.covered(float(log_sd)) <= COVERED[1] for drift in of_kind)
            for log_sd in (0.0, *np.geomspace(0.003, 1.0, 120))
        ]
        most += max(hits)
    return most / sum(len(of_kind) for of_kind in by_kind.values())


def test_log_errors_of_other_releases(data_dir: Path, record: Recorder) -> None:
    found = log_sds(drifts(data_dir))
    for kind, value in found.items():
        record(kind, value, "log sd", "lower")
    print(f"\n{ {kind: round(value, 3) for kind, value in found.items()} }")
    assert found == pytest.approx(RELEASE_LOG_SD, abs=0.006)


def test_intervals_of_another_release_by_the_other_cards(data_dir: Path, record: Recorder) -> None:
    """Without the card of the newer tables, as itself or as the one that others are carried over to or from."""
    judged = [drift for drift in drifts(data_dir) if drift.source == drift.card and drift.shipped]
    shares, alone, widths = [], [], []
    for card in sorted({drift.card for drift in judged}):
        by_kind = log_sds(d for d in drifts(data_dir) if card not in (d.source, d.card))
        for drift in (d for d in judged if d.card == card):
            log_sd = by_kind.get(drift.kind, median(by_kind.values()))
            shares.append(drift.covered(log_sd))
            alone.append(drift.covered(0.0))
            widths.append((drift.width(0.0), drift.width(log_sd)))
            print(
                f"\n{card} {drift.engine} {drift.key}: {alone[-1]:.0%} covered, {shares[-1]:.0%} widened "
                f"by {log_sd:.3f}, "
                f"median interval x or / {np.exp(Z90 * widths[-1][0]):.2f}, {np.exp(Z90 * widths[-1][1]):.2f}",
                end="",
            )
    for name, found, column in (("alone", alone, 0), ("widened", shares, 1)):
        less, more = (np.mean(column) for column in (np.less(found, COVERED[0]), np.greater(found, COVERED[1])))
        factor = np.exp(Z90 * median(width[column] for width in widths))
        print(
            f"\n{name}: {mean(found):.0%} covered in the mean of {len(found)} operators, {less:.0%} of them less than "
            f"80 %, {more:.0%} more than 97 %, median interval x or / {factor:.2f}",
            end="",
        )
        record(f"older, {name}: covered less than 80 %", 100 * float(less), "% of operators", "lower")
        record(f"older, {name}: covered 80-97 %", 100 * float(1 - less - more), "% of operators", "higher")
        record(f"older, {name}: off 90 % in the mean", 100 * abs(mean(found) - LEVEL), "points off", "lower")
    print(f"\nby the best number for each kind in hindsight: 80-97 % covered in {in_hindsight(judged):.0%}")


def test_a_newer_release_by_the_older_one_and_by_the_nearest(data_dir: Path, record: Recorder) -> None:
    """Errors by the nearest release are its hold-outs: it was fitted on these rows."""
    for pair in PAIRS:
        before, nearest = load_hardware(pair.profile), load_kernels(pair.card, pair.preset)
        off_all, held_out = [], []
        for key, newer in newer_tables(before, pair.card, pair.engine, data_dir):
            off, _ = errors(predictor_of(before, key), newer)
            tested = [h for h in nearest.operators[key].hold_out if h.split in ("random", "every second size")]
            mine = f"{100 * tested[0].median:.1f} / {100 * tested[0].p90:.1f} %" if tested else "-"
            error = 100 * np.abs(np.expm1(off))
            off_all.append((np.median(error), np.quantile(error, 0.9)))
            held_out += [(100 * h.median, 100 * h.p90) for h in tested[:1]]
            print(
                f"\n{pair.card} {key}, {before.operators[key].provenance.software} for {newer.software}: "
                f"{np.median(error):.1f} / {np.quantile(error, 0.9):.1f} %; nearest, held out: {mine}",
                end="",
            )
        for name, found in (("older", off_all), ("nearest", held_out)):
            middle, p90 = np.mean(found, axis=0)
            record(f"{pair.card} {pair.engine} by the {name}, median", float(middle), "% off", "lower")
            record(f"{pair.card} {pair.engine} by the {name}, p90", float(p90), "% off", "lower")
            print(f"\n== {pair.card} {pair.engine} by the {name}: {middle:.1f} / {p90:.1f} %", end="")
