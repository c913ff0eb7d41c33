"""Times and memory of vision encoders: written out product by product, ranks that share layers or images, windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simtune.costs.encoder import EncoderCosts, Work, balanced
from simtune.costs.encoder_memory import encoder_memory
from simtune.costs.memory import kv_capacity
from simtune.costs.predict import Profile
from simtune.errors import Infeasible
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.pool import Pool

MODEL, H100 = load_model("qwen2.5-vl-7b"), load_hardware("h100-sxm")
IMAGE = Work(1, 4784, 1196)  # 1280 x 720


def pool(tp: int = 1, tp_mode: str | None = "weights", **more: Any) -> Pool:
    encoder = None if tp_mode is None else {"tp_mode": tp_mode, **more}
    batching = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
    settings = {"hardware": "h100-sxm", "instances": 1, "parallelism": {"tp": tp}, "batching": batching}
    settings["max_model_len"] = 16384
    return Pool.model_validate({**settings, "encoder": encoder})


def test_the_time_of_an_image_is_the_sum_of_its_kernels() -> None:
    """Qwen2.5-VL: 32 layers of width 1280 and 3420, 4 of them with full attention, 28 in windows of 64 patches; two
    products behind them."""
    profile = Profile(H100)
    gemm, attention = profile.predictor("gemm", "bf16"), profile.predictor("encoder_attention", "bf16")
    norm, activation = (profile.predictor("elementwise", "bf16", variant=name) for name in ("norm", "activation"))
    rows = 4784
    products = [(3 * 1280, 1280), (1280, 1280), (2 * 3420, 1280), (1280, 3420)]
    layer = sum(float(gemm.seconds(m=rows, n=n, k=k)) for n, k in products)
    layer += 2 * float(norm.seconds(rows=rows, width=4 * 1280)) + float(activation.seconds(rows=rows, width=3 * 3420))
    full = float(attention.seconds(batch=1, tokens=rows, heads=16, head_dim=80))
    # 74 windows of 64 patches, and one of the 48 that are left
    whole = float(attention.seconds(batch=74, tokens=64, heads=16, head_dim=80))
    part = float(attention.seconds(batch=1, tokens=48, heads=16, head_dim=80))
    windows = max(whole, whole + part - attention.overhead_s)
    outside = [(rows, 1280, 3 * 2 * 14 * 14), (1196, 5120, 5120), (1196, 3584, 5120)]
    products_s = sum(float(gemm.seconds(m=m, n=n, k=k)) for m, n, k in outside)
    expected = 32 * layer + 4 * full + 28 * windows + products_s
    assert EncoderCosts(MODEL, H100, pool()).seconds([IMAGE]) == pytest.approx(expected, rel=1e-9)


def test_the_time_of_a_video_is_that_of_its_groups() -> None:
    """Three groups of frames of 640 x 360: all patches in each product; a group, or window of it, attends to itself."""
    profile = Profile(H100)
    gemm, attention = profile.predictor("gemm", "bf16"), profile.predictor("encoder_attention", "bf16")
    norm, activation = (profile.predictor("elementwise", "bf16", variant=name) for name in ("norm", "activation"))
    rows = 3 * 1196
    products = [(3 * 1280, 1280), (1280, 1280), (2 * 3420, 1280), (1280, 3420)]
    layer = sum(float(gemm.seconds(m=rows, n=n, k=k)) for n, k in products)
    layer += 2 * float(norm.seconds(rows=rows, width=4 * 1280)) + float(activation.seconds(rows=rows, width=3 * 3420))
    full = float(attention.seconds(batch=3, tokens=1196, heads=16, head_dim=80))
    # 18 windows of 64 patches in each group, and one of 44
    many = float(attention.seconds(batch=3 * 18, tokens=64, heads=16, head_dim=80))
    few = float(attention.seconds(batch=3, tokens=44, heads=16, head_dim=80))
    windows = max(many, few, many + few - attention.overhead_s)
    outside = [(rows, 1280, 3 * 2 * 14 * 14), (897, 5120, 5120), (897, 3584, 5120)]
    expected = 32 * layer + 4 * full + 28 * windows + sum(float(gemm.seconds(m=m, n=n, k=k)) for m, n, k in outside)
    video = Work(3, 1196, 897, "video")
    assert EncoderCosts(MODEL, H100, pool()).seconds([video]) == pytest.approx(expected, rel=1e-9)


def test_the_time_of_a_recording_is_the_sum_of_its_kernels() -> None:
    """Voxtral, 40 s: two chunks of 1,500 patches in 32 layers of width 1280 and 5120; two convolutions and products."""
    profile = Profile(H100)
    gemm, attention = profile.predictor("gemm", "bf16"), profile.predictor("encoder_attention", "bf16")
    norm, activation = (profile.predictor("elementwise", "bf16", variant=name) for name in ("norm", "activation"))
    products = [(3 * 1280, 1280), (1280, 1280), (5120, 1280), (1280, 5120)]
    layer = sum(float(gemm.seconds(m=3000, n=n, k=k)) for n, k in products)
    layer += 2 * float(norm.seconds(rows=3000, width=4 * 1280)) + float(activation.seconds(rows=3000, width=2 * 5120))
    layer += float(attention.seconds(batch=2, tokens=1500, heads=20, head_dim=64))
    # 6,000 frames of 128 bins, then half as many; three of them are read at a time
    outside = [(6000, 1280, 3 * 128), (3000, 1280, 3 * 1280), (750, 3072, 5120), (750, 3072, 3072)]
    expected = 32 * layer + sum(float(gemm.seconds(m=m, n=n, k=k)) for m, n, k in outside)
    listens = load_model("voxtral-mini-3b")
    assert EncoderCosts(listens, H100, pool()).seconds([Work(2, 1500, 750, "audio")]) == pytest.approx(expected)


def test_an_encoder_that_ranks_repeat_is_no_faster_on_several() -> None:
    """Qwen's older encoders are whole on every rank; with `data` every rank encodes all recordings."""
    listens = load_model("voxtral-mini-3b")
    assert listens.audio is not None
    repeating = listens.model_copy(update={"audio": listens.audio.model_copy(update={"ranks": "repeat"})})
    sound = [Work(2, 1500, 750, "audio")]
    alone, shared = (EncoderCosts(listens, H100, pool(tp)).seconds(sound) for tp in (1, 4))
    assert shared < alone
    assert EncoderCosts(repeating, H100, pool(4)).seconds(sound) == alone
    assert EncoderCosts(listens, H100, pool(4, "data")).seconds(sound) == alone
    with pytest.raises(
        Infeasible, match=r"20 heads of the audio encoder of voxtral-mini-3b .* over tp \(8\); change tp"
    ):
        EncoderCosts(listens, H100, pool(8))


def test_two_images_in_one_step_take_less_than_two_steps_and_more_than_one() -> None:
    costs = EncoderCosts(MODEL, H100, pool())
    assert costs.seconds([]) == 0
    assert costs.seconds([IMAGE]) < costs.seconds([IMAGE, IMAGE]) < 2 * costs.seconds([IMAGE])


def test_ranks_that_share_images_take_the_time_of_the_busiest_one() -> None:
    """Two equal images on two ranks: as one alone, but for the gathering of their embeddings."""
    alone, shared = EncoderCosts(MODEL, H100, pool()), EncoderCosts(MODEL, H100, pool(2, "data"))
    gather = Profile(H100).predictor("all_gather", "bf16").seconds(devices=2, bytes=np.array([2 * 1196 * 3584 * 2.0]))
    assert shared.seconds([IMAGE, IMAGE]) == pytest.approx(alone.seconds([IMAGE]) + float(gather[0]))
    by_weights = EncoderCosts(MODEL, H100, pool(2)).seconds([IMAGE])
    assert alone.seconds([IMAGE]) / 2 < by_weights < alone.seconds([IMAGE])


def test_the_next_largest_image_goes_to_the_rank_with_the_fewest_patches() -> None:
    sizes = [Work(1, 8, 2), Work(1, 12, 3), Work(1, 4, 1), Work(1, 16, 4), Work(1, 8, 2)]
    assert [[item.patches for item in share] for share in balanced(sizes, 2)] == [[16, 8], [12, 8, 4]]


def test_launching_takes_its_time() -> None:
    """A small image takes what launching the kernels of 32 layers takes."""
    slow = pool().model_copy(update={"graph_sizes": None})
    launched = Pool.model_validate(
        {**slow.model_dump(exclude_unset=True), "graph_sizes": {"most": 512, "launch_s": 0.001}}
    )
    assert EncoderCosts(MODEL, H100, launched).seconds([Work(1, 16, 4)]) == pytest.approx(0.032)


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(Infeasible, match=r"16 heads of the vision encoder of qwen2\.5-vl-7b cannot be divided over tp"):
        EncoderCosts(MODEL, H100, pool(5))
    EncoderCosts(MODEL, H100, pool(5, "data"))


def test_memory_of_an_encoder() -> None:
    """Weights by rank or on each; 16,384 embeddings of the largest image kept, which is more than a step has tokens."""
    assert MODEL.vision is not None
    weights = 2 * MODEL.vision.parameters
    one, shared, whole = (encoder_memory(MODEL, pool(*of)) for of in ((1,), (2,), (2, "data")))
    assert (one.weights, shared.weights, whole.weights) == (weights, weights / 2, weights)
    assert one.kept == 16384 * 3584 * 2
    assert encoder_memory(MODEL, pool(1, "weights", cache_size=20000)).kept == 20000 * 3584 * 2
    # 65,536 patches: twice the width, and three times the inner one
    assert one.inside == 2 * 65536 * (2 * 1280 + 3 * 3420)
    # a prompt of 128,000 tokens may have a video of 14 frames, unless none is taken
    longer = pool(1, "weights").model_copy(update={"max_model_len": None})
    assert encoder_memory(MODEL, longer).kept == 7 * 16384 * 3584 * 2
    pictures = pool(1, "weights", limit_per_prompt={"video": 0}).model_copy(update={"max_model_len": None})
    assert encoder_memory(MODEL, pictures) == one
    nothing = pool(1, "weights", limit_per_prompt={"video": 0, "image": 0})
    assert encoder_memory(MODEL, nothing) == (0, 0, 0)
    assert encoder_memory(MODEL, pool(1, None)) == (0, 0, 0)
    assert encoder_memory(load_model("qwen2.5-7b"), pool()) == (0, 0, 0)
    # a prompt of nothing but sound: 44 chunks of 1,500 patches
    listens = load_model("voxtral-mini-3b")
    assert listens.audio is not None
    weights = 2 * listens.audio.parameters
    assert encoder_memory(listens, pool()) == (weights, 2 * 16384 * 3072, 2 * 44 * 1500 * (2 * 1280 + 2 * 5120))


def test_an_encoder_takes_kv_blocks() -> None:
    without, with_it = (kv_capacity(MODEL, H100, pool(1, mode)) for mode in (None, "weights"))
    assert MODEL.vision is not None
    assert with_it.weights_bytes - without.weights_bytes == 2 * MODEL.vision.parameters
    taken = with_it.weights_bytes + with_it.other_bytes - without.weights_bytes - without.other_bytes
    assert without.kv_bytes - with_it.kv_bytes == pytest.approx(taken)
    assert with_it.num_blocks < without.num_blocks
