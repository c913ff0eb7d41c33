"""A fixed pool under another engine than the study's has that engine's settings and kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.api import deploy_plan, load_question
from simtune.errors import SpecError
from simtune.specs.catalog import load, load_study
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import Question
from simtune.tuner.space.candidates import space_of

STUDY = """\
schema: simtune/study@1
name: mixed-engines
model: llama-3.2-1b
hardware: {profile: h100-sxm, devices: 2}
engine: vllm-0.24
workload: chat
slo: {ttft_s: {p99: 2.0}}
objective: goodput
search: {layouts: [prefill-decode], max_num_seqs: [16], max_num_batched_tokens: [2048], requests: 20}
fixed:
- {name: d, role: decode, hardware: h100-sxm, engine: sglang-0.5, instances: 1, batching: {max_num_seqs: 16}}
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    file = tmp_path / "study.yaml"
    file.write_text(STUDY)
    return file


def test_the_plan_that_is_written_is_the_plan_that_was_judged(study: Path) -> None:
    """It was judged by vLLM's kernels and order, and written as a pool of SGLang."""
    question = load_question(str(study))
    space = space_of(question.study).candidates
    plan_cache = PlanCache(question, space)
    settled = plan_cache.settled(space[0])
    assert not isinstance(settled, Refused)
    judged = plan_cache.deployment(settled)
    assert [pool.hardware.name for pool in judged.pools] == ["h100-sxm", "h100-sxm-sglang"]
    assert [pool.spec.batching.policy for pool in judged.pools] == ["vllm-fcfs", "sglang"]
    written = study.with_name("plan.yaml")
    written.write_text(judged.plan.to_yaml())
    simulated = deploy_plan(str(written))
    for before, after in zip(judged.pools, simulated.pools, strict=True):
        assert before.hardware == after.hardware
        assert before.spec.batching == after.spec.batching
        assert before.costs.decode(8, 8000) == after.costs.decode(8, 8000)


def test_a_pool_under_the_engine_of_the_study_shares_its_kernels(study: Path) -> None:
    study.write_text(STUDY.replace("sglang-0.5", "vllm-0.24"))
    question = load_question(str(study))
    assert question.fixed_hardware == {}
    assert isinstance(question, Question)


def test_every_reader_fills_a_fixed_pool_in(study: Path) -> None:
    assert load(str(study)) == load_study(str(study))
    (pool,) = load_study(str(study)).fixed
    assert (pool.batching.policy, pool.batching.max_num_seqs, pool.kv_cache.block_size) == ("sglang", 16, 1)
    study.write_text(STUDY.replace("sglang-0.5", "sglang-9"))
    with pytest.raises(SpecError, match=r"fixed\.0\.engine: .*sglang-9"):
        load_study(str(study))
