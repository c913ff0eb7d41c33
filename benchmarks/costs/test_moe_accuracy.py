"""How far off times of experts, of the exchange of tokens with them, and of collectives are on rows nobody trained on.

    python -m pytest benchmarks/costs/test_moe_accuracy.py -m benchmark_only -s

The form of the experts' kernel was chosen on the three H200 tables. H100, B200, GB200, L40S and RTX PRO 6000 had no say
in it; H200 is shown beside them. Errors are |predicted / measured - 1| in per cent, median / 90th percentile, and after
them the coverage of 90 % intervals in per cent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from pyarrow import compute, parquet

from benchmarks.results import Recorder
from simtune.costs.fit import Rows, fit_base, fit_predictor, split_rows
from simtune.costs.operators import OPERATORS, Setting
from simtune.costs.operators.moe import DEALT
from simtune.costs.operators.splits import EVERY_SECOND, RANDOM, Split, above, unseen
from simtune.costs.predict import Z90, base_seconds
from simtune.costs.tables import Table, read_tables, take
from simtune.specs.base import COMPUTES_IN

pytestmark = pytest.mark.benchmark_only


class Sheet(NamedTuple):
    """Data sheet of a card: dense rates, and the link in one direction."""

    processors: int
    bf16: float
    fp8: float
    nvfp4: float
    memory: float
    link: float

    def flops_per_s(self, dtype: str) -> float:
        """The rate that a format's kernels run at."""
        rates = {"fp8": self.fp8, "nvfp4": self.nvfp4}
        return rates.get(COMPUTES_IN.get(dtype, dtype), self.bf16)


CARDS = {
    "h200_sxm": Sheet(132, 989e12, 1979e12, 1979e12, 4.8e12, 450e9),
    "h100_sxm": Sheet(132, 989e12, 1979e12, 1979e12, 3.35e12, 450e9),
    "b200_sxm": Sheet(148, 2250e12, 4500e12, 9000e12, 8.0e12, 900e9),
    "gb200": Sheet(152, 2500e12, 5000e12, 10000e12, 8.0e12, 900e9),
    "l40s": Sheet(142, 362e12, 733e12, 733e12, 0.864e12, 32e9),
    "rtx_pro_6000_server": Sheet(188, 504e12, 1008e12, 2015e12, 1.597e12, 64e9),
}
UNSEEN_FAMILY = unseen("hidden", "intermediate", "experts_per_token", "experts")
SPLITS = {
    "random": RANDOM,
    "unseen family": UNSEEN_FAMILY,
    "tokens > 1024": above("tokens", 1024, "tokens"),
    "ep > 4": above("ep", 4, "ep"),
}
FAMILY_ROWS = 70
"""The fewest that a family is tested with: 48 to train on, and enough others."""


@cache
def tables(data_dir: Path, card: str, engine: str, what: str) -> dict[str, Table]:
    """The operators of one table file; none where there is no such file."""
    found = sorted((data_dir / "profiles/aiconfigurator_0.12" / card).glob(f"{engine}_*_{what}_perf.parquet"))
    return read_tables(found).operators if found else {}


class Errors:
    """Errors of several fits under one name."""

    def __init__(self) -> None:
        self.median: list[float] = []
        self.p90: list[float] = []
        self.covered: list[float] = []

    def add(self, table: Table, train: Rows, test: Rows, sheet: Sheet) -> None:
        """Fit some rows and predict others."""
        moves = table.kind != "moe"
        fitted = fit_predictor(
            take(table, train), sheet.processors, sheet.flops_per_s(table.dtype), sheet.link if moves else sheet.memory
        )
        tested = take(table, test)
        ratio = fitted.seconds(**tested.shape) / tested.seconds
        off = 100 * np.abs(ratio - 1)
        self.median.append(float(np.median(off)))
        self.p90.append(float(np.quantile(off, 0.9)))
        self.covered.append(100 * float(np.mean(np.abs(np.log(ratio)) <= Z90 * fitted.log_sd(**tested.shape))))

    def __str__(self) -> str:
        return f"{np.mean(self.median):.1f} / {np.mean(self.p90):.1f} ({np.mean(self.covered):.0f})"

    def keep(self, name: str, record: Recorder) -> None:
        """Record the means."""
        record(f"{name}, median", float(np.mean(self.median)), "% off", "lower")
        record(f"{name}, p90", float(np.mean(self.p90)), "% off", "lower")


def families(table: Table) -> Iterator[Table]:
    """The rows of one model each, whatever its sharding."""
    sizes = np.column_stack([table.shape[name] for name in ("hidden", "experts_per_token", "experts")])
    for key in np.unique(sizes, axis=0):
        rows = np.flatnonzero((sizes == key).all(1))
        if len(rows) >= FAMILY_ROWS:
            yield take(table, rows)


def cuts(table: Table, split: Split, points: int, seeds: Iterable[int]) -> Iterator[tuple[Rows, Rows]]:
    """Rows to train on and to test, where both are enough."""
    for seed in seeds:
        train, test = split_rows(table, split, points, seed)
        if min(len(train), len(test)) >= 15:
            yield train, test


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "sglang"])
@pytest.mark.parametrize("card", CARDS)
def test_experts_of_one_family(card: str, engine: str, data_dir: Path, record: Recorder) -> None:
    """48 points of the very model that is predicted, by format, to 256 ranks (aim: 4 / 15)."""
    found = tables(data_dir, card, engine, "moe")
    if not found:
        pytest.skip("no such table")
    for key, table in found.items():
        errors = Errors()
        tested = list(families(table))
        for family in tested:
            for train, test in cuts(family, RANDOM, 48, (0, 1)):
                errors.add(family, train, test, CARDS[card])
        if tested:
            name = f"{card} {engine} {key}, {len(tested)} families"
            print(f"\n{name}: {errors}", end="")
            errors.keep(name, record)


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "sglang"])
@pytest.mark.parametrize("card", CARDS)
def test_experts_inside_and_outside(card: str, engine: str, data_dir: Path, record: Recorder) -> None:
    """200 points of all families, by format: random beside what lies outside."""
    for key, table in tables(data_dir, card, engine, "moe").items():
        if len(table) < 400:
            continue
        shown = []
        for name, split in SPLITS.items():
            errors = Errors()
            for train, test in cuts(table, split, 200, (0, 1, 2)):
                errors.add(table, train, test, CARDS[card])
            if errors.median:
                shown.append(f"{name} {errors}")
                errors.keep(f"{card} {engine} {key}, {name}", record)
        print(f"\n{card} {engine} {key}: {'; '.join(shown)}", end="")


SLOW = 1.7


@pytest.mark.parametrize("key", ["moe.bf16", "moe.fp8", "moe.fp8_block"])
def test_configurations_that_no_shape_tells(key: str, data_dir: Path) -> None:
    """TensorRT-LLM on Hopper: models and shardings that take over 1.7 times the base, at the median over tokens."""
    slow, count = [], []
    for card in ("h100_sxm", "h200_sxm"):
        table, sheet = tables(data_dir, card, "trtllm", "moe")[key], CARDS[card]
        rates = sheet.processors, sheet.flops_per_s(table.dtype), sheet.memory
        terms = OPERATORS["moe"].terms(table.shape, Setting.of(sheet.processors, table.dtype, None))
        over = table.seconds / base_seconds(terms, **fit_base(table, *rates).model_dump())
        names = ("hidden", "intermediate", "experts_per_token", "experts", "ep")
        of: dict[tuple[float, ...], list[float]] = defaultdict(list)
        for one, ratio in zip(zip(*(table.shape[n].tolist() for n in names), strict=True), over, strict=True):
            of[one].append(ratio)
        slow.append({one for one, ratios in of.items() if np.median(ratios) > SLOW})
        count.append(len(of))
    print(f"\n{key}: slow {len(slow[0])} of {count[0]} on H100, {len(slow[1])} of {count[1]} on H200", end="")
    print(f", {len(slow[0] & slow[1])} on both", end="")


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "sglang"])
@pytest.mark.parametrize("card", ["h200_sxm", "h100_sxm", "b200_sxm", "l40s"])
def test_skewed_routing_on_one_rank(card: str, engine: str, data_dir: Path, tmp_path: Path) -> None:
    """Rows of `power_law_x` by fits of 200 balanced rows: as dealt out, and as the Zipf law that stands for it."""
    found = sorted((data_dir / "profiles/aiconfigurator_0.12" / card).glob(f"{engine}_*_moe_perf.parquet"))
    if not found:
        pytest.skip("no such table")
    rows = parquet.read_table(found[0])
    skewed = tmp_path / "skewed_moe_perf.parquet"
    parquet.write_table(rows.filter(compute.not_equal(rows["distribution"], "balanced")), skewed)
    balanced, tested = tables(data_dir, card, engine, "moe"), read_tables([skewed]).operators
    sheet = CARDS[card]
    for key in sorted({"moe.bf16", "moe.fp8_block"} & balanced.keys() & tested.keys()):
        table, other = balanced[key], tested[key]
        train, test = split_rows(table, RANDOM, 200, 0)
        fitted = fit_predictor(take(table, train), sheet.processors, sheet.flops_per_s(table.dtype), sheet.memory)
        alone = take(table, test[table.shape["ep"][test] == 1])
        shown = []
        for name, shape, seconds in (
            ("balanced rows", alone.shape, alone.seconds),
            ("skewed rows as dealt out", {**other.shape, "skew": np.full(len(other), DEALT)}, other.seconds),
            ("as Zipf", other.shape, other.seconds),
        ):
            off = 100 * np.abs(fitted.seconds(**shape) / seconds - 1)
            shown.append(f"{name} {np.median(off):.1f} / {np.quantile(off, 0.9):.1f}")
        print(f"\n{card} {engine} {key}, one rank: {'; '.join(shown)}", end="")


@pytest.mark.parametrize("card", ["h200_sxm", "h100_sxm", "b200_sxm", "gb200"])
def test_exchange_of_tokens(card: str, data_dir: Path, record: Recorder) -> None:
    """Dispatch and combine, half of the rows (aim: 8 / 25), and beyond 8,192 tokens."""
    for key, table in tables(data_dir, card, "vllm", "moe_a2a").items():
        shown = []
        for split in (RANDOM, above("tokens", 8192, "tokens")):
            errors = Errors()
            for train, test in cuts(table, split, 200, (0, 1, 2)):
                errors.add(table, train, test, CARDS[card])
            if errors.median:
                shown.append(f"{split.name} {errors}")
                errors.keep(f"{card} {key}, {split.name}", record)
        print(f"\n{card} {key}: {'; '.join(shown)}", end="")


def group(held: Sequence[int]) -> Split:
    """All calls of some numbers of devices held back."""
    return Split(f"{held} devices unseen", lambda shape, rng: np.isin(shape["devices"], held))


@pytest.mark.parametrize("card", CARDS)
def test_collectives(card: str, data_dir: Path, record: Recorder) -> None:
    """Every second size (aim: 3 / 8), and groups that no row was of (aim: 85 % inside the 90 % interval)."""
    engines = [(engine, "custom_allreduce") for engine in ("vllm", "trtllm", "sglang")] + [("nccl", "nccl")]
    for engine, what in engines:
        for key, table in tables(data_dir, card, engine, what).items():
            if table.dtype != "bf16":
                continue
            shown = []
            for split in (EVERY_SECOND, group([8]), group([4])):
                errors = Errors()
                for train, test in cuts(table, split, 1000, (0,)):
                    errors.add(table, train, test, CARDS[card])
                if errors.median:
                    shown.append(f"{split.name} {errors}")
                    errors.keep(f"{card} {engine} {key}, {split.name}", record)
            print(f"\n{card} {engine} {key}: {'; '.join(shown)}", end="")
