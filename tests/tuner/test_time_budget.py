"""A search that ends when its time is up, and the outlook that is printed before it starts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from simtune.cli.numbers import Duration
from simtune.errors import UsageError
from simtune.specs.study import Confirmation
from simtune.specs.workload import Slo
from simtune.tuner.certificate.search_certificate import Audit, certificate_of
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.search import front
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.course import SearchCourse
from simtune.tuner.search.outlook import FEWEST, MOST, Outlook
from simtune.tuner.space.candidates import space_of
from simtune.tuner.trial import Tuned
from tests.tuner.test_variants import question


def after(calls: int) -> Callable[[], bool]:
    """A clock by which the time is up when it was asked so often."""
    asked = 0

    def time_is_up() -> bool:
        nonlocal asked
        asked += 1
        return asked > calls

    return time_is_up


def sized(**given: Any) -> Question:
    return question({}, {"async_scheduling": False}, max_num_seqs=(8, 16), **given)


def early(asked: Question) -> Tuned:
    """The answer if the time is up as soon as there is a plan."""
    for calls in range(40):
        with suppress(UsageError):
            return optimize(asked, jobs=1, time_is_up=after(calls))
    raise AssertionError("no plan within forty questions")


def test_the_best_plan_by_then_is_certified_with_its_gap() -> None:
    asked = sized()
    complete, tuned = optimize(asked, jobs=1), early(asked)
    assert tuned.interrupted
    assert tuned.value <= complete.value <= tuned.bound
    assert tuned.gap > complete.gap
    certificate = certificate_of(tuned)
    assert certificate.interrupted
    assert certificate.gap == pytest.approx(tuned.gap)
    audit = Audit(certificate, asked)
    assert audit.run(), audit.problems
    assert any(row.reason.startswith("left open when the time was up: ") for row in tuned.rows)


def test_a_plan_by_then_is_confirmed_on_fresh_draws() -> None:
    tuned = early(sized(confirm=Confirmation(draws=1, requests=50)))
    assert tuned.interrupted
    assert tuned.confirmed is not None
    assert tuned.confirmed.draws == 1


def test_a_search_on_several_processes_that_is_interrupted_confirms_its_best_plan() -> None:
    asked = sized(confirm=Confirmation(draws=1, requests=50))

    def interrupt(now: SearchCourse) -> None:
        if now.best is not None:
            raise KeyboardInterrupt

    alone, together = (optimize(asked, jobs=jobs, progress=interrupt) for jobs in (1, 2))
    assert together.interrupted
    assert together.confirmed is not None
    assert (together.value, together.confirmed) == (alone.value, alone.confirmed)


@pytest.mark.parametrize("objective", ["goodput_per_gpu", "pareto"])
def test_time_that_is_up_before_there_is_a_plan_is_an_error(objective: Any) -> None:
    asked = sized()
    study = asked.study.model_copy(update={"objective": objective, "slo": Slo(ttft_s={"p99": 2.0})})
    asked = Question(study, asked.model, asked.hardware, asked.workload, None)
    with pytest.raises(UsageError, match="no plan met the SLO before the time was up, after 0 simulations; allow more"):
        front.answer(asked, jobs=1, time_is_up=lambda: True)


def half_a_second(work: Callable[[], None]) -> float:
    """A clock by which everything takes half a second."""
    work()
    return 0.5


def test_the_outlook_has_the_size_of_the_space_and_grows_with_it() -> None:
    asked = sized()
    every = space_of(asked.study).candidates
    outlook = Outlook.of(asked, every, PlanCache(asked, every), timer=half_a_second)
    assert (outlook.plans, outlook.shapes, outlook.variants) == (4, 2, 2)
    assert outlook.costs_s == 0.5
    low, high = outlook.seconds(1)
    assert low == pytest.approx(2 * 0.5 + (FEWEST[0] + 4 * FEWEST[1]) * outlook.simulation_s)
    assert high == pytest.approx(2 * 0.5 + (MOST[0] + 4 * MOST[1]) * outlook.simulation_s)
    assert outlook.seconds(4)[0] < low
    size, shorter = outlook.lines(asked, 1)
    assert size.startswith("4 to search in 2 cuts of GPUs, 2 variants; one simulation takes ")
    assert shorter == (
        "shorter: fewer variants than 2, fewer sizes of batches than 2, search.requests below 30, "
        "--budget 60s for the best by then"
    )


def test_the_outlook_is_given_before_anything_is_simulated() -> None:
    seen: list[int] = []
    asked = sized()
    tuned = optimize(asked, jobs=1, begins=lambda candidates, cache: seen.append(len(candidates)))
    assert seen == [len(tuned.rows)]


def test_a_budget_is_a_duration() -> None:
    assert [Duration(1).convert(text, None, None) for text in ("60s", "1.5m", "2h", "7", 3.0)] == [60, 90, 7200, 7, 3]
    with pytest.raises(Exception, match="from 1 second to 48 days"):
        Duration(1).convert("0.5s", None, None)
