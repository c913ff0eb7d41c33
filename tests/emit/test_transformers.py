"""Plans for transformers' own server: what it is told, what it is not, and what it cannot do."""

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
from tests.emit.test_pools import calls

MODEL = load_model("llama-3.1-8b")


def plan_of(**pool: Any) -> Plan:
    preset = load_engine("transformers").settings(load_hardware("h100-sxm").device, MODEL)
    own = merged(pool, {"hardware": "h100-sxm", "engine": "transformers", "instances": 2, "max_model_len": 8192})
    return Plan.model_validate({"name": "p", "model": MODEL.name, "pools": [merged(own, preset)]})


def test_the_script_starts_a_server_for_each_instance(tmp_path: Path) -> None:
    plan = plan_of(kv_cache={"num_blocks": 900}, cuda_graphs=True)
    assert emitter_of(plan.pools[0]) is ENGINES["transformers"]
    files = engine_files(plan, MODEL, 8, {})
    assert set(files) == {"engine/transformers-mixed.yaml", "engine/launch.sh"}
    assert yaml.safe_load(files["engine/transformers-mixed.yaml"]) == {
        "continuous-batching": True,
        "cb-block-size": 256,
        "cb-num-blocks": 900,
        "cb-max-batch-tokens": 4096,
        "cb-use-cuda-graph": True,
    }
    first, second = calls(tmp_path, files, "launch.sh", ("transformers",), MODEL="/models/m")
    assert first == (
        "transformers|serve|/models/m|--port|8000|--continuous-batching|--cb-block-size|256|--cb-num-blocks|900|"
        "--cb-max-batch-tokens|4096|--cb-use-cuda-graph|"
    )
    assert "|--port|8001|" in second


def test_what_its_server_chooses_itself_is_named() -> None:
    text = engine_files(plan_of(async_scheduling=True), MODEL, 8, {})["engine/transformers-mixed.yaml"]
    said = [line.removeprefix("# Not said here: ").split(":")[0] for line in text.splitlines() if "Not said" in line]
    assert said == [
        "batching.max_num_seqs",
        "max_model_len",
        "kv_cache.memory_utilization",
        "kv_cache.prefix_caching",
        "async_scheduling",
    ]
    assert yaml.safe_load(text)["no-cb-use-cuda-graph"] is True
    plain = plan_of(kv_cache={"prefix_caching": True, "num_blocks": 900})
    assert engine_files(plain, MODEL, 8, {})["engine/transformers-mixed.yaml"].count("Not said here") == 2


@pytest.mark.parametrize(
    ("pool", "why"),
    [
        ({"parallelism": {"tp": 2}}, "parallelism: transformers serves on one GPU here"),
        ({"batching": {"chunked_prefill": False}}, "batching.chunked_prefill: transformers always cuts prompts"),
        ({"kv_cache": {"dtype": "fp8"}}, "kv_cache.dtype: transformers has no setting for a fp8 cache"),
    ],
)
def test_what_it_cannot_do_is_refused(pool: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as refused:
        ENGINES["transformers"].files(plan_of(**pool), MODEL)
    assert why in str(refused.value)


def test_it_hands_no_cache_over() -> None:
    (mixed,) = plan_of().pools
    apart = mixed.model_copy(update={"role": "prefill"})
    assert any(why.startswith("role: transformers") for why in ENGINES["transformers"].refusals(apart, MODEL, {}))
    assert ENGINES["transformers"].router_files(plan_of(), 8, "") == {}  # type: ignore[attr-defined]
