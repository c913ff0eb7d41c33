"""What attention kernels of known chips do, by hand: tiles, walks along keys, pieces, what a cache holds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.operators import OPERATORS, Chip, Setting, Terms
from simtune.costs.operators.attention import (
    FLASH_ATTENTION_2,
    FLASH_ATTENTION_3,
    FLASH_INFER,
    TENSORRT_LLM,
    Kernels,
    kernels_of,
    shares_keys,
)
from simtune.costs.operators.base import slowness
from simtune.specs.hardware import OperatorKind

PROCESSORS = 8
HOPPER, BLACKWELL, ADA = Chip("sm_90"), Chip("sm_100"), Chip("sm_89")


def terms(kind: OperatorKind, chip: Chip, dtype: str = "bf16", /, **shape: Any) -> Terms:
    kv_dtype = shape.pop("kv_dtype", "bf16")
    arrays = {name: np.array([float(value)]) for name, value in shape.items()}
    found = OPERATORS[kind].terms(arrays, Setting.of(PROCESSORS, dtype, kv_dtype, chip))
    return Terms(*(float(x[0]) for x in found))  # type: ignore[arg-type]


def prefill(chip: Chip, /, **shape: Any) -> Terms:
    whole: dict[str, Any] = {"batch": 1, "heads": 8, "kv_heads": 2, "head_dim": 128} | shape
    whole["context"] = whole.get("context", whole["tokens"])
    return terms("prefill_attention", chip, **({"window": whole["context"]} | whole))


def decode(chip: Chip, /, **shape: Any) -> Terms:
    whole: dict[str, Any] = {"batch": 4, "context": 4096, "heads": 8, "kv_heads": 2, "head_dim": 128} | shape
    return terms("decode_attention", chip, **({"window": whole["context"]} | whole))


@pytest.mark.parametrize(
    ("architecture", "kv_dtype", "kernels"),
    [
        ("sm_80", "bf16", FLASH_ATTENTION_2),
        ("sm_89", "bf16", FLASH_ATTENTION_2),
        ("sm_89", "fp8", FLASH_INFER),
        ("sm_90", "fp8", FLASH_ATTENTION_3),
        ("sm_90a", "bf16", FLASH_ATTENTION_3),
        ("sm_100", "bf16", TENSORRT_LLM),
        ("sm_103", "fp8", TENSORRT_LLM),
        ("sm_120", "bf16", FLASH_ATTENTION_2),
        ("gfx942", "bf16", None),
        ("x86_64", "bf16", None),
        (None, "bf16", None),
    ],
)
def test_the_kernels_of_a_chip(architecture: str | None, kv_dtype: str, kernels: Kernels | None) -> None:
    assert kernels_of(Setting.of(8, "bf16", kv_dtype, Chip(architecture))) is kernels
    assert kernels_of(Setting.of(1, "bf16", kv_dtype, Chip(architecture))) is None, "a CPU has none of them"


# --- prefill ----------------------------------------------------------------------------------------------


def test_tiles_are_filled_up_by_heads_that_share_keys_only_where_kernels_let_them() -> None:
    """16 tokens of 4 heads for each of 2 KV heads: half a tile of 128 filled by four, or an eighth by each alone."""
    together, apart = prefill(HOPPER, tokens=16), prefill(BLACKWELL, tokens=16)
    assert together.blocks == 2 / PROCESSORS
    assert apart.blocks == 8 / PROCESSORS
    pairs = 16 * 17 / 2 + 64 * 16
    assert together.flops == pytest.approx(4 * 8 * (128 + 64) * pairs * (128 / 64))
    longest = 4 * (128 + 64) * 128 * 16 * PROCESSORS
    assert apart.flops == pytest.approx(4 * 8 * (128 + 64) * pairs * (128 / 16) + longest)


def test_a_single_token_is_decoded() -> None:
    assert prefill(BLACKWELL, tokens=1, context=100).blocks == 2 / PROCESSORS
    assert prefill(ADA, tokens=1, context=100).blocks == 2 / PROCESSORS
    assert prefill(ADA, tokens=1, context=100, window=50).blocks == 8 / PROCESSORS, "not with a window"


def test_the_tile_that_sees_most_keys_is_waited_for() -> None:
    """One head of 4,096 tokens is 64 tiles on 8 processors, of 64,000 it is 1,000: the last matters less and less."""
    shares = []
    for tokens in (4096, 65536):
        shape = {"tokens": tokens, "heads": 1, "kv_heads": 1}
        shares.append(prefill(ADA, **shape).flops / prefill(HOPPER, **shape).flops)
    assert shares[0] > shares[1] > 1
    assert shares[0] == pytest.approx(1 + 2 * PROCESSORS / 64, rel=0.05), "twice the mean tile, on all processors"


def test_new_keys_and_values_are_written_to_the_cache() -> None:
    shape = {"batch": 1, "tokens": 100, "context": 300, "heads": 8, "kv_heads": 2, "head_dim": 128, "window": 300}
    known = terms("prefill_attention", HOPPER, kv_dtype="fp8", **shape)
    unknown = terms("prefill_attention", Chip(), kv_dtype="fp8", **shape)
    assert known.bytes - unknown.bytes == 2 * 128 * (2 + 1) * 2 * 100


@given(
    tokens=st.integers(1, 300),
    past=st.integers(0, 300),
    window=st.integers(1, 700),
    more=st.integers(1, 200),
    chip=st.sampled_from([HOPPER, BLACKWELL, ADA]),
)
def test_longer_prompts_never_take_less(tokens: int, past: int, window: int, more: int, chip: Chip) -> None:
    shape = {"heads": 8, "kv_heads": 8, "window": window}
    before = prefill(chip, tokens=tokens, context=past + tokens, **shape)
    after = prefill(chip, tokens=tokens + more, context=past + tokens + more, **shape)
    assert after.bytes > before.bytes > 0
    assert after.blocks >= before.blocks > 0
    assert after.flops > before.flops * 0.999 > 0


# --- decode -----------------------------------------------------------------------------------------------


def test_a_walk_takes_as_long_whatever_the_batch() -> None:
    """Heads that share no keys are not split: 8 or 2 of them on 8 processors take one walk of 64 rows."""
    few, many, more = (decode(ADA, batch=batch, heads=2, kv_heads=2) for batch in (1, 4, 5))
    walk = 4 * 64 * 128 * 4096**2 / (4096 + 128)
    assert few.flops == many.flops == pytest.approx(walk * PROCESSORS)
    assert more.flops == pytest.approx(2 * walk * PROCESSORS), "a second wave"
    assert few.bytes < many.bytes


def test_a_window_makes_every_head_read_its_own_keys() -> None:
    grouped, windowed = decode(ADA, context=1000), decode(ADA, context=1000, window=4096)
    queries = 2 * 2 * 4 * 8 * 128
    assert windowed.bytes - queries == pytest.approx(4 * (grouped.bytes - queries)), "4 heads of a group"
    assert windowed.flops > grouped.flops
    other = decode(HOPPER, context=1000, window=4096)
    assert other == decode(HOPPER, context=1000), "others do not care for a window that cuts nothing"


def test_pieces_of_a_context_are_put_together_again() -> None:
    """2 pairs on 8 processors: 8 pieces each, a twentieth of a wave for all but the first."""
    assert decode(ADA, batch=1).blocks == pytest.approx(7 / 20)
    assert decode(ADA, batch=1, context=100).blocks == 0, "one tile of keys cannot be cut"
    assert decode(ADA, batch=8).blocks == pytest.approx((2 - 1) * 512 / (4096 + 512)), "16 pairs are enough"
    assert decode(ADA, kv_dtype="fp8", batch=1).blocks == 0


def test_waves_hide_behind_long_contexts() -> None:
    waves = 16 * 2 / PROCESSORS - 1
    assert decode(HOPPER, batch=16).blocks == waves
    assert decode(BLACKWELL, batch=16).blocks == pytest.approx(waves * 512 / (4096 + 512))
    assert decode(BLACKWELL, batch=16, context=2).blocks == pytest.approx(waves, rel=0.01)


def test_who_shares_keys() -> None:
    x = {
        "heads": np.array([8.0, 8.0, 8.0]),
        "kv_heads": np.array([2.0, 8.0, 2.0]),
        "window": np.array([100.0, 100.0, 4096.0]),
        "context": np.array([100.0, 100.0, 100.0]),
    }
    assert shares_keys(x, Setting.of(8, "bf16", "bf16", ADA)).tolist() == [True, False, False]
    assert shares_keys(x, Setting.of(8, "bf16", "fp8", ADA)).all()
    assert shares_keys(x, Setting.of(8, "bf16", "bf16", HOPPER)).all()


def test_what_a_cache_holds_takes_less_time() -> None:
    cached = Setting.of(8, "bf16", None, Chip("sm_89", cache_bytes=1e8))
    held = np.array([1.0, 1e6, 8e7, 1e12])
    assert slowness(held, cached) == pytest.approx([0.4, 0.4, 0.7, 1.0], abs=1e-3)
    assert (slowness(held, Setting.of(8, "bf16", None, ADA)) == 1).all(), "nobody said what it holds"


@given(
    keys=st.integers(1, 10_000), more=st.integers(1, 10_000), batch=st.integers(1, 64), group=st.sampled_from([1, 4])
)
def test_longer_contexts_never_take_less(keys: int, more: int, batch: int, group: int) -> None:
    chip = Chip("sm_89", cache_bytes=1e7)
    shape = {"batch": batch, "heads": 2 * group, "kv_heads": 2}
    before, after = (decode(chip, context=context, **shape) for context in (keys, keys + more))
    assert after.bytes > before.bytes > 0
    assert after.flops > before.flops > 0


# --- blocks -----------------------------------------------------------------------------------------------

DEEPSEEK = {"hidden": 7168, "q_rank": 1536, "latent": 512, "rope": 64, "nope": 128, "v_dim": 128}
INDEX = {"index_heads": 64, "index_dim": 128, "topk": 2048}
WEIGHTS = 7168 * (1536 + 576) + 16 * (1536 * 192 + 512 * 256 + 128 * 7168)


def test_a_block_reads_its_weights_in_their_own_dtype() -> None:
    sixteen, eight = (
        terms("mla_decode_block", HOPPER, dtype, batch=1, context=1, heads=16, **DEEPSEEK) for dtype in ("bf16", "fp8")
    )
    assert sixteen.bytes - eight.bytes == WEIGHTS
    attention = 2 * 64 * (2 * 512 + 64)
    assert sixteen.flops == 2 * WEIGHTS + attention, "64 heads at a time, though there are 16"
    assert eight.flops == 2 * WEIGHTS + 2 * attention, "attention is in 16 bits, half as fast"


def test_few_tokens_read_the_latents_and_many_spell_them_out() -> None:
    def attention(chip: Chip, tokens: int, kv_dtype: str = "bf16") -> float:
        shape = {"batch": 1, "tokens": tokens, "context": tokens, "heads": 16}
        found = terms("mla_context_block", chip, kv_dtype=kv_dtype, **shape, **DEEPSEEK)
        return float((found.flops - 2 * tokens * WEIGHTS) / (2 * (tokens * (tokens + 1) / 2 + 64 * tokens)))

    absorbed, spelled = 64 * (2 * 512 + 64), 16 * (128 + 64 + 128 + 2 * 64)
    assert attention(HOPPER, 512) == pytest.approx(absorbed)
    assert attention(HOPPER, 513) == pytest.approx(spelled)
    assert attention(HOPPER, 129, "fp8") == pytest.approx(spelled)
    assert attention(BLACKWELL, 1) == pytest.approx(absorbed)
    assert attention(BLACKWELL, 2) == pytest.approx(spelled)


def test_a_past_is_spelled_out_once_more() -> None:
    shape = {"batch": 1, "tokens": 1000, "heads": 16}
    none, some = (terms("mla_context_block", BLACKWELL, context=c, **shape, **DEEPSEEK) for c in (1000, 3000))
    pairs = 1000 * 2000
    assert some.flops - none.flops == pytest.approx(2 * 16 * 448 * pairs + 2 * 2000 * 512 * 16 * 256)


def test_sparse_attention_counts_scores_of_all_and_sums_of_the_best() -> None:
    shape = {"batch": 1, "tokens": 1, "heads": 16}
    near, far = (terms("dsa_context_block", HOPPER, context=c, **shape, **DEEPSEEK, **INDEX) for c in (2048, 10_000))
    assert far.flops - near.flops == pytest.approx(2 * 64 * 128 * (10_000 - 2048) / 2), "scores of 8 bits only"
    assert far.bytes - near.bytes == 8 * (10_000 - 2048)
    reused = {**INDEX, "index_heads": 0}
    one, other = (terms("dsa_context_block", HOPPER, context=c, **shape, **DEEPSEEK, **reused) for c in (2048, 10_000))
    assert one == other, "a layer that goes by the indices of another does not look at the rest"


def test_delta_rules_walk_along_whole_chunks() -> None:
    shape = {"batch": 3, "heads": 4, "key_heads": 2, "key_dim": 128, "value_dim": 64}
    one, full, next_one = (
        terms("delta_prefill", HOPPER, kv_dtype="fp32", tokens=tokens, **shape) for tokens in (1, 64, 65)
    )
    assert one.flops == full.flops == 3 * 64 * 4 * (6 * 128 * 64 + 4 * 64 * (128 + 64))
    assert next_one.flops == 2 * full.flops
    assert full.blocks == 2, "12 walks on 8 processors are two waves"
    assert next_one.blocks == 4
    assert full.bytes - one.bytes == 2 * 2 * 3 * 63 * (2 * 128 + 4 * 64)


def test_a_convolution_moves_each_value_twice() -> None:
    many = terms("conv_prefill", HOPPER, batch=2, tokens=100, channels=4096, width=4)
    assert many.flops == 0
    assert many.bytes == 2 * 2 * 4096 * (2 * 100 + 3)
    one = terms("conv_decode", HOPPER, batch=2, channels=4096, width=4)
    assert one.bytes == 2 * 2 * 4096 * (3 + 2)
    assert one.blocks == math.ceil(2 * 64 / PROCESSORS) - 1


def test_images_attend_in_whole_tiles() -> None:
    found = terms("encoder_attention", HOPPER, batch=2, tokens=100, heads=4, head_dim=72)
    assert found.flops == 4 * 2 * 4 * (72 + 64) * 128 * 128
    assert found.bytes == 4 * 2 * 2 * 4 * 100 * 72


def test_absorbing_products_are_one_for_each_head() -> None:
    found = terms("mla_products", HOPPER, tokens=10, heads=16, n=512, k=128)
    assert found.flops == 16 * 2 * 10 * 512 * 128
    assert found.bytes == 16 * 2 * (10 * 128 + 512 * 128 + 10 * 512)


def test_what_residuals_know_of_the_work_of_a_call() -> None:
    """Eight processors: five sequences of two KV heads are two waves, of which the last leaves six processors idle; a
    group of four heads fills half of the eight that tensor cores take."""
    shape = {"batch": 5.0, "context": 4096.0, "heads": 8.0, "kv_heads": 2.0, "head_dim": 192.0, "window": 1024.0}
    decoded = features("decode_attention", Setting.of(PROCESSORS, "bf16", None), **shape)
    assert decoded["waves"] == pytest.approx(math.log2(10 / 8))
    assert decoded["last wave"] == pytest.approx(math.log2(16 / 10))
    assert decoded["eights"] == pytest.approx(1)
    assert (decoded["seen"], decoded["kv heads"], decoded["beyond 128"]) == (10, 1, 1)
    assert decoded["group"] == 2, "four heads share a KV head"
    work = terms("decode_attention", Chip(), **shape)
    assert 2 ** decoded["flops"] == pytest.approx(work.flops)
    assert 2 ** decoded["bytes"] == pytest.approx(work.bytes)
    prompt = {"batch": 1.0, "tokens": 640.0} | {n: x for n, x in shape.items() if n != "batch"}
    laid_out = features("prefill_attention", Setting.of(PROCESSORS, "bf16", None), **prompt)
    assert 2 ** laid_out["tiles"] == pytest.approx(2 * 20)  # 2,560 rows of either KV head by 128
    assert laid_out["last wave"] == pytest.approx(0)
    assert {"tiles", "last wave"} <= features("prefill_attention", Setting.of(2, "bf16", None), **prompt).keys()
    one_core = features("decode_attention", Setting.of(1, "bf16", None), **shape)
    assert {"waves", "eights", "flops"}.isdisjoint(one_core)


def features(kind: OperatorKind, setting: Setting, **shape: float) -> dict[str, float]:
    """Of one call."""
    found = OPERATORS[kind].features({name: np.array([value]) for name, value in shape.items()}, setting)
    return {name: float(column[0]) for name, column in found.items()}
