"""Whole iterations nobody fitted: Llama-2-70B prompt and token times that Splitwise measured on A100 and H100.

    python -m pytest benchmarks/costs/test_whole_iterations.py -m benchmark_only -s

Prints predicted over measured by device, TP and phase, and what `simtune calibrate` makes of it: a scale and an offset
per group, with errors on the half of the steps that had no say in them. The engine behind the measurements is of 2023.
Its token times hardly depend on TP, so at TP 8 two thirds of a step are no kernel time, and the larger the scale, the
less it is one of kernels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.costs.calibration import TimedStep, calibrate, read_log, two_numbers
from simtune.costs.iteration import StepModel
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.pool import Batching, Parallelism, Pool

pytestmark = pytest.mark.benchmark_only

BATCHING = Batching(max_num_seqs=256, max_num_batched_tokens=65536)


def by_halves(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Errors of every step after the correction that the other half of the steps calls for."""
    halves, after = np.array_split(np.random.default_rng(1).permutation(len(predicted)), 2), np.empty(len(predicted))
    for fitted, held in (halves, halves[::-1]):
        scale, offset_s = two_numbers(predicted[fitted], measured[fitted])
        after[held] = np.abs((scale * predicted[held] + offset_s) / measured[held] - 1)
    return after


def test_splitwise(data_dir: Path, record: Recorder) -> None:
    path = data_dir / "iteration" / "splitwise_llama2_70b_a100_h100.csv.gz"
    model, before, after = load_model("llama-2-70b"), [], []
    print(f"\n{'profile':13} tp phase     predicted/measured p10 p50 p90    scale  offset ms  median % after, p90")
    for name in ("a100-sxm-80g", "h100-sxm"):
        for tp in (2, 4, 8):
            hardware = load_hardware(name)
            pool = Pool(hardware=name, instances=1, parallelism=Parallelism(tp=tp), batching=BATCHING)
            log, step_model = read_log(path, model, hardware, tp), StepModel(model, hardware, pool)
            found = calibrate(model, hardware, pool, log, path)
            group = []
            for phase, correction in (("prefill", found.prefill), ("decode", found.decode)):
                mine: list[TimedStep] = [step for step in log.steps if step.kind == phase]
                predicted = np.array([step_model.gpu_s(step.batch) for step in mine])
                measured = np.array([step.seconds for step in mine])
                group.append(by_halves(predicted, measured))
                before.append(np.abs(predicted / measured - 1))
                low, middle, high = np.quantile(predicted / measured, (0.1, 0.5, 0.9))
                assert correction is not None
                print(
                    f"{name:13} {tp:2} {phase:8}           {low:6.2f} {middle:6.2f} {high:6.2f}         "
                    f"{correction.scale:6.2f} {correction.offset_s * 1e3:8.2f} {100 * np.median(group[-1]):12.1f}, "
                    f"{100 * np.quantile(group[-1], 0.9):.1f}"
                )
            after.append(np.concatenate(group))
            print(f"{name:13} {tp:2} both: median {np.median(after[-1]):.1%} (target 6 %)")
            record(f"{name} tp {tp}, median after two numbers", 100 * np.median(after[-1]), "% off", "lower")
            assert np.median(after[-1]) <= 0.06
    for what, errors in (("before", np.concatenate(before)), ("after, by halves", np.concatenate(after))):
        print(f"all steps, {what}: median error {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%}")
        record(f"all steps, {what}, median", 100 * np.median(errors), "% off", "lower")
