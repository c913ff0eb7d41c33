"""What tables of experts hold of DeepSeek-V3, whose router takes experts of four of eight groups.

    python -m pytest benchmarks/costs/test_grouped_router.py -m benchmark_only -s

Rows that readers leave out (`simtune.costs.tables.aiconfigurator_moe`), told by a base that all other models' rows were
fitted to, without a residual: once as their columns say (balanced: all experts in turn), once as a router of groups
makes of such logits. Of the eight experts of a token, one in each group, four are left; the other four places are ties
and go to the same experts for every token, on the first rank, which is measured. Median and 90th percentile of
|log(predicted / measured)|. Nothing was fitted to these rows; the second reading was thought of after the errors of the
first.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from benchmarks.costs.test_moe_accuracy import CARDS, tables
from benchmarks.results import Recorder
from simtune.arrays import Array
from simtune.costs.fit import fit_base
from simtune.costs.operators import OPERATORS, Setting, Terms
from simtune.costs.operators.moe import DEALT
from simtune.costs.predict import base_seconds
from simtune.costs.tables import take

pytestmark = pytest.mark.benchmark_only

HIDDEN, CHOSEN, EXPERTS = 7168, 8, 256
FREE = CHOSEN // 2
"""Experts of a token that its groups leave, and as many ties."""


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("card", ["h100_sxm", "h200_sxm", "b200_sxm"])
def test_rows_of_a_router_of_groups(card: str, engine: str, data_dir: Path, record: Recorder) -> None:
    table, sheet = tables(data_dir, card, engine, "moe")["moe.fp8_block"], CARDS[card]
    shape, seconds = raw(data_dir, card, engine)
    others = np.flatnonzero((table.shape["hidden"] != HIDDEN) | (table.shape["experts"] != EXPERTS))
    base = fit_base(take(table, others), sheet.processors, sheet.fp8, sheet.memory)
    setting = Setting.of(sheet.processors, "fp8_block", None)
    off = {}
    for name, terms in (("in turn", OPERATORS["moe"].terms(shape, setting)), ("groups", in_groups(shape, setting))):
        log = np.abs(np.log(base_seconds(terms, **base.model_dump()) / seconds))
        off[name] = np.quantile(log, (0.5, 0.9))
        record(f"DeepSeek-V3's rows of {card} {engine}, {name}", 100 * off[name][0], "% off", "same")
    words = ", ".join(f"{name} {median:.2f} / {p90:.2f}" for name, (median, p90) in off.items())
    print(f"\n{card} {engine}, {len(seconds)} rows: {words}", end="")
    assert (off["groups"][0] < off["in turn"][0]) == (engine != "trtllm")


def raw(data_dir: Path, card: str, engine: str) -> tuple[dict[str, Array], Array]:
    """(shapes, seconds) of the balanced rows of DeepSeek-V3."""
    (path,) = (data_dir / "profiles/aiconfigurator_0.12" / card).glob(f"{engine}_*_moe_perf.parquet")
    sizes = {"hidden_size": HIDDEN, "topk": CHOSEN, "num_experts": EXPERTS}
    wanted = {"moe_dtype": "fp8_block", "distribution": "balanced", **sizes}
    rows = [row for row in parquet.read_table(path).to_pylist() if wanted.items() <= row.items()]
    names = {
        "tokens": "num_tokens",
        "hidden": "hidden_size",
        "experts_per_token": "topk",
        "experts": "num_experts",
        "ep": "moe_ep_size",
    }
    shape = {name: np.array([float(row[column]) for row in rows]) for name, column in names.items()}
    shape["intermediate"] = np.array([row["inter_size"] / row["moe_tp_size"] for row in rows])
    shape["skew"] = np.full(len(rows), DEALT)
    return shape, np.array([row["latency"] * 1e-3 for row in rows])


def in_groups(shape: dict[str, Array], setting: Setting) -> Terms:
    """Of the first rank, with the ties and its share of the other experts in the first half."""
    m, inter = shape["tokens"], shape["intermediate"]
    half = EXPERTS / 2
    here = np.minimum(EXPERTS / shape["ep"], half)
    tied = np.minimum(here, FREE)
    rows = m * tied + FREE * m * (here - tied) / (half - FREE)
    awake = np.minimum(here, tied + FREE * m)
    matrices = 3 * HIDDEN * inter
    values = rows * (6 * inter + 2 * HIDDEN) + (CHOSEN + 2) * m * HIDDEN
    return Terms(
        2 * rows * matrices,
        setting.dtype_bytes * awake * matrices + 2 * values,
        np.maximum(awake, rows / 64) * (2 * inter + HIDDEN) / 128 / setting.processors,
    )
