"""Models whose layers keep different things of the past: full and windowed keys, latent vectors, states."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from simtune.sim.deployment import Deployment, deploy
from simtune.specs.catalog import load_hardware
from simtune.specs.model import (
    DenseFeedForward,
    FullAttention,
    LayerGroup,
    LinearAttention,
    MlaAttention,
    Model,
    SlidingAttention,
)
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, Pool
from simtune.specs.workload import FixedLength, Lognormal, Poisson, Workload
from simtune.workload.requests import RequestStream, build_stream

LONGEST = 32_768
SEATS = 32
FULL = FullAttention(heads=32, kv_heads=8, head_dim=128)
SLIDING = SlidingAttention(heads=32, kv_heads=8, head_dim=128, window=1024)
LATENT = MlaAttention(
    heads=32, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
STATE = LinearAttention(heads=32, key_heads=16, key_dim=128, value_dim=128)


KINDS: dict[str, tuple[tuple[int, FullAttention | MlaAttention | LinearAttention], ...]] = {
    "full": ((32, FULL),),
    "half sliding": ((16, FULL), (16, SLIDING)),
    "latent": ((32, LATENT),),
    "three quarters linear": ((8, FULL), (24, STATE)),
    "all linear": ((32, STATE),),
}


@cache
def deployed(kind: str) -> Deployment:
    """32 layers of these kinds, otherwise as in an 8B model."""
    feed_forward = DenseFeedForward(intermediate_size=14336)
    groups = tuple(LayerGroup(count=n, attention=attention, feed_forward=feed_forward) for n, attention in KINDS[kind])
    model = Model(name="m", hidden_size=4096, vocab_size=128_256, max_position=LONGEST, layers=groups)
    pool = Pool(hardware="h100-sxm", instances=1, batching=Batching(max_num_seqs=SEATS, max_num_batched_tokens=4096))
    return deploy(Plan(name="p", model="m", pools=(pool,)), model, load_hardware("h100-sxm"))


def long_prompts() -> RequestStream:
    workload = Workload(
        name="long",
        arrivals=Poisson(rate_rps=0.4),
        prompt=Lognormal(mean_tokens=9000, sigma=0.5, max_tokens=30_000),
        output=FixedLength(tokens=200),
    )
    return build_stream(workload, None, requests=60, seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_simulated_alike(kind: str) -> None:
    deployment, stream = deployed(kind), long_prompts()
    result = deployment.simulate(stream, record=True)
    assert result.completed.all()
    assert result.outcome.finish.tolist() == deployment.simulate(stream, single_steps=True).outcome.finish.tolist()
    blocks = deployment.memory.num_blocks
    used = max(blocks - r.free_blocks for r in result.outcome.records)
    assert -(-int((stream.prompt_tokens + 199).max()) // 16) <= used <= blocks
    memory = deployment.memory
    whole = memory.utilization * memory.total_bytes
    taken = memory.weights_bytes + memory.other_bytes + memory.seat_bytes + memory.kv_bytes
    assert taken == pytest.approx(whole) if kind != "all linear" else taken < whole


def tokens(kind: str) -> int:
    return deployed(kind).memory.num_blocks * 16


def test_blocks_are_as_many_as_each_kind_leaves_room_for() -> None:
    full = deployed("full").memory
    assert full.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert tokens("full") == pytest.approx(full.kv_bytes / full.kv_bytes_per_token, rel=1e-3)
    # A window of 1,024 for each of 32 seats is far less than what full layers keep: nearly twice the tokens.
    sliding = deployed("half sliding").memory
    assert sliding.seat_bytes == SEATS * 16 * 1024 * 2 * 8 * 128 * 2
    assert sliding.kv_bytes_per_token == full.kv_bytes_per_token / 2
    assert 1.9 < tokens("half sliding") / tokens("full") < 2.0
    # 576 values a token and layer instead of 2,048.
    assert deployed("latent").memory.kv_bytes_per_token == 32 * (512 + 64) * 2
    assert tokens("latent") / tokens("full") == pytest.approx(2048 / 576, rel=0.1)
    # A state of 32 x 128 x 128 numbers in fp32 for each seat and layer, and the inputs of its convolution.
    linear = deployed("three quarters linear").memory
    state = 24 * (32 * 128 * 128 * 4 + 3 * STATE.conv_channels * 2)
    assert linear.seat_bytes == SEATS * state
    assert linear.kv_bytes_per_token == full.kv_bytes_per_token / 4
    # With nothing that grows, every seat holds a request of any length.
    assert tokens("all linear") == SEATS * LONGEST


def test_long_contexts_cost_less_where_less_is_read() -> None:
    """Decodes of the same long requests: windows, latents and states are read faster than all keys and values."""
    tpot = {kind: deployed(kind).simulate(long_prompts()).values("tpot").mean() for kind in KINDS}
    assert tpot["half sliding"] < tpot["full"]
    assert tpot["three quarters linear"] < tpot["full"]
    decode = {}
    for kind in KINDS:
        long, short = (deployed(kind).costs.decode(8, 8 * context)[0] for context in (30_000, 100))
        decode[kind] = long - short
    assert decode["all linear"] == 0, "a state is as large after 30,000 tokens as after 100"
    assert 0 < decode["half sliding"] < decode["full"]
    assert np.isclose(decode["three quarters linear"], decode["full"] / 4, rtol=0.1)
