"""Token budgets of engines that do not cut prompts are held against the longest prompt of the load."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.api import load_question
from simtune.errors import UsageError
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.search.best_first import optimize
from simtune.tuner.space.expressible import space_for
from tests.cli.conftest import STUDY

ENGINES = Path(__file__).resolve().parents[2] / "simtune" / "presets"


def test_pools_with_prompts_need_a_budget_for_the_longest_and_decode_pools_do_not(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    text = STUDY.replace("workload: chat", "workload: chat\nengine: trtllm-1.2")
    study.write_text(text.replace("max_num_batched_tokens: [2048]", "max_num_batched_tokens: [1024, 8192]"))
    question = load_question(str(study), ['search.layouts=["mixed", "prefill-decode"]', "search.tp=[1]"])
    candidates = space_for(question).candidates
    plan_cache = PlanCache(question, candidates)
    longest = max(int(plan_cache.stream(candidate).prompt_tokens.max()) for candidate in candidates)
    assert 1024 < longest <= 8192
    for candidate in candidates:
        settled = plan_cache.settled(candidate)
        small = any(pool.shape.role != "decode" and pool.max_num_batched_tokens == 1024 for pool in candidate.pools)
        assert isinstance(settled, Refused) == small, candidate.name
        if isinstance(settled, Refused):
            assert "must be at least the longest prompt of the load" in settled.reason


def test_a_preset_that_sets_the_parallelism_is_refused_and_not_dropped(tmp_path: Path) -> None:
    preset = tmp_path / "own.yaml"
    preset.write_text((ENGINES / "vllm-0.24.yaml").read_text())
    text = preset.read_text()
    assert "\npool:" in text
    text = text.replace("\npool:", "\npool:\n  parallelism: {cp: 2}", 1)
    preset.write_text(text.replace("\nsources:", "\nsources:\n  parallelism.cp: a choice of ours", 1))
    study = tmp_path / "study.yaml"
    study.write_text(STUDY.replace("workload: chat", "workload: chat\nengine: ./own.yaml"))
    with pytest.raises(UsageError, match=r"own.yaml sets parallelism \(cp\), which a search sets for every plan"):
        optimize(load_question(str(study)), jobs=1)
