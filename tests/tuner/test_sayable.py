"""Plans that an engine would refuse are in no space, and every plan that is in one can be written for its engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simtune.emit import engine_for
from simtune.errors import Infeasible
from simtune.specs.catalog import load_engine, load_hardware, load_model
from simtune.specs.pool import Batching, KvCache, Parallelism, Pool
from simtune.specs.study import Confirmation, HardwareCount, Search, Study, StudyBatching
from simtune.specs.workload import FixedLength, Poisson, Slo, Workload
from simtune.tuner.certificate.search_certificate import Audit, certificate_of
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.space.candidates import space_of
from simtune.tuner.space.census import census
from simtune.tuner.space.expressible import space_for
from tests.cli.conftest import STUDY, call

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
LOAD = Workload(
    name="load",
    requests=60,
    arrivals=Poisson(rate_rps=4.0),
    prompt=FixedLength(tokens=400),
    output=FixedLength(tokens=40),
)


def question(policy: str = "vllm-fcfs", fixed: tuple[Pool, ...] = (), devices: int = 4, **given: Any) -> Question:
    search = {"tp": (1, 2), "pp": (1,), "max_num_seqs": (64, 1024), "max_num_batched_tokens": (512, 2048)}
    study = Study(
        name="study",
        model=MODEL.name,
        hardware=(HardwareCount(profile="h100-sxm", devices=devices),),
        workload=LOAD.name,
        slo=Slo(ttft_s={"p99": 1.0}),
        batching=StudyBatching(policy=policy),
        fixed=fixed,
        search=Search(**{**search, "confirm": Confirmation(draws=0), **given}),
    )
    return Question(study, MODEL, (HARDWARE,), LOAD, None)


@pytest.mark.parametrize("policy", ["vllm-fcfs", "sglang", "tensorrt-llm"])
def test_every_plan_of_a_space_can_be_written(policy: str) -> None:
    asked = question(policy, tp=(1, 2, 3), attention_dp=(1, 2), layouts=("mixed", "prefill-decode"))
    emitter, space = engine_for(policy), space_for(asked)
    assert emitter is not None
    assert all(emitter.files(asked.plan(candidate, 1024), MODEL) for candidate in space.candidates)
    kept = {candidate.key for candidate in space.candidates}
    lost = [candidate for candidate in space_of(asked.study).candidates if candidate.key not in kept]
    assert sum(space.refused.values()) + sum(space.unfit.values()) == len(lost)
    refused = 0
    for candidate in lost:
        pools = asked.plan(candidate, 1024).pools
        of_engine = any(why for pool in pools for why in emitter.refusals(pool, MODEL, {}))
        assert of_engine or any(space.plan_cache.unfit(pool, candidate) for pool in candidate.pools)
        refused += of_engine
    assert sum(space.refused.values()) == refused


def test_pipelines_are_searched_in_a_release_that_schedules_them_step_by_step() -> None:
    asked = question(tp=(1,), pp=(1, 2))
    asked = replace(
        asked, study=asked.study.model_copy(update={"engine": "vllm-0.14"}), engine=load_engine("vllm-0.14")
    )
    space = space_for(asked)
    shapes = [candidate.pools[0].shape for candidate in space.candidates]
    ahead = {shape.pp: asked.settings_of(shape)["async_scheduling"] for shape in shapes}
    assert ahead == {1: True, 2: False}
    assert not any("async" in why for why in space.refused)


def test_an_answer_says_what_was_left_out_before_the_search() -> None:
    asked = question(tp=(1, 3))
    tuned = optimize(asked, jobs=1)
    assert tuned.left_out == space_for(asked).reasons
    assert "vLLM: parallelism.tp: 3 does not divide the 32 attention heads of llama-3.1-8b" in tuned.left_out
    assert len(tuned.rows) + sum(tuned.left_out.values()) == len(space_of(asked.study).candidates)


def test_the_dry_run_counts_what_is_refused_and_why() -> None:
    counted = census(question("tensorrt-llm", attention_dp=(1, 2), max_num_seqs=(64,)))
    why = "TensorRT-LLM: parallelism.attention_dp: with it TensorRT-LLM gives every rank attention of its own"
    assert counted.left_out[why] == 2
    assert counted.plans + sum(counted.left_out.values()) == 8


def test_a_certificate_knows_the_plans_that_an_engine_takes_and_no_others() -> None:
    asked = question()
    tuned = optimize(asked, jobs=1)
    certificate = certificate_of(tuned)
    names = {fate.plan for fate in certificate.plans}
    assert names == {candidate.name for candidate in space_for(asked).candidates}
    assert Audit(certificate, asked).run()
    (refused, *_) = [one.name for one in space_of(asked.study).candidates if one.name not in names]
    more = certificate.plans[0].model_copy(update={"plan": refused})
    forged = certificate.model_copy(update={"plans": (*certificate.plans, more)})
    forged = forged.model_copy(update={"digest": forged.expected_digest})
    audit = Audit(forged, asked)
    assert not audit.run()
    assert f"{refused} is in the certificate and not in the space" in audit.problems


def test_a_policy_without_an_engine_is_refused_nothing() -> None:
    asked = question("sarathi")
    assert space_for(asked).refused == {}
    assert len(space_for(asked).candidates) == len(space_of(asked.study).candidates)


def test_a_fixed_pool_that_the_engine_refuses_leaves_nothing() -> None:
    pool = Pool(
        name="decode",
        role="decode",
        hardware="h100-sxm",
        instances=1,
        parallelism=Parallelism(tp=1),
        batching=Batching(max_num_seqs=64, max_num_batched_tokens=512),
        kv_cache=KvCache(preemption="swap"),
    )
    asked = question(fixed=(pool,), layouts=("prefill-decode",))
    with pytest.raises(Infeasible, match=r"refuses all .* for vLLM: kv_cache.preemption"):
        space_for(asked)


def test_on_the_command_line(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(STUDY.replace("[64, 128]", "[64, 4096]"))
    said = call("optimize", study, "--dry-run")
    assert said.code == 0
    assert "2 left out: vLLM: batching: vLLM requires max_num_batched_tokens to be at least max_num_seqs" in said.out
    none = call("optimize", study, "--dry-run", "--set", "search.max_num_seqs=[4096]")
    assert none.code == 3
    assert "the engine refuses all 2 plans" in none.err
