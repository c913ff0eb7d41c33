"""Pools that draft by the rules of vLLM's releases: terms of their schedulers, and seats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simtune.engine import VllmFcfs
from simtune.errors import Infeasible
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.drafting import Drafting
from simtune.specs.acceptance import Acceptance, PerPosition
from simtune.specs.cache_tiers import CacheTier
from simtune.specs.catalog import load_engine, load_hardware, load_model
from simtune.specs.drafters import BlockDrafter, Drafter, DraftModel, Eagle, Ngram
from simtune.specs.plan import KvLink, Plan
from simtune.specs.pool import Batching, KvCache, Pool
from simtune.specs.schemes import Chain
from simtune.specs.speculation import Speculation
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
RATES = PerPosition(conditional=(0.8, 0.7, 0.6))
ACCEPTANCE = Acceptance(name="assumed", origin="assumed", source="made up", rates=RATES)
DFLASH = BlockDrafter(method="dflash", layers=3)


def deployed(drafter: Drafter, *, apart: bool = False, kv_cache: KvCache | None = None, **batching: Any) -> Deployment:
    """Deploy a pool that drafts three tokens, by the rules of 0.33 unless others are set."""
    spec = Speculation(drafter=drafter, scheme=Chain(tokens=3), acceptance="assumed")
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "draft_rules": "vllm-0.33"}
    pool = Pool(
        hardware=HARDWARE.name,
        instances=1,
        batching=Batching(**settings | batching),
        max_model_len=2048,
        kv_cache=kv_cache or KvCache(prefix_caching=True),
        speculation=spec,
    )
    pools: tuple[Pool, ...] = (pool,)
    if apart:
        roles = ("prefill", "decode")
        pools = tuple(pool.model_copy(update={"name": role, "role": role}) for role in roles)
    plan = Plan(name="plan", model=MODEL.name, pools=pools, link=KvLink() if apart else None)
    draft = None if drafter.own_model is None else load_model(drafter.own_model)
    return deploy(plan, MODEL, HARDWARE, drafting=Drafting(ACCEPTANCE, draft))


def repeated_texts() -> RequestStream:
    """Prompts of 96 tokens, six blocks, each of which comes three times."""
    stream = stream_of(np.arange(9) * 5.0, [96] * 9, [40] * 9)
    names = np.repeat(np.arange(3) * 100, 6).reshape(3, 6) + np.arange(6)
    hash_ids = tuple(tuple(map(int, names[number % 3])) for number in range(9))
    return replace(stream, hash_ids=hash_ids, block_tokens=16)


@pytest.mark.parametrize(
    ("drafter", "slots", "drops", "next_token"),
    [
        (Eagle(), 0, False, True),
        (Eagle(method="mtp"), 0, False, True),
        (DraftModel(model="llama-3.2-1b"), 1, False, False),
        (DFLASH, 0, False, False),
        (BlockDrafter(method="dspark", layers=3), 0, False, False),
        (Ngram(lookup_max=3), 0, False, False),
    ],
)
def test_terms_are_those_of_vllm_0_33(drafter: Drafter, slots: int, drops: bool, next_token: bool) -> None:
    """As in vllm/config of release 0.33: max_num_new_slots_for_drafting, use_eagle_block_drop after the scheduler has
    cleared it, num_hash_lookahead_tokens."""
    pool = deployed(drafter).pools[0]
    terms = pool.speculation(stream_of(np.arange(3.0), [9] * 3, [9] * 3), 0)
    assert terms is not None
    assert (terms.extra_slots, terms.drops_last_hit, terms.hashes_next) == (slots, drops, next_token)
    assert terms.names_verified


@pytest.mark.parametrize(
    "settings",
    [{"apart": True}, {"kv_cache": KvCache(prefix_caching=True, tiers=(CacheTier(name="host", bytes=1 << 34),))}],
)
def test_blocks_that_a_connector_moves_keep_the_names_of_earlier_releases(settings: dict[str, Any]) -> None:
    for pool in deployed(Eagle(), **settings).pools:
        terms = pool.speculation(stream_of(np.arange(3.0), [9] * 3, [9] * 3), 0)
        assert terms is not None
        assert (terms.drops_last_hit, terms.hashes_next) == (True, False)


def test_as_many_requests_run_as_one_pass_of_a_block_drafter_holds() -> None:
    """Blocks of three drafts and the certain token, in a pass of 64 tokens."""
    for rules, seats in (("vllm-0.33", 16), ("vllm-0.32", 32)):
        (core,) = (
            deployed(DFLASH, max_num_seqs=32, max_num_batched_tokens=64, draft_rules=rules).pools[0].cores(1, None)
        )
        assert isinstance(core.scheduler, VllmFcfs)
        assert core.scheduler.max_num_seqs == seats


def test_a_pass_that_holds_no_more_than_one_block_is_refused() -> None:
    with pytest.raises(Infeasible, match="takes 5 tokens of a step, and max_num_batched_tokens is 4"):
        deployed(DFLASH, max_num_seqs=1, max_num_batched_tokens=4)
    deployed(DFLASH, max_num_seqs=1, max_num_batched_tokens=5)


def test_what_of_a_repeated_prompt_is_found() -> None:
    """Of six blocks five may be found. The last token of the fifth is followed by one of the sixth, which is the same:
    so it is found by the newer rule. By the older one it is computed again."""
    hits = {}
    for rules in ("vllm-0.32", "vllm-0.33"):
        result = deployed(Eagle(), draft_rules=rules).simulate(repeated_texts())
        (use,) = result.summary().prefix_cache or ()
        hits[rules] = use.hit_tokens / 6
    assert hits == {"vllm-0.32": 4 * 16, "vllm-0.33": 5 * 16}


def test_the_preset_of_0_33_has_its_rules() -> None:
    assert load_engine("vllm@0.33").pool["batching"]["draft_rules"] == "vllm-0.33"
    assert "draft_rules" not in load_engine("vllm@0.28").pool["batching"]
