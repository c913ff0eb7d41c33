"""How many agents a prefix cache serves: the knee lies where the texts of all users fill the cache and the tier below.

Every agent's text grows to the same length in step with the others, so the working set of n users is n texts, and the
cache forgets every text, in the order of use, as soon as one does not fit (least recently used, used in turn). A run of
agents was published whose cache on the devices served ten users, and fourteen with a tier in host memory below it
(InferenceX). Its traces and the layout of its model are not at hand, so the law is held here and not the run: with room
for ten texts on the devices and fourteen below, the knees are at ten and fourteen.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from simtune.results.result import Result
from simtune.sim.pools import kv_block_bytes
from tests.sim.test_agent_sessions import ByToken, deployed, drawn, workload

TURNS, FIRST, ADDED, OUTPUT = 6, 3200, 320, 32
TEXT = FIRST + (TURNS - 1) * ADDED + TURNS * OUTPUT
BLOCKS = TEXT // 16
"""KV blocks of a whole text."""
RESIDENT, HOST = 10, 14
"""Texts that fit on the device, and in the tier below, which has all that is computed (vLLM's offloading, LMCache): a
copy of what the device has, so that the larger of them counts and not their sum."""


def block_bytes() -> float:
    """Bytes of a KV block."""
    plan = deployed(ByToken())
    return float(kv_block_bytes(plan.model, plan.pools[0].spec))


@cache
def run(users: int, tier: bool) -> Result:
    load = workload(
        {"turns": TURNS, "pause_s": 20.0, "first_prompt": {"kind": "fixed", "tokens": FIRST}},
        prompt=ADDED, output=OUTPUT, arrivals={"kind": "closed_loop", "users": users},
    )  # fmt: skip
    tiers: list[dict[str, Any]] = [
        {"name": "host", "bytes": (HOST * BLOCKS + 8) * block_bytes(), "bytes_per_s": 50e9, "written": "computed"}
    ]
    # A little room beyond the texts, for the blocks that a turn under way fills.
    kv_cache = {"num_blocks": RESIDENT * BLOCKS + 8, "prefix_caching": True, **({"tiers": tiers} if tier else {})}
    return deployed(ByToken(), kv_cache=kv_cache, max_model_len=8192).simulate(drawn(load, users))


def hit_share(users: int, tier: bool) -> float:
    """Tokens that are found, of those that an endless cache finds."""
    use = run(users, tier).summary().prefix_cache
    ceiling = sum(FIRST + turn * (ADDED + OUTPUT) - ADDED for turn in range(1, TURNS)) * users
    return 0.0 if use is None else use[0].hit_tokens / ceiling


@pytest.mark.parametrize(("tier", "texts"), [(False, RESIDENT), (True, HOST)])
def test_the_knee_is_where_the_texts_fill_the_caches(tier: bool, texts: int) -> None:
    shares = {users: hit_share(users, tier) for users in range(texts - 2, texts + 5)}
    knee = max(users for users, share in shares.items() if share > 0.97)
    assert abs(knee - texts) <= 1
    assert all(share > 0.97 for users, share in shares.items() if users <= knee)
    assert max(share for users, share in shares.items() if users > texts + 2) < 0.9


def test_beyond_the_knee_turns_compute_their_text_again() -> None:
    within, beyond = run(RESIDENT, False), run(RESIDENT + 3, False)
    assert beyond.values("ttft").mean() > 3 * within.values("ttft").mean()
    kept = run(RESIDENT + 3, True)
    assert kept.values("ttft").mean() < 0.5 * beyond.values("ttft").mean()
