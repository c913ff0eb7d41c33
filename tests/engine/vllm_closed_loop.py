"""Steps of vLLM's own client, engine core and scheduler under users in a closed loop: run by an interpreter with vLLM.

    VLLM_PYTHON tests/engine/vllm_closed_loop.py OUT.json ASYNC [DRAFTS]

vLLM's AsyncLLM sends requests to vLLM's engine core, a process of its own. An executor whose steps take 0.1 s stands in
for the model, in a thread of its own, as a GPU would: the engine core schedules the next step while one runs (ASYNC 1)
or waits for its result (ASYNC 0). First one user, then four send request after request, each as soon as the last token
of the one before has come. The file has, by number of users, the requests that are in each step, as numbers in order of
sending, and two counts for each request: see `counts`. With DRAFTS above 0 EAGLE makes as many drafts in each step, all
of which are accepted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import os
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# The engine core's process finds this file's executor by its name.
os.environ["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

import torch
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput

STEP_S = 0.1
REQUESTS = 20
USERS = (1, 4)
JOURNAL = "CLOSED_LOOP_JOURNAL"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 1000, "max_position_embeddings": 256,
}  # fmt: skip


def lengths(number: int) -> tuple[int, int]:
    """Prompt and output tokens of a request: lengths differ, so that users do not stay in step, and the first ones are
    answered when all users have begun."""
    return 16 + number % 5, 3 + (7 * number + number * number // 3) % 11 + (8 if number < max(USERS) else 0)


class ClockExecutor(Executor):  # type: ignore[misc]  # vLLM is not there for mypy
    """An executor whose steps take a fixed time and run one after another; every step gives a token to each of its
    requests, since prompts fit one step."""

    supports_pp = False

    def _init_executor(self) -> None:
        self._device = ThreadPoolExecutor(1)
        self._scheduled: Any = None
        self._journal = open(os.environ[JOURNAL], "a", buffering=1)  # noqa: SIM115 (open as long as the engine)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    @property
    def max_concurrent_batches(self) -> int:
        """Read from the executor by releases up to 0.19."""
        return 2 if self.scheduler_config.async_scheduling else 1

    def collective_rpc(self, method: Any, *given: Any, **named: Any) -> Any:
        layer = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32)
        answers: dict[str, Any] = {
            "get_kv_cache_spec": [{"layer": layer}],
            "determine_available_memory": [1 << 26],
            "get_supported_tasks": [("generate",)],
            "get_supported_kv_cache_layouts": [["NHD", "HND"]],
            "supports_draft_weight_updates": [False],
            "compile_or_warm_up_model": [],
        }
        return answers.get(method, [None])

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        output = None
        if scheduler_output.total_num_scheduled_tokens:
            self._scheduled = scheduler_output
        else:
            output = EMPTY_MODEL_RUNNER_OUTPUT
        return _done(output) if non_block else output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        batch = self._scheduled
        drafts = {name: len(tokens) for name, tokens in batch.scheduled_spec_decode_tokens.items()}
        # A newcomer is padded with drafts that were not made.
        drafts |= dict.fromkeys((new.req_id for new in batch.scheduled_new_reqs), 0)
        names = list(batch.num_scheduled_tokens)
        future = self._device.submit(self._step, names, [[7] * (1 + drafts.get(name, 0)) for name in names])
        return future if non_block else future.result()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Read by an engine core without asynchronous scheduling."""
        drafts = self.vllm_config.speculative_config.num_speculative_tokens
        names = list(self._scheduled.num_scheduled_tokens)
        return DraftTokenIds(names, [[7] * drafts for _ in names])

    def _step(self, names: list[str], sampled: list[list[int]]) -> ModelRunnerOutput:
        time.sleep(STEP_S)
        self._journal.write(json.dumps([time.monotonic(), names]) + "\n")
        places = {name: place for place, name in enumerate(names)}
        output = {"req_ids": names, "req_id_to_index": places, "sampled_token_ids": sampled}
        empty: dict[str, Any] = {
            field.name: None if "dict" not in str(field.type) else {}
            for field in dataclasses.fields(ModelRunnerOutput)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        }
        return ModelRunnerOutput(**empty | output)

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self._device.shutdown(wait=False)


def _done(output: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(output)
    return future


async def closed_loop(engine: Any, users: int) -> list[tuple[float, float]]:
    """Send all requests; return when each was sent, and when its first token came."""
    times: list[tuple[float, float]] = [(0.0, 0.0)] * REQUESTS
    numbers = iter(range(REQUESTS))
    # Each user begins two tokens of the first answer after the one before, so that the machine's load does not matter.
    begun = [asyncio.Event() for _ in range(users)]
    begun[0].set()

    async def user(place: int) -> None:
        await begun[place].wait()
        for number in numbers:
            prompt, output = lengths(number)
            sampling = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False)
            stamps = [time.monotonic()]
            words = {"prompt_token_ids": [2 + (number * 31 + i) % 900 for i in range(prompt)]}
            async for answer in engine.generate(words, sampling, f"{users}:{number}:"):
                stamps.append(time.monotonic())
                for later in range(len(answer.outputs[0].token_ids) // 2 + 1):
                    if number == 0 and later < users:
                        begun[later].set()
            times[number] = stamps[0], stamps[1]

    await asyncio.gather(*map(user, range(users)))
    return times


def counts(steps: list[tuple[float, list[int]]], times: list[tuple[float, float]]) -> dict[str, list[int]]:
    """Count for each request the steps that ended from its sending to its first token, and the steps from the last one
    that ended before its sending to the first one that it is in; `steps` are (end, requests)."""
    ends = [end for end, _ in steps]
    joined = [next(place for place, (_, requests) in enumerate(steps) if r in requests) for r in range(len(times))]
    before = [sum(end <= sent for end in ends) for sent, _ in times]
    return {
        "to_first_token": [sum(sent < end <= first for end in ends) for sent, first in times],
        "to_join": [place - ended + 1 for place, ended in zip(joined, before, strict=True)],
    }


def main(out: Path, asynchronous: bool, drafts: int) -> None:
    """Write the counts of one way of scheduling."""
    from vllm.v1.engine.async_llm import AsyncLLM

    # By its module's name, by which the process of the engine core can import it.
    executor = importlib.import_module(Path(__file__).stem).ClockExecutor
    with tempfile.TemporaryDirectory() as files:
        os.environ[JOURNAL] = str(Path(files, "journal"))
        Path(files, "config.json").write_text(json.dumps(CONFIG))
        speculation = {"method": "eagle", "model": files, "num_speculative_tokens": drafts} if drafts else None
        arguments = AsyncEngineArgs(
            model=files, skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=8,
            max_num_batched_tokens=256, enforce_eager=True, enable_prefix_caching=False, block_size=16,
            async_scheduling=asynchronous, distributed_executor_backend="uni", speculative_config=speculation,
        )  # fmt: skip
        config = arguments.create_engine_config()
        # A processor's platform switches it off.
        config.scheduler_config.async_scheduling = asynchronous

        async def run() -> dict[int, list[tuple[float, float]]]:
            engine = AsyncLLM(config, executor, log_stats=False)
            try:
                sampling = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
                async for _ in engine.generate({"prompt_token_ids": [3, 4]}, sampling, "0:0:"):
                    pass  # the first request is slow: what it needs is loaded
                return {users: await closed_loop(engine, users) for users in USERS}
            finally:
                engine.shutdown()

        times = asyncio.run(run())
        journal = [json.loads(line) for line in Path(files, "journal").read_text().splitlines()]
    result: dict[str, Any] = {"vllm": vllm.__version__, "async_scheduling": asynchronous}
    if drafts:
        result["drafts"] = drafts
    result |= {"lengths": [lengths(number) for number in range(REQUESTS)], "users": {}}
    for users in USERS:
        # vLLM appends a random suffix to the names of requests.
        ran = [(end, [name.split(":") for name in names]) for end, names in journal]
        steps = [(end, [int(name[1]) for name in names]) for end, names in ran if names[0][0] == str(users)]
        result["users"][users] = {"steps": [requests for _, requests in steps], **counts(steps, times[users])}
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "1", int(sys.argv[3]) if len(sys.argv) > 3 else 0)
