"""Whole iterations nobody fitted: Llama-2-70B prompt and token times that Splitwise measured on A100 and H100.

    python -m pytest benchmarks/costs/test_whole_iterations.py -m benchmark_only -s

Prints predicted over measured by device, TP and phase, and what is left after the best scale and offset per group
(measured = scale x predicted + offset). The engine behind the measurements is of 2023; its token times hardly depend
on TP, so most of them is not kernel time, and the offset finds it.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import least_squares

from simtune.costs.iteration import Batch, StepModel
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Batching, Parallelism, Pool

pytestmark = pytest.mark.benchmark_only

Column = NDArray[np.float64]

PROFILES = {"a100-80gb": "a100-sxm-80g", "h100-80gb": "h100-sxm"}


def steps(path: Path) -> dict[tuple[str, int, str], list[tuple[float, float]]]:
    """(predicted, measured) seconds by device, TP and phase."""
    model, found, models = load_model("llama-2-70b"), defaultdict(list), {}
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            device, tp = row["hardware"], int(row["tensor_parallel"])
            if (device, tp) not in models:
                pool = Pool(
                    hardware=PROFILES[device],
                    instances=1,
                    parallelism=Parallelism(tp=tp),
                    batching=Batching(max_num_seqs=256, max_num_batched_tokens=65536),
                )
                models[device, tp] = StepModel(model, load_hardware(PROFILES[device]), pool)
            batch, prompt, tokens = (int(row[k]) for k in ("batch_size", "prompt_size", "token_size"))
            prefill = Batch(0, 0, tuple((0, prompt) for _ in range(batch)), batch)
            decode = Batch(batch, batch * (prompt + tokens // 2), (), batch)
            for phase, work, measured_ms in (("prompt", prefill, "prompt_time"), ("token", decode, "token_time")):
                predicted = sum(models[device, tp].breakdown(work).values())
                found[device, tp, phase].append((predicted, float(row[measured_ms]) / 1e3))
    return found


def two_numbers(predicted_s: Column, measured_s: Column) -> tuple[float, float]:
    """scale, offset_s >= 0 that bring predictions nearest to measurements: soft-L1 of the log ratio, three starts."""
    start = np.log(np.median(measured_s / predicted_s))
    fits = [
        least_squares(
            lambda q: np.log(np.exp(q[0]) * predicted_s + np.exp(q[1])) - np.log(measured_s),
            [start, np.log(share * measured_s.min())],
            loss="soft_l1",
            f_scale=0.05,
        )
        for share in (1e-3, 0.1, 0.9)
    ]
    scale, offset_s = np.exp(min(fits, key=lambda fit: float(fit.cost)).x)
    return float(scale), float(offset_s)


def test_splitwise(data_dir: Path) -> None:
    path = data_dir / "iteration" / "splitwise_llama2_70b_a100_h100.csv.gz"
    before, after = [], []
    print(f"\n{'device':10} tp phase   n    predicted/measured p10 p50 p90    scale  offset ms  median error after")
    for (device, tp, phase), pairs in sorted(steps(path).items()):
        predicted, measured = np.array(pairs).T
        scale, offset_s = two_numbers(predicted, measured)
        ratio = predicted / measured
        before.append(np.abs(ratio - 1))
        after.append(np.abs((scale * predicted + offset_s) / measured - 1))
        low, middle, high = np.quantile(ratio, (0.1, 0.5, 0.9))
        print(
            f"{device:10} {tp:2} {phase:6} {len(pairs):4}         {low:6.2f} {middle:6.2f} {high:6.2f}         "
            f"{scale:6.2f} {offset_s * 1e3:8.2f} {np.median(after[-1]):12.1%}"
        )
    for name, errors in (("before", np.concatenate(before)), ("after scale and offset", np.concatenate(after))):
        print(f"all rows, {name}: median error {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%}")
