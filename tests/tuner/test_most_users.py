"""Objectives `users` and `users_per_gpu`: the most users of a closed loop within the SLO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.errors import UsageError
from simtune.runs.contents import of_study
from simtune.specs.study import Confirmation
from simtune.specs.workload import ClosedLoop, FixedLength, Poisson, Sessions, Slo, Workload
from simtune.tuner.certificate.search_certificate import Audit, certificate_of
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.draws import LoadDraws
from simtune.tuner.search.most_users import ROUNDS, UserLoad, most_users
from simtune.tuner.trial import Tuned
from simtune.workload.requests import RequestStream
from tests.tuner.test_search import question

AGENTS = Workload(
    name="agents",
    requests=12,
    arrivals=ClosedLoop(users=4),
    prompt=FixedLength(tokens=2000),
    output=FixedLength(tokens=20),
    sessions=Sessions(turns=2, pause_s=1.0),
)
LIMIT = Slo(ttft_s={"p90": 0.4})


def asked(objective: str = "users", slo: Slo = LIMIT, load: Workload = AGENTS, **given_too: Any) -> Question:
    settings = {"tp": (1, 2), "pp": (1,), "max_num_seqs": (64,), "max_num_batched_tokens": (8192,),
                "confirm": Confirmation(draws=0)}  # fmt: skip
    return question(objective=objective, slo=slo, workload=load, devices=2, **{**settings, **given_too})


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return optimize(asked(), jobs=1)


def test_one_user_more_misses_the_slo_under_every_plan(tuned: Tuned) -> None:
    served = {}
    for row in tuned.rows:
        deployment = tuned.question.deploy(row.candidate, tuned.deployment.max_model_len)
        load = UserLoad(tuned.question.stream(row.candidate), tuned.question.draws)
        users = 0
        while deployment.simulate(load.of_users(users + 1), LIMIT).meets_slo:
            users += 1
        served[row.candidate.name] = users
    assert tuned.value == max(served.values()) > 1
    assert tuned.result.stream.users == tuned.value
    assert f"up to {tuned.value:.0f} users" in tuned.chosen.reason


def test_the_certificate_repeats_it_and_the_summary_has_it(tuned: Tuned) -> None:
    audit = Audit(certificate_of(tuned), tuned.question)
    assert audit.run(), audit.problems
    summary = of_study(tuned, jobs=1).run.summary
    assert summary.users == tuned.value
    assert summary.objective is not None
    assert (summary.objective.name, summary.objective.value) == ("users", tuned.value)


def test_users_for_each_gpu_may_choose_another_plan() -> None:
    """Half the users on half the GPUs are as many for each."""
    each = optimize(asked("users_per_gpu", confirm=Confirmation(draws=1, requests=20)), jobs=1)
    assert each.result.stream.users is not None
    assert each.value == pytest.approx(each.result.stream.users / each.chosen.candidate.num_gpus)
    assert each.confirmed is not None


@dataclass
class Verdict:
    """A run of a number of users, of which at most some meet the SLO."""

    stream: RequestStream
    most: int
    searched_users: int | None = None

    @property
    def meets_slo(self) -> bool:
        return (self.stream.users or 0) <= self.most


@given(most=st.integers(0, 300), begin=st.integers(1, 100))
def test_the_most_users_are_found_wherever_the_search_begins(most: int, begin: int) -> None:
    draws = LoadDraws(AGENTS, None, 0)
    load = UserLoad(replace(draws.stream(12), users=begin), draws)
    lengths: dict[int, int] = {}

    def simulate(stream: RequestStream) -> Any:
        assert stream.users is not None
        lengths[stream.users] = stream.arrivals
        return Verdict(stream, most)

    run = most_users(load, simulate)
    assert run.stream.users == run.searched_users == max(1, most)
    assert run.meets_slo == (most > 0)
    assert all(count >= max(12, ROUNDS * users) for users, count in lengths.items())


@pytest.mark.parametrize(
    ("given_too", "message"),
    [
        ({"load": AGENTS.model_copy(update={"arrivals": Poisson(rate_rps=1.0)})}, "looks for the most users of a clos"),
        ({"slo": Slo()}, "objective users needs an slo with at least one limit"),
        ({"slo": Slo(ttft_s={"p90": 1.0}, confidence=0.9)}, "slo.confidence is not judged for objective users"),
    ],
)
def test_what_has_no_users_is_refused(given_too: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        optimize(asked(**given_too), jobs=1)
