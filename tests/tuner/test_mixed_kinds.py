"""Mixed pools of two kinds of hardware behind one router: what is enumerated, weighed, bounded and certified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simtune.runs.schema import CandidateRow
from simtune.runs.tables import read_csv
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.routing import LeastOutstandingRouting, RoundRobinRouting
from simtune.specs.study import Confirmation, Day, DayWindow, HardwareCount, Search, Study
from simtune.specs.workload import FixedLength, Poisson, Slo, Workload
from simtune.tuner.certificate.search_certificate import Audit, certificate_of
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.space.candidates import Candidate, space_of
from tests.cli.conftest import STUDY, call

KINDS = (HardwareCount(profile="h100-sxm", devices=1), HardwareCount(profile="l40s", devices=2))
LOAD = Workload(
    name="load",
    requests=150,
    arrivals=Poisson(rate_rps=4.0),
    prompt=FixedLength(tokens=400),
    output=FixedLength(tokens=40),
)


def study(hardware: Any = KINDS, objective: Any = "goodput", given: Any = None, **search: Any) -> Study:
    settings = {"tp": (1,), "pp": (1,), "max_num_seqs": (64,), "max_num_batched_tokens": (2048,), "mixed_kinds": True}
    settings |= {"confirm": Confirmation(draws=0)}
    return Study(
        name="study",
        model="llama-3.1-8b",
        hardware=hardware,
        workload=LOAD.name,
        slo=Slo(ttft_s={"p99": 1.0}, tpot_s={"mean": 0.06}),
        objective=objective,
        search=Search(**{**settings, **search}),
        **(given or {}),
    )


def question(asked: Study) -> Question:
    profiles = tuple(load_hardware(entry.profile) for entry in asked.hardware)
    return Question(asked, load_model(asked.model), profiles, LOAD, None)


def shared(asked: Question) -> tuple[PlanCache, list[Candidate]]:
    """The plan cache of a space, and its plans of two kinds with all that follows from their settings."""
    found = space_of(asked.study).candidates
    plan_cache = PlanCache(asked, found)
    settled = [plan_cache.settled(candidate) for candidate in found if candidate.of_kinds]
    assert not any(isinstance(candidate, Refused) for candidate in settled)
    return plan_cache, [candidate for candidate in settled if isinstance(candidate, Candidate)]


# --- what is enumerated -----------------------------------------------------------------------------------


def test_each_kind_is_cut_in_its_own_way() -> None:
    asked = study(tp=(1, 2))
    assert [candidate.name for candidate in space_of(asked).candidates] == [
        "h100-sxm-tp1-pp1-x1-s64-t2048",
        "l40s-tp1-pp1-x2-s64-t2048",
        "l40s-tp2-pp1-x1-s64-t2048",
        "h100-sxm-tp1-pp1-x1-s64-t2048_l40s-tp1-pp1-x2-s64-t2048",
        "h100-sxm-tp1-pp1-x1-s64-t2048_l40s-tp2-pp1-x1-s64-t2048",
    ]
    both = space_of(asked).candidates[3]
    assert (both.num_gpus, both.prefilling, both.of_kinds) == (3, None, True)
    plan = both.plan(asked, 512)
    assert [(pool.name, pool.role, pool.hardware, pool.instances) for pool in plan.pools] == [
        ("mixed-h100-sxm", "mixed", "h100-sxm", 1),
        ("mixed-l40s", "mixed", "l40s", 2),
    ]
    assert (plan.link, plan.decode_router) == (None, None)


def test_counting_takes_every_pair_of_numbers_and_constraints_hold_for_both() -> None:
    counted = [candidate for candidate in space_of(study(objective="gpus")).candidates if candidate.of_kinds]
    assert [tuple(pool.instances for pool in candidate.pools) for candidate in counted] == [(1, 1), (1, 2)]
    fewer = study(objective="gpus", given={"constraints": ("mixed.instances == 1",)})
    left = [candidate for candidate in space_of(fewer).candidates if candidate.of_kinds]
    assert [candidate.num_gpus for candidate in left] == [2]


def test_without_it_there_are_none() -> None:
    plain = study(mixed_kinds=None)
    assert not any(candidate.of_kinds for candidate in space_of(plain).candidates)
    assert "mixed_kinds" not in plain.to_yaml()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"hardware": KINDS[:1]}, "needs two kinds of hardware"),
        ({"layouts": ("prefill-decode",)}, "layouts with mixed"),
        ({"given": {"day": Day(startup_s=1.0, windows=(DayWindow(hours=1.0, rate_rps=1.0),))}}, "a day requires pools"),
    ],
)
def test_what_does_not_go_with_it_is_said(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        study(**given)


# --- weights and bounds -----------------------------------------------------------------------------------


def test_weights_are_what_a_core_sustains_and_capacities_add() -> None:
    asked = question(study())
    plan_cache, (both,) = shared(asked)
    single = {
        candidate.decoding.shape.gpu: plan_cache.capacity(candidate).rps
        for candidate in map(plan_cache.settled, space_of(asked.study).candidates)
        if isinstance(candidate, Candidate) and not candidate.of_kinds
    }
    assert plan_cache.capacity(both).rps == pytest.approx(single["h100-sxm"] + single["l40s"])
    router = asked.plan(both, 512).router
    assert isinstance(router, RoundRobinRouting)
    share = single["l40s"] / 2 / single["h100-sxm"]
    assert router.weights == {"mixed-h100-sxm": 1.0, "mixed-l40s": pytest.approx(share, rel=1e-3)}


def test_routers_that_see_the_load_have_no_weights() -> None:
    asked = question(study(routers=(LeastOutstandingRouting(),)))
    _, (both,) = shared(asked)
    assert asked.plan(both, 512).router == LeastOutstandingRouting()


def test_requests_go_where_the_weights_say() -> None:
    asked = question(study())
    plan_cache, (both,) = shared(asked)
    result = plan_cache.deployment(both).simulate(plan_cache.stream(both))
    on_h100 = int((result.outcome.core == 0).sum())
    first, second = (pool.weight for pool in both.pools)
    assert first is not None
    assert second is not None
    assert on_h100 == pytest.approx(len(result.stream) * first / (first + 2 * second), abs=2)


# --- what is found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seats", [(64,), (8, 64)])
def test_both_together_beat_either_and_the_certificate_holds(seats: tuple[int, ...]) -> None:
    asked = question(study(max_num_seqs=seats))
    tuned = optimize(asked, jobs=1)
    assert tuned.chosen.candidate.of_kinds
    alone = optimize(question(study(mixed_kinds=None, max_num_seqs=seats)), jobs=1)
    assert tuned.value > alone.value
    certificate = certificate_of(tuned)
    audit = Audit(certificate, asked)
    assert audit.run(), audit.problems
    assert not Audit(certificate, question(study(mixed_kinds=None, max_num_seqs=seats))).run()


def test_a_run_says_what_stands_beside(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    text = STUDY.replace(
        "{profile: h100-sxm, devices: 2}", "[{profile: h100-sxm, devices: 1}, {profile: l40s, devices: 1}]"
    )
    text = (
        text.replace("0.030", "0.080")
        .replace("tp: [1, 2]", "tp: [1]\n  mixed_kinds: true")
        .replace("[64, 128]", "[64]")
    )
    file.write_text(text + "objective: goodput\n")
    assert call("optimize", file, "--out", tmp_path / "run").code == 0
    rows = read_csv(tmp_path / "run" / "candidates.csv", CandidateRow)
    assert rows[0].beside == "h100-sxm tp1-pp1-x1-s64-t2048"
    assert {row.beside for row in rows[1:]} == {None}
    assert "weights:" in (tmp_path / "run" / "plan.yaml").read_text()
