"""One request's state inside an engine instance."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Request:
    """A prompt to answer.

    While a request decodes, `computed` and `emitted` are those at the step it joined the batch: the batch ages all its
    members with one counter (see `DecodeBatch`), so that a step costs the same for one resident as for a thousand.
    """

    id: int
    prompt_tokens: int
    output_tokens: int
    """How many tokens it will emit. Known to the world (and to a trace), never to a policy."""
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    emitted: int = 0
    """Output tokens delivered so far."""
    preemptions: int = 0
    joined: int = -1
    """The batch's step counter when this request began to decode; -1 while it does not."""
    joins: int = 0
    """The batch's join number of its latest joining: tells a present member from an old entry of the same request."""

    @property
    def known_tokens(self) -> int:
        """Prompt plus delivered output: what a (re)computation has to cover."""
        return self.prompt_tokens + self.emitted
