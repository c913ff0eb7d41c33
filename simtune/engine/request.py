"""State of one request inside an engine instance, and what it may share with others there."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf

from simtune.engine.media import MediaItem

NO_LIMIT = 1 << 62
"""`max_tokens` of a client that sets no limit."""
NO_ADAPTER = -1
"""`adapter` of a request for the base model."""


class CachedRun:
    """Leading `size` KV blocks of the content with this name, in a prefix cache: see `simtune.engine.prefix`."""

    __slots__ = ("holders", "name", "queued", "size", "twin")

    def __init__(self, name: Hashable, size: int, holders: int) -> None:
        self.name = name  # a Request for its private run, None once no request can look it up
        self.size = size
        self.holders = holders
        self.queued = 0  # entries in the queue; only the last one counts, and only while holders is 0
        self.twin: CachedRun | None = None  # the next copy under this name, computed before the first could be found


@dataclass(slots=True, eq=False)
class Request:
    """Prompt to answer, and its progress.

    While a request is a member of a `Batch`, its `computed`, `emitted`, `reserved_tokens` and `verifications` are those
    at the step it joined: the batch knows what became of its members since, and writes it down when they leave, so that
    a step costs the same for one resident as for a thousand.
    """

    id: int
    """Number of the request in order of arrival: of two with equal priority the smaller number goes first."""
    prompt_tokens: int
    output_tokens: int
    """Number of tokens it will emit. Known to the simulation (and to a trace), never to a policy."""
    priority: int = 0
    """Smaller is sooner, for policies that look at it."""
    predicted_tokens: int = 0
    """Predicted number of output tokens, for policies that read it: as inaccurate as the simulation makes it."""
    max_tokens: int = NO_LIMIT
    """Most output tokens that the client allows: engines that reserve room for output use it."""
    deadline: float = inf
    """Time when its answer should be complete, on any clock; only the order of deadlines counts."""
    blocks: tuple[Hashable, ...] = ()
    """Names of the content of its leading hash blocks (of the scheduler's `hash_block_tokens`), the whole text before
    them included: equal names, equal keys and values. They may continue into the answer, if a later prompt repeats it.
    Tokens beyond the named blocks are shared with no other request."""
    hold: bool = False
    """True if its KV blocks stay taken when it is finished, until `Scheduler.release`."""
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    emitted: int = 0
    """Output tokens delivered so far."""
    preemptions: int = 0
    decoding: bool = False
    """True if it is resident and all its known tokens but the newest are in the cache: a step advances it."""
    admission: int = 0
    """Number in the order in which requests began to decode, set by the batch."""
    seat: int = 0
    """Number in the order in which requests became residents, set by schedulers that use it."""
    reserved_tokens: int = 0
    """Tokens it has KV blocks for, if more than `computed`: room for drafts, or for tokens to come."""
    verifications: int = 0
    """Number of verifications of its drafts so far: the number of its next verification."""
    runs: list[CachedRun] | None = None
    """Runs of the prefix cache that it holds, in order of its prompt."""
    shared: int = 0
    """KV blocks of the request that are part of `runs`."""
    media: tuple[MediaItem, ...] = ()
    """Images, videos and recordings of its prompt, in order."""
    adapter: int = NO_ADAPTER
    """Number of the LoRA adapter that it asks for."""

    @property
    def known_tokens(self) -> int:
        """Prompt plus delivered output: the tokens that a (re)computation has to cover."""
        return self.prompt_tokens + self.emitted

    def lose_cache(self) -> None:
        """Note that none of its tokens is in the cache any more; those that were emitted stay delivered."""
        self.computed = self.reserved_tokens = self.shared = 0
        self.runs = None
