"""What 200 points are worth that were chosen by their shapes, as by somebody who profiles, beside 200 at random.

    python -m pytest benchmarks/costs/test_design.py -m benchmark_only -s

Tables of vLLM's kernels on seven cards. Half of the rows of each, at random, are what may be measured, the other half
(up to 3,000) is what is predicted: the same rows for all columns, three seeds, median / 90th percentile of
|predicted / measured - 1| in per cent. Points are chosen by features of the residual alone, no time is looked at.
Published tables keep three quarters as many centres as points; a user's own points are kept as they are.

Means of 13 tables of prefill, 13 of decode, 5 and 8 of products in bf16 and in 8 and 4 bits, and 20 of experts: at
random 5.0 / 17.0, 4.4 / 15.9, 5.2 / 15.4, 4.7 / 16.4, 4.8 / 17.9, chosen 5.1 / 17.1, 4.3 / 15.4, 5.1 / 15.5, 4.8 / 16.8
and 4.8 / 17.4: it does not matter which points of such tables are measured. LENGTH and NOISE were chosen on every
eighth table of three engines with one seed, which promised a tenth less at the 90th percentile. There points farthest
from those chosen before (maximin) were no better than random ones, and neither were those that a process fitted on 60
points, and again on 120, was least sure of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.costs import test_attention_accuracy as attention
from benchmarks.costs import test_gemm_accuracy as products
from benchmarks.costs import test_moe_accuracy as experts
from benchmarks.results import Recorder
from simtune.arrays import Array
from simtune.costs.fit import CENTRES, fit_base
from simtune.costs.hardware_profile import data_sheet
from simtune.costs.operators import OPERATORS, Setting
from simtune.costs.predict import base_seconds
from simtune.costs.residual import fit_process
from simtune.costs.tables import Table, take
from simtune.costs.tables.screen import Sheet

pytestmark = pytest.mark.benchmark_only

SEEDS = (0, 1, 2)
POINTS = 200
TEST_ROWS = 3000
LENGTH = 3.0
"""Of the kernel, in standard deviations of every feature; the process that is fitted has its own."""
NOISE = 0.02
"""Variance of a measurement, over that of the signal."""
STOOD_FOR = 200
"""Shapes, at random, that stand for all that could be predicted."""

Named = Iterator[tuple[str, Table, Sheet]]


def most_telling(x: Array, count: int) -> NDArray[np.intp]:
    """Rows of features `x` (n, d) that tell most of all: always the one that takes most from the mean variance, given
    those chosen before, of a process with one length for all features.

    Covariances are kept of all rows with `STOOD_FOR` of them, and the columns of a Cholesky factor of those chosen.
    """
    x = (x - x.mean(0)) / x.std(0)
    some = np.random.default_rng(0).permutation(len(x))[:STOOD_FOR]
    covariance, variance = _kernel(x, x[some]), np.ones(len(x))
    factor, chosen = np.zeros((len(x), count)), np.empty(count, dtype=np.intp)
    for i in range(count):
        gains = np.einsum("ij,ij->i", covariance, covariance) / (variance + NOISE)
        gains[chosen[:i]] = -1.0
        at = chosen[i] = int(gains.argmax())
        column = _kernel(x, x[at : at + 1])[:, 0] - factor[:, :i] @ factor[at, :i]
        factor[:, i] = column / np.sqrt(variance[at] + NOISE)
        covariance -= np.outer(factor[:, i], factor[some, i])
        variance = np.maximum(variance - factor[:, i] ** 2, 0.0)
    return chosen


def _kernel(a: Array, b: Array) -> Array:
    """Matérn 3/2, as the residual's."""
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
    r = np.sqrt(3 * np.maximum(squares, 0)) / LENGTH
    kernel: Array = (1 + r) * np.exp(-r)
    return kernel


def attention_tables(at: int) -> Callable[[Path], Named]:
    return lambda data_dir: (
        named for named in attention.tables_of(data_dir, attention.CASES[at]) if named[1].engine == "vllm"
    )


def product_tables(name: str) -> Callable[[Path], Named]:
    def named(data_dir: Path) -> Named:
        devices, dtypes, _ = products.TARGETS[name]
        for device, engine, dtype in products.chosen(data_dir, devices, dtypes):
            if engine == "vllm":
                table = products.tables(data_dir, device)[engine, dtype]
                sheet = data_sheet(table, products.facts(device))
                yield device, table, Sheet(*products.sheet_of(sheet))

    return named


def expert_tables(data_dir: Path) -> Named:
    for card, sheet in experts.CARDS.items():
        for table in experts.tables(data_dir, card, "vllm", "moe").values():
            if len(table) >= 2 * POINTS:
                yield card, table, Sheet(sheet.processors, sheet.flops_per_s(table.dtype), sheet.memory)


GROUPS: dict[str, Callable[[Path], Named]] = {
    "prefill": attention_tables(0),
    "decode": attention_tables(1),
    "GEMM bf16": product_tables("bf16"),
    "GEMM 8 and 4 bits": product_tables("8 and 4 bits"),
    "experts": expert_tables,
}


def errors(table: Table, sheet: Sheet, seed: int) -> dict[str, Array]:
    """(median, p90) in per cent by column; of small tables half of what may be measured is."""
    order = np.random.default_rng(seed).permutation(len(table))
    pool, tested = take(table, order[: len(table) // 2]), take(table, order[len(table) // 2 :][:TEST_ROWS])
    form, setting = OPERATORS[table.kind], Setting.of(sheet.processors, table.dtype, table.kv_dtype, sheet.chip)
    count = min(POINTS, len(pool) // 2)
    by_name = form.features(pool.shape, setting)
    x = np.stack([column for column in by_name.values() if np.ptp(column) > 0], axis=-1)
    found: dict[str, Array] = {}
    for design, rows in {"random": np.arange(count), "chosen": most_telling(x, count)}.items():
        points = take(pool, rows)
        base = fit_base(points, sheet.processors, sheet.flops_per_s, sheet.bytes_per_s, sheet.chip)
        alone = [base_seconds(form.terms(part.shape, setting), **base.model_dump()) for part in (points, tested)]
        z, known = np.log(points.seconds / alone[0]), form.features(points.shape, setting)
        process = fit_process(known, z)
        assert process is not None
        kept = {design: process.condensed(known, z, int(CENTRES * count)), f"{design}, one's own": process}
        for name, one in kept.items():
            mean = one.mean(one.standardised(form.features(tested.shape, setting)))
            off = np.abs(alone[1] * np.exp(mean) / tested.seconds - 1)
            found[name] = 100 * np.quantile(off, (0.5, 0.9))
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_points_chosen_by_their_shapes(group: str, data_dir: Path, record: Recorder) -> None:
    of_tables: dict[str, list[Array]] = {}
    for where, table, sheet in GROUPS[group](data_dir):
        of_seeds = [errors(table, sheet, seed) for seed in SEEDS]
        means = {name: np.mean([one[name] for one in of_seeds], axis=0) for name in of_seeds[0]}
        print(f"\n{where:28s} {table.key:32s} {_words(means)}", end="")
        for name, mean in means.items():
            of_tables.setdefault(name, []).append(mean)
    whole = {name: np.mean(rows, axis=0) for name, rows in of_tables.items()}
    print(f"\n  mean of {len(of_tables['random'])} tables, {group}: {_words(whole)}", end="")
    for name, (median, p90) in whole.items():
        record(f"{group}, {name}, median", float(median), "% off", "lower")
        record(f"{group}, {name}, p90", float(p90), "% off", "lower")
    assert abs(whole["chosen"][1] / whole["random"][1] - 1) <= 0.1, "the design matters after all"


def _words(columns: dict[str, Array]) -> str:
    return "  ".join(f"{name} {median:.1f} / {p90:.1f}" for name, (median, p90) in columns.items())


def test_the_first_point_is_in_the_middle_and_none_comes_twice() -> None:
    x = np.random.default_rng(1).normal(size=(600, 3))
    chosen = most_telling(x, 50)
    assert len(set(chosen.tolist())) == 50
    assert (x[chosen[0]] ** 2).sum() < np.quantile((x**2).sum(1), 0.1)
