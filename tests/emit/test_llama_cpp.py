"""Plans for llama.cpp's server: every option is one it has, and what it cannot be told is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from simtune.emit import ENGINES, emitter_of, engine_files
from simtune.errors import UsageError
from simtune.specs.catalog import load_engine, load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.preset import merged
from tests.cli.conftest import STUDY, call
from tests.emit.test_pools import calls

MODEL = load_model("llama-3.1-8b")
OPTIONS = {
    # ggml-org/llama.cpp: tools/server/README.md at 00dc8057ab28c9cb4c79a6dd6dfce07fe779f63b, the list of llama-gen-docs
    "--model", "--port", "--host", "--ctx-size", "--batch-size", "--ubatch-size", "--parallel", "--kv-unified",
    "--kv-unified-per-slot", "--cache-type-k", "--cache-type-v", "--n-gpu-layers", "--split-mode", "--cache-prompt",
    "--no-cache-prompt", "--cont-batching",
}  # fmt: skip
WORDS = {
    "--split-mode": {"none", "layer", "row", "tensor"},
    "--cache-type-k": {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"},
}
"""The same: allowed values."""


def plan_of(**pool: Any) -> Plan:
    preset = load_engine("llamacpp").settings(load_hardware("h100-sxm").device, MODEL)
    own = merged(pool, {"hardware": "h100-sxm", "engine": "llamacpp", "instances": 2, "max_model_len": 8192})
    return Plan.model_validate({"name": "p", "model": MODEL.name, "pools": [merged(own, preset)]})


def test_the_preset_says_whose_plan_it_is() -> None:
    (pool,) = plan_of().pools
    assert emitter_of(pool) is ENGINES["llamacpp"]
    assert emitter_of(pool.model_copy(update={"engine": "vllm-0.24"})) is ENGINES["vllm"]
    assert emitter_of(pool.model_copy(update={"engine": None})) is ENGINES["vllm"]


@pytest.mark.parametrize(("cut", "split"), [({}, "none"), ({"tp": 2}, "tensor"), ({"pp": 2}, "layer")])
def test_the_script_starts_it_with_options_that_it_has(tmp_path: Path, cut: dict[str, int], split: str) -> None:
    plan = plan_of(parallelism=cut, kv_cache={"num_blocks": 32_769, "prefix_caching": False})
    files = engine_files(plan, MODEL, 8, {})
    assert set(files) == {"engine/llamacpp-mixed.yaml", "engine/launch.sh"}
    settings = yaml.safe_load(files["engine/llamacpp-mixed.yaml"])
    assert settings == {
        "parallel": 4,
        "batch-size": 2048,
        "ubatch-size": 2048,
        "ctx-size": 32_769,
        "kv-unified": True,
        "kv-unified-per-slot": 8192,
        "cache-type-k": "bf16",
        "cache-type-v": "bf16",
        "n-gpu-layers": "all",
        "split-mode": split,
        "no-cache-prompt": True,
    }
    first, second = calls(tmp_path, files, "launch.sh", ("llama-server",), MODEL="/models/my llama.gguf")
    assert first.startswith("llama-server|--model|/models/my llama.gguf|--port|8000|--parallel|4|")
    assert "|--port|8001|" in second
    assert ENGINES["llamacpp"].router_files(plan, 8, "") == {}  # type: ignore[attr-defined]
    words = first.rstrip("|").split("|")[1:]
    assert {word for word in words if word.startswith("--")} <= OPTIONS
    for option, allowed in WORDS.items():
        assert words[words.index(option) + 1] in allowed
    assert words[words.index("--kv-unified") + 1] == "--kv-unified-per-slot", "a flag has no value"


def test_what_it_sizes_itself_is_named() -> None:
    text = engine_files(plan_of(), MODEL, 8, {})["engine/llamacpp-mixed.yaml"]
    assert "# Not said here: kv_cache.memory_utilization: the KV cache is made for" in text
    assert "ctx-size:" not in text
    eager = engine_files(plan_of(cuda_graphs=False), MODEL, 8, {})["engine/llamacpp-mixed.yaml"]
    assert "# Not said here: cuda_graphs: its server has no option for them" in eager


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "both cuts": ({"parallelism": {"tp": 2, "pp": 2}}, "parallelism: llama.cpp cuts a model by layers or each layer"),
    "groups": ({"parallelism": {"attention_dp": 2}}, "parallelism.attention_dp: llama.cpp has none"),
    "fp8 cache": ({"kv_cache": {"dtype": "fp8"}}, "kv_cache.dtype: llama.cpp has no setting for a fp8 cache"),
    "swap": ({"kv_cache": {"preemption": "swap"}}, "kv_cache.preemption: llama.cpp recomputes"),
    "whole prompts": (
        {"batching": {"chunked_prefill": False, "max_num_batched_tokens": 8192}},
        "batching.chunked_prefill: llama.cpp always cuts prompts",
    ),
    "priorities": ({"batching": {"policy": "vllm-priority"}}, "batching.policy: llama.cpp has no vllm-priority"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_it_cannot_be_told_is_refused(why: str) -> None:
    pool, words = REFUSED[why]
    with pytest.raises(UsageError) as refused:
        ENGINES["llamacpp"].files(plan_of(**pool), MODEL)
    assert words in str(refused.value)


def test_a_study_of_it_leaves_out_what_it_refuses(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(STUDY.replace("pp: [1]", "pp: [1, 2]") + "engine: llamacpp\n")
    said = call("optimize", study, "--dry-run", "--set", "hardware.devices=4")
    assert said.code == 0
    assert "2 left out: llama.cpp: parallelism: llama.cpp cuts a model by layers or each layer, not both" in said.out
