"""OpenTelemetry spans of calls to a model (GenAI semantic conventions), in OTLP's JSON, one object or one on each line.

A call is a span with counts of input and output tokens; a span that contains other calls counts them again, and is left
out. The calls of a conversation (`gen_ai.conversation.id`, else of a trace) are a session: each waits for the last ones
that had ended when it was sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simtune.specs.text_blocks import leading
from simtune.specs.trace_formats.log_rows import LogReading, LogRequests, Problems, left_out
from simtune.specs.trace_formats.logs import SHARED_BLOCK_TOKENS
from simtune.specs.trace_formats.session_rows import (
    RecordedSession,
    RecordedTurn,
    in_sessions,
    session_log,
    whole_tokens,
)

_INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.usage.prompt_tokens",
          "llm.token_count.prompt")  # fmt: skip
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.usage.completion_tokens",
           "llm.token_count.completion")  # fmt: skip
_CONVERSATION = ("gen_ai.conversation.id", "session.id")
_NS = 1e9


@dataclass(slots=True)
class _Span:
    """A call to a model."""

    line: int
    span: Any
    parent: Any
    session: Any
    begin_ns: int
    end_ns: int
    prompt: Any
    output: Any


class OtelSpans:
    """OTLP's `resourceSpans`."""

    title = "OpenTelemetry spans (GenAI)"

    def recognises(self, first: Any) -> bool:
        """True if it has spans by resource."""
        return isinstance(first, Mapping) and isinstance(first.get("resourceSpans"), list)

    def read(
        self, objects: Sequence[Any], lines: Sequence[int], reading: LogReading, problems: Problems
    ) -> LogRequests:
        """Read the calls of all spans, session by session."""
        parents: dict[Any, Any] = {}
        calls: list[_Span] = []
        num_other = 0
        for row, line in zip(objects, lines, strict=True):
            for span in _spans(row, line, problems):
                parents[span.get("spanId")] = span.get("parentSpanId")
                call = _call(span, line, problems)
                if call is None:
                    num_other += 1
                else:
                    calls.append(call)
        containing = _ancestors([call.parent for call in calls], parents)
        leaf_calls = [call for call in calls if call.span not in containing]
        if not leaf_calls:
            problems.stop(f"no span has counts of tokens ({_INPUT[0]} and {_OUTPUT[0]})", lines[0], "resourceSpans")
        by_session: dict[Any, list[_Span]] = {}
        for call in sorted(leaf_calls, key=lambda call: (call.begin_ns, call.end_ns)):
            by_session.setdefault(call.session, []).append(call)
        free_name, sessions = 0, []
        for of_session in by_session.values():
            session, free_name = _session(of_session, free_name)
            sessions.append(session)
        notes = [
            in_sessions(len(leaf_calls), len(sessions)),
            "spans hold no texts: a prompt is taken to go on from the same agent's call before it, if it is as long",
            *left_out(num_other, "spans that are no calls to a model"),
            *left_out(len(calls) - len(leaf_calls), "spans that contain counted calls"),
        ]
        names = {"prompt": _INPUT[0], "output": _OUTPUT[0], "arrival": "startTimeUnixNano"}
        return session_log(sessions, names, block_tokens=SHARED_BLOCK_TOKENS, per_s=_NS, notes=notes)


def _spans(row: Any, line: int, problems: Problems) -> Iterator[Mapping[str, Any]]:
    """Yield all spans of an object."""
    resources = row.get("resourceSpans") if isinstance(row, Mapping) else None
    if not isinstance(resources, list):
        problems.stop("must be an object with resourceSpans", line)
    for resource in resources or ():
        scopes = resource.get("scopeSpans") if isinstance(resource, Mapping) else None
        for scope in scopes if isinstance(scopes, list) else ():
            spans = scope.get("spans") if isinstance(scope, Mapping) else None
            yield from (span for span in (spans if isinstance(spans, list) else ()) if isinstance(span, Mapping))


def _call(span: Mapping[str, Any], line: int, problems: Problems) -> _Span | None:
    """Return the call of a span; None if it has no counts of tokens."""
    attributes = _attributes(span)
    prompt, output = (next((attributes[k] for k in keys if k in attributes), None) for keys in (_INPUT, _OUTPUT))
    if prompt is None or output is None:
        return None
    begin_ns, end_ns = (
        _nanoseconds(span.get(key), line, key, problems) for key in ("startTimeUnixNano", "endTimeUnixNano")
    )
    if end_ns < begin_ns:
        problems.stop("is before startTimeUnixNano", line, "endTimeUnixNano")
    conversation = next((attributes[k] for k in _CONVERSATION if k in attributes), None)
    session = ("trace", span.get("traceId")) if conversation is None else ("conversation", conversation)
    return _Span(line, span.get("spanId"), span.get("parentSpanId"), session, begin_ns, end_ns, prompt, output)


def _attributes(span: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a span that are numbers or texts; OTLP's JSON writes whole numbers as texts."""
    values: dict[str, Any] = {}
    attributes = span.get("attributes")
    for entry in attributes if isinstance(attributes, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("value"), Mapping) and isinstance(entry.get("key"), str):
            kind, value = next(iter(entry["value"].items()), ("", None))
            if kind == "intValue" and isinstance(value, str) and value.lstrip("-").isdecimal() and len(value) < 19:
                value = int(value)
            if kind in ("intValue", "stringValue", "doubleValue"):
                values[entry["key"]] = value
    return values


def _nanoseconds(value: Any, line: int, key: str, problems: Problems) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if type(value) is not int or not 0 <= value < 2**63:
        problems.stop(f"must be nanoseconds since 1970, not {value!r}", line, key)
    return int(value)


def _ancestors(spans: Sequence[Any], parents: Mapping[Any, Any]) -> set[Any]:
    """Return the spans and all that contain them."""
    visited: set[Any] = set()
    for span in spans:
        while span and span not in visited:
            visited.add(span)
            span = parents.get(span)
    return visited


def _session(calls: Sequence[_Span], free_name: int) -> tuple[RecordedSession, int]:
    """Return a session of calls by their begin, with names of blocks from `free_name` on, and the next name."""
    turns: list[RecordedTurn] = []
    texts: list[tuple[range, ...]] = []
    last_of_agent: dict[Any, int] = {}
    for number, call in enumerate(calls):
        after = _waits_for(calls, number)
        ended_ns = max((calls[x].end_ns for x in after), default=calls[0].begin_ns)
        before = last_of_agent.get(call.parent, -1)
        blocks = (whole_tokens(call.prompt) + whole_tokens(call.output)) // SHARED_BLOCK_TOKENS
        lead: tuple[range, ...] = ()
        if before in after and whole_tokens(call.prompt) >= whole_tokens(calls[before].prompt):
            lead = leading(texts[before], min(turns[before].blocks, whole_tokens(call.prompt) // SHARED_BLOCK_TOKENS))
        num_own = blocks - sum(map(len, lead))
        texts.append((*lead, range(free_name, free_name + num_own)))
        free_name += num_own
        pause_s = (call.begin_ns - ended_ns) / _NS
        turns.append(RecordedTurn(call.line, call.prompt, call.output, after, pause_s, number, blocks))
        last_of_agent[call.parent] = number
    return RecordedSession(turns, calls[0].begin_ns, texts), free_name


def _waits_for(calls: Sequence[_Span], number: int) -> tuple[int, ...]:
    """Return the calls that had ended when a call was sent, without those that ended before another of them was."""
    over = [x for x in range(number) if calls[x].end_ns <= calls[number].begin_ns]
    latest_ns = max((calls[x].begin_ns for x in over), default=0)
    return tuple(x for x in over if calls[x].end_ns > latest_ns or calls[x].begin_ns == latest_ns)
