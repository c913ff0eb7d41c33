"""Confidence: the margin of step times, what a search with it finds, what simulated worlds then show, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simtune.api import load_question
from simtune.errors import UsageError
from simtune.sim.uncertainty import uncertainty
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.pool import Batching, Pool
from simtune.specs.study import Confirmation
from simtune.tuner.certificate.search_certificate import Audit, certificate_of
from simtune.tuner.doubt.margin import margin
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
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


REFUSED = {
    "objective e2el is of the predicted times": {"objective": "e2el"},
    "objective pareto is of the predicted times": {"objective": "pareto"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_confidence_cannot_be_asked_of_is_refused(file: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        optimize(question(0.9, file=file, **REFUSED[message]), jobs=1)
