"""Rules of vLLM's releases for drafts: the share of a step that a drafter takes, and the blocks that others find.

Facts of the wheels of 0.32 and 0.33, by file: `max_num_new_slots_for_drafting` and `needs_eagle_block_drop` in
vllm/config/speculative.py, `num_hash_lookahead_tokens` and `_set_max_num_scheduled_tokens` in vllm/config/vllm.py,
`update_from_output` in vllm/v1/core/sched/scheduler.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from simtune.specs.drafters import BlockDrafter, Drafter

DraftRules = Literal["vllm-0.32", "vllm-0.33"]


class DraftShare(NamedTuple):
    """Share of an engine that a drafter takes in every step, and its rule for the prefix cache."""

    extra_slots: int
    """Tokens of the budget that each request takes besides its own."""
    drops_last_hit: bool
    """True if the last block found in the prefix cache is computed again."""
    hashes_next: bool = False
    """True if a block is found together with the token after it."""
    names_verified: bool = False
    """True if accepted tokens can be found as soon as their verification is known."""
    most_requests: int | None = None
    """Most requests that run at a time, whose drafts one pass of the drafter makes; None without such a limit."""


def draft_share(
    drafter: Drafter, drafts: int, rules: DraftRules | None, *, budget: int, transfers: bool = False
) -> DraftShare:
    """Return the share of a drafter that makes `drafts` drafts, with steps of `budget` tokens.

    `rules` are those of vLLM 0.32 unless given. `transfers`: a connector moves keys and values to or from the engine,
    between roles or to host memory, for which blocks keep the names of earlier releases.
    """
    slots = drafter.extra_slots(drafts)
    if rules != "vllm-0.33":
        return DraftShare(slots, drafter.drops_last_hit)
    if isinstance(drafter, BlockDrafter):
        # One pass beside the target's has the block of every request.
        return DraftShare(0, False, False, True, budget // drafter.lookahead(drafts))
    hashes_next = drafter.joins_hidden_states and not transfers
    return DraftShare(slots, drafter.drops_last_hit and not hashes_next, hashes_next, True)
