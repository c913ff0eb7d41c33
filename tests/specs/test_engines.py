"""Engine presets: every setting has a source, fills plans in, and gives way to what a plan says."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.api import load_question, simulate
from simtune.errors import SimtuneError, SpecError, UsageError
from simtune.specs import catalog
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.preset import DEFAULT_ENGINE, EnginePreset, merged
from simtune.tuner.space.candidates import Candidate

PRESETS = catalog.names("engine")

PLAN = """
schema: simtune/plan@1
name: p
model: llama-3.1-8b
pools:
- hardware: {hardware}
  engine: {engine}
  instances: 1
"""

OWN = """
schema: simtune/engine@1
name: mine
family: vllm
release: mine
pool:
  batching: {policy: vllm-fcfs, max_num_seqs: 8, max_num_batched_tokens: 64}
cases:
- weights: [fp8]
  pool: {kv_cache: {dtype: fp8}}
sources:
  batching.policy: mine
  batching.max_num_seqs: mine
  batching.max_num_batched_tokens: mine
  kv_cache.dtype: mine
"""


def plan_of(folder: Path, engine: str, hardware: str = "h100-sxm", more: str = "") -> Plan:
    path = folder / "plan.yaml"
    path.write_text(PLAN.format(engine=engine, hardware=hardware) + more)
    return catalog.load_plan(str(path))


def test_the_default_is_there() -> None:
    assert DEFAULT_ENGINE in PRESETS


@pytest.mark.parametrize("engine", PRESETS)
@pytest.mark.parametrize("hardware", ["h100-sxm", "a100-sxm-80g", "rtx-4090"])
def test_a_preset_sets_every_knob_it_names(engine: str, hardware: str, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, engine, hardware)
    (pool,) = plan.pools
    settings = catalog.load_engine(engine).settings(
        catalog.load_hardware(hardware).device, catalog.load_model("llama-3.1-8b")
    )
    assert Pool.model_validate({"hardware": hardware, "instances": 1, "engine": engine, **settings}) == pool
    assert plan.to_data()["pools"][0]["engine"] == engine
    again = tmp_path / "again.yaml"
    again.write_text(plan.to_yaml())
    assert catalog.load_plan(str(again)) == plan


def test_large_devices_are_given_larger_batches_and_an_a100_is_not(tmp_path: Path) -> None:
    sizes = {
        hardware: plan_of(tmp_path, "vllm-0.24", hardware).pools[0].batching.max_num_batched_tokens
        for hardware in ("h100-sxm", "a100-sxm-80g", "rtx-4090")
    }
    assert sizes == {"h100-sxm": 8192, "a100-sxm-80g": 2048, "rtx-4090": 2048}


def test_a_release_that_cannot_schedule_ahead_over_stages_does_not(tmp_path: Path) -> None:
    def ahead(engine: str, more: str) -> bool:
        return plan_of(tmp_path, engine, more=more).pools[0].async_scheduling

    stages = "  parallelism: {pp: 2}\n"
    assert [ahead("vllm-0.14", more) for more in ("", stages)] == [True, False]
    assert [ahead("vllm-0.19", more) for more in ("", stages)] == [True, True]
    assert ahead("vllm-0.14", f"{stages}  async_scheduling: true\n")  # which its emitter refuses


def test_what_the_plan_says_stays(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "vllm-0.12", more="  kv_cache: {block_size: 32}\n  async_scheduling: true\n")
    (pool,) = plan.pools
    assert (pool.kv_cache.block_size, pool.kv_cache.memory_utilization) == (32, 0.9)
    assert pool.async_scheduling


def test_a_preset_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(OWN)
    (pool,) = plan_of(tmp_path, str(tmp_path / "mine.yaml")).pools
    assert (pool.batching.max_num_seqs, pool.kv_cache.dtype) == (8, None)
    model = catalog.load_model("llama-3.1-8b", ("weight_dtype=fp8",))
    device = catalog.load_hardware("h100-sxm").device
    assert catalog.load_engine(str(tmp_path / "mine.yaml")).settings(device, model)["kv_cache"] == {"dtype": "fp8"}


def test_a_setting_without_a_source_and_a_source_without_a_setting_are_refused() -> None:
    with pytest.raises(SpecError, match=r"none for kv_cache\.dtype"):
        EnginePreset.from_text(OWN.replace("  kv_cache.dtype: mine\n", ""), "mine.yaml")
    with pytest.raises(SpecError, match="there is no setting cuda_graphs"):
        EnginePreset.from_text(OWN + "  cuda_graphs: mine\n", "mine.yaml")


def test_an_unknown_engine_is_named_where_it_stands(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"plan\.yaml:7:3: pools\.0\.engine: no engine is called 'vllm-9'"):
        plan_of(tmp_path, "vllm-9")


def test_settings_that_no_plan_has_are_refused(tmp_path: Path) -> None:
    wrong = OWN.replace("max_num_seqs", "max_seqs")
    (tmp_path / "mine.yaml").write_text(wrong)
    with pytest.raises(SimtuneError, match="max_seqs"):
        plan_of(tmp_path, str(tmp_path / "mine.yaml"))


def test_an_engine_is_named_in_the_plan_or_beside_none(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "vllm-0.24")
    with pytest.raises(UsageError, match="beside a plan"):
        simulate("chat", plan=plan, engine="vllm-0.24", requests=10)
    made = simulate("chat", model="llama-3.1-8b", hardware="h100-sxm", engine="vllm-0.12", requests=200)
    named = simulate("chat", model="llama-3.1-8b", hardware="h100-sxm", engine="vllm-0.24", requests=200)
    assert made.tpot_s.mean() > named.tpot_s.mean(), "the older release waits for its host"


def test_a_study_searches_plans_of_an_engine(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(
        "schema: simtune/study@1\nname: s\nmodel: llama-3.1-8b\nhardware: {profile: h100-sxm, devices: 1}\n"
        "workload: chat\nengine: vllm-0.12\nslo: {tpot_s: {p99: 0.1}}\n"
    )
    question = load_question(str(tmp_path / "study.yaml"))
    candidate = Candidate.mixed("h100-sxm", 1, max_num_seqs=64, max_num_batched_tokens=4096)
    (pool,) = question.plan(candidate, 8192).pools
    assert (pool.engine, pool.async_scheduling, pool.kv_cache.memory_utilization) == ("vllm-0.12", False, 0.9)
    assert (pool.batching.max_num_seqs, pool.batching.max_num_batched_tokens) == (64, 4096)


def test_merging_keeps_what_lies_above() -> None:
    assert merged({"a": {"b": 1}, "c": 2}, {"a": {"b": 3, "d": 4}, "e": 5}) == {"a": {"b": 1, "d": 4}, "c": 2, "e": 5}
