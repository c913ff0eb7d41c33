"""Suite of the invariants that every batching policy must keep, whatever it decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from simtune.engine import Request, Scheduler
from simtune.testing.clusters import check, of_policy
from simtune.testing.driver import Driver, SmallWorld, small_worlds, to_the_end

# Each subclass of a suite runs the same functions; hypothesis would report that as a mistake.
many = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
few = settings(many, max_examples=40, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow])


class PolicySuite:
    """Derive from it and set `policy`; the suite trusts what the class of the policy states (`cuts_prompts`, ...)."""

    policy: ClassVar[type[Scheduler]]
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the constructor besides the settings of every policy."""
    constants: ClassVar[Mapping[str, Any]] = {}
    """Attributes of the policy's class to replace by smaller values, for worlds of a few requests."""
    pads: ClassVar[bool] = False
    """True if the tokens of its chunks count padding."""
    conserves_work: ClassVar[bool] = False
    """True if no request ever waits that could have been admitted."""

    def idle_seats(self, scheduler: Scheduler, in_step: int) -> bool:
        """True if requests may wait although a step of `in_step` requests is not full; for policies that conserve
        work."""
        return scheduler.num_running >= scheduler.max_num_seqs

    def make(self, **change: Any) -> Scheduler:
        """Make the policy with 4 seats, 40 blocks of 4 tokens and 16 tokens per step, or with other settings."""
        usual = {
            "num_blocks": 40,
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 16,
        }
        small = type(f"Small{self.policy.__name__}", (self.policy,), dict(self.constants))
        scheduler: Scheduler = small(**{**usual, **self.options, **change})
        return scheduler

    def drive(self, world: SmallWorld, *, single: bool) -> Driver:
        """Run a world to its end, checking all laws of the policy."""
        chunked = world.chunked or self.policy.cuts_prompts == "always"
        uncut = self.policy.cuts_prompts == "never" or not chunked
        scheduler = self.make(
            num_blocks=world.blocks,
            block_size=world.block_size,
            max_num_seqs=world.seqs,
            max_num_batched_tokens=max(world.budget, world.seqs, world.longest if uncut else 1),
            max_model_len=world.longest,
            chunked_prefill=chunked,
        )
        idle_seats = self.idle_seats if self.conserves_work else None
        driver = Driver(scheduler, replace(world, chunked=chunked), self.pads, idle_seats)
        driver.run(single=single)
        return driver

    @given(small_worlds())
    @many
    def test_all_laws_hold_and_jumps_equal_single_steps(self, world: SmallWorld) -> None:
        """Check that requests and blocks are conserved, budgets and seats kept, and the true length unread; as many
        steps at once as the policy allows leave the same log as single steps."""
        walked, jumped = self.drive(world, single=True).log, self.drive(world, single=False).log
        for name in ("scheduled", "context", "longest", "preempted", "admitted", "first", "finished"):
            assert getattr(jumped, name) == getattr(walked, name), f"{name} differs between jumps and single steps"
        assert jumped.free.items() <= walked.free.items(), "free blocks differ between jumps and single steps"
        assert jumped.part.items() <= walked.part.items(), "parts of steps differ between jumps and single steps"

    @given(small_worlds(), st.data())
    @many
    def test_a_longer_answer_changes_nothing_before_the_shorter_one_ends(
        self, world: SmallWorld, data: st.DataObject
    ) -> None:
        """Check that a policy does not depend on the unknown length of an answer."""
        number = data.draw(st.integers(0, len(world.load) - 1))
        arrival = world.load[number]
        room = world.longest - arrival.prompt_tokens - arrival.output_tokens
        assume(room > 0)
        longer = replace(arrival, output_tokens=arrival.output_tokens + data.draw(st.integers(1, room)))
        load = [longer if i == number else unchanged for i, unchanged in enumerate(world.load)]
        short, long = self.drive(world, single=True).log, self.drive(replace(world, load=load), single=True).log
        until = short.finish_of(number)
        for step in range(until):
            assert short.scheduled.get(step) == long.scheduled.get(step), (
                f"step {step} depends on the length of {number}"
            )

    @given(st.data())
    @few
    def test_in_clusters_under_the_clock_nothing_is_lost_and_jumps_equal_single_steps(
        self, data: st.DataObject
    ) -> None:
        """Check pools and pipelines, KV transfers, and instances that come, fail and switch."""
        check(data.draw(of_policy(self.policy, self.options, self.constants)))

    def test_an_instance_that_is_lost_is_as_new(self) -> None:
        """Check after any number of steps, in the middle of one or not."""
        for steps in (0, 1, 2, 3, 6):
            for under_way in (False, True):
                self._fail_after(steps, under_way)

    def _fail_after(self, steps: int, under_way: bool) -> None:
        scheduler = self.make()
        requests = [Request(i, 8, 4, priority=-i) for i in range(8)]
        assert all(scheduler.add(request) for request in requests)
        finished: list[Request] = []
        for _ in range(steps):
            assert scheduler.schedule() is not None
            finished += scheduler.complete().finished
        if under_way:
            scheduler.schedule()
        lost = scheduler.abandon()
        assert Counter(lost) == Counter(requests) - Counter(finished), (
            "abandon() did not return all unfinished requests"
        )
        assert all(request.computed == 0 and not request.decoding for request in lost), (
            "abandon() left computed tokens or decoding set"
        )
        assert not scheduler.has_work
        assert scheduler.kv.free == scheduler.kv.total, "blocks are still taken"
        resubmitted = [Request(10 + i, 8, 4) for i in range(5)]
        assert all(scheduler.add(request) for request in resubmitted)
        assert sorted(to_the_end(scheduler)) == [10, 11, 12, 13, 14]

    def test_who_waits_can_be_taken_back_and_the_residents_go_on(self) -> None:
        """Check the sequence of calls of an instance that is drained."""
        scheduler = self.make()
        requests = [Request(i, 8, 4) for i in range(8)]
        assert all(scheduler.add(request) for request in requests)
        assert scheduler.schedule() is not None
        back = scheduler.withdraw()
        assert back, "withdraw() returned no request"
        assert scheduler.num_waiting == 0
        scheduler.complete()
        assert sorted([request.id for request in back] + to_the_end(scheduler)) == list(range(8))

    def test_who_is_computed_elsewhere_decodes_here(self) -> None:
        """Check a decode pool; a policy that does not serve one refuses to expect any request."""
        scheduler = self.make()
        local, remote, late = Request(0, 8, 3), Request(1, 7, 5, emitted=1), Request(2, 4, 2, emitted=1)
        if not self.policy.takes_over:
            assert not scheduler.expect(remote)
            return
        assert scheduler.expect(remote)
        assert scheduler.expect(late)
        assert scheduler.schedule() is None, "nothing has come yet"
        assert (scheduler.num_running, scheduler.kv.free) == (2, 40 - 2 - 2)
        scheduler.receive(remote)
        assert scheduler.add(local)
        assert scheduler.schedule() is not None
        scheduler.complete()
        scheduler.release(late)
        assert sorted(to_the_end(scheduler)) == [0, 1]
        assert remote.emitted == 5
        assert scheduler.kv.free == scheduler.kv.total

    def test_whoever_is_held_keeps_its_blocks_until_it_is_released(self) -> None:
        """Check a prefill pool."""
        scheduler = self.make(num_blocks=4, max_num_seqs=2)
        holding, next_one = Request(0, 12, 1, hold=True), Request(1, 12, 1)
        assert scheduler.add(holding)
        assert to_the_end(scheduler) == [0]
        assert scheduler.kv.free < 4, "the blocks of a held request are free"
        scheduler.release(holding)
        assert scheduler.kv.free == 4
        assert scheduler.add(next_one)
        assert to_the_end(scheduler) == [1]
