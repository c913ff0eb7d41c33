"""Errors of products carried over to a device of another vendor, before and after its `attained_flops_per_s`.

    python -m pytest benchmarks/costs/test_attained.py -m benchmark_only -s

Square products in fp8 of an MI300X, measured with hipBLASLt on random values (Azure/AI-benchmarking-guide,
Azure_Results/ND_MI300X_v5_results.md), on which nothing was chosen. Their inputs are in fp8 already, so the time of
quantising them is left out of the predictions.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.arrays import Array
from simtune.costs.device_transfer import transfer
from simtune.costs.operators import Chip
from simtune.costs.predict import Predictor
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Facts, Hardware

pytestmark = pytest.mark.benchmark_only

MEASURED = {2048: 427.74e12, 4096: 955.17e12, 8192: 1159.23e12, 16384: 1015.1e12, 32768: 1029.14e12}
"""FLOP/s of products of m = n = k."""


def ratios(hardware: Hardware) -> Array:
    """Predicted rate over the measured one, of each product."""
    operator = hardware.operators["gemm.fp8"]
    base = operator.base.model_copy(update={"ahead_s": 0.0})
    alone = operator.model_copy(update={"base": base})
    predictor = Predictor(alone, hardware.device.processors, hardware.arrays, Chip.of(hardware.device))
    size: Array = np.array(list(MEASURED), dtype=np.float64)
    measured: Array = np.array(list(MEASURED.values()))
    found: Array = 2 * size**3 / predictor.seconds(m=size, n=size, k=size) / measured
    return found


def test_products_of_an_mi300x(record: Recorder) -> None:
    after = load_hardware("mi300x")
    device = after.device.model_copy(update={"attained_flops_per_s": None})
    facts = Facts(name="mi300x", engine=after.engine, device=device, links=after.links)
    before = transfer(load_hardware("h100-sxm"), facts)
    for name, hardware in (("before", before), ("after", after)):
        found = ratios(hardware)
        print(f"\n{name}: " + ", ".join(f"{size}: {ratio:.2f}" for size, ratio in zip(MEASURED, found, strict=True)))
        record(f"{name}: as fast as measured, median", float(np.median(found)), "times", "lower")
    assert abs(np.log(np.median(ratios(after)))) < abs(np.log(np.median(ratios(before))))
