"""One request's state inside an engine instance, and what it may share with others there."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf

NO_LIMIT = 1 << 62
"""`max_tokens` of a client that sets no limit."""


class CachedRun:
    """The leading `size` KV blocks of what has this name, in a prefix cache: see `simtune.engine.prefix`."""

    __slots__ = ("holders", "name", "queued", "size", "twin")

    def __init__(self, name: Hashable, size: int, holders: int) -> None:
        self.name = name  # a Request for its private run, None once nobody can ask for it
        self.size = size
        self.holders = holders
        self.queued = 0  # its places in the queue; only the last one counts, and only while nobody holds it
        self.twin: CachedRun | None = None  # the next copy under this name, computed before the first could be found


@dataclass(slots=True, eq=False)
class Request:
    """A prompt to answer.

    While a request is a member of a `Batch`, its `computed`, `emitted`, `reserved_tokens` and `verifications` are those
    at the step it joined: the batch knows what became of its members since, and writes it down when they leave, so that
    a step costs the same for one resident as for a thousand.
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
    max_tokens: int = NO_LIMIT
    """The most output tokens that the client allows: engines that reserve room for output go by it."""
    deadline: float = inf
    """When its answer should be complete, by whatever clock the world keeps; only the order of deadlines counts."""
    blocks: tuple[Hashable, ...] = ()
    """Names of what its leading hash blocks (of the scheduler's `hash_block_tokens`) contain, the whole text before
    them included: equal names, equal keys and values. They may go on into the answer, where a later prompt repeats it.
    Tokens beyond the named blocks are shared with nobody."""
    hold: bool = False
    """Whether its KV blocks stay taken when it is finished, until `Scheduler.release`."""
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    emitted: int = 0
    """Output tokens delivered so far."""
    preemptions: int = 0
    decoding: bool = False
    """Whether it is resident and all its known tokens but the newest are in the cache: a step takes it further."""
    admission: int = 0
    """Its number in the order in which requests began to decode, given by the batch."""
    seat: int = 0
    """Its number in the order in which requests became residents, given by schedulers that go by it."""
    reserved_tokens: int = 0
    """Tokens it holds KV blocks for, where that is more than `computed`: room for drafts, or for tokens to come."""
    verifications: int = 0
    """How many times drafts of it were verified: the number of its next verification."""
    runs: list[CachedRun] | None = None
    """What it holds of the prefix cache, in order of its prompt."""
    shared: int = 0
    """KV blocks it holds that are part of `runs`."""

    @property
    def known_tokens(self) -> int:
        """Prompt plus delivered output: what a (re)computation has to cover."""
        return self.prompt_tokens + self.emitted
