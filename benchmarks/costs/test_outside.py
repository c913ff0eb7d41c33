"""What to do outside the measured box: the base alone, or the base times a correction that fades by itself.

    python -m pytest benchmarks/costs/test_outside.py -m benchmark_only -s

On the A100 tables, trained on 200 rows within a limit and tested beyond it, three seeds. The choice was made
here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.costs.fit import fit_predictor, split_rows
from simtune.costs.operators.splits import Split, above
from simtune.costs.predict import Predictor
from simtune.costs.tables import read_tables, take
from simtune.specs.hardware import Arrays

pytestmark = pytest.mark.benchmark_only

PROCESSORS, FLOPS, BYTES = 108, 312e12, 2.04e12
SPLITS: dict[str, tuple[Split, ...]] = {
    "gemm.bf16": (above("dims", 8192, "n", "k"), above("m", 2048, "m")),
    "prefill_attention.bf16": (
        above("tokens", 4096, "tokens"),
        above("batch", 8, "batch"),
        above("heads", 32, "heads"),
    ),
    "decode_attention.bf16": (
        above("batch", 64, "batch"),
        above("context", 8192, "context"),
        above("heads", 32, "heads"),
    ),
}


@pytest.mark.parametrize("key", SPLITS)
def test_base_alone_or_a_fading_correction(key: str, data_dir: Path, record: Recorder) -> None:
    table = read_tables([data_dir / "profiles/aiconfigurator/a100_sxm"]).operators[key]
    for split in SPLITS[key]:
        errors: dict[str, list[np.ndarray]] = {"base alone": [], "fading": []}
        for seed in range(3):
            train, test = split_rows(table, split, seed=seed)
            fading, tested = fit_predictor(take(table, train), PROCESSORS, FLOPS, BYTES), take(table, test)
            alone = Predictor(fading.operator.model_copy(update={"residual": None}), PROCESSORS, Arrays({}))
            for name, predictor in (("base alone", alone), ("fading", fading)):
                off = np.abs(predictor.seconds(**tested.shape) / tested.seconds - 1)
                errors[name].append(np.quantile(off, (0.5, 0.9)))
        means = {name: 100 * np.mean(found, axis=0) for name, found in errors.items()}
        print(f"\n{key}, {split.name}: " + ", ".join(f"{n} {a:.1f} / {b:.1f} %" for n, (a, b) in means.items()), end="")
        record(f"{key}, {split.name}, median", means["fading"][0], "% off", "lower")
        record(f"{key}, {split.name}, p90", means["fading"][1], "% off", "lower")
