"""Drive vLLM's engine step by step, in an interpreter that has vLLM; no simtune module is imported.

Run as `python -P vllm_steps.py`. It reads JSON lines from stdin: first the settings, `model` (a folder with
config.json), `engine` (further arguments of vLLM's EngineArgs), `vocab` and, once it is known, `reference_s` of the
gauge; then one for every session,

    {"clock": "steps" | "cpu" | "wall", "seed": 0, "requests": [[at, prompt tokens, output tokens, prompt, kv], ...]}

where a prompt is a list of token ids, drawn if it is empty, and kv is the kv_transfer_params, or null. It writes one
line to stdout: `steps` [{decodes, context_tokens, draft_tokens, chunks, cpu_s, wall_s}, ...], processor time being
divided by the gauge's slowness, `requests` [[sent, first token, finish, [times], kept], ...] by the session's clock,
with the kv_transfer_params of the cache that the engine keeps for another, `drafts` [verifications, draft tokens,
accepted tokens, delivered tokens], `found`, the prompt tokens that were in the prefix cache, `preemptions`, and
`queues` [[time, running, waiting], ...], as the scheduler left them at the begin of every step. `steps` as the clock
counts the steps taken; under `cpu` the time to add requests does not count, because a server does that in another
process. The first line contains the facts about the engine.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class SteppedEngine:
    """vLLM's engine with its scheduler in this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.config import KVTransferConfig

        self._params: Any = SamplingParams
        usual = {"skip_tokenizer_init": True, "load_format": "dummy", "enforce_eager": True, "seed": 0}
        arguments = {**usual, **settings["engine"]}
        if "kv_transfer_config" in arguments:
            arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
        cores = os.sched_getaffinity(0) if "kv_transfer_config" in arguments else None
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(model=settings["model"], **arguments))
        if cores is not None:
            _keep(cores)
        core = self._engine.engine_core.engine_core
        self._requests: Any = core.scheduler.requests
        self._lengths: Any = core.scheduler.get_request_counts
        self._schedule, self._update = core.scheduler.schedule, core.scheduler.update_from_output
        core.scheduler.schedule, core.scheduler.update_from_output = self._watched, self._counted
        self._vocab = settings["vocab"]
        self._scheduled: dict[str, Any] | None = None
        self._queued = (0, 0)
        self._number = self._hit_tokens = self._preemptions = 0
        self._drafts = [0, 0, 0, 0]
        self._gauge = _gauge()(settings.get("reference_s"))
        blocks = core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        self.facts = {"version": vllm.__version__, "num_blocks": blocks, "reference_s": self._gauge.reference_s}

    def _watched(self, *args: Any, **options: Any) -> Any:
        out = self._schedule(*args, **options)
        if out.total_num_scheduled_tokens:
            self._scheduled = self._batch(out.num_scheduled_tokens)
            self._queued = self._lengths()
            self._hit_tokens += sum(new.num_computed_tokens for new in out.scheduled_new_reqs)
            self._preemptions += len(out.preempted_req_ids or ())
        return out

    def _counted(self, scheduled: Any, output: Any) -> Any:
        """Count the results of drafts, before and after outputs are cut at their length."""
        before = {}
        for name, drafts in scheduled.scheduled_spec_decode_tokens.items():
            accepted = len(output.sampled_token_ids[output.req_id_to_index[name]]) - 1
            if drafts and accepted >= 0:
                request = self._requests[name]
                before[name] = request, request.num_output_tokens
                for at, tokens in enumerate((1, len(drafts), accepted)):
                    self._drafts[at] += tokens
        out = self._update(scheduled, output)
        self._drafts[3] += sum(request.num_output_tokens - tokens for request, tokens in before.values())
        return out

    def _batch(self, tokens_of: dict[str, int]) -> dict[str, Any]:
        """Return the batch of a step; a request's count of computed tokens has already advanced by the step."""
        decodes = context = drafts = 0
        chunks = []
        for name, tokens in tokens_of.items():
            request = self._requests[name]
            past = request.num_computed_tokens - tokens
            if past >= request.num_prompt_tokens:
                decodes, context, drafts = decodes + 1, context + past + tokens, drafts + tokens - 1
            else:
                chunks.append([past, tokens])
        return {"decodes": decodes, "context_tokens": context, "draft_tokens": drafts, "chunks": chunks}

    def run(self, session: dict[str, Any]) -> dict[str, Any]:
        """Run one session from its first request to its last token."""
        slow = self._gauge()
        clock = _VllmClock(session["clock"])
        self._drafts, self._hit_tokens, self._preemptions = [0, 0, 0, 0], 0, 0
        pending = sorted((at, number) for number, (at, *_) in enumerate(session["requests"]))[::-1]
        noted: list[list[Any]] = [[None, None, None, [], None] for _ in session["requests"]]
        names: dict[str, int] = {}
        steps: list[dict[str, Any]] = []
        queues: list[tuple[float, int, int]] = []
        while pending or self._engine.has_unfinished_requests():
            clock.pause()
            if not self._engine.has_unfinished_requests():
                clock.wait_until(pending[-1][0])
            while pending and pending[-1][0] <= clock.now():
                at, number = pending.pop()
                names[self._add(session["requests"][number], session["seed"])] = number
                noted[number][0] = at if session["clock"] == "cpu" else max(at, clock.now())
            # The gauge is slow: do not run it while the engine only waits for a KV cache.
            if self._scheduled is not None:
                slow = self._gauge()
            clock.go_on(slow)
            begin, cpu, wall = clock.now(), time.thread_time(), time.perf_counter()
            self._scheduled = None
            outputs = self._engine.step()
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
            clock.steps += 1
            if self._scheduled is not None:
                steps.append({**self._scheduled, "cpu_s": cpu / slow, "wall_s": wall})
                queues.append((begin, *self._queued))
            if not self._engine.has_unfinished_requests():
                queues.append((clock.now(), 0, 0))
            for output in outputs:
                _note(noted[names[output.request_id]], output, clock.now())
        counts = {"drafts": self._drafts, "found": self._hit_tokens, "preemptions": self._preemptions}
        return {"steps": steps, "requests": noted, "queues": queues, **counts}

    def _add(self, request: list[Any], seed: int) -> str:
        import numpy as np

        _, prompt, output, ids, kv = request
        ids = ids or np.random.default_rng([seed, self._number]).integers(3, self._vocab, prompt).tolist()
        more = None if kv is None else {"kv_transfer_params": kv}
        params = self._params(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False, extra_args=more)
        self._number += 1
        self._engine.add_request(f"r{self._number}", {"prompt_token_ids": ids}, params)
        return f"r{self._number}"


def _keep(cores: set[int]) -> None:
    """Move this thread back to its cores, and NIXL's threads to unused ones.

    On processors vLLM moves this thread, which computes, to the core that it reserves for KV transfers, beside the
    threads of other engines. NIXL's threads never rest, so they go to cores that the engine does not use, if there are
    any.
    """
    unused = set(range(os.cpu_count() or 1)) - cores or cores
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, cores if thread == os.getpid() else unused)


def _note(noted: list[Any], output: Any, now: float) -> None:
    """Record the tokens of a request that have arrived."""
    if output.outputs[0].token_ids:
        noted[1] = now if noted[1] is None else noted[1]
        noted[3].append(now)
    if output.finished:
        noted[2], noted[4] = now, output.kv_transfer_params


class _VllmClock:
    """Clock of a session: counts steps, processor time over slowness, or seconds."""

    def __init__(self, kind: str) -> None:
        self.steps = 0
        self._kind, self._at, self._slow = kind, 0.0, 1.0
        self._since = self._read()

    def _read(self) -> float:
        return time.thread_time() if self._kind == "cpu" else time.perf_counter()

    def now(self) -> float:
        if self._kind == "steps":
            return self._at + self.steps
        return self._at + (self._read() - self._since) / self._slow

    def pause(self) -> None:
        """Stop the clock, if it counts processor time."""
        if self._kind == "cpu":
            self._at, self._slow = self.now(), float("inf")

    def go_on(self, slow: float) -> None:
        if self._kind == "cpu":
            self._since, self._slow = self._read(), slow

    def wait_until(self, at: float) -> None:
        if self._kind == "wall":
            time.sleep(max(0.0, at - self.now()))
        else:
            self._at += max(0.0, at - self.now())


def _gauge() -> Any:
    spec = importlib.util.spec_from_file_location("gauge", Path(__file__).with_name("gauge.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Gauge


def end_with_parent() -> None:
    """Make the kernel end this process when its parent is killed, whatever it is doing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    stdin_poll = select.poll()
    stdin_poll.register(0, 0)
    # The parent was killed before prctl took effect.
    if any(event & select.POLLHUP for _, event in stdin_poll.poll(0)):
        sys.exit(0)


def main() -> None:
    """Run sessions from stdin until it ends."""
    end_with_parent()
    os.environ.update(ENVIRONMENT)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # Keep stdout for answers: anything else that is printed goes to stderr.
    os.dup2(2, 1)
    engine = SteppedEngine(json.loads(sys.stdin.readline()))
    out.write(json.dumps(engine.facts) + "\n")
    for line in sys.stdin:
        out.write(json.dumps(engine.run(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
