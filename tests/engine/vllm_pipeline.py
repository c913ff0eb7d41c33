"""vLLM's own scheduler behind a batch queue over the stages of a pipeline, in made-up time, for an interpreter with it.

    VLLM_PYTHON tests/engine/vllm_pipeline.py CASES.json

CASES.json lists objects with `stages`, `ticks` of a step over all of them, `token_ticks` more for each token (none
unless given), `budget` tokens of a step, `seats` (4 unless given) and `requests`, each [arrival, prompt, answer].
Written to stdout, in the last line, is a list with the ticks of first and last tokens by request, and the tokens of
each batch by request. The queue is that of `step_with_batch_queue` in vllm/v1/engine/core.py: a batch is scheduled
while the queue has room for it, or else the oldest one is awaited.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import vllm_worlds  # type: ignore[import-not-found]  # beside this file
from vllm.config import ModelConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm_worlds import Engine

LONGEST = 4096
SETTINGS: dict[str, Any] = {
    "scheduling_policy": "fcfs", "max_num_seqs": 4, "max_model_len": LONGEST, "block_size": 4,
    "num_gpu_blocks": 50_000, "enable_chunked_prefill": True, "enable_prefix_caching": False,
    "long_prefill_token_threshold": 0, "watermark": 0.0, "scheduler_reserve_full_isl": True, "async_scheduling": False,
    "max_num_active_seqs": None, "long_prefill_token_threshold_adaptive": False, "prefill_schedule_interval": 1,
    "data_parallel_size": 1,
}  # fmt: skip


def run(case: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return the ticks of first and last tokens, and the batches, of one case."""
    sizes = {"max_num_batched_tokens": case["budget"], "max_num_seqs": case.get("seats", 4)}
    engine = Engine({**SETTINGS, **sizes}, model)
    free = [0] * case["stages"]
    waiting = [
        {"req": str(i), "order": i, "at": at, "prompt_len": prompt, "output_len": answer, "priority": 0}
        for i, (at, prompt, answer) in enumerate(case["requests"])
    ]
    queue: list[tuple[int, Any, dict[str, Any]]] = []
    first: dict[str, int] = {}
    finish: dict[str, int] = {}
    batches: list[dict[str, int]] = []
    now = 0
    while waiting or queue or engine.scheduler.has_unfinished_requests():
        while waiting and waiting[0]["at"] <= now:
            engine.add(waiting.pop(0))
        if len(queue) < case["stages"] and engine.scheduler.has_unfinished_requests():
            batch, line = engine.step(len(batches))
            if batch.total_num_scheduled_tokens:
                batches.append(line["sched"])
                end = now
                ticks = case["ticks"] + case.get("token_ticks", 0) * batch.total_num_scheduled_tokens
                for stage, until in enumerate(free):
                    end = free[stage] = max(until, end) + ticks // case["stages"]
                queue.append((end, batch, line))
                if len(queue) < case["stages"]:
                    continue
        if queue:
            now, batch, line = queue.pop(0)
            engine.hear(batch, line["sampled"])
            for name in line["emit"]:
                first.setdefault(name, now)
            finish |= dict.fromkeys(line["finish"], now)
        elif waiting:
            now = waiting[0]["at"]
    by_number = sorted(first, key=int)
    tokens = {"first": [first[name] for name in by_number], "finish": [finish[name] for name in by_number]}
    return {**tokens, "batches": batches}


def main(cases: Path) -> None:
    """Run all cases."""
    logging.disable(logging.WARNING)
    init_none_hash(sha256)
    vllm_worlds.LONGEST = LONGEST
    with tempfile.TemporaryDirectory() as files:
        config = {**vllm_worlds.CONFIG, "max_position_embeddings": LONGEST}
        Path(files, "config.json").write_text(json.dumps(config))
        model = ModelConfig(model=files, skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST)
        sys.stdout.write(json.dumps([run(case, model) for case in json.loads(cases.read_text())]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
