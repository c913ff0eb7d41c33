"""Prefill and decode pools on the same GPUs, searched: against plans written by hand and the costs of a share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simtune.costs.share import share_of
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.errors import Infeasible, SpecError
from simtune.sim.deployment import deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import KvLink, Plan
from simtune.specs.study import Confirmation, HardwareCount, Search, Study
from simtune.specs.workload import Lognormal, Poisson, Slo, Workload
from simtune.testing.clusters import stream_of
from simtune.tuner.bounds import rate_bound
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.space.candidates import Candidate, space_of

MODEL = load_model("llama-3.1-8b")
HARDWARE = load_hardware("l40s")
SPLIT = {"prefill": 0.4, "decode": 0.6}
ENDS = {
    "prefill": {"processors": 0.99, "bandwidth": 0.99, "kv_cache": 0.5},
    "decode": {"processors": 0.01, "bandwidth": 0.01, "kv_cache": 0.5},
}


def question(*variants: dict[str, Any], **keys: Any) -> Question:
    load = Workload(
        name="load",
        requests=300,
        arrivals=Poisson(rate_rps=2.0),
        prompt=Lognormal(mean_tokens=400, sigma=0.6, max_tokens=3000),
        output=Lognormal(mean_tokens=60, sigma=0.6, max_tokens=400),
    )
    search = {
        "layouts": ("prefill-decode",), "confirm": Confirmation(draws=0), "tp": (1,), "pp": (1,), "max_num_seqs": (64,),
        "max_num_batched_tokens": (2048,), "variants": variants, **keys.pop("search", {}),
    }  # fmt: skip
    study: dict[str, Any] = {
        "name": "shared",
        "model": MODEL.name,
        "hardware": (HardwareCount(profile="l40s", devices=2),),
        "workload": "load",
        "slo": Slo(ttft_s={"p90": 1.5}, tpot_s={"p90": 0.12}),
        "objective": "goodput_per_gpu",
        "link": KvLink(path="intra_node") if "prefill-decode" in search["layouts"] else None,
        "search": Search(**search),
    }
    return Question(Study(**{**study, **keys}), MODEL, (HARDWARE,), load, None)


def only(q: Question) -> tuple[Candidate, PlanCache]:
    candidates = space_of(q.study).candidates
    plan_cache = PlanCache(q, candidates)
    (candidate,) = candidates
    settled = plan_cache.settled(candidate)
    assert isinstance(settled, Candidate), settled
    return settled, plan_cache


def test_gpus_are_counted_once_and_the_memory_is_divided() -> None:
    candidate, plan_cache = only(question({"share": SPLIT}))
    assert (candidate.num_gpus, [pool.instances for pool in candidate.pools]) == (2, [2, 2])
    assert plan_cache.question.usd_per_hour(candidate) == 2 * (HARDWARE.device.price_per_hour_usd or 0.0)
    shared = [pool.memory for pool in plan_cache.deployment(candidate).pools]
    whole, own = only(question(search={"layouts": ("mixed",), "variants": None, "instances": (2,)}))
    (alone,) = [pool.memory for pool in own.deployment(whole).pools]
    assert shared[0].weights_bytes == shared[1].weights_bytes == alone.weights_bytes
    assert [memory.num_blocks / alone.num_blocks for memory in shared] == pytest.approx([0.4, 0.6], abs=1e-3)
    assert sum(memory.num_blocks for memory in shared) <= alone.num_blocks


def test_the_plan_is_the_one_written_by_hand() -> None:
    candidate, plan_cache = only(question({"share": SPLIT}))
    plan = plan_cache.deployment(candidate).plan
    common = "hardware: l40s, instances: 2, parallelism: {tp: 1, pp: 1, attention_dp: 1, expert_parallel: false}, "
    common += f"max_model_len: {plan_cache.max_model_len}, batching: {{max_num_seqs: 64, max_num_batched_tokens: 2048}}"
    shares = ("0.4, bandwidth: 0.4, kv_cache: 0.4", "0.6, bandwidth: 0.6, kv_cache: 0.6, beside: prefill")
    pools = (
        f"- {{name: {role}, role: {role}, {common}, share: {{processors: {share}}}}}\n"
        for role, share in zip(("prefill", "decode"), shares, strict=True)
    )
    link = "{bytes_per_s: 1.0e+18, setup_s: 0, descriptor_s: 0, first_token: prefill}"
    text = f"schema: simtune/plan@1\nname: by-hand\nmodel: llama-3.1-8b\nlink: {link}\npools:\n" + "".join(pools)
    by_hand = Plan.from_text(text)
    assert plan.link == by_hand.link
    of_search = {**plan.model_dump(exclude={"name"})}
    of_hand = {**by_hand.model_dump(exclude={"name"})}
    assert [pool["share"] for pool in of_search["pools"]] == [pool["share"] for pool in of_hand["pools"]]
    stream = plan_cache.stream(candidate)
    searched = plan_cache.question.deploy(candidate, plan_cache.max_model_len).simulate(stream)
    written = deploy(by_hand, MODEL, HARDWARE).simulate(stream)
    for column in ("first_token", "finish"):
        assert getattr(searched.outcome, column).tolist() == getattr(written.outcome, column).tolist()


@pytest.mark.parametrize("prefill", [0.3, 0.9])
def test_a_prompt_alone_takes_as_long_as_on_its_share(prefill: float) -> None:
    candidate, plan_cache = only(question({"share": {"prefill": prefill, "decode": round(1 - prefill, 2)}}))
    deployment = plan_cache.deployment(candidate)
    result = deployment.simulate(stream_of([0.0], [1000], [2]))
    pool = deployment.pools[0]
    ticks = pool.costs.mixed(0, 0, [(0, 1000)], 1)
    assert result.ttft_s[0] == pytest.approx(ticks / TICKS_PER_SECOND, rel=1e-9)
    assert pool.hardware == share_of(HARDWARE, prefill, prefill)


def test_the_ends_of_a_share_are_the_whole_device() -> None:
    """Prompts with 99 % of a device take as long as on all of it; decodes with 1 % are hopeless, and bounded so."""
    candidate, plan_cache = only(question({"share": ENDS}))
    apart, own = only(question({}))
    result = plan_cache.deployment(candidate).simulate(stream_of([0.0], [1500], [1]))
    whole = own.deployment(apart).pools[0].costs.mixed(0, 0, [(0, 1500)], 1) / TICKS_PER_SECOND
    assert result.ttft_s[0] == pytest.approx(whole, rel=0.04)
    assert plan_cache.capacity(candidate).by == "capacity of the decode pool"
    assert plan_cache.capacity(candidate).rps < 0.1 * own.capacity(apart).rps


def test_settings_of_one_role_cost_its_pool_alone() -> None:
    """Prefill and decode pools of one cut have the same step costs, unless a variant sets them apart."""
    for fragment, equal in (
        ({}, True),
        ({"decode": {"research": {"kv_policy": {"kept": 0.25}}}}, False),
        ({"share": SPLIT}, False),
    ):
        candidate, plan_cache = only(question(fragment))
        costs = [pool.costs for pool in plan_cache.deployment(candidate).pools]
        anew = [pool.costs for pool in plan_cache.question.deploy(candidate, plan_cache.max_model_len).pools]
        steps, of_anew = (
            [(c.decode(1, 1000)[0], c.mixed(0, 0, [(0, 1000)], 1)) for c in every] for every in (costs, anew)
        )
        assert (steps[0] == steps[1]) is equal
        for of_role, again in zip(steps, of_anew, strict=True):
            assert of_role == pytest.approx(again, rel=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_bounds_leave_a_plan_what_it_reaches(seed: int) -> None:
    draw = np.random.default_rng(seed)
    prefill = round(float(draw.uniform(0.2, 0.8)), 2)
    candidate, plan_cache = only(question({"share": {"prefill": prefill, "decode": round(1 - prefill, 2)}}, seed=seed))
    deployment = plan_cache.deployment(candidate)
    rate = plan_cache.capacity(candidate).rps * float(draw.uniform(0.3, 0.9))
    stream = plan_cache.stream(candidate).at_rate(rate)
    result = deployment.simulate(stream)
    slo = Slo(
        ttft_s={"p90": float(np.percentile(result.ttft_s, 90))},
        tpot_s={"p90": float(np.nanpercentile(result.tpot_s, 90))},
    )
    assert rate_bound(deployment, stream, slo).rps >= rate * (1 - 1e-9)


def test_the_chosen_split_is_the_best_of_all() -> None:
    """Each split by itself reaches no more than the one that is chosen, but for the tolerance."""
    splits = [{"share": {"prefill": p, "decode": d}} for p, d in ((0.2, 0.8), (0.4, 0.6), (0.7, 0.3))]
    tuned = optimize(question({}, *splits), jobs=1)
    alone = {}
    for variant in ({}, *splits):
        try:
            alone[str(variant)] = optimize(question(variant), jobs=1).value
        except Infeasible:
            alone[str(variant)] = 0.0
    assert len({round(value, 3) for value in alone.values()}) == 4
    assert tuned.value >= max(alone.values()) / 1.03
    assert tuned.bound >= max(alone.values()) * (1 - 1e-9)


def test_numbers_of_instances_and_cuts_are_equal() -> None:
    search = {"tp": (1, 2), "layouts": ("mixed", "prefill-decode")}
    hardware = (HardwareCount(profile="l40s", devices=4),)
    plans = space_of(question({"share": SPLIT}, search=search, hardware=hardware, objective="gpus").study).candidates
    assert all(len(plan.pools) == 2 for plan in plans), "the variant has no mixed plans"
    shapes = sorted((p.pools[0].shape.tp, p.pools[0].instances, p.num_gpus) for p in plans)
    assert shapes == [(1, 1, 1), (1, 2, 2), (1, 3, 3), (1, 4, 4), (2, 1, 2), (2, 2, 4)]
    for plan in plans:
        prefill, decode = plan.pools
        assert (prefill.shape.tp, prefill.instances) == (decode.shape.tp, decode.instances)


def test_pools_of_one_process_have_one_memory() -> None:
    variant = {"share": SPLIT, "decode": {"kv_cache": {"memory_utilization": 0.5}}}
    candidates = space_of(question(variant).study).candidates
    settled = PlanCache(question(variant), candidates).settled(candidates[0])
    assert isinstance(settled, Refused)
    assert "set the same kv_cache.memory_utilization for both" in settled.reason


STUDY = """\
schema: simtune/study@1
name: shared
model: llama-3.1-8b
hardware: {profile: l40s, devices: 4}
workload: chat
slo: {ttft_s: {p95: 1.0}}
"""


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("{share: {prefill: 0.4}}", "search.variants.0.share: lacks decode, which is required"),
        (
            "{share: {prefill: 0.4, decode: 0.7}}",
            "search.variants.0.share: shares of processors come to 1.1, more than",
        ),
        (
            "{decode: {share: {processors: 0.4}}}",
            "decode.share: is of both pools; write share: {prefill: 0.4, decode: 0.6}",
        ),
        ("{spare: 1, share: {prefill: 0.4, decode: 0.6}}", "share and spare cannot be combined; write them as two"),
    ],
)
def test_shares_that_make_no_sense_are_refused_with_their_place(variant: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        Study.from_text(STUDY + f"search: {{layouts: [prefill-decode], variants: [{variant}]}}\n")
    assert message in str(error.value)


def test_shares_need_prefill_and_decode_pools() -> None:
    with pytest.raises(
        SpecError, match=r"search\.variants\.0\.share: has no effect if all plans have only mixed pools"
    ):
        Study.from_text(STUDY + "search: {variants: [{share: {prefill: 0.4, decode: 0.6}}]}\n")
