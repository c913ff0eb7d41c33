"""Certificates: what is claimed holds, and whatever is changed is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from simtune.runs.contents import of_study
from simtune.specs.catalog import load_hardware
from simtune.specs.plan import Plan
from simtune.specs.study import StudyLimits
from simtune.tuner.certificate.search_certificate import (
    Audit,
    Certificate,
    Resimulations,
    Tried,
    certificate_of,
    inputs_of,
)
from simtune.tuner.doubt.draw_spread import DrawSpread
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.candidate_filter import BoundedCandidate
from simtune.tuner.trial import Tuned
from tests.cli.conftest import STUDY, call
from tests.tuner.simulated_once import simulated_once
from tests.tuner.test_exhaustive import random_question
from tests.tuner.test_search import question

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return optimize(question(max_num_seqs=(8, 64, 1024), pp=(1, 2), requests=150), jobs=1)


@pytest.fixture(scope="module")
def certificate(tuned: Tuned) -> Certificate:
    return certificate_of(tuned)


def audited(certificate: Certificate, asked: Question) -> Audit:
    audit = Audit(certificate, asked)
    assert audit.run() == (not audit.problems)
    return audit


def test_it_holds_and_says_how_near_the_best_plan_is(tuned: Tuned, certificate: Certificate) -> None:
    audit = audited(certificate, tuned.question)
    assert audit.problems == []
    assert not any("max_num_batched_tokens" in fate.by for fate in certificate.plans), "what vLLM refuses is no plan"
    assert audit.bounds == len(certificate.plans)
    assert {fate.plan for fate in certificate.plans} == {row.candidate.name for row in tuned.rows}
    assert certificate.incumbent.plan == tuned.chosen.candidate.name
    assert certificate.incumbent.value == tuned.value
    # What is left open is the tolerance of the search, and by how much draws of so few requests differ.
    tolerance, spread = tuned.question.study.search.rate_tolerance, tuned.question.draw_spread
    assert spread == DrawSpread.of([tuned.question.study.slo])
    assert 0 <= certificate.gap <= (1 + tolerance * 1.01) * spread.allowance(150) - 1
    assert certificate.bound >= tuned.value * (1 + certificate.gap) * (1 - 1e-9)
    assert 0 < audit.simulations < sum(row.simulations for row in tuned.rows)


def test_inputs_of_one_name_have_keys_of_their_own() -> None:
    asked = question()
    (profile,) = asked.hardware
    device = profile.device.model_copy(update={"memory_bytes": profile.device.memory_bytes / 2})
    other = profile.model_copy(update={"device": device})
    inputs = inputs_of(replace(asked, hardware=(profile, other)))
    name = f"hardware:{profile.name}"
    assert inputs[name] == inputs_of(asked)[name]
    assert inputs[f"{name} (2)"] == inputs_of(replace(asked, hardware=(other,)))[name] != inputs[name]
    assert inputs_of(replace(asked, hardware=(profile, profile))) == inputs_of(asked)


def test_kernels_of_fixed_pools_are_inputs() -> None:
    asked = question()
    sglang = load_hardware("h100-sxm-sglang")
    inputs = inputs_of(replace(asked, fixed_hardware={"fixed": sglang}))
    assert set(inputs) - set(inputs_of(asked)) == {f"hardware:{sglang.name}", f"arrays:{sglang.name}"}


def test_the_plan_that_was_handed_out_is_the_chosen_one(tuned: Tuned, certificate: Certificate) -> None:
    plan = Plan.from_text(tuned.deployment.plan.to_yaml())
    assert Audit(certificate, tuned.question, plan).run()
    (pool,) = plan.pools
    fewer = pool.model_copy(update={"batching": pool.batching.model_copy(update={"max_num_seqs": 7})})
    audit = Audit(certificate, tuned.question, plan.model_copy(update={"pools": (fewer,)}))
    assert not audit.run()
    assert audit.problems == [f"the plan that was handed out is not {certificate.incumbent.plan}, which was chosen"]


@pytest.mark.parametrize("objective", ["gpus", "e2el"])
def test_of_objectives_at_a_given_load(objective: str) -> None:
    answer = optimize(question(objective=objective, tp=(1, 2), pp=(1,), max_num_seqs=(64,), requests=150), jobs=1)
    claimed = certificate_of(answer)
    assert (claimed.gap, claimed.bound) == (0.0, claimed.incumbent.value)
    assert audited(claimed, answer.question).problems == []


def test_limits_of_a_study_are_held_against_it() -> None:
    asked = question(objective="goodput", tp=(1, 2), pp=(1,), max_num_seqs=(64,), requests=150)
    asked = replace(asked, hardware=(load_hardware("h100-sxm-trtllm"),))
    limited = replace(asked, study=asked.study.model_copy(update={"limits": StudyLimits(usd_per_million_tokens=0.32)}))
    answer = optimize(limited, jobs=1)
    beyond = [row.candidate.name for row in answer.rows if row.simulations and row.reason.startswith("usd_per_million")]
    assert beyond
    claimed = certificate_of(answer)
    assert [fate.plan for fate in claimed.plans if fate.simulated and fate.best is None] == beyond
    assert audited(claimed, limited).problems == []
    dear = claimed.model_copy(update={"incumbent": claimed.incumbent.model_copy(update={"rate_rps": 30.0})})
    problems = audited(dear.model_copy(update={"digest": dear.expected_digest}), limited).problems
    assert any("usd_per_million_tokens" in problem for problem in problems)


def test_what_all_cores_missed_counts() -> None:
    """At the bound of its capacity a plan of 14 instances meets the SLO on some cores, and misses it on all."""
    asked = random_question(1029, 16)
    answer = optimize(asked, jobs=1)
    assert any(tried.all_cores and not tried.met for tried in answer.chosen.tried)
    assert audited(certificate_of(answer), asked).problems == []


def changes_of(data: dict[str, Any]) -> dict[str, Change]:
    plans, chosen = data["plans"], data["incumbent"]["plan"]

    def first(holds: Callable[[dict[str, Any]], object]) -> int:
        return next(i for i, fate in enumerate(plans) if fate["plan"] != chosen and holds(fate))

    ruled_out = first(lambda fate: any(not tried["met"] for tried in fate["simulated"]))
    missed = next(i for i, tried in enumerate(plans[ruled_out]["simulated"]) if not tried["met"])
    bounded = first(lambda fate: fate["best"] and not fate["simulated"] and not fate["same_as"])
    twin = first(lambda fate: fate["same_as"])
    other_cut = first(lambda f: f["best"] and f["plan"].startswith("tp2") and f["plan"].endswith("s64-t2048"))
    at_own_rate = [{"rate_rps": None, "met": False, "all_cores": False}]
    return {
        "value": lambda d: d["incumbent"].update(value=d["incumbent"]["value"] * 1.001),
        "rate": lambda d: d["incumbent"].update(rate_rps=d["incumbent"]["rate_rps"] * 1.2),
        "another load": lambda d: d["incumbent"].update(rate_rps=None),
        "gap": lambda d: d.update(gap=d["gap"] / 2),
        "best remaining bound": lambda d: d.update(bound=d["bound"] * 0.999),
        "bound of a plan": lambda d: d["plans"][bounded].update(best=d["plans"][bounded]["best"] * 0.9),
        "reach of a plan": lambda d: d["plans"][bounded].update(best=1.0),
        "a weaker bound of a plan": lambda d: d["plans"][bounded].update(best=d["plans"][bounded]["best"] * 1.0001),
        "a weaker reach of a plan that missed": lambda d: d["plans"][ruled_out].update(
            best=d["plans"][ruled_out]["best"] * 1.001
        ),
        "a weaker reach of one that does the same": lambda d: d["plans"][twin].update(
            best=d["plans"][twin]["best"] * 1.001
        ),
        "no chance": lambda d: d["plans"][bounded].update(best=None),
        "no chance at its own rate": lambda d: d["plans"][bounded].update(best=None, simulated=at_own_rate),
        "GPUs": lambda d: d["plans"][twin].update(num_gpus=7),
        "a plan less": lambda d: d["plans"].pop(0),
        "a plan twice": lambda d: d["plans"].append(d["plans"][0]),
        "a plan more": lambda d: d["plans"].append({**d["plans"][0], "plan": "tp8-pp1-x1-s8-t512"}),
        "missed at a lower rate": lambda d: d["plans"][ruled_out]["simulated"][missed].update(rate_rps=1.0),
        "what another one did": lambda d: d["plans"][bounded].update(same_as=d["plans"][ruled_out]["plan"], best=1.0),
        "what one of another cut did": lambda d: d["plans"][other_cut].update(
            same_as=d["plans"][twin]["same_as"], best=1
        ),
        "what nobody did": lambda d: d["plans"][twin].update(same_as=d["plans"][bounded]["plan"]),
        "another plan": lambda d: d["incumbent"].update(plan=d["plans"][other_cut]["plan"]),
        "a profile": lambda d: d["inputs"].update({"hardware:h100-sxm": "0" * 64}),
        "arrays": lambda d: d["inputs"].update({"arrays:h100-sxm": "0" * 64}),
        "the seed": lambda d: d.update(seed=7),
    }


def test_whatever_is_changed_is_refused(tuned: Tuned, certificate: Certificate) -> None:
    """With the digest of what it was, and by whoever knows to make a new one."""
    with simulated_once():
        assert audited(certificate, tuned.question).problems == []
        for name, change in changes_of(certificate.to_data()).items():
            data = json.loads(json.dumps(certificate.to_data()))
            change(data)
            changed = Certificate.model_validate_json(json.dumps(data))
            assert "the file was changed after it was written" in audited(changed, tuned.question).problems[0], name
            sealed = changed.model_copy(update={"digest": changed.expected_digest})
            assert audited(sealed, tuned.question).problems, name


@pytest.mark.parametrize(
    ("short", "counts"), [(None, 3.0), (50, 6.0)], ids=["of runs as long the lowest rate", "a short run proves less"]
)
def test_of_runs_that_leave_a_plan_as_much_the_one_that_proves_the_most_counts(
    tuned: Tuned, certificate: Certificate, monkeypatch: pytest.MonkeyPatch, short: int | None, counts: float
) -> None:
    """The search counts it, too (`BoundedCandidate.miss`)."""
    audit = Audit(certificate, tuned.question)
    twin = next(fate for fate in certificate.plans if fate.same_as and fate.best is not None)
    row = next(row for row in tuned.rows if row.candidate.name == twin.plan)
    plan = audit._candidate_filter.check(row.candidate)
    assert isinstance(plan, BoundedCandidate)
    lowest = 3.0 if short is None else 5.99
    rates = {9.0: None, lowest: short, 6.0: None}
    runs = [(plan, Tried(rate_rps=rate, met=False, all_cores=False, requests=n)) for rate, n in rates.items()]
    monkeypatch.setattr(Resimulations, "attempts", lambda *of: iter(runs))
    monkeypatch.setattr(Resimulations, "finding", lambda *of: None)
    monkeypatch.setattr(BoundedCandidate, "ruled_out_by", lambda *of: "misses the SLO")
    monkeypatch.setattr(Audit, "_after", lambda *of: twin.best)
    audit._check_twin(plan, twin)
    (rival,) = audit._on_draw._plans
    assert rival.missed is not None
    assert rival.missed.rate_rps == counts


def test_plans_that_miss_as_another_one_does_have_no_command(tuned: Tuned) -> None:
    launched = {row.candidate: row.launch for row in of_study(tuned, jobs=1).run.candidates}
    twins = [row.candidate.name for row in tuned.rows if row.same_as and row.status == "infeasible"]
    alone = [row.candidate.name for row in tuned.rows if row.summary is not None and not row.same_as]
    assert twins
    assert alone
    assert {launched[name] for name in twins} == {None}
    assert all(launched[name] for name in alone)


def test_another_profile_is_refused(tuned: Tuned, certificate: Certificate) -> None:
    other = load_hardware("h200-sxm").model_copy(update={"name": "h100-sxm"})
    asked = replace(tuned.question, hardware=(other,))
    assert audited(certificate, asked).problems == [
        "arrays:h100-sxm is not the one that the search was made with",
        "hardware:h100-sxm is not the one that the search was made with",
    ]


# --- from the command line --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("certified")
    (place / "study.yaml").write_text(STUDY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr("sys.argv", ["simtune", "optimize", "study.yaml", "--seed", "3", "--out", "run", "--jobs", "1"])
        assert call("optimize", "study.yaml", "--seed", 3, "--out", "run", "--jobs", 1).code == 0
    return place


def test_certify(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    said = call("certify", "run", "--json")
    assert (said.code, said.json["holds"], said.json["problems"]) == (0, True, [])
    words = call("certify", "run")
    assert "4 plans enumerated, 4 bounds" in words.out
    assert "better on the same requests" in words.out
    assert "on any, under this cost model" in words.out


def test_certify_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    path = folder / "run" / "certificate.json"
    whole = path.read_text()
    path.write_text(whole.replace('"gap": 0.', '"gap": 0.1', 1))
    said = call("certify", "run")
    assert (said.code, said.out.count("\n")) == (4, 1)
    assert said.err.endswith("the certificate does not hold\n")
    path.write_text(whole)
    study = yaml.safe_load(STUDY)
    study["search"]["tp"] = [1]
    (folder / "other.yaml").write_text(yaml.safe_dump(study))
    assert "study:tiny is not the one" in call("certify", "run", "--study", "other.yaml").err


def test_certify_says_what_it_misses(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "name it with --study" in call("certify", folder / "run").err
    said = call("certify", tmp_path)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "name a run directory that simtune optimize wrote" in said.err


def test_values_at_a_given_load_are_those_of_the_plan_that_is_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chosen plan is confirmed with step costs of its own, and not with the tables that the search shares."""
    study = tmp_path / "study.yaml"
    study.write_text(
        "schema: simtune/study@1\nname: wide\nmodel: llama-3.1-8b\nhardware: {profile: l40s, devices: 4}\n"
        "workload: chat\nslo: {ttft_s: {p95: 9.0}}\nobjective: e2el\n"
        "search: {tp: [1], pp: [1], requests: 300, confirm: {draws: 0}, max_num_seqs: [64, 256]}\n"
    )
    command = ["optimize", str(study), "--out", str(tmp_path / "run"), "--jobs", "1"]
    monkeypatch.setattr("sys.argv", ["simtune", *command])
    assert call(*command).code == 0
    checked = call("certify", tmp_path / "run")
    assert checked.code == 0, checked.err
