"""A front against exhaustive trial at its loads, its file against whatever is changed in it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.study import Confirmation, HardwareCount, Search, Study
from simtune.specs.workload import Lognormal, Poisson, Slo, Workload
from simtune.tuner.certificate.front_certificate import FrontAudit, FrontCertificate, front_certificate_of
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import Question
from simtune.tuner.search.climb import Simulation
from simtune.tuner.search.front import answer
from simtune.tuner.space.candidates import space_of
from simtune.tuner.trial import Tuned
from tests.cli.conftest import STUDY, call, typed
from tests.tuner.simulated_once import simulated_once

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
LOAD = Workload(
    name="load",
    requests=150,
    arrivals=Poisson(rate_rps=4.0),
    prompt=Lognormal(mean_tokens=900, sigma=0.7, max_tokens=6000),
    output=Lognormal(mean_tokens=120, sigma=0.8, max_tokens=1500),
)


def question(slo: Slo | None = None, **given: Any) -> Question:
    search = {"tp": (1, 2), "pp": (1,), "max_num_seqs": (8, 64), "max_num_batched_tokens": (512, 2048), "front": 4}
    search |= {"confirm": Confirmation(draws=0)}
    study = Study(
        name="study",
        model=MODEL.name,
        hardware=(HardwareCount(profile="h100-sxm", devices=2),),
        workload=LOAD.name,
        slo=slo or Slo(),
        objective="pareto",
        search=Search(**{**search, **given}),
    )
    return Question(study, MODEL, (HARDWARE,), LOAD, None)


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return answer(question(layouts=("mixed", "prefill-decode")), jobs=1)


def test_no_plan_has_more_tokens_per_user_at_any_of_its_loads(tuned: Tuned) -> None:
    """Every plan of the space, simulated at every load: none that keeps up lies above the front."""
    q, ladder = tuned.question, tuned.ladder
    assert ladder is not None
    assert ladder.settled == len(ladder.loads) == 4
    space = space_of(q.study).candidates
    plan_cache = PlanCache(q, space)
    tried = 0
    for candidate in space:
        settled = plan_cache.settled(candidate)
        assert not isinstance(settled, Refused)
        deployment = plan_cache.deployment(settled)
        facts = q.facts(settled, plan_cache.stream(settled))
        for load in ladder.loads:
            rate = load * facts.num_gpus / facts.output_tokens
            if rate > plan_cache.capacity(settled).rps:
                continue
            stream = plan_cache.stream(settled)
            finding = Simulation(deployment, stream, q.study.slo, rate, cores=None, draws=q.draws).run()
            tried += 1
            per_user = finding.summary.output_tokens_per_s_per_user
            above = [point for point in ladder.points if point.output_tokens_per_s_per_gpu >= load]
            assert per_user is not None
            best = max((point.output_tokens_per_s_per_user for point in above), default=0.0)
            assert not finding.met or per_user <= best * (1 + 1e-9), candidate.name
    assert tried > len(ladder.points)


def test_its_points_are_simulations_that_fall_in_one_and_rise_in_the_other(tuned: Tuned) -> None:
    q, ladder = tuned.question, tuned.ladder
    assert ladder is not None
    assert len(ladder.points) >= 3
    for higher, lower in pairwise(ladder.points):
        assert higher.output_tokens_per_s_per_gpu > lower.output_tokens_per_s_per_gpu
        assert higher.output_tokens_per_s_per_user < lower.output_tokens_per_s_per_user
    rows = {row.candidate.name: row for row in tuned.rows}
    point = ladder.points[0]
    candidate = rows[point.candidate].candidate
    assert point.requests is not None
    stream = q.draws.stream(point.requests).at_rate(point.rate_rps)
    again = q.deploy(candidate, tuned.deployment.max_model_len).simulate(stream)
    assert again.summary().output_tokens_per_s_per_user == point.output_tokens_per_s_per_user
    assert tuned.value == max(point.power for point in ladder.points)
    assert rows[point.candidate].status in ("chosen", "feasible")


def test_bounds_and_limits_that_nobody_reaches_save_simulations(tuned: Tuned) -> None:
    assert tuned.ladder is not None
    pairs = len(tuned.rows) * len(tuned.ladder.loads)
    judged = sum(1 for row in tuned.rows for tried in row.tried if not tried.all_cores)
    assert judged < pairs / 2


def test_points_keep_to_the_slo() -> None:
    slo = Slo(tpot_s={"p99": 0.012})
    limited = answer(question(slo), jobs=1)
    assert limited.ladder is not None
    assert limited.ladder.points
    assert all(point.tpot_p99_s is not None and point.tpot_p99_s <= 0.012 for point in limited.ladder.points)


def test_two_processes_say_the_same() -> None:
    one, two = (answer(question(), jobs=jobs) for jobs in (1, 2))
    assert one.ladder == two.ladder


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a number": lambda data: data["points"][1].update(output_tokens_per_s_per_user=1e4),
    "a point less": lambda data: data["points"].pop(),
    "a plan less": lambda data: data["plans"].pop(),
    "a load less": lambda data: data["loads"].pop(),
    "undecided loads": lambda data: data.update(settled=2, points=data["points"][:2]),
    "a profile": lambda data: data["inputs"].update({"hardware:h100-sxm": "0" * 64}),
}


@pytest.fixture(scope="module")
def claimed(tuned: Tuned) -> Iterator[FrontCertificate]:
    """The certificate of the front, which holds; audits of it and of others like it share their simulations."""
    certificate = front_certificate_of(tuned)
    with simulated_once():
        assert FrontAudit(certificate, tuned.question).run()
        yield certificate


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_changed_is_refused(tuned: Tuned, claimed: FrontCertificate, change: str) -> None:
    """Even where who changed it wrote the digest that goes with it."""
    data = json.loads(json.dumps(claimed.to_data()))
    CHANGES[change](data)
    changed = FrontCertificate.model_validate(data)
    assert not FrontAudit(changed, tuned.question).run()
    resealed = changed.model_copy(update={"digest": changed.expected_digest})
    audit = FrontAudit(resealed, tuned.question)
    assert not audit.run()
    assert audit.problems


def test_a_front_that_was_interrupted_is_one_of_the_highest_loads(tuned: Tuned) -> None:
    assert tuned.ladder is not None
    points = [p for p in tuned.ladder.points if p.output_tokens_per_s_per_gpu >= tuned.ladder.loads[1]]
    ladder = tuned.ladder._replace(settled=2, points=tuple(points))
    part = replace(tuned, ladder=ladder, interrupted=True)
    assert FrontAudit(front_certificate_of(part), tuned.question).run()


def test_the_command_line_writes_a_front_certifies_it_and_refuses_what_it_cannot_say(tmp_path: Path) -> None:
    study, out = tmp_path / "study.yaml", tmp_path / "run"
    study.write_text(STUDY + "  front: 3\nobjective: pareto\n")
    said = typed("optimize", study, "--out", out, "--jobs", "1", "--json")
    assert said.code == 0
    assert said.json["objective"]["name"] == "pareto"
    assert len(said.json["front"]) == len(list((out / "front").iterdir()))
    assert "Front of tokens/s/user" in (out / "report.html").read_text()
    held = call("certify", out)
    assert held.code == 0
    assert "between them nothing is certified" in held.out
    data = json.loads((out / "front.json").read_text())
    data["points"][0]["output_tokens_per_s_per_user"] *= 2
    (out / "front.json").write_text(json.dumps(data))
    assert call("certify", out).code == 4
    sure = call("optimize", study, "--out", tmp_path / "other", "--worlds", "3")
    assert sure.code == 2
    assert "--worlds and --robust judge one plan" in sure.err
    study.write_text(STUDY + "  front: 1\nobjective: pareto\n")
    few = call("optimize", study, "--dry-run")
    assert few.code == 2
    assert "search.front" in few.err


def test_a_closed_loop_has_no_load_to_change(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(STUDY + "objective: pareto\n")
    (tmp_path / "users.yaml").write_text(
        "schema: simtune/workload@1\nname: users\nrequests: 50\narrivals: {kind: closed_loop, users: 4}\n"
        "prompt: {kind: fixed, tokens: 500}\noutput: {kind: fixed, tokens: 50}\n"
    )
    said = call("optimize", study, "--set", f"workload={tmp_path / 'users.yaml'}", "--dry-run")
    assert said.code == 2
    assert "is a closed loop" in said.err
