"""Checkpoints of a model as variants: each has its weights, costs and bounds; those below a floor are left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from simtune.api import load_question
from simtune.errors import UsageError
from simtune.specs.catalog import load_model
from simtune.tuner.certificate.search_certificate import Audit, certificate_of
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.variant_gains import variant_gains
from simtune.tuner.space.candidates import Candidate, space_of

STUDY = """schema: simtune/study@1
name: checkpoints
model: llama-3.1-8b
score: 68.4
hardware: {{profile: h100-sxm, devices: 2}}
workload: chat
slo: {{ttft_s: {{p99: 1.0}}, tpot_s: {{p99: 0.030}}}}
constraints: [{floor}]
search:
  tp: [1, 2]
  pp: [1]
  max_num_seqs: [256]
  max_num_batched_tokens: [2048]
  requests: 200
  confirm: {{draws: 0}}
  variants: {variants}
"""


def asked(folder: Path, variants: str, floor: str = "score >= 67") -> Question:
    for dtype in ("fp8", "int4"):
        data = load_model("llama-3.1-8b").to_data()
        quantised = {**data, "name": f"llama-{dtype}", "weight_dtype": dtype, "hf": None}
        (folder / f"{dtype}.yaml").write_text(yaml.safe_dump(quantised))
    path = folder / "study.yaml"
    path.write_text(STUDY.format(floor=floor, variants=variants))
    return load_question(path)


BOTH = "[{}, {model: fp8.yaml, score: 68.0}, {model: int4.yaml, score: 66.1}]"


def test_each_checkpoint_has_the_memory_and_costs_of_a_study_of_its_own(tmp_path: Path) -> None:
    question = asked(tmp_path, BOTH, floor="")
    for name in ("fp8.yaml", "int4.yaml"):
        path, plain = str(tmp_path / name), ["search.variants=[{}]", "score=null"]
        single = load_question(tmp_path / "study.yaml", plain, model=path)
        cache, own_cache = (PlanCache(q, space_of(q.study).candidates) for q in (question, single))
        plans = [c for c in space_of(question.study).candidates if c.decoding.shape.checkpoint == path]
        assert len(plans) == len(space_of(single.study).candidates) == 2
        for plan, alone in zip(plans, space_of(single.study).candidates, strict=True):
            settled, own_settled = cache.settled(plan), own_cache.settled(alone)
            assert isinstance(settled, Candidate)
            assert isinstance(own_settled, Candidate)
            assert cache.memory(settled.decoding) == own_cache.memory(own_settled.decoding)
            assert cache.capacity(settled) == own_cache.capacity(own_settled)
            deployed, own_deployed = cache.deployment(settled), own_cache.deployment(own_settled)
            assert deployed.model == own_deployed.model
            assert deployed.plan.model == path
            stream, slo = question.stream(settled, 8.0), question.study.slo
            assert deployed.simulate(stream, slo).summary() == own_deployed.simulate(stream, slo).summary()


def test_checkpoints_below_the_floor_are_left_out_and_counted(tmp_path: Path) -> None:
    space = space_of(asked(tmp_path, BOTH).study)
    assert {candidate.decoding.shape.variant for candidate in space.candidates} == {"", "fp8"}
    assert space.left_out == {"score >= 67": 2}
    assert len(space_of(asked(tmp_path, BOTH, floor="").study).candidates) == 6
    only = space_of(asked(tmp_path, BOTH, floor="model == ''").study)
    assert {candidate.decoding.shape.variant for candidate in only.candidates} == {""}


def test_a_search_chooses_the_checkpoint_that_serves_the_most_and_certifies_it(tmp_path: Path) -> None:
    question = asked(tmp_path, BOTH)
    tuned = optimize(question, jobs=1)
    assert tuned.chosen.candidate.decoding.shape.variant == "fp8"
    assert tuned.deployment.model.name == "llama-fp8"
    gains = {gain.variant: gain for gain in variant_gains(tuned)}
    assert {variant: gain.score for variant, gain in gains.items()} == {"": 68.4, "fp8": 68.0, "int4": 66.1}
    assert gains["fp8"].reached == tuned.value
    assert (gains["int4"].reached, gains["int4"].at_most) == (None, None)
    certificate = certificate_of(tuned)
    audit = Audit(certificate, question, tuned.deployment.plan)
    assert audit.run(), audit.problems
    # A checkpoint that has changed since is another input.
    changed = replace(question, checkpoints=dict.fromkeys(question.checkpoints, load_model("llama-3.2-1b")))
    assert not Audit(certificate, changed).run()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"search\.variants\.1\.model: qwen3-8b has a vocabulary of 151,936 tokens"):
        asked(tmp_path, "[{}, {model: qwen3-8b, score: 70}]")
