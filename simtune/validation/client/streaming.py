"""A streamed completion as it arrives: server-sent events of an OpenAI-compatible server, counted and stamped."""

from __future__ import annotations

import json
from typing import Any

MAX_QUOTED = 200
"""Characters of a server's text that an error repeats."""
MAX_LINE = 1024 * 1024
"""Longest line of a stream, in bytes."""


class Answer:
    """Tokens of one response so far. A message that carries tokens is stamped with the time at which it was read."""

    def __init__(self, wanted: int) -> None:
        """`wanted` is the number of tokens that was requested."""
        self.wanted = wanted
        self.tokens = 0
        self.times_s: list[float] = []
        self.problem: str | None = None
        """Problem with the messages received; None if there is none."""
        self._rest = bytearray()
        self._over = False

    def feed(self, data: bytes, at_s: float) -> None:
        """Parse bytes that were read at a time; messages may arrive in pieces and several at once."""
        self._rest += data
        if b"\n" in data:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and self.problem is None:
                    self._message(bytes(line[5:]).strip(), at_s)
        if len(self._rest) > MAX_LINE and self.problem is None:
            self.problem = f"sent a line of more than {MAX_LINE:,} bytes, {self.so_far}"

    def end(self) -> str | None:
        """End the stream. Return why the response is incomplete, or None."""
        if self.problem is not None:
            return self.problem
        if self._rest.strip() and not self._over:
            return f"the stream ended within a line, {self.so_far}"
        if self.tokens != self.wanted:
            return f"{self.tokens} tokens came, not {self.wanted}"
        return None

    @property
    def so_far(self) -> str:
        """Progress in words."""
        return f"after {self.tokens} of {self.wanted} tokens"

    def _message(self, text: bytes, at_s: float) -> None:
        if text == b"[DONE]":
            self._over = True
            return
        try:
            message = json.loads(text)
            self._count(message, at_s)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            self.problem = f"sent what is no completion, {self.so_far}: {quoted(text)}"

    def _count(self, message: dict[str, Any], at_s: float) -> None:
        """Count tokens: by the server's usage if every message contains it, otherwise one for each text; the last usage
        is the final number."""
        if (error := message.get("error")) is not None:
            words = error.get("message", error) if isinstance(error, dict) else error
            self.problem = f"reported {self.so_far}: {quoted(str(words).encode())}"
            return
        choices, usage = message["choices"], message.get("usage")
        if usage is not None:
            tokens = usage["completion_tokens"]
            if type(tokens) is not int or not 0 <= tokens <= self.wanted:
                self.problem = f"counts {quoted(str(tokens).encode())} tokens, {self.so_far}"
                return
        else:
            tokens = self.tokens + int(bool(choices and (choices[0].get("text") or choices[0].get("token_ids"))))
        if choices and tokens > self.tokens:
            self.times_s.append(at_s)
        self.tokens = tokens


def quoted(text: bytes) -> str:
    """Return the beginning of a server's text, on one line."""
    words = " ".join(text[: 4 * MAX_QUOTED].decode("utf-8", "replace").split())
    return words if len(words) <= MAX_QUOTED else words[:MAX_QUOTED] + " ..."
