"""Agenda of a simulation: the order of events, also of those at the same instant.

Time is an integer number of ticks (2**-40 s). At one instant the order is fixed, and it is the order of a real engine's
loop:

1. steps end (in order of cores), requests finish or are handed over, closed-loop users begin to think;
2. transfers begin (in order of requests) and end (in order of links);
3. instances start, fail, recover and change roles (as listed in the plan), then a controller looks at the queues;
4. requests arrive, in order of their number, and are routed;
5. idle cores schedule their next step (in order of cores), seeing all of the above.

The agenda is a plain heap of (tick, phase, subject, version), so that the order above is the key itself. The same
events on simpy take about seven times as long: benchmarks/sim/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from heapq import heappop, heappush

STEP_END, TRANSFER_START, TRANSFER_END, CHANGE, LOOK, DRAINED, ARRIVAL, WAKE = range(8)
"""Phases of an instant, in the order in which they are handled. A core is found to be drained only when it has nothing
to schedule, so nothing else of that instant is left but other cores to wake."""
LOADED = 1
"""Version of an event of phase WAKE: blocks for a request have come, and the core may be in a step."""

AgendaEntry = tuple[int, int, int, int]
"""(tick, phase, number of the subject, version); the subject ignores the event if its version has changed since."""

Handler = Callable[[int, int, int], None]
"""Function that handles an event: called with its tick, subject and version."""


NEVER: AgendaEntry = (1 << 63, 0, 0, 0)
"""Event that comes after every other event."""
STOP: AgendaEntry = (-1, 0, 0, 0)
"""Event that comes before every other event and ends the run."""


class Agenda:
    """The events to come, whatever their meaning."""

    __slots__ = ("handled", "heap", "held", "post", "stopped")

    def __init__(self) -> None:
        self.heap: list[AgendaEntry] = [NEVER]
        """Heap of events, next one first, except the one in `held`. Never empty while events are handled."""
        self.post: Callable[[AgendaEntry], None] = partial(heappush, self.heap)
        """Add an event, at this instant or later."""
        self.held: AgendaEntry | None = None
        """Event kept outside the heap: it is most likely the next one, and cheap to replace."""
        self.handled = 0
        """Number of events so far, including those that a core ran ahead to."""
        self.stopped = False

    def hold(self, event: AgendaEntry | None) -> None:
        """Add an event that is most likely the next one; None only moves the held event to the heap."""
        if self.held is not None:
            self.post(self.held)
        self.held = event

    def replace(self, event: AgendaEntry) -> None:
        """Add an event in place of one with the same phase and subject, which has become void."""
        previous = self.held
        if previous is not None and previous[1] == event[1] and previous[2] == event[2]:
            self.held = event
        else:
            self.post(event)

    def has_more_at(self, now: int) -> bool:
        """True if something else happens at this instant."""
        return self.heap[0][0] == now or (self.held is not None and self.held[0] == now)

    def run(self, handlers: Mapping[int, Handler]) -> None:
        """Handle all events in order, each by the handler of its phase, until none is left or `stop` is called."""
        heap = self.heap
        while not self.stopped:
            event = self.held
            if event is not None and event < heap[0]:
                self.held = None
            elif heap[0] is NEVER:
                break
            else:
                event = heappop(heap)
            self.handled += 1
            tick, phase, subject, version = event
            handlers[phase](tick, subject, version)

    def stop(self) -> None:
        """Let the current event be the last."""
        self.stopped = True
        self.post(STOP)
