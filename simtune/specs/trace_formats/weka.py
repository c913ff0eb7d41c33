"""Agent traces of WEKA's kv-cache-tester, as AgentX publishes them: one JSON object for each session.

`requests` are calls (`type` n or s) with `t` in seconds, `in` and `out` tokens and `hash_ids` of the whole prompt, and
sub-agents (`type` subagent) with calls of their own, which the next call of the session waits for. `api_time` is what
the recorded server took, `think_time` the pause before a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simtune.specs.trace_formats.log_rows import LogReading, LogRequests, Problems
from simtune.specs.trace_formats.session_rows import (
    RecordedSession,
    RecordedTurn,
    in_sessions,
    session_log,
    whole_tokens,
)

_CALLS = ("n", "s")
_LARGEST_ID = 2**53
_LONGEST_S = 2.0**22


class Weka:
    """Agent traces with `requests`, `block_size` and `hash_id_scope`."""

    title = "WEKA agent traces (AgentX)"

    def recognises(self, first: Any) -> bool:
        """True if it is a session with requests and a block size."""
        return isinstance(first, Mapping) and {"requests", "block_size", "hash_id_scope"} <= first.keys()

    def read(
        self, objects: Sequence[Any], lines: Sequence[int], reading: LogReading, problems: Problems
    ) -> LogRequests:
        """Read all sessions. Sessions have no times of their own."""
        state = _SessionReading(problems)
        sessions = [state.session(row, line) for row, line in zip(objects, lines, strict=True)]
        count = sum(len(session.turns) for session in sessions)
        notes = [in_sessions(count, len(sessions)), *state.notes()]
        names = {"prompt": "in", "output": "out"}
        return session_log(sessions, names, block_tokens=state.block_size or 1, notes=notes)


@dataclass(slots=True)
class _Call:
    """A call, with the number of its turn."""

    turn: int
    begin_s: float
    end_s: float


@dataclass(slots=True)
class _SessionReading:
    """State of the reading of one file."""

    problems: Problems
    block_size: int = 0
    above: int = 0
    """A number above all names so far."""
    without_end: int = 0
    unjoined: int = 0
    turns: list[RecordedTurn] = field(default_factory=list)
    ids: list[tuple[int, ...]] = field(default_factory=list)
    follows: list[int] = field(default_factory=list)
    """Turn of the same agent before each turn; -1 for none."""

    def session(self, row: Any, line: int) -> RecordedSession:
        """Read one session."""
        if not self_is_session(row):
            self.problems.stop("must be a session with requests, block_size and hash_id_scope", line)
        size = row["block_size"]
        if type(size) is not int or not 1 <= size <= 2**20:
            self.problems.stop(f"must be a whole number of tokens, not {size!r}", line, "block_size")
        if self.block_size not in (0, size):
            self.problems.stop(
                f"must be that of the sessions before ({self.block_size}), not {size}", line, "block_size"
            )
        self.block_size = size
        if row["hash_id_scope"] not in ("local", "global"):
            self.problems.stop(f"must be local or global, not {row['hash_id_scope']!r}", line, "hash_id_scope")
        self.turns, self.ids, self.follows = [], [], []
        self._calls(row["requests"], line)
        if not self.turns:
            self.problems.stop("has no call: the session is empty", line, "requests")
        base = self.above if row["hash_id_scope"] == "local" else 0
        texts = [tuple(range(base + x, base + x + 1) for x in ids) for ids in self._texts()]
        self.above = max(self.above, *(names.stop for text in texts for names in text), 0)
        for turn, text in enumerate(texts):
            self.turns[turn].text, self.turns[turn].blocks = turn, len(text)
        return RecordedSession(self.turns, None, texts)

    def notes(self) -> list[str]:
        """Return what was assumed."""
        notes = []
        if self.without_end:
            notes.append(
                f"{self.without_end:,} calls have neither think_time nor the api_time of the call before: their pauses "
                "contain the recorded answers"
            )
        if self.unjoined:
            notes.append(f"{self.unjoined:,} sub-agents were launched without being waited for")
        return notes

    def _calls(self, requests: Any, line: int) -> None:
        """Read the calls of a session, and the sub-agents between them."""
        if not isinstance(requests, list):
            self.problems.stop("must be a list of calls", line, "requests")
        before: _Call | None = None
        waits_for: list[_Call] = []
        for entry in requests:
            kind = entry.get("type") if isinstance(entry, Mapping) else None
            if kind in _CALLS:
                before = self._call(entry, line, waits_for, before)
                waits_for = [before]
            elif kind == "subagent":
                last = self._agent(entry, line, before)
                if entry.get("status") == "async_launched":
                    self.unjoined += 1
                elif last is not None:
                    waits_for = [*waits_for, last]
            else:
                self.problems.stop(f"type must be n, s or subagent, not {kind!r}", line, "requests")

    def _agent(self, entry: Mapping[str, Any], line: int, parent: _Call | None) -> _Call | None:
        """Read the calls of a sub-agent, each after the one before, and return the last one."""
        calls = entry.get("requests")
        if not isinstance(calls, list):
            self.problems.stop("a sub-agent must have a list of calls", line, "requests")
            return None
        spawned_s = _seconds(entry.get("t"), line, "t", self.problems)
        before = last = None
        for call in calls:
            if not isinstance(call, Mapping) or call.get("type") not in _CALLS:
                self.problems.stop("calls of a sub-agent must be of type n or s", line, "requests")
            waits_for = [x for x in (before or parent,) if x is not None]
            last = self._call(call, line, waits_for, before, spawned_s=None if before else spawned_s)
            before = last
        return last

    def _call(
        self,
        call: Mapping[str, Any],
        line: int,
        waits_for: Sequence[_Call],
        before: _Call | None,
        spawned_s: float | None = None,
    ) -> _Call:
        """Add a call that waits for others; `before` is the call of the same agent before it."""
        recorded_s = _seconds(call.get("t"), line, "t", self.problems)
        begin_s = recorded_s if spawned_s is None else spawned_s
        api_s = call.get("api_time")
        end_s = recorded_s + (0.0 if api_s is None else _seconds(api_s, line, "api_time", self.problems))
        think_s = call.get("think_time")
        alone = len(waits_for) == 1 and waits_for[0] is before
        if alone and think_s is not None:
            pause_s = _seconds(think_s, line, "think_time", self.problems)
        else:
            ended_s = max((x.end_s for x in waits_for), default=begin_s)
            self.without_end += any(x.end_s == x.begin_s for x in waits_for)
            pause_s = max(0.0, begin_s - ended_s)
        ids = self._ids(call, line)
        for key in ("in", "out"):
            if key not in call:
                self.problems.stop("is missing in a call", line, key)
        after = tuple(x.turn for x in waits_for)
        self.turns.append(RecordedTurn(line, call["in"], call["out"], after, pause_s))
        self.ids.append(ids)
        self.follows.append(-1 if before is None else before.turn)
        return _Call(len(self.turns) - 1, recorded_s, end_s)

    def _ids(self, call: Mapping[str, Any], line: int) -> tuple[int, ...]:
        """Return the ids of the blocks of a call's prompt."""
        ids = call.get("hash_ids", [])
        if not isinstance(ids, list) or any(type(x) is not int or not 0 <= x <= _LARGEST_ID for x in ids):
            self.problems.stop(f"must be a list of whole numbers from 0 to {_LARGEST_ID}", line, "hash_ids")
        return tuple(ids)

    def _texts(self) -> list[tuple[int, ...]]:
        """Return the ids of each call's prompt, and of its answer if a later call of the agent goes on from it."""
        texts = list(self.ids)
        for turn, before in enumerate(self.follows):
            if before < 0:
                continue
            call = self.turns[before]
            prompt, output = whole_tokens(call.prompt), whole_tokens(call.output)
            filled = prompt // self.block_size
            if self.ids[turn][:filled] == self.ids[before][:filled]:
                texts[before] = self.ids[turn][: (prompt + output) // self.block_size]
        return texts


def self_is_session(row: Any) -> bool:
    """True if an object has the keys of a session."""
    return Weka().recognises(row)


def _seconds(value: Any, line: int, key: str, problems: Problems) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_S:
        problems.stop(f"must be a number of seconds from 0 to {_LONGEST_S:.0f}, not {value!r}", line, key)
    return float(value)
