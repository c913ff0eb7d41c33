"""Settings that neither a study nor a plan decides are left to the engine, and the files name them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from simtune.api import load_question
from simtune.emit import ENGINES
from simtune.runs.run_reader import read_certificate
from simtune.specs.catalog import load_model, load_plan
from simtune.specs.plan import Plan
from simtune.tuner.certificate.search_certificate import Audit
from tests.cli.conftest import call

STUDY = Path(__file__).parent / "data" / "e07-plan-turns-caching-off" / "study.yaml"
MODEL = load_model("llama-3.1-8b")
LEFT = "kv_cache.prefix_caching: neither plan nor study sets it, so the engine's default applies; simulated: off"
POLICIES = {"vllm": "vllm-fcfs", "sglang": "sglang", "tensorrt-llm": "tensorrt-llm", "llamacpp": "vllm-fcfs"}
DIFFERENT: dict[str, dict[str, Any]] = {
    "vllm": {"kv_cache.prefix_caching": False},
    "llamacpp": {"kv_cache.prefix_caching": False},
    "sglang": {
        "kv_cache.prefix_caching": False,
        "kv_cache.block_size": 16,
        "kv_cache.memory_utilization": 0.92,
    },
    "tensorrt-llm": {
        "kv_cache.prefix_caching": False,
        "kv_cache.block_size": 16,
        "kv_cache.memory_utilization": 0.92,
        "batching.chunked_prefill": True,
    },
}
"""Settings of a pool whose default here is not the engine's, with the default here."""


def searched(folder: Path, search: Mapping[str, Any] | None = None, **fields: Any) -> Path:
    """Search the study of the case with few requests, unconfirmed."""
    study = yaml.safe_load(STUDY.read_text())
    study["search"] |= {"requests": 100, "confirm": {"draws": 0}, "tp": [1], **(search or {})}
    (folder / "study.yaml").write_text(yaml.safe_dump(study | fields))
    said = call("optimize", folder / "study.yaml", "--out", folder / "run", "--jobs", 1, "--quiet")
    assert said.code == 0, said
    return folder / "run"


def plan_of(engine: str, pool: dict[str, dict[str, Any]]) -> Plan:
    batching = {"policy": POLICIES[engine], "max_num_seqs": 64, "max_num_batched_tokens": 8192}
    whole = {
        "hardware": "h100-sxm",
        "instances": 1,
        "max_model_len": 8192,
        "batching": {**batching, **pool.get("batching", {})},
        "kv_cache": {"num_blocks": 9000, **pool.get("kv_cache", {})},
    }
    return Plan.model_validate({"name": "p", "model": MODEL.name, "pools": [whole]})


def settings_of(text: str) -> set[tuple[str, Any]]:
    """Settings of a file by name, those of nested blocks among them."""
    found: set[tuple[str, Any]] = set()
    for name, value in yaml.safe_load(text).items():
        found |= set(value.items()) if isinstance(value, dict) else {(name, value)}
    return found


def test_a_search_that_does_not_decide_caching_leaves_it_to_the_engine(tmp_path: Path) -> None:
    run = searched(tmp_path)
    settings, deployment, plan = (
        (run / name).read_text() for name in ("engine/vllm-mixed.yaml", "engine/dynamo.yaml", "plan.yaml")
    )
    for text in (settings, deployment):
        assert "enable-prefix-caching" not in text
    assert f"# Not said here: {LEFT}.\n" in settings
    for text in (deployment, plan):
        assert f"# Not said here: pool mixed: {LEFT}.\n" in text
    plan_read = load_plan(str(run / "plan.yaml"))
    (pool,) = plan_read.pools
    assert pool.stated("kv_cache.prefix_caching") is None
    assert pool.kv_cache.prefix_caching is False, "as it was simulated"
    audit = Audit(read_certificate(run / "certificate.json"), load_question(str(tmp_path / "study.yaml")), plan_read)
    assert audit.run(), audit.problems
    again = tmp_path / "again"
    assert (
        call("simulate", "--plan", run / "plan.yaml", "--workload", "chat", "--requests", 50, "--out", again).code == 0
    )
    assert "enable-prefix-caching" not in (again / "engine/vllm-mixed.yaml").read_text()


@pytest.mark.parametrize(
    ("changed", "option"),
    [
        ({"search": {"prefix_caching": [False]}}, "no-enable-prefix-caching"),
        ({"search": {"prefix_caching": [True]}}, "enable-prefix-caching"),
        ({"engine": "vllm-0.24"}, "enable-prefix-caching"),
    ],
)
def test_what_the_study_or_its_engine_decides_is_written(tmp_path: Path, changed: dict[str, Any], option: str) -> None:
    run = searched(tmp_path, **changed)
    text = (run / "engine/vllm-mixed.yaml").read_text()
    assert yaml.safe_load(text)[option] is True
    assert "prefix_caching" not in text
    assert f"prefix_caching: {str(option[:2] != 'no').lower()}\n" in (run / "plan.yaml").read_text()


@pytest.mark.parametrize("engine", list(DIFFERENT))
def test_no_engine_gets_a_default_of_simtune_for_one_of_its_own(engine: str) -> None:
    decided: dict[str, dict[str, Any]] = {}
    for key, value in DIFFERENT[engine].items():
        part, name = key.split(".")
        decided.setdefault(part, {})[name] = value
    open_plan, stated_plan = plan_of(engine, {}), plan_of(engine, decided)
    assert open_plan == stated_plan, "simulated alike"
    name = f"engine/{engine}-mixed.yaml"
    open_text, text = (ENGINES[engine].files(plan, MODEL)[name] for plan in (open_plan, stated_plan))
    assert settings_of(open_text) < settings_of(text)
    assert len(settings_of(text) - settings_of(open_text)) == len(DIFFERENT[engine])
    for key in DIFFERENT[engine]:
        assert f"# Not said here: {key}: neither plan nor study sets it" in open_text
        assert f"{key}: neither" not in text
