"""Norms by the data sheet and by Vidur's table beside published times of compiled ones.

    python -m pytest benchmarks/costs/test_norms.py -m benchmark_only -s

Vidur's, of early 2024, go one row to a block and value by value. vLLM compiles its norms, so its profiles take the data
sheet's; those of TensorRT-LLM and SGLang, whose own kernels nobody has published, Vidur's.

Published: linkedin/Liger-Kernel, pull request 1462 (RMSNorm and FusedAddRMSNorm, forward, "after"), and
meta-pytorch/tritonbench, pull request 1130 (what torch.compile makes of it), both bf16. Their clients time single
calls, which adds some microseconds to short ones; so only those of 2,048 rows and more are told.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.costs.predict import Profile
from simtune.specs.catalog import load_hardware

pytestmark = pytest.mark.benchmark_only


class Published(NamedTuple):
    """A norm of `rows` tokens; values read and written per hidden one, 4 with the residual added."""

    profile: str
    rows: int
    hidden: int
    passes: int
    us: float


PUBLISHED = (
    Published("h100-sxm", 2048, 4096, 2, 18.944),
    Published("h100-sxm", 8192, 4096, 2, 51.968),
    Published("h100-sxm", 2048, 8192, 2, 29.504),
    Published("h100-sxm", 2048, 4096, 4, 28.224),
    Published("h100-sxm", 2048, 8192, 4, 50.720),
    Published("b200", 2048, 4096, 2, 11.983),
    Published("b200", 2048, 8192, 2, 22.624),
    Published("b200", 2048, 16384, 2, 44.662),
    Published("b200", 8192, 4096, 2, 28.992),
)
NEAR = 0.3
"""Of the data sheet's estimates, at the median: nearer than what is usual for kernels that nobody measured."""


def test_norms_beside_published_ones(record: Recorder) -> None:
    print("\nprofile     rows hidden  passes  published us   Vidur's          data sheet")
    off: dict[str, list[float]] = {"Vidur's": [], "data sheet": []}
    for norm in PUBLISHED:
        profiles = {"Vidur's": f"{norm.profile}-trtllm", "data sheet": norm.profile}
        ways = {
            name: Profile(load_hardware(profile)).predictor("elementwise", "bf16", variant="norm")
            for name, profile in profiles.items()
        }
        line = f"{norm.profile:9} {norm.rows:6,} {norm.hidden:6,} {norm.passes:7} {norm.us:13.1f}"
        for name, predictor in ways.items():
            us = 1e6 * float(predictor.seconds(rows=np.array([norm.rows]), width=norm.passes * norm.hidden)[0])
            off[name].append(us / norm.us - 1)
            line += f"   {us:6.1f} ({off[name][-1]:+.0%})"
        print(line)
    for name, errors in off.items():
        median = float(np.median(np.abs(errors)))
        print(f"{name}: {median:.0%} off at the median")
        record(f"{name}, median", 100 * median, "% off", "lower")
    assert np.median(np.abs(off["data sheet"])) < NEAR
