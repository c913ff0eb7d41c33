"""The block term of `simtune.costs.operators.Gemm` against two others, on tables that had no say in choosing it.

    python -m pytest benchmarks/costs/test_gemm_form.py -m benchmark_only -s

Vidur's H100 and A100 tables and LLMServingSim's H100 tables hold matrix products of whole models under tensor
parallelism; the base is fitted on 200 random rows, up to 3,000 others are predicted, four seeds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.costs.published import gemm_table, llmservingsim, vidur
from benchmarks.results import Recorder
from simtune.costs.fit import fit_base, split_rows
from simtune.costs.operators import OPERATORS, Setting, Shape, Terms
from simtune.costs.operators.matrix import Gemm
from simtune.costs.operators.splits import RANDOM
from simtune.costs.predict import base_seconds
from simtune.costs.tables import take
from simtune.specs.catalog import load_hardware

pytestmark = pytest.mark.benchmark_only


class Waves(Gemm):
    """The form of the study: a cost per wave of 128 x 128 tiles over the processors."""

    def terms(self, x: Shape, setting: Setting) -> Terms:
        tiles = np.ceil(x["m"] / 128) * np.ceil(x["n"] / 128)
        return super().terms(x, setting)._replace(blocks=np.ceil(tiles / setting.processors) - 1)


class FewTiles(Gemm):
    """A walk along k, up to 3,072, where tiles are fewer than a quarter of the processors."""

    def terms(self, x: Shape, setting: Setting) -> Terms:
        tiles = np.ceil(x["m"] / 128) * np.ceil(x["n"] / 128)
        idle = np.maximum(0, 1 - 4 * tiles / setting.processors)
        return super().terms(x, setting)._replace(blocks=np.minimum(1, x["k"] / 3072) * idle)


@pytest.mark.parametrize(
    ("name", "profile"),
    [("vidur/h100", "h100-sxm"), ("vidur/a100", "a100-sxm-80g"), ("llmservingsim/h100", "h100-sxm")],
)
def test_on_tables_not_looked_at(
    name: str, profile: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch, record: Recorder
) -> None:
    folder, device = data_dir / "profiles" / name, load_hardware(profile).device
    table = gemm_table(vidur(folder) if name.startswith("vidur") else llmservingsim(folder), name)
    setting = Setting.of(device.processors, "bf16", None)
    for form in (Waves(), FewTiles(), OPERATORS["gemm"]):
        monkeypatch.setitem(OPERATORS, "gemm", form)
        errors = []
        for seed in range(4):
            train, test = split_rows(table, RANDOM, seed=seed)
            base = fit_base(
                take(table, train), device.processors, device.flops_per_s["bf16"], device.memory_bytes_per_s
            )
            tested = take(table, test)
            predicted = base_seconds(form.terms(tested.shape, setting), **base.model_dump())
            errors.append(np.quantile(np.abs(predicted / tested.seconds - 1), (0.5, 0.9)))
        median, p90 = 100 * np.mean(errors, axis=0)
        print(f"\n{name}: {len(table):,} rows, {type(form).__name__}: median {median:.1f} %, p90 {p90:.1f} %")
        if type(form) is Gemm:
            record(f"{name}, p90", p90, "% off", "lower")
