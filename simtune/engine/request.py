"""One request's state inside an engine instance."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simtune.engine.prefix import CachedRun


@dataclass(slots=True, eq=False)
class Request:
    """A prompt to answer.

    While a request decodes, `computed` and `emitted` are those at the step it joined the batch: the batch ages all its
    members with one counter (see `DecodeBatch`), so that a step costs the same for one resident as for a thousand.
    """

    id: int
    """Requests are numbered in order of arrival: of two with equal priority the smaller number goes first."""
    prompt_tokens: int
    output_tokens: int
    """How many tokens it will emit. Known to the world (and to a trace), never to a policy."""
    priority: int = 0
    """Smaller is sooner, for policies that look at it."""
    predicted_tokens: int = 0
    """How many tokens the world says it will emit, for policies that go by it: as far off as the world makes it."""
    deadline: float = inf
    """When its answer should be complete, by whatever clock the world keeps; only the order of deadlines counts."""
    blocks: tuple[Hashable, ...] = ()
    """Names of what its leading hash blocks (of the scheduler's `hash_block_tokens`) contain, the whole text before
    them included: equal names, equal keys and values. Tokens beyond the named blocks are shared with nobody."""
    hold: bool = False
    """Whether its KV blocks stay taken when it is finished, until `Scheduler.release`."""
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    emitted: int = 0
    """Output tokens delivered so far."""
    preemptions: int = 0
    joined: int = -1
    """The batch's step counter when this request began to decode; -1 while it does not."""
    joins: int = 0
    """The batch's join number of its latest joining: tells a present member from an old entry of the same request."""
    slots: int = 0
    """Tokens it holds KV blocks for, where that is more than `computed`: room taken for drafts."""
    rounds: int = 0
    """Verifications so far, for those who say how many drafts are accepted."""
    settled: int = -1
    """Tokens it had computed before its latest step as a member of the batch; -1 where there was none since it joined.
    Up to date when it has left."""
    runs: list[CachedRun] | None = None
    """What it holds of the prefix cache, in order of its prompt."""
    shared: int = 0
    """KV blocks it holds that are part of `runs`."""

    @property
    def known_tokens(self) -> int:
        """Prompt plus delivered output: what a (re)computation has to cover."""
        return self.prompt_tokens + self.emitted
