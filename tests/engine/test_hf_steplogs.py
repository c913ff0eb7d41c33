"""transformers' schedulers against what the real engine did: every step of the logs, with order, resets and blocks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simtune.engine import Request
from simtune.engine.transformers_scheduler import TransformersFifo, TransformersPrefillFirst

LOGS = {
    "fifo": TransformersFifo,
    "fifo_arrivals": TransformersFifo,
    "fifo_kv": TransformersFifo,
    "prefill_first": TransformersPrefillFirst,
    "prefill_first_kv": TransformersPrefillFirst,
}


@pytest.mark.parametrize("name", LOGS)
def test_schedules_exactly_as_transformers_did(name: str, data_dir: Path) -> None:
    with gzip.open(data_dir / "steplogs" / f"hf_{name}.jsonl.gz", "rt") as file:
        header, *lines = [json.loads(line) for line in file]
    options = header["options"]
    engine = LOGS[name](
        num_blocks=options["num_blocks"],
        block_size=options["page_size"],
        max_num_seqs=options["max_requests_per_batch"],
        max_num_batched_tokens=options["max_batch_tokens"],
        max_model_len=options["num_blocks"] * options["page_size"],
    )
    assert engine.safety_margin == options["safety_margin"]
    requests = [line for line in lines if "req" in line]
    steps = [line for line in lines if "step" in line]
    for logged in steps:
        while requests and requests[0]["at_step"] <= logged["step"]:
            r = requests.pop(0)
            assert engine.add(Request(int(r["req"]), r["prompt_len"], r["output_len"]))
        resident = set(engine.residents)
        step = engine.schedule()
        assert step is not None
        plan = engine.composition()
        reset = len(step.preempted)
        ours = {
            "sched": [(str(r.id), tokens) for r, tokens in plan.items()],
            "reset": [str(r.id) for r in step.preempted],
            "admit": [str(r.id) for r in plan if r not in resident],
            "free": engine.kv.free,
            "running": engine.num_running + reset,
            "waiting": len(engine.waiting) - reset,
            "kv_read": sum(r.computed for r in plan),
        }
        ours["finish"] = [str(r.id) for r in engine.complete().finished]
        assert ours == {
            "sched": list(logged["sched"].items()),
            "reset": logged.get("reset_before", []) + logged.get("reset_after", []),
            "admit": list(logged.get("admit", {})),
            "finish": logged.get("finish", []),
            **{name: logged.get(name, 0) for name in ("free", "running", "waiting", "kv_read")},
        }, f"step {logged['step']}"
    assert not requests
    assert not engine.has_work
    assert engine.kv.free == engine.kv.total


@pytest.mark.parametrize(
    ("change", "message"),
    [({"chunked_prefill": False}, "always cuts prompts"), ({"watermark_blocks": 1}, "by safety_margin")],
)
def test_settings_that_transformers_does_not_have_are_refused(change: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {
        "num_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "max_model_len": 32,
    }
    with pytest.raises(ValueError, match=message):
        TransformersFifo(**{**settings, **change})
