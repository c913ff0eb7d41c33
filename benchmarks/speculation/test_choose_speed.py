"""How long it takes to choose a schedule over batch and context, trees included.

make bench        or        python -m pytest benchmarks/speculation -m benchmark_only -s
"""

from __future__ import annotations

import time

import pytest

from simtune.costs.drafting import RoundCosts
from simtune.specs.acceptance import PerRank
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Batching, Pool
from simtune.specs.speculation import Eagle
from simtune.tuner.speculation import choose

pytestmark = pytest.mark.benchmark_only

RANKS = PerRank(probability=tuple(tuple(0.5 * rank**-1.7 for rank in range(1, 11)) for _ in range(6)))


def test_a_whole_schedule_within_five_cpu_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    model, hardware = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
    pool = Pool(hardware="h100-sxm", instances=1, batching=Batching(max_num_seqs=512, max_num_batched_tokens=8192))
    start = time.process_time()
    costs = RoundCosts(model, hardware, pool, Eagle(draft_vocab_size=32000))
    schedule = choose(RANKS, costs, [2**i for i in range(10)], [512, 1024, 2048, 4096, 8192, 16384])
    schedule.by_batch(), schedule.dynamic_tree()
    seconds = time.process_time() - start
    with capsys.disabled():
        settings = len(schedule.settings) + len(schedule.dynamic)
        print(f"\n60 cells, {settings} settings each: {seconds:.2f} CPU s; gain {schedule.gain:.2f}")
    assert seconds <= 5
