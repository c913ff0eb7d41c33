"""Errors of profiles that had no part in them, on the points that `simtune profile` measured on GPUs.

    python -m pytest benchmarks/profiling/test_gpu_points.py -m benchmark_only -s

The points are those of `tests/profiling/data`. Profiles: those of the same card from published tables of three engines,
whose products are the library's as torch's are and whose attention is their own; and of the H200 also that of the H100,
carried over by the rates that both were measured with.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.costs.device_transfer import transfer
from simtune.costs.predict import Profile
from simtune.costs.tables.own import MeasuredPoint, read_points
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Facts, Hardware, OperatorKind

pytestmark = pytest.mark.benchmark_only

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("gemm", "decode_attention", "prefill_attention", "elementwise")


def points(card: str) -> list[MeasuredPoint]:
    _, measured, _ = read_points(ROOT / f"tests/profiling/data/{card}-torch.jsonl.gz")
    return [p for p in measured if p.kind in KINDS and p.role != "sentinel" and p.seconds and p.variant != "paged"]


def errors(profile: Hardware, measured: list[MeasuredPoint]) -> dict[str, np.ndarray]:
    """Predicted / measured - 1 of the points that the profile has an operator of, by operator."""
    answers, off = Profile(profile), dict[str, list[float]]()
    for p in measured:
        kind = cast(OperatorKind, p.kind)
        kv_dtype = (p.kv_dtype or p.dtype) if "attention" in p.kind else None
        if answers.measured(kind, p.dtype, kv_dtype or p.dtype, p.variant):
            operator = answers.predictor(kind, p.dtype, kv_dtype=kv_dtype, variant=p.variant)
            seconds = float(operator.seconds(**{name: np.array([size]) for name, size in p.shape.items()})[0])
            off.setdefault(".".join(filter(None, (p.kind, p.variant))), []).append(seconds / (p.seconds or 0.0) - 1)
    return {name: np.array(values) for name, values in off.items()}


def carried() -> Hardware:
    """The profile of the H100 on the measured rates of the H200."""
    facts = Facts.from_file(ROOT / "simtune/hwprofiles/h200-torch/facts.yaml")
    return transfer(load_hardware("h100-torch"), facts)


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_points_of_a_gpu(card: str, record: Recorder) -> None:
    profiles = {name: load_hardware(name) for name in (f"{card}-sxm", f"{card}-sxm-sglang", f"{card}-sxm-trtllm")}
    if card == "h200":
        profiles["carried over from h100-torch"] = carried()
    for name, profile in profiles.items():
        for operator, off in errors(profile, points(card)).items():
            median, p90 = np.median(np.abs(off)), np.quantile(np.abs(off), 0.9)
            print(
                f"{card} {operator:24} {name:30} {len(off):4} points: {median:.1%} / {p90:.1%}, {np.median(off):+.1%}"
            )
            record(f"{card} {operator} by {name}: median", 100 * float(median), "% off", "lower")
