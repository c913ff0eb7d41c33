"""SGLang, transformers and llama.cpp themselves read what is written for them, as far as their parsers go.

    make releases vllm
    VLLM_PYTHON=.venv-vllm/bin/python python -m pytest -m slow tests/emit/test_other_parsers.py

SGLang and transformers are unpacked beside the releases of vLLM (RELEASES may name another place). LLAMA_SERVER names a
`llama-server`; one built without a GPU will do. TensorRT-LLM cannot be imported without one: its names are held against
tables (test_serving.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from simtune.emit import ENGINES, engine_files
from simtune.specs.catalog import load_engine, load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.preset import merged
from tests.emit.test_pools import calls

PYTHON = os.environ.get("VLLM_PYTHON", "")
RELEASES = Path(os.environ.get("RELEASES", Path(PYTHON).parents[1] / "releases" if PYTHON else ""))
LLAMA_SERVER = os.environ.get("LLAMA_SERVER", "")
HERE = Path(__file__).parent
MODEL, DRAFT = load_model("llama-3.1-8b"), load_model("llama-3.2-1b")

pytestmark = pytest.mark.slow

POOLS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "parallel": {"parallelism": {"tp": 2, "pp": 2}, "async_scheduling": False, "cuda_graphs": False},
    "experts": {"parallelism": {"tp": 2, "attention_dp": 2}, "kv_cache": {"prefix_caching": False}},
    "whole prompts": {"batching": {"chunked_prefill": False, "max_num_batched_tokens": 16384}},
    "cache": {"kv_cache": {"dtype": "fp8", "num_blocks": 9000}, "weight_dtype": "fp8"},
    "conservative": {"batching": {"options": {"schedule_conservativeness": 0.5}}},
    "messages of several tokens": {"stream_interval": 10},
    "tier": {"kv_cache": {"prefix_caching": True, "tiers": [{"name": "host", "bytes": 64e9, "bytes_per_s": 50e9}]}},
    "adapters": {"lora": {"rank": 32, "slots": 4, "host_slots": 20}},
    "prefill": {"role": "prefill", "name": "a"},
}
DRAFTS: dict[str, dict[str, Any]] = {
    "draft model": {"drafter": {"kind": "draft_model", "model": "small"}, "scheme": {"kind": "chain", "tokens": 3}},
    "eagle": {
        "drafter": {"kind": "eagle", "checkpoint": "org/head"},
        "scheme": {"kind": "dynamic_tree", "steps": 2, "topk": 2, "tokens": 4},
    },
    "eagle3": {
        "drafter": {"kind": "eagle", "method": "eagle3", "checkpoint": "org/head"},
        "scheme": {"kind": "chain", "tokens": 3},
    },
    "mtp": {"drafter": {"kind": "eagle", "method": "mtp"}, "scheme": {"kind": "chain", "tokens": 1}},
    "ngram": {"drafter": {"kind": "ngram", "lookup_max": 4}, "scheme": {"kind": "chain", "tokens": 3}},
    "block": {
        "drafter": {"kind": "block", "layers": 2, "checkpoint": "org/block"},
        "scheme": {"kind": "chain", "tokens": 3},
    },
}


def plan_of(engine: str, pool: dict[str, Any], named: str | None = "") -> Plan:
    """A plan with the settings of an engine preset, that names it or another one."""
    preset = load_engine(engine).settings(load_hardware("h100-sxm").device, MODEL)
    own = merged(
        pool,
        {"hardware": "h100-sxm", "engine": engine if named == "" else named, "instances": 1, "max_model_len": 8192},
    )
    pools = [merged(own, preset)]
    link: dict[str, Any] = {}
    if "role" in pool:
        pools, link = [*pools, {**pools[0], "role": "decode", "name": "b"}], {"link": {}}
    return Plan.model_validate({"name": "p", "model": MODEL.name, "pools": pools, **link})


def encoding_plan(engine: str, named: str | None) -> Plan:
    """A plan with servers of their own that encode."""
    stage = {"name": "see", "pool": "mixed", "encoder": "data", "devices": 2}
    plan = plan_of(engine, {}, named)
    return Plan.model_validate({**plan.to_data(), "model": "qwen2.5-vl-7b", "stages": [stage]})


def ended(command: list[str | Path], path: str = "") -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": path} if path else {}
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("engine", ["sglang-0.5", None], ids=["preset", "newest"])
def test_sglang_reads_every_setting(tmp_path: Path, engine: str | None) -> None:
    folders = [RELEASES / "sglang"] if engine is None else [RELEASES / engine, RELEASES / f"{engine}-transformers"]
    if missing := [folder for folder in folders if not folder.is_dir()]:
        pytest.skip(f"{missing[0]} is not there; make releases unpacks it")
    drafting = {name: {"speculation": {**given, "acceptance": "mine"}} for name, given in DRAFTS.items()}
    said: list[tuple[str, dict[str, Any], Path]] = []
    for name, pool in {**POOLS, **drafting}.items():
        drafts = {"small": DRAFT.model_copy(update={"hf": "org/small"})}
        for file, text in (
            ENGINES["sglang"].files(plan_of("sglang-0.5", pool, engine), MODEL, draft_models=drafts).items()
        ):
            if file.endswith(".yaml") and "dynamo" not in file:
                path = tmp_path / f"{len(said)}.yaml"
                path.write_text(text)
                said.append((name, yaml.safe_load(text), path))
    for file, text in engine_files(encoding_plan("sglang-0.5", engine), load_model("qwen2.5-vl-7b"), 8, {}).items():
        if file.endswith(".yaml"):
            path = tmp_path / f"{len(said)}.yaml"
            path.write_text(text)
            said.append((file, yaml.safe_load(text), path))
    (bad := tmp_path / "bad.yaml").write_text("max-running-requestz: 8\n")
    packages = os.pathsep.join(map(str, folders))
    run = ended([PYTHON, HERE / "read_by_sglang.py", *(path for _, _, path in said), bad], packages)
    assert run.returncode == 0, run.stderr[-4000:]
    *answers, refused = json.loads(run.stdout.splitlines()[-1])
    assert "error" in refused
    assert len(said) == len(POOLS) + 1 + len(DRAFTS) + 2
    for (name, settings, _), found in zip(said, answers, strict=True):
        read = {key: found.get(key.replace("-", "_"), found.get("error")) for key in settings}
        assert read == settings, name


@pytest.mark.parametrize("pool", [{}, {"cuda_graphs": True}, {"kv_cache": {"num_blocks": 9000}}])
def test_transformers_reads_every_setting(tmp_path: Path, pool: dict[str, Any]) -> None:
    if not (RELEASES / "transformers").is_dir():
        pytest.skip(f"{RELEASES / 'transformers'} is not there; make releases unpacks it")
    files = engine_files(plan_of("transformers", pool), MODEL, 8, {})
    (call,) = calls(tmp_path, files, "launch.sh", ("transformers",), MODEL="/models/m")
    command, *words = call.removesuffix("|").split("|")
    assert (command, words[0]) == ("transformers", "serve")
    run = ended([PYTHON, HERE / "read_by_transformers.py", *words[1:]], str(RELEASES / "transformers"))
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    settings = yaml.safe_load(files["engine/transformers-mixed.yaml"])
    graphs = settings.pop("cb-use-cuda-graph", not settings.pop("no-cb-use-cuda-graph", False))
    expected = {key.replace("-", "_"): value for key, value in settings.items()}
    assert {"force_model": "/models/m", "port": 8000, "cb_use_cuda_graph": graphs, **expected}.items() <= found.items()
    wrong = ended([PYTHON, HERE / "read_by_transformers.py", "m", "--cb-batch", "8"], str(RELEASES / "transformers"))
    assert "No such option" in wrong.stderr


@pytest.mark.skipif(not LLAMA_SERVER, reason="LLAMA_SERVER names no llama-server")
@pytest.mark.parametrize(
    "pool",
    [{}, {"parallelism": {"tp": 2}}, {"parallelism": {"pp": 2}}, {"kv_cache": {"num_blocks": 9000, "dtype": "fp16"}}],
)
def test_llama_server_reads_every_option(tmp_path: Path, pool: dict[str, Any]) -> None:
    files = engine_files(plan_of("llamacpp", pool), MODEL, 8, {})
    (call,) = calls(tmp_path, files, "launch.sh", ("llama-server",), MODEL="/models/m.gguf")
    words = call.removesuffix("|").split("|")[1:]
    good, bad = (ended([LLAMA_SERVER, *words, *more, "--help"]) for more in ([], ["--parallels", "3"]))
    assert good.returncode == 0, good.stderr[-2000:]
    assert "--kv-unified-per-slot" in good.stdout
    assert bad.returncode != 0
    assert "invalid argument: --parallels" in bad.stdout + bad.stderr
