"""Tiers below the prefix caches of instances, in time: none, without limits, and what a hit takes."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import ValidationError

from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.errors import Infeasible
from simtune.results.result import Result
from simtune.sim.deployment import deploy
from simtune.sim.tier_links import TierMaker
from simtune.specs.adapters import Lora
from simtune.specs.cache_tiers import PUBLISHED_TIERS, CacheTier
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.plan_events import Failure
from simtune.specs.pool import Batching, KvCache, Pool
from simtune.specs.workload import FixedLength, Lognormal, Poisson, Sessions, SharedPrefix, Workload
from simtune.workload.requests import build_stream

CHAT = Workload(
    name="w",
    arrivals=Poisson(rate_rps=3.0),
    prompt=Lognormal(mean_tokens=200, sigma=0.6, max_tokens=600),
    output=FixedLength(tokens=30),
    sessions=Sessions(follow="arrivals", concurrent=40, turns=5),
)
"""Conversations of which few fit a cache of 600 blocks, and all the requests at once do."""
TOKEN_BYTES = 131_072
FAST = 1e24
LATER = [("vllm-fcfs", 16), ("sglang", 1), ("tensorrt-llm", 32)]


def run(
    load: Workload,
    policy: str,
    block: int,
    tokens: int,
    *tiers: CacheTier,
    requests: int = 100,
    events: tuple[Failure, ...] = (),
    **more: Any,
) -> Result:
    batching = Batching.model_validate(
        {"policy": policy, "max_num_seqs": 64, "max_num_batched_tokens": 8192}, strict=False
    )
    cache = KvCache(num_blocks=tokens // block + 1, block_size=block, prefix_caching=True, tiers=tiers or None)
    pool = Pool(hardware="h100-sxm", instances=1, batching=batching, max_model_len=8192, kv_cache=cache, **more)
    plan = Plan(name="p", model="llama-3.1-8b", pools=(pool,), events=events)
    stream = build_stream(load, None, requests=requests, seed=3)
    return deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm")).simulate(stream)


@pytest.mark.parametrize(
    ("policy", "block", "fetched"), [*((*policy, "before") for policy in LATER), ("vllm-fcfs", 16, "ahead")]
)
def test_a_tier_of_size_0_changes_no_tick(policy: str, block: int, fetched: Any) -> None:
    tier = CacheTier(name="a", bytes=0, bytes_per_s=1.0, fetched=fetched)
    without, none = (run(CHAT, policy, block, 9600, *tiers) for tiers in ((), (tier,)))
    assert none.outcome.finish.tolist() == without.outcome.finish.tolist()
    (use,) = none.summary().cache_tiers
    assert use.hit_tokens == 0


@pytest.mark.parametrize(("policy", "block"), LATER)
@pytest.mark.parametrize("written", ["computed", "evicted"])
def test_an_unlimited_tier_behind_an_infinite_link_is_an_unlimited_cache(policy: str, block: int, written: Any) -> None:
    tier = CacheTier(name="host", bytes_per_s=FAST, written=written)
    small, large = run(CHAT, policy, block, 19_200, tier), run(CHAT, policy, block, 960_000)
    assert small.outcome.finish.tolist() == large.outcome.finish.tolist()
    assert small.outcome.first_token.tolist() == large.outcome.first_token.tolist()
    (all_hits,), (large_hits,) = small.summary().prefix_cache, large.summary().prefix_cache
    assert all_hits == large_hits
    (tier_hits,) = small.summary().cache_tiers
    assert 0.05 * all_hits.hit_tokens < tier_hits.hit_tokens < all_hits.hit_tokens


ONE_BY_ONE = CHAT.model_copy(
    update={
        "arrivals": Poisson(rate_rps=0.01),
        "prompt": FixedLength(tokens=1601),
        "sessions": None,
        "shared_prefix": SharedPrefix(groups=8, tokens=1600),
    }
)
"""Requests that come one after the other; few of the texts with which they begin fit the device's cache."""


@pytest.mark.parametrize("fetched", ["before", "beside"])
def test_a_hit_takes_its_bytes_over_the_link(fetched: Any) -> None:
    rate, latency, prefill, found = 2e8, 0.002, {}, 0
    for link, extra in ((FAST, 0.0), (rate, latency)):
        tier = CacheTier(name="host", bytes_per_s=link, latency_s=extra, fetched=fetched)
        result = run(ONE_BY_ONE, "vllm-fcfs", 16, 8192, tier, requests=30)
        prefill[link] = result.outcome.first_token - result.outcome.scheduled
        found = result.summary().cache_tiers[0].hit_tokens
    fetching = prefill[rate] > prefill[FAST]
    waits = prefill[rate] - prefill[FAST] if fetched == "before" else prefill[rate][fetching]
    assert found > 4000
    ticks = (found * TOKEN_BYTES / rate + fetching.sum() * latency) * TICKS_PER_SECOND
    assert waits.sum() == pytest.approx(ticks, rel=0, abs=int(fetching.sum())), "but for rounding to ticks"


def test_a_request_waits_for_what_it_loads_ahead_of_admission() -> None:
    """Nothing else runs, so the first token is later by what the bytes take."""
    rate, latency, ttft, found = 2e8, 0.002, {}, 0
    for link, extra in ((FAST, 0.0), (rate, latency)):
        tier = CacheTier(name="host", bytes=1e12, bytes_per_s=link, latency_s=extra, fetched="ahead")
        result = run(ONE_BY_ONE, "vllm-fcfs", 16, 8192, tier, requests=30)
        ttft[link] = result.outcome.first_token - result.outcome.arrival
        found = result.summary().cache_tiers[0].hit_tokens
    loading = ttft[rate] > ttft[FAST]
    assert found > 4000
    ticks = (found * TOKEN_BYTES / rate + loading.sum() * latency) * TICKS_PER_SECOND
    assert (ttft[rate] - ttft[FAST]).sum() == pytest.approx(ticks, rel=0, abs=int(loading.sum()))


def test_others_step_on_while_a_request_loads() -> None:
    """Over a slow link a step that fetches keeps all requests waiting, a request that loads ahead only itself."""
    intervals: dict[str, float] = {}
    ways: tuple[Literal["before", "ahead"], ...] = ("before", "ahead")
    for fetched in ways:
        tier = CacheTier(name="host", bytes=1e12, bytes_per_s=1e8, fetched=fetched)
        summary = run(CHAT, "vllm-fcfs", 16, 9600, tier).summary()
        assert summary.cache_tiers[0].hit_tokens > 1000
        intervals[fetched] = summary.metrics["itl"].p99 or 0.0
    assert 0.0 < intervals["ahead"] < 0.1 * intervals["before"]


def test_requests_that_load_are_lost_with_their_instance_and_sent_again() -> None:
    """It fails while requests load over a slow link; every request is answered in the end."""
    tier = CacheTier(name="host", bytes=1e12, bytes_per_s=2e7, fetched="ahead")
    failures = tuple(Failure(at_s=at_s, pool="mixed", instance=0, recover_s=0.5) for at_s in (8.0, 16.0, 24.0))
    result = run(CHAT, "vllm-fcfs", 16, 9600, tier, events=failures)
    assert result.summary().completed == 100
    assert result.summary().resent > 0


def test_fetches_wait_for_each_other_and_tiers_do_not() -> None:
    host, disk = (
        CacheTier(name="host", bytes_per_s=2.0**20, fetched="beside"),
        CacheTier(name="disk", bytes_per_s=2.0**17),
    )
    store = CacheTier(name="store", bytes_per_s=2.0**20, shared=True)
    ms = TICKS_PER_SECOND // 1024  # of a token from host or store
    maker = TierMaker((host, disk, store), block_bytes=16 * 1024, block_size=16)
    (one, first), (two, second), (three, third) = (maker.of_instance(number) for number in (0, 0, 1))
    assert one.tiers[0].store is two.tiers[0].store is not three.tiers[0].store
    assert one.tiers[2].store is three.tiers[2].store
    one.fetch((20, 0, 0), (), True)
    assert first.around(0, 5 * ms) == 20 * ms, "layer by layer, beside the step"
    one.fetch((10, 1, 0), (), True)
    assert first.around(20 * ms, 5 * ms) == 13 * ms, "the disk's before it; the host's are there by then"
    two.fetch((0, 0, 7), (), True)
    three.fetch((0, 0, 7), (), True)
    assert second.around(50 * ms, ms) == 8 * ms
    assert third.around(50 * ms, ms) == 15 * ms, "after the other's, over the same link"
    assert third.around(90 * ms, ms) == ms


def test_tiers_extend_a_cache_that_can_have_some() -> None:
    tier = {"name": "host", "bytes_per_s": 1e9}
    with pytest.raises(ValueError, match="requires a prefix cache"):
        KvCache.model_validate({"tiers": (tier,)})
    with pytest.raises(ValueError, match="is the name of another tier"):
        KvCache.model_validate({"prefix_caching": True, "tiers": (tier, tier)})
    with pytest.raises(Infeasible, match="policy transformers-fifo has no tiers"):
        run(CHAT, "transformers-fifo", 16, 9600, CacheTier(name="host", bytes_per_s=1e9))
    ahead = CacheTier(name="host", bytes=1e9, bytes_per_s=1e9, fetched="ahead")
    with pytest.raises(Infeasible, match="policy sglang fetches within steps; set fetched of the tier to before"):
        run(CHAT, "sglang", 1, 9600, ahead)
    with pytest.raises(Infeasible, match="lora and a tier with fetched: ahead are mutually exclusive"):
        run(CHAT, "vllm-fcfs", 16, 9600, ahead, lora=Lora(slots=2, rank=8))
    with pytest.raises(ValueError, match="must have one tier only with fetched: ahead"):
        KvCache.model_validate({"prefix_caching": True, "tiers": ({**tier, "bytes": 1.0, "fetched": "ahead"}, tier)})


def pool_of(**kv_cache: Any) -> Pool:
    cache = {"num_blocks": 601, "block_size": 16, "prefix_caching": True, **kv_cache}
    usual = {"hardware": "h100-sxm", "instances": 1, "max_model_len": 8192, "parallelism": {"tp": 2}}
    batching = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
    return Pool.model_validate({**usual, "batching": batching, "kv_cache": cache}, strict=False)


def test_sizes_and_rates_that_are_left_out_are_those_of_the_device_and_its_host_link() -> None:
    hardware = load_hardware("h100-sxm")
    for size, expected in (
        ({"device_ratio": 2.0}, 2.0 * 600 * 16 * TOKEN_BYTES),
        ({"bytes_per_device": 5e9}, 1e10),
        ({"bytes": 7e9}, 7e9),
        ({}, None),
    ):
        plan = Plan(name="p", model="llama-3.1-8b", pools=(pool_of(tiers=[{"name": "host", **size}]),))
        (pool,) = deploy(plan, load_model("llama-3.1-8b"), hardware).pools
        (tier,) = pool.tiers
        assert tier.bytes == expected
        assert tier.bytes_per_s == 2 * hardware.links["host"].bytes_per_s


def test_a_published_cache_by_name_is_its_tiers() -> None:
    for name, tiers in PUBLISHED_TIERS.items():
        named, listed = pool_of(tiers=name), pool_of(tiers=[dict(tier) for tier in tiers])
        assert named == listed
        assert named.kv_cache.tiers
    with pytest.raises(ValidationError, match="'lmcahe' is no published cache, did you mean lmcache"):
        pool_of(tiers="lmcahe")


@pytest.mark.parametrize(("tier", "message"), [
    ({"bytes": 1e9, "device_ratio": 2.0}, "cannot be combined with bytes; keep one size"),
    ({"device_ratio": 2.0, "shared": True, "bytes_per_s": 1e9}, "is of one instance; give bytes"),
    ({"shared": True}, "is required of a tier that instances share"),
    ({"fetched": "ahead"}, "is required of a tier from which requests fetch ahead of admission"),
    ({"fetched": "ahead", "bytes": 1e9, "shared": True}, "cannot be combined with fetched: ahead"),
    ({"fetched": "ahead", "bytes": 1e9, "written": "evicted"}, "must be computed with fetched: ahead"),
])  # fmt: skip
def test_sizes_that_mean_nothing_are_refused(tier: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CacheTier.model_validate({"name": "host", **tier})
