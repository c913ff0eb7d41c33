"""Random worlds through vLLM's own scheduler and KV cache manager, as step logs: run by an interpreter that has vLLM.

    VLLM_PYTHON tests/engine/vllm_worlds.py FOLDER FIRST COUNT

writes FOLDER/N.jsonl for every number, format `steplog/1`. In place of a model stands a runner that gives every request
whose last known token is in the step the token after it. Under asynchronous scheduling the next step is scheduled
before the engine hears of this one, as with a queue of two batches.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0"}

import torch
import vllm
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

RELEASE = tuple(map(int, vllm.__version__.split(".")[:2]))
LONGEST = 96
EMPTY = 5
"""So many steps of nobody in turn never happen: the first may preempt, the next hears of the last step."""
HOST_PAGE = 4096
"""Bytes that the offloading connector rounds a block up to."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 1000, "max_position_embeddings": LONGEST,
}  # fmt: skip


def options_of(world: random.Random) -> dict[str, Any]:
    """Settings of the engine."""
    block_size = world.choice([1, 2, 4, 16])
    chunked = world.random() < 0.8
    budget = world.choice([5, 14, 33, 64, 200]) if chunked else LONGEST + world.randint(0, 64)
    most = -(-LONGEST // block_size)
    options: dict[str, Any] = {
        "scheduling_policy": world.choice(["fcfs", "priority"]),
        "max_num_seqs": min(world.choice([1, 3, 8, 12]), budget),
        "max_num_batched_tokens": budget,
        "max_model_len": LONGEST,
        "block_size": block_size,
        "num_gpu_blocks": 1 + round(most * world.choice([1.1, 1.5, 2.5, 8])) + 2,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": world.random() < 0.5,
        "long_prefill_token_threshold": world.choice([0, 0, 3, 8, 20]) if chunked else 0,
        "watermark": world.choice([0.0, 0.0, 0.02, 0.1]),
        "scheduler_reserve_full_isl": world.random() < 0.7,
        "async_scheduling": world.random() < 0.5,
        "num_lookahead_tokens": 0,
        "spec": None,
    }
    return options | _newer_options_of(world, options["max_num_seqs"])


def _newer_options_of(world: random.Random, seats: int) -> dict[str, Any]:
    """Settings of releases since 0.31. An engine without data parallelism has the interval since 0.33; the ranks of
    one, whose steps an engine core counts for all of them, since 0.24."""
    interval = world.choice([1, 1, 2, 3, 7])
    alone = world.random() < 0.5
    return {
        "max_num_active_seqs": world.choice([None, None, 1, min(2, seats), min(5, seats)]),
        "long_prefill_token_threshold_adaptive": world.random() < 0.3,
        "prefill_schedule_interval": 1 if alone and RELEASE < (0, 33) else interval,
        "data_parallel_size": 1 if alone else 2,
    }


def requests_of(world: random.Random) -> list[dict[str, Any]]:
    """In order of arrival; those of one group share their first tokens."""
    lines: list[dict[str, Any]] = []
    step, gap, share = 0, world.choice([0, 1, 3]), world.choice([0.0, 0.7])
    priorities, longest = world.choice([1, 3]), world.choice([10, 30, 60])
    for number in range(world.randint(4, 24)):
        step += world.randint(0, gap)
        prompt = world.randint(1, longest)
        line = {"req": str(number), "order": number, "at_step": step, "prompt_len": prompt}
        line |= {"output_len": world.randint(1, LONGEST - longest), "priority": world.randrange(priorities)}
        if world.random() < share:
            line |= {"group": world.randrange(3), "prefix_len": world.randint(1, prompt)}
        lines.append(line)
    return lines


def tokens_of(line: dict[str, Any]) -> list[int]:
    """Of a prompt: those of the group's, then its own."""
    shared, prompt = line.get("prefix_len", 0), line["prompt_len"]
    return [1000 * line.get("group", 0) + i for i in range(shared)] + [
        own_token(line, i) for i in range(shared, prompt)
    ]


def own_token(line: dict[str, Any], place: int) -> int:
    """The token at a place of a text that no other request has there."""
    return 1000 * (1000 + int(line["order"])) + place


def connected(options: dict[str, Any]) -> KVTransferConfig:
    """Settings of the offloading connector, for a tier in host memory of `host_blocks` blocks."""
    extra = {"cpu_bytes_to_use": options["host_blocks"] * HOST_PAGE}
    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)


class Engine:
    """A scheduler of vLLM, and a runner that makes tokens up."""

    def __init__(self, options: dict[str, Any], model: ModelConfig, **settings: Any) -> None:
        """`settings` are further ones of `VllmConfig`."""
        interval = options["prefill_schedule_interval"]
        # Ranks that count their steps together pass their decision to the scheduler, in place of the setting.
        self._aligned = interval if options["data_parallel_size"] > 1 else 1
        scheduling = SchedulerConfig(
            max_num_seqs=options["max_num_seqs"],
            max_num_batched_tokens=options["max_num_batched_tokens"],
            max_model_len=LONGEST,
            is_encoder_decoder=False,
            enable_chunked_prefill=options["enable_chunked_prefill"],
            policy=options["scheduling_policy"],
            long_prefill_token_threshold=options["long_prefill_token_threshold"],
            watermark=options["watermark"],
            scheduler_reserve_full_isl=options["scheduler_reserve_full_isl"],
            async_scheduling=options["async_scheduling"],
            max_num_active_seqs=options["max_num_active_seqs"],
            long_prefill_token_threshold_adaptive=options["long_prefill_token_threshold_adaptive"],
            prefill_schedule_interval=interval if options["data_parallel_size"] == 1 else 1,
        )
        cache = CacheConfig(
            block_size=options["block_size"],
            enable_prefix_caching=options["enable_prefix_caching"],
            num_gpu_blocks_override=options["num_gpu_blocks"],
        )
        config = VllmConfig(
            model_config=model,
            scheduler_config=scheduling,
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=connected(options) if "host_blocks" in options else None,
            **settings,
        )
        # On a processor vLLM switches some of these off, or rounds them, once all of its settings are together.
        config.scheduler_config.async_scheduling = options["async_scheduling"]
        cache.block_size, cache.num_gpu_blocks = options["block_size"], options["num_gpu_blocks"]
        layer = FullAttentionSpec(block_size=options["block_size"], num_kv_heads=2, head_size=16, dtype=torch.float32)
        self.scheduler = (AsyncScheduler if options["async_scheduling"] else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(options["num_gpu_blocks"], [], [KVCacheGroupSpec(["layer"], layer)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=options["block_size"],
        )
        self.ahead = options["async_scheduling"]
        # As the engine core does; the third argument came with 0.33.
        lookahead = getattr(config, "num_hash_lookahead_tokens", 0)
        self._hasher = get_request_block_hasher(options["block_size"], sha256, *[lookahead] * bool(lookahead))
        if not options["enable_prefix_caching"]:
            self._hasher = None
        self._made: dict[str, int] = {}
        self._lines: dict[str, dict[str, Any]] = {}
        self._preempted: list[str] = []
        preempt = self.scheduler._preempt_request

        def told(request: Request, *given: Any, **named: Any) -> Any:
            self._preempted.append(request.request_id)
            return preempt(request, *given, **named)

        self.scheduler._preempt_request = told

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def idle(self) -> bool:
        """Whether every request has all of its tokens, known or not."""
        return all(made == self._lines[name]["output_len"] for name, made in self._made.items())

    def add(self, line: dict[str, Any]) -> None:
        """One that comes."""
        self._made[line["req"]], self._lines[line["req"]] = 0, line
        asked = SamplingParams(max_tokens=line["output_len"], ignore_eos=True)
        request = Request(
            line["req"], tokens_of(line), asked, None, arrival_time=float(line["order"]), priority=line["priority"],
            block_hasher=self._hasher,
        )  # fmt: skip
        self.scheduler.add_request(request)

    def step(self, number: int) -> tuple[SchedulerOutput, dict[str, Any]]:
        """What is scheduled now, and the line that says it; nothing is scheduled where no request is in it."""
        batch = self.scheduler.schedule(number % self._aligned != 0)
        past = {new.req_id: new.num_computed_tokens for new in batch.scheduled_new_reqs}
        cached = batch.scheduled_cached_reqs
        admitted = past | {
            name: computed
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if name in cached.resumed_req_ids
        }
        past |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        line: dict[str, Any] = {"sched": dict(batch.num_scheduled_tokens), "admit": admitted}
        line |= {"preempt": list(self._preempted), "free": self.free, "running": len(self.scheduler.running)}
        if batch.total_num_scheduled_tokens:
            self._preempted.clear()  # a step of nobody is no step: whom it preempts is said of the next
        line["waiting"] = len(self.scheduler.waiting) + len(getattr(self.scheduler, "skipped_waiting", ()))
        line |= self._run(batch, past)
        line["finish"] = [name for name in line["emit"] if self._made[name] == self._lines[name]["output_len"]]
        return batch, line

    def _run(self, batch: SchedulerOutput, past: dict[str, int]) -> dict[str, Any]:
        """Make the tokens of a step up, `past` being the computed tokens of each request; `sampled` has them, `emit`
        their number."""
        sampled = {}
        for name, tokens in batch.num_scheduled_tokens.items():
            known = self._lines[name]["prompt_len"] + self._made[name]
            if past[name] + tokens >= known:
                sampled[name] = [own_token(self._lines[name], known)]
                self._made[name] += 1
        return {"emit": dict.fromkeys(sampled, 1), "sampled": sampled}

    def hear(self, batch: SchedulerOutput, sampled: dict[str, list[int]]) -> None:
        """Pass the tokens of a step on to the scheduler."""
        names = list(batch.num_scheduled_tokens)
        tokens = [list(sampled.get(name, ())) for name in names]
        self.scheduler.update_from_output(batch, ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, tokens))


def steps_of(engine: Engine, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run requests to their ends, and set the step at which each comes."""
    left, empty = list(requests), 0
    steps: list[dict[str, Any]] = []
    under_way: list[tuple[SchedulerOutput, dict[str, list[int]]]] = []
    while left or engine.scheduler.has_unfinished_requests() or under_way:
        while left and (left[0]["at_step"] <= len(steps) or engine.idle):
            left[0]["at_step"] = len(steps)  # never idle: a log does not say what was heard before one came
            engine.add(left.pop(0))
        batch, line = engine.step(len(steps))
        sampled = line.pop("sampled")
        if batch.total_num_scheduled_tokens:
            steps.append({"step": len(steps), **line})
            under_way.append((batch, sampled))
            empty = 0
        elif (empty := empty + 1) == EMPTY:
            raise RuntimeError("nothing is scheduled, and requests are left")
        if under_way and not (engine.ahead and len(under_way) == 1 and batch.total_num_scheduled_tokens):
            engine.hear(*under_way.pop(0))
    return steps


def log_of(number: int, model: ModelConfig) -> list[dict[str, Any]]:
    """Header, requests and steps of a world."""
    world = random.Random(number)
    options, requests = options_of(world), requests_of(world)
    engine = Engine(options, model)
    options["free_blocks_at_start"] = engine.free
    return log(number, options, requests, steps_of(engine, requests))


def log(
    number: int, options: dict[str, Any], requests: list[dict[str, Any]], steps: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Put the lines of a log together."""
    header = {"format": "steplog/1", "log": f"world {number}", "engine": "vllm", "package": f"vllm {vllm.__version__}"}
    return [{**header, "options": options, "n_requests": len(requests), "n_steps": len(steps)}, *requests, *steps]


def main(
    folder: Path, first: int, count: int, log_of: Callable[[int, ModelConfig], list[dict[str, Any]]] = log_of
) -> None:
    """Write the logs."""
    logging.disable(logging.WARNING)
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as files:
        Path(files, "config.json").write_text(json.dumps(CONFIG))
        model = ModelConfig(model=files, skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST)
        for number in range(first, first + count):
            lines = log_of(number, model)
            (folder / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
