"""Tokens per verification of transformers' assisted generation, measured and predicted. Needs transformers and torch.

make bench        or        python -m pytest benchmarks/speculation -m benchmark_only -s
"""

from __future__ import annotations

import time

import pytest

from benchmarks.results import Recorder
from simtune.tuner.drafting import chain
from tests.oracles import chain as exact
from tests.oracles import rigged

pytestmark = pytest.mark.benchmark_only

VOCABULARY, LENGTH = 4003, 40


def test_tokens_per_verify(record: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    lines, worst = [], 0.0
    for acceptance in (0.5, 0.7, 0.9):
        rig = rigged.rig(VOCABULARY, acceptance, seed=0)
        target, draft = rigged.llama(rig.target, 128, 2, seed=1), rigged.llama(rig.draft, 64, 1, seed=2)
        starts = rig.starts(LENGTH).tolist()
        for drafts in (2, 4, 6):
            begin = time.thread_time()
            tokens = LENGTH * len(starts)
            measured = tokens / sum(rigged.generate(target, draft, s, LENGTH, drafts).verifies for s in starts)
            realised = tokens / sum(rigged.rounds(rig.agreement(s, LENGTH), drafts) for s in starts)
            conditional = exact.iid(acceptance, drafts)
            predicted = LENGTH / exact.mean_seconds(LENGTH, conditional, draft_s=0, target_s=1)
            uncut = chain.expected_tokens(conditional)
            worst = max(worst, abs(predicted / measured - 1))
            lines.append(
                f"{acceptance:10.2f} {drafts:6} {measured:9.3f} {realised:9.3f} {predicted:10.3f} "
                f"{predicted / measured - 1:+7.1%} {uncut:8.3f} {uncut / measured - 1:+7.1%} "
                f"{time.thread_time() - begin:7.1f}"
            )
    with capsys.disabled():
        print(f"\ntokens per verification, {len(starts)} answers of {LENGTH} tokens each")
        print(f"{'':17} {'':9} {'by own':>9} {'by acceptance':>18} {'whole rounds':>16}")
        print("acceptance drafts  measured agreement    only, cut last         only             CPU s")
        print("\n".join(lines))
    record("tokens per verification, worst", 100 * worst, "% off", "lower")
    assert worst <= 0.03
