"""A session of transformers, step by step, with a manager in its place that takes one request after another."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from simtune.costs.iteration import StepWork
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.errors import EngineError
from simtune.testing.clusters import stream_of
from simtune.validation.client.prompts import Prompts
from simtune.validation.servers.driven_engines import EngineSize, deployment_of
from simtune.validation.servers.transformers_engine import Session
from tests.validation.driven_engine import tiny
from tests.validation.served_steps import PretendedClock

CHUNK = 8
STEP_TICKS = TICKS_PER_SECOND // 100


class Manager:
    """Prompts come in chunks of 8 tokens, and a step is of one request alone."""

    def __init__(self, clock: PretendedClock, fails: str | None = None) -> None:
        self.output_router = SimpleNamespace(output_queue=SimpleQueue())
        self.scheduler = SimpleNamespace(active_requests={}, waiting_requests={})
        self.inputs_and_outputs = SimpleNamespace(requests_in_batch=[])
        self.destroyed = False
        self._clock, self._fails = clock, fails

    def _create_batch_processor(self) -> Any:
        return self

    def add_request(self, text: list[int], *, request_id: str, max_new_tokens: int, streaming: bool) -> None:
        assert streaming
        state = SimpleNamespace(id=request_id, initial_tokens=text, position_offset=0, left=max_new_tokens)
        self.scheduler.waiting_requests[request_id] = state

    def prepare_next_batch(self) -> bool:
        queues = self.scheduler
        if not queues.active_requests and queues.waiting_requests:
            name = next(iter(queues.waiting_requests))
            queues.active_requests[name] = queues.waiting_requests.pop(name)
        batch = []
        for state in queues.active_requests.values():
            new = min(CHUNK, len(state.initial_tokens) - state.position_offset) if self._prompt(state) else 1
            state.position_offset += new
            scheduled = SimpleNamespace(state=state, query_length=new, has_new_token=not self._prompt(state))
            batch.append(scheduled)
        self.inputs_and_outputs.requests_in_batch = batch
        return bool(batch)

    def _generation_step(self) -> None:
        self._clock.ticks += STEP_TICKS
        if self._fails == "raises":
            raise RuntimeError("no kernel for this")

    def update_batch(self) -> None:
        for scheduled in self.inputs_and_outputs.requests_in_batch:
            state = scheduled.state
            if scheduled.has_new_token:
                state.left -= 1
                done = state.left == 0
                error = self._fails if self._fails != "raises" else None
                output = SimpleNamespace(request_id=state.id, error=error, is_finished=lambda done=done: done)
                self.output_router.output_queue.put(output)
                if done:
                    del self.scheduler.active_requests[state.id]

    def destroy(self) -> None:
        self.destroyed = True

    @staticmethod
    def _prompt(state: Any) -> bool:
        return bool(state.position_offset < len(state.initial_tokens))


def session(fails: str | None = None) -> tuple[Session, Manager, PretendedClock, list[int]]:
    clock = PretendedClock()
    manager, stepped = Manager(clock, fails), []
    stream = stream_of([0.0, 0.001, 0.5, 0.6], [12, 3, 9, 500], [2, 1, 1, 9])
    deployment = deployment_of(tiny(), EngineSize(4, 64, 256, 16), "transformers-fifo")
    its = Session(
        manager,
        deployment,
        stream,
        Prompts(stream, tiny().vocab_size),
        clock,
        seconds=clock.now,
        stepped=lambda: stepped.append(clock.ticks),
    )
    return its, manager, clock, stepped


def test_its_steps_and_tokens_are_noted_as_they_come() -> None:
    its, manager, clock, stepped = session()
    times, arrival = its.run()
    assert [one.batch for one in its.steps] == [
        StepWork(0, 0, ((0, 8),), 0),
        StepWork(0, 0, ((8, 4),), 1),
        StepWork(1, 13, (), 1, 13),
        StepWork(0, 0, ((0, 3),), 1),
        StepWork(0, 0, ((0, 8),), 0),
        StepWork(0, 0, ((8, 1),), 1),
    ]
    assert [one.seconds for one in its.steps] == pytest.approx([0.01] * 6)
    assert times.first_and_last()[:3] == [pytest.approx(both) for both in ((0.02, 0.03), (0.04, 0.04), (0.52, 0.52))]
    assert all(at != at for at in times.first_and_last()[3]), "no engine is asked for what it cannot hold"
    assert [at / TICKS_PER_SECOND for at in arrival] == pytest.approx([0.0, 0.001, 0.5, 0.6])
    assert its.queues[0] == (0.0, 1, 0)
    assert its.queues[1][0] == pytest.approx(0.01)
    assert its.queues[1][1:] == (1, 1), "the second came while the first was computed"
    assert its.queues[-1][1:] == (0, 0)
    assert len(stepped) == 6
    assert manager.destroyed
    assert clock.now() == pytest.approx(0.6), "it waited for the last request, which it did not take"


@pytest.mark.parametrize(("fails", "said"), [("raises", "no kernel for this"), ("out of blocks", "out of blocks")])
def test_where_it_gives_up_that_is_said_and_it_is_ended(fails: str, said: str) -> None:
    its, manager, _, _ = session(fails)
    with pytest.raises(EngineError, match=f"transformers gave up: {said}"):
        its.run()
    assert manager.destroyed
