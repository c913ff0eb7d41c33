"""Prefix caching, swap and drafts of policies that keep a list of residents, in random worlds and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.engine import POLICIES, DraftingTerms, Request, Scheduler
from simtune.errors import Infeasible
from simtune.sim.deployment import deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.testing.clusters import Cluster, check, of_policy
from tests.engine.small import SMALL

LISTED = (
    "sarathi",
    "shortest-predicted-first",
    "earliest-deadline-first",
    "dual-queue",
    "skip-join-mlfq",
    "priority-layers",
    "layered-prefill",
    "orca",
    "tensorrt-llm",
)
"""Policies that draft."""
SWAPPING = tuple(name for name in LISTED if "swap" in POLICIES[name].offers)


def accepted(request: Request, number: int, drafts: int, /) -> int:
    draws = np.random.default_rng((request.id, number)).random(drafts)
    return int((draws < 0.6).cumprod().sum())


DRAFTS = DraftingTerms(max_drafts=3, accepted=accepted)


def roomy(cluster: Cluster) -> Cluster:
    """Return the cluster with seats for several requests: of few, MLFQ with small constants takes each away a thousand
    times."""
    front, back = (pool and replace(pool, seqs=max(6, pool.seqs)) for pool in (cluster.front, cluster.back))
    assert front is not None
    return replace(cluster, front=front, back=back, cores=[])


@st.composite
def featured(draw: st.DrawFn, policies: tuple[str, ...] = LISTED) -> Cluster:
    """With drafts, with or without a prefix cache or swap, apart or not, failing or not; or with swap alone."""
    policy = draw(st.sampled_from(policies))
    cluster = roomy(draw(of_policy(POLICIES[policy], constants=SMALL)))
    if policy in SWAPPING and draw(st.booleans()):
        watermark = {"watermark_blocks": cluster.options["watermark_blocks"]}
        return replace(cluster, options={**watermark, "preemption": "swap"}, cores=[])
    front, back = (pool and replace(pool, budget=max(8, pool.budget)) for pool in (cluster.front, cluster.back))
    assert front is not None
    options = {**cluster.options, "speculation": DRAFTS}
    return replace(cluster, front=front, back=back, options=options, imbalanced=False, cores=[])


@given(featured())
@settings(max_examples=5, deadline=None)
def test_jumps_are_single_steps_in_a_few_random_worlds(cluster: Cluster) -> None:
    check(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("policy", LISTED)
def test_jumps_are_single_steps_in_many_random_worlds(policy: str) -> None:
    @settings(deadline=None)
    @given(featured((policy,)))
    def holds(cluster: Cluster) -> None:
        check(cluster)

    holds()


@pytest.mark.slow
@given(of_policy(POLICIES["skip-join-mlfq"], constants=SMALL))
@settings(max_examples=5, deadline=None)
def test_jumps_of_mlfq_with_a_prefix_cache_are_single_steps(cluster: Cluster) -> None:
    check(roomy(cluster))


def made(policy: str, **change: Any) -> Scheduler:
    usual: dict[str, Any] = {
        "num_blocks": 6,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "max_model_len": 24,
    }
    return POLICIES[policy](**usual | change)


def computed(scheduler: Scheduler, *requests: Request) -> tuple[int, int, int]:
    """Run requests to their end; return all tokens that were computed, and the blocks swapped out and in."""
    for request in requests:
        assert scheduler.add(request)
    tokens = moved_out = moved_in = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step is not None
        tokens += step.repeat * step.verify_tokens * (step.is_last_part or step.decodes_whole)
        tokens += sum(chunk.tokens for chunk in step.chunks) * step.is_last_part
        moved_out, moved_in = moved_out + step.swapped_out_blocks, moved_in + step.swapped_in_blocks
        scheduler.complete(step.repeat)
    assert scheduler.kv.free == scheduler.kv.total
    assert all(request.emitted == request.output_tokens for request in requests)
    return tokens, moved_out, moved_in


@pytest.mark.parametrize("policy", SWAPPING)
def test_swapped_requests_compute_nothing_again(policy: str) -> None:
    """Two requests of up to 20 tokens do not fit six blocks of 4 together."""

    def load() -> list[Request]:
        return [Request(i, 8, 12, predicted_tokens=12) for i in range(2)]

    once = sum(8 + 12 - 1 for _ in range(2))
    again, *unmoved = computed(made(policy), *load())
    swapped, moved_out, moved_in = computed(made(policy, preemption="swap"), *load())
    assert again > once == swapped
    assert unmoved == [0, 0]
    assert moved_out == moved_in > 0


def test_a_newcomer_of_mlfq_computes_only_what_is_not_cached() -> None:
    scheduler = made("skip-join-mlfq", prefix_caching=True, hash_block_tokens=4)
    blocks = ("a", "b")
    first, _, _ = computed(scheduler, Request(0, 10, 1, blocks=blocks))
    second, _, _ = computed(scheduler, Request(1, 11, 1, blocks=blocks))
    assert (first, second) == (10, 3)


def test_the_budget_cuts_drafts_of_the_last_ones_first() -> None:
    scheduler = made("sarathi", num_blocks=60, max_num_batched_tokens=9, speculation=DRAFTS)
    for i in range(4):
        assert scheduler.add(Request(i, 1, 9))
    scheduler.schedule()
    scheduler.complete()
    step = scheduler.schedule()
    assert step is not None
    assert [*scheduler.composition().values()] == [4, 3, 1, 1]
    assert (step.num_decodes, step.draft_tokens) == (4, 5)


def test_drafts_of_tensorrt_llm_have_room_beyond_the_longest_answer() -> None:
    """A request that may reach 16 of 24 tokens reserves four blocks, and five with three drafts."""
    for speculation, blocks in ((None, 4), (DRAFTS, 5)):
        scheduler = made("tensorrt-llm", max_num_seqs=2, speculation=speculation)
        request = Request(0, 8, 8, max_tokens=8)
        assert -(-scheduler.reservation(request) // 4) == blocks  # type: ignore[attr-defined]


@given(st.sampled_from(["static", "vllm-v0", "orca", "sglang", "tensorrt-llm"]), st.data())
@settings(max_examples=6, deadline=None)
def test_a_refused_feature_has_a_reason(policy: str, data: st.DataObject) -> None:
    lacks = POLICIES[policy].lacks
    feature = data.draw(st.sampled_from(sorted(lacks)))
    cache = {"prefix_caching": {"prefix_caching": True}, "swap": {"preemption": "swap"}}.get(feature, {})
    drafts = {
        "drafter": {"kind": "eagle"},
        "scheme": {"kind": "chain", "tokens": 2},
        "acceptance": "eagle3-llama-3.1-8b",
    }
    pool = {
        "hardware": "h100-sxm",
        "instances": 1,
        "batching": {"policy": policy, "max_num_seqs": 4, "max_num_batched_tokens": 8192},
        "kv_cache": cache,
        "max_model_len": 4096,
        **({"speculation": drafts} if feature == "speculation" else {}),
    }
    plan = Plan.model_validate({"name": "p", "model": "llama-3.1-8b", "pools": [pool]}, strict=False)
    with pytest.raises(Infeasible, match=lacks[feature]):
        deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"))


def test_no_policy_gives_a_reason_for_what_it_offers() -> None:
    assert [name for name, policy in POLICIES.items() if set(policy.lacks) & policy.offers] == []
