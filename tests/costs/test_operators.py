"""Operator kinds by hand, and what must hold between them: bytes, flops and blocks of every family."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.estimate import estimate
from simtune.costs.operators import OPERATORS, Setting, Terms
from simtune.costs.operators.attention import beyond_products, unsplit
from simtune.costs.operators.moe import DEALT, active_experts, awakened, padded_rows, rank_load, visit_probabilities
from simtune.costs.predict import Predictor
from simtune.errors import Infeasible
from simtune.specs.hardware import OperatorKind
from tests.costs.made_up import hardware

PROCESSORS = 8


def terms(kind: OperatorKind, dtype: str = "bf16", /, **shape: Any) -> Terms:
    """The terms of one call, as plain numbers."""
    kv_dtype = shape.pop("kv_dtype", None)
    arrays = {name: np.array([float(value)]) for name, value in shape.items()}
    found = OPERATORS[kind].terms(arrays, Setting.of(PROCESSORS, dtype, kv_dtype))
    return Terms(*(float(x[0]) for x in found))  # type: ignore[arg-type]


def numbers(found: Terms) -> tuple[float, float, float]:
    """Return (flops, bytes, blocks) of one call."""
    return float(found.flops), float(found.bytes), float(found.blocks)


# --- matrix products --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "inputs", "weights", "outputs"),
    [("bf16", 2, 2, 2), ("fp32", 4, 4, 4), ("fp8", 1, 1, 2), ("int8", 1, 1, 2), ("int4", 2, 0.53, 2)],
)
def test_bytes_of_a_matrix_product_by_dtype(dtype: str, inputs: float, weights: float, outputs: float) -> None:
    m, n, k = 16, 4096, 1024
    found = terms("gemm", dtype, m=m, n=n, k=k)
    assert found.flops == 2 * m * n * k
    assert found.bytes == pytest.approx(inputs * m * k + weights * n * k + outputs * m * n)


def test_what_the_last_wave_of_tiles_leaves_idle_is_walked_alone() -> None:
    """8 processors, tiles of 256 x 128: one tile leaves 7/8 of a wave idle, nine leave 7/8 of the second."""
    assert terms("gemm", m=256, n=128, k=3072).blocks == pytest.approx(7 / 8)
    assert terms("gemm", m=1, n=9 * 128, k=1536).blocks == pytest.approx(7 / 8 / 2)
    assert terms("gemm", m=512, n=4 * 128, k=3072).blocks == 0, "whole waves"


@pytest.mark.parametrize(("dtype", "walked"), [("bf16", 1), ("int4", 1), ("fp8", 4), ("fp8_block", 4), ("nvfp4", 4)])
def test_only_kernels_of_16_bits_split_a_long_walk(dtype: str, walked: float) -> None:
    assert terms("gemm", dtype, m=1, n=4 * 128, k=4 * 3072).blocks == pytest.approx(walked / 2)


@pytest.mark.parametrize(("dtype", "values"), [("bf16", 0), ("int8_wo", 0), ("fp8", 8 * 5120), ("nvfp4", 8 * 5120)])
def test_inputs_of_8_and_4_bits_are_quantised_ahead(dtype: str, values: float) -> None:
    assert terms("gemm", dtype, m=8, n=512, k=4096).ahead == values


def test_rows_of_8_and_4_bits_are_padded_and_tiled() -> None:
    setting, m = Setting.of(PROCESSORS, "fp8", None), np.array([1.0, 16, 17, 256, 257, 512])
    found = OPERATORS["gemm"].features({"m": m, "n": np.full(6, 512.0), "k": np.full(6, 512.0)}, setting)
    assert found["whole 16"].tolist() == [0, 1, 0, 1, 0, 1]
    assert found["row tile"].tolist() == [0, 1, 2, 4, 5, 5]
    assert found["padding"].tolist() == pytest.approx([0, 0, 0, 0, np.log2(512 / 257), 0])
    assert found.keys() - OPERATORS["gemm"].features({"m": m, "n": m, "k": m}, Setting.of(1, "bf16", None)).keys() == {
        *("whole 16", "padding", "row tile"),
    }


def test_quantising_moves_three_bytes_a_value() -> None:
    assert terms("quantise", "fp8", m=16, k=4096).bytes == 3 * 16 * 4096
    assert terms("quantise", "int8", m=16, k=4096).flops == 0


# --- softmax attention ------------------------------------------------------------------------------------


def pairs(tokens: int, context: int, window: int) -> int:
    """Pairs of a query among the last `tokens` and a key it sees, counted one by one."""
    return sum(min(window, position + 1) for position in range(context - tokens, context))


def test_a_causal_kernel_computes_the_diagonal_in_whole_tiles() -> None:
    """1,024 queries of one head; all keys of a tile of 128 for whoever sees its first, counted one by one."""
    in_tiles = sum(128 * math.ceil((position + 1) / 128) for position in range(1024))
    found = terms(
        "prefill_attention", batch=1, tokens=1024, context=1024, heads=1, kv_heads=1, head_dim=64, window=1024
    )
    assert found.flops == pytest.approx(4 * (64 + 64) * in_tiles, rel=1e-3)


def test_narrow_heads_take_as_many_exponentials() -> None:
    shape = {"batch": 1, "tokens": 512, "context": 512, "heads": 8, "kv_heads": 8, "window": 512}
    narrow, wide = (terms("prefill_attention", head_dim=d, **shape) for d in (64, 128))
    assert wide.flops / narrow.flops == pytest.approx((128 + 64) / (64 + 64)), "64 more of head_dim for the softmax"
    assert wide.blocks == narrow.blocks


@given(past=st.integers(0, 60), tokens=st.integers(1, 60), window=st.integers(1, 130), group=st.sampled_from([1, 2, 8]))
def test_prefill_counts_the_pairs_that_see_each_other(past: int, tokens: int, window: int, group: int) -> None:
    context = past + tokens
    shape = {"tokens": tokens, "context": context, "window": window, "batch": 3, "head_dim": 16}
    found = terms("prefill_attention", heads=2 * group, kv_heads=2, **shape)
    assert found.flops == 4 * 3 * 2 * group * (16 + 64) * (pairs(tokens, context, window) + 64 * tokens)
    read = min(context, tokens + window)
    assert found.bytes == 2 * 3 * 16 * 2 * (2 * group * tokens + 2 * read), "keys and values of the past are read"
    assert found.blocks == 3 * 2 * math.ceil(tokens * group / 128) / PROCESSORS


@given(past=st.integers(1, 500), tokens=st.integers(1, 500), window=st.integers(1, 1200))
def test_flops_of_a_chunk_are_the_difference_of_whole_prompts(past: int, tokens: int, window: int) -> None:
    shape = {"batch": 1, "heads": 8, "kv_heads": 2, "head_dim": 64, "window": window}

    def flops(tokens: int, context: int) -> float:
        return float(terms("prefill_attention", tokens=tokens, context=context, **shape).flops)

    whole, before = flops(past + tokens, past + tokens), flops(past, past)
    assert flops(tokens, past + tokens) == pytest.approx(whole - before)


def test_beside_a_chunk_every_head_reads_its_own_keys() -> None:
    shape = {"batch": 5, "context": 1000, "heads": 8, "kv_heads": 2, "head_dim": 64, "window": 1000}
    alone, short, long = (
        terms("decode_attention", **shape),
        *(terms("mixed_attention", tokens=tokens, **shape) for tokens in (128, 129)),
    )
    assert short.flops == alone.flops
    q_and_out = 2 * 2 * 5 * 8 * 64
    assert short.bytes == 2 * 2 * 5 * 8 * 1000 * 64 + q_and_out
    assert alone.bytes == pytest.approx(2 * 2 * 5 * 2 * (1000 - 60.2) * 64 + q_and_out, rel=1e-4), "64 as it starts"
    assert long.blocks == 2 * short.blocks == 2 * 5 * 8 * (64 / 128) / PROCESSORS


def test_contexts_are_split_while_processors_are_idle() -> None:
    """0.8 of two pairs of sequence and KV head for each of 128 processors are 204.8."""
    assert unsplit(np.array([1, 204, 205, 4096]), 128).tolist() == [False, False, True, True]


@given(batch=st.integers(1, 64), context=st.integers(1, 10_000), window=st.integers(1, 10_000), fp8=st.booleans())
def test_a_draft_of_one_token_is_decode(batch: int, context: int, window: int, fp8: bool) -> None:
    kv_dtype = "fp8" if fp8 else "bf16"
    shape = {"batch": batch, "context": context, "heads": 32, "kv_heads": 8, "head_dim": 128, "window": window}
    decode = terms("decode_attention", kv_dtype=kv_dtype, **shape)
    assert terms("tree_attention", kv_dtype=kv_dtype, width=1, **shape) == decode


def test_a_wider_draft_reads_the_same_keys() -> None:
    shape = {"batch": 2, "context": 50_000, "heads": 64, "kv_heads": 8, "head_dim": 128, "window": 50_000}
    one, eight = (terms("tree_attention", width=w, **shape) for w in (1, 8))
    assert eight.flops == 8 * one.flops
    assert eight.bytes - one.bytes == 2 * 2 * 2 * 7 * 64 * 128, "seven more queries and outputs"
    assert eight.flops / eight.bytes == pytest.approx(8 * 8, rel=0.01), "group x width flops a byte of bf16 KV"


def test_latent_decode_reads_one_cache_for_all_heads() -> None:
    found = terms("mla_decode", kv_dtype="fp8", batch=4, context=1000, heads=128, latent=512, rope=64)
    assert found.flops == 2 * 4 * 128 * 1000 * (576 + 512)
    assert found.bytes == 4 * 1000 * 576 + 2 * 4 * 128 * (576 + 512)
    assert found.blocks == math.ceil(4 * 2 / PROCESSORS) - 1
    sharded = terms("mla_decode", kv_dtype="fp8", batch=4, context=1000, heads=16, latent=512, rope=64)
    assert found.bytes - sharded.bytes == 2 * 4 * 112 * (576 + 512), "ranks share heads, not the cache"


def test_latent_prefill_has_wider_keys_than_values() -> None:
    found = terms("mla_prefill", batch=2, tokens=300, heads=16, qk_dim=192, v_dim=128)
    assert found.flops == 2 * 2 * 16 * (192 + 128 + 2 * 64) * (pairs(300, 300, 300) + 64 * 300)
    assert found.bytes == 2 * 2 * 300 * 16 * 2 * (192 + 128)
    assert found.blocks == 2 * 16 * 3 / PROCESSORS


# --- states -----------------------------------------------------------------------------------------------


def test_decode_of_a_linear_layer_moves_its_state_twice() -> None:
    found = terms("linear_decode", kv_dtype="fp32", batch=5, heads=32, key_dim=128, value_dim=64)
    assert found.bytes == 2 * (4 * 5 * 32 * 128 * 64) + 2 * 2 * 5 * 32 * (128 + 64)


@given(tokens=st.integers(1, 100_000))
def test_prefill_of_a_linear_layer_is_linear(tokens: int) -> None:
    shape = {"batch": 1, "heads": 32, "key_dim": 128, "value_dim": 64}
    one, two = (terms("linear_prefill", kv_dtype="fp32", tokens=t, **shape) for t in (tokens, 2 * tokens))
    assert two.flops == 2 * one.flops
    assert two.bytes < 2 * one.bytes, "the state is read and written once"


STATES = {"batch": 3, "heads": 4, "key_dim": 16, "value_dim": 8}
"""States of 16 x 8 values of 2 bytes for 12 pairs of sequence and head: two waves on eight processors."""


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [
        # A token and head: 4 x 16 x 8 flops with the state, and 2 x 64 x (16 + 8) in a chunk; 1,200 of them.
        # Bytes: query, key, value and output of each, and the states read and written; two walks of 100 / 64 chunks.
        ("linear_prefill", {"tokens": 100}, (1200 * (512 + 3072), 1200 * 2 * 48 + 2 * 3072, 2 * 100 / 64)),
        ("linear_decode", {}, (12 * 512, 12 * 2 * 48 + 2 * 3072, 1)),
        # Whole chunks: 128 tokens for 100. Two key heads.
        (
            "delta_prefill",
            {"tokens": 100, "key_heads": 2},
            (3 * 128 * 4 * (6 * 128 + 4 * 64 * 24), 300 * 2 * 2 * (2 * 16 + 4 * 8) + 2 * 3072, 2 * 2),
        ),
        ("delta_decode", {"key_heads": 2}, (12 * 6 * 128, 3 * 2 * 2 * (2 * 16 + 4 * 8) + 2 * 3072, 1)),
        # A decay for each channel of every key, which is read as well.
        (
            "kda_prefill",
            {"tokens": 100},
            (3 * 128 * 4 * (6 * 128 + 4 * 64 * 40), 1200 * 2 * 2 * 40 + 2 * 3072, 2 * 2),
        ),
        ("kda_decode", {}, (12 * 7 * 128, 12 * 2 * 2 * 40 + 2 * 3072, 1)),
    ],
)
def test_layers_with_a_state(kind: OperatorKind, shape: dict[str, int], expected: tuple[float, float, float]) -> None:
    assert numbers(terms(kind, **STATES, **shape)) == expected


def test_convolutions_move_their_inputs_and_keep_the_last_ones() -> None:
    """130 channels of width 4 are three blocks of 64 for each of three sequences; 100 tokens are 13 tiles of 8."""
    shape = {"batch": 3, "channels": 130, "width": 4}
    prompt, decode = terms("conv_prefill", **shape, tokens=100), terms("conv_decode", **shape)
    assert numbers(prompt) == (0, 2 * 3 * 130 * (2 * 100 + 3), 3 * 3 * 13 / 8)
    assert numbers(decode) == (0, 2 * 3 * 130 * (3 + 2), 1)


SELECTION = {
    **{"batch": 3, "heads": 300, "kv_heads": 2, "width": 96, "cached": 48, "window": 64, "ratio": 4, "topk": 100},
    **{"index_heads": 2, "index_dim": 16, "index_bytes": 20, "pool": 5, "block": 2},
}
"""Entries of 4 tokens of which 100 are chosen, beside a window of 64; an index key of 20 bytes for every 5 tokens."""


@pytest.mark.parametrize(("context", "attended"), [(1000, 64 + 100), (200, 64 + 50), (40, 40 + 10)])
def test_sparse_decode_attends_to_a_window_and_to_chosen_entries(context: int, attended: int) -> None:
    scored, moved = context / 5, 2 * 2 * 48 * attended + (20 + 8 / 2) * context / 5
    alone = terms("sparse_decode", **SELECTION, context=context)
    assert alone.flops == pytest.approx(3 * (2 * 300 * 96 * attended + 2 * 2 * 16 * scored))
    assert alone.bytes == pytest.approx(3 * moved + 2 * 3 * 300 * 96)
    # Two KV heads of three times 64 heads, for three sequences: 18 on 8 processors.
    assert alone.blocks == 2
    weights, passed = 5000, 700
    for dtype, size, slower in (("bf16", 2, 1), ("fp8", 1, 2)):
        block = terms(
            "sparse_decode_block", dtype, **SELECTION, context=context, weights=weights, passed=passed, kv_dtype="bf16"
        )
        attention = 3 * (2 * 300 * 96 * attended + 2 * 20 * scored)
        assert block.flops == pytest.approx(2 * 3 * weights + slower * attention)
        assert block.bytes == pytest.approx(size * weights + 4 * 3 * passed + 3 * moved + 2 * 3 * 300 * 96)
        assert block.blocks == 2
    unindexed = SELECTION | {"index_heads": 0, "index_dim": 0, "index_bytes": 0}
    plain = terms("sparse_decode", **unindexed, context=context)
    assert plain.flops == pytest.approx(3 * 2 * 300 * 96 * attended)
    assert plain.bytes == pytest.approx(3 * 2 * 2 * 48 * attended + 2 * 3 * 300 * 96)


@pytest.mark.parametrize("tokens", [30, 300, 700])
def test_sparse_prefill_attends_to_as_much_for_every_token(tokens: int) -> None:
    """Token i sees min(i, 64) tokens of its window and min(i, 400) / 4 entries; it scores i / 5 keys."""
    softmax, masked = beyond_products(Setting.of(PROCESSORS, "bf16", None))
    pairs = sum(min(i, 64) + min(i, 400) / 4 for i in range(1, tokens + 1)) + masked * tokens
    scored = sum(i / 5 for i in range(1, tokens + 1))
    found = terms("sparse_prefill", **SELECTION, tokens=tokens)
    assert found.flops == pytest.approx(3 * (2 * 300 * (96 + 2 * softmax) * pairs + 2 * 2 * 16 * scored))
    assert found.bytes == pytest.approx(3 * (2 * 2 * 48 * tokens + 8 / 2 * scored) + 2 * 2 * 3 * tokens * 300 * 96)
    assert found.blocks == 3 * 300 * math.ceil(tokens / 128) / 8


@pytest.mark.parametrize(("cached", "tokens"), [(0, 30), (0, 300), (500, 1), (500, 300)])
@pytest.mark.parametrize("width", [96, 48])
def test_a_block_of_sparse_attention_runs_a_chunk_after_its_past(cached: int, tokens: int, width: int) -> None:
    """Token i of the text sees min(i, 64) tokens and min(i, 400) / 4 entries, and scores i / 5 keys. Heads that read
    one vector as key and value (96 values of 48) are computed 64 at a time: 320 for 300."""
    softmax, masked = beyond_products(Setting.of(PROCESSORS, "bf16", None))
    text = range(cached + 1, cached + tokens + 1)
    pairs, scored = sum(min(i, 64) + min(i, 400) / 4 for i in text) + masked * tokens, sum(i / 5 for i in text)
    shape = SELECTION | {"width": width, "tokens": tokens, "context": cached + tokens, "weights": 5000, "passed": 700}
    block = terms("sparse_context_block", **shape)
    heads = 320 if width > 48 else 300
    attention = 2 * heads * (width + 2 * softmax) * pairs + 2 * 20 * scored
    assert block.flops == pytest.approx(2 * 3 * tokens * 5000 + 3 * attention)
    read = 2 * 2 * 48 * (min(cached + tokens, tokens + 64) + (cached + tokens) / 4)
    moved = 2 * 5000 + 4 * 3 * tokens * 700 + 3 * (read + 8 / 2 * scored) + 4 * 3 * tokens * 300 * width
    assert block.bytes == pytest.approx(moved)
    assert block.blocks == 3 * tokens * 2 * 3 / 8


# --- experts ----------------------------------------------------------------------------------------------


def test_experts_hit_under_uniform_routing() -> None:
    assert active_experts(np.array([16.0]), *np.array([[128.0], [8.0], [0.0]]))[0] == pytest.approx(82.4, abs=0.05)


def test_tokens_that_are_dealt_out_wake_as_many_experts_as_they_can() -> None:
    tokens = np.array([1.0, 15.0, 16.0, 500.0])
    dealt, chance = (active_experts(tokens, *np.array([[128.0], [8.0], [a]])) for a in (DEALT, 0.0))
    assert dealt.tolist() == [8, 120, 128, 128]
    assert chance[0] == pytest.approx(8)
    assert (chance <= dealt * (1 + 1e-12)).all()
    assert (chance / dealt).min() == pytest.approx(1 - math.exp(-1), abs=0.02), "where all experts are just reached"


def test_experts_of_a_layer_by_hand() -> None:
    """Sixteen tokens dealt out over eight experts on two ranks, two each: sixteen rows on a rank, on all four of its
    experts."""
    shape = {"tokens": 16, "hidden": 64, "intermediate": 32, "experts_per_token": 2, "experts": 8, "ep": 2}
    found = terms("moe", "fp8_block", **shape, skew=DEALT)
    matrices = 3 * 64 * 32
    assert found.flops == 2 * 16 * matrices
    own = 16 * (2 * 64 + 6 * 32)  # in and out; both halves written, read, multiplied, and read again
    assert found.bytes == 1 * 4 * matrices + 2 * (own + 32 * 64 + 2 * 16 * 64), "a slot for each of all 32 rows"
    assert found.blocks == 4 * (2 * 32 + 64) / 128 / PROCESSORS


def test_blocks_of_64_rows() -> None:
    """Dealt out in steps; by chance as a Poisson number of rows an expert needs them on average."""
    rows = np.array([1.0, 10.0, 48.0, 64.0, 65.0, 80.0, 130.0, 1000.0])
    assert padded_rows(rows, np.array(DEALT)).tolist() == [64, 64, 64, 64, 128, 128, 192, 1024]
    drawn = np.maximum(np.random.default_rng(0).poisson(rows, (20_000, len(rows))), 1)
    assert padded_rows(rows, np.array(0.0)) == pytest.approx((64 * np.ceil(drawn / 64)).mean(axis=0), rel=0.05)


def test_a_rank_wakes_its_share_of_the_experts_but_one() -> None:
    tokens = np.array([1.0, 2.0, 16.0, 1000.0])
    dealt = awakened(tokens, *np.array([[256.0], [8.0], [16.0], [DEALT]]))
    assert dealt.tolist() == [1, 1, 8, 16]
    assert awakened(tokens, *np.array([[256.0], [8.0], [512.0], [DEALT]])).tolist() == [0.5] * 4, "half an expert"


def test_slots_of_all_rows_stay_on_every_rank_unless_tokens_are_dispatched() -> None:
    """Weights and flops are shared out; the sum over experts reads a slot for each row, other ranks' included."""
    shape = {"tokens": 4096, "hidden": 2048, "intermediate": 768, "experts_per_token": 8, "experts": 128, "skew": DEALT}
    one, many = (terms("moe", **shape, ep=ep) for ep in (1, 128))
    assert many.flops == one.flops / 128
    matrices, rows = 3 * 2048 * 768, 4096 * 8
    own = rows / 128 * (6 * 768 + 2 * 2048)
    assert many.bytes == 2 * (matrices + own + rows * 2048 + 2 * 4096 * 2048)
    sent = shape | {"tokens": rows / 128, "experts_per_token": 1, "experts": 1}
    dispatched = terms("moe", **sent, ep=1)
    assert dispatched.flops == many.flops
    assert dispatched.bytes == 2 * (matrices + own + 3 * rows / 128 * 2048)


@pytest.mark.parametrize(
    ("experts", "per_token", "skew", "tokens"),
    [(128, 8, 0.0, 16), (128, 8, 1.0, 16), (128, 8, 1.0, 64), (256, 8, 0.5, 16), (8, 2, 1.0, 4), (64, 6, 1.2, 32)],
)
def test_experts_hit_agree_with_monte_carlo(experts: int, per_token: int, skew: float, tokens: int) -> None:
    """Every token draws its experts without repetition, expert i with weight i^-skew (the Gumbel trick)."""
    rng = np.random.default_rng(0)
    weights = -skew * np.log(np.arange(1, experts + 1))
    drawn = np.argpartition(-(weights + rng.gumbel(size=(1000, tokens, experts))), per_token - 1)[..., :per_token]
    hit = np.mean([len(np.unique(world)) for world in drawn])
    found = active_experts(*(np.array([float(x)]) for x in (tokens, experts, per_token, skew)))[0]
    assert found == pytest.approx(hit, rel=0.025)


@given(experts=st.integers(2, 300), share=st.floats(0, 1), skew=st.floats(0.01, 3), tokens=st.integers(1, 2000))
def test_skew_wakes_fewer_experts_and_never_too_few(experts: int, share: float, skew: float, tokens: int) -> None:
    per_token = max(1, int(share * experts))
    chances = visit_probabilities(experts, per_token, skew)
    assert chances.sum() == pytest.approx(per_token)
    assert np.all(np.diff(chances) <= 1e-12)
    skewed, even = (
        active_experts(*(np.array([float(x)]) for x in (tokens, experts, per_token, a)))[0] for a in (skew, 0.0)
    )
    assert per_token * (1 - 1e-9) <= skewed <= even * (1 + 1e-9) <= experts * (1 + 1e-9)


def test_the_busiest_rank_by_monte_carlo() -> None:
    """256 experts, 8 a token, uniform routing: the maximum over ranks of a random split."""
    rng = np.random.default_rng(0)
    for ep, tokens in ((4, 64), (8, 256), (8, 16)):
        chosen = np.argsort(rng.random((300, tokens, 256)))[..., :8] // (256 // ep)
        loads = np.array([np.bincount(world.ravel(), minlength=ep) for world in chosen])
        measured = np.mean(loads.max(axis=1)) / (tokens * 8 / ep)
        found = rank_load(np.array([float(tokens)]), 256, 8, ep, 0.0)[0]
        assert measured <= found <= 1.25 * measured, "the formula is an upper estimate"


@given(tokens=st.integers(1, 10_000), ep=st.sampled_from([1, 2, 4, 8]), skew=st.sampled_from([0.0, 0.5, 1.2]))
def test_rank_load_is_between_even_and_all_on_one(tokens: int, ep: int, skew: float) -> None:
    load = rank_load(np.array([float(tokens)]), 64, 6, ep, skew)[0]
    assert 1 <= load <= ep
    if ep > 1:
        assert load <= rank_load(np.array([float(tokens)]), 64, 6, ep, skew + 0.5)[0] + 1e-12


# --- communication ----------------------------------------------------------------------------------------


def test_copies_of_tokens_that_leave_the_rank_or_the_node() -> None:
    shape = {"tokens": 100.0, "row_bytes": 7168.0, "experts_per_token": 8, "experts": 256}
    copies = 100 * 8 * 7168
    one = terms("moe_dispatch", **shape, ep=8, nodes=1)
    assert one.bytes == copies * 7 / 8
    assert terms("moe_combine", **shape, ep=128, nodes=16).bytes == copies * 15 / 16
    assert one.flops == one.blocks == 0


def test_bytes_of_collectives() -> None:
    whole = terms("all_reduce", devices=4, bytes=1000.0)
    assert whole.bytes == 2 * 3 / 4 * 1000
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert terms(kind, devices=4, bytes=1000.0).bytes == whole.bytes / 2
    assert terms("send_recv", bytes=1000.0).bytes == 1000


def test_a_kv_transfer_pays_for_its_descriptors() -> None:
    """5,000 tokens of Llama-3.1-8B in blocks of 16: 313 blocks x 32 layers x 2, 655 MB."""
    profile = hardware()
    operator = estimate("kv_transfer", "bf16", profile)
    assert operator is not None
    descriptors, size = 313 * 32 * 2, 5000 * 131072
    seconds = Predictor(operator, PROCESSORS).seconds(descriptors=descriptors, bytes=size)
    assert float(seconds) == pytest.approx(3e-3 + descriptors * 1e-6 + size / 0.7e8)


# --- all kinds --------------------------------------------------------------------------------------------

TYPICAL: dict[str, float] = {
    "m": 64, "n": 4096, "k": 4096, "batch": 16, "tokens": 256, "context": 4096, "heads": 32, "kv_heads": 8,
    "head_dim": 128, "window": 8192, "width": 4, "qk_dim": 192, "v_dim": 128, "latent": 512, "rope": 64,
    "key_dim": 128, "value_dim": 128, "hidden": 4096, "intermediate": 1024, "experts_per_token": 4, "experts": 64,
    "ep": 2, "skew": 0.5, "rows": 64, "vocab": 32000, "devices": 4, "bytes": 1e6, "descriptors": 100, "q_rank": 1536,
    "nope": 128, "index_heads": 64, "index_dim": 128, "topk": 2048, "key_heads": 16, "channels": 8192,
    "row_bytes": 8192, "nodes": 2, "cached": 512, "ratio": 4, "index_bytes": 132, "pool": 4, "block": 8,
    "weights": 1e7, "passed": 1e5, "streams": 4,
}  # fmt: skip
SAVING = {"skew", "ep", "kv_heads", "ratio", "pool", "block"}
"""More of these is less work, or work of another shape: not part of the law below."""
GROWING = [(kind, name) for kind, operator in OPERATORS.items() for name in operator.shape if name not in SAVING]


@pytest.mark.parametrize(("kind", "name"), GROWING)
@given(factor=st.floats(1, 16))
def test_more_work_has_no_fewer_flops_or_bytes(kind: OperatorKind, name: str, factor: float) -> None:
    shape = {each: TYPICAL[each] for each in OPERATORS[kind].shape}
    chunks = kind in ("prefill_attention", "mla_context_block", "dsa_context_block", "sparse_context_block")
    upper = {"tokens": shape.get("context", math.inf) if chunks else math.inf}
    larger = {**shape, name: min(shape[name] * factor, upper.get(name, math.inf))}
    if chunks and name == "context":
        larger["context"] = math.floor(larger["context"])
    before, after = terms(kind, **shape), terms(kind, **larger)
    assert after.flops >= before.flops * (1 - 1e-12)
    assert after.bytes >= before.bytes * (1 - 1e-12)


def test_a_profile_may_name_the_kinds_there_are() -> None:
    assert get_args(OperatorKind) == tuple(OPERATORS)


@pytest.mark.parametrize("kind", OPERATORS)
def test_every_kind_can_be_estimated_from_a_data_sheet(kind: OperatorKind) -> None:
    operator = estimate(kind, "bf16", hardware())
    assert operator is not None
    assert operator.provenance.kind == "data-sheet"
    assert "70%" in operator.provenance.source
    assert not operator.box
    assert not operator.hold_out
    shape = {name: TYPICAL[name] for name in OPERATORS[kind].shape}
    found = terms(kind, **shape)
    ideal = max(found.flops / 1e12, found.bytes / (1e8 if OPERATORS[kind].link else 1e9))
    seconds = float(Predictor(operator, PROCESSORS).seconds(**shape))
    assert seconds >= (ideal / 0.7 + operator.base.overhead_s) * (1 - 1e-12)


def test_estimates_need_a_rate_only_where_something_is_computed() -> None:
    profile = hardware()
    assert estimate("gemm", "int8", profile) is None, "the made-up device has no int8 rate"
    assert estimate("moe", "int8", profile) is None
    assert estimate("quantise", "int8", profile) is not None
    assert estimate("sampling", "fp32", profile) is not None
    four_bit = estimate("gemm", "int4", profile)
    assert four_bit is not None
    assert four_bit.base.flops_per_s == pytest.approx(0.7e12), "4-bit weights are multiplied in 16 bits"


def test_an_estimate_of_a_missing_link_is_refused() -> None:
    with pytest.raises(Infeasible, match=r"no link inter_node.*add links\.inter_node"):
        estimate("send_recv", "bf16", hardware(), variant="inter_node")
