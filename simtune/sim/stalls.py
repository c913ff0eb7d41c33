"""Check for runs that would never end: a request that loses its KV blocks again and again while nothing is delivered.

Requests whose prompts are computed without room for all of them (`scheduler_reserve_full_isl: false`) lose their blocks
and begin again, for as long as other requests keep theirs. That is what an engine does, and it ends when these are
done. If they never are, because the decode instance that they wait for never comes, steps go on for ever.

The check costs nothing while requests are seldom preempted: the recorder counts preemptions anyway, and calls it at
every `OFTEN`-th of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simtune.engine import Request
from simtune.errors import UsageError
from simtune.sim.agenda import ARRIVAL, CHANGE, LOADED, TRANSFER_END, TRANSFER_START, WAKE, Agenda
from simtune.sim.core import EngineCore

if TYPE_CHECKING:
    from simtune.sim.handover import Handover

_CHANGING = {TRANSFER_START, TRANSFER_END, CHANGE, ARRIVAL}
"""Phases of events after which a core may do something else than before."""
_LOADED = WAKE, LOADED
State = tuple[tuple[object, ...], ...]


class Stalls:
    """Check of one run, called at every `OFTEN`-th preemption of a request."""

    def __init__(self, agenda: Agenda, cores: Sequence[EngineCore], handover: Handover) -> None:
        self._agenda, self._cores, self._handover = agenda, cores, handover
        self._states: set[tuple[int, State]] = set()

    def check(self, request: Request) -> None:
        """Raise UsageError if the run is where it was before, and nothing is left that could change its course."""
        # Requests that decode deliver tokens, so they come to an end.
        decodes = any(core.step is not None and core.step.num_decodes for core in self._cores)
        if decodes or any(event[1] in _CHANGING or event[1::2] == _LOADED for event in self._agenda.heap):
            self._states.clear()
            return
        state = request.id, tuple(_state(core) for core in self._cores)
        if state in self._states:
            raise UsageError(self._message(request))
        self._states.add(state)

    def _message(self, request: Request) -> str:
        """Return the request that makes no progress, what it waits for, and the remedy."""
        core = next(core for core in self._cores if core.step is not None and request in core.step.preempted)
        place = f"instance {core.instance} of pool {core.pool}"
        begin = (
            f"the run would never end: {place} computes the prompt of request {request.id} again and again, and no "
            "request makes progress"
        )
        num_caches = len(self._handover.unroutable(core))
        if not num_caches:
            policy = type(core.scheduler).__name__
            return f"{begin}; policy {policy} preempts it each time: raise kv_cache.num_blocks, or change the policy"
        of_caches = "1 KV cache that waits" if num_caches == 1 else f"{num_caches} KV caches that wait"
        return (
            f"{begin}; the blocks that it needs hold {of_caches} for a decode instance, and none is up or about to "
            "come: let one come back in events (recover_s), or set batching.scheduler_reserve_full_isl to true"
        )


def _state(core: EngineCore) -> tuple[object, ...]:
    """Return what changes at a core while it makes progress: free blocks, requests, and where its prompts are."""
    scheduler, step = core.scheduler, core.step
    chunks = () if step is None else tuple((chunk.request.id, chunk.past) for chunk in step.chunks)
    return (
        scheduler.kv.free,
        scheduler.num_running,
        scheduler.num_waiting,
        core.holding,
        len(core.inbox.waiting),
        chunks,
    )
