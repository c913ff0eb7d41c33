"""The longest request that an engine is set up for, as a dimension of a search."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simtune.errors import Infeasible
from simtune.specs.pool import Policy
from simtune.specs.study import Confirmation, StudyBatching
from simtune.specs.workload import FixedLength, Poisson, Slo, Workload
from simtune.tuner.certificate.search_certificate import Audit, certificate_of
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.draws import LoadDraws
from simtune.workload.requests import RequestStream
from tests.tuner.test_search import candidates, question

LOAD = Workload(
    name="load",
    requests=300,
    arrivals=Poisson(rate_rps=25.0),
    prompt=FixedLength(tokens=1000),
    output=FixedLength(tokens=50),
    max_tokens=100_000,
)

TWO_DRAWS = Confirmation(draws=2)


def asked(*lengths: int, policy: Policy = "tensorrt-llm") -> Question:
    q = question(workload=LOAD, devices=1, tp=(1,), pp=(1,), max_num_seqs=(256,), max_num_batched_tokens=(2048,),
                 objective="e2el", slo=Slo(), confirm=Confirmation(draws=0), max_model_len=lengths)  # fmt: skip
    return replace(q, study=q.study.model_copy(update={"batching": StudyBatching(policy=policy)}))


def test_an_engine_that_keeps_room_for_the_longest_answer_keeps_up_only_with_less_of_it() -> None:
    tuned = optimize(asked(2048, 65536), jobs=1)
    assert tuned.chosen.candidate.name == "tp1-pp1-len2048-x1-s256-t2048"
    assert tuned.deployment.plan.pools[0].max_model_len == 2048
    with pytest.raises(Infeasible, match=r"len65536.* saturated"):
        optimize(asked(65536), jobs=1)
    audit = Audit(certificate_of(tuned), tuned.question)
    assert audit.run(), audit.problems


def test_a_length_below_the_longest_request_does_not_fit() -> None:
    tuned = optimize(asked(1049, 1050, policy="vllm-fcfs"), jobs=1)
    short = next(row for row in tuned.rows if "len1049" in row.candidate.name)
    assert short.status == "does_not_fit"
    assert short.reason == "max_model_len (1049) is less than the longest request of the load (1,050 tokens)"
    assert tuned.deployment.max_model_len == 1050
    with pytest.raises(Infeasible, match="exceeds the longest context"):
        optimize(asked(10**6, policy="vllm-fcfs"), jobs=1)


def test_every_draw_is_drawn_once_for_its_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of a search need the longest request of all draws."""
    q = asked(2048)
    q = replace(
        q, study=q.study.model_copy(update={"search": q.study.search.model_copy(update={"confirm": TWO_DRAWS})})
    )
    plans = list(candidates(q))
    draws: list[int] = []
    stream = LoadDraws.stream

    def counted(self: LoadDraws, requests: int, draw: int = 0) -> RequestStream:
        draws.append(draw)
        return stream(self, requests, draw)

    monkeypatch.setattr(LoadDraws, "stream", counted)
    assert q.length_limit(plans) == 1280
    assert q.longest_request(plans) == 1050
    assert q.length_limit(plans[:1]) == 1280
    assert draws == [0, 1, 2]
