"""Each release of an engine is told in its own words, and of what came later is said that it has none.

Which release has what is read by the releases' own parsers: test_vllm_parser.py, test_other_parsers.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import simtune
from simtune.emit import ENGINES
from simtune.emit.releases import release_of
from simtune.errors import UsageError
from simtune.specs.catalog import load_engine, load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.preset import merged
from tests.cli.conftest import STUDY, call

MODEL, DRAFT = load_model("llama-3.1-8b"), load_model("llama-3.2-1b").model_copy(update={"hf": "org/small"})
CHAIN = {"kind": "chain", "tokens": 3}
BY_BATCH = {"kind": "by_batch", "max_tokens": 4, "ranges": [{"first": 1, "last": 8, "tokens": 4}]}
SMALL = {"kind": "draft_model", "model": "small"}


def plan_of(engine: str, **pool: Any) -> Plan:
    preset = load_engine(engine).settings(load_hardware("h100-sxm").device, MODEL)
    own = merged(pool, {"hardware": "h100-sxm", "engine": engine, "instances": 1, "max_model_len": 8192})
    return Plan.model_validate({"name": "p", "model": MODEL.name, "pools": [merged(own, preset)]})


def text_of(plan: Plan) -> str:
    return ENGINES["vllm"].files(plan, MODEL, draft_models={"small": DRAFT})["engine/vllm-mixed.yaml"]


def test_a_release_is_named_and_told_in_its_own_words() -> None:
    pool = {"kv_cache": {"watermark": 0.01}, "batching": {"scheduler_reserve_full_isl": False}}
    old, middle, new = (text_of(plan_of(engine, **pool)) for engine in ("vllm-0.14", "vllm-0.19", "vllm-0.24"))
    settings = [yaml.safe_load(text) for text in (old, middle, new)]
    assert [f"option names of vLLM 0.{n}." in text for n, text in ((14, old), (19, middle), (24, new))] == [True] * 3
    assert ["watermark" in one for one in settings] == [False, False, True]
    assert ["no-scheduler-reserve-full-isl" in one for one in settings] == [False, True, True]
    assert "Not said here: kv_cache.watermark" in old
    assert "Not said here: batching.scheduler_reserve_full_isl" in old
    assert "Not said here" not in new


def test_a_release_of_a_file_counts_too(tmp_path: Path) -> None:
    text = (Path(simtune.__file__).parent / "presets" / "vllm-0.12.yaml").read_text()
    (tmp_path / "own.yaml").write_text(
        text.replace("vllm-0.12", "own").replace("release: vLLM 0.12", "release: vLLM 0.13.1")
    )
    assert release_of(str(tmp_path / "own.yaml"), "vllm", (0, 32)) == (0, 13, 1)
    assert release_of("sglang-0.5", "vllm", (0, 32)) == (0, 32)
    assert release_of(None, "vllm", (0, 32)) == (0, 32)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a drafter to come": (
        "vllm-0.14",
        {"async_scheduling": False, "speculation": {"drafter": SMALL, "scheme": CHAIN, "acceptance": "mine"}},
        "vLLM 0.14 has no draft_model; it came with vLLM 0.15",
    ),
    "lengths by batch": (
        "vllm-0.19",
        {"speculation": {"drafter": SMALL, "scheme": BY_BATCH, "acceptance": "mine"}},
        "has no num_speculative_tokens_per_batch_size; it came with vLLM 0.24",
    ),
    "drafts beside asynchronous scheduling": (
        "vllm-0.11",
        {
            "async_scheduling": True,
            "speculation": {
                "drafter": {"kind": "eagle", "checkpoint": "org/head"},
                "scheme": CHAIN,
                "acceptance": "mine",
            },
        },
        "async_scheduling: vLLM 0.11 has none with eagle3 drafts, vLLM 0.12 has; set it to false",
    ),
    "stages beside asynchronous scheduling": (
        "vllm-0.14",
        {"parallelism": {"pp": 2}},
        "async_scheduling: vLLM 0.14 has none over pipeline stages; set it to false",
    ),
    "whole prompts": (
        "vllm-0.10",
        {"batching": {"chunked_prefill": False}},
        "batching.chunked_prefill: vLLM 0.10 always cuts prompts; set it to true",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_release_has_not_yet_is_refused(what: str) -> None:
    engine, pool, why = REFUSED[what]
    with pytest.raises(UsageError) as refused:
        text_of(plan_of(engine, **pool))
    assert why in str(refused.value)


def test_what_it_has_is_told() -> None:
    drafts = {"drafter": SMALL, "scheme": BY_BATCH, "acceptance": "mine"}
    assert "num_speculative_tokens_per_batch_size" in text_of(plan_of("vllm-0.24", speculation=drafts))
    assert "pipeline-parallel-size: 2" in text_of(plan_of("vllm-0.24", parallelism={"pp": 2}))


def test_a_checkpoint_with_an_fp8_cache_is_not_told_otherwise_before_there_is_a_word() -> None:
    asks_fp8 = MODEL.model_copy(update={"kv_dtype": "fp8"})
    for engine, said in (("vllm-0.11", "bfloat16"), ("vllm-0.10", None)):
        plan = plan_of(engine, kv_cache={"dtype": "bf16"})
        if said is None:
            with pytest.raises(UsageError, match=r"kv_cache.dtype: vLLM 0.10 has no word for bf16; leave it out"):
                ENGINES["vllm"].files(plan, asks_fp8)
        else:
            settings = yaml.safe_load(ENGINES["vllm"].files(plan, asks_fp8)["engine/vllm-mixed.yaml"])
            assert settings["kv-cache-dtype"] == said


def test_a_study_leaves_out_what_its_release_refuses(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    quantised = tmp_path / "quantised.yaml"  # a checkpoint that asks for an 8-bit cache
    quantised.write_text(MODEL.model_copy(update={"kv_dtype": "fp8"}).to_yaml())
    asked = STUDY.replace("pp: [1]", "pp: [1]\n  kv_dtype: [bf16, fp8]").replace("llama-3.1-8b", str(quantised))
    study.write_text(asked + "engine: vllm-0.10\n")
    said = call("optimize", study, "--dry-run", "--set", "hardware.devices=4")
    assert said.code == 0
    assert "left out: vLLM: kv_cache.dtype: vLLM 0.10 has no word for bf16" in said.out


def test_older_sglang_leaves_graphs_out_by_one_flag(tmp_path: Path) -> None:
    sglang = ENGINES["sglang"]
    plan = plan_of("sglang-0.5", cuda_graphs=False)
    settings = yaml.safe_load(sglang.files(plan, MODEL)["engine/sglang-mixed.yaml"])
    assert {"disable-decode-cuda-graph", "disable-prefill-cuda-graph"} < set(settings)
    older = type(sglang)((0, 5, 9))  # type: ignore[call-arg]
    assert older.serving(plan.pools[0], MODEL)["disable-cuda-graph"] is True  # type: ignore[attr-defined]
