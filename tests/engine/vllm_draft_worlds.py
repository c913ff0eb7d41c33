"""Random worlds with drafts through vLLM's own scheduler, as step logs: run by an interpreter that has vLLM.

    VLLM_PYTHON tests/engine/vllm_draft_worlds.py FOLDER FIRST COUNT

As `vllm_worlds`, with speculative decoding by each of the methods that need no further package. The speculative
configuration is vLLM's own, read from the config files of tiny drafters. The runner, in place of a model, accepts a
random number of the drafts of each request and step, and makes as many drafts as the scheduler asks for. Without
asynchronous scheduling the scheduler gets them after each step, as from the engine core; with it it has placeholders.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import vllm.config.vllm
import vllm_worlds  # type: ignore[import-not-found]  # beside this file
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm_worlds import LONGEST

# Only the kernels of the second model runner need Triton, and no runner is here.
vllm.config.vllm.HAS_TRITON = True
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {},
    "eagle": {},
    "eagle3": {},
    "mtp": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 1,
        "n_routed_experts": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    },
    "dflash": {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0]}},
    "dspark": {"architectures": ["DSparkDraftModel"]},
    "ngram": {},
}  # fmt: skip
"""Method, and what the config file of its drafter has besides, or in place of, the target's."""


def options_of(world: random.Random) -> dict[str, Any]:
    """Settings of an engine that drafts."""
    options: dict[str, Any] = vllm_worlds.options_of(world)
    method, drafts = world.choice([*METHODS, "draft_model", "eagle"]), world.randint(1, 5)
    spec: dict[str, Any] = {"method": method, "k": drafts}
    if world.random() < 0.15 and method != "dspark":
        until = world.randint(1, 6)
        spec["by_batch"] = [[1, until, drafts], [until + 1, 1000, world.randint(0, drafts)]]
    # vLLM waits forever if no step has room for a request with its drafts and the slots of the drafter.
    least = 2 + 2 * drafts
    options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], least)
    options["v2_model_runner"] = method == "dspark" or (world.random() < 0.5 and method != "ngram")
    if method == "ngram":  # only with the result of a step are its drafts known
        options["async_scheduling"] = False
    # A threshold that cuts drafts is refused.
    if options["long_prefill_token_threshold"]:
        options["long_prefill_token_threshold"] += drafts
    return options | {"spec": spec}


def requests_of(world: random.Random) -> list[dict[str, Any]]:
    """Requests, some of which end with the longest context."""
    lines: list[dict[str, Any]] = vllm_worlds.requests_of(world)
    share = world.choice([0.0, 0.0, 0.5])
    return [line | {"output_len": LONGEST - line["prompt_len"]} if world.random() < share else line for line in lines]


def speculative_config(spec: dict[str, Any], model: ModelConfig) -> SpeculativeConfig:
    """Return vLLM's settings of a drafter."""
    settings: dict[str, Any] = {"method": spec["method"], "num_speculative_tokens": spec["k"]}
    if "by_batch" in spec:
        settings["num_speculative_tokens_per_batch_size"] = spec["by_batch"]
    if spec["method"] == "ngram":
        settings["prompt_lookup_max"] = 3
    with tempfile.TemporaryDirectory() as files:
        config = vllm_worlds.CONFIG | METHODS[spec["method"]]
        Path(files, "config.json").write_text(json.dumps(config))
        if spec["method"] != "ngram":
            settings["model"] = files
        return SpeculativeConfig(**settings, target_model_config=model, target_parallel_config=ParallelConfig())


class Engine(vllm_worlds.Engine):  # type: ignore[misc]
    """A scheduler of vLLM with drafts, and a runner that accepts some of them."""

    def __init__(self, options: dict[str, Any], model: ModelConfig, world: random.Random) -> None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(options["v2_model_runner"]))
        speculation = speculative_config(options["spec"], model)
        super().__init__(options, model, speculative_config=speculation)
        # Since 0.33 vLLM lowers it for drafters of whole blocks.
        options["max_num_active_seqs"] = self.scheduler.scheduler_config.max_num_active_seqs
        options["num_lookahead_tokens"] = self.scheduler.num_lookahead_tokens
        options["spec"]["draft_slots_per_request"] = speculation.max_num_new_slots_for_drafting
        self._world, self._likely = world, world.choice([0.0, 0.3, 0.7, 0.95, 1.0])
        self._computed: dict[str, int] = {}

    def _run(self, batch: SchedulerOutput, past: dict[str, int]) -> dict[str, Any]:
        """Accept a random number of each request's drafts; none of those that pad a newcomer."""
        admitted = {new.req_id for new in batch.scheduled_new_reqs} | batch.scheduled_cached_reqs.resumed_req_ids
        drafted = {name: len(drafts) for name, drafts in batch.scheduled_spec_decode_tokens.items()}
        accepted: dict[str, int] = {}
        emitted: dict[str, int] = {}
        sampled: dict[str, list[int]] = {}
        for name, tokens in batch.num_scheduled_tokens.items():
            line, drafts = self._lines[name], drafted.get(name, 0)
            known = line["prompt_len"] + self._made[name]
            if name in admitted:
                self._computed[name] = past[name]
            if self._made[name] == line["output_len"]:
                sampled[name] = [0]  # the answer is complete, which the scheduler does not know
                continue
            if self._computed[name] + tokens - drafts < known:
                self._computed[name] += tokens
                continue
            assert self._computed[name] + tokens - drafts == known
            more = 0
            while more < drafts and name not in admitted and self._world.random() < self._likely:
                more += 1
            if drafts:
                accepted[name] = more
            self._computed[name] = known + more
            sampled[name] = [vllm_worlds.own_token(line, known + place) for place in range(1 + more)]
            emitted[name] = min(1 + more, line["output_len"] - self._made[name])
            self._made[name] += emitted[name]
        return {"draft": drafted, "accept": accepted, "emit": emitted, "sampled": sampled}

    def hear(self, batch: SchedulerOutput, sampled: dict[str, list[int]]) -> None:
        super().hear(batch, sampled)
        if not self.ahead:
            names = list(batch.num_scheduled_tokens)
            drafts = [[7] * batch.num_spec_tokens_to_schedule for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))


def log_of(number: int, model: ModelConfig) -> list[dict[str, Any]]:
    """Header, requests and steps of a world."""
    world = random.Random(number)
    options, requests = options_of(world), requests_of(world)
    engine = Engine(options, model, world)
    options["free_blocks_at_start"] = engine.free
    lines: list[dict[str, Any]] = vllm_worlds.log(number, options, requests, vllm_worlds.steps_of(engine, requests))
    return lines


if __name__ == "__main__":
    vllm_worlds.main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), log_of)
