"""How long it takes to choose a schedule over batch and context, trees included.

make bench        or        python -m pytest benchmarks/speculation -m benchmark_only -s
"""

from __future__ import annotations

import statistics

import pytest

from benchmarks.machine import SCALED, repeated
from benchmarks.results import Recorder
from simtune.costs.drafting import RoundModel
from simtune.specs.acceptance import PerRank
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.drafters import Eagle
from simtune.specs.pool import Batching, Pool
from simtune.tuner.drafting import Schedule, choose

pytestmark = pytest.mark.benchmark_only

RANKS = PerRank(probability=tuple(tuple(0.5 * rank**-1.7 for rank in range(1, 11)) for _ in range(6)))


def test_a_whole_schedule_within_five_cpu_seconds(record: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    model, hardware = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
    pool = Pool(hardware="h100-sxm", instances=1, batching=Batching(max_num_seqs=512, max_num_batched_tokens=8192))

    def work() -> Schedule:
        costs = RoundModel(model, hardware, pool, Eagle(draft_vocab_size=32000))
        schedule = choose(RANKS, costs, [2**i for i in range(10)], [512, 1024, 2048, 4096, 8192, 16384])
        schedule.by_batch(), schedule.dynamic_tree()
        return schedule

    schedule, took = work(), repeated(work, 3)
    seconds = statistics.median(took.scaled)
    record.samples("a whole schedule", took.scaled, SCALED, "lower")
    with capsys.disabled():
        settings = len(schedule.settings) + len(schedule.dynamic)
        print(f"\n60 cells, {settings} settings each: {seconds:.2f} scaled CPU s; gain {schedule.gain:.2f}")
    assert seconds <= 5
