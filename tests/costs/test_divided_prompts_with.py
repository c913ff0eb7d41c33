"""Groups of ranks that divide prompts, beside an MTP head that drafts and beside tiers of the prefix cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from simtune.costs.compiled import LinearCosts, compile_costs
from simtune.costs.drafting import CompiledRounds, draft_memory
from simtune.costs.memory import kv_capacity
from simtune.emit import ENGINES
from simtune.results.outcome import Outcome
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.drafting import Drafting
from simtune.specs.acceptance import PerPosition
from simtune.specs.drafters import Eagle
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.schemes import Chain
from simtune.testing.clusters import stream_of
from simtune.tuner.bounds import PlanBounds
from simtune.tuner.bounds.floors import least_e2el_s
from tests.costs.test_prefill_context import DENSE, HARDWARE, LATENT, latent, pool
from tests.sim.test_speculative_world import acceptance

MTP = Eagle(method="mtp")
DEPTH = 2
SHAPE = Chain(tokens=DEPTH).shape
SPECULATION = {"drafter": {"kind": "eagle", "method": "mtp"}, "scheme": {"kind": "chain", "tokens": DEPTH}}
DRAFTING: dict[str, Any] = {"speculation": SPECULATION | {"acceptance": "assumed"}}
PROMPT = [(0, 8000)]


def rounds(groups: int | None) -> CompiledRounds:
    return CompiledRounds(DENSE, HARDWARE, pool(groups), 16_384, MTP, SHAPE)


# --- drafts -------------------------------------------------------------------------------------------------------


def test_one_group_is_none_to_the_tick() -> None:
    single, none = rounds(1), rounds(None)
    for chunks, completing in (((), 0), (PROMPT, 1), ([(8000, 300)], 0)):
        work = (5, 15, DEPTH, 20_000, chunks, completing)
        assert single.round(*work) == none.round(*work)


@pytest.mark.parametrize("groups", [2, 4])
def test_a_round_without_prompts_is_that_of_one_group(groups: int) -> None:
    divided, alone = rounds(groups), rounds(None)
    for decodes, context in ((1, 100), (7, 30_000), (60, 200_000)):
        work = (decodes, decodes * (DEPTH + 1), DEPTH, context)
        assert divided.round(*work) == alone.round(*work)


@pytest.mark.parametrize("groups", [None, 2, 4])
def test_a_round_without_drafts_is_a_step(groups: int | None) -> None:
    of_rounds, steps = rounds(groups), compile_costs(DENSE, HARDWARE, pool(groups), 16_384)
    for chunks in (PROMPT, [(100, 7), (8000, 300)]):
        work = (5, 20_000, chunks, 5 + len(chunks))
        assert of_rounds.mixed(*work) == pytest.approx(steps.mixed(*work), rel=1e-3)


@pytest.mark.parametrize("groups", [2, 4])
def test_the_drafter_computes_its_share_of_a_prompt(groups: int) -> None:
    """Its pass over the prompt is a layer of the target: the share of the whole prompt's that one group has."""
    of_prompt = []
    for costs in (rounds(None), rounds(groups)):
        with_drafts, without = (costs.round(0, 0, depth, 0, PROMPT, 0) for depth in (DEPTH, 0))
        of_prompt.append(with_drafts - without)
    whole_ticks, share_ticks = of_prompt
    assert whole_ticks / groups < share_ticks < 1.35 * whole_ticks / groups


def test_a_head_has_as_much_memory_for_each_group() -> None:
    alone, divided = (draft_memory(MTP, DENSE, pool(groups, tp=2)) for groups in (None, 4))
    assert divided == alone
    # Experts are spread over all groups.
    whole, spread = (draft_memory(MTP, LATENT, latent(groups, tp=2)).weights_bytes for groups in (1, 4))
    assert whole / 4 < spread < whole


def drafting(groups: int | None) -> Deployment:
    of_plan = pool(groups, batching={"policy": "vllm-fcfs", "max_num_batched_tokens": 2048}, **DRAFTING)
    plan = Plan(name="p", model=DENSE.name, pools=(of_plan,))
    return deploy(plan, DENSE, HARDWARE, drafting=Drafting(acceptance(PerPosition(conditional=(0.8, 0.6)))))


def test_no_simulation_is_faster_than_its_bound() -> None:
    alone, divided = drafting(None), drafting(4)
    rng, count = np.random.default_rng(4), 40
    arrivals = np.cumsum(rng.exponential(0.03, count)).tolist()
    stream = stream_of(arrivals, rng.integers(10, 9000, count).tolist(), rng.integers(1, 60, count).tolist())
    bounds, result = PlanBounds(divided, stream), divided.simulate(stream)
    assert 0 < least_e2el_s(bounds) <= float(result.e2el_s.mean())
    single = stream_of([0.0], [8000], [1])
    undivided_s, divided_s = (deployment.simulate(single).ttft_s[0] for deployment in (alone, divided))
    assert undivided_s / 4 < divided_s < undivided_s
    jumped, stepped = (divided.simulate(stream, single_steps=one).outcome for one in (False, True))
    assert jumped.finish.tolist() == stepped.finish.tolist()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (SPECULATION | {"drafter": {"kind": "eagle"}}, "unless an MTP head drafts: vLLM 0.32 and 0.33 refuse others"),
        (
            SPECULATION | {"drafter": {"kind": "ngram", "lookup_max": 4}},
            "MRV2 PCP only supports DSpark or single-module",
        ),
    ],
)
def test_drafts_that_vllm_refuses_are_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        pool(2, speculation=more | {"acceptance": "assumed"})


def test_what_vllm_refuses_is_refused_with_its_words() -> None:
    more: tuple[tuple[str, Any, str], ...] = (("lora", {"rank": 8, "slots": 2}, "LoRA"), ("encoder", {}, "MM inputs"))
    for key, value, words in more:
        with pytest.raises(
            ValidationError, match=rf"vLLM 0\.28 to 0\.33 refuses \(MRV2 PCP does not support {words} yet"
        ):
            pool(2, 1, None, **{key: value})


# --- tiers --------------------------------------------------------------------------------------------------------


def tiered(groups: int, size: float | None, rate: float) -> Outcome:
    tier = {"name": "host", "bytes": size, "bytes_per_s": rate, "latency_s": 1e-4}
    cache = {"num_blocks": 40, "block_size": 16, "prefix_caching": True} | ({} if size is None else {"tiers": [tier]})
    of_plan = pool(
        groups, kv_cache=cache, batching={"max_num_seqs": 4, "max_num_batched_tokens": 512}, max_model_len=512
    )
    plan = Plan(name="p", model=DENSE.name, pools=(of_plan,))
    rng = np.random.default_rng(3)
    names = [tuple(range(100 * i, 100 * i + 20)) for i in rng.integers(0, 6, 60)]
    stream = stream_of(np.arange(60) * 0.02, [320] * 60, [8] * 60)
    stream = replace(stream, hash_ids=names, block_tokens=16)
    return deploy(plan, DENSE, HARDWARE, LinearCosts(0.002, 1e-5)).simulate(stream).outcome


@pytest.mark.parametrize("groups", [2, 4])
def test_a_tier_has_a_copy_for_every_group(groups: int) -> None:
    """With as many copies over a link of as many times the rate it has what it has for one group."""
    block_bytes = 16 * kv_capacity(DENSE, HARDWARE, pool(None)).kv_bytes_per_token
    size, rate = 160 * block_bytes, 1e9
    alone, divided, smaller = (
        tiered(1, size, rate),
        tiered(groups, groups * size, groups * rate),
        tiered(groups, size, rate),
    )
    assert divided.finish.tolist() == alone.finish.tolist()
    found = [outcome.cores[0].tier_tokens for outcome in (alone, divided, smaller)]
    assert found[0] == found[1]
    assert found[0][0][1] > found[2][0][1] > 0


@pytest.mark.parametrize("groups", [2, 4])
def test_a_tier_without_room_is_none(groups: int) -> None:
    assert tiered(groups, 0, 1e9).finish.tolist() == tiered(groups, None, 1e9).finish.tolist()


# --- what engines have --------------------------------------------------------------------------------------------


def test_engines_are_given_what_they_have() -> None:
    vllm, sglang = ENGINES["vllm"], ENGINES["sglang"]
    plan = Pool.model_validate(latent(4, tp=2).model_dump(exclude_none=True) | DRAFTING, strict=False)
    assert not [reason for reason in vllm.refusals(plan, LATENT, {}) if reason.startswith("speculation")]
    words = "speculation: vLLM 0.28 divides no prompts beside drafts; take release 0.32, or remove it"
    assert words in vllm.of("vllm-0.28").refusals(plan, LATENT, {})
    assert any("SGLang was not checked with it" in reason for reason in sglang.refusals(plan, LATENT, {}))
    with_tier = pool(2, kv_cache={"prefix_caching": True, "tiers": [{"name": "host", "bytes": 1e9}]})
    assert not [reason for reason in vllm.refusals(with_tier, DENSE, {}) if "tiers" in reason]
    assert any(reason.startswith("kv_cache.tiers: SGLang was not") for reason in sglang.refusals(with_tier, DENSE, {}))
