"""Preemption: the keys and values of a preempted request are computed again, or moved to host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Protocol

from simtune.engine.kv import KvBlocks
from simtune.engine.request import Request
from simtune.engine.step import Chunk


class Preemption(Protocol):
    """Rule for the blocks of preempted requests, and their moves between device and host. Counts are KV blocks."""

    swaps: ClassVar[bool]
    """True if any blocks move; if not, `swap_in` need not be called."""

    def preempt(self, victim: Request, kv: KvBlocks, named_tokens: int) -> int:
        """Free the blocks of a request that is no longer a resident, of which `named_tokens` tokens can be found;
        return the number of blocks that go to host memory."""

    def swap_in(self, admitted: Iterable[Chunk], kv: KvBlocks) -> int:
        """Return the number of blocks that come back from host memory for requests admitted with these chunks."""


class Recompute:
    """Discards all blocks: prompt and delivered tokens are computed again, as one prompt."""

    swaps: ClassVar[bool] = False

    def preempt(self, victim: Request, kv: KvBlocks, named_tokens: int) -> int:
        """Free the victim's blocks; none of its tokens is computed any more."""
        kv.release(victim, named_tokens, returns=True)
        victim.computed = 0
        return 0

    def swap_in(self, admitted: Iterable[Chunk], kv: KvBlocks) -> int:
        """Return 0: computed tokens were found in the prefix cache."""
        return 0


class Swap:
    """Moves all blocks to host memory; those with tokens in them come back."""

    swaps: ClassVar[bool] = True

    def preempt(self, victim: Request, kv: KvBlocks, named_tokens: int) -> int:
        """Free the victim's blocks and return their number. Computed tokens stay computed."""
        # All blocks move, as vLLM swaps sequences and not tokens; only filled ones are worth bringing back.
        blocks = kv.held_by(victim)
        kv.release(victim, named_tokens, returns=True)
        return blocks

    def swap_in(self, admitted: Iterable[Chunk], kv: KvBlocks) -> int:
        """Return the blocks filled by tokens computed before."""
        return sum(kv.blocks_for(chunk.past) for chunk in admitted)
