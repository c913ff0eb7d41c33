"""Instances that fail: what becomes of the requests there, and of those on their way between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import VllmFcfs
from simtune.results.outcome import Outcome
from simtune.sim.availability import Change
from simtune.sim.core import EngineCore, KvConnector
from simtune.sim.deployment import deploy
from simtune.sim.link import TransferLink
from simtune.sim.router import LeastOutstanding, RoundRobin
from simtune.sim.world import World
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.testing.clusters import stream_of


def engine() -> VllmFcfs:
    return VllmFcfs(num_blocks=1000, block_size=1, max_num_seqs=10, max_num_batched_tokens=1000, max_model_len=1000)


def outcome_of(world: World) -> Outcome:
    """Run a world to its end, when nobody waits any more."""
    outcome = world.run()
    assert world._recorder.waiting == 0
    return outcome


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
    outcome = outcome_of(
        World(
            [front, back],
            stream_of([0.0, 2.5], [2, 50], [40, 5]),
            router=LeastOutstanding([front]),
            decode_router=LeastOutstanding([back]),
            changes=[*failures, *recovery],
        )
    )
    assert outcome.resent.tolist() == [1, 1]
    # A had delivered two tokens, B one. At 21 s both prompts are done again: A's 4 tokens share the link with B's 51
    # until 29 s, and B's are sent by 76 s. A's first transfer, of 2 tokens, had ended at 3 s.
    assert (outcome.transferred / TICKS_PER_SECOND).tolist() == [3.0, 76.0]
    for core in (front, back):
        assert not core.has_work
        assert core.scheduler.kv.free == core.scheduler.kv.total


@pytest.mark.parametrize(("decodes", "sent_s"), [(2, 61.0), (1, 150.0)])
def test_a_transfer_whose_target_fails_begins_anew_towards_one_that_is_up(decodes: int, sent_s: float) -> None:
    """The prompt is done at 1 s and would be sent by 51 s; the first decode instance is down from 11 s to 100 s."""
    front = EngineCore(engine(), LinearCosts(step_s=1.0), connector=KvConnector(TransferLink(1.0), 1, 0, 0))
    back = [EngineCore(engine(), LinearCosts(step_s=2.0), i) for i in range(decodes)]
    for number, core in enumerate(back, 1):
        core.number = number
    changes = [
        Change(11 * TICKS_PER_SECOND, back[:1], up=False, lost=True),
        Change(100 * TICKS_PER_SECOND, back[:1], up=True),
    ]
    outcome = outcome_of(
        World(
            [front, *back],
            stream_of([0.0], [50], [3]),
            router=LeastOutstanding([front]),
            decode_router=LeastOutstanding(back),
            changes=changes,
        )
    )
    assert outcome.core.tolist() == [decodes]
    assert outcome.resent.tolist() == [0], "the prompt is where it was"
    assert (outcome.transferred / TICKS_PER_SECOND).tolist() == [sent_s]
    assert (outcome.finish / TICKS_PER_SECOND).tolist() == [sent_s + 4]
    assert not front.holding


def test_what_an_instance_of_a_plan_has_when_it_fails_is_computed_anew_elsewhere() -> None:
    """Steps of 1 s; ten tokens. Five were delivered when the instance fails at 5.5 s, and the step under way is lost:
    the other one computes the prompt and them again, in a step that delivers the sixth."""
    pool = {"hardware": "h100-sxm", "instances": 2, "batching": {"max_num_seqs": 4, "max_num_batched_tokens": 512}}
    events = [{"kind": "failure", "at_s": 5.5, "pool": "mixed", "instance": 0}]
    plan = Plan.model_validate({"name": "p", "model": "llama-3.1-8b", "pools": [pool], "events": events}, strict=False)
    deployment = deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"), LinearCosts(step_s=1.0))
    result = deployment.simulate(stream_of([0.0], [50], [10]))
    assert result.outcome.resent.tolist() == [1]
    assert (result.first_token_s.tolist(), result.finish_s.tolist()) == ([1.0], [10.5])


def test_whoever_announces_a_change_is_told_when_it_is_done() -> None:
    """The second instance comes at 3 s; it has a request from 4 s to 10 s and leaves at 5 s, drained when that ends."""
    cores, done = [EngineCore(engine(), LinearCosts(step_s=1.0)) for _ in range(2)], list[tuple[str, float]]()
    cores[1].number, cores[1].up = 1, False

    def noting(name: str) -> Callable[[int], None]:
        return lambda now: done.append((name, now / TICKS_PER_SECOND))

    changes = [
        Change(3 * TICKS_PER_SECOND, cores[1:], up=True, done=noting("up")),
        Change(5 * TICKS_PER_SECOND, cores[1:], up=False, done=noting("drained")),
    ]
    stream = stream_of([0.0, 4.0], [4, 4], [20, 6])
    outcome = outcome_of(World(cores, stream, router=LeastOutstanding(cores), changes=changes))
    assert outcome.core.tolist() == [0, 1]
    assert done == [("up", 3.0), ("drained", 10.0)]


def test_what_a_failed_instance_had_counts_there_no_more() -> None:
    """The first request is lost with its instance at 0.5 s and computed by the other. Both are up and idle when the
    second one comes, and equals go to the first."""
    cores = [EngineCore(engine(), LinearCosts(step_s=1.0)) for _ in range(2)]
    cores[1].number = 1
    changes = [
        Change(round(at * TICKS_PER_SECOND), cores[:1], up=up, lost=not up) for at, up in ((0.5, False), (5.0, True))
    ]
    router = LeastOutstanding(cores)
    outcome = outcome_of(World(cores, stream_of([0.0, 10.0], [4, 4], [2, 2]), router=router, changes=changes))
    assert outcome.resent.tolist() == [1, 0]
    assert outcome.core.tolist() == [1, 0]
    assert (outcome.finish / TICKS_PER_SECOND).tolist() == [2.5, 12.0]


def test_who_waits_behind_a_transfer_that_is_given_up_goes_at_the_end_of_the_step() -> None:
    """A decodes from 3 s on, in steps of 2 s. B's 61 tokens find no room beside it, and C's one waits behind them until
    B's instance fails at 12.5 s: it goes when the step under way ends, at 13 s."""
    fronts = [
        EngineCore(engine(), LinearCosts(step_s=1.0), connector=KvConnector(TransferLink(1.0, i), 1, 0, 0))
        for i in range(2)
    ]
    small = VllmFcfs(num_blocks=64, block_size=1, max_num_seqs=10, max_num_batched_tokens=1000, max_model_len=63)
    back = EngineCore(small, LinearCosts(step_s=2.0))
    fronts[1].number, back.number = 1, 2
    changes = [
        Change(round(12.5 * TICKS_PER_SECOND), fronts[1:], up=False, lost=True),
        Change(500 * TICKS_PER_SECOND, fronts[1:], up=True),
    ]
    outcome = outcome_of(
        World(
            [*fronts, back],
            stream_of([0.0, 4.0, 6.0], [2, 61, 1], [40, 2, 4]),
            router=RoundRobin(fronts),
            decode_router=LeastOutstanding([back]),
            changes=changes,
        )
    )
    assert outcome.resent.tolist() == [0, 1, 0]
    assert (outcome.transferred / TICKS_PER_SECOND).tolist()[::2] == [3.0, 14.0]


def changing(front: list[EngineCore], back: list[EngineCore], changes: list[Change], arrivals: list[float]) -> Outcome:
    """Requests of 4 tokens and 3 more, in steps of 1 s, sent at 4 bytes a second."""
    for number, core in enumerate([*front, *back]):
        core.number, core.pool = number, "decode" if core in back else "prefill"
    requests = len(arrivals)
    world = World(
        [*front, *back],
        stream_of(arrivals, [4] * requests, [3] * requests),
        router=LeastOutstanding(front),
        decode_router=LeastOutstanding(back),
        changes=changes,
    )
    outcome = outcome_of(world)
    for core in (*front, *back):
        assert not core.has_work
        assert not core.holding
        assert core.scheduler.kv.free == core.scheduler.kv.total
    return outcome


def prefilling(link: int, up: bool = True) -> EngineCore:
    return EngineCore(engine(), LinearCosts(step_s=1.0), up=up, connector=KvConnector(TransferLink(4.0, link), 1, 0, 0))


def at(seconds: float) -> int:
    return round(seconds * TICKS_PER_SECOND)


@pytest.mark.parametrize("prefill_s", [0.25, 0.5, 0.75])
def test_instances_that_change_roles_at_one_time_do_not_wait_for_each_other(prefill_s: float) -> None:
    """The only decode instance leaves at 0.5 s and is up as a prefill instance at 1.5 s; the only prefill instance
    leaves too, with a prompt that is done at 1 s. Only itself could become the decode instance that takes the
    cache, so it drops it and is up at 2 s. The request is computed by the other one, from 1.5 s to 2.5 s, and its 5
    tokens, with the one that was delivered, are sent by 3.75 s."""
    front, back = [prefilling(0), prefilling(1, up=False)], [EngineCore(engine(), LinearCosts(step_s=1.0), up=up)
                                                            for up in (True, False)]  # fmt: skip
    second = at(1.0)
    changes = [
        Change(at(0.5), back[:1], up=False, then=front[1:], delay=second),
        Change(at(prefill_s), front[:1], up=False, then=back[1:], delay=second),
    ]
    outcome = changing(front, back, changes, [0.0])
    assert outcome.resent.tolist() == [1]
    assert (outcome.first_token / TICKS_PER_SECOND).tolist() == [1.0]
    assert (outcome.transferred / TICKS_PER_SECOND).tolist() == [3.75]
    assert (outcome.finish / TICKS_PER_SECOND).tolist() == [4.75]


def test_an_instance_that_leaves_waits_for_a_decode_instance_that_is_to_come_back() -> None:
    """The decode instance fails at 0.5 s and is back at 10 s: the cache is kept until then, and sent by 11 s."""
    front, back = [prefilling(0)], [EngineCore(engine(), LinearCosts(step_s=1.0), up=up) for up in (True, False)]
    changes = [
        Change(at(0.5), back[:1], up=False, lost=True),
        Change(at(0.75), front, up=False, then=back[1:], delay=at(1.0)),
        Change(at(10.0), back[:1], up=True),
    ]
    outcome = changing(front, back, changes, [0.0])
    assert outcome.resent.tolist() == [0]
    assert (outcome.transferred / TICKS_PER_SECOND).tolist() == [11.0]
    assert (outcome.finish / TICKS_PER_SECOND).tolist() == [13.0]


def test_a_cache_that_no_instance_takes_is_dropped_when_its_instance_begins_to_leave() -> None:
    """The decode instance is lost for good before the first prompt is done at 1 s. At 1.5 s, in the step of the second
    prompt, its instance begins to leave, so that the first one begins anew on the other; the second one follows when it
    is done at 2 s, and the instance decodes from 3 s on."""
    front, back = [prefilling(0), prefilling(1, up=False)], [EngineCore(engine(), LinearCosts(step_s=1.0), up=up)
                                                            for up in (True, False)]  # fmt: skip
    changes = [
        Change(at(0.5), back[:1], up=False, lost=True),
        Change(at(1.25), front[1:], up=True),
        Change(at(1.5), front[:1], up=False, then=back[1:], delay=at(1.0)),
    ]
    outcome = changing(front, back, changes, [0.0, 1.0])
    assert outcome.resent.tolist() == [1, 1]
    # 5 tokens each, with the one that was delivered: 2 of them are sent from 3 s until the second prompt is done at
    # 3.5 s, the other 3 at half the rate.
    assert (outcome.transferred / TICKS_PER_SECOND).tolist() == [5.0, 5.5]
    assert (outcome.finish >= 0).all()


def test_a_prompt_that_is_lost_on_its_way_is_found_in_the_cache_of_another_instance() -> None:
    """The second prompt is the first one, which instance 0 has computed; instance 1 is lost at 2.5 s, with the second
    one, which is being sent. Instance 0 finds it."""

    def caching() -> VllmFcfs:
        return VllmFcfs(
            num_blocks=100,
            block_size=4,
            max_num_seqs=10,
            max_num_batched_tokens=100,
            max_model_len=100,
            prefix_caching=True,
        )

    fronts = [
        EngineCore(caching(), LinearCosts(step_s=1.0), connector=KvConnector(TransferLink(1.0, i), 4, 0, 0))
        for i in range(2)
    ]
    back = EngineCore(engine(), LinearCosts(step_s=1.0))
    fronts[1].number, back.number = 1, 2
    stream = replace(stream_of([0.0, 1.0], [20, 20], [3, 3]), hash_ids=(tuple(range(5)),) * 2)
    outcome = outcome_of(
        World(
            [*fronts, back],
            stream,
            router=RoundRobin(fronts),
            decode_router=LeastOutstanding([back]),
            changes=[Change(at(2.5), fronts[1:], up=False, lost=True)],
        )
    )
    assert outcome.resent.tolist() == [0, 1]
    assert (outcome.finish >= 0).all()
    assert fronts[0].scheduler.kv.hit_tokens == 20, "of 21 tokens, with the one that was delivered"
