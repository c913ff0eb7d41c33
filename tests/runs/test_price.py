"""Dollars and joules by hand: GPUs of stages count, GPUs that two pools share count once."""

from __future__ import annotations

from typing import Any

import pytest

from simtune.results.result import Result
from simtune.runs.price import price
from simtune.sim.deployment import deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.testing.clusters import stream_of

H100 = load_hardware("h100-sxm")
STREAM = stream_of([0.0, 1.0, 2.0, 3.0], [500, 1500, 500, 1500], [20, 20, 20, 20])


def pool(name: str, **more: Any) -> dict[str, Any]:
    batching = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    return {"name": name, "hardware": "h100-sxm", "instances": 1, "max_model_len": 4096, "batching": batching} | more


def run(pools: list[dict[str, Any]], **more: Any) -> tuple[Result, float]:
    plan = Plan.model_validate({"name": "p", "model": "llama-3.1-8b", "pools": pools, **more})
    deployment = deploy(plan, load_model("llama-3.1-8b"), H100)
    result = deployment.simulate(STREAM)
    cost = price(deployment, result.summary())
    assert cost is not None
    return result, cost.per_hour_usd


def test_gpus_of_stages_are_priced_and_powered() -> None:
    """Two encoders with a GPU each, 0.1 s and 0.1 ms a token: 0.8 s of work in all."""
    stage = {"name": "encode", "pool": "a", "instances": 2, "devices": 1, "seconds": 0.1, "seconds_per_token": 1e-4}
    alone, alone_usd = run([pool("a")])
    staged, staged_usd = run([pool("a")], stages=[stage])
    assert (alone_usd, staged_usd) == (3.0, 9.0)
    assert staged.num_gpus == 3
    one, more = alone.summary(), staged.summary()
    assert one.energy_j is not None
    assert more.energy_j is not None
    own = more.duration_s * (70 + 630 * more.instances[0].busy)
    assert more.energy_j == pytest.approx(own + 2 * 70 * more.duration_s + 630 * 0.8)


def test_gpus_that_two_pools_share_are_priced_once_and_idle_once() -> None:
    half = {"processors": 0.5, "bandwidth": 0.5}
    kv_cache = {"memory_utilization": 0.45}
    link = {"path": "intra_node"}
    for own in (0.5, 0.3):
        shares = ({**half, "processors": own}, {**half, "beside": "p"})
        pools = [
            pool(name, role=role, share=share, kv_cache=kv_cache)
            for name, role, share in zip("pd", ("prefill", "decode"), shares, strict=True)
        ]
        result, usd = run(pools, link=link)
        assert usd == 3.0
        assert result.num_gpus == 1
        summary = result.summary()
        busy = {use.pool: use.busy for use in summary.instances}
        assert summary.energy_j == pytest.approx(
            summary.duration_s * (70 + 630 * (own * busy["p"] + 0.5 * busy["d"])), rel=1e-9
        )
