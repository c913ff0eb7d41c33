"""Confidence: the margin of step times, what a search with it finds, what simulated worlds then show, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simtune.api import load_question
from simtune.costs.iteration import StepWork
from simtune.errors import UsageError
from simtune.sim.uncertainty import uncertainty
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.pool import Batching, Pool
from simtune.specs.study import Confirmation, Day, DayWindow
from simtune.specs.workload import Slo
from simtune.testing.clusters import stream_of
from simtune.tuner.certificate.search_certificate import Audit, certificate_of
from simtune.tuner.doubt.margin import _typical_steps, margin
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.day import day_of
from simtune.tuner.search.front import answer
from tests.cli.conftest import STUDY

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")


def question(confidence: float | None, *, file: str, **study: Any) -> Question:
    """The small study, with a confidence."""
    asked = load_question(file)
    slo = asked.study.slo.model_copy(update={"confidence": confidence})
    return replace(asked, study=asked.study.model_copy(update={"slo": slo, **study}))


@pytest.fixture
def file(tmp_path: Any) -> str:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    return str(path)


def test_the_margin_rises_with_the_confidence_and_with_the_errors(file: str) -> None:
    stream = question(None, file=file).draws.stream(100)
    pool = Pool(hardware="h100-sxm", instances=1, batching=Batching(max_num_seqs=256, max_num_batched_tokens=2048))
    margins = [margin(level, MODEL, HARDWARE, pool, stream, None, 0) for level in (0.5, 0.8, 0.9, 0.99)]
    assert 1 <= margins[0] < margins[1] < margins[2] < margins[3] < 2


@pytest.mark.parametrize(
    ("prompt", "output", "num_blocks", "decodes", "chunk"),
    [
        # Half of 256 seats; the prompt and half of the answer are in the cache.
        (1000, 101, None, 128, 1000),
        # A prompt of one token is a chunk of one; one longer than the budget of 2,048 fills a step.
        (1, 2, None, 128, 1),
        (5000, 100, None, 128, 2048),
        # 700 blocks of 16 tokens hold ten requests of 1,050 tokens; 60 blocks hold none.
        (1000, 100, 700, 5, 1000),
        (1000, 100, 60, 1, 1000),
    ],
)
def test_the_steps_of_a_margin_are_those_of_mean_requests(
    prompt: int, output: int, num_blocks: int | None, decodes: int, chunk: int
) -> None:
    pool = Pool(hardware="h100-sxm", instances=1, batching=Batching(max_num_seqs=256, max_num_batched_tokens=2048))
    stream = stream_of(None, [prompt] * 3, [output] * 3, users=1)
    context = round(prompt + output / 2)
    assert _typical_steps(pool, stream, num_blocks) == [
        StepWork(num_decodes=decodes, context_tokens=decodes * context, num_samples=decodes),
        StepWork(chunks=[(0, chunk)], num_samples=1),
    ]


def test_more_confidence_is_a_lower_rate_that_more_worlds_keep(file: str) -> None:
    sure, predicted = (optimize(question(level, file=file), jobs=1) for level in (0.9, None))
    assert sure.value < predicted.value
    assert sure.bound < predicted.bound, "the bound is of plans with the margin, too"
    assert sure.result.meets_slo, "as predicted it is kept with room to spare"
    certificate = certificate_of(sure)
    audit = Audit(certificate, sure.question)
    assert audit.run(), audit.problems


@pytest.mark.slow
def test_worlds_that_are_simulated_keep_it_as_often_as_was_asked(file: str) -> None:
    """On a fresh draw of the requests, longer than those of the search."""
    shares = {}
    for level in (0.9, None):
        confirm = Confirmation(draws=3, requests=4000)
        asked = question(level, file=file)
        search = asked.study.search.model_copy(update={"confirm": confirm, "requests": 4000})
        asked = replace(asked, study=asked.study.model_copy(update={"search": search}))
        tuned = optimize(asked)
        stream = asked.draws.stream(8000, draw=9).at_rate(tuned.chosen.rate_rps or 0.0)
        shares[level] = uncertainty(tuned.deployment, stream, asked.study.slo, count=60, seed=5).slo_probability
    assert shares[0.9] >= max(0.85, shares[None]), shares


@pytest.mark.parametrize("objective", ["e2el", "joules_per_token"])
def test_a_value_at_a_given_load_is_the_one_with_the_margin(file: str, objective: str) -> None:
    confirm = {"search": load_question(file).study.search.model_copy(update={"confirm": Confirmation(draws=0)})}
    asked = [question(level, file=file, objective=objective, **confirm) for level in (0.9, None)]
    sure, predicted = (optimize(each, jobs=1) for each in asked)
    assert sure.value > predicted.value
    assert sure.chosen.reason.endswith("in 90% of the worlds")
    mean_s = sure.result.statistic("e2el", "mean")
    assert mean_s is not None
    assert objective != "e2el" or mean_s < sure.value, "the report shows it as predicted"
    audit = Audit(certificate_of(sure), sure.question)
    assert audit.run(), audit.problems


def test_a_front_and_a_day_are_judged_with_the_margin(file: str) -> None:
    search = load_question(file).study.search.model_copy(update={"confirm": Confirmation(draws=0), "front": 2})
    fronts = [answer(question(level, file=file, objective="pareto", search=search), jobs=1) for level in (0.9, None)]
    at_lowest = [tuned.ladder.points[-1] for tuned in fronts if tuned.ladder is not None]
    assert at_lowest[0].output_tokens_per_s_per_user < at_lowest[1].output_tokens_per_s_per_user
    latencies = []
    for level in (0.9, None):
        day = Day(startup_s=10.0, windows=(DayWindow(hours=24, rate_rps=2.0),))
        tuned = optimize(question(level, file=file, search=search, day=day), jobs=1)
        planned = day_of(tuned, jobs=1)
        assert planned is not None
        assert planned.hours[0].meets_slo
        latencies.append(planned.hours[0].tpot_p99_s or 0.0)
    assert latencies[0] > latencies[1]


def test_confidence_needs_a_limit_where_the_objective_does_not_depend_on_times(file: str) -> None:
    asked = question(0.9, file=file, objective="gpus")
    asked = replace(asked, study=asked.study.model_copy(update={"slo": Slo(confidence=0.9)}))
    with pytest.raises(UsageError, match="gpus does not depend on step times; add a limit"):
        optimize(asked, jobs=1)
