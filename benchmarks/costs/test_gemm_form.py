"""The block term of `simtune.costs.operators.Gemm` against waves of tiles, on tables that had no say in choosing it.

    python -m pytest benchmarks/costs/test_gemm_form.py -m benchmark_only -s

Vidur's H100 and A100 tables and LLMServingSim's H100 tables hold matrix products of whole models under tensor
parallelism; 200 random rows are fitted, up to 3,000 others predicted, four seeds.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from simtune.costs.fit import hold_out
from simtune.costs.operators import OPERATORS, Gemm, Setting, Shape, Terms
from simtune.costs.tables import Origin, Table
from simtune.specs.catalog import load_hardware

pytestmark = pytest.mark.benchmark_only

Row = tuple[int, int, int, float]


class Waves(Gemm):
    """The form of the study: a cost per wave of 128 x 128 tiles over the processors."""

    def terms(self, x: Shape, setting: Setting) -> Terms:
        tiles = np.ceil(x["m"] / 128) * np.ceil(x["n"] / 128)
        return super().terms(x, setting)._replace(blocks=np.ceil(tiles / setting.processors) - 1)


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt") as file:
        yield from csv.DictReader(file)


def vidur(folder: Path) -> Iterator[Row]:
    for path in sorted(folder.glob("*_mlp.csv.gz")):
        for r in rows_of(path):
            heads, kv, hidden, wide = (int(r[k]) for k in ("n_head", "n_kv_head", "n_embd", "n_expanded_embd"))
            m, tp = int(r["num_tokens"]), int(r["num_tensor_parallel_workers"])
            products = {
                "attn_pre_proj": ((heads + 2 * kv) * hidden // heads // tp, hidden),
                "attn_post_proj": (hidden, hidden // tp),
                "mlp_up_proj": (2 * wide // tp, hidden),
                "mlp_down_proj": (hidden, wide // tp),
            }
            for name, (n, k) in products.items():
                median_ms = r[f"time_stats.{name}.median"]
                if median_ms and float(median_ms) > 0:
                    yield m, n, k, float(median_ms) * 1e-3


def llmservingsim(folder: Path) -> Iterator[Row]:
    for name, tp, hidden, wide, kv in (("8B", 1, 4096, 14336, 8), ("70B", 4, 8192, 28672, 8)):
        products = {
            "q_proj": (hidden // tp, hidden),
            "k_proj": (kv * 128 // tp, hidden),
            "o_proj": (hidden, hidden // tp),
            "gate_proj": (wide // tp, hidden),
            "down_proj": (hidden, wide // tp),
        }
        for r in rows_of(folder / f"Llama-3.1-{name}_tp{tp}_layers.csv.gz"):
            if r["layer_name"] in products:
                yield int(r["input"]), *products[r["layer_name"]], int(r["latency(ns)"]) * 1e-9


@pytest.mark.parametrize(
    ("name", "profile"),
    [("vidur/h100", "h100-sxm"), ("vidur/a100", "a100-sxm-80g"), ("llmservingsim/h100", "h100-sxm")],
)
def test_on_tables_not_looked_at(name: str, profile: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, device = data_dir / "profiles" / name, load_hardware(profile).device
    found = vidur(folder) if name.startswith("vidur") else llmservingsim(folder)
    rows = np.array([(*shape, seconds) for shape, seconds in {row[:3]: row[3] for row in found}.items()])
    shape = dict(zip("mnk", rows.T[:3], strict=True))
    table = Table("gemm", "bf16", shape, rows[:, 3], Origin("published", "see the data's own README"), (name,))
    for form in (Waves(), OPERATORS["gemm"]):
        monkeypatch.setitem(OPERATORS, "gemm", form)
        errors = [
            hold_out(table, device.processors, device.flops_per_s["bf16"], device.memory_bytes_per_s, seed=seed)
            for seed in range(4)
        ]
        median, p90 = (np.mean([getattr(e, which) for e in errors]) * 100 for which in ("median", "p90"))
        print(f"\n{name}: {len(rows):,} rows, {type(form).__name__}: median {median:.1f} %, p90 {p90:.1f} %")
