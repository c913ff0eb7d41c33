"""The ranking of all published techniques on three models and three cards: CPU, and whether every gain has an interval.

python -m pytest benchmarks/validation/test_rank_speed.py -m benchmark_only -s
"""

from __future__ import annotations

import time

import pytest

from benchmarks.machine import unit_s
from benchmarks.results import Recorder
from simtune.specs.catalog import load_workload
from simtune.validation.published import OwnLoad, own_gains, select

pytestmark = pytest.mark.benchmark_only
REQUESTS = 400
MODELS = ("llama-3.1-8b", "llama-3.3-70b", "qwen3-30b-a3b")
CARDS = ("a100-sxm-80g", "h100-sxm", "b200")


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("model", MODELS)
def test_every_technique_has_an_interval(model: str, card: str, record: Recorder) -> None:
    workload, trace = load_workload("chat")
    own, entries = OwnLoad(model, card, workload, trace, most_requests=REQUESTS), select(())
    before = unit_s()
    start = time.process_time()
    gains = [gain for gain in own_gains(entries, own) if gain.gain is not None]
    units = (time.process_time() - start) / ((before + unit_s()) / 2)
    print(f"{model} on {card}: {len(gains)} techniques in {units:.0f} units")
    for gain in gains:
        assert gain.gain is not None
        assert gain.low is not None, gain.system
        assert gain.low <= gain.gain <= (gain.high or gain.gain), gain.system
        assert gain.error is not None, gain.system
    record(f"{model} on {card}: techniques", len(gains), "techniques", "higher")
    record(f"{model} on {card}: CPU", units, "units", "lower")
