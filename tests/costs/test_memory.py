"""KV capacity against start-up logs that others published, and the refusals."""

from __future__ import annotations

import pytest

from simtune.costs.memory import (
    GIB,
    kv_bytes_per_token,
    kv_capacity,
    stage_layers,
    weights_bytes,
)
from simtune.errors import Infeasible
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.model import DenseFeedForward, FullAttention, LayerGroup, Model, MoeFeedForward
from simtune.specs.plan import Batching, KvCache, Parallelism, Pool
from tests.costs.made_up import hardware, model, moe, pool


def test_llama_2_7b_on_an_a100_has_the_blocks_vllm_logged() -> None:
    """7,351 GPU blocks at utilization 0.90 (vllm issue 2031); defaults of that time: 4,096 tokens, 256
    sequences.
    """
    plan = Pool(
        hardware="a100-sxm-80g",
        instances=1,
        batching=Batching(max_num_seqs=256, max_num_batched_tokens=4096),
        kv_cache=KvCache(memory_utilization=0.90),
    )
    memory = kv_capacity(load_model("llama-2-7b"), load_hardware("a100-sxm-80g"), plan)
    assert memory.num_blocks == pytest.approx(7351, rel=0.005)
    assert memory.kv_bytes_per_token == 2 * 32 * 32 * 128 * 2


def test_weights_of_llama_3_1_70b_in_int8() -> None:
    """67.72 GiB logged: int8 layers, 16-bit embeddings (vllm issue 12569)."""
    weights = weights_bytes(load_model("llama-3.1-70b", ["weight_dtype=int8"]), Parallelism(), 0)
    assert weights / GIB == pytest.approx(67.72, rel=0.002)


def _qwen(
    layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, ff: DenseFeedForward | MoeFeedForward
) -> Model:
    attention = FullAttention(heads=heads, kv_heads=kv_heads, head_dim=128)
    group = LayerGroup(count=layers, attention=attention, feed_forward=ff)
    return Model(name="qwen", hidden_size=hidden, vocab_size=vocab, max_position=32768, layers=(group,))


def test_weights_of_qwen_2_5_14b_on_two_ranks() -> None:
    """13.9476 GiB logged per rank (vllm issue 13061); its QKV biases are not in the formula."""
    qwen = _qwen(48, 5120, 40, 8, 152064, DenseFeedForward(intermediate_size=13824))
    assert weights_bytes(qwen, Parallelism(tp=2), 0) / GIB == pytest.approx(13.9476, rel=0.015)


def test_tokens_of_qwen_3_235b_on_four_ranks() -> None:
    """8.11 GiB of KV cache hold 178,880 tokens (vllm issue 21348)."""
    experts = MoeFeedForward(experts=128, experts_per_token=8, intermediate_size=1536)
    per_token = kv_bytes_per_token(_qwen(94, 4096, 64, 4, 151936, experts), Parallelism(tp=4), 0, "bf16")
    assert 8.11 * GIB / per_token == pytest.approx(178880, rel=0.015)


def test_weights_by_hand() -> None:
    tiny = model(layers=3, vocab=250)  # hidden 64, 4 + 2 heads of 16, feed-forward 128
    layer = 64 * 16 * 2 * (4 + 2) + 3 * 64 * 128 + 2 * 64
    assert weights_bytes(tiny, Parallelism(), 0) == 2 * (3 * layer + 2 * 250 * 64 + 64)
    assert weights_bytes(model(layers=3, vocab=250, tie=True), Parallelism(), 0) == 2 * (3 * layer + 250 * 64 + 64)
    # Two stages: embeddings on the first, head and final norm on the last, of a tied model too.
    assert weights_bytes(tiny, Parallelism(pp=2), 0) == 2 * (2 * layer + 250 * 64)
    assert weights_bytes(model(layers=3, vocab=250, tie=True), Parallelism(pp=2), 1) == 2 * (layer + 250 * 64 + 64)
    # Four ranks: one head each, two KV heads repeated; the vocabulary is padded to 4 x 63.
    rank = 64 * 16 * 2 * (1 + 1) + 3 * 64 * 32 + 2 * 64
    assert weights_bytes(tiny, Parallelism(tp=4), 0) == 2 * (3 * rank + 2 * 63 * 64 + 64)
    # Experts are split over ranks by width, the router is not.
    sparse = weights_bytes(model(layers=1, feed_forward=moe(shared=48)), Parallelism(tp=2), 0)
    rank = 64 * 16 * 2 * (2 + 1) + 3 * 64 * (8 * 32 + 48) // 2 + 64 * 8 + 2 * 64
    assert sparse == 2 * (rank + 2 * 128 * 64 + 64)


def test_layers_are_spread_evenly_over_stages() -> None:
    assert [len(stage) for stage in stage_layers(model(layers=10), 4)] == [3, 3, 2, 2]
    assert [len(stage) for stage in stage_layers(model(layers=8), 2)] == [4, 4]


def test_the_tightest_stage_decides() -> None:
    """Of three layers on two stages the first stage holds two, and its blocks bound the instance."""
    uneven, plan = model(layers=3), pool(pp=2)
    memory = kv_capacity(uneven, hardware(memory_bytes=8 * GIB), plan)
    per_token = 2 * (2 * 2 * 16) * 2  # two layers, K and V of two heads of 16, two bytes
    room = 0.92 * 8 * GIB - weights_bytes(uneven, plan.parallelism, 0) - memory.other_bytes
    assert memory.num_blocks == room // (16 * per_token) - 1


def test_dtype_and_block_size_of_the_cache() -> None:
    device = hardware(memory_bytes=8 * GIB)
    plain = kv_capacity(model(), device, pool())
    half = kv_capacity(model(), device, pool(kv_cache=KvCache(dtype="fp8")))
    assert half.num_blocks == pytest.approx(2 * plain.num_blocks, rel=1e-3)
    wide = kv_capacity(model(), device, pool(kv_cache=KvCache(block_size=64)))
    assert wide.num_blocks == pytest.approx(plain.num_blocks / 4, rel=1e-3)


def test_the_number_of_blocks_can_be_given() -> None:
    memory = kv_capacity(model(), hardware(memory_bytes=1 * GIB), pool(kv_cache=KvCache(num_blocks=120)))
    assert memory.num_blocks == 119, "vLLM keeps one block for itself"
    assert memory.kv_bytes == 120 * 16 * memory.kv_bytes_per_token
    with pytest.raises(Infeasible, match="num_blocks 1 leaves none"):
        kv_capacity(model(), hardware(), pool(kv_cache=KvCache(num_blocks=1)))


def test_too_little_memory_says_how_much_is_missing() -> None:
    plan = pool()
    with pytest.raises(Infeasible, match=r"GiB per device are missing.*more tp or pp, fp8 weights") as refusal:
        kv_capacity(model(), hardware(memory_bytes=1.0 * GIB), plan)
    missing = float(str(refusal.value).split(" GiB per device")[0].split()[-1])
    enough = hardware(memory_bytes=(1.0 + (missing + 0.01) / 0.92) * GIB)
    assert kv_capacity(model(), enough, plan).num_blocks >= 1
    short = hardware(memory_bytes=(1.0 + (missing - 0.01) / 0.92) * GIB)
    with pytest.raises(Infeasible):
        kv_capacity(model(), short, plan)
