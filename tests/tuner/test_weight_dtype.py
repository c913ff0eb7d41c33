"""Weights in another dtype than their checkpoint: searched, priced, and written only where card and engine have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simtune.costs.drafting import drafting_pool
from simtune.emit import engine_files
from simtune.errors import Infeasible, SpecError
from simtune.runs.schema import CandidateRow
from simtune.runs.tables import read_csv
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.catalog import load_hardware, load_model, load_plan
from simtune.specs.drafters import DraftModel
from simtune.specs.plan import KvLink, Plan
from simtune.specs.pool import Batching, Pool
from simtune.specs.study import Confirmation, HardwareCount, PoolChoices, Search, Study, StudyBatching
from simtune.specs.workload import FixedLength, Poisson, Slo, Workload
from simtune.tuner.certificate.search_certificate import Audit, certificate_of
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.space.candidates import space_of
from simtune.tuner.space.census import census
from tests.cli.conftest import STUDY, call

MODEL = load_model("llama-3.1-8b")
LOAD = Workload(
    name="load",
    requests=60,
    arrivals=Poisson(rate_rps=4.0),
    prompt=FixedLength(tokens=400),
    output=FixedLength(tokens=40),
)


def question(gpu: str = "h100-sxm", model: str = MODEL.name, policy: str = "vllm-fcfs", **given: Any) -> Question:
    search = {"tp": (1,), "pp": (1,), "max_num_seqs": (64,), "max_num_batched_tokens": (2048,)}
    study = Study(
        name="study",
        model=model,
        hardware=(HardwareCount(profile=gpu, devices=2),),
        workload=LOAD.name,
        slo=Slo(ttft_s={"p99": 1.0}, tpot_s={"mean": 0.02}),
        batching=StudyBatching(policy=policy),
        search=Search(**{"weight_dtype": ("bf16", "fp8"), "confirm": Confirmation(draws=0), **search, **given}),
    )
    return Question(study, load_model(model), (load_hardware(gpu),), LOAD, None)


def deployed(weight_dtype: Any, model: Any = MODEL, gpu: str = "h100-sxm") -> Deployment:
    pool = Pool(
        hardware=gpu,
        instances=1,
        weight_dtype=weight_dtype,
        batching=Batching(max_num_seqs=64, max_num_batched_tokens=2048),
        max_model_len=1024,
    )
    return deploy(Plan(name="p", model=model.name, pools=(pool,)), model, load_hardware(gpu))


# --- what it is -------------------------------------------------------------------------------------------


def test_costs_and_memory_are_those_of_a_model_with_such_weights() -> None:
    own, told = deployed(None, MODEL.with_weights("fp8")), deployed("fp8")
    stream = question().stream(space_of(question().study).candidates[0])
    assert told.memory == own.memory
    assert told.memory.weights_bytes < 0.6 * deployed(None).memory.weights_bytes
    assert told.simulate(stream).summary() == own.simulate(stream).summary()
    assert told.simulate(stream).summary() != deployed(None).simulate(stream).summary()
    assert deployed("bf16").memory == deployed(None).memory


def test_the_head_stays_and_experts_and_attention_follow() -> None:
    mixed = load_model("gpt-oss-20b")
    assert mixed.layer_dtypes == {"bf16", "mxfp4"}
    assert mixed.with_weights("fp8").layer_dtypes == {"fp8"}
    assert MODEL.with_weights("fp8").dtype_of("head") == "bf16"
    assert MODEL.with_weights("bf16") is MODEL.with_weights(None) is MODEL


def test_a_draft_model_keeps_its_own() -> None:
    drafter = DraftModel(model="llama-3.2-1b")
    pool = deployed("fp8").plan.pools[0]
    assert drafting_pool(drafter, pool).weight_dtype is None


def test_engines_with_cases_by_weights_go_by_those_of_the_pool(tmp_path: Path) -> None:
    text = (
        "schema: simtune/plan@1\nname: p\nmodel: llama-3.1-8b\npools:\n- {engine: trtllm-1.2, hardware: h100-sxm, "
        "instances: 1, batching: {max_num_seqs: 8, max_num_batched_tokens: 512}, weight_dtype: WORD}\n"
    )
    settings = []
    for word in ("bf16", "fp8"):
        (tmp_path / "plan.yaml").write_text(text.replace("WORD", word))
        settings.append(load_plan(str(tmp_path / "plan.yaml")).pools[0].model_copy(update={"weight_dtype": None}))
    assert settings[0] != settings[1]
    (tmp_path / "plan.yaml").write_text(text.replace("WORD", "fp9"))
    with pytest.raises(SpecError, match="weight_dtype"):
        load_plan(str(tmp_path / "plan.yaml"))


# --- what is searched -------------------------------------------------------------------------------------


def test_each_dtype_is_a_plan_of_its_own() -> None:
    asked = question(tp=(1, 2), kv_dtype=("fp8",))
    found = space_of(asked.study).candidates
    assert [candidate.name for candidate in found] == [
        "tp1-pp1-w-bf16-kv-fp8-x2-s64-t2048",
        "tp1-pp1-w-fp8-kv-fp8-x2-s64-t2048",
        "tp2-pp1-w-bf16-kv-fp8-x1-s64-t2048",
        "tp2-pp1-w-fp8-kv-fp8-x1-s64-t2048",
    ]
    assert [asked.plan(candidate, 512).pools[0].weight_dtype for candidate in found] == ["bf16", "fp8"] * 2
    left = asked.study.model_copy(update={"constraints": ("weight_dtype == 'fp8' or tp == 2",)})
    assert len(space_of(left).candidates) == 3
    apart = question(layouts=("prefill-decode",), decode=PoolChoices(weight_dtype=("bf16",)))
    pools = [[pool.shape.weight_dtype for pool in candidate.pools] for candidate in space_of(apart.study).candidates]
    assert pools == [["bf16", "bf16"], ["fp8", "bf16"]]


def test_without_it_nothing_says_a_word_of_it() -> None:
    asked = question(weight_dtype=None)
    (candidate,) = space_of(asked.study).candidates
    assert candidate.name == "tp1-pp1-x2-s64-t2048"
    assert "weight_dtype" not in asked.study.to_yaml() + asked.plan(candidate, 512).to_yaml()


def test_a_fixed_pool_keeps_its_own() -> None:
    fixed = deployed("fp8").plan.pools[0].model_copy(update={"role": "decode", "name": "theirs"})
    asked = question(layouts=("prefill-decode",)).study.model_copy(update={"fixed": (fixed,)})
    names = {candidate.decoding.shape.weight_dtype for candidate in space_of(asked).candidates}
    assert names == {"fp8"}


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (question("a100-sxm-80g"), "no operator gemm.fp8, which this model needs"),
        (question(policy="tensorrt-llm"), "TensorRT-LLM: weight_dtype"),
        (question(weight_dtype=("bf16", "int4")), "vLLM: weight_dtype: vLLM has no setting that quantises"),
    ],
)
def test_what_card_or_engine_lack_is_left_out_and_counted(asked: Question, why: str) -> None:
    counted = census(asked)
    ((reason, count),) = counted.left_out.items()
    assert why in reason
    assert (count, counted.plans) == (1, 1)


def test_a_checkpoint_that_is_quantised_stays_as_it_is() -> None:
    with pytest.raises(Infeasible, match=r"is quantised already \(bf16, mxfp4\); leave weight_dtype out"):
        deployed("fp8", load_model("gpt-oss-20b"))


def test_what_only_reads_fewer_bytes_needs_no_kernels_of_its_own() -> None:
    assert deployed("int8_wo", gpu="a100-sxm-80g").memory.weights_bytes < deployed(None).memory.weights_bytes


# --- what comes of it -------------------------------------------------------------------------------------


def test_the_search_chooses_it_and_certifies_that() -> None:
    asked = question()
    tuned = optimize(asked, jobs=1)
    assert tuned.chosen.candidate.decoding.shape.weight_dtype == "fp8"
    certificate = certificate_of(tuned)
    assert {fate.plan for fate in certificate.plans} == {f"tp1-pp1-w-{d}-x2-s64-t2048" for d in ("bf16", "fp8")}
    audit = Audit(certificate, asked)
    assert audit.run(), audit.problems
    other = question(weight_dtype=("bf16",))
    assert not Audit(certificate, other).run()
    alone = optimize(other, jobs=1)
    assert alone.value < tuned.value


def test_a_run_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(STUDY.replace("max_num_seqs: [64, 128]", "max_num_seqs: [64]\n  weight_dtype: [bf16, fp8, int4]"))
    counted = call("optimize", study, "--dry-run")
    assert counted.code == 0
    assert "2 left out: vLLM: weight_dtype: vLLM has no setting that quantises weights to int4" in counted.out
    monkeypatch.setattr("sys.argv", ["simtune", "optimize", str(study), "--out", str(tmp_path / "run")])
    assert call("optimize", study, "--out", tmp_path / "run").code == 0
    rows = read_csv(tmp_path / "run" / "candidates.csv", CandidateRow)
    assert {row.weight_dtype for row in rows} == {"bf16", "fp8"}
    assert call("certify", tmp_path / "run").code == 0
    study.write_text(STUDY)
    assert call("optimize", study, "--out", tmp_path / "without").code == 0
    table = tmp_path / "without" / "candidates.csv"
    assert "weight_dtype" not in table.read_text()
    assert {row.weight_dtype for row in read_csv(table, CandidateRow)} == {None}


@pytest.mark.parametrize(("policy", "file"), [("vllm-fcfs", "vllm"), ("sglang", "sglang")])
def test_engines_are_told(policy: str, file: str) -> None:
    asked = question(policy=policy)
    plans = [asked.plan(candidate, 512) for candidate in space_of(asked.study).candidates]
    own, told = (engine_files(plan, MODEL, 8, {})[f"engine/{file}-mixed.yaml"] for plan in plans)
    assert "quantization: fp8" in told
    assert "quantization" not in own
    quantised = MODEL.with_weights("fp8")
    assert "quantization" not in engine_files(plans[1], quantised, 8, {})[f"engine/{file}-mixed.yaml"]


def test_pools_may_differ() -> None:
    prefill = deployed("fp8").plan.pools[0].model_copy(update={"role": "prefill", "name": "prefill"})
    decode = prefill.model_copy(update={"role": "decode", "name": "decode", "weight_dtype": None})
    plan = Plan(name="pd", model=MODEL.name, pools=(prefill, decode), link=KvLink())
    first, second = deploy(plan, MODEL, load_hardware("h100-sxm")).pools
    assert first.memory == deployed("fp8").memory
    assert second.memory == deployed(None).memory
