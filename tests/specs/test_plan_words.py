"""Plans in words: what a code name says, what only some plans of a list have, names inside sentences."""

from __future__ import annotations

from itertools import product
from typing import Literal

import pytest

from simtune.specs.autoscaling import Autoscaling, RateRule
from simtune.specs.plan import KvLink, Plan
from simtune.specs.plan_words import differing, in_words, of_plan, sentence_in_words, shared
from simtune.specs.pool import Batching, Parallelism, Pool
from simtune.tuner.space.candidates import Candidate, PoolChoice, PoolShape

PREFILL_DECODE = "p.tp2-pp1-x2-s64-t8192_d.tp4-pp1-x1-s256-t8192"


def choice(shape: PoolShape, instances: int = 1, seats: int = 256, budget: int = 8192, **others: object) -> PoolChoice:
    return PoolChoice(shape, instances, seats, budget, **others)  # type: ignore[arg-type]


def every_kind_of_plan() -> list[Candidate]:
    """Plans that differ in every part of a code name, with and without the GPU in it."""
    shapes = [
        PoolShape("h100-sxm", tp, pp, dp, ep, kv, weight_dtype=weights)
        for tp, pp, dp in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2))
        for ep in (False, True)
        for kv, weights in (("", ""), ("fp8", ""), ("", "fp8_block"), ("fp8", "fp8_block"))
    ]
    plans = [Candidate((choice(shape),)) for shape in shapes]
    settings = product((1, 8), (128, 256), (2048, 8192), (None, True, False), ("", "ngram", "eagle3"))
    for instances, seats, budget, caching, drafter in settings:
        plans.append(
            Candidate(
                (choice(shapes[0], instances, seats, budget, prefix_caching=caching, drafter=drafter),),
                router=len(plans) % 3,
            )
        )
    for prefill, decode in product((1, 2), (1, 4)):
        pools = (PoolShape("h100-sxm", prefill, role="prefill"), PoolShape("l40s", decode, role="decode"))
        for labels, seats in product((False, True), (64, 256)):
            pair = (choice(pools[0], 2, seats), choice(pools[1], drafter="eagle3"))
            plans.append(Candidate(pair, gpu_labels=labels))
    beside = (PoolShape("h100-sxm", 1), PoolShape("rtx-pro-6000.v2", 2))
    plans.append(Candidate((choice(beside[0], 3), choice(beside[1])), gpu_labels=True))
    return list({plan.name: plan for plan in plans}.values())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tp1-pp1-x8-s256-t8192", "8 servers of 1 GPU, 256 seats, 8,192 tokens a step"),
        ("tp2-pp1-x1-s256-t8192", "1 server of 2 GPUs, 256 seats, 8,192 tokens a step"),
        (
            PREFILL_DECODE,
            "2 prefill servers of 2 GPUs with 64 seats, 1 decode server of 4 GPUs with 256 seats, 8,192 tokens a step",
        ),
        (
            "h100-sxm-tp1-pp1-x3-s256-t8192_l40s-tp2-pp2-dp2-ep-x1-s256-t8192-router2",
            "3 servers of 1 h100-sxm GPU, 1 server of 8 l40s GPUs (tp 2, pp 2, dp 2, expert parallel), 256 seats, "
            "8,192 tokens a step, router 2",
        ),
        (
            "tp1-pp2-w-fp8_block-kv-fp8-x1-s1-t8192-uncached-eagle3",
            "1 server of 2 GPUs (pp 2), 1 seat, 8,192 tokens a step, prefix cache off, fp8_block weights, "
            "fp8 KV cache, drafts of eagle3",
        ),
        (
            "tp1-pp1-dp2-cp2-ffn3-ep-len8192-v-cp-2-and-ffn-devices-3-x1-s64-t8192",
            "1 server of 7 GPUs (dp 2, cp 2, expert parallel, 3 for experts), 64 seats, 8,192 tokens a step, "
            "requests of up to 8,192 tokens, variant cp-2 and ffn-devices-3",
        ),
        (
            "p.tp1-pp1-v-kept-0.25-x2-s64-t8192_d.tp1-pp1-v-kept-0.25-x1-s64-t8192-eagle3-router2",
            "2 prefill servers of 1 GPU, 1 decode server of 1 GPU with drafts of eagle3, 64 seats, "
            "8,192 tokens a step, variant kept-0.25, router 2",
        ),
        ("my plan", "my plan"),
    ],
)
def test_code_name_is_put_in_words(name: str, words: str) -> None:
    assert in_words(name) == words


def test_every_kind_of_plan_has_words_of_its_own() -> None:
    names = [plan.name for plan in every_kind_of_plan()]
    assert len({in_words(name) for name in names}) == len(names)
    assert not [name for name in names if in_words(name) == name]
    assert len({*differing(names).values()}) == len(names)


def test_words_have_the_servers_and_gpus_of_the_plan() -> None:
    for plan in every_kind_of_plan():
        words = in_words(plan.name)
        for pool in plan.pools:
            servers = f"{pool.instances} {'' if pool.shape.role == 'mixed' else pool.shape.role + ' '}server"
            assert servers in words
            assert f"{pool.max_num_seqs} seat" in words
            gpu = f"{pool.shape.gpu} GPU" if plan.gpu_labels else "GPU"
            assert f"of {pool.shape.devices} {gpu}" in words


def test_a_plan_file_has_the_words_of_its_pools() -> None:
    batching = Batching(max_num_seqs=256, max_num_batched_tokens=8192)
    kinds: list[tuple[Literal["prefill", "decode"], int, int]] = [("prefill", 2, 2), ("decode", 1, 4)]
    pools = [
        Pool(name=role, role=role, hardware="h100-sxm", instances=n, parallelism=Parallelism(tp=tp), batching=batching)
        for role, n, tp in kinds
    ]
    plan = Plan(name="mine", model="llama-3.1-8b", pools=tuple(pools), link=KvLink())
    words = "2 prefill servers of 2 GPUs, 1 decode server of 4 GPUs, 256 seats, 8,192 tokens a step"
    assert of_plan(plan).words() == words
    assert of_plan(plan).gpus == plan.num_devices == 8
    assert of_plan(plan.model_copy(update={"name": PREFILL_DECODE})).words() == in_words(PREFILL_DECODE)
    assert of_plan(plan.model_copy(update={"name": "tp1-pp1-x2-s64-t8192"})).words() == words, "GPUs that it leaves out"
    scaling = Autoscaling(rule=RateRule(requests_per_s=2.0), startup_s=60.0, max_instances=2)
    scaled = plan.model_copy(update={"pools": (pools[0].model_copy(update={"autoscaling": scaling}), pools[1])})
    assert of_plan(scaled).words() == f"1 to {words}"
    assert of_plan(scaled).gpus == 8
    assert of_plan(scaled.model_copy(update={"name": PREFILL_DECODE})).words() == f"1 to {words}", "no code name has it"


def test_ranks_by_load_are_settings_of_a_pool() -> None:
    pool = Pool(
        hardware="h100-sxm",
        instances=1,
        parallelism=Parallelism(attention_dp=8, expert_parallel=True, expert_replicas=64, elastic_experts=True),
        batching=Batching(max_num_seqs=256, max_num_batched_tokens=8192),
        autoscaling=Autoscaling(rule=RateRule(requests_per_s=2.0), startup_s=60.0, min_ranks=2),
    )
    words = of_plan(Plan(name="mine", model="deepseek-v3", pools=(pool,))).words()
    assert words == ("1 server of 8 GPUs (dp 8, expert parallel), 256 seats, 8,192 tokens a step, 2 to 8 ranks by load")


def test_a_list_says_only_what_differs() -> None:
    few, many = "tp2-pp1-x4-s128-t8192", "tp2-pp1-x4-s256-t8192"
    assert differing([few, many]) == {few: "128 seats", many: "256 seats"}
    assert shared([few, many]) == "4 servers of 2 GPUs, 8,192 tokens a step"
    assert differing([few, many, "mine"])["mine"] == "mine"
    assert differing([few]) == {few: in_words(few)}
    assert shared([few]) == ""
    assert differing([many, f"{many}-eagle3"]) == {many: "no drafts", f"{many}-eagle3": "drafts of eagle3"}
    assert [*differing([many, PREFILL_DECODE]).values()] == [
        "4 servers of 2 GPUs, 256 seats",
        "2 prefill servers of 2 GPUs with 64 seats, 1 decode server of 4 GPUs with 256 seats",
    ]


def test_a_list_of_pairs_says_only_the_pool_that_differs() -> None:
    other = PREFILL_DECODE.replace("s256", "s128")
    assert [*differing([PREFILL_DECODE, other]).values()] == ["decode with 256 seats", "decode with 128 seats"]
    assert shared([PREFILL_DECODE, other]) == (
        "2 prefill servers of 2 GPUs with 64 seats, 1 decode server of 4 GPUs, 8,192 tokens a step"
    )


def test_names_inside_a_sentence_are_put_in_words() -> None:
    few, many = "tp2-pp1-x4-s128-t8192", "tp2-pp1-x4-s256-t8192"
    reason = f"cannot exceed 3 requests/s (flops); {many} reached 4 requests/s on 8 GPUs"
    assert sentence_in_words(reason, few) == (
        "cannot exceed 3 requests/s (flops); the plan with 256 seats reached 4 requests/s on 8 GPUs"
    )
    assert sentence_in_words(reason, few, chosen=many) == (
        "cannot exceed 3 requests/s (flops); the chosen plan reached 4 requests/s on 8 GPUs"
    )
    assert sentence_in_words(f"as {many}.") == f"as {in_words(many)}."
    assert sentence_in_words("tp4-pp1 and eagle3 stay") == "tp4-pp1 and eagle3 stay"
