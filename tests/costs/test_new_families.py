"""Layers of the families of 2026: what their steps call, and how their times and memory grow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.layers import AttentionCosts, attention_layer
from simtune.costs.memory import kv_bytes_per_token
from simtune.costs.predict import Profile
from simtune.errors import UsageError
from simtune.specs.catalog import load_model
from simtune.specs.model import (
    Attention,
    AttentionResiduals,
    BlockSparseAttention,
    CompressedAttention,
    HyperConnections,
    KdaAttention,
    MlaAttention,
    Model,
    MoeFeedForward,
)
from simtune.specs.pool import Parallelism
from simtune.validation.servers.random_weights import Checkpoint
from tests.costs.made_up import hardware, model, pool

SOFTMAX: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 16}
MSA = BlockSparseAttention(**SOFTMAX, index_heads=2, index_dim=16, block=8, topk_blocks=4)
WINDOW = CompressedAttention(heads=8, head_dim=32, rope_dim=8, q_lora_rank=24, o_groups=4, o_lora_rank=16, window=16)
HCA = WINDOW.model_copy(update={"ratio": 128})
INDEX: dict[str, Any] = {"index_topk": 32, "index_heads": 2, "index_head_dim": 16}
CSA = WINDOW.model_copy(update={"ratio": 4, "overlapping": True, **INDEX})
KDA = KdaAttention(heads=4, key_heads=4, key_dim=16, value_dim=16, decay_rank=16)
POOLED = MlaAttention(
    heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=0,
    v_head_dim=16,
    **INDEX,
    index_pool=4,
)
KINDS: dict[str, Attention] = {"msa": MSA, "window": WINDOW, "hca": HCA, "csa": CSA, "kda": KDA, "pooled": POOLED}


def of(attention: Attention, **changes: Any) -> Model:
    groups = [group.model_copy(update={"attention": attention}) for group in model().layers]
    return model().model_copy(update={"layers": tuple(groups), **changes})


def costs_of(attention: Attention) -> AttentionCosts:
    return attention_layer(of(attention), attention, 1).costs(Profile(hardware()), "bf16", "bf16")


def decode_s(attention: Attention, context: int) -> float:
    return float(costs_of(attention).decode(4, np.array([float(context)]), 1)[0])


@pytest.mark.parametrize("name", KINDS)
def test_products_of_a_rank_are_the_matrices_of_the_layer(name: str) -> None:
    attention = KINDS[name]
    products = attention_layer(of(attention), attention, 1).products
    assert sum(n * k for n, k in products) == attention.matrices(model().hidden_size)


@pytest.mark.parametrize("name", KINDS)
def test_times_come_from_the_data_sheet_and_are_named(name: str) -> None:
    attention = KINDS[name]
    step = StepModel(of(attention), hardware(), pool())
    parts = step.breakdown(StepWork(4, 4 * 1000, ((0, 512),), 5))
    assert parts["decode_attention"] > 0
    assert parts["prefill_attention"] > 0
    kind = "kda" if name == "kda" else "sparse"
    assert {key.split(".")[0] for key in step.estimated} >= {f"{kind}_prefill", f"{kind}_decode"}


def test_a_window_costs_the_same_at_any_context_and_entries_of_many_tokens_little() -> None:
    assert decode_s(WINDOW, 100_000) == decode_s(WINDOW, 1000)
    assert decode_s(HCA, 100_000) > decode_s(HCA, 1000)
    # the indexer reads a key of every fourth token, attention itself only the best entries
    assert decode_s(CSA, 100_000) > decode_s(CSA, 1000)
    assert decode_s(KDA, 100_000) == decode_s(KDA, 1000)


@pytest.mark.parametrize("name", KINDS)
def test_longer_prompts_take_longer(name: str) -> None:
    seconds = costs_of(KINDS[name]).prefill(np.array([512.0, 1024.0, 4096.0]))
    assert 0 < seconds[0] < seconds[1] < seconds[2]


def test_bytes_of_caches_are_those_of_entries_and_index_keys() -> None:
    layers = sum(group.count for group in model().layers)

    def per_token(attention: Attention, dtype: str) -> float:
        return kv_bytes_per_token(of(attention), Parallelism(), 0, dtype) / layers

    assert per_token(MSA, "bf16") == 2 * 2 * 16 * 2 + 16 * 2
    entry = (32 - 8) + 2 * 8 + 8
    assert per_token(CSA, "fp8") == (entry + 16 + 4) / 4
    assert per_token(HCA, "fp8") == entry / 128
    assert per_token(WINDOW, "fp8") == per_token(KDA, "bf16") == 0
    assert per_token(POOLED, "bf16") == 32 * 2 + (16 + 4) / 4
    reusing = POOLED.model_copy(update={"index_heads": None, "index_head_dim": None, "index_reused": True})
    assert per_token(reusing, "bf16") == 32 * 2


def test_layers_with_a_window_or_a_state_reserve_bytes_for_each_sequence() -> None:
    state = {name: attention_layer(of(a), a, 1).state_bytes("bf16") for name, a in KINDS.items()}
    entry = (32 - 8) + 2 * 8 + 8
    assert state["window"] == 16 * entry
    assert state["hca"] == 16 * entry + 128 * 2 * 32 * 4
    assert state["csa"] == 16 * entry + 2 * 4 * (2 * 2 * (32 + 16)) * 4
    assert state["kda"] == 4 * 4 * 16 * 16 + 2 * (3 * 4 * 16) * 3
    assert state["msa"] == state["pooled"] == 0


@pytest.mark.parametrize("residual", [HyperConnections(streams=4), AttentionResiduals(blocks=8)])
def test_what_joins_sublayers_takes_time_and_parameters(residual: HyperConnections | AttentionResiduals) -> None:
    joined, summed = model().model_copy(update={"residual": residual}), model()
    sublayers = sum(group.count * group.sublayers for group in summed.layers)
    assert joined.parameters - summed.parameters == sublayers * residual.parameters(summed.hidden_size)
    work = StepWork(8, 8000, (), 8)
    of_joined, of_summed = (StepModel(m, hardware(), pool()).breakdown(work) for m in (joined, summed))
    assert of_joined["elementwise"] > of_summed["elementwise"]
    assert of_joined["gemm"] > of_summed["gemm"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_norms_over_all_heads_add_up_sums_of_all_ranks(ranks: int) -> None:
    """Each layer sends two sums of 4 bytes a token, one of queries and one of keys, if heads are on several ranks."""
    tokens, sharded = 8, pool(tp=ranks)

    def all_reduce_s(**changes: bool) -> float:
        attention = model().layers[0].attention.model_copy(update=changes)
        layers = tuple(group.model_copy(update={"attention": attention}) for group in model().layers)
        normed = model().model_copy(update={"layers": layers})
        work = StepWork(tokens, 100 * tokens, (), tokens)
        return StepModel(normed, hardware(), sharded).breakdown(work).get("all_reduce", 0.0)

    by_head = all_reduce_s(qk_norm=True)
    over_heads = all_reduce_s(qk_norm=True, wide_qk_norm=True)
    one = Profile(hardware()).predictor("all_reduce", "bf16").seconds(devices=2, bytes=np.array([8.0 * tokens]))[0]
    assert over_heads - by_head == pytest.approx(0.0 if ranks == 1 else model().num_layers * float(one))
    assert all_reduce_s(wide_qk_norm=True) == by_head, "nothing is normed"


def test_experts_behind_a_projection_are_narrower_and_two_products_more() -> None:
    experts = MoeFeedForward(experts=8, experts_per_token=2, intermediate_size=48)
    latent = experts.model_copy(update={"latent_size": 16})
    assert experts.matrices(64) == 64 * 8 + 8 * 3 * 64 * 48
    assert latent.matrices(64) == 64 * 8 + 8 * 3 * 16 * 48 + 2 * 64 * 16
    work = StepWork(8, 8000, (), 8)

    def step_of(feed_forward: MoeFeedForward) -> dict[str, float]:
        layers = tuple(g.model_copy(update={"feed_forward": feed_forward}) for g in model().layers)
        return StepModel(model().model_copy(update={"layers": layers}), hardware(), pool()).breakdown(work)

    assert step_of(latent)["moe"] < step_of(experts)["moe"]
    assert step_of(latent)["gemm"] > step_of(experts)["gemm"]


@pytest.mark.parametrize(
    ("attention", "changes", "why"),
    [
        (CSA, {"index_topk": None}, "go together"),
        (WINDOW, {"overlapping": True}, "require a ratio"),
        (WINDOW, {"o_groups": 3}, "multiple of o_groups"),
        (KDA, {"key_heads": 2}, "no keys are shared"),
        (POOLED, {"index_reused": True}, "index_reused requires index_topk"),
    ],
)
def test_layers_that_cannot_be_are_refused(attention: Attention, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        type(attention).model_validate({**attention.model_dump(), **changes})


@pytest.mark.parametrize(
    "changes", [{"v_dim": 8}, {"head_gate": True}, {"values_from_keys": True}, {"wide_qk_norm": True}, {"sinks": True}]
)
def test_engines_and_weights_of_llama_do_not_stand_for_other_attention(changes: dict[str, Any]) -> None:
    """Weights, the torch engine and measured kernels are of Llama's layers: a model of others is refused."""
    llama = load_model("llama-3.2-1b")
    attention = llama.layers[0].attention.model_copy(update=changes)
    layers = tuple(group.model_copy(update={"attention": attention}) for group in llama.layers)
    for other in (
        llama.model_copy(update={"layers": layers}),
        llama.model_copy(update={"residual": HyperConnections(streams=4)}),
    ):
        with pytest.raises(UsageError, match="this one has"):
            Checkpoint.of(other)
    assert not MSA.measurable
    assert not MSA.like_llama
    assert Checkpoint.of(llama).architecture == "LlamaForCausalLM"
