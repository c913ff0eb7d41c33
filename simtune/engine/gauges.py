"""Gauges of a scheduler, as engines report them: requests and tokens that wait or run."""

from __future__ import annotations

from collections.abc import Iterator

from simtune.engine.batched import BatchScheduler
from simtune.engine.policies.listed import ListScheduler
from simtune.engine.request import Request
from simtune.engine.scheduler import Scheduler


def queued(scheduler: Scheduler) -> Iterator[Request]:
    """Yield the requests that wait, those that the engine does not see yet last."""
    yield from scheduler.waiting
    for _, request in scheduler._late:
        yield request


def num_decoding(scheduler: Scheduler) -> int:
    """Return the requests that decode, if `running_tokens` is known."""
    if isinstance(scheduler, ListScheduler):
        return sum(request.decoding for request in scheduler.residents)
    assert isinstance(scheduler, BatchScheduler)
    return scheduler.decoding.count


def running_tokens(scheduler: Scheduler) -> int:
    """Return the computed tokens of running requests after the last complete step; -1 if the scheduler does not keep
    them current: a policy of other base classes, or one with drafts."""
    if scheduler.drafting:
        return -1
    if isinstance(scheduler, ListScheduler):
        return sum(request.computed for request in scheduler.residents)
    if isinstance(scheduler, BatchScheduler):
        return scheduler.decoding.totals()[1] + sum(request.computed for request in scheduler.prefilling)
    return -1
