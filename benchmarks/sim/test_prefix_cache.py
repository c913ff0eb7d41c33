"""How much of a published conversation trace a prefix cache of a given size re-uses.

    python -m pytest benchmarks/sim/test_prefix_cache.py -m benchmark_only -s

Prints the share of prompt blocks (512 tokens each) found by a least-recently-used cache that serves the requests of
Mooncake's conversation trace (arXiv 2407.00079) one after the other, the same as tokens found by the scheduler's own
cache of KV blocks for two sizes, and draws the curve into runs/mooncake-hit-rate.html.
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import Recorder
from simtune.engine import Request, VllmFcfs, hit_rate
from simtune.report import figures
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.catalog import load_hardware, load_model, load_workload
from simtune.specs.plan import Plan
from simtune.workload.requests import build_stream

pytestmark = pytest.mark.benchmark_only

ROOT = Path(__file__).resolve().parents[2]
BLOCK_TOKENS = 512
TRACE = "mooncake_conversation.jsonl.gz"

REQUESTS, INSTANCES, ROUNDS = 12_031, 8, 5
HOST = {"name": "host", "bytes": 200e9, "bytes_per_s": 50e9}
STORE = {"name": "store", "bytes_per_s": 5e9, "latency_s": 0.001, "shared": True}
TIERS: dict[str, list[dict[str, Any]]] = {"none": [], "host": [HOST], "host and store": [HOST, STORE]}
MOST = 1.5
"""CPU of a run with tiers over that of one without, at most."""


def served_one_by_one(lines: list[dict[str, Any]], capacity: int) -> float:
    """Share of prompt tokens that the scheduler finds in a cache of `capacity` hash blocks, kept as blocks of 16."""
    longest = max(line["input_length"] + 1 for line in lines)
    engine = VllmFcfs(
        num_blocks=max(capacity * BLOCK_TOKENS, longest + 16) // 16,
        block_size=16,
        max_num_seqs=1,
        max_num_batched_tokens=longest,
        max_model_len=longest,
        prefix_caching=True,
        hash_block_tokens=BLOCK_TOKENS,
    )
    for number, line in enumerate(lines):
        engine.add(Request(number, line["input_length"], 1, blocks=tuple(line["hash_ids"])))
        while engine.schedule() is not None:
            engine.complete()
    return engine.kv.hit_tokens / engine.kv.queried_tokens


def test_hit_rate_against_cache_size(data_dir: Path, record: Recorder) -> None:
    with gzip.open(data_dir / "traces" / TRACE, "rt") as file:
        lines = [json.loads(line) for line in file]
    prompts = [line["hash_ids"] for line in lines]
    distinct = len({name for prompt in prompts for name in prompt})
    sizes = [*(int(250 * 2 ** (i / 2)) for i in range(18)), distinct]
    rates = [hit_rate(prompts, size) for size in sizes]
    print(f"\n{len(prompts):,} requests, {sum(map(len, prompts)):,} prompt blocks, {distinct:,} distinct")
    print(f"{'blocks':>9} {'tokens':>13} {'re-used':>9}")
    for size, rate in zip(sizes, rates, strict=True):
        print(f"{size:9,} {size * BLOCK_TOKENS:13,} {rate:9.2%}")
    print("tokens found by the scheduler:")
    for size in (4000, distinct):
        share = served_one_by_one(lines, size)
        print(f"{size:9,} {size * BLOCK_TOKENS:13,} {share:9.2%}")
        record(f"tokens re-used, {size:,} blocks", 100 * share, "%", "same")
    assert rates == sorted(rates)
    assert rates[-1] == hit_rate(prompts)
    assert rates[-1] == pytest.approx(0.3468, abs=5e-5)
    curve = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [size * BLOCK_TOKENS for size in sizes],
        "y": [100 * rate for rate in rates],
        "line": {"color": figures.COLOURS[0]},
        "hovertemplate": "%{y:.2f} % of %{x:,} tokens<extra></extra>",
    }
    x = figures.axis("size of the cache, tokens", type="log")
    layout = figures.layout(x, figures.axis("prompt blocks re-used", ticksuffix=" %", rangemode="tozero"))
    figure = figures.fragment({"data": [curve], "layout": layout}, "hit-rate", 420)
    page = ROOT / "runs" / "mooncake-hit-rate.html"
    page.parent.mkdir(exist_ok=True)
    page.write_text(f"<!doctype html><meta charset=utf-8><script>{figures.plotly_js()}</script>{figure}")
    print(f"curve: {page.relative_to(ROOT)}")


def with_tiers(tiers: list[dict[str, Any]]) -> Deployment:
    """Eight instances whose devices keep what they can of the prompts, above these tiers."""
    pool = {
        "hardware": "h100-sxm",
        "instances": INSTANCES,
        "batching": {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
        "kv_cache": {"prefix_caching": True, **({"tiers": tiers} if tiers else {})},
        "max_model_len": 131072,
    }
    plan = {"name": "tiers", "model": "llama-3.1-8b", "pools": [pool]}
    return deploy(Plan.model_validate(plan), load_model("llama-3.1-8b"), load_hardware("h100-sxm"))


def test_what_tiers_cost(data_dir: Path, record: Recorder) -> None:
    workload, trace = load_workload(str(data_dir / "traces" / TRACE))
    stream = build_stream(workload, trace, requests=REQUESTS, seed=0)
    deployments = {name: with_tiers(tiers) for name, tiers in TIERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in TIERS}
    found = dict.fromkeys(TIERS, 0)
    for _ in range(ROUNDS):
        for name, deployment in deployments.items():
            began = time.process_time()
            outcome = deployment.simulate(stream).outcome
            seconds[name].append(time.process_time() - began)
            found[name] = sum(core.hit_tokens for core in outcome.cores)
    print(f"\n{REQUESTS:,} requests on {INSTANCES} instances")
    for name in TIERS:
        ratios = [with_s / without_s for with_s, without_s in zip(seconds[name], seconds["none"], strict=True)]
        record.samples(f"CPU with tiers ({name}) over none", ratios, "x", "lower")
        median = statistics.median(ratios)
        print(
            f"{name:>15} {statistics.median(seconds[name]):6.2f} CPU-s, {median:.2f} x, {found[name]:13,} tokens found"
        )
        assert median <= MOST
    assert found["none"] < found["host"] <= found["host and store"]
