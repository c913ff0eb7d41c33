"""Layers whose whole attention block a profile has measured, sparse attention, gated delta nets, normed queries."""

from __future__ import annotations

import numpy as np
import pytest

from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.layers import attention_layer
from simtune.costs.predict import Profile
from simtune.specs.hardware import Hardware, OperatorKind
from simtune.specs.model import Attention, FullAttention, LinearAttention, MlaAttention, Model
from tests.costs.made_up import hardware, model, operator, pool

MLA = MlaAttention(heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
SPARSE = MLA.model_copy(update={"index_topk": 64, "index_heads": 2, "index_head_dim": 16})
DELTA = LinearAttention(heads=4, key_heads=2, key_dim=16, value_dim=32, conv_width=4)
SIZES = {"heads": 4, "hidden": 64, "q_rank": 24, "latent": 32, "rope": 8, "nope": 16, "v_dim": 16}


def of(attention: Attention) -> Model:
    tiny = model()
    return tiny.model_copy(update={"layers": (tiny.layers[0].model_copy(update={"attention": attention}),)})


def with_operators(*kinds: str, kv_dtype: str = "bf16") -> Hardware:
    device = hardware()
    suffix = "" if kv_dtype == "bf16" else f".kv-{kv_dtype}"
    measured = {f"{kind}.bf16{suffix}": operator(kind, kv_dtype=kv_dtype) for kind in kinds}  # type: ignore[arg-type]
    return device.model_copy(update={"operators": device.operators | measured})


BLOCKS = with_operators("mla_context_block", "mla_decode_block")


def gemm_s(device: Hardware, n: int, k: int, m: float) -> float:
    return float(Profile(device).predictor("gemm", "bf16").seconds(m=m, n=n, k=k))


def test_a_measured_block_stands_for_all_its_parts() -> None:
    """Two layers: of the products those of the feed-forward block are left, of norms those before the two blocks."""
    work = StepWork(4, 4000, (), 4)
    parts = StepModel(of(MLA), hardware(), pool()).breakdown(work)
    whole = StepModel(of(MLA), BLOCKS, pool()).breakdown(work)
    dense = gemm_s(BLOCKS, 2 * 128, 64, 4) + gemm_s(BLOCKS, 64, 128, 4)
    assert 2 * dense < whole["gemm"] <= parts["gemm"]
    assert whole["elementwise"] < parts["elementwise"], "norms of latents and rotary embedding are in the block"
    block = Profile(BLOCKS).predictor("mla_decode_block", "bf16", kv_dtype="bf16")
    measured = 2 * float(block.seconds(batch=4, context=1000, **SIZES))
    assert whole["gemm"] - 2 * dense + whole["decode_attention"] == pytest.approx(measured)


def test_all_tokens_of_a_step_pass_through_the_products_of_a_block_at_once() -> None:
    """Four prompts and eight decodes: the products of 328 rows, and attention of each kind besides those of its own."""
    step = StepModel(of(MLA), BLOCKS, pool(cuda_graphs=False))
    products = attention_layer(of(MLA), MLA, 1).costs(Profile(BLOCKS), "bf16", "bf16").products
    assert products is not None

    def passed(rows: float) -> float:
        return 2 * float(products(np.array([rows]))[0])

    def block(kind: OperatorKind, **call: float) -> float:
        predictor = Profile(BLOCKS).predictor(kind, "bf16", kv_dtype="bf16")
        return 2 * float(predictor.seconds(**call, **SIZES))

    def prompt(tokens: int) -> float:
        return block("mla_context_block", batch=1, tokens=tokens, context=tokens) - passed(tokens)

    parts = step.breakdown(StepWork(8, 8000, ((0, 80),) * 4, 12))
    dense = 2 * (gemm_s(BLOCKS, 2 * 128, 64, 328) + gemm_s(BLOCKS, 64, 128, 328))
    assert parts["gemm"] == pytest.approx(dense + passed(328))
    assert parts["decode_attention"] == pytest.approx(block("mla_decode_block", batch=8, context=1000) - passed(8))
    assert parts["prefill_attention"] == pytest.approx(4 * prompt(80) - 3 * prompt(1))


def test_one_block_alone_is_not_used() -> None:
    """Without the other a step would count the products of prefill twice, or not at all."""
    work = StepWork(4, 4000, (), 4)
    one = with_operators("mla_decode_block")
    assert StepModel(of(MLA), one, pool()).breakdown(work) == StepModel(of(MLA), hardware(), pool()).breakdown(work)


def test_a_whole_prompt_takes_what_its_block_takes() -> None:
    step = StepModel(of(MLA), BLOCKS, pool(cuda_graphs=False))
    block = Profile(BLOCKS).predictor("mla_context_block", "bf16", kv_dtype="bf16")
    for tokens in (1, 7, 300):
        measured = float(block.seconds(batch=1, tokens=tokens, context=tokens, **SIZES))
        parts = step.breakdown(StepWork(chunks=((0, tokens),)))
        dense = gemm_s(BLOCKS, 2 * 128, 64, tokens) + gemm_s(BLOCKS, 64, 128, tokens)
        assert parts["prefill_attention"] + parts["gemm"] - 2 * dense == pytest.approx(2 * measured)
    assert (np.diff(step.attention.prefill(np.array([0.0, 1.0, 2.0, 64.0, 65.0, 4096.0]))) >= 0).all()


def test_chunks_spell_the_past_out_again() -> None:
    step = StepModel(of(MLA), BLOCKS, pool())
    whole, first, second = (
        step.breakdown(StepWork(chunks=(chunk,)))["prefill_attention"] for chunk in ((0, 96), (0, 64), (64, 32))
    )
    again = gemm_s(BLOCKS, 4 * (16 + 16), 32, 64)
    assert first + second == pytest.approx(whole + step.attention.prefill_call_s + 2 * again)


def test_a_wider_draft_takes_longer_than_a_token() -> None:
    step = StepModel(of(MLA), BLOCKS, pool())
    one, two, eight = (step.decode(4, np.array([1000.0]), width=width)[0] for width in (1, 2, 8))
    assert one < two < eight < 8 * one


def test_sparse_attention_ceases_to_grow_where_the_best_are_chosen() -> None:
    """Its scores of the context still do."""
    step = StepModel(of(SPARSE), with_operators("dsa_context_block", "dsa_decode_block"), pool())
    dense = StepModel(of(MLA), BLOCKS, pool())
    context = np.array([64.0, 6400.0])
    grown, all_of_it = (model.decode(64, context) for model in (step, dense))
    assert grown[0] < grown[1]
    assert grown[1] - grown[0] < (all_of_it[1] - all_of_it[0]) / 2
    assert "gemm" in step.breakdown(StepWork(4, 400, (), 4)), "the feed-forward block has products"


def test_sparse_attention_that_nobody_measured_is_off_the_data_sheet() -> None:
    step = StepModel(of(SPARSE), hardware(), pool())
    assert {"dsa_context_block.bf16", "dsa_decode_block.bf16"} <= step.estimated
    assert step.breakdown(StepWork(4, 400, ((0, 100),), 4))["prefill_attention"] > 0


def test_delta_nets_use_what_was_measured_of_them() -> None:
    rule = with_operators("delta_prefill", "delta_decode", kv_dtype="fp32")
    assert "linear_decode.bf16.kv-fp32" in StepModel(of(DELTA), hardware(), pool()).estimated
    found = StepModel(of(DELTA), rule, pool())
    assert not {name for name in found.estimated if name.startswith(("linear", "delta"))}
    predictor = Profile(rule).predictor("delta_decode", "bf16", kv_dtype="fp32")
    seconds = float(predictor.seconds(batch=3, heads=4, key_heads=2, key_dim=16, value_dim=32))
    assert found.decode(3, np.array([50.0]))[0] == pytest.approx(2 * seconds)
    mamba = StepModel(of(DELTA.model_copy(update={"gates": 1})), rule, pool())
    assert "linear_decode.bf16.kv-fp32" in mamba.estimated, "Mamba2 is no delta net"


def test_a_measured_convolution_is_counted_once() -> None:
    conv = with_operators("conv_prefill", "conv_decode")
    plain, measured = (StepModel(of(DELTA), device, pool()) for device in (hardware(), conv))
    assert "elementwise.conv.bf16" in plain.estimated
    assert "elementwise.conv.bf16" not in measured.estimated
    predictor = Profile(conv).predictor("conv_decode", "bf16")
    seconds = float(predictor.seconds(batch=3, channels=2 * 2 * 16 + 4 * 32, width=4))
    context = np.array([50.0])
    assert measured.decode(3, context)[0] == pytest.approx(plain.decode(3, context)[0] + 2 * seconds)


def test_normed_queries_and_keys_are_one_more_small_operation() -> None:
    plain = FullAttention(heads=4, kv_heads=2, head_dim=16)
    normed, sunk = plain.model_copy(update={"qk_norm": True}), plain.model_copy(update={"sinks": True})
    work = StepWork(4, 400, (), 4)
    before, after, with_sinks = (
        StepModel(of(attention), hardware(), pool()).breakdown(work) for attention in (plain, normed, sunk)
    )
    norm = Profile(hardware()).predictor("elementwise", "bf16", variant="norm")
    more = 2 * float(norm.seconds(rows=4, width=2 * (4 + 2) * 16))
    assert after["elementwise"] == pytest.approx(before["elementwise"] + more)
    assert with_sinks == before, "a sink costs nothing that could be told"
