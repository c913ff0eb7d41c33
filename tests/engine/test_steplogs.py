"""The policies against what a real engine did: every step of the logs, in order, with preemptions and free blocks."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simtune.engine import DraftingTerms, Request, VllmFcfs, VllmPriority
from tests.engine.plain import PlainEngine, PlainRequest

LOGS = (
    "base",
    "budget64",
    "seqs16",
    "nochunk",
    "arrivals",
    "kv",
    "kv_decode",
    "priority",
    "prefix",
    "async",
    "spec_k3_a70",
)

OWN = sorted((Path(__file__).parent / "logs").glob("*.gz"))
"""Drafts and asynchronous scheduling together, and other things that drafts bring: see the README there."""

Lines = list[dict[str, Any]]


def read(path: Path) -> tuple[dict[str, Any], Lines, Lines]:
    with gzip.open(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    return lines[0]["options"], [x for x in lines if "req" in x], [x for x in lines if "step" in x]


def ids(values: dict[str, int]) -> list[tuple[int, int]]:
    return [(int(r), n) for r, n in values.items()]


def logged(step: dict[str, Any]) -> dict[str, Any]:
    return {
        "scheduled": ids(step["sched"]),
        "admitted": {int(r): past for r, past in step.get("admit", {}).items()},
        "preempted": [int(r) for r in step.get("preempt", [])],
        "finished": sorted(int(r) for r in step.get("finish", [])),
        "free": step["free"],
        "running": step.get("running", 0),
        "waiting": step.get("waiting", 0),
    }


def accepted_in(steps: Lines) -> dict[int, list[int]]:
    """What the log's draft model got right, by request and verification; padding is none."""
    log: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        for request, accepted in ids(step.get("accept", {})):
            if str(request) not in step.get("admit", {}):
                log[request].append(accepted)
    return log


def told(accepted: list[int], number: int, drafts: int) -> int:
    """A batch plans further ahead than the log goes, where it makes other drafts later."""
    return min(accepted[number], drafts) if number < len(accepted) else 0


def by_batch(drafting: dict[str, Any]) -> Callable[[int], int] | None:
    ranges = drafting.get("by_batch")
    return ranges and (lambda requests: max(r for r in ranges if r[0] <= requests)[2])


def request_of(line: dict[str, Any], block_size: int) -> Request:
    shared = line.get("prefix_len", 0) // block_size
    return Request(
        int(line["req"]),
        line["prompt_len"],
        line["output_len"],
        priority=line.get("priority", 0),
        blocks=tuple((line["group"], i) for i in range(shared)) if shared else (),
    )


@pytest.mark.parametrize("name", LOGS)
def test_schedules_exactly_as_vllm_did(name: str, data_dir: Path) -> None:
    follow(data_dir / "steplogs" / f"vllm_{name}.jsonl.gz")


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name.split(".")[0])
def test_schedules_drafts_exactly_as_vllm_did(path: Path) -> None:
    follow(path)


def follow(path: Path) -> None:
    options, requests, steps = read(path)
    drafting, accepted = options["spec"], accepted_in(steps)
    engine = {"fcfs": VllmFcfs, "priority": VllmPriority}[options["scheduling_policy"]](
        num_blocks=options["free_blocks_at_start"],
        block_size=options["block_size"],
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        max_model_len=options["max_model_len"],
        chunked_prefill=options["enable_chunked_prefill"],
        prefix_caching=options["enable_prefix_caching"],
        async_scheduling=options["async_scheduling"],
        speculation=drafting
        and DraftingTerms(
            max_drafts=drafting["k"],
            accepted=lambda request, number, drafts: told(accepted[request.id], number, drafts),
            lookahead=options["num_lookahead_tokens"],
            extra_slots=drafting["draft_slots_per_request"],
            drafts=by_batch(drafting),
            drops_last_hit=drafting["method"] == "eagle",
        ),
    )
    for step in steps:
        while requests and requests[0]["at_step"] <= step["step"]:
            assert engine.add(request_of(requests.pop(0), options["block_size"]))
        ours = engine.schedule()
        assert ours is not None
        composition = engine.composition()
        before = {request: engine.emitted(request) for request in composition if drafting}
        past = {chunk.request: chunk.past for chunk in ours.chunks}
        seen = {
            "scheduled": [(r.id, tokens) for r, tokens in composition.items()],
            "admitted": {r.id: past[r] for r in ours.admitted},
            "preempted": [r.id for r in ours.preempted],
            "free": engine.kv.free,
            "running": engine.num_running,
            "waiting": engine.num_waiting,
        }
        padding = sum(chunk.padding for chunk in ours.chunks)
        assert ours.num_decodes + len(ours.chunks) == len(composition)
        assert ours.verify_tokens + sum(chunk.tokens for chunk in ours.chunks) == sum(composition.values())
        seen["finished"] = sorted(r.id for r in engine.complete().finished)
        assert seen == logged(step), f"step {step['step']}"
        assert ours.draft_tokens + padding == sum(step.get("draft", {}).values())
        if drafting:
            emitted = {r.id: engine.emitted(r) - n for r, n in before.items() if engine.emitted(r) > n}
            assert emitted == dict(ids(step.get("emit", {}))), f"step {step['step']}"
    assert engine.schedule() is None
    assert not engine.has_work
    assert engine.kv.free == engine.kv.total
    if options["enable_prefix_caching"]:
        first: dict[str, int] = {}
        for step in steps:
            first = step.get("admit", {}) | first
        assert engine.kv.hit_tokens == sum(first.values())
        assert engine.kv.queried_tokens == sum(line["prompt_len"] for line in read(path)[1])


@pytest.mark.parametrize("name", LOGS)
def test_the_plain_oracle_agrees_with_vllm_too(name: str, data_dir: Path) -> None:
    follow_plainly(data_dir / "steplogs" / f"vllm_{name}.jsonl.gz")


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name.split(".")[0])
def test_the_plain_oracle_agrees_about_drafts_too(path: Path) -> None:
    follow_plainly(path)


def follow_plainly(path: Path) -> None:
    options, requests, steps = read(path)
    drafting, accepted = options["spec"] or {}, accepted_in(steps)
    engine = PlainEngine(
        options["free_blocks_at_start"],
        options["block_size"],
        options["max_num_seqs"],
        options["max_num_batched_tokens"],
        options["enable_chunked_prefill"],
        max_model_len=options["max_model_len"],
        priority=options["scheduling_policy"] == "priority",
        caching=options["enable_prefix_caching"],
        asynchronous=options["async_scheduling"],
        drafts=drafting.get("k", 0),
        accepted=lambda request, number, drafts: accepted[request][number],
        lookahead=options["num_lookahead_tokens"],
        extra_slots=drafting.get("draft_slots_per_request", 0),
        drops_last_hit=drafting.get("method") == "eagle",
        by_batch=by_batch(drafting),
    )
    for step in steps:
        while requests and requests[0]["at_step"] <= step["step"]:
            r = request_of(requests.pop(0), options["block_size"])
            engine.add(PlainRequest(r.id, r.prompt_tokens, r.output_tokens, r.priority, r.blocks))
        ours = engine.step()
        seen = {
            "scheduled": list(ours.scheduled.items()),
            "admitted": ours.admitted,
            "preempted": ours.preempted,
            "finished": sorted(ours.finished),
            "free": ours.free,
            "running": ours.running,
            "waiting": ours.waiting,
        }
        assert seen == logged(step), f"step {step['step']}"
