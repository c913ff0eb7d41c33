"""Limits that nobody reaches: where it is said that two plans do the same, they do."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest

from simtune.costs.protocol import StepCosts
from simtune.results.result import WHOLE
from simtune.sim.deployment import Deployment, compiled_costs, deploy
from simtune.sim.drafting import Drafting
from simtune.specs.acceptance import Acceptance, PerPosition
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.drafters import BlockDrafter, Eagle
from simtune.specs.plan import FirstToken, KvLink, LocalPrefill, Plan
from simtune.specs.pool import Batching, KvCache, Parallelism, Pool, Role
from simtune.specs.schemes import BatchRange, ByBatch, Chain
from simtune.specs.speculation import Speculation
from simtune.specs.workload import Lognormal, Poisson, Slo, Workload
from simtune.tuner.search.implied_results import (
    DECODE_MARGIN,
    Allowed,
    decodes_miss,
    first_tokens_miss,
    tell_apart,
    uses,
)
from simtune.workload.requests import RequestStream, build_stream

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
ACCEPTANCE = Acceptance(
    name="a",
    origin="assumed",
    source="none",
    rates=PerPosition(conditional=(0.8, 0.7, 0.6, 0.5)),
    target=MODEL.name,
    drafter="d",
)
REQUESTS = 80
COLUMNS = ("scheduled", "first_token", "finish")


def stream(rate_rps: float, requests: int = REQUESTS) -> RequestStream:
    load = Workload(
        name="load",
        arrivals=Poisson(rate_rps=rate_rps),
        prompt=Lognormal(mean_tokens=600, sigma=0.8, max_tokens=3000),
        output=Lognormal(mean_tokens=80, sigma=0.8, max_tokens=500),
    )
    return build_stream(load, None, requests=requests, seed=3)


def pool(seats: int, tokens: int, blocks: int, role: Role = "mixed", pp: int = 1, **more: Any) -> Pool:
    return Pool(
        name=role,
        role=role,
        hardware="h100-sxm",
        instances=1,
        parallelism=Parallelism(pp=pp),
        batching=Batching(max_num_seqs=seats, max_num_batched_tokens=tokens, **more),
        kv_cache=KvCache(num_blocks=blocks),
        max_model_len=4096,
    )


def deployed(*pools: Pool, costs: Mapping[str, StepCosts] | None = None, link: KvLink | None = None) -> Deployment:
    between = link or KvLink() if len(pools) > 1 else None
    plan = Plan(name="p", model=MODEL.name, pools=pools, link=between)
    drafting = {p.name: Drafting(ACCEPTANCE) for p in pools if p.speculation is not None}
    return deploy(plan, MODEL, HARDWARE, costs, drafting=drafting)


def _cached(plain: Pool, caching: bool) -> Pool:
    kv_cache = plain.kv_cache.model_copy(update={"prefix_caching": caching})
    return plain.model_copy(update={"kv_cache": kv_cache})


LIMITS = [(seats, tokens, blocks) for seats in (8, 64, 128) for tokens in (256, 1024, 4096) for blocks in (900, 6000)]


@pytest.mark.parametrize(("pp", "caching"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("rate_rps", [3.0, 12.0, 30.0])
def test_plans_that_are_told_what_they_do_do_it(rate_rps: float, pp: int, caching: bool) -> None:
    requests, told = stream(rate_rps), 0
    plans = [deployed(_cached(pool(*limits, pp=pp), caching)) for limits in LIMITS]
    outcomes = [plan.simulate(requests) for plan in plans]
    for one, its in zip(plans, outcomes, strict=True):
        used = uses(one, its)
        assert used is not None
        for other, theirs in zip(plans, outcomes, strict=True):
            if not tell_apart(other, used):
                told += one is not other
                for column in COLUMNS:
                    assert np.array_equal(getattr(its.outcome, column), getattr(theirs.outcome, column))
    assert told > 0, "there were to be plans that are told what they do"


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("role", ["mixed", "decode"])
def test_the_blocks_that_were_taken_are_enough_and_three_quarters_are_not(role: Role, caching: bool) -> None:
    requests = stream(30.0)

    def run(blocks: int) -> tuple[Deployment, Any]:
        pools = [_cached(pool(128, 1024, blocks, role), caching)]
        plan = deployed(*([pool(128, 8192, 6000, "prefill")] if role == "decode" else []), *pools)
        return plan, plan.simulate(requests)

    ample, result = run(20_000)
    used = uses(ample, result)
    assert used is not None
    # One block of vLLM is empty.
    enough, same = run(used[-1].reached.blocks + 1)
    assert not tell_apart(enough, used)
    assert all(np.array_equal(getattr(result.outcome, c), getattr(same.outcome, c)) for c in COLUMNS)
    few, other = run(used[-1].reached.blocks * 3 // 4)
    assert tell_apart(few, used)
    assert not np.array_equal(result.outcome.finish, other.outcome.finish)


@pytest.mark.parametrize(
    "slo",
    [Slo(tpot_s={"p90": 0.006}), Slo(tpot_s={"p90": 0.008}), Slo(ttft_s={"p90": 0.02}), Slo(ttft_s={"p90": 0.04})],
)
def test_a_run_that_is_given_up_counts_the_blocks_of_steps_under_way(slo: Slo) -> None:
    requests, plan = stream(30.0), deployed(pool(128, 1024, 20_000))

    def most(record: bool, until_lost: int | None = WHOLE) -> int:
        result = plan.simulate(requests, slo, record=record, until_lost=until_lost)
        assert result.outcome.aborted == (until_lost is not None)
        (core,) = result.outcome.cores
        assert core.most_blocks is not None
        return core.most_blocks

    by_steps, by_jumps, to_the_end = most(True), most(False), most(False, None)
    assert by_steps <= by_jumps <= to_the_end
    assert by_steps < to_the_end


def test_prefill_and_decode_pools() -> None:
    requests, told = stream(10.0), 0
    plans = [
        deployed(pool(64, tokens, 6000, "prefill"), pool(seats, 1024, 6000, "decode"))
        for tokens in (256, 2048, 8192)
        for seats in (4, 128, 256)
    ]
    outcomes = [plan.simulate(requests) for plan in plans]
    for one, its in zip(plans, outcomes, strict=True):
        used = uses(one, its)
        assert used is not None
        for other, theirs in zip(plans, outcomes, strict=True):
            if not tell_apart(other, used):
                told += one is not other
                assert np.array_equal(its.outcome.finish, theirs.outcome.finish)
    assert told > 0


DRAFTED = (
    Speculation(drafter=Eagle(), scheme=Chain(tokens=3), acceptance="unused"),
    Speculation(drafter=BlockDrafter(layers=2), scheme=Chain(tokens=4), acceptance="unused"),
    Speculation(
        drafter=Eagle(),
        scheme=ByBatch(
            max_tokens=4, ranges=(BatchRange(first=1, last=6, tokens=4), BatchRange(first=7, last=128, tokens=1))
        ),
        acceptance="unused",
    ),
)


def counted(plans: Sequence[Deployment], requests: RequestStream) -> tuple[int, int]:
    """Count pairs of plans of which one tells what the other does, which must be the same, and pairs that differ."""
    outcomes = [plan.simulate(requests) for plan in plans]
    told = differ = 0
    for (one, its), (other, theirs) in permutations(zip(plans, outcomes, strict=True), 2):
        same = all(np.array_equal(getattr(its.outcome, c), getattr(theirs.outcome, c)) for c in COLUMNS)
        used = uses(one, its)
        assert used is not None
        tells = not tell_apart(other, used)
        assert same or not tells, (one.pools, other.pools)
        told, differ = told + tells, differ + (not same)
    return told, differ


@pytest.mark.parametrize("role", ["mixed", "decode"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("speculation", DRAFTED, ids=["chain", "block", "by batch"])
def test_pools_that_draft(speculation: Speculation, asynchronous: bool, role: Role) -> None:
    drafts: dict[str, Any] = {"speculation": speculation, "async_scheduling": asynchronous}
    pools = [
        pool(*limits, role).model_copy(update=drafts)
        for limits in product((5, 12, 128), (128, 160, 1024), (400, 900, 6000))
    ]
    costs: dict[str, StepCosts] = {role: compiled_costs(pools[-1], MODEL, HARDWARE, 4096, Drafting(ACCEPTANCE))}
    front = () if role == "mixed" else (pool(64, 1024, 6000, "prefill"),)
    plans = [deployed(*front, its, costs=costs) for its in pools]
    told, differ = counted(plans, stream(10.0))
    assert told > 0
    assert differ > 0


RESERVING: dict[str, dict[str, Any]] = {
    "trtllm": {"policy": "tensorrt-llm", "chunked_prefill": False},
    "trtllm chunked": {"policy": "tensorrt-llm"},
    "trtllm in turn": {"policy": "tensorrt-llm", "options": {"context_chunking_policy": "EQUAL_PROGRESS"}},
    "trtllm pauses": {"policy": "tensorrt-llm", "options": {"capacity_scheduler_policy": "MAX_UTILIZATION"}},
    "sglang": {"policy": "sglang"},
    "sglang whole": {"policy": "sglang", "chunked_prefill": False},
    "sglang mixes": {"policy": "sglang", "options": {"enable_mixed_chunk": True}},
    "sglang polls": {"policy": "sglang", "options": {"scheduler_recv_interval": 7, "max_prefill_tokens": 2000}},
}
"""Policies that reserve room for answers, in all of their ways."""


@pytest.mark.parametrize("role", ["mixed", "prefill", "decode"])
@pytest.mark.parametrize("name", RESERVING)
def test_policies_that_reserve_room(name: str, role: Role) -> None:
    """Random loads and limits: where two plans are told to do the same, every column is the same to the tick."""
    rng, told, differ = random.Random(f"{name} {role}"), 0, 0
    widest = [pool(256, 32_768, 20_000, role) for role in ("mixed", "prefill", "decode")]
    costs: dict[str, StepCosts] = {p.name: compiled_costs(p, MODEL, HARDWARE, 4096) for p in widest}
    for rate_rps in (4.0, 20.0, 80.0):
        caching, asynchronous = rng.random() < 0.5, rng.random() < 0.5
        settings = RESERVING[name]
        least = 1024 if settings.get("chunked_prefill", True) else 4096
        changes: dict[str, Any] = {"async_scheduling": asynchronous}
        limits = [
            (rng.choice((2, 9, 24, 80, 256)), rng.choice((1, 2, 4, 8)) * least, rng.choice((500, 900, 3000, 12_000)))
            for _ in range(4)
        ]
        # Limits of one kind alone, too: of all that differ one may be reached.
        limits += [(seats, *limits[0][1:]) for seats in (9, 200)] + [
            (*limits[0][:2], 20_000),
            (256, least * 8, 9000),
        ]
        pools = [_cached(pool(*sizes, role, **settings), caching).model_copy(update=changes) for sizes in limits]
        beside = {"prefill": pool(256, 1024, 12_000, "decode"), "decode": pool(64, 1024, 12_000, "prefill")}.get(role)
        ends = [(its, beside) if role == "prefill" else (beside, its) for its in pools]
        plans = [deployed(*filter(None, both), costs=costs) for both in ends]
        requests = replace(stream(rate_rps), max_tokens=rng.choice((None, 400)))
        more_told, more_differ = counted(plans, requests)
        told, differ = told + more_told, differ + more_differ
    assert told > 0, "there were to be plans that are told what they do"
    assert differ > 0, "there were to be plans that do something else"


@pytest.mark.parametrize("settings", [{"policy": "tensorrt-llm", "options": {"batch_wait_timeout_iters": 3}}])
def test_prompts_that_wait_for_a_fuller_step_tell_nothing(settings: dict[str, Any]) -> None:
    deployment = deployed(pool(64, 1024, 6000, **settings))
    assert uses(deployment, deployment.simulate(stream(3.0))) is None


def test_policies_that_look_at_their_limits_tell_nothing() -> None:
    deployment = deployed(pool(64, 1024, 6000, policy="transformers-fifo"))
    assert uses(deployment, deployment.simulate(stream(3.0))) is None


@pytest.mark.parametrize("statistic", ["p90", "mean"])
def test_first_tokens_that_miss_do_so_whatever_decodes(statistic: str) -> None:
    requests, slo, told = stream(200.0), Slo(ttft_s={statistic: 0.3}, tpot_s={"p99": 10.0}), 0
    for blocks in (400, 12_000):
        plans = [
            deployed(pool(128, 512, blocks, "prefill"), pool(seats, 1024, 6000, "decode")) for seats in (1, 4, 128, 256)
        ]
        misses = [
            first_tokens_miss(plan, plan.simulate(requests, slo, until_lost=WHOLE if stopped else None))
            for plan in plans
            for stopped in (False, True)
        ]
        told += sum(misses)
        if any(misses):
            ttft = [plan.simulate(requests, slo).statistic("ttft", statistic) for plan in plans]
            assert all(value is not None and value > 0.3 for value in ttft)
        assert not any(misses) or blocks == 12_000, "a full decode pool fills a small prefill pool"
    assert told > 0, "there was to be a prefill pool that misses the SLO alone"


def test_prompts_that_the_decode_pool_may_compute_tell_nothing() -> None:
    plan, requests = deployed(pool(128, 512, 12_000, "prefill"), pool(256, 1024, 6000, "decode")), stream(200.0, 200)
    near = plan.plan.model_copy(update={"local_prefill": LocalPrefill(below_tokens=100)})
    local = deploy(near, MODEL, HARDWARE, None)
    slo = Slo(ttft_s={"mean": 0.01}, tpot_s={"mean": 0.001})
    assert first_tokens_miss(plan, plan.simulate(requests, slo))
    assert not first_tokens_miss(local, local.simulate(requests, slo))
    assert decodes_miss(plan, plan.simulate(requests, slo))
    assert not decodes_miss(local, local.simulate(requests, slo))


@pytest.mark.parametrize("first_token", ["decode", "transfer"])
def test_a_decode_pool_that_is_too_slow_is_so_with_other_limits(first_token: FirstToken) -> None:
    link, told, met = KvLink(first_token=first_token), {"lower": 0, "higher": 0}, 0
    limits = [(seats, tokens, blocks) for seats in (8, 64, 200) for tokens in (200, 1024) for blocks in (900, 12_000)]
    plans = [deployed(pool(64, 8192, 12_000, "prefill"), pool(*of, "decode"), link=link) for of in limits]
    for rate_rps, limit_s in product((5.0, 20.0), (0.0065, 0.008, 0.012)):
        requests, slo = stream(rate_rps, 200), Slo(ttft_s={"mean": 0.6}, tpot_s={"mean": limit_s})
        requests = replace(requests, output_tokens=4 * requests.output_tokens + 50)
        results = [plan.simulate(requests, slo) for plan in plans]
        met += sum(result.meets_slo for result in results)
        for (plan, result), simulated in zip(zip(plans, results, strict=True), limits, strict=True):
            if (miss := decodes_miss(plan, result)) is None:
                continue
            for rival, other in zip(results, limits, strict=True):
                if other != simulated and miss.tells(Allowed(*simulated), Allowed(*other)):
                    assert not rival.meets_slo
                    told["lower"] += any(a < b for a, b in zip(other, simulated, strict=True))
                    told["higher"] += any(a > b for a, b in zip(other, simulated, strict=True))
    assert min(told.values()) > 0
    assert met > 0


def test_first_tokens_that_wait_for_a_decode_pool_do_not_blame_the_prefill_pool() -> None:
    requests, slo = stream(6.0), Slo(ttft_s={"mean": 1.0})
    few, many = (
        deployed(pool(128, 8192, 12_000, "prefill"), pool(seats, 1024, 12_000, "decode")) for seats in (2, 256)
    )
    assert many.simulate(requests, slo).meets_slo
    result = few.simulate(requests, slo)
    assert not result.meets_slo, "first tokens come with the first decode, which waits for a seat"
    assert not first_tokens_miss(few, result)


def test_a_cache_that_prompts_share_tells_nothing() -> None:
    deployment = deployed(_cached(pool(64, 1024, 6000), True))
    requests = replace(stream(3.0), hash_ids=tuple((0, i) for i in range(REQUESTS)), block_tokens=16)
    assert uses(deployment, deployment.simulate(requests)) is None
    assert uses(deployment, deployment.simulate(stream(3.0))) is not None


def test_a_decode_pool_that_is_too_slow_misses_whatever_prefills() -> None:
    requests, slo = stream(40.0, 120), Slo(ttft_s={"p90": 60.0}, tpot_s={"mean": 0.0075})
    plans = [
        deployed(pool(64, tokens, 12_000, "prefill"), pool(128, 1024, 12_000, "decode")) for tokens in (256, 1024, 8192)
    ]
    results = [plan.simulate(requests, slo) for plan in plans]
    means = [
        float((r.decode_s / np.maximum(requests.output_tokens - 1, 1))[requests.output_tokens > 1].mean())
        for r in results
    ]
    assert max(means) < min(means) * (1 + DECODE_MARGIN / 2), "prefill pools hardly matter"
    tight, loose = (slo.model_copy(update={"tpot_s": {"mean": min(means) * share}}) for share in (0.94, 0.97))
    for plan in plans:
        assert decodes_miss(plan, plan.simulate(requests, tight))
        assert not decodes_miss(plan, plan.simulate(requests, loose)), "within the margin nothing follows"
    mixed = deployed(pool(64, 1024, 6000))
    assert not decodes_miss(mixed, mixed.simulate(requests, tight))


def test_mixed_pools_say_nothing_of_first_tokens_alone() -> None:
    plan, slo = deployed(pool(8, 256, 6000)), Slo(ttft_s={"p90": 0.001})
    result = plan.simulate(stream(40.0), slo)
    assert not result.meets_slo
    assert not first_tokens_miss(plan, result)
