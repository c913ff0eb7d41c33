"""Logs written in front of an engine, and collections of conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simtune.specs.trace_formats import clocks
from simtune.specs.trace_formats.log_rows import (
    LogReading,
    LogRequests,
    Problems,
    cached_note,
    estimated,
    first_of,
    first_value,
    left_out,
    look_up,
    sessions_of,
    tokens_of,
)

SHARED_BLOCK_TOKENS = 16
"""Tokens of a block of conversations: what turns share is counted in such blocks."""


_USAGE = ("usage", "response.usage", "response.body.usage")


class OpenAiLog:
    """JSON lines of an OpenAI-style gateway: a time, and `usage` with prompt and completion tokens."""

    title = "an OpenAI-style request log"
    _prompt = (*(f"{u}.{key}" for u in _USAGE for key in ("prompt_tokens", "input_tokens")), "prompt_tokens")
    _output = (
        *(f"{u}.{key}" for u in _USAGE for key in ("completion_tokens", "output_tokens")),
        "completion_tokens",
        "output_tokens",
    )
    _time = (*clocks.NAMES, "response.created", "response.created_at", "response.body.created")
    _cached = (
        *(f"{u}.{key}.cached_tokens" for u in _USAGE for key in ("prompt_tokens_details", "input_tokens_details")),
        "cached_tokens",
    )
    _session = ("session_id", "conversation_id", "thread_id", "chat_id", "metadata.session_id")

    def recognises(self, first: Any) -> bool:
        """True if it has tokens that were used and a time of day; times since a start are columns of a trace of
        simtune's own.
        """
        usage = any(isinstance(look_up(first, key), Mapping) for key in _USAGE)
        flat = first_of(first, self._prompt) is not None and first_of(first, self._output) is not None
        key = first_of(first, self._time)
        clock = key is not None and clocks.epoch_s(look_up(first, key)) is not None
        return usage or (flat and clock)

    def read(
        self, objects: Sequence[Any], lines: Sequence[int], reading: LogReading, problems: Problems
    ) -> LogRequests:
        """Read the requests that were answered, by their time; lines without usage had no answer."""
        good = [i for i, row in enumerate(objects) if first_of(row, self._output) is not None and not _failed(row)]
        if not good:
            problems.stop("no line has prompt and completion tokens", lines[0], "usage")
        rows, at = [objects[i] for i in good], [lines[i] for i in good]
        prompt, output = (first_of(rows[0], keys) or keys[0] for keys in (self._prompt, self._output))
        names = {"prompt": prompt, "output": output}
        values = {field: [look_up(row, key) for row in rows] for field, key in names.items()}
        notes = left_out(len(objects) - len(good), "lines without an answer")
        time = first_of(rows[0], self._time)
        if time is None:
            time_names = ", ".join(clocks.NAMES)
            notes.append(f"it has no times, so it is lengths only; a time may be called {time_names}")
        else:
            names["arrival"], values["arrival"] = time, _clock([look_up(row, time) for row in rows], at, time, problems)
        sessions = sessions_of(rows, self._session)
        if not sessions:
            notes += cached_note([first_value(row, self._cached) for row in rows], values["prompt"])
        return LogRequests(names, values | sessions, at, notes=notes)


def _failed(row: Any) -> bool:
    status = look_up(row, "status_code") or look_up(row, "response.status_code")
    return (isinstance(status, int) and status >= 400) or bool(look_up(row, "error"))


def _clock(values: Sequence[Any], lines: Sequence[int], key: str, problems: Problems) -> list[float]:
    """Seconds since 1970 of every row."""
    times = []
    for value, line in zip(values, lines, strict=True):
        at = clocks.epoch_s(value)
        if at is None:
            problems.stop(f"must be a time such as {clocks.FORMS}, not {value!r}", line, key)
        times.append(at or 0.0)
    return times


class ShareGpt:
    """Conversations in the format of ShareGPT: a list, or JSON lines, of `conversations` with texts by turn.

    Each answer is a request; its prompt is all text before it. There are no times. Requests are in the order of the
    file, so turns of one conversation follow one another.
    """

    title = "ShareGPT conversations"
    _asks = ("human", "user", "system")
    _answers = ("gpt", "assistant", "chatgpt", "bing", "bard")

    def recognises(self, first: Any) -> bool:
        """True if it has conversations."""
        talk = first[0] if isinstance(first, list) and first else first
        return isinstance(talk, Mapping) and isinstance(talk.get("conversations"), list)

    def read(
        self, objects: Sequence[Any], lines: Sequence[int], reading: LogReading, problems: Problems
    ) -> LogRequests:
        """Read the turns, their sessions, and the blocks that they share with the turns before."""
        listed = isinstance(objects[0], list)
        talks = objects[0] if listed else objects
        columns: dict[str, list[Any]] = {"prompt": [], "output": [], "session": [], "hash_ids": []}
        at, block = [], 0
        for number, talk in enumerate(talks):
            turns = self._turns(talk, reading)
            line = lines[0] if listed else lines[number]
            for prompt_tokens, answer in turns:
                columns["prompt"].append(prompt_tokens)
                columns["output"].append(answer)
                columns["session"].append(number)
                columns["hash_ids"].append(tuple(range(block, block + prompt_tokens // SHARED_BLOCK_TOKENS)))
                at.append(line)
            block += max((prompt_tokens // SHARED_BLOCK_TOKENS for prompt_tokens, _ in turns), default=0)
        if not at:
            problems.stop("no conversation has an answer", lines[0], "conversations")
        return LogRequests(
            {"prompt": "conversations", "output": "conversations"}, columns, at, notes=[estimated(reading)]
        )

    def _turns(self, talk: Any, reading: LogReading) -> list[tuple[int, int]]:
        """Return (prompt tokens with all before, output tokens) of every answer that has any text before it."""
        turns, prompt_tokens = [], 0
        for message in look_up(talk, "conversations") or ():
            who = look_up(message, "from") or look_up(message, "role")
            text = look_up(message, "value") or look_up(message, "content")
            length = tokens_of(text, reading) if isinstance(text, str) else 0
            if who in self._answers and prompt_tokens and length:
                turns.append((prompt_tokens, length))
            prompt_tokens += length
        return turns
