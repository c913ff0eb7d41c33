"""How far off predictions are on rows nobody trained on, beside targets and rivals.

    python -m pytest benchmarks/costs/test_accuracy.py -m benchmark_only -s

The tables are the published H100 ones as they are, outliers included; splits and seeds are fixed here. The
forms were chosen on tables of other GPUs and on such H100 rows as these splits train on; that windows have a
decode kernel of their own was first seen in errors shown here. Errors are |predicted / measured -
1| in per cent, median / p90, averaged over seeds; coverage is of 90 % intervals. The targets for attention and
mixtures of experts are those of a part of the tables: no sliding window and heads of 64 or 128, and
one node of eight GPUs. The same split of the whole table follows each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.costs.published import gemm_table, vidur
from benchmarks.costs.rivals import RIVALS
from benchmarks.machine import SCALED, repeated
from benchmarks.results import Recorder
from simtune.costs.fit import Rows, fit_predictor, split_rows
from simtune.costs.hardware_profile import build
from simtune.costs.operators import Setting
from simtune.costs.operators.splits import EVERY_SECOND, RANDOM, Split, above
from simtune.costs.predict import Z90, Predictor
from simtune.costs.tables import Table, read_tables, take
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Facts

pytestmark = pytest.mark.benchmark_only

ROOT = Path(__file__).resolve().parents[2]
PROCESSORS, FLOPS, BYTES, LINK = 132, 989e12, 3.35e12, 450e9
SEEDS = (0, 1, 2)


class Case(NamedTuple):
    """One row of the table: where it comes from, how it is split, and the errors it should not pass, in per cent."""

    name: str
    operator: str
    split: Split
    points: int
    median: float
    p90: float
    whole: bool = True
    """All rows, not only those of the study."""


CASES = (
    *(
        Case(name + (", whole table" if whole else ""), operator, split, 200, median, p90, whole)
        for name, operator, split, median, p90 in (
            ("prefill, random", "prefill_attention.bf16", RANDOM, 6, 18),
            ("prefill, tokens > 4096", "prefill_attention.bf16", above("tokens", 4096, "tokens"), 7, 18),
            ("decode, random", "decode_attention.bf16", RANDOM, 4, 14),
            ("decode, batch > 64", "decode_attention.bf16", above("batch", 64, "batch"), 10, 27),
        )
        for whole in (False, True)
    ),
    Case("all-reduce, every second size", "all_reduce.bf16", EVERY_SECOND, 200, 4, 26),
)


@cache
def tables(data_dir: Path) -> dict[str, Table]:
    return read_tables([data_dir / "profiles/aiconfigurator/h100_sxm"]).operators


def compare(
    name: str, cuts: Iterator[tuple[Table, Rows, Rows]], target: tuple[float, float], record: Recorder
) -> float:
    """Print one row of the table and keep ours; returns our coverage."""
    errors: dict[str, list[tuple[float, float]]] = {}
    covered = []
    for table, train, test in cuts:
        trained, tested = take(table, train), take(table, test)
        bytes_per_s = LINK if table.kind == "all_reduce" else BYTES
        setting = Setting.of(PROCESSORS, table.dtype, table.kv_dtype)
        ours = fit_predictor(trained, PROCESSORS, FLOPS, bytes_per_s)
        base = Predictor(ours.operator.model_copy(update={"residual": None, "curves": ()}), PROCESSORS)
        predicted = {"ours": ours.seconds(**tested.shape), "base alone": base.seconds(**tested.shape)}
        predicted |= {rival: fit(trained, setting)(tested.shape) for rival, fit in RIVALS.items()}
        for who, seconds in predicted.items():
            off = np.abs(seconds / tested.seconds - 1)
            errors.setdefault(who, []).append((np.median(off), np.quantile(off, 0.9)))
        log_error = np.abs(np.log(predicted["ours"] / tested.seconds))
        covered.append(np.mean(log_error <= Z90 * ours.log_sd(**tested.shape)))
    shown = {who: 100 * np.mean(values, axis=0) for who, values in errors.items()}
    met = "met" if all(shown["ours"] <= target) else "MISSED"
    line = "  ".join(f"{who} {median:.1f} / {p90:.1f}" for who, (median, p90) in shown.items())
    print(f"\n{name} (target {target[0]:g} / {target[1]:g}, {met}): {line}; coverage {np.mean(covered):.0%}", end="")
    for what, percent in zip(("median", "p90"), shown["ours"], strict=True):
        record(f"{name}, {what}", float(percent), "% off", "lower")
    record(f"{name}, coverage of 90 %", 100 * abs(float(np.mean(covered)) - 0.9), "points off", "lower")
    return float(np.mean(covered))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_published_tables(case: Case, data_dir: Path, record: Recorder) -> None:
    table = tables(data_dir)[case.operator]
    if not case.whole:
        plain = (table.shape["window"] >= table.shape["context"]) & np.isin(table.shape["head_dim"], (64, 128))
        table = take(table, np.flatnonzero(plain))
    cuts = ((table, *split_rows(table, case.split, case.points, seed)) for seed in SEEDS)
    coverage = compare(f"{case.name}, {case.points} points", cuts, (case.median, case.p90), record)
    if case.split is RANDOM:
        assert 0.85 <= coverage <= 0.95


@pytest.mark.parametrize("devices", [8, 256])
def test_moe_of_one_family(devices: int, data_dir: Path, record: Recorder) -> None:
    """48 points of the very model that is predicted, mean over all models measured."""
    table = tables(data_dir)["moe.bf16"]
    keys = np.column_stack([table.shape[name] for name in ("hidden", "experts_per_token", "experts")])
    families = []
    for key in np.unique(keys, axis=0):
        rows = np.flatnonzero((keys == key).all(1))
        inter, ep = table.shape["intermediate"][rows], table.shape["ep"][rows]
        families.append(take(table, rows[ep * inter.max() / inter <= devices]))
    cuts = ((family, *split_rows(family, RANDOM, 48, seed)) for family in families for seed in SEEDS[:2])
    name = f"MoE, one of {len(families)} families, 48 points, up to {devices} GPUs"
    coverage = compare(name, cuts, (6, 18), record)
    assert 0.85 <= coverage <= 0.95


def test_vidur_unseen_tp(data_dir: Path, record: Recorder) -> None:
    """Trained on TP 1, 2 and 4 of two models, tested on the shapes of TP 8."""
    products = [p for p in vidur(data_dir / "profiles/vidur/h100") if p.seconds >= 5e-6]  # rounded to 1 us
    table = gemm_table(products, "vidur")
    held = {p[:3] for p in products if p.tp == 8}
    mask = np.array([shape in held for shape in zip(*(table.shape[x].astype(int) for x in "mnk"), strict=True)])
    split = Split("unseen TP 8", lambda shape, rng: mask)
    cuts = ((table, *split_rows(table, split, 400, seed)) for seed in SEEDS)
    compare("Vidur GEMM, unseen TP 8, 400 points", cuts, (9, 20), record)


def test_fitting_and_loading_a_profile(data_dir: Path, record: Recorder) -> None:
    facts = Facts.from_file(ROOT / "simtune/hwprofiles/h100-sxm/facts.yaml")
    sources = ["aiconfigurator/h100_sxm", "vidur/h100", "vidur/a100/cpu_overheads.csv.gz"]
    fitted = repeated(lambda: build(read_tables([data_dir / "profiles" / source for source in sources]), facts), 3)
    start = time.process_time()
    len(load_hardware("h100-sxm").arrays)
    loading_s = time.process_time() - start
    fitting_s = statistics.median(fitted.seconds)
    print(f"\nfitting {fitting_s:.1f} s of processor time (target 60), loading {loading_s:.3f} s (0.1)", end="")
    record.samples("fitting a profile", fitted.scaled, SCALED, "lower")
    assert fitting_s < 60
    assert loading_s < 0.1
