"""A step of a tiny model on a made-up device, worked out by hand."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.compiled import compile_costs
from simtune.costs.iteration import StepModel, StepWork, padded_tokens
from simtune.costs.launches import LAUNCH_S
from simtune.costs.layers import ATTENTION_LAYERS
from simtune.costs.operators.attention import START_KEYS
from simtune.costs.operators.moe import received
from simtune.costs.over_nodes import RankCollective
from simtune.costs.predict import Profile
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.errors import Infeasible
from simtune.specs.catalog import load_engine, load_hardware, load_model
from simtune.specs.hardware import Hardware, Link, OperatorKind
from simtune.specs.model import (
    Attention,
    DenseFeedForward,
    FullAttention,
    LinearAttention,
    MlaAttention,
    Model,
    MoeFeedForward,
    NoAttention,
    NoFeedForward,
)
from simtune.specs.pool import GraphSizes, HostTimes, KvCache
from tests.costs.made_up import hardware, model, moe, operator, pool

US = 1e-6


def call(flops: float, moved: float, blocks: float = 0.0) -> float:
    """The made-up device: 1 us + flops at 1 TFLOP/s + bytes at 1 GB/s + 1 ns a block."""
    return 1e-6 + flops / 1e12 + moved / 1e9 + blocks * 1e-9


def gemm(m: int, n: int, k: int) -> float:
    """bf16; one tile on eight processors leaves half a block of a k of 3,072."""
    tiles = math.ceil(m / 128) * math.ceil(n / 128)
    return call(2 * m * n * k, 2 * (m * k + n * k + m * n), min(1, k / 3072) * max(0, 1 - 4 * tiles / 8))


def sheet(overhead_s: float, moved: float, bytes_per_s: float = 1e9) -> float:
    """What no operator of the made-up device covers: 70 % of its data sheet."""
    return overhead_s + moved / (0.7 * bytes_per_s)


def elementwise(rows: int, width: int) -> float:
    return call(0, 2 * rows * width, rows)


def test_decode_step_of_a_dense_model() -> None:
    # 2 layers, hidden 64, 4 heads and 2 KV heads of 16, feed-forward 128, vocabulary 256.
    # Three sequences of 10 tokens; the CUDA graph is the one for four tokens.
    step = StepModel(model(), hardware(), pool()).breakdown(StepWork(3, 30, (), 3))

    layer = gemm(4, (4 + 2 + 2) * 16, 64) + gemm(4, 64, 4 * 16) + gemm(4, 2 * 128, 64) + gemm(4, 64, 128)
    assert step["gemm"] == pytest.approx(2 * layer)
    small = 2 * elementwise(4, 4 * 64) + elementwise(4, 2 * (4 + 2) * 16) + elementwise(4, 3 * 128)
    ends = elementwise(4, 2 * 64) + elementwise(4, 4 * 64)  # embedding and final norm
    assert step["elementwise"] == pytest.approx(2 * small + ends)
    # flops 4 b h d s; bytes of K and V of 10 tokens (most read as blocks start) in 2 KV heads of 3 sequences,
    # of q and output; one wave
    attention = call(4 * 3 * 4 * 16 * 10, 2 * 2 * 3 * 2 * 10 * (10 / 74) * 16 + 2 * 2 * 3 * 4 * 16, 0)
    assert step["decode_attention"] == pytest.approx(2 * attention)
    assert step["head"] == pytest.approx(gemm(3, 256, 64))
    # four passes over three rows of 256 logits in fp32, and a tenth of a nanosecond a row
    assert step["sampling"] == pytest.approx(sheet(30e-6, 4 * 3 * 256 * 4) + 3e-10)
    assert set(step) == {"gemm", "elementwise", "decode_attention", "head", "sampling"}


def test_every_attention_kind_has_its_layer() -> None:
    kinds, _ = get_args(Attention)
    assert set(ATTENTION_LAYERS) == set(get_args(kinds))


def test_prefill_chunks_are_differences_of_whole_prompts() -> None:
    parts = StepModel(model(), hardware(), pool())
    whole = parts.breakdown(StepWork(chunks=((0, 96),)))["prefill_attention"]
    first = parts.breakdown(StepWork(chunks=((0, 64),)))["prefill_attention"]
    second = parts.breakdown(StepWork(chunks=((64, 32),)))["prefill_attention"]
    # 4 h (d + 64) (s(s+1)/2 + 64 s) flops; q, k, v, output once; 2 KV heads x ceil(192/128) blocks on 8 processors
    by_hand = call(4 * 4 * (16 + 64) * 96 * (97 / 2 + 64), 2 * 96 * 16 * 2 * (4 + 2), 2 * 2 / 8)
    assert whole == pytest.approx(2 * by_hand)
    assert first + second == pytest.approx(whole + 2 * US), "each chunk pays its own overhead, in two layers"


def test_tokens_of_decodes_and_chunks_share_the_matrix_products() -> None:
    parts = StepModel(model(), hardware(), pool())
    mixed = parts.breakdown(StepWork(10, 500, ((0, 500), (100, 90)), 11))
    assert mixed["gemm"] == parts.breakdown(StepWork(chunks=((0, 600),)))["gemm"], "600 tokens are beyond the graphs"
    assert mixed["head"] == pytest.approx(gemm(11, 256, 64)), "only rows that get a token reach the head"


def test_tensor_parallel_ranks_take_their_share_and_reduce() -> None:
    step = StepModel(model(), hardware(), pool(tp=4)).breakdown(StepWork(4, 40, (), 4))
    # One head each; two KV heads on four ranks are repeated, so each rank has one.
    layer = gemm(4, (1 + 1 + 1) * 16, 64) + gemm(4, 64, 16) + gemm(4, 2 * 32, 64) + gemm(4, 64, 32)
    assert step["gemm"] == pytest.approx(2 * layer)
    reduce = call(0, 2 * 3 / 4 * 4 * 64 * 2, 3)  # ring of four, 4 tokens of 64 values in bf16
    assert step["all_reduce"] == pytest.approx((2 * 2 + 1) * reduce), "two a layer, and one for the embedding"
    # logits of 64 tokens of the vocabulary from three others, and 1 us for each of these
    gather = sheet(6e-6, 4 * 64 * 3 * 2, 1e8) + 3 * US
    assert step["head"] == pytest.approx(gemm(4, 64, 64) + gather)


def test_pipeline_stages_add_sends_and_nothing_else() -> None:
    batch = StepWork(4, 40, (), 4)
    one = StepModel(model(), hardware(), pool()).breakdown(batch)
    two = StepModel(model(), hardware(), pool(pp=2)).breakdown(batch)
    assert two.pop("send") == pytest.approx(sheet(1e-5, 4 * 64 * 2, 1e8)), "the link's latency, 70 % of its rate"
    assert two == one


def test_mixture_of_experts_layer() -> None:
    step = StepModel(model(feed_forward=moe(shared=48)), hardware(), pool()).breakdown(StepWork(4, 40, (), 4))
    attention = gemm(4, 128, 64) + gemm(4, 64, 64)
    router, shared = gemm(4, 8, 64), gemm(4, 2 * 48, 64) + gemm(4, 64, 48)
    assert step["gemm"] == pytest.approx(2 * (attention + router + shared))
    active = 8 * (1 - (1 - 2 / 8) ** 4)  # of 8 experts, each of 4 tokens picks 2
    rows, matrices = 4 * 2, 3 * 64 * 32
    moved = 2 * active * matrices + 2 * (rows * (3 * 64 + 6 * 32) + 2 * 4 * 64)
    experts = call(2 * rows * matrices, moved, active * (2 * 32 + 64) / 128 / 8)
    assert step["moe"] == pytest.approx(2 * experts)


def test_plain_feed_forward_has_two_matrices() -> None:
    plain = model(feed_forward=DenseFeedForward(intermediate_size=128, gated=False))
    step = StepModel(plain, hardware(), pool()).breakdown(StepWork(4, 40, (), 4))
    layer = gemm(4, 128, 64) + gemm(4, 64, 64) + gemm(4, 128, 64) + gemm(4, 64, 128)
    assert step["gemm"] == pytest.approx(2 * layer)


def test_sliding_windows_stop_the_growth() -> None:
    full, sliding = (StepModel(model(window=w), hardware(), pool()) for w in (None, 32))
    contexts = np.array([16.0, 32.0, 64.0, 1024.0])
    assert sliding.decode(3, contexts)[:2] == pytest.approx(full.decode(3, contexts)[:2])
    assert sliding.decode(3, contexts)[2:] == pytest.approx(full.decode(3, np.array([32.0]))[0])
    prompts = np.array([16.0, 32.0, 64.0])
    assert sliding.attention.prefill(prompts)[:2] == pytest.approx(full.attention.prefill(prompts)[:2])
    assert sliding.attention.prefill(prompts)[2] < full.attention.prefill(prompts)[2]


def test_graph_sizes_are_those_vllm_captures() -> None:
    tokens = np.array([1, 2, 3, 5, 8, 9, 255, 257, 272, 512, 513, 5000])
    assert padded_tokens(tokens).tolist() == [1, 2, 4, 8, 8, 16, 256, 272, 272, 512, 513, 5000]


def test_host_time_hides_behind_the_gpu_or_adds_to_it() -> None:
    slow_host = hardware(host_step_s=1.0, host_per_sequence_s=0.25)
    batch = StepWork(2, 20, (), 2)
    gpu = sum(StepModel(model(), slow_host, pool()).breakdown(batch).values())
    assert StepModel(model(), slow_host, pool()).seconds(batch) == 1.5
    assert StepModel(model(), slow_host, pool(asynchronous=False)).seconds(batch) == pytest.approx(1.5 + gpu)
    assert StepModel(model(), hardware(), pool()).seconds(batch) == pytest.approx(gpu)


def test_a_host_that_waits_for_sampling_adds_to_the_gpu_under_asynchronous_scheduling() -> None:
    """Steps take as long as synchronous ones, tables and all; the scheduler stays a step ahead."""
    host = {"host": HostTimes(step_s=1.0, per_sequence_s=0.25)}
    waits, alone = (
        pool().model_copy(update={**host, "exposed_host": "all"}),
        pool(asynchronous=False).model_copy(update=host),
    )
    batch = StepWork(2, 20, ((0, 3),), 3)
    step = StepModel(model(), hardware(), waits)
    assert step.seconds(batch) == pytest.approx(1.75 + step.gpu_s(batch))
    assert (waits.schedules_async, waits.hides_host) == (True, False)
    waiting, synchronous = (compile_costs(model(), hardware(), p, 100) for p in (waits, alone))
    assert waiting.decode(3, 60) == synchronous.decode(3, 60)
    assert waiting.mixed(2, 20, [(0, 3)], 3) == synchronous.mixed(2, 20, [(0, 3)], 3)
    assert waiting.mixed(2, 20, [(0, 3)], 3) / TICKS_PER_SECOND == pytest.approx(step.seconds(batch), rel=1e-3)


def test_what_of_the_host_is_exposed_comes_on_top_and_the_rest_hides() -> None:
    """Only under asynchronous scheduling: else all of it is."""
    slow_host = hardware(host_step_s=1.0, host_per_sequence_s=0.25)
    batch = StepWork(2, 20, (), 2)
    gpu = sum(StepModel(model(), slow_host, pool()).breakdown(batch).values())
    for exposed, asynchronous, host in (
        (HostTimes(step_s=0.5, per_sequence_s=0.125), True, 1.5),
        (HostTimes(step_s=2.0, per_sequence_s=0.5), True, 3.0 + gpu),
        (HostTimes(step_s=0.5, per_sequence_s=0.125), False, 1.5 + gpu),
    ):
        its = pool(asynchronous=asynchronous).model_copy(update={"exposed_host": exposed})
        assert StepModel(model(), slow_host, its).seconds(batch) == pytest.approx(host)
        ticks = compile_costs(model(), slow_host, its, 4096).mixed(2, 20, (), 2)
        assert ticks == pytest.approx(host * TICKS_PER_SECOND, rel=1e-6)


@given(
    lengths=st.lists(st.integers(1, 100_000), min_size=1, max_size=40),
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 128, 4096]),
    overlap_p=st.floats(1, 10),
)
def test_the_mean_context_covers_the_longest_sequence(
    lengths: list[int], kv_heads: int, window: int | None, overlap_p: float
) -> None:
    """Why a batch needs only the sum of its contexts: its mean never takes less than its longest member alone, but
    for the keys that each of the others reads while it starts.
    """
    step = StepModel(model(kv_heads=kv_heads, window=window), hardware(overlap_p=overlap_p), pool())
    batch = step.decode(len(lengths), np.array([np.mean(lengths)]))[0]
    longest = step.decode(1, np.array([max(lengths)]))[0]
    keys_s = 2 * 2 * 2 * kv_heads * START_KEYS * 16 / 1e9  # in two layers, keys and values of 16 bf16 at 1 GB/s
    assert batch + (len(lengths) - 1) * keys_s >= longest * (1 - 1e-12)


@pytest.mark.parametrize(
    ("sizes", "tp", "pp", "words"),
    [
        ({}, 3, 1, "tp must divide the 4 attention heads"),
        ({"heads": 12, "kv_heads": 3}, 2, 1, "3 KV heads"),
        ({"heads": 12, "kv_heads": 2}, 3, 1, "2 KV heads"),
        ({"feed_forward": DenseFeedForward(intermediate_size=130)}, 4, 1, "feed-forward width 130"),
        ({"feed_forward": moe(shared=33)}, 2, 1, "feed-forward width 33"),
        ({}, 1, 3, "pp 3 exceeds its 2 layers"),
        (
            {"heads": 12, "kv_heads": 12, "feed_forward": DenseFeedForward(intermediate_size=120)},
            12,
            1,
            "has 8 devices",
        ),
        ({"heads": 16, "kv_heads": 16}, 16, 1, "no link inter_node"),
        ({"layers": 9}, 1, 9, "no link inter_node"),
    ],
)
def test_impossible_sharding_is_refused(sizes: dict[str, object], tp: int, pp: int, words: str) -> None:
    with pytest.raises(Infeasible, match=words):
        StepModel(model(**sizes), hardware(), pool(tp=tp, pp=pp))  # type: ignore[arg-type]


def test_what_nobody_measured_is_estimated_and_said() -> None:
    """Sampling here, the gathering of logits over ranks, and an fp8 cache that no table covers."""
    step = StepModel(model(), hardware(), pool(tp=2, kv_cache=KvCache(dtype="fp8")))
    step.breakdown(StepWork(2, 20, ((0, 9),), 2))
    attention = {"decode_attention.bf16.kv-fp8", "prefill_attention.bf16.kv-fp8"}
    assert step.estimated == {"sampling.fp32", "all_gather.bf16", *attention}
    assert StepModel(model(), hardware(), pool()).estimated == {"sampling.fp32"}


def test_a_dtype_the_device_lacks_is_refused_with_the_remedy() -> None:
    eight_bit = model().model_copy(update={"weight_dtype": "int8"})
    with pytest.raises(Infeasible, match=r"made-up: no operator gemm\.int8.*it has gemm\.bf16.*simtune fit"):
        StepModel(eight_bit, hardware(), pool())
    profile = hardware()
    device = profile.device.model_copy(update={"flops_per_s": {"fp8": 2e12}})
    operators = {key: value for key, value in profile.operators.items() if not key.startswith("moe")}
    without = profile.model_copy(update={"operators": operators, "device": device})
    with pytest.raises(
        Infeasible, match=r"no operator moe\.bf16.*no moe operator at all, and its data sheet no rate for bf16"
    ):
        StepModel(model(feed_forward=moe()), without, pool())


def test_without_graphs_nothing_is_padded_and_no_step_beats_its_launches() -> None:
    graphs, eager = (StepModel(model(), hardware(), pool(cuda_graphs=on)) for on in (True, False))
    batch = StepWork(3, 30, (), 3)
    assert eager.breakdown(batch)["gemm"] < graphs.breakdown(batch)["gemm"], "three tokens are not run as four"
    assert eager.breakdown(StepWork(4, 40, (), 4)) == graphs.breakdown(StepWork(4, 40, (), 4))
    # per layer: 4 products, 2 norms, rope, activation, attention; embedding, last norm, head, sampling
    assert eager.launches.floors_s == pytest.approx(2 * [(2 * 9 + 4) * LAUNCH_S])
    assert graphs.launches.floors_s == (0, 0)
    gpu = sum(eager.breakdown(batch).values())
    assert gpu > eager.launches.floors_s[False], "the made-up device is slow"
    assert eager.seconds(batch) == pytest.approx(gpu)
    fast = hardware(bytes_per_s=1e15, overhead_s=1e-9, block_s=1e-12)
    assert StepModel(model(), fast, pool(cuda_graphs=False)).seconds(batch) == pytest.approx(22 * LAUNCH_S)


def test_a_draft_is_verified_against_one_reading_of_the_cache() -> None:
    step = StepModel(model(), hardware(), pool())
    one, eight = (step.decode(3, np.array([1000.0]), width)[0] for width in (1, 8))
    kv, q = 2 * 2 * 3 * 2 * 1000 * (1000 / 1064) * 16, 2 * 2 * 3 * 4 * 16
    assert one == pytest.approx(2 * call(4 * 3 * 4 * 16 * 1000, kv + q))
    # the made-up device has no operator for trees: how much longer is asked of 70 % of its sheet, p = 3, 11 us

    def tree(width: int) -> float:
        flops, moved = width * 4 * 3 * 4 * 16 * 1000 / 0.7e12, (kv + width * q) / 0.7e9
        return float(11e-6 + (flops**3 + moved**3) ** (1 / 3))

    assert eight == pytest.approx(one * tree(8) / tree(1), rel=1e-6)
    assert "tree_attention.bf16" in step.estimated


# --- latent attention, states, experts on ranks -----------------------------------------------------------


def with_attention(attention: object) -> Model:
    tiny = model()
    return tiny.model_copy(update={"layers": (tiny.layers[0].model_copy(update={"attention": attention}),)})


MLA = MlaAttention(heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
LINEAR = LinearAttention(heads=4, key_heads=2, key_dim=16, value_dim=32, conv_width=4)


def test_latent_attention_by_hand() -> None:
    """Two ranks, two heads each: latents and cache are on both, the rest is shared out."""
    parts = StepModel(with_attention(MLA), hardware(), pool(tp=2))
    step = parts.breakdown(StepWork(4, 4000, (), 4))
    into, spread = gemm(4, 24 + 32 + 8, 64), gemm(4, 2 * (16 + 8), 24) + gemm(4, 2 * (16 + 16), 32)
    dense = gemm(4, 2 * 64, 64) + gemm(4, 64, 64)
    assert step["gemm"] == pytest.approx(2 * (into + spread + gemm(4, 64, 2 * 16) + dense))
    # scores over 40 values, sums over 32; the cache of 40 values is read once
    flops, moved = 2 * 4 * 2 * 1000 * 72 / 0.7e12, (2 * 4 * 1000 * 40 + 2 * 4 * 2 * 72) / 0.7e9
    assert step["decode_attention"] == pytest.approx(2 * (11e-6 + (flops**3 + moved**3) ** (1 / 3)), rel=1e-6)

    whole = parts.breakdown(StepWork(chunks=((0, 96),)))["prefill_attention"]
    first = parts.breakdown(StepWork(chunks=((0, 64),)))["prefill_attention"]
    second = parts.breakdown(StepWork(chunks=((64, 32),)))["prefill_attention"]
    again = gemm(64, 2 * (16 + 16), 32)
    assert first + second == pytest.approx(whole + 2 * (12e-6 + again)), "the past is spelled out again"


def test_a_state_costs_the_same_however_long_the_context() -> None:
    step = StepModel(with_attention(LINEAR), hardware(), pool())
    decode = step.decode(3, np.array([1.0, 100.0, 100_000.0]))
    states = 2 * 4 * 3 * 4 * 16 * 32  # fp32, read and written
    flops, moved = 4 * 3 * 4 * 16 * 32 / 0.7e12, (states + 2 * 2 * 3 * 4 * (16 + 32)) / 0.7e9
    wave = 1e-7 * (math.ceil(3 * 4 / 8) - 1)
    assert decode == pytest.approx([2 * (4e-6 + (flops**3 + moved**3) ** (1 / 3) + wave)] * 3, rel=1e-6)
    prompts = step.attention.prefill(np.array([1000.0, 2000.0, 3000.0]))
    assert prompts[2] - prompts[1] == pytest.approx(prompts[1] - prompts[0], rel=0.01), "linear in tokens"
    # keys, queries, values, gate of 4 x 32 and two gates a head; a convolution and a gated norm beside two norms
    products = gemm(4, 2 * 2 * 16 + 2 * 4 * 32 + 2 * 4, 64) + gemm(4, 64, 4 * 32)
    dense = gemm(4, 2 * 128, 64) + gemm(4, 64, 128)
    assert step.breakdown(StepWork(4, 40, (), 4))["gemm"] == pytest.approx(2 * (products + dense))
    assert step.estimated >= {"linear_decode.bf16.kv-fp32", "linear_prefill.bf16.kv-fp32", "elementwise.conv.bf16"}


def test_experts_on_ranks_wait_for_the_busiest() -> None:
    wide = model(feed_forward=moe())
    sliced = StepModel(wide, hardware(), pool(tp=4)).breakdown(StepWork(64, 640, (), 64))
    whole = StepModel(wide, hardware(), pool(tp=4, expert_parallel=True)).breakdown(StepWork(64, 640, (), 64))
    assert {**whole, "moe": 0} == {**sliced, "moe": 0}, "the same all-reduce adds the experts up"
    # 2 of 8 experts a rank; 64 x 2 / 4 = 32 rows each on average, 1 + sqrt(2 ln 4 / 32) times that on the busiest
    load = 1 + math.sqrt(2 * math.log(4) / 32)
    tokens, matrices = 64 * load, 3 * 64 * 32
    active = 8 * (1 - (1 - 2 / 8) ** tokens) / 4
    rows = tokens * 2 / 4
    slots = tokens * 2  # of all rows, which the sum over experts reads
    moved = 2 * active * matrices + 2 * (rows * (2 * 64 + 6 * 32) + slots * 64 + 2 * tokens * 64)
    blocks = active * (2 * 32 + 64) / 128 / 8
    assert whole["moe"] == pytest.approx(2 * call(2 * rows * matrices, moved, blocks))


def test_dispatched_tokens_reach_the_ranks_of_their_experts() -> None:
    """Two groups of one rank, 32 tokens each: attention as on one rank alone, and a kernel of the rank's own rows."""
    wide, groups = model(feed_forward=moe()), pool(attention_dp=2, expert_parallel=True)
    apart = StepModel(wide, hardware(), groups).breakdown(StepWork(32, 320, (), 32))
    alone = StepModel(wide, hardware(), pool()).breakdown(StepWork(32, 320, (), 32))
    # 64 tokens with 2 rows each: 64 rows a rank, 1 + sqrt(2 ln 2 / 64) times that on the busiest. Neither of a token's
    # experts is one of a rank's four of eight with probability 4/8 * 3/7.
    load, reach = 1 + math.sqrt(2 * math.log(2) / 64), 1 - 4 / 8 * 3 / 7
    rows, tokens, matrices = 64 * load, 64 * load * reach, 3 * 64 * 32
    active = 4 * (1 - (1 - 1 / reach / 4) ** tokens)
    moved = 2 * active * matrices + 2 * (rows * (3 * 64 + 6 * 32) + 2 * tokens * 64)
    kernel = call(2 * rows * matrices, moved, active * (2 * 32 + 64) / 128 / 8)
    assert apart["moe"] == pytest.approx(2 * kernel)
    # no such kernels were measured: an all-to-all of two copies of 32 tokens there and back, on 70 % of the link
    assert apart.pop("all_to_all") == pytest.approx(2 * 2 * (sheet(6e-6, 1 / 2 * 32 * 2 * 64 * 2, 1e8) + 1 * US))
    assert {**apart, "moe": 0} == {**alone, "moe": 0}, "nothing else is split or added up"


@given(
    tokens=st.integers(1, 10_000),
    experts=st.integers(96, 512),
    share=st.floats(0, 1),
    ep=st.sampled_from([1, 2, 8, 96]),
)
def test_dispatch_loses_no_row(tokens: int, experts: int, share: float, ep: int) -> None:
    per_token = max(1, int(share * 32))
    found = received(np.array([float(tokens)]), experts, per_token, ep)
    assert ep * found.tokens[0] * found.experts_per_token == pytest.approx(tokens * per_token)
    assert 0 < found.tokens[0] <= tokens
    assert 1 - 1e-9 <= found.experts_per_token <= per_token * (1 + 1e-9)


def test_more_ranks_take_less_time_each_once_tokens_are_dispatched() -> None:
    """As many tokens on every rank: rows of a rank stay, and its experts become fewer."""
    wide = model(feed_forward=moe().model_copy(update={"experts": 64}))
    times = [
        StepModel(wide, hardware(), pool(attention_dp=dp, expert_parallel=True)).routed(np.array([512.0]))["moe"][0]
        for dp in (2, 4, 8)
    ]
    assert times == sorted(times, reverse=True)


def test_padding_wakes_no_experts() -> None:
    """Nine tokens run as a graph of sixteen: the products are those of sixteen, the experts those of nine."""
    wide = model(feed_forward=moe())
    graphs, eager = (StepModel(wide, hardware(), pool(cuda_graphs=on)) for on in (True, False))
    nine, sixteen = ({k: float(v[0]) for k, v in graphs.linear(np.array([m])).items()} for m in (9, 16))
    assert nine["moe"] == eager.linear(np.array([9]))["moe"][0] < sixteen["moe"]
    assert {**nine, "moe": 0} == {**sixteen, "moe": 0}
    costs = compile_costs(wide, hardware(), pool(), 256)
    step = graphs.seconds(StepWork(9, 90, (), 9))
    assert costs.decode(9, 90)[0] == pytest.approx(step * TICKS_PER_SECOND, rel=1e-3)


def exchanging(**variants: float) -> Hardware:
    """The made-up device with kernels that exchange tokens, by bytes a second."""
    device = hardware()
    kinds: tuple[OperatorKind, ...] = ("moe_dispatch", "moe_combine")
    found = {
        f"{kind}.{variant}.bf16": operator(kind, variant=variant, bytes_per_s=rate)
        for kind in kinds
        for variant, rate in variants.items()
    }
    between = {"inter_node": Link(bytes_per_s=1e7, latency_s=1e-4, source="made up")}
    return device.model_copy(update={"operators": device.operators | found, "links": device.links | between})


def test_few_tokens_are_exchanged_with_low_latency_and_many_with_high_throughput() -> None:
    wide, plan = model(feed_forward=moe()), pool(attention_dp=2, expert_parallel=True, budget=4096)
    step = StepModel(wide, exchanging(low_latency=1e9, high_throughput=2e9), plan)
    for tokens, rate in ((256, 1e9), (257, 2e9)):
        parts = step.routed(np.array([tokens]))
        copies = tokens * 2 * 64 * 2 / 2  # two experts a token, half of them on the other rank; 64 values of 16 bits
        for kind in ("moe_dispatch", "moe_combine"):
            assert parts[kind] == pytest.approx([2 * (1e-6 + copies / rate)])
    assert "all_to_all" not in step.routed(np.array([1]))


def test_experts_behind_each_kind_of_exchange_have_kernels_of_their_own() -> None:
    wide, plan = model(feed_forward=moe()), pool(attention_dp=2, expert_parallel=True, budget=4096)
    device = hardware()
    kernels = {
        f"moe.{variant}.bf16": operator("moe", variant=variant, bytes_per_s=rate)
        for variant, rate in (("low_latency", 1e7), ("high_throughput", 1e6))
    }
    measured, general = (
        StepModel(wide, device.model_copy(update={"operators": device.operators | found}), plan)
        for found in (kernels, {})
    )
    few, many, beyond = (float(measured.routed(np.array([tokens]))["moe"][0]) for tokens in (256, 257, 512))
    assert few < many / 5, "the slower kernel multiplies more tokens of a rank than 256"
    assert many < beyond
    assert few != float(general.routed(np.array([256]))["moe"][0])
    all_tokens = pool(tp=2, expert_parallel=True, budget=4096)
    alone = StepModel(wide, device.model_copy(update={"operators": device.operators | kernels}), all_tokens)
    expected = StepModel(wide, device, all_tokens).routed(np.array([256]))["moe"]
    assert alone.routed(np.array([256]))["moe"] == expected, "no token was dispatched"


def test_many_tokens_go_once_to_every_node_that_has_an_expert_for_them() -> None:
    """Two nodes of eight, two of 32 experts a token: both are on one node with probability 15 / 31."""
    wide = model(feed_forward=moe().model_copy(update={"experts": 32}))
    plan = pool(attention_dp=16, expert_parallel=True, budget=4096)
    step = StepModel(wide, exchanging(low_latency=1e9), plan)
    nodes = 2 - 15 / 31
    few, many = (float(step.routed(np.array([tokens]))["moe_combine"][0]) / 2 for tokens in (256, 1024))
    assert few == pytest.approx(sheet(1e-4, 256 * 2 * 64 * 2 / 2, 1e7))
    assert many == pytest.approx(sheet(1e-4, 1024 * nodes * 64 * 2 / 2, 1e7))


def test_other_sixteen_bits_are_exchanged_alike() -> None:
    half = model(feed_forward=moe()).model_copy(update={"dtype": "fp16"})
    plan = pool(attention_dp=2, expert_parallel=True)
    found, known = (
        StepModel(m, exchanging(low_latency=1e9), plan).routed(np.array([9.0]))
        for m in (half, model(feed_forward=moe()))
    )
    assert found["moe_combine"] == known["moe_combine"]


def test_eight_bit_experts_are_sent_eight_bits() -> None:
    fp8 = model(feed_forward=moe()).model_copy(update={"expert_dtype": "fp8_block"})
    step = StepModel(fp8, exchanging(low_latency=1e9), pool(attention_dp=2, expert_parallel=True))
    parts = step.routed(np.array([100.0]))
    assert parts["moe_combine"] - 2 * US == pytest.approx(2 * (parts["moe_dispatch"] - 2 * US))


def test_beyond_a_node_the_link_between_nodes_sets_the_time() -> None:
    wide = model(feed_forward=moe().model_copy(update={"experts": 32}))
    step = StepModel(wide, exchanging(low_latency=1e9), pool(attention_dp=16, expert_parallel=True))
    parts = step.routed(np.array([10.0]))
    copies = 10 * 2 * 64 * 2 / 2  # half of them leave one of two nodes
    assert parts["moe_combine"] == pytest.approx([2 * sheet(1e-4, copies, 1e7)])
    assert "moe_dispatch.inter_node.bf16" in step.estimated


@pytest.mark.parametrize(
    ("ranks", "dispatch_us", "combine_us"),
    [(16, 118, 195), (32, 155, 273), (64, 173, 314), (128, 192, 369), (256, 194, 360)],
)
def test_the_estimate_between_nodes_is_near_published_times(ranks: int, dispatch_us: float, combine_us: float) -> None:
    """DeepEP's own figures of its low-latency kernels (docs/legacy.md of deepseek-ai/DeepEP): H800 with a NIC of
    400 Gb/s, 128 tokens a rank, 7,168 values, 8 experts, fp8 there and bf16 back."""
    profile = Profile(load_hardware("h100-sxm"))
    for kind, width, measured in (("moe_dispatch", 1, dispatch_us), ("moe_combine", 2, combine_us)):
        exchange = profile.predictor(kind, "bf16", variant="inter_node")  # type: ignore[arg-type]
        call = {"tokens": 128, "row_bytes": 7168 * width, "experts_per_token": 8, "experts": 256}
        seconds = exchange.seconds(**call, ep=ranks, nodes=ranks // 8)
        assert float(seconds) == pytest.approx(measured * US, rel=0.25)


@pytest.mark.parametrize(
    ("m", "settings"), [(model(), {}), (model(feed_forward=moe()), {"expert_parallel": True, "pp": 2})]
)
def test_data_parallel_attention_needs_experts_to_share_and_one_stage(m: Model, settings: dict[str, Any]) -> None:
    with pytest.raises(Infeasible, match="attention_dp requires experts and pp 1"):
        StepModel(m, hardware(), pool(attention_dp=2, **settings))


def test_slices_of_experts_must_come_out_even_over_all_groups() -> None:
    odd = model(feed_forward=moe().model_copy(update={"intermediate_size": 18}))
    with pytest.raises(Infeasible, match=r"tp x attention_dp \(4\) must divide the feed-forward width 18"):
        StepModel(odd, hardware(), pool(attention_dp=4))


@pytest.mark.parametrize("settings", [{}, {"expert_parallel": True, "expert_exchange": "all_gather"}])
def test_gathered_tokens_are_those_of_all_groups(settings: dict[str, Any]) -> None:
    """Ten tokens in each of two groups: both ranks gather twenty, and scatter the sums of as many."""
    m, device = model(feed_forward=moe()), hardware()
    collectives = {f"{kind}.bf16": operator(kind) for kind in ("all_gather", "reduce_scatter")}
    device = device.model_copy(update={"operators": device.operators | collectives})
    exchange = settings.get("expert_exchange", "deepep")
    gathering = pool(attention_dp=2, expert_parallel=bool(settings)).model_copy(update={"expert_exchange": exchange})
    parts = StepModel(m, device, gathering).routed(np.array([10.0]))
    sent = 20 * m.hidden_size * 2 / 2  # half of all rows, of 16 bits, come from the other rank
    for kind in ("moe_dispatch", "moe_combine"):
        assert parts[kind] == pytest.approx([m.num_layers * call(0, sent, 1)])


def test_slices_on_two_groups_are_slices_on_two_ranks() -> None:
    """As many tokens in all, and half of every expert: the kernel has the same to do."""
    m = model(feed_forward=moe())
    groups, ranks = (StepModel(m, hardware(), p) for p in (pool(attention_dp=2), pool(tp=2)))
    assert groups.routed(np.array([8.0]))["moe"] == ranks.routed(np.array([16.0]))["moe"]


def test_prompts_that_no_graph_holds_take_what_launching_them_takes() -> None:
    eager = pool().model_copy(update={"prompt_launch_s": 0.5})
    step_model, plain = (StepModel(model(), hardware(), p) for p in (eager, pool()))
    decodes, prompt = StepWork(3, 30, (), 3), StepWork(3, 30, ((0, 8),), 4)
    assert step_model.seconds(decodes) == plain.seconds(decodes)
    assert step_model.seconds(prompt) == 0.5 * model().num_layers > plain.seconds(prompt)
    costs, without = (compile_costs(model(), hardware(), p, 256) for p in (eager, pool()))
    assert costs.decode(3, 30) == without.decode(3, 30)
    assert costs.mixed(3, 30, [(0, 8)], 4) == round(step_model.seconds(prompt) * TICKS_PER_SECOND)


def test_steps_larger_than_the_largest_graph_take_what_launching_them_takes() -> None:
    sizes = GraphSizes(most=64, per_seat=2, launch_s=0.5)
    assert (sizes.largest(8), sizes.largest(64)) == (16, 64)
    large = pool(max_num_seqs=20).model_copy(update={"graph_sizes": sizes})
    step_model, plain = (StepModel(model(), hardware(), p) for p in (large, pool(max_num_seqs=20)))
    costs, without = (compile_costs(model(), hardware(), p, 256) for p in (large, pool(max_num_seqs=20)))
    for work, launched in (
        (StepWork(20, 200, (), 20), False),
        (StepWork(19, 190, ((0, 21),), 20), False),
        (StepWork(19, 190, ((0, 22),), 20), True),
        (StepWork(0, 0, ((0, 30), (0, 30)), 2), True),
    ):
        expected = 0.5 * model().num_layers if launched else plain.gpu_s(work)
        assert step_model.gpu_s(work) == expected
        ticks = costs.mixed(work.num_decodes, work.context_tokens, work.chunks, work.num_samples)
        assert ticks == pytest.approx(step_model.seconds(work) * TICKS_PER_SECOND, rel=1e-6 if launched else 2e-3)
        if not launched:
            assert ticks == without.mixed(work.num_decodes, work.context_tokens, work.chunks, work.num_samples)
    few = GraphSizes(most=16, launch_s=0.5)
    decodes = compile_costs(model(), hardware(), large.model_copy(update={"graph_sizes": few}), 256)
    assert decodes.decode(16, 160)[0] < decodes.decode(17, 170)[0] == round(0.5 * model().num_layers * TICKS_PER_SECOND)


def test_large_steps_are_launched_after_the_other_work_of_the_host() -> None:
    """One thread prepares a step and launches its kernels, on one GPU the one that schedules: vLLM's
    gpu_model_runner.py and uniproc_executor.py. Asynchronous scheduling hides neither behind the other."""
    host = HostTimes(step_s=0.3, per_sequence_s=0.01)
    launched_s, sizes = 0.5 * model().num_layers, GraphSizes(most=32, launch_s=0.5)
    decodes, large = StepWork(16, 160, (), 16), StepWork(16, 160, ((0, 17),), 17)
    for exposed, asynchronous in ((None, True), (HostTimes(step_s=0.1, per_sequence_s=0.002), True), (None, False)):
        update = {"graph_sizes": sizes, "host": host, "exposed_host": exposed}
        limited = pool(asynchronous=asynchronous).model_copy(update=update)
        step_model, costs = StepModel(model(), hardware(), limited), compile_costs(model(), hardware(), limited, 256)
        seconds = step_model.seconds(large)
        assert seconds == pytest.approx(launched_s + host.step_s + 17 * host.per_sequence_s)
        assert costs.mixed(16, 160, [(0, 17)], 17) == pytest.approx(seconds * TICKS_PER_SECOND, rel=1e-6)
        kernels = sum(step_model.breakdown(large).values())
        assert kernels + step_model.beyond_kernels_s(kernels, large) == pytest.approx(seconds)
        in_graph = max(step_model.gpu_s(decodes) + step_model.exposed_s(16), step_model.host.seconds(16))
        assert step_model.seconds(decodes) == in_graph


def test_prompts_may_have_smaller_graphs_than_decodes() -> None:
    sizes = GraphSizes(most=40, most_with_prompts=24, launch_s=0.5)
    assert [sizes.largest(64, prompts) for prompts in (False, True)] == [40, 24]
    few = GraphSizes(most=20, most_with_prompts=24, launch_s=0.5)
    assert few.largest(64, True) == 20
    limited = pool().model_copy(update={"graph_sizes": sizes})
    step_model, costs = StepModel(model(), hardware(), limited), compile_costs(model(), hardware(), limited, 256)
    launched_s = 0.5 * model().num_layers
    for work, is_launched in (
        (StepWork(40, 400, (), 40), False),
        (StepWork(41, 410, (), 41), True),
        (StepWork(16, 160, ((0, 8),), 17), False),
        (StepWork(16, 160, ((0, 9),), 17), True),
    ):
        assert (step_model.seconds(work) >= launched_s) is is_launched
        ticks = costs.mixed(work.num_decodes, work.context_tokens, work.chunks, work.num_samples)
        assert (ticks >= launched_s * TICKS_PER_SECOND) is is_launched


def test_no_graph_pads_a_step_that_is_larger_than_all() -> None:
    few = pool().model_copy(update={"graph_sizes": GraphSizes(most=100, launch_s=0.0)})
    limited, plain, eager = (StepModel(model(), hardware(), p) for p in (few, pool(), pool(cuda_graphs=False)))
    for tokens, like in ((97.0, eager), (90.0, plain), (125.0, eager)):
        assert limited.linear(np.array([tokens])) == like.linear(np.array([tokens]))


def test_a_norm_runs_in_the_all_reduce_before_it_where_that_is_small() -> None:
    """A megabyte on eight ranks of Blackwell: 8,192 rows of 64 values of 16 bits."""
    device = hardware()
    device = device.model_copy(update={"device": device.device.model_copy(update={"architecture": "sm_100"})})
    wide = model(heads=8, kv_heads=8)
    fused, plain = (
        StepModel(wide, device, pool(tp=8, budget=16384).model_copy(update={"fused": names}))
        for names in (("norm",), ())
    )
    for tokens, hidden in ((8192.0, True), (16384.0, False)):
        less = plain.linear(np.array([tokens]))["elementwise"] - fused.linear(np.array([tokens]))["elementwise"]
        norms = 2 * wide.num_layers * elementwise(int(tokens), 4 * wide.hidden_size)
        assert less == pytest.approx([norms * hidden])
    alone = StepModel(wide, device, pool().model_copy(update={"fused": ("norm",)}))
    assert alone.linear(np.array([8.0])) == StepModel(wide, device, pool()).linear(np.array([8.0]))


def test_rope_runs_in_attention() -> None:
    fused, plain = (
        StepModel(model(), hardware(), pool().model_copy(update={"fused": names})).linear(np.array([8.0]))
        for names in (("rope",), ())
    )
    rotated = model().layers[0].attention
    width = 2 * (rotated.heads + rotated.shared_heads) * rotated.head_dim  # type: ignore[union-attr]
    assert plain["elementwise"] - fused["elementwise"] == pytest.approx([model().num_layers * elementwise(8, width)])


def test_skewed_routing_wakes_fewer_experts() -> None:
    even, skewed = (model(feed_forward=moe().model_copy(update={"routing_skew": a})) for a in (0.0, 1.5))
    times = [StepModel(m, hardware(), pool()).breakdown(StepWork(4, 40, (), 4))["moe"] for m in (even, skewed)]
    assert times[1] < times[0]


def test_activations_are_quantised_behind_attention() -> None:
    eight_bit = model().model_copy(update={"weight_dtype": "fp8"})
    plain, quantised = (
        StepModel(m, hardware(), pool()).breakdown(StepWork(4, 40, (), 4)) for m in (model(), eight_bit)
    )
    kernel = sheet(2e-6, 3 * 4 * 64) + 4e-10
    assert quantised["elementwise"] == pytest.approx(plain["elementwise"] + 2 * kernel)
    int4 = StepModel(model().model_copy(update={"weight_dtype": "int4"}), hardware(), pool())
    assert int4.breakdown(StepWork(4, 40, (), 4))["elementwise"] == plain["elementwise"], "activations stay 16 bits"
    assert "gemm.int4" in int4.estimated, "a kernel of its own, never the bf16 one"


def test_attention_may_quantise_what_comes_out_of_it() -> None:
    eight_bit = model().model_copy(update={"weight_dtype": "fp8"})
    work = StepWork(4, 40, (), 4)
    fused = StepModel(eight_bit, hardware(), pool().model_copy(update={"fused": ("attention",)})).breakdown(work)
    assert fused["elementwise"] == StepModel(model(), hardware(), pool()).breakdown(work)["elementwise"]


def test_inputs_are_quantised_apart_but_for_those_behind_a_norm_in_an_all_reduce() -> None:
    """Of three products a layer: behind the norms, of 64 values, and behind the activation."""
    device = hardware()
    device = device.model_copy(update={"device": device.device.model_copy(update={"architecture": "sm_100"})})
    eight_bit = model(heads=8, kv_heads=8).model_copy(update={"weight_dtype": "fp8"})
    layers, tokens = eight_bit.num_layers, np.array([4.0])
    for tp, names, norms in ((1, ("norm",), 2), (2, (), 2), (2, ("norm",), 0)):
        fused, apart = (
            StepModel(eight_bit, device, pool(tp=tp).model_copy(update={"fused": names, "quantising": how}))
            for how in ("fused", "apart")
        )
        width = eight_bit.layers[0].feed_forward.intermediate_size // tp  # type: ignore[union-attr]
        own = norms * (sheet(2e-6, 3 * 4 * 64) + 4e-10) + sheet(2e-6, 3 * 4 * width) + 4e-10
        assert apart.linear(tokens)["gemm"] - fused.linear(tokens)["gemm"] == pytest.approx([layers * own])


def test_queries_beside_a_cache_of_8_bits_are_quantised_apart_where_a_plan_says_so() -> None:
    """64 values of 4 heads; attention inside is that of the cache, whatever quantises its queries."""
    work, tokens = StepWork(4, 40, (), 4), np.array([4.0])
    for cache, own in ((KvCache(dtype="fp8"), sheet(2e-6, 3 * 4 * 64) + 4e-10), (KvCache(dtype="bf16"), 0.0)):
        its = pool(kv_cache=cache)
        fused, apart = (
            StepModel(model(), hardware(), its.model_copy(update={"quantising": how})) for how in ("fused", "queries")
        )
        layers = model().num_layers
        assert apart.linear(tokens)["elementwise"] - fused.linear(tokens)["elementwise"] == pytest.approx(
            [layers * own]
        )
        assert apart.breakdown(work)["gemm"] == fused.breakdown(work)["gemm"]


@pytest.mark.parametrize("known", [False, True])
def test_of_products_timed_with_quantising_goes_what_that_took(known: bool) -> None:
    """Behind a norm; behind attention it is a kernel of its own, and stays."""
    static = operator("quantise", "fp8", variant="static")
    found = operator("quantise", "fp8")
    slower = found.model_copy(update={"base": found.base.model_copy(update={"overhead_s": 3e-6})})
    product = operator("gemm", "fp8")
    timed = product.model_copy(
        update={
            "base": product.base.model_copy(update={"ahead_s": 1e-15, "overhead_s": 1e-5}),
            "scales": "known" if known else None,
        }
    )
    device = hardware()
    operators = {**device.operators, "quantise.static.fp8": static, "quantise.fp8": slower, "gemm.fp8": timed}
    device = device.model_copy(update={"operators": operators})
    eight_bit = model().model_copy(update={"weight_dtype": "fp8"})
    fused, apart = (
        StepModel(eight_bit, device, pool().model_copy(update={"quantising": how})).linear(np.array([4.0]))["gemm"]
        for how in ("fused", "apart")
    )
    quantised = Profile(device).predictor("quantise", "fp8", variant="static" if known else None)
    gone = sum(float(quantised.seconds(m=np.array([4]), k=k)[0]) for k in (64, 64, 128))
    assert apart - fused == pytest.approx([eight_bit.num_layers * gone])


def test_other_kernels_of_experts_reach_no_more_than_they_are_said_to() -> None:
    m, tokens = model(feed_forward=moe()), np.array([1.0, 4096.0])
    plain = StepModel(m, hardware(), pool()).routed(tokens)["moe"]
    computed = m.num_layers * 6 * tokens * 2 * m.hidden_size * 32
    rate = computed[1] / (2 * plain[1])  # twice as long with many tokens, and no longer with few
    slow = StepModel(m, hardware(), pool().model_copy(update={"expert_flops_per_s": rate})).routed(tokens)["moe"]
    assert slow == pytest.approx([plain[0], 2 * plain[1]])


def test_experts_in_mxfp4_with_quantised_inputs_take_the_kernels_of_that_format() -> None:
    card, tokens, experts = load_hardware("b200-trtllm"), np.array([1.0, 64.0, 4096.0]), load_model("gpt-oss-120b")
    preset = load_engine("trtllm-1.4").settings(card.device, experts)
    assert preset["expert_activations"] == "mxfp8"
    assert "expert_activations" not in load_engine("trtllm-1.4").settings(load_hardware("h200-sxm").device, experts)
    quantised = pool().model_copy(update={"expert_activations": "mxfp8"})
    stated = experts.model_copy(update={"expert_dtype": "mxfp4_mxfp8"})
    (as_preset, as_stated, plain) = (
        StepModel(m, card, p).routed(tokens)["moe"]
        for m, p in ((experts, quantised), (stated, pool()), (experts, pool()))
    )
    assert as_preset.tolist() == as_stated.tolist()
    assert (as_preset < plain).all()


def test_a_gated_layer_projects_its_gate_along_with_the_queries() -> None:
    gated = with_attention(FullAttention(heads=4, kv_heads=2, head_dim=16, output_gate=True))
    step = StepModel(gated, hardware(), pool()).breakdown(StepWork(4, 40, (), 4))
    plain = StepModel(model(), hardware(), pool()).breakdown(StepWork(4, 40, (), 4))
    assert step["gemm"] - plain["gemm"] == pytest.approx(2 * (gemm(4, (8 + 2 + 2) * 16, 64) - gemm(4, 8 * 16, 64)))
    assert step["elementwise"] - plain["elementwise"] == pytest.approx(2 * elementwise(4, 3 * 64))


@pytest.mark.parametrize("attention", [MLA, LINEAR])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_compiled_costs_follow_every_kind(attention: object, asynchronous: bool, cuda_graphs: bool) -> None:
    """Chunks after a past, the floor of launches and the host: the tables say what the step model says."""
    fast = hardware(host_step_s=1e-4, bytes_per_s=1e14, overhead_s=1e-7, block_s=1e-12)
    plan = pool(asynchronous=asynchronous, cuda_graphs=cuda_graphs)
    step = StepModel(with_attention(attention), fast, plan)
    costs = compile_costs(with_attention(attention), fast, plan, 4096)
    for batch in (StepWork(3, 300, (), 3), StepWork(2, 200, ((0, 64), (1000, 50)), 3), StepWork(0, 0, ((4000, 9),), 1)):
        ticks = costs.mixed(batch.num_decodes, batch.context_tokens, batch.chunks, batch.num_samples)
        assert ticks == pytest.approx(step.seconds(batch) * TICKS_PER_SECOND, rel=1e-3)
    first, slope, span = costs.decode(3, 300)
    assert first == costs.mixed(3, 300, (), 3)
    for k in (1, 2, 100, min(span, 1000) - 1):
        if k < span:
            assert costs.decode(3, 300 + 3 * k)[0] == first + k * slope


def test_layers_of_one_sublayer_cost_what_it_does() -> None:
    """An attention layer and a feed-forward layer take the time of one layer of both, and the memory too."""
    both = model(layers=1)
    (group,) = both.layers
    apart = both.model_copy(
        update={
            "layers": (
                group.model_copy(update={"feed_forward": NoFeedForward()}),
                group.model_copy(update={"attention": NoAttention()}),
            )
        }
    )
    work = StepWork(3, 300, ((64, 32),), 4)
    for plan in (pool(), pool(tp=2)):
        assert StepModel(apart, hardware(), plan).breakdown(work) == pytest.approx(
            StepModel(both, hardware(), plan).breakdown(work)
        )
    # Activations are quantised in front of attention's last product only.
    eight = [m.model_copy(update={"weight_dtype": "fp8"}) for m in (both, apart)]
    steps = [StepModel(m, hardware(), pool()).breakdown(work) for m in eight]
    assert steps[0] == pytest.approx(steps[1])


def test_a_model_may_norm_behind_its_sublayers_too() -> None:
    plain = StepModel(model(layers=3), hardware(), pool()).breakdown(StepWork(4, 40, (), 4))
    twice = model(layers=3).model_copy(update={"norms_per_sublayer": 2})
    more = StepModel(twice, hardware(), pool()).breakdown(StepWork(4, 40, (), 4))
    assert more["elementwise"] - plain["elementwise"] == pytest.approx(6 * elementwise(4, 4 * 64))


def test_plain_experts_take_two_thirds_of_the_weights_of_gated_ones() -> None:
    gated, plain = (
        MoeFeedForward(experts=8, experts_per_token=2, intermediate_size=96, gated=g) for g in (True, False)
    )
    narrower = gated.model_copy(update={"intermediate_size": 64})
    times = [
        StepModel(model(feed_forward=f), hardware(), pool()).breakdown(StepWork(4, 40, (), 4))["moe"]
        for f in (plain, narrower, gated)
    ]
    assert times[0] == times[1] < times[2]


def test_the_cache_is_in_the_format_that_the_checkpoint_asks_for() -> None:
    """Unless a plan says otherwise."""
    asked = model().model_copy(update={"kv_dtype": "fp8"})
    assert "decode_attention.bf16.kv-fp8" in StepModel(asked, hardware(), pool()).estimated
    told = StepModel(asked, hardware(), pool(kv_cache=KvCache(dtype="bf16")))
    assert "decode_attention.bf16.kv-fp8" not in told.estimated


def test_keys_values_and_embeddings_take_time_apart_where_they_were_measured() -> None:
    """Two layers write 2 heads of 16 keys and values for each token; an embedding is read, and written twice."""
    without = hardware()
    variants = {
        f"elementwise.{variant}.bf16": operator("elementwise", variant=variant) for variant in ("kv_write", "embedding")
    }
    measured = without.model_copy(update={"operators": without.operators | variants})
    work = StepWork(4, 400, ((0, 28),), 5)
    plain, apart = (
        StepModel(model(), device, pool(asynchronous=False)).breakdown(work) for device in (without, measured)
    )
    more = 2 * elementwise(32, 4 * 2 * 16) + elementwise(32, 3 * 64) - elementwise(32, 2 * 64)
    assert apart["elementwise"] - plain["elementwise"] == pytest.approx(more)
    assert {kind: s for kind, s in apart.items() if kind != "elementwise"} == {
        kind: s for kind, s in plain.items() if kind != "elementwise"
    }


@pytest.mark.parametrize("largest", [None, 8, 64])
@pytest.mark.parametrize("shared", [0, 16, 1 << 20])
def test_shared_experts_beside_routed_ones_take_what_exceeds_them(largest: int | None, shared: int) -> None:
    """Steps of up to `largest` tokens wait for the slower of the two, larger ones for both."""
    spec, device = model(feed_forward=moe(shared)), hardware()
    settings = pool(asynchronous=False, cuda_graphs=False)
    after = StepModel(spec, device, settings)
    without = StepModel(model(feed_forward=moe(0)), device, settings)
    beside = StepModel(spec, device, settings.model_copy(update={"shared_experts_beside": largest}))
    for tokens in (1, 8, 9, 64, 200):
        work = StepWork(0, 0, ((0, tokens),), 1)
        plain_s, both_s = sum(without.breakdown(work).values()), sum(after.breakdown(work).values())
        routed_s = without.breakdown(work)["moe"]
        waits_s = max(0.0, both_s - plain_s - routed_s)
        expected = plain_s + (waits_s if largest and tokens <= largest else both_s - plain_s)
        assert sum(beside.breakdown(work).values()) == pytest.approx(expected)


@pytest.mark.parametrize("nodes", [2, 4])
def test_ranks_of_several_nodes_sum_inside_them_and_pass_their_parts_on(nodes: int) -> None:
    """A ring of nodes in which each of 8 ranks sends a share of its node's, twice for a sum and once to gather."""
    links = {"inter_node": Link(bytes_per_s=1e7, latency_s=2e-5, source="made up")}
    device = hardware()
    device = device.model_copy(update={"links": device.links | links})
    sizes = {"heads": 32, "kv_heads": 32, "hidden": 64, "vocab": 256}
    size = np.array([64.0, 6400.0])
    sent_s = Profile(device).predictor("send_recv", "bf16", variant="inter_node").seconds(bytes=size / (8 * nodes))
    assert sent_s[0] >= 2e-5
    for kind, rounds in (("all_reduce", 2), ("all_gather", 1)):
        ranks, alone = (RankCollective(Profile(device), kind, "bf16", n) for n in (8 * nodes, 8))  # type: ignore[arg-type]
        np.testing.assert_allclose(ranks.seconds(size) - alone.seconds(size), rounds * (nodes - 1) * sent_s)
    step = StepModel(model(**sizes), device, pool(tp=8 * nodes))  # type: ignore[arg-type]
    parts = step.breakdown(StepWork(4, 40, (), 4))
    assert "send" not in parts, "one stage"
    reduce = RankCollective(Profile(device), "all_reduce", "bf16", 8 * nodes)
    # two sublayers in each of two layers, and the embedding, of 4 rows of 64 values
    assert parts["all_reduce"] == pytest.approx(5 * float(reduce.seconds(np.array([4.0 * 64 * 2]))[0]))
    assert "send_recv.inter_node.bf16" in step.estimated


def test_nodes_of_one_device_only_pass_their_parts_on() -> None:
    links = {"inter_node": Link(bytes_per_s=1e7, latency_s=2e-5, source="made up")}
    profile = hardware()
    device = profile.device.model_copy(update={"devices_per_node": 1})
    alone = profile.model_copy(update={"device": device, "links": links})
    size = np.array([6400.0])
    sent_s = Profile(alone).predictor("send_recv", "bf16", variant="inter_node").seconds(bytes=size / 4)
    assert RankCollective(Profile(alone), "all_reduce", "bf16", 4).seconds(size) == pytest.approx(2 * 3 * sent_s)
