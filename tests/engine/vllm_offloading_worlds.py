"""Random worlds through vLLM's scheduler and its offloading connector, as step logs: run by an interpreter with vLLM.

    VLLM_PYTHON tests/engine/vllm_offloading_worlds.py FOLDER FIRST COUNT

The scheduler, the connector's half of it and the manager of host blocks are vLLM's; the worker, which needs a GPU, is
replaced. It reports what is stored with the step after the one that computed it, and a load after a random number of
steps. While no request runs, stores are reported first, and then the load that takes the fewest steps, unless requests
were preempted just before.

Finished requests reach the connector in a Python set, so that vLLM stores their last blocks in the order of hashes;
here they do in the order in which they finish.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import vllm_worlds  # type: ignore[import-not-found]  # beside this file
from vllm.config import ModelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

MOST_EMPTY = 1000
"""A world that schedules nothing for so long has come to a halt."""


def options_of(world: random.Random) -> dict[str, Any]:
    """Settings of an engine that schedules synchronously and has a prefix cache, and of its host memory."""
    options: dict[str, Any] = vllm_worlds.options_of(world)
    options |= {"enable_prefix_caching": True, "async_scheduling": False}
    most = -(-vllm_worlds.LONGEST // options["block_size"])
    return options | {"host_blocks": max(1, round(most * world.choice([0.3, 1, 3, 20])))}


def requests_of(world: random.Random) -> list[dict[str, Any]]:
    """Requests of at least two tokens: if all of a prompt of one token is loaded, vLLM looks for it again for ever."""
    lines = vllm_worlds.requests_of(world)
    return [line | {"prompt_len": max(2, line["prompt_len"])} for line in lines]


class InOrder(dict[str, None]):
    """Set of names that keeps their order."""

    def add(self, name: str) -> None:
        self[name] = None


class Engine(vllm_worlds.Engine):  # type: ignore[misc]
    """A scheduler with its connector, and a worker that moves no bytes."""

    def __init__(self, options: dict[str, Any], model: ModelConfig, lags: random.Random) -> None:
        super().__init__(options, model)
        self._lags, self._most_lag = lags, lags.choice([0, 1, 4])
        self._stores: list[int] = []
        self._num_preempted = 0
        self._loads: dict[int, tuple[str, int]] = {}
        self.scheduler.finished_req_ids = InOrder()

    def add(self, line: dict[str, Any]) -> None:
        super().add(line)
        self.scheduler.connector.on_new_request(self.scheduler.requests[line["req"]])

    def step(self, number: int) -> tuple[SchedulerOutput, dict[str, Any]]:
        batch, line = super().step(number)
        self.scheduler.finished_req_ids = InOrder()
        size = self.scheduler.block_size
        line["waiting"] += len(self.scheduler.kv_holding_waiting)
        loads = batch.kv_connector_metadata.load_jobs.values()
        line["load"] = {job.req_id: size * len(job.dst_spec.block_ids) for job in loads}
        return batch, line

    def report(self, batch: SchedulerOutput, line: dict[str, Any]) -> list[str]:
        """Pass on the tokens of a step and the transfers that have ended; return the requests that are loaded."""
        meta, idle = batch.kv_connector_metadata, not batch.total_num_scheduled_tokens
        more = len(line["preempt"]) > self._num_preempted
        self._num_preempted = len(line["preempt"]) if idle else 0
        stored, self._stores = self._stores, list(meta.store_jobs)
        for job, entry in meta.load_jobs.items():
            self._loads[job] = entry.req_id, self._lags.randint(0, self._most_lag)
        ready = [job for job, (_, lag) in self._loads.items() if not lag]
        if idle:
            first = min(self._loads, key=lambda job: self._loads[job][1]) if self._loads else None
            ready = [] if stored or self._stores or more or first is None else [first]
        else:
            self._loads = {job: (name, max(0, lag - 1)) for job, (name, lag) in self._loads.items()}
        loaded = [self._loads.pop(job)[0] for job in ready]
        names = list(batch.num_scheduled_tokens)
        sampled = [line["sampled"].get(name, []) for name in names]
        transfers = KVConnectorOutput(
            finished_recving=set(loaded),
            kv_connector_worker_meta=OffloadingWorkerMetadata(dict.fromkeys([*stored, *ready], 1)),
        )
        output = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled, kv_connector_output=transfers)
        self.scheduler.update_from_output(batch, output)
        return loaded


def log_of(number: int, model: ModelConfig) -> list[dict[str, Any]]:
    """Header, requests and steps of a world. `loaded` lists, for each call of `schedule` since the step before, the
    requests whose loads were reported before it; `load` is what the last of them starts to load, in tokens."""
    world = random.Random(number)
    options, requests = options_of(world), requests_of(world)
    engine = Engine(options, model, world)
    options["free_blocks_at_start"] = engine.free
    coming, empty = list(requests), 0
    steps: list[dict[str, Any]] = []
    reported: list[list[str]] = [[]]
    loads: dict[str, int] = {}
    while coming or engine.scheduler.has_unfinished_requests():
        while coming and (coming[0]["at_step"] <= len(steps) or engine.idle):
            coming[0]["at_step"] = len(steps)
            engine.add(coming.pop(0))
        batch, line = engine.step(len(steps))
        loads |= line["load"]
        if batch.total_num_scheduled_tokens:
            line |= {"loaded": reported, "load": loads}
            steps.append({"step": len(steps), **{key: line[key] for key in line if key != "sampled"}})
            reported, loads, empty = [], {}, 0
        elif (empty := empty + 1) == MOST_EMPTY:
            raise RuntimeError(f"world {number}: nothing is scheduled, and requests are left")
        reported.append(engine.report(batch, line))
    package = f"vllm {vllm_worlds.vllm.__version__}"
    header = {"format": "steplog/1", "log": f"world {number}", "engine": "vllm", "package": package}
    return [{**header, "options": options, "n_requests": len(requests), "n_steps": len(steps)}, *requests, *steps]


def main(folder: Path, first: int, count: int) -> None:
    """Write the logs."""
    logging.disable(logging.WARNING)
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as files:
        Path(files, "config.json").write_text(json.dumps(vllm_worlds.CONFIG))
        longest = vllm_worlds.LONGEST
        model = ModelConfig(model=files, skip_tokenizer_init=True, dtype="float32", max_model_len=longest)
        for number in range(first, first + count):
            lines = log_of(number, model)
            (folder / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
