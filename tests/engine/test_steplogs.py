"""The policy against what a real engine did: every step of the logs, in order, with preemptions and free blocks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simtune.engine import Request, VllmFcfs
from tests.engine.plain import PlainEngine, PlainRequest

LOGS = ("base", "budget64", "seqs16", "nochunk", "arrivals", "kv", "kv_decode")


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    with gzip.open(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    return lines[0]["options"], [x for x in lines if "req" in x], [x for x in lines if "step" in x]


def logged(step: dict[str, Any]) -> dict[str, Any]:
    return {
        "scheduled": [(int(r), n) for r, n in step["sched"].items()],
        "preempted": [int(r) for r in step.get("preempt", [])],
        "finished": sorted(int(r) for r in step.get("finish", [])),
        "free": step["free"],
        "running": step.get("running", 0),
        "waiting": step.get("waiting", 0),
    }


@pytest.mark.parametrize("name", LOGS)
def test_schedules_exactly_as_vllm_did(name: str, data_dir: Path) -> None:
    options, requests, steps = read(data_dir / "steplogs" / f"vllm_{name}.jsonl.gz")
    engine = VllmFcfs(
        num_blocks=options["free_blocks_at_start"],
        block_size=options["block_size"],
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        max_model_len=options["max_model_len"],
        chunked_prefill=options["enable_chunked_prefill"],
    )
    for step in steps:
        while requests and requests[0]["at_step"] <= step["step"]:
            r = requests.pop(0)
            assert engine.add(Request(int(r["req"]), r["prompt_len"], r["output_len"]))
        ours = engine.schedule()
        assert ours is not None
        decodes = [request.id for request in engine.decoding]
        admitted = sum(chunk.past == 0 for chunk in ours.chunks)
        seen = {
            "scheduled": [(d, 1) for d in decodes] + [(c.request.id, c.tokens) for c in ours.chunks],
            "preempted": [r.id for r in ours.preempted],
            "free": engine.kv.free,
            "running": engine.num_running + admitted,
            "waiting": len(engine.waiting),
        }
        seen["finished"] = sorted(r.id for r in engine.complete().finished)
        assert seen == logged(step), f"step {step['step']} of {name}"
    assert not engine.has_work
    assert engine.kv.free == engine.kv.total


@pytest.mark.parametrize("name", LOGS)
def test_the_plain_oracle_agrees_with_vllm_too(name: str, data_dir: Path) -> None:
    options, requests, steps = read(data_dir / "steplogs" / f"vllm_{name}.jsonl.gz")
    engine = PlainEngine(
        options["free_blocks_at_start"],
        options["block_size"],
        options["max_num_seqs"],
        options["max_num_batched_tokens"],
        options["enable_chunked_prefill"],
    )
    for step in steps:
        while requests and requests[0]["at_step"] <= step["step"]:
            r = requests.pop(0)
            engine.add(PlainRequest(int(r["req"]), r["prompt_len"], r["output_len"]))
        ours = engine.step()
        seen = {
            "scheduled": list(ours.scheduled.items()),
            "preempted": ours.preempted,
            "finished": sorted(ours.finished),
            "free": ours.free,
            "running": ours.running,
            "waiting": ours.waiting,
        }
        assert seen == logged(step), f"step {step['step']} of {name}"
