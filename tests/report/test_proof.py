"""The proof of a search as pictures: every plan has one fate, and bound and best plan close in on each other."""

from __future__ import annotations

from simtune.report import proof
from simtune.report.page import render
from simtune.runs.contents import of_study
from simtune.runs.schema import CourseRow
from simtune.tuner.certificate.search_certificate import Certificate, Incumbent, PlanFate, Tried
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.course import REPORTS, CourseLog, ReportsDue, SearchCourse
from tests.report.test_report_page import read
from tests.tuner.test_search import question

HOSTILE = "<img src=x>"


def fate(plan: str, best: float | None, by: str = "capacity", met: bool | None = None, same_as: str = "") -> PlanFate:
    tried = () if met is None else (Tried(rate_rps=1.0, met=met, all_cores=True),)
    return PlanFate(plan=plan, num_gpus=1, best=best, by=by, simulated=tried, same_as=same_as, allocation="")


def certificate(*plans: PlanFate, bound: float = 12.0) -> Certificate:
    return Certificate.sealed(
        simtune="0", study="s", objective="goodput", unit=f"requests/s {HOSTILE}", seed=0, inputs={},
        incumbent=Incumbent(plan="a", value=10.0, rate_rps=10.0), bound=bound, gap=0.2, interrupted=False,
        plans=plans, allocations=(),
    )  # fmt: skip


PLANS = (
    fate("a", 11.0, met=True), fate("b", 10.5, met=True), fate("c", 12.0, met=False), fate("d", 9.0),
    fate("e", 8.0, by="floors"), fate("f", 7.0), fate("i", 10.1), fate("g", 12.0, same_as="c"),
    fate("h", None, by="no memory"),
)  # fmt: skip


def test_proof_gives_every_plan_one_fate() -> None:
    found = proof.groups(certificate(*PLANS), more_is_better=True)
    assert sum(len(group.plans) for group in found) == len(PLANS)
    assert proof.rows(found)[:2] == [("chosen", "1", "11.0"), ("ruled out by capacity", "2", "9.00")]
    by_fate = {group.fate: [plan.plan for plan in group.plans] for group in found}
    assert by_fate[proof.MET] == ["b"]
    assert by_fate[proof.MISSED] == ["c"]
    assert by_fate[proof.TWIN] == ["g"]
    assert by_fate[proof.CANNOT] == ["h"]
    assert by_fate[proof.OPEN] == ["i"]
    assert by_fate["ruled out by floors"] == ["e"]


def test_proof_figure_orders_plans_by_their_bound() -> None:
    sealed = certificate(*PLANS)
    figure = proof.fates_figure(sealed, proof.groups(sealed, more_is_better=True))
    points = {x: y for trace in figure["data"][:-1] for x, y in zip(trace["x"], trace["y"], strict=True)}
    assert [points[x] for x in sorted(points)] == [12.0, 12.0, 11.0, 10.5, 10.1, 9.0, 8.0, 7.0]
    assert figure["data"][-1]["y"] == [10.0, 10.0]
    cheapest = certificate(fate("a", 9.0, met=True), fate("b", 11.0), bound=9.0)
    assert not proof.more_is_better(cheapest)
    assert {trace["type"] for trace in figure["data"]} == {"scatter"}


def test_of_many_plans_of_a_fate_some_are_drawn_from_the_best_on() -> None:
    number = 2 * proof.DRAWN + 1
    sealed = certificate(fate("a", 11.0, met=True), *(fate(f"p{i}", 9.0 - i / number) for i in range(number)))
    figure = proof.fates_figure(sealed, proof.groups(sealed, more_is_better=True))
    (chosen, losers) = figure["data"][:-1]
    assert chosen["x"] == [1]
    assert losers["x"] == [*range(2, 2 + number, 3)]
    assert losers["y"][0] == 9.0
    assert len(losers["x"]) <= proof.DRAWN


def test_a_search_reports_after_simulations_and_now_and_then_between_them() -> None:
    due = ReportsDue(3 * REPORTS)
    assert [due.after_decision(simulations) for simulations in (0, 0, 0, 1, 1, 2, 2, 2, 2)] == [
        False, False, True, True, False, True, False, False, True,
    ]  # fmt: skip
    assert all(ReportsDue(8).after_decision(0) for _ in range(3))


def test_proof_course_draws_best_plan_and_bound() -> None:
    course = (
        CourseRow(simulations=0, decided=0, plan="", value=None, bound=20.0),
        CourseRow(simulations=5, decided=9, plan="a", value=10.0, bound=12.0),
    )
    bound, best = proof.course_figure(course, HOSTILE)["data"]
    assert bound["y"] == [20.0, 12.0]
    assert best["y"] == [None, 10.0]
    assert HOSTILE not in str(bound)


def test_search_course_keeps_only_the_ends_of_constant_parts() -> None:
    log = CourseLog()
    heard: list[SearchCourse] = []
    listening = CourseLog(heard.append)
    for done, (value, bound) in enumerate([(None, 9.0), (5.0, 9.0), (5.0, 9.0), (5.0, 9.0), (5.0, 8.0)]):
        now = SearchCourse(done, 5, None, value, bound, 5 - done, done)
        log(now)
        listening(now)
    assert [(point.decided, point.bound) for point in log.points] == [(0, 9.0), (1, 9.0), (3, 9.0), (4, 8.0)]
    assert len(heard) == 5


def test_report_of_a_search_has_the_proof_section() -> None:
    tuned = optimize(question(max_num_seqs=(8, 64), pp=(1, 2), requests=120), jobs=1)
    run = of_study(tuned, jobs=1).run
    assert run.course[-1].bound == tuned.bound
    assert run.course[-1].value == tuned.value
    assert all(a.simulations <= b.simulations for a, b in zip(run.course, run.course[1:], strict=False))
    reader = read(render(run))
    assert "The proof" in reader.headings
    figures = [attrs.get("id") for tag, attrs in reader.tags if tag == "div"]
    assert "proof-fates" in figures
    assert "proof-course" in figures
