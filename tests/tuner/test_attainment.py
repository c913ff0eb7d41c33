"""An SLO as attainment: a share of the requests within all limits at once, which percentiles alone do not ensure."""

from __future__ import annotations

from typing import Any

import pytest

from simtune.results.result import Result
from simtune.specs.workload import RequestClass, Slo
from simtune.tuner.bounds.best_case import sustained_rps
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.climb import violation
from simtune.tuner.space.expressible import space_for
from tests.tuner.test_search import LOAD, question

ONE: dict[str, Any] = {"tp": (1,), "pp": (1,), "max_num_seqs": (64,), "max_num_batched_tokens": (2048,), "devices": 1}


def judged(attainment: float | None) -> Result:
    """Return a run in which each limit is met by 90 % of the requests, and both by fewer."""
    q = question(workload=LOAD.model_copy(update={"requests": 400}), **ONE)
    (candidate,) = space_for(q).candidates
    deployment, stream = q.deploy(candidate, q.length_limit([candidate])), q.stream(candidate)
    busy = stream.at_rate(0.2 * sustained_rps(deployment, stream))
    free = deployment.simulate(busy)
    edges = {f"{metric}_s": {"p90": 1.0001 * (free.statistic(metric, "p90") or 0.0)} for metric in ("ttft", "tpot")}
    return deployment.simulate(busy, Slo.model_validate({**edges, "attainment": attainment}))


def test_percentiles_of_each_latency_do_not_make_a_share_within_both() -> None:
    percentiles, share = judged(None), judged(0.9)
    assert percentiles.meets_slo
    assert all(limit.met for limit in share.limits)
    attained = share.slo_attainment
    assert attained is not None
    assert attained < 0.9
    assert not share.meets_slo
    assert violation(share) == f"0.9 of the requests within all limits (it reaches {attained:.4g})"
    assert judged(attained - 0.01).meets_slo


def test_the_highest_rate_attains_the_share() -> None:
    load = LOAD.model_copy(update={"requests": 200})
    limits = {"ttft_s": {"p90": 0.2}, "tpot_s": {"p90": 0.015}}
    plain = optimize(question(workload=load, slo=Slo.model_validate(limits), confirm={"draws": 0}, **ONE), jobs=1)
    slo = Slo.model_validate({**limits, "attainment": 0.97})
    asked = question(workload=load, slo=slo, confirm={"draws": 0}, **ONE)
    tuned = optimize(asked, jobs=1)
    assert tuned.result.meets_slo
    assert (tuned.result.slo_attainment or 0.0) >= 0.97
    assert tuned.value < plain.value
    candidate = tuned.chosen.candidate
    above = asked.watch(candidate, tuned.deployment, tuned.value * (1 + 3 * asked.study.search.rate_tolerance))
    assert not above.meets_slo, "no higher rate does"


@pytest.mark.parametrize("limits", [{}, {"ttft_s": {"mean": 1.0}}])
def test_a_share_needs_limits_of_single_requests(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"set one, such as ttft_s: {p95: 1.0}"):
        Slo.model_validate({**limits, "attainment": 0.95})


def test_a_share_is_of_all_classes_together() -> None:
    with pytest.raises(ValueError, match="attainment is of all classes together; set it in the slo of the study"):
        RequestClass(name="a", slo=Slo(ttft_s={"p95": 1.0}, attainment=0.95))
