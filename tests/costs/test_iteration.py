"""A step of a tiny model on a made-up device, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.iteration import SAMPLING_PASSES, SAMPLING_S, Batch, StepModel, padded_tokens
from simtune.errors import Infeasible
from simtune.specs.model import DenseFeedForward
from simtune.specs.plan import KvCache
from tests.costs.made_up import hardware, model, moe, pool

US = 1e-6


def call(flops: float, moved: float, blocks: float = 0.0) -> float:
    """The made-up device: 1 us + flops at 1 TFLOP/s + bytes at 1 GB/s + 1 ns a block."""
    return 1e-6 + flops / 1e12 + moved / 1e9 + blocks * 1e-9


def gemm(m: int, n: int, k: int) -> float:
    """bf16; one tile on eight processors leaves half a block of a k of 3,072."""
    tiles = math.ceil(m / 128) * math.ceil(n / 128)
    return call(2 * m * n * k, 2 * (m * k + n * k + m * n), min(1, k / 3072) * max(0, 1 - 4 * tiles / 8))


def elementwise(rows: int, width: int) -> float:
    return call(0, 2 * rows * width, rows)


def test_decode_step_of_a_dense_model() -> None:
    # 2 layers, hidden 64, 4 heads and 2 KV heads of 16, feed-forward 128, vocabulary 256.
    # Three sequences of 10 tokens; the CUDA graph is the one for four tokens.
    step = StepModel(model(), hardware(), pool()).breakdown(Batch(3, 30, (), 3))

    layer = gemm(4, (4 + 2 + 2) * 16, 64) + gemm(4, 64, 4 * 16) + gemm(4, 2 * 128, 64) + gemm(4, 64, 128)
    assert step["gemm"] == pytest.approx(2 * layer)
    small = 2 * elementwise(4, 4 * 64) + elementwise(4, 2 * (4 + 2) * 16) + elementwise(4, 3 * 128)
    ends = elementwise(4, 2 * 64) + elementwise(4, 4 * 64)  # embedding and final norm
    assert step["elementwise"] == pytest.approx(2 * small + ends)
    # flops 4 b h d s; bytes of K and V of 10 tokens in 2 KV heads of 3 sequences, of q and output; one wave
    attention = call(4 * 3 * 4 * 16 * 10, 2 * 2 * 3 * 2 * 10 * 16 + 2 * 2 * 3 * 4 * 16, 0)
    assert step["decode_attention"] == pytest.approx(2 * attention)
    assert step["head"] == pytest.approx(gemm(3, 256, 64))
    assert step["sampling"] == pytest.approx(SAMPLING_S + SAMPLING_PASSES * 3 * 256 * 4 / 1e9)
    assert set(step) == {"gemm", "elementwise", "decode_attention", "head", "sampling"}


def test_prefill_chunks_are_differences_of_whole_prompts() -> None:
    parts = StepModel(model(), hardware(), pool())
    whole = parts.breakdown(Batch(chunks=((0, 96),)))["prefill_attention"]
    first = parts.breakdown(Batch(chunks=((0, 64),)))["prefill_attention"]
    second = parts.breakdown(Batch(chunks=((64, 32),)))["prefill_attention"]
    # 4 h d s(s+1)/2 flops; q, k, v, output once; 2 KV heads x ceil(192/128) x 16/128 blocks on 8 processors
    by_hand = call(4 * 4 * 16 * 96 * 97 / 2, 2 * 96 * 16 * 2 * (4 + 2), 2 * 2 * (16 / 128) / 8)
    assert whole == pytest.approx(2 * by_hand)
    assert first + second == pytest.approx(whole + 2 * US), "each chunk pays its own overhead, in two layers"


def test_tokens_of_decodes_and_chunks_share_the_matrix_products() -> None:
    parts = StepModel(model(), hardware(), pool())
    mixed = parts.breakdown(Batch(10, 500, ((0, 500), (100, 90)), 11))
    assert mixed["gemm"] == parts.breakdown(Batch(chunks=((0, 600),)))["gemm"], "600 tokens are beyond the graphs"
    assert mixed["head"] == pytest.approx(gemm(11, 256, 64)), "only rows that get a token reach the head"


def test_tensor_parallel_ranks_take_their_share_and_reduce() -> None:
    step = StepModel(model(), hardware(), pool(tp=4)).breakdown(Batch(4, 40, (), 4))
    # One head each; two KV heads on four ranks are repeated, so each rank has one.
    layer = gemm(4, (1 + 1 + 1) * 16, 64) + gemm(4, 64, 16) + gemm(4, 2 * 32, 64) + gemm(4, 64, 32)
    assert step["gemm"] == pytest.approx(2 * layer)
    reduce = call(0, 2 * 3 / 4 * 4 * 64 * 2, 3)  # ring of four, 4 tokens of 64 values in bf16
    assert step["all_reduce"] == pytest.approx((2 * 2 + 1) * reduce), "two a layer, and one for the embedding"
    gather = 1e-5 + 4 * 64 * 3 * 2 / 1e8  # logits of 64 tokens of the vocabulary from three others
    assert step["head"] == pytest.approx(gemm(4, 64, 64) + gather)


def test_pipeline_stages_add_sends_and_nothing_else() -> None:
    batch = Batch(4, 40, (), 4)
    one = StepModel(model(), hardware(), pool()).breakdown(batch)
    two = StepModel(model(), hardware(), pool(pp=2)).breakdown(batch)
    assert two.pop("send") == pytest.approx(1e-5 + 4 * 64 * 2 / 1e8)
    assert two == one


def test_mixture_of_experts_layer() -> None:
    step = StepModel(model(feed_forward=moe(shared=48)), hardware(), pool()).breakdown(Batch(4, 40, (), 4))
    attention = gemm(4, 128, 64) + gemm(4, 64, 64)
    router, shared = gemm(4, 8, 64), gemm(4, 2 * 48, 64) + gemm(4, 64, 48)
    assert step["gemm"] == pytest.approx(2 * (attention + router + shared))
    active = 8 * (1 - (1 - 2 / 8) ** 4)  # of 8 experts, each of 4 tokens picks 2
    rows, matrices = 4 * 2, 3 * 64 * 32
    moved = 2 * active * matrices + 2 * (rows * (2 * 64 + 3 * 32) + 2 * 4 * 64)
    experts = call(2 * rows * matrices, moved, active * (2 * 32 + 64) / 128 / 8)
    assert step["moe"] == pytest.approx(2 * experts)


def test_plain_feed_forward_has_two_matrices() -> None:
    plain = model(feed_forward=DenseFeedForward(intermediate_size=128, gated=False))
    step = StepModel(plain, hardware(), pool()).breakdown(Batch(4, 40, (), 4))
    layer = gemm(4, 128, 64) + gemm(4, 64, 64) + gemm(4, 128, 64) + gemm(4, 64, 128)
    assert step["gemm"] == pytest.approx(2 * layer)


def test_sliding_windows_stop_the_growth() -> None:
    full, sliding = (StepModel(model(window=w), hardware(), pool()) for w in (None, 32))
    contexts = np.array([16.0, 32.0, 64.0, 1024.0])
    assert sliding.decode(3, contexts)[:2] == pytest.approx(full.decode(3, contexts)[:2])
    assert sliding.decode(3, contexts)[2:] == pytest.approx(full.decode(3, np.array([32.0]))[0])
    prompts = np.array([16.0, 32.0, 64.0])
    assert sliding.prefill(prompts)[:2] == pytest.approx(full.prefill(prompts)[:2])
    assert sliding.prefill(prompts)[2] < full.prefill(prompts)[2]


def test_graph_sizes_are_those_vllm_captures() -> None:
    tokens = np.array([1, 2, 3, 5, 8, 9, 255, 257, 272, 512, 513, 5000])
    assert padded_tokens(tokens).tolist() == [1, 2, 4, 8, 8, 16, 256, 272, 272, 512, 513, 5000]


def test_host_time_hides_behind_the_gpu_or_adds_to_it() -> None:
    slow_host = hardware(host_step_s=1.0, host_per_sequence_s=0.25)
    batch = Batch(2, 20, (), 2)
    gpu = sum(StepModel(model(), slow_host, pool()).breakdown(batch).values())
    assert StepModel(model(), slow_host, pool()).seconds(batch) == 1.5
    assert StepModel(model(), slow_host, pool(asynchronous=False)).seconds(batch) == pytest.approx(1.5 + gpu)
    assert StepModel(model(), hardware(), pool()).seconds(batch) == pytest.approx(gpu)


@given(
    lengths=st.lists(st.integers(1, 100_000), min_size=1, max_size=40),
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 128, 4096]),
    overlap_p=st.floats(1, 10),
)
def test_the_mean_context_covers_the_longest_sequence(
    lengths: list[int], kv_heads: int, window: int | None, overlap_p: float
) -> None:
    """Why a batch needs only the sum of its contexts: its mean never takes less than its longest member
    alone.
    """
    step = StepModel(model(kv_heads=kv_heads, window=window), hardware(overlap_p=overlap_p), pool())
    batch = step.decode(len(lengths), np.array([np.mean(lengths)]))[0]
    longest = step.decode(1, np.array([max(lengths)]))[0]
    assert batch >= longest * (1 - 1e-12)


@pytest.mark.parametrize(
    ("sizes", "tp", "pp", "words"),
    [
        ({}, 3, 1, "tp must divide the 4 attention heads"),
        ({"heads": 12, "kv_heads": 3}, 2, 1, "3 KV heads"),
        ({"heads": 12, "kv_heads": 2}, 3, 1, "2 KV heads"),
        ({"feed_forward": DenseFeedForward(intermediate_size=130)}, 4, 1, "feed-forward width 130"),
        ({"feed_forward": moe(shared=33)}, 2, 1, "feed-forward width 33"),
        ({}, 1, 3, "pp 3 exceeds its 2 layers"),
        ({"heads": 16, "kv_heads": 16}, 16, 1, "a node has 8 devices"),
        ({"layers": 9}, 1, 9, "no link inter_node"),
    ],
)
def test_impossible_sharding_is_refused(sizes: dict[str, object], tp: int, pp: int, words: str) -> None:
    with pytest.raises(Infeasible, match=words):
        StepModel(model(**sizes), hardware(), pool(tp=tp, pp=pp))  # type: ignore[arg-type]


def test_a_missing_operator_is_named_with_the_remedy() -> None:
    profile = hardware()
    operators = {key: value for key, value in profile.operators.items() if not key.startswith("moe")}
    without = profile.model_copy(update={"operators": operators})
    with pytest.raises(Infeasible, match=r"made-up: no operator moe\.bf16.*no moe operator at all.*simtune fit"):
        StepModel(model(feed_forward=moe()), without, pool())
    with pytest.raises(Infeasible, match=r"no operator decode_attention\.bf16\.kv-fp8.*it has decode_attention\.bf16"):
        StepModel(model(), profile, pool(kv_cache=KvCache(dtype="fp8")))
