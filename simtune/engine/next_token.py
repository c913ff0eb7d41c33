"""Prefix cache in which a block is found together with the token after it, as vLLM 0.33 does for EAGLE and MTP.

The drafter joins each token to the target's hidden state of the one before it, so its keys and values of a block's last
token depend on the next token. The hash of a block covers that token too: requests that continue otherwise do not find
the block, and the last block of a text has no hash before its next token is known.
"""

from __future__ import annotations

from collections.abc import Hashable

from simtune.engine.kv import Hit
from simtune.engine.prefix import PrefixCache, less_one
from simtune.engine.request import Request


class NextTokenCache(PrefixCache):
    """KV blocks that are found by their content and the token after it.

    Exact with one KV block per hash block or fewer. With more, the last block of a named run is taken to be found by no
    request that does not find the next run.
    """

    __slots__ = ()

    def find(self, request: Request) -> Hit:
        """Return the longest cached beginning of a request; changes nothing."""
        hit = super().find(request)
        run_blocks = self._hash_blocks
        if run_blocks == 1 or hit.private is not None or not hit.blocks or hit.blocks < len(hit.runs) * run_blocks:
            return hit
        return less_one(hit, request.shared, self.block_size, run_blocks)

    def _names(self, request: Request) -> tuple[Hashable, ...]:
        if self._hash_blocks > 1:
            return super()._names(request)
        # The name of the next hash block covers that token, and all text before it.
        return request.blocks[self._each :: self._each]

    def release(self, request: Request, named_tokens: int | None = None, *, returns: bool = False) -> None:
        """Free all blocks of a request: see `PrefixCache.release`."""
        tokens = request.computed if named_tokens is None else named_tokens
        super().release(request, min(tokens, request.known_tokens - 1), returns=returns)
