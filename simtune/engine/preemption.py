"""What becomes of the keys and values of a preempted request: computed again, or kept in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Protocol

from simtune.engine.kv import KvBlocks
from simtune.engine.request import Request
from simtune.engine.step import Chunk


class Preemption(Protocol):
    """What a preempted request loses, and what moves between device and host for it. Counts are KV blocks."""

    swaps: ClassVar[bool]
    """Whether any blocks move: where not, `swap_in` need not be asked."""

    def preempt(self, victim: Request, kv: KvBlocks, named_tokens: int) -> int:
        """Release the blocks of a request that is no resident any more, of which so many tokens can be found again;
        returns how many of the blocks go to host memory."""

    def swap_in(self, admitted: Iterable[Chunk], kv: KvBlocks) -> int:
        """How many blocks come back from host memory for requests that are admitted with these chunks."""


class Recompute:
    """All is lost: prompt and delivered tokens are computed again, as one prompt."""

    swaps: ClassVar[bool] = False

    def preempt(self, victim: Request, kv: KvBlocks, named_tokens: int) -> int:
        """Release the victim's blocks; nothing of it is computed any more."""
        kv.release(victim, named_tokens, returns=True)
        victim.computed = 0
        return 0

    def swap_in(self, admitted: Iterable[Chunk], kv: KvBlocks) -> int:
        """None: what is computed was found in the prefix cache."""
        return 0


class Swap:
    """Nothing is lost: all blocks go to host memory, and those with tokens in them come back."""

    swaps: ClassVar[bool] = True

    def preempt(self, victim: Request, kv: KvBlocks, named_tokens: int) -> int:
        """Release the victim's blocks; returns how many they are. What is computed stays computed."""
        blocks = kv.held_by(victim)
        kv.release(victim, named_tokens, returns=True)
        return blocks

    def swap_in(self, admitted: Iterable[Chunk], kv: KvBlocks) -> int:
        """The blocks that tokens computed before fill."""
        return sum(kv.blocks_for(chunk.past) for chunk in admitted)
