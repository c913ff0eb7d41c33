"""At a given load the plan is chosen by the mean over fresh draws, where the draw of the search may favour another."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from simtune.specs.study import Confirmation
from simtune.specs.workload import Poisson, Slo
from simtune.tuner.certificate.search_certificate import Audit, Certificate, ConfirmedOnDraws, certificate_of
from simtune.tuner.doubt.draw_spread import interval_of_draws, spread_of_values
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.trial import Tuned
from tests.tuner.test_search import LOAD, question


def asked(draws: int) -> Question:
    """Two budgets whose order turns with the draw: on that of seed 3 the larger one is better, on most it is not."""
    load = LOAD.model_copy(update={"requests": 40, "arrivals": Poisson(rate_rps=6.0)})
    q = question(workload=load, objective="e2el", tp=(2,), pp=(1,), max_num_seqs=(64,), slo=Slo(ttft_s={"p50": 0.2}),
                 max_num_batched_tokens=(512, 2048), confirm=Confirmation(draws=draws, requests=300))  # fmt: skip
    return replace(q, study=q.study.model_copy(update={"seed": 3}))


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return optimize(asked(3), jobs=1)


def test_the_plan_is_chosen_on_the_mean_of_fresh_draws(tuned: Tuned) -> None:
    lucky = optimize(asked(0), jobs=1)
    rival = next(row for row in tuned.rows if row.candidate == lucky.chosen.candidate)
    assert tuned.chosen.candidate != lucky.chosen.candidate
    assert lucky.value < tuned.value, "on the draw of the search another plan is better"
    assert len(rival.drawn) == len(tuned.chosen.drawn) == 3
    assert all(chosen < other for chosen, other in zip(tuned.chosen.drawn, rival.drawn, strict=True))
    assert "on the mean of 3 fresh draws" in rival.reason
    assert tuned.bound == lucky.value, "the bound is of the draw of the search"


def test_the_certificate_has_the_value_of_every_draw(tuned: Tuned) -> None:
    certificate = certificate_of(tuned)
    audit = Audit(certificate, tuned.question)
    assert audit.run(), audit.problems
    assert certificate.confirmed is not None
    assert certificate.confirmed.values == tuned.chosen.drawn
    off = ConfirmedOnDraws(**{**certificate.confirmed.model_dump(), "values": (0.1, 0.1, 0.1)})
    content = {key: value for key, value in certificate if key not in ("digest", "schema_id", "confirmed")}
    audit = Audit(Certificate.sealed(**content, confirmed=off), tuned.question)
    assert not audit.run()
    assert "values on fresh draws" in audit.problems[0]


def test_the_interval_holds_one_more_draw() -> None:
    ends = interval_of_draws((1.0, 1.1, 1.2), 0.9)
    assert ends is not None
    off = 2.919986 * 0.1 * math.sqrt(4 / 3)
    assert ends == pytest.approx((1.1 - off, 1.1 + off), rel=1e-5)
    assert interval_of_draws((1.0,), 0.9) is None
    assert interval_of_draws((1.0, math.inf), 0.9) is None


def test_fewer_requests_spread_more() -> None:
    values = (1.0, 1.1, 1.2)
    assert spread_of_values(values, 8000, 8000) == pytest.approx(0.0912, abs=1e-4)
    assert spread_of_values(values, 8000, 500) == pytest.approx(4 * spread_of_values(values, 8000, 8000))
    assert spread_of_values((1.0, math.inf), 8000, 500) == 0
