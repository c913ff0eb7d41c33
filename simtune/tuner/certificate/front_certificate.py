"""`front.json`, the claims of a search for a front in a form that anybody can check, and the check.

The file certifies that at each load of the ladder the points are correct, and that no other plan of the space that
keeps up has more tokens/s/user at as many tokens/s/GPU, under the cost model. `FrontAudit` trusts none of it: it
computes the ladder, every bound and every simulation again, and compares.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import Field

from simtune import __version__
from simtune.specs.base import Count, Positive, Record, Seq
from simtune.tuner.certificate.search_certificate import inputs_of
from simtune.tuner.question import Question
from simtune.tuner.search.evaluator import Evaluator
from simtune.tuner.search.front import FrontSearch
from simtune.tuner.search.front_points import FrontPoint
from simtune.tuner.space.expressible import SearchSpace, left_out_names, space_for
from simtune.tuner.trial import Tuned

FRONT_SCHEMA: Literal["simtune/front@1"] = "simtune/front@1"


class FrontCertificate(Record):
    """`front.json`."""

    schema_id: Literal["simtune/front@1"] = Field(alias="schema")
    simtune: str = Field(description="the release that wrote it")
    study: str
    seed: int
    inputs: dict[str, str] = Field(description="sha256 by kind and name, arrays of profiles apart")
    plans: Seq[str] = Field(description="of the space")
    loads: Seq[Positive] = Field(description="output tokens/s/GPU at which plans were held against each other")
    interrupted: bool = Field(description="the points are those of the highest loads alone")
    points: Seq[FrontPoint] = Field(description="from the highest load to the lowest")
    settled: Count = Field(description="how many of the loads were decided")
    digest: str = Field(description="sha256 of all the rest")

    @property
    def expected_digest(self) -> str:
        """sha256 of the content without the digest."""
        body = {key: value for key, value in self.model_dump(mode="json", by_alias=True).items() if key != "digest"}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def front_certificate_of(tuned: Tuned) -> FrontCertificate:
    """Return the certificate of a search for a front."""
    assert tuned.ladder is not None
    return _sealed(
        tuned.question,
        plans=tuple(sorted(row.candidate.name for row in tuned.rows)),
        loads=tuned.ladder.loads,
        settled=tuned.ladder.settled,
        interrupted=tuned.interrupted,
        points=tuned.ladder.points,
    )


def _sealed(question: Question, **content: Any) -> FrontCertificate:
    open_ = FrontCertificate(
        schema_id=FRONT_SCHEMA,
        simtune=__version__,
        study=question.study.name,
        seed=question.study.seed,
        inputs=inputs_of(question),
        digest="",
        **content,
    )
    return open_.model_copy(update={"digest": open_.expected_digest})


class FrontAudit:
    """Checks a front: computes it anew from its inputs and compares."""

    def __init__(self, certificate: FrontCertificate, question: Question) -> None:
        self.certificate, self.question = certificate, question
        self.problems: list[str] = []
        """Differences between the certificate and the computed front, one sentence each."""
        self.bounds = self.simulations = 0
        """Plans at a load that were ruled out by bounds, and simulations that were made."""

    def run(self) -> bool:
        """Return True if everything in the certificate holds; `problems` lists the differences."""
        claimed = self.certificate
        if claimed.digest != claimed.expected_digest:
            self.problems.append("the file was changed after it was written: its digest does not match")
            return False
        space = space_for(self.question)
        search = FrontSearch(self.question, space.candidates, Evaluator(None, None), plan_cache=space.plan_cache)
        search.run(claimed.settled)
        self.bounds, self.simulations = search.ruled_out, search.simulations
        computed = _sealed(
            self.question,
            plans=tuple(sorted(row.candidate.name for row in search.rows)),
            loads=tuple(search.loads),
            settled=search.settled,
            interrupted=claimed.interrupted,
            points=tuple(search.points),
        )
        for key in FrontCertificate.model_fields:
            if key == "plans" and self._same_plans(space, computed):
                continue
            if key not in ("points", "digest") and getattr(claimed, key) != getattr(computed, key):
                self.problems.append(f"{key}: differs from the value computed from the study's inputs")
        if claimed.settled < len(claimed.loads) and not claimed.interrupted:
            self.problems.append("settled: some loads of the ladder were not decided")
        self._compare_points(computed)
        return not self.problems

    def _same_plans(self, space: SearchSpace, computed: FrontCertificate) -> bool:
        """True if the plans are those of the space; earlier versions listed those with a pool that does not fit too."""
        more = set(self.certificate.plans) - set(computed.plans)
        covers = set(self.certificate.plans) >= set(computed.plans)
        return covers and (not more or more <= left_out_names(self.question, space))

    def _compare_points(self, computed: FrontCertificate) -> None:
        anew, claimed = ({point.rate_rps: point for point in front.points} for front in (computed, self.certificate))
        for rate in sorted(anew.keys() | claimed.keys(), reverse=True):
            if anew.get(rate) != claimed.get(rate):
                self.problems.append(
                    f"at {rate:.6g} requests/s: {_words(claimed.get(rate))} in the file, "
                    f"and {_words(anew.get(rate))} computed"
                )


def _words(point: FrontPoint | None) -> str:
    if point is None:
        return "no point"
    return (
        f"{point.candidate} with {point.output_tokens_per_s_per_user:.6g} tokens/s/user at "
        f"{point.output_tokens_per_s_per_gpu:.6g} tokens/s/GPU"
    )
