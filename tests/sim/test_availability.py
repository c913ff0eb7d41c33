"""Instances that fail while requests are on their way between them."""

from __future__ import annotations

import pytest

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import VllmFcfs
from simtune.sim.availability import Change
from simtune.sim.core import EngineCore, KvConnector
from simtune.sim.link import TransferLink
from simtune.sim.router import LeastOutstanding
from simtune.sim.world import World
from simtune.testing.clusters import stream_of


def engine() -> VllmFcfs:
    return VllmFcfs(num_blocks=1000, block_size=1, max_num_seqs=10, max_num_batched_tokens=1000, max_model_len=1000)


@pytest.mark.parametrize("decode_fails_s", [6.0, 6.5])
def test_source_and_target_of_a_transfer_fail_in_one_step(decode_fails_s: float) -> None:
    """Prompts take 1 s, decode steps 2 s. B's transfer, of 50 s, is under way when first the prefill instance fails and
    then, before the step of A is over, the decode instance; both are back at 20 s. B is computed anew, once."""
    front = EngineCore(engine(), LinearCosts(step_s=1.0), connector=KvConnector(TransferLink(1.0), 1, 0, 0))
    back = EngineCore(engine(), LinearCosts(step_s=2.0))
    back.number = 1
    failures = [Change(round(at * TICKS_PER_SECOND), [core], up=False, lost=True) for at, core in
                ((6.0, front), (decode_fails_s, back))]  # fmt: skip
    recovery = [Change(20 * TICKS_PER_SECOND, [core], up=True) for core in (front, back)]
    outcome = World(
        [front, back],
        stream_of([0.0, 2.5], [2, 50], [40, 5]),
        router=LeastOutstanding([front]),
        decode_router=LeastOutstanding([back]),
        changes=[*failures, *recovery],
    ).run()
    assert outcome.resent.tolist() == [1, 1]
    # A had delivered two tokens, B one. At 21 s both prompts are done again: A's 4 tokens share the link with B's 51
    # until 29 s, and B's are sent by 76 s.
    assert (outcome.transferred / TICKS_PER_SECOND).tolist() == [29.0, 76.0]
    for core in (front, back):
        assert not core.has_work
        assert core.scheduler.kv.free == core.scheduler.kv.total
