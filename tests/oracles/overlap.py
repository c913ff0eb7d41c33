"""Drafting while the target verifies: PEARL, DSI, and two stages that share a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pearl_tokens(acceptance: float, window: int) -> float:
    """Mean tokens per round of PEARL (arXiv 2408.11850) with iid acceptance; a round lasts
    max(window x draft, target).

    While the target verifies one window the drafter fills the next: DSI with one replica.
    """
    return dsi_tokens(acceptance, window, 1)


def pearl_tokens_per_s(acceptance: float, window: int, draft_s: float, target_s: float) -> float:
    return pearl_tokens(acceptance, window) / max(window * draft_s, target_s)


def dsi_mean_seconds(num_tokens: int, acceptance: float, draft_s: float, target_s: float) -> float:
    """Mean seconds for num_tokens tokens of DSI (arXiv 2405.14105) with look-ahead 1 and `dsi_replicas` targets.

    A token follows its predecessor after draft_s where the draft was right and after target_s where it was not;
    the last one always waits for a target. Never more than num_tokens x target_s.
    """
    return (num_tokens - 1) * (acceptance * draft_s + (1 - acceptance) * target_s) + target_s


def dsi_tokens(acceptance: float, look_ahead: int, replicas: int) -> float:
    """Mean tokens per tick of DSI (arXiv 2405.14105) in lockstep, with iid acceptance; a tick lasts
    max(look_ahead x draft, target / replicas).

    After a rejection the first token alone is verified, and its verdict comes after `replicas` ticks (one token comes
    out); if it was right, the look_ahead - 1 tokens drafted beside it follow in the next tick; from then on whole
    windows, one in each tick, until one is rejected. With look-ahead 1 it is the mean of `dsi_mean_seconds`.
    """
    a, g = acceptance, look_ahead
    if a == 1:
        return float(g)
    whole = a**g / (1 - a**g)  # windows verified, of all drafts after a rejection

    def tokens(m: int) -> float:
        return (1 - a**m) / (1 - a)

    rest = a if g > 1 else 0.0  # of the first window, where anything is left of it
    return (1 + rest * tokens(g - 1) + whole * tokens(g)) / (replicas + rest + whole)


def dsi_replicas(draft_s: float, target_s: float, look_ahead: int = 1) -> int:
    """Target replicas that keep up when each verifies `look_ahead` draft tokens at a time."""
    return math.ceil(target_s / (look_ahead * draft_s) - 1e-9)


def frontier_seconds(
    draft_s: Sequence[float], verify_s: Sequence[float], draft_share: float, verify_share: float
) -> float:
    """Seconds of a round cut into chunks, each verified while the next is drafted (as in FASER, arXiv 2604.20503).

        d_1 + sum over j >= 2 of max(d_j / draft_share, v_(j-1) / verify_share) + v_last

    The shares are those of the processors while both run; alone each has them all. A model of ours: the paper has
    no closed form.
    """
    both = sum(
        max(d / draft_share, v / verify_share) for d, v in zip(draft_s[1:], verify_s[: len(draft_s) - 1], strict=True)
    )
    return draft_s[0] + both + verify_s[-1]
