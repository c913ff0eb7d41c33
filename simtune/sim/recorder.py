"""Recorder of the events of a simulation, in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from simtune.engine import Chunk, Request
from simtune.results.outcome import EngineCoreUse, Outcome, RankTurn, Ticks
from simtune.results.recorded_steps import RecordedSteps
from simtune.sim.step_timing import JumpTime

COLUMNS = (
    "arrival",
    "routed",
    "scheduled",
    "first_token",
    "finish",
    "core",
    "preemptions",
    "waiting_at_arrival",
    "transferred",
    "prefilled",
    "family_begin",
    "family_end",
    "resent",
)
"""Columns of an outcome by request or family; the source of requests has the first, the recorder all others."""
MOST_ROWS = 1 << 10
"""Most rows of intervals that are kept as tuples."""
OFTEN = 1 << 10
"""Preemptions of a request after each of which the run is checked for progress."""


class Recorder:
    """Columns by request number, times between tokens, and counts: an `Outcome` in the making."""

    def __init__(self, requests: int, record: bool = False) -> None:
        """Create empty columns for `requests` requests; `record` keeps every jump, for timelines."""
        self.scheduled, self.first_token, self.finish = (empty_column(requests, -1) for _ in range(3))
        self.core, self.transferred, self.prefilled = (empty_column(requests, -1) for _ in range(3))
        self.routed = empty_column(requests, -1)
        self.preemptions, self.waiting_at_arrival, self.resent = (empty_column(requests, 0) for _ in range(3))
        self.family_begin, self.family_end = empty_column(0, -1), empty_column(0, -1)
        """Tick at which each family of a request graph arrived, and tick at which its last node was over."""
        self.waiting = 0
        """Requests waiting in the whole deployment now."""
        self.refused = 0
        self.rejected: array[int] | None = None
        """Requests that servers rejected; None if none may."""
        self.steps = 0
        self.transferred_bytes = 0
        self.jumps = RecordedSteps() if record else None
        self.often_preempted: Callable[[Request], None] = unchecked
        """Called at every `OFTEN`-th preemption of a request."""
        self.rows: list[tuple[int, int, int, int]] = []
        """Intervals that are not packed yet: (first, slope, steps, decodes)."""
        self.rank_turns: list[RankTurn] = []
        self._intervals = array("q")
        self._listed_ends, self._listed_jumps = array("q"), array("q")

    def note_listed(self, ends: Sequence[int], decodes: int) -> None:
        """Record the intervals of a jump whose steps end `ends` ticks after its start."""
        # Flat arrays: a run has millions of jumps, and a tuple for each would take most of its memory.
        self._listed_ends.extend(ends)
        self._listed_jumps.append(len(ends))
        self._listed_jumps.append(decodes)

    def note_intervals(self, time: JumpTime, decodes: int) -> None:
        """Record the times between tokens of a jump in which `decodes` requests decode."""
        if not decodes:
            return
        if time.ends is not None:
            self.note_listed(time.ends[: time.repetitions], decodes)
        else:
            self.rows.append((time.first, time.slope, time.repetitions, decodes))

    def note_gap(self, ticks: int, requests: int) -> None:
        """Record the time between two tokens of each of some requests."""
        if requests:
            self.rows.append((ticks, 0, 1, requests))

    def note_rest(self, time: JumpTime, decodes: int) -> None:
        """Record the times between tokens of a jump without its first repetition."""
        if time.ends is not None:
            self.note_listed([end - time.ends[0] for end in time.ends[1 : time.repetitions]], decodes)
        else:
            self.rows.append((time.first + time.slope, time.slope, time.repetitions - 1, decodes))

    def note_preempted(self, requests: Iterable[Request]) -> None:
        """Count a preemption of each of the requests."""
        for request in requests:
            self.preemptions[request.id] += 1
            if self.preemptions[request.id] % OFTEN == 0:
                self.often_preempted(request)

    def note_chunks(self, now: int, of_step: Iterable[Chunk]) -> tuple[list[tuple[int, int]], int, int]:
        """Record the requests whose first chunk begins now.

        Return (past tokens, new tokens) of each chunk, the number of prompts that are complete with it, and the new
        tokens of all chunks.
        """
        scheduled, chunks, completing, total = self.scheduled, [], 0, 0
        for chunk in of_step:
            request, past, tokens = chunk.request, chunk.past, chunk.tokens
            chunks.append((past, tokens))
            total += tokens
            completing += past + tokens - chunk.padding == request.prompt_tokens + request.emitted  # it `completes`
            if scheduled[request.id] < 0:
                scheduled[request.id] = now
        return chunks, completing, total

    def pack(self) -> None:
        """Move the latest intervals to compact storage; to be called when there are MOST_ROWS."""
        self._intervals.fromlist([*chain.from_iterable(self.rows)])
        self.rows.clear()

    def refuse(self, number: int) -> None:
        """Record that no instance accepts this request."""
        self.refused += 1

    def reject(self, number: int) -> None:
        """Record that the server of an instance rejects this request."""
        assert self.rejected is not None
        self.rejected.append(number)

    def outcome(
        self,
        arrival: array[int],
        *,
        aborted: bool,
        events: int,
        cores: list[EngineCoreUse],
        stopped: Mapping[int, int] | None = None,
    ) -> Outcome:
        """Return the record of the run as an Outcome."""
        self.pack()
        return Outcome(
            **self._columns(arrival),
            refused=self.refused,
            rejected=None if self.rejected is None else _array(self.rejected),
            stopped=dict(stopped or {}),
            aborted=aborted,
            events=events,
            steps=self.steps,
            transferred_bytes=self.transferred_bytes,
            cores=cores,
            intervals=self._steps_between_tokens(),
            records=RecordedSteps() if self.jumps is None else self.jumps,
            rank_turns=tuple(self.rank_turns),
        )

    def _columns(self, arrival: array[int]) -> dict[str, Any]:
        """Return the columns of requests by name."""
        return {"arrival": _array(arrival)} | {name: _array(getattr(self, name)) for name in COLUMNS[1:]}

    def _steps_between_tokens(self) -> Ticks:
        """Return the rows of `Outcome.intervals`."""
        return np.concatenate([_array(self._intervals).reshape(-1, 4), self._listed_intervals()])

    def _listed_intervals(self) -> Ticks:
        """Return the intervals of jumps whose ends are listed, a row for each step."""
        ends, (steps, decodes) = _array(self._listed_ends), _array(self._listed_jumps).reshape(-1, 2).T
        rows = np.ones((len(ends), 4), dtype=np.int64)
        rows[:, 0] = np.diff(ends, prepend=0)
        begins = (steps.cumsum() - steps)[steps > 0]
        rows[begins, 0] = ends[begins]
        # A row for each step, as steps of such a jump follow no progression.
        rows[:, 1], rows[:, 3] = 0, np.repeat(decodes, steps)
        return rows


def unchecked(request: Request) -> None:
    """Check nothing: a `Recorder` outside a run."""


def empty_column(n: int, value: int) -> array[int]:
    """Return a column of `n` rows that all have one value."""
    return array("q", [value]) * n


def _array(values: array[int]) -> Ticks:
    return np.frombuffer(values, dtype=np.int64).copy() if len(values) else np.zeros(0, dtype=np.int64)
