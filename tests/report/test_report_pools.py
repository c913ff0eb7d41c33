"""The page of a plan with several pools: each is named, and what a request's time is made up of adds up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simtune.report import figures, info
from simtune.report.page import render
from simtune.results.summary import PoolScaling
from simtune.runs.run_reader import read_run

RunMaker = Callable[..., Path]

PARALLELISM = {"tp": 2, "pp": 1}
BATCHING = {"policy": "vllm-fcfs", "max_num_seqs": 64, "max_num_batched_tokens": 8192}
PLAN = {"schema": "simtune/plan@1", "name": "pd", "model": "llama-3.1-8b"}
POOLS = [
    {"name": "front", "role": "prefill", "hardware": "h100-sxm", "instances": 2, "parallelism": PARALLELISM,
     "batching": BATCHING},
    {"name": "back", "role": "decode", "hardware": "h200-sxm", "instances": 1, "parallelism": {"tp": 4, "pp": 1},
     "batching": {**BATCHING, "max_num_seqs": 256}},
]  # fmt: skip


def block(mean: float, count: int = 100) -> dict[str, Any]:
    return {"unit": "s", "count": count} | dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), mean)


@pytest.fixture
def apart(make_run: RunMaker) -> Path:
    """Half of 100 requests had an answer of one token, and were sent nowhere."""
    timeline = {"t_s": [0.0, 1.0], "running": [1.0, 2.0], "waiting": [0.0, 1.0], "kv_used": [0.1, 0.2]}
    return make_run(
        searched=False,
        slo=[],
        num_gpus=8,
        plan={**PLAN, "pools": POOLS, "link": {}},
        metrics={
            "ttft": block(0.3), "tpot": block(0.01, 50), "itl": block(0.012, 4000), "e2el": block(2.0),
            "queue": block(0.1), "prefill": block(0.2), "transfer": block(0.4, 50), "decode": block(1.5),
        },
        pool_timelines=[{"pool": pool["name"], **timeline} for pool in POOLS],
        instances=[
            {"pool": "front", "instance": 0, "busy": 0.5, "requests": 0},
            {"pool": "front", "instance": 1, "busy": 0.25, "requests": 0},
            {"pool": "back", "instance": 0, "busy": 0.99, "requests": 100},
        ],
        prefix_cache=[{"pool": "front", "queried_tokens": 1000, "hit_tokens": 250, "hit_rate": 0.25}],
    )  # fmt: skip


def test_headline_has_servers_and_gpus_of_each_pool(apart: Path) -> None:
    run = read_run(apart)
    words = (
        "2 prefill servers of 2 h100-sxm GPUs with 64 seats, 1 decode server of 4 h200-sxm GPUs with 256 seats, "
        "8,192 tokens a step: llama-3.1-8b "
    )
    assert info.headline(run).startswith(words)
    assert info.pool_rows(run.summary) == [
        ("front", "prefill", "h100-sxm", "2", "2", "vllm-fcfs", "64", "8,192"),
        ("back", "decode", "h200-sxm", "1", "4", "vllm-fcfs", "256", "8,192"),
    ]
    assert ("prefix cache of front", "25.0 %", "of prompt tokens found") in info.key_figures(run.summary)


def test_instances_of_autoscaled_pools_are_drawn_over_time() -> None:
    pools = [
        PoolScaling(
            pool=name, hours=3.0, mean_instances=1.5, fewest=1, most=2, starts=1, drains=1, gpu_hours=4.5,
            gpu_hours_of_most=12.0, at_s=(0.0, 3600.0, 5400.0), accepting=(1, 1, 2), holding=(1, 2, 2),
        )
        for name in ("front", "back")
    ]  # fmt: skip
    figure = figures.scaling_figure(pools)
    names = ["front hold GPUs", "front accept requests", "back hold GPUs", "back accept requests"]
    assert [trace["name"] for trace in figure["data"]] == names
    assert {trace["line"]["shape"] for trace in figure["data"]} == {"hv"}
    assert figure["data"][0]["x"] == [0.0, 1.0, 1.5, 3.0], "hours, to the end of the run"
    assert [trace["y"] for trace in figure["data"][:2]] == [[1, 2, 2, 2], [1, 1, 2, 2]]
    assert "time, h" in str(figure["layout"])
    alone = figures.scaling_figure([pools[0].model_copy(update={"hours": 0.05})])
    assert [trace["name"] for trace in alone["data"]] == ["hold GPUs", "accept requests"]
    assert pools[0].sentence == (
        "1 to 2 instances, 1.5 on average, 1 started, 1 drained; 4.5 GPU-hours, of 12 with all of them"
    )


def test_ranks_that_come_and_go_are_drawn_as_ranks() -> None:
    ranks = PoolScaling(
        pool="mixed", hours=3.0, mean_instances=0.5, mean_ranks=4.0, fewest=2, most=8, starts=6, drains=0,
        gpu_hours=12.0, gpu_hours_of_most=24.0, at_s=(0.0, 3600.0, 5400.0), accepting=(2, 2, 8), holding=(2, 8, 8),
    )  # fmt: skip
    assert ranks.sentence.startswith("2 to 8 ranks, 4 on average, 6 started, 0 drained; 12 GPU-hours")
    instances = ranks.model_copy(update={"mean_ranks": None})
    axes = [figures.scaling_figure(pools)["layout"]["yaxis"] for pools in ([ranks], [instances], [ranks, instances])]
    assert [axis["title"]["text"] for axis in axes] == ["ranks", "instances", "instances and ranks"]


def test_a_drafter_beside_the_target_counts_among_the_gpus(make_run: RunMaker) -> None:
    drafting = {"acceptance": "mine", "drafter": {"kind": "draft_model", "model": "small", "tp": 1}}
    for scheme, gpus in (
        ({"kind": "chain", "tokens": 3}, 2),
        ({"kind": "pearl", "tokens": 3}, 3),
        ({"kind": "dsi", "tokens": 3, "replicas": 4}, 9),
    ):
        pool = {**POOLS[0], "role": "mixed", "speculation": {**drafting, "scheme": scheme}}
        run = read_run(make_run(searched=False, num_gpus=2 * gpus, plan={**PLAN, "pools": [pool]}))
        assert f"2 servers of {gpus} GPUs" in info.headline(run)
        assert info.pool_rows(run.summary)[0][4] == str(gpus)


def test_the_parts_of_a_request_add_up_to_its_time(apart: Path) -> None:
    parts = info.e2el_parts(read_run(apart).summary)
    assert [(name, mean) for name, mean, _ in parts] == [
        ("Queueing", "100 ms"), ("Prefill", "200 ms"), ("KV transfer", "200 ms"), ("Decode", "1,500 ms"),
    ]  # fmt: skip
    assert sum(share for *_, share in parts) == pytest.approx(1.0)


def test_latency_rows_include_itl_and_omit_absent_parts(apart: Path, make_run: RunMaker) -> None:
    names = [row[0] for row in info.latency_rows(read_run(apart).summary)]
    assert names == ["TTFT", "TPOT", "ITL", "E2EL", "Queueing", "Prefill", "KV transfer", "Decode"]
    mixed = make_run(metrics={"ttft": block(0.3), "tpot": block(0.01), "e2el": block(2.0),
                              "transfer": {"unit": "s", "count": 0}})  # fmt: skip
    assert [row[0] for row in info.latency_rows(read_run(mixed).summary)] == ["TTFT", "TPOT", "E2EL"]


def test_every_pool_and_instance_is_drawn(apart: Path, make_run: RunMaker) -> None:
    page = render(read_run(apart))
    for name in ("timeline-front", "timeline-back", "instances"):
        assert f'id="{name}"' in page
    assert 'id="timeline"' not in page
    single = render(read_run(make_run()))
    assert 'id="instances"' not in single
    assert 'id="timeline"' in single
