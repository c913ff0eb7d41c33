"""Groups of ranks that divide prompts: against one group, a free link, the operators of an exchange, and the rules of
engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from simtune.costs.compiled import compile_costs
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.memory import kv_capacity
from simtune.costs.predict import Profile
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.emit import ENGINES
from simtune.errors import Infeasible
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.model import FullAttention, Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, KvCache, Parallelism, Pool
from simtune.specs.study import Confirmation, HardwareCount, Search, Study
from simtune.specs.workload import FixedLength, Poisson, Slo, Workload
from simtune.testing.clusters import stream_of
from simtune.tuner.bounds import PlanBounds
from simtune.tuner.bounds.floors import least_e2el_s
from simtune.tuner.certificate.search_certificate import Audit, certificate_of
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.space.candidates import space_of
from tests.tuner.fragments import with_variants

HARDWARE = load_hardware("h100-sxm")
DENSE, EXPERTS, LATENT = (load_model(name) for name in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"))
PROMPT = StepWork(chunks=((0, 8192),), num_samples=1)
DECODES = StepWork(num_decodes=32, context_tokens=32 * 4096, num_samples=32)
OF_LINKS = {"send", "all_reduce", "moe_dispatch", "moe_combine", "all_to_all"}


def pool(groups: int | None, tp: int = 1, batching: dict[str, Any] | None = None, **more: Any) -> Pool:
    parallelism = {"tp": tp, "prefill_context_parallel": groups, **more.pop("parallelism", {})}
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, **(batching or {})}
    fields = {"hardware": "h100-sxm", "instances": 1, "parallelism": parallelism, "batching": sizes, **more}
    return Pool.model_validate(fields, strict=False)


def step(work: StepWork, groups: int | None, model: Model = DENSE, **more: Any) -> dict[str, float]:
    return StepModel(model, HARDWARE, pool(groups, **more)).breakdown(work)


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_one_group_is_none_to_the_tick(model: Model) -> None:
    single, none = (compile_costs(model, HARDWARE, pool(groups, tp=2), 16_384) for groups in (1, None))
    for chunks in ([(0, 8000)], [(100, 7), (8000, 300)]):
        assert single.mixed(5, 20_000, chunks, 6) == none.mixed(5, 20_000, chunks, 6)
    assert single.decode(33, 90_000) == none.decode(33, 90_000)
    assert pool(1, tp=2).devices == pool(None, tp=2).devices == 2


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_a_prompt_takes_its_share_where_links_are_free(groups: int) -> None:
    """Each group multiplies and attends to as much as one group does for a share of the prompt, whose pairs of tokens
    are a share of all."""
    alone, part = step(PROMPT, None), step(StepWork(chunks=((0, 8192 // groups),), num_samples=1), None)
    divided = step(PROMPT, groups)
    assert {k: divided[k] for k in ("gemm", "elementwise", "head", "sampling")} == {
        k: part[k] for k in ("gemm", "elementwise", "head", "sampling")
    }
    overhead_s = StepModel(DENSE, HARDWARE, pool(None)).attention.prefill_call_s
    attention_s = (alone["prefill_attention"] - overhead_s) / groups
    assert divided["prefill_attention"] == pytest.approx(attention_s + overhead_s, rel=1e-9)
    whole_s, share_s = (
        sum(by_kind[kind] for kind in ("gemm", "elementwise", "prefill_attention")) for by_kind in (alone, divided)
    )
    assert share_s == pytest.approx(whole_s / groups, rel=0.2)


@pytest.mark.parametrize("groups", [2, 8])
def test_keys_and_values_are_gathered_once_a_layer(groups: int) -> None:
    attention = DENSE.layers[0].attention
    assert isinstance(attention, FullAttention)
    gather = Profile(HARDWARE, in_step=True).predictor("all_gather", DENSE.dtype)
    size = np.array([8192.0 * 2 * attention.kv_heads * attention.head_dim * 2])
    expected = DENSE.num_layers * float(gather.seconds(devices=groups, bytes=size)[0])
    assert step(PROMPT, groups)["send"] == pytest.approx(expected, rel=1e-9)


def test_groups_on_several_nodes_gather_in_a_ring() -> None:
    send = Profile(HARDWARE, in_step=True).predictor("send_recv", DENSE.dtype, variant="inter_node")
    size = np.array([15.0 * 512 * 2 * 8 * 128 * 2])
    expected = DENSE.num_layers * float(send.seconds(bytes=size)[0])
    assert step(PROMPT, 16)["send"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("groups", [2, 4])
def test_a_step_of_decodes_is_that_of_one_group(groups: int) -> None:
    assert step(DECODES, groups) == step(DECODES, None)
    divided, alone = (compile_costs(DENSE, HARDWARE, pool(size), 16_384) for size in (groups, None))
    for decodes, context in ((1, 100), (7, 30_000), (64, 200_000)):
        assert divided.decode(decodes, context) == alone.decode(decodes, context)


def test_experts_are_spread_over_all_groups() -> None:
    """Match data-parallel attention of as many groups, each with its share of the tokens."""
    by_expert = {"expert_parallel": True}
    groups = step(PROMPT, 4, EXPERTS, parallelism=by_expert)
    of_group = StepWork(chunks=((0, 2048),), num_samples=1)
    parallel = step(of_group, None, EXPERTS, parallelism={**by_expert, "attention_dp": 4})
    for kind in ("moe", "moe_dispatch", "moe_combine", "gemm"):
        assert groups[kind] == pytest.approx(parallel[kind], rel=1e-9)
    decodes = step(DECODES, 4, EXPERTS, parallelism=by_expert)
    of_share = StepWork(num_decodes=8, context_tokens=8 * 4096, num_samples=8)
    assert decodes["moe"] == step(of_share, None, EXPERTS, parallelism={**by_expert, "attention_dp": 4})["moe"]
    assert decodes["gemm"] == step(DECODES, None, EXPERTS, parallelism=by_expert)["gemm"]


@pytest.mark.parametrize("groups", [2, 4])
def test_every_group_keeps_the_whole_cache(groups: int) -> None:
    """Weights of dense models and the cache of a token are as large as without, on each rank."""
    alone, divided = (kv_capacity(DENSE, HARDWARE, pool(size, tp=2)) for size in (None, groups))
    assert divided.weights_bytes == alone.weights_bytes
    assert divided.kv_bytes_per_token == alone.kv_bytes_per_token
    # What remains differs by activations and communicators alone.
    assert divided.num_blocks == pytest.approx(alone.num_blocks, rel=0.02)
    assert pool(groups, tp=2).devices == 2 * groups
    spread, unspread = (
        kv_capacity(EXPERTS, HARDWARE, pool(size, parallelism={"expert_parallel": True})) for size in (groups, None)
    )
    routed = sum(
        group.count * group.feed_forward.experts * 3 * EXPERTS.hidden_size * group.feed_forward.intermediate_size * 2
        for group in EXPERTS.layers
        if group.feed_forward.kind == "moe"
    )
    assert unspread.weights_bytes - spread.weights_bytes == pytest.approx(routed * (1 - 1 / groups), rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([2, 3, 4]),
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 4000)), max_size=2),
    st.integers(0, 60),
    st.integers(1, 8000),
)
def test_tables_have_the_times_of_the_step_model(
    groups: int, chunks: list[tuple[int, int]], decodes: int, context: int
) -> None:
    if not chunks and not decodes:
        return
    samples = decodes + len(chunks)
    ticks = compiled(groups).mixed(decodes, decodes * context, chunks, samples)
    work = StepWork(decodes, decodes * context, tuple(chunks), samples)
    seconds = StepModel(DENSE, HARDWARE, pool(groups)).seconds(work)
    assert ticks / TICKS_PER_SECOND == pytest.approx(seconds, rel=0.04)


TABLES: dict[int, Any] = {}


def compiled(groups: int) -> Any:
    if groups not in TABLES:
        TABLES[groups] = compile_costs(DENSE, HARDWARE, pool(groups), 16_384)
    return TABLES[groups]


def deployed(of_plan: Pool) -> Deployment:
    return deploy(Plan(name="p", model=DENSE.name, pools=(of_plan,)), DENSE, HARDWARE)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("policy", ["vllm-fcfs", "sglang"])
def test_no_simulation_is_faster_than_its_bound(groups: int, policy: str) -> None:
    of_plan = pool(groups, batching={"policy": policy, "max_num_batched_tokens": 2048})
    deployment = deployed(of_plan)
    rng = np.random.default_rng(groups)
    count = 40
    arrivals = np.cumsum(rng.exponential(0.03, count)).tolist()
    stream = stream_of(arrivals, rng.integers(10, 9000, count).tolist(), rng.integers(1, 60, count).tolist())
    bounds, result = PlanBounds(deployment, stream), deployment.simulate(stream)
    assert 0 < least_e2el_s(bounds) <= float(result.e2el_s.mean())
    alone = deployment.simulate(stream_of([0.0], [8000], [1])).ttft_s[0]
    plain = deployed(pool(None, batching={"policy": policy, "max_num_batched_tokens": 2048}))
    undivided_s = plain.simulate(stream_of([0.0], [8000], [1])).ttft_s[0]
    assert undivided_s / groups < alone < undivided_s


@pytest.mark.slow
def test_a_search_bounds_it_and_writes_a_certificate() -> None:
    load = Workload(
        name="load",
        requests=40,
        arrivals=Poisson(rate_rps=2.0),
        prompt=FixedLength(tokens=8000),
        output=FixedLength(tokens=20),
    )
    study = Study(
        name="study",
        model=DENSE.name,
        hardware=(HardwareCount(profile="h100-sxm", devices=4),),
        workload=load.name,
        slo=Slo(ttft_s={"p99": 0.5}, tpot_s={"p99": 0.05}),
        search=Search(
            tp=(1,), pp=(1,), max_num_seqs=(64,), max_num_batched_tokens=(8192,), confirm=Confirmation(draws=0)
        ),
    )
    fragment = {"parallelism": {"prefill_context_parallel": 4}}
    asked = with_variants(Question(study, DENSE, (HARDWARE,), load, None), {}, fragment)
    tuned = optimize(asked, jobs=1)
    shapes = {row.candidate.decoding.shape for row in tuned.rows}
    assert {(shape.variant, shape.devices) for shape in shapes} == {("", 1), ("prefill-context-parallel-4", 4)}
    audit = Audit(certificate_of(tuned), asked)
    assert audit.run(), audit.problems
    cache = PlanCache(asked, space_of(asked.study).candidates)
    for row in tuned.rows:
        settled = cache.settled(row.candidate)
        assert not isinstance(settled, Refused)
        deployment = cache.deployment(settled)
        stream = asked.stream(settled, 2.0)
        assert 0 < least_e2el_s(PlanBounds(deployment, stream)) <= float(deployment.simulate(stream).e2el_s.mean())


# --- what engines have ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"parallelism": {"cp": 2}}, "cannot be combined with cp, which divides the KV cache"),
        ({"parallelism": {"tp": 2, "decode_context_parallel": 2}}, "cannot be combined with decode_context_parallel"),
        ({"kv_cache": {"preemption": "swap"}}, "cannot be combined with swap, by which every group"),
        ({"lora": {"rank": 8, "slots": 2}}, "cannot be combined with lora"),
        ({"research": {"offload": {"weights": 0.2}}}, "cannot be combined with offload"),
        ({"cascade_attention": True}, "cannot be combined with cascade_attention"),
        ({"encoder": {}}, "cannot be combined with encoder"),
        ({"research": {"afd": {"ffn_devices": 2}}}, "cannot be combined with afd"),
    ],
)
def test_what_is_not_divided_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        pool(2, **more)


def test_windows_and_states_are_refused() -> None:
    for name in ("gemma-3-27b", "qwen3-next-80b-a3b"):
        with pytest.raises(Infeasible, match="full and latent attention only; leave it out"):
            StepModel(load_model(name), HARDWARE, pool(2))


def latent(groups: int, tp: int = 1, **more: Any) -> Pool:
    parallelism = Parallelism(tp=tp, prefill_context_parallel=groups, expert_parallel=True)
    return pool(None, **more).model_copy(update={"parallelism": parallelism})


def test_vllm_has_it_for_latent_attention() -> None:
    vllm, plan = ENGINES["vllm"], latent(4, tp=2)
    settings = vllm._settings(plan, LATENT, {})  # type: ignore[attr-defined]
    assert (settings["tensor-parallel-size"], settings["prefill-context-parallel-size"]) == (2, 4)
    assert "prefill-context-parallel-size" not in vllm._settings(pool(1), DENSE, {})  # type: ignore[attr-defined]
    assert not any("prefill_context" in reason for reason in vllm.refusals(plan, LATENT, {}))
    assert any("decodes each request on one of the groups" in reason for reason in vllm.unsaid(plan))
    assert not any("on one of the groups" in reason for reason in vllm.of("vllm-0.28").unsaid(plan))
    assert any("latent attention only" in reason for reason in vllm.refusals(pool(2), DENSE, {}))
    assert any("vLLM 0.24 has none" in reason for reason in vllm.of("vllm-0.24").refusals(plan, LATENT, {}))
    sparse = load_model("deepseek-v3.2")
    assert any("without graphs only" in reason for reason in vllm.refusals(plan, sparse, {}))


def test_sglang_has_it_within_its_tp() -> None:
    sglang, plan = ENGINES["sglang"], latent(8, batching={"policy": "sglang"})
    written = sglang.serving(plan, LATENT)  # type: ignore[attr-defined]
    found = {key: written[key] for key in ("tp-size", "attn-cp-size", "enable-prefill-cp", "cp-strategy", "ep-size")}
    assert found == {
        "tp-size": 8,
        "attn-cp-size": 8,
        "enable-prefill-cp": True,
        "cp-strategy": "zigzag",
        "ep-size": 8,
    }
    assert not any("prefill_context" in reason for reason in sglang.refusals(plan, LATENT, {}))
    assert sglang.serving(plan, load_model("deepseek-v3.2"))["cp-strategy"] == "interleave"  # type: ignore[attr-defined]
    for of_pool, model, words in (
        (pool(2), DENSE, "mixtures of experts only"),
        (latent(4, tp=2), LATENT, "one rank in each group"),
        (latent(16), load_model("deepseek-v3.2"), "8 ranks at most"),
        (pool(8), LATENT, "needs expert_parallel"),
    ):
        assert any(words in reason for reason in sglang.refusals(of_pool, model, {})), words
    old = sglang.of("sglang-0.5")
    assert any("prefill_context_parallel: SGLang 0.5" in reason for reason in old.refusals(plan, LATENT, {}))


@pytest.mark.parametrize("engine", ["tensorrt-llm", "llamacpp", "transformers"])
def test_other_engines_are_not_given_it(engine: str) -> None:
    refused = list(ENGINES[engine].refusals(pool(2), DENSE, {}))
    assert any(reason.startswith("parallelism.prefill_context_parallel: ") for reason in refused)


def test_a_cache_may_still_be_given_by_blocks() -> None:
    of_pool = Pool(
        hardware="h100-sxm",
        instances=1,
        parallelism=Parallelism(prefill_context_parallel=2),
        batching=Batching(max_num_seqs=4, max_num_batched_tokens=512),
        kv_cache=KvCache(num_blocks=100),
    )
    assert kv_capacity(DENSE, HARDWARE, of_pool).num_blocks == 99
