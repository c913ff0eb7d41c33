"""The space: what a study spans, and what never gets into it."""

from __future__ import annotations

from typing import Any

import pytest

from simtune.errors import Infeasible, SpecError, UsageError
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.constraints import Constraint
from simtune.specs.pool import Batching, Pool
from simtune.specs.routing import OwnRouting
from simtune.specs.study import HardwareCount, PoolChoices, Search, Study, StudyBatching, StudyLimits
from simtune.specs.workload import FixedLength, Poisson, Slo, Workload
from simtune.tuner.question import Question
from simtune.tuner.question_checks import check
from simtune.tuner.space.candidates import Candidate, Space, space_of
from simtune.tuner.space.census import census

H100 = (HardwareCount(profile="h100-sxm", devices=8),)
TWO_KINDS = (HardwareCount(profile="h100-sxm", devices=4), HardwareCount(profile="l40s", devices=2))


def study(hardware: Any = H100, objective: Any = "goodput_per_gpu", given: Any = None, **search: Any) -> Study:
    one = {"max_num_seqs": (64,), "max_num_batched_tokens": (2048,), "pp": (1,)}
    return Study(
        name="s",
        model="llama-3.1-8b",
        hardware=hardware,
        workload="chat",
        slo=Slo(ttft_s={"p99": 1.0}),
        objective=objective,
        search=Search(**{**one, **search}),
        **(given or {}),
    )


def cuts(study: Study) -> list[tuple[int, int, int]]:
    pools = [candidate.decoding for candidate in space_of(study).candidates]
    return [(pool.shape.tp, pool.shape.pp, pool.instances) for pool in pools]


def pairs(study: Study) -> list[tuple[int, int]]:
    return [tuple(pool.instances for pool in candidate.pools) for candidate in space_of(study).candidates]  # type: ignore[misc]


def devices(count: int) -> tuple[HardwareCount, ...]:
    return (HardwareCount(profile="h100-sxm", devices=count),)


# --- one pool ---------------------------------------------------------------------------------------------


def test_every_cut_that_the_devices_allow_uses_all_of_them() -> None:
    asked = study(tp=(1, 2, 4, 8), pp=(1, 2))
    assert cuts(asked) == [(1, 1, 8), (1, 2, 4), (2, 1, 4), (2, 2, 2), (4, 1, 2), (4, 2, 1), (8, 1, 1)]
    assert all(candidate.num_gpus == 8 for candidate in space_of(asked).candidates)
    assert cuts(study(devices(6), tp=(4,))) == [(4, 1, 1)]
    with pytest.raises(Infeasible, match=r"no tp x pp .* fits 1 h100-sxm devices"):
        space_of(study(devices(1), tp=(2, 4)))


def test_counting_gpus_makes_every_number_of_instances_a_plan() -> None:
    found = cuts(study(devices(4), objective="gpus", tp=(1, 2)))
    assert found == [(1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 1, 4), (2, 1, 1), (2, 1, 2)]
    assert cuts(study(devices(4), tp=(1,), instances=(2, 9))) == [(1, 1, 2)]
    fewer = study(devices(4), objective="gpus", tp=(1,), given={"limits": StudyLimits(gpus=2)})
    assert cuts(fewer) == [(1, 1, 1), (1, 1, 2)]


def test_candidates_and_their_plans() -> None:
    asked = study(tp=(2,), max_num_seqs=(64, 128, 64))
    found = space_of(asked).candidates
    assert [candidate.name for candidate in found] == ["tp2-pp1-x4-s64-t2048", "tp2-pp1-x4-s128-t2048"]
    plan = found[1].plan(asked, 4096)
    (pool,) = plan.pools
    assert plan.name == found[1].name
    assert (pool.parallelism.tp, pool.instances, pool.batching.max_num_seqs, pool.max_model_len) == (2, 4, 128, 4096)
    assert plan.num_devices == 8


def test_a_study_says_policy_and_router_of_all_its_plans() -> None:
    plain = study(devices(2), tp=(1,))
    (candidate,) = space_of(plain).candidates
    assert candidate.plan(plain, 4096).pools[0].batching.policy == "vllm-fcfs"
    asked = plain.model_copy(
        update={
            "batching": StudyBatching(policy="shortest-predicted-first", prediction_sigma=0.1),
            "router": OwnRouting(kind="mine.router:Mine", options={"a": 1}),
        }
    )
    plan = candidate.plan(asked, 4096)
    batching = plan.pools[0].batching
    assert (batching.policy, batching.prediction_sigma, batching.max_num_seqs) == ("shortest-predicted-first", 0.1, 64)
    assert isinstance(plan.router, OwnRouting)
    assert (plan.router.kind, plan.router.options) == ("mine.router:Mine", {"a": 1})


def test_everything_else_that_can_be_searched_of_a_pool() -> None:
    asked = Study.from_text(
        "schema: simtune/study@1\nname: s\nmodel: qwen3-30b-a3b\nhardware: {profile: h200-sxm, devices: 8}\n"
        "workload: chat\nslo: {ttft_s: {p99: 1}}\n"
        "search: {tp: [1, 2], pp: [1], attention_dp: [1, 4], expert_parallel: [false, true], kv_dtype: [bf16, fp8],\n"
        "  max_num_seqs: [64], max_num_batched_tokens: [2048], prefix_caching: [false, true],\n"
        "  routers: [{kind: round_robin}, {kind: least_outstanding}]}\n"
    )
    found = space_of(asked).candidates
    assert len(found) == len({candidate.name for candidate in found}) == 2**6
    last = found[-1].plan(asked, 4096)
    (pool,) = last.pools
    assert last.name == "tp2-pp1-dp4-ep-kv-fp8-x1-s64-t2048-cached-router2"
    assert (pool.parallelism.attention_dp, pool.parallelism.expert_parallel, pool.devices) == (4, True, 8)
    assert (pool.kv_cache.dtype, pool.kv_cache.prefix_caching, last.router.kind) == ("fp8", True, "least_outstanding")


# --- prefill and decode -----------------------------------------------------------------------------------


def test_ratios_of_prefill_to_decode_instances() -> None:
    apart: dict[str, Any] = {"layouts": ("prefill-decode",), "tp": (1,)}
    assert pairs(study(devices(4), objective="goodput", **apart)) == [(1, 3), (2, 2), (3, 1)]
    # What a GPU does is the same for (1, 1) and (2, 2): each ratio is there once, as large as it fits.
    assert pairs(study(devices(4), **apart)) == [(1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]
    every = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]
    assert pairs(study(devices(4), objective="gpus", **apart)) == every
    assert pairs(study(devices(4), objective="gpus", **apart, decode=PoolChoices(instances=(2,)))) == [(1, 2), (2, 2)]


def test_each_role_may_be_searched_in_its_own_way() -> None:
    asked = study(
        TWO_KINDS,
        objective="goodput",
        layouts=("mixed", "prefill-decode"),
        tp=(1, 2),
        max_num_seqs=(64, 512),
        max_num_batched_tokens=(256, 2048),
        prefill=PoolChoices(gpus=("l40s",), tp=(1,)),
        decode=PoolChoices(gpus=("h100-sxm",), max_num_seqs=(512,)),
    )
    found = space_of(asked).candidates
    mixed = [candidate for candidate in found if candidate.prefilling is None]
    apart = [candidate for candidate in found if candidate.prefilling is not None]
    assert len(mixed) == (2 + 2) * 4
    # Two budgets of the prefill pool; as many seats as go with them, and the smallest budget of the decode pool.
    assert [candidate.name for candidate in apart] == [
        f"p.l40s-tp1-pp1-x2-s{seats}-t{budget}_d.h100-sxm-{decode}-s512-t2048"
        for seats, budget in ((64, 256), (512, 2048))
        for decode in ("tp1-pp1-x4", "tp2-pp1-x2")
    ]
    plan = apart[-1].plan(asked, 4096)
    assert [(pool.name, pool.role, pool.hardware) for pool in plan.pools] == [
        ("prefill", "prefill", "l40s"),
        ("decode", "decode", "h100-sxm"),
    ]
    assert plan.link is not None
    assert plan.num_devices == 6


def test_a_pool_that_stays_as_it_is() -> None:
    decode = Pool(
        name="theirs",
        role="decode",
        hardware="h100-sxm",
        instances=3,
        batching=Batching(max_num_seqs=96, max_num_batched_tokens=1024),
    )
    asked = study(objective="goodput", layouts=("prefill-decode",), tp=(1, 2), given={"fixed": (decode,)})
    found = space_of(asked).candidates
    assert [(c.pools[0].shape.tp, c.pools[0].instances) for c in found] == [(1, 5), (2, 2)]
    for candidate in found:
        kept = candidate.plan(asked, 4096).pools[1]
        assert kept == decode.model_copy(update={"max_model_len": 4096})
    with pytest.raises(ValueError, match="pools of both; write layouts"):
        study(given={"fixed": (decode,)})


# --- constraints ------------------------------------------------------------------------------------------


def test_constraints_leave_plans_out_and_are_counted() -> None:
    texts = ("tp <= 2 or gpu != 'l40s'", "devices >= 2", "num_gpus < 4 or tp in [1, 2]")
    asked = study(TWO_KINDS, tp=(1, 2, 4), given={"constraints": texts})
    space = space_of(asked)
    assert [candidate.name for candidate in space.candidates] == [
        "h100-sxm-tp1-pp1-x4-s64-t2048",
        "h100-sxm-tp2-pp1-x2-s64-t2048",
        "l40s-tp1-pp1-x2-s64-t2048",
        "l40s-tp2-pp1-x1-s64-t2048",
    ]
    assert space.left_out == {texts[2]: 1}


def test_constraints_over_both_pools() -> None:
    text = "decode.instances >= 2 * prefill.instances and prefill.tp == decode.tp"
    apart: dict[str, Any] = {"layouts": ("mixed", "prefill-decode"), "tp": (1, 2)}
    asked = study(objective="goodput", **apart, given={"constraints": (text,)})
    found = [candidate for candidate in space_of(asked).candidates if candidate.prefilling is not None]
    assert {(c.pools[0].shape.tp, *(pool.instances for pool in c.pools)) for c in found} == {
        (1, 1, 7),
        (1, 2, 6),
        (2, 1, 3),
    }
    assert len(space_of(asked).candidates) == len(found) + 2, "a mixed pool has neither"


def test_constraints_that_contradict_each_other_are_named() -> None:
    texts = ("instances >= 1", "tp > 2", "pp == 1", "tp * instances > 4 and tp < 4")
    with pytest.raises(
        Infeasible, match=r"`tp > 2` and `tp \* instances > 4 and tp < 4` contradict each other"
    ) as all_of:
        space_of(study(tp=(1, 2, 4), given={"constraints": texts}))
    assert "instances >= 1" not in str(all_of.value)
    with pytest.raises(Infeasible, match="`tp > 8` holds for none"):
        space_of(study(tp=(1, 2, 4), given={"constraints": ("tp > 8",)}))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tpp <= 4", "there is no setting 'tpp', did you mean tp?"),
        ("prefil.tp <= 4", "there is no pool 'prefil', did you mean prefill?"),
        ("decode.seats <= 4", "a pool has no 'seats'"),
        ("tp <=", "is no expression; write it like"),
        ("__import__('os').system('true')", "only comparisons"),
        ("tp.__class__ == 1", "there is no pool 'tp'"),
        ("tp ** 9999999 > 1", "only comparisons"),
        ("[x for x in [1]] == [1]", "only comparisons"),
        ("(lambda: 1)() == 1", "only comparisons"),
    ],
)
def test_what_is_no_constraint_is_said_with_its_place(text: str, why: str) -> None:
    written = (
        "schema: simtune/study@1\nname: s\nmodel: m\nhardware: {profile: h100-sxm, devices: 1}\n"
        f'workload: chat\nslo: {{ttft_s: {{p99: 1}}}}\nconstraints:\n  - tp >= 1\n  - "{text}"\n'
    )
    with pytest.raises(SpecError) as caught:
        Study.from_text(written, "study.yaml")
    assert str(caught.value).startswith("study.yaml:9:5: constraints.1: ")
    assert why in str(caught.value)


def test_settings_that_cannot_be_compared_are_said() -> None:
    with pytest.raises(UsageError, match="constraint 'gpu < 4'"):
        Constraint("gpu < 4").holds({"gpu": "l40s"}, {})


# --- what is left out -------------------------------------------------------------------------------------


def question(asked: Study, model: str = "llama-3.1-8b", hardware: Any = None) -> Question:
    load = Workload(
        name="load",
        requests=50,
        arrivals=Poisson(rate_rps=4.0),
        prompt=FixedLength(tokens=300),
        output=FixedLength(tokens=30),
    )
    profiles = hardware or tuple(load_hardware(entry.profile) for entry in asked.hardware)
    return Question(asked.model_copy(update={"model": model}), load_model(model), profiles, load, None)


def test_the_census_says_what_is_left_out_and_why() -> None:
    asked = study(
        tp=(1, 3, 4, 8), max_num_seqs=(64, 4096), max_num_batched_tokens=(2048,), given={"constraints": ("tp < 8",)}
    )
    found = census(question(asked, "llama-3.1-70b"))
    assert (found.plans, found.shapes) == (1, 1)
    assert found.left_out["constraint `tp < 8`"] == 2
    assert found.left_out["weights and KV cache do not fit the memory"] == 1
    assert found.left_out["vLLM: parallelism.tp: 3 does not divide the 64 attention heads of llama-3.1-70b"] == 1
    refused = "vLLM: batching: vLLM requires max_num_batched_tokens to be at least max_num_seqs"
    assert found.left_out[refused] == 3
    assert sum(found.left_out.values()) + found.plans == 8


@pytest.mark.parametrize("objective", ["goodput", "goodput_per_gpu", "e2el"])
def test_a_budget_that_does_not_pay_for_all_devices_leaves_plans_with_fewer(objective: str) -> None:
    search = {"layouts": ("mixed", "prefill-decode"), "mixed_kinds": True, "tp": (1,)}
    asked = study(TWO_KINDS, objective, {"limits": StudyLimits(usd_per_hour=9.0)}, **search)
    used = [
        {gpu: sum(pool.devices for pool in plan.pools if pool.shape.gpu == gpu) for gpu in ("h100-sxm", "l40s")}
        for plan in space_of(asked).candidates
    ]
    every = [{"h100-sxm": h, "l40s": l40s} for h in range(5) for l40s in range(3) if h + l40s]
    assert all(number in used for number in every)


def test_dollars_need_prices() -> None:
    hardware = load_hardware("h100-sxm")
    free = hardware.model_copy(update={"device": hardware.device.model_copy(update={"price_per_hour_usd": None})})
    for objective, limits in (("goodput_per_dollar", StudyLimits()), ("goodput", StudyLimits(usd_per_hour=3.0))):
        asked = study(objective=objective, given={"limits": limits})
        with pytest.raises(UsageError, match=r"needs prices, but hardware profile h100-sxm has none"):
            check(question(asked, hardware=(free,)))


def test_one_kind_of_hardware_is_written_without_a_list() -> None:
    assert study().to_data()["hardware"] == {"profile": "h100-sxm", "devices": 8}
    two = study(TWO_KINDS)
    assert Study.model_validate({k: v for k, v in two.to_data().items() if k != "schema"}, strict=False) == two
    assert isinstance(Candidate.mixed("h100-sxm", 1, max_num_seqs=1, max_num_batched_tokens=1).key, tuple)


def test_a_reason_without_plans_is_left_out() -> None:
    """One plan of each pool that cannot be stays among the candidates; where it is the only one, none is left out."""
    assert Space((), {}, unfit={"no room": 0, "no link": 2}).reasons == {"no link": 2}
