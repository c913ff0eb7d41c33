"""Engine presets: every setting has a source, fills plans in, and gives way to what a plan says."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.api import load_question, simulate
from simtune.errors import SimtuneError, SpecError, UsageError
from simtune.specs import catalog
from simtune.specs.plan import Plan
from simtune.specs.plan_words import chosen_releases
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


@pytest.mark.parametrize(
    ("asked", "preset"),
    [
        ("vllm", "vllm-0.33"),
        ("vllm@0.21", "vllm-0.19"),
        ("vllm@0.27.1", "vllm-0.24"),
        ("vllm@0.28", "vllm-0.28"),
        ("sglang", "sglang-0.5.23"),
        ("sglang@0.5.14", "sglang-0.5"),
        ("trtllm", "trtllm-1.4"),
        ("trtllm@1.3", "trtllm-1.2"),
    ],
)
def test_a_family_is_its_newest_release_and_a_release_the_nearest_at_or_below(
    asked: str, preset: str, tmp_path: Path
) -> None:
    engine = catalog.load_engine(asked)
    assert (engine.name, engine.asked) == (preset, asked)
    plan = plan_of(tmp_path, asked)
    assert (plan.pools[0].engine, plan.pools[0].engine_asked) == (preset, asked)
    by_name = plan_of(tmp_path, preset)
    assert by_name.pools[0].engine_asked is None
    assert plan.pools[0].model_copy(update={"engine_asked": None}) == by_name.pools[0]
    assert chosen_releases(plan) == [f"engine {asked}: preset {preset} is used"]
    assert chosen_releases(by_name) == []


def test_a_release_before_all_presets_and_another_word_are_refused() -> None:
    with pytest.raises(UsageError, match=r"engine vllm@0\.5: no preset of that release or an earlier one.*vllm-0\.10"):
        catalog.load_engine("vllm@0.5")
    with pytest.raises(UsageError, match="no engine is called 'vlm'"):
        catalog.load_engine("vlm")


def test_vllm_is_given_larger_steps_on_the_largest_devices_since_0_28(tmp_path: Path) -> None:
    """vllm/engine/arg_utils.py of the release, EngineArgs.get_batch_defaults."""
    sizes = {
        (engine, hardware): plan_of(tmp_path, engine, hardware).pools[0].batching.max_num_batched_tokens
        for engine in ("vllm-0.24", "vllm-0.28", "vllm-0.33")
        for hardware in ("h200-sxm", "b200", "a100-sxm-80g", "rtx-4090")
    }
    small = {(e, h): 2048 for e in ("vllm-0.24", "vllm-0.28", "vllm-0.33") for h in ("a100-sxm-80g", "rtx-4090")}
    medium = {(e, "h200-sxm"): 8192 for e in ("vllm-0.24", "vllm-0.28", "vllm-0.33")}
    large = {("vllm-0.24", "b200"): 8192, ("vllm-0.28", "b200"): 16384, ("vllm-0.33", "b200"): 16384}
    assert sizes == small | medium | large


def graphs_of_prompts(most: int) -> int:
    """Count the sizes for which SGLang 0.5.23 captures steps of prompts (arg_groups/cuda_graph_hook.py)."""
    spans = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, most + 1, 512))
    return sum(size <= most for first, beyond, step in spans for size in range(first, beyond, step))


@pytest.mark.parametrize(
    ("hardware", "mib", "chunk", "seats"),
    [
        ("l4", 24564, 4096, 48),
        ("l40s", 49140, 4096, 32),
        ("h100-sxm", 81559, 8192, 256),
        ("h200-sxm", 143771, 8192, 256),
        ("b200", 183359, 16384, 512),
    ],
)
def test_sglang_sets_aside_what_its_formula_says(
    hardware: str, mib: int, chunk: int, seats: int, tmp_path: Path
) -> None:
    """arg_groups/memory_hook.py of 0.5.23, handle_gpu_memory_settings and reserve_for_graph_mb, for one GPU."""
    pool = plan_of(tmp_path, "sglang-0.5.23", hardware).pools[0]
    reserved = 512 + 1.5 * chunk + 1024 / 8 + 2 * seats + 8 * graphs_of_prompts(chunk)
    assert pool.batching.max_num_batched_tokens == chunk
    assert pool.kv_cache.memory_utilization == pytest.approx((mib - reserved) / mib, abs=0.005)


def test_a_search_states_the_release_that_was_chosen(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(STUDY_OF_A_FAMILY)
    question = load_question(str(study))
    assert question.study.engine == "vllm-0.33"
    assert question.engine is not None
    assert question.engine.asked == "vllm"


STUDY_OF_A_FAMILY = """
schema: simtune/study@1
name: s
model: llama-3.1-8b
hardware: {profile: h100-sxm, devices: 1}
engine: vllm
workload: chat
slo: {ttft_s: {p99: 1.0}}
"""
