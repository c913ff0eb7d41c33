"""How far off fits of today's kinds of layers are on rows that they did not see, inside and beyond what they saw.

    python -m pytest benchmarks/costs/test_sparse_blocks.py -m benchmark_only -s

Whole blocks of sparse attention (DeepSeek V4, MiniMax M3, GLM 5.3 Flash), delta rules by channel, streams and DeepEP,
of `profiles/aisimulate_0.13`; and sparse attention on latents above its launches, of `profiles/aiconfigurator_0.12`.
Three seeds; inside, nine tenths of a table predict the last; beyond, what the split holds back.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.costs.fit import fit_predictor
from simtune.costs.hardware_profile import data_sheet, usable
from simtune.costs.operators import OPERATORS
from simtune.costs.operators.splits import RANDOM, Split
from simtune.costs.predict import Z90
from simtune.costs.tables import Table, read_tables, take
from simtune.costs.tables.screen import Sheet, screen
from simtune.errors import UsageError
from simtune.specs.hardware import Facts

pytestmark = pytest.mark.benchmark_only

ROOT = Path(__file__).resolve().parents[2] / "simtune/hwprofiles"
SEEDS = (0, 1, 2)
FEWEST = 15
TODAY = "aisimulate_0.13"
CARDS = {"b300": "b300_sxm", "gb300": "gb300", "b200": "b200_sxm", "h200-sxm": "h200_sxm"}
ENGINES = ("vllm", "sglang", "trtllm")
KINDS = ("sparse_", "kda_", "hyper_", "moe_dispatch", "moe_combine")
LAUNCHED = {"h100-sxm": "h100_sxm", "h200-sxm": "h200_sxm", "b200": "b200_sxm", "gb200": "gb200"}
WANTED, WANTED_LAUNCHED = (5.0, 16.0), (8.0, 25.0)
"""Median and 90th percentile of the error inside, in per cent: of kinds of today, and above launches."""


class Scores(NamedTuple):
    """Median and 90th percentile of the error in per cent, and the share of rows that 90 % intervals hold."""

    median: float
    p90: float
    coverage: float


def scores(table: Table, sheet: Sheet, split: Split) -> Scores | None:
    """Means over the seeds; None if the split leaves or tests too few rows."""
    of_seeds = []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        held = rng.random(len(table)) < 0.1 if split is RANDOM else split.held(table.shape, rng)  # type: ignore[misc]
        if min(held.sum(), (~held).sum()) < FEWEST:
            continue
        rows = take(table, np.flatnonzero(held))
        fitted = fit_predictor(
            take(table, np.flatnonzero(~held)), sheet.processors, sheet.flops_per_s, sheet.bytes_per_s, sheet.chip
        )
        ratio = fitted.seconds(**rows.shape) / rows.seconds
        off = 100 * np.abs(ratio - 1)
        covered = np.abs(np.log(ratio)) <= Z90 * fitted.log_sd(**rows.shape)
        of_seeds.append((np.median(off), np.quantile(off, 0.9), covered.mean()))
    return Scores(*map(float, np.mean(of_seeds, axis=0))) if of_seeds else None


def tables(folder: Path, profile: str, engine: str, kinds: tuple[str, ...]) -> dict[str, tuple[Table, Sheet]]:
    """Tables of these kinds that can be of the card, without outliers."""
    facts = Facts.from_file(ROOT / profile / "facts.yaml")
    try:
        found = usable(read_tables([folder], engine), facts)
    except UsageError:
        return {}
    chosen = {key: table for key, table in found.operators.items() if key.startswith(kinds)}
    return {key: (screen(table, data_sheet(table, facts)), data_sheet(table, facts)) for key, table in chosen.items()}


def show(found: dict[str, tuple[Table, Sheet]], what: str) -> dict[tuple[str, bool], list[Scores]]:
    """Print the scores of all splits of tables; return those inside and beyond, by kind."""
    by_kind: dict[tuple[str, bool], list[Scores]] = defaultdict(list)
    for key, (table, sheet) in found.items():
        for split in OPERATORS[table.kind].splits:
            if (score := scores(table, sheet, split)) is not None:
                by_kind[table.kind, split is RANDOM].append(score)
                print(
                    f"\n{what} {key}, {split.name}: {score.median:.1f} / {score.p90:.1f} %, {score.coverage:.0%}",
                    end="",
                )
    return by_kind


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("profile", CARDS)
def test_kinds_of_today(profile: str, engine: str, data_dir: Path, record: Recorder) -> None:
    found = tables(data_dir / "profiles" / TODAY / CARDS[profile], profile, engine, KINDS)
    for (kind, inside), of_kind in sorted(show(found, f"{profile} {engine}").items()):
        median, p90, coverage = np.mean(of_kind, axis=0)
        what = f"{profile} {engine} {kind} {'inside' if inside else 'beyond'}"
        print(f"\n{what}: {median:.1f} / {p90:.1f} %, {coverage:.0%} covered", end="")
        record(f"{what}, median", float(median), "% off", "lower")
        record(f"{what}, p90", float(p90), "% off", "lower")
        if inside:
            assert median <= WANTED[0]
            assert p90 <= WANTED[1]


@pytest.mark.parametrize("profile", LAUNCHED)
def test_sparse_attention_above_launches(profile: str, data_dir: Path, record: Recorder) -> None:
    folder = data_dir / "profiles/aiconfigurator_0.12" / LAUNCHED[profile]
    found = tables(folder, profile, "vllm", ("dsa_context_block",))
    assert all(table.launch_s for table, _ in found.values())
    of_all = [score for (_, inside), of_kind in show(found, profile).items() if inside for score in of_kind]
    median, p90, coverage = np.mean(of_all, axis=0)
    print(f"\n{profile}, above launches: {median:.1f} / {p90:.1f} %, {coverage:.0%} covered", end="")
    record(f"{profile} above launches, median", float(median), "% off", "lower")
    record(f"{profile} above launches, p90", float(p90), "% off", "lower")
    assert median <= WANTED_LAUNCHED[0]
    assert p90 <= WANTED_LAUNCHED[1]
