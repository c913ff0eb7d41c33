"""Rates above which ranks that step together hold one another up: against chance, and against simulations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.study import Confirmation, HardwareCount, Search, Study
from simtune.specs.workload import FixedInterval, Gamma, Lognormal, Poisson, Slo, Workload
from simtune.tuner.bounds.best_case import slo_bound
from simtune.tuner.bounds.stalls import mean_step, stalled_rps
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import SAMPLED_CORES, Question
from simtune.tuner.search.candidate_filter import BoundedCandidate, CandidateFilter
from simtune.tuner.space.candidates import space_of

MODEL, CARD = "qwen3-30b-a3b", "h100-sxm"


@pytest.mark.parametrize(("rate", "prompt", "steps"), [(0.02, 10.0, 1), (0.3, 3.0, 1), (0.05, 4.0, 3)])
def test_the_mean_step_is_that_of_requests_that_come_at_random(rate: float, prompt: float, steps: int) -> None:
    draw = np.random.default_rng(int(rate * 100))
    durations, pending = np.empty(200_000), 0
    for i in range(len(durations)):
        durations[i] = prompt if pending else 1.0
        # Prompts that begin in one step end in the same one.
        pending = steps if draw.random() < -math.expm1(-rate * durations[i]) else max(0, pending - 1)
    bound = mean_step(rate, 1.0, prompt, steps)
    assert bound <= durations.mean() * 1.02
    if steps == 1:
        assert bound == pytest.approx(durations.mean(), rel=0.02)
    assert mean_step(0.0, 1.0, prompt, steps) == pytest.approx(1.0)


def question(seed: int, arrivals: Poisson | FixedInterval | Gamma) -> Question:
    draw = np.random.default_rng((5, seed))
    load = Workload(
        name="load",
        requests=600,
        arrivals=arrivals,
        prompt=Lognormal(mean_tokens=float(draw.uniform(500, 5000)), sigma=0.6, max_tokens=16000),
        output=Lognormal(mean_tokens=float(draw.uniform(50, 300)), sigma=0.6, max_tokens=2000),
    )
    study = Study(
        name=f"study-{seed}",
        model=MODEL,
        hardware=(HardwareCount(profile=CARD, devices=8),),
        workload=load.name,
        slo=Slo(ttft_s={"mean": 20.0}, tpot_s={("mean", "p90")[seed % 2]: float(draw.uniform(0.02, 0.05))}),
        objective="goodput",
        engine="vllm-0.24",
        search=Search(
            confirm=Confirmation(draws=0), tp=(1,), pp=(1,), attention_dp=(1, 4, 8), expert_parallel=(True,),
            max_num_seqs=(256,), max_num_batched_tokens=(8192,),
        ),
        seed=seed,
    )  # fmt: skip
    return Question(study, load_model(MODEL), (load_hardware(CARD),), load, None)


def bounded(q: Question) -> list[tuple[BoundedCandidate, float]]:
    """Plans of groups, each with the rate above which its ranks hold one another up."""
    candidates = space_of(q.study).candidates
    plan_cache, plans = PlanCache(q, candidates), []
    for candidate in candidates:
        plan = CandidateFilter(q, plan_cache).check(candidate)
        if isinstance(plan, BoundedCandidate) and not isinstance(plan_cache.settled(candidate), Refused):
            stream = plan_cache.stream(plan.candidate)
            plans.append((plan, stalled_rps(plan.deployment, stream, q.study.slo)))
    return plans


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("arrivals", [Poisson(rate_rps=2.0), FixedInterval(rate_rps=2.0)])
def test_no_simulation_keeps_the_limit_above_it(seed: int, arrivals: Poisson | FixedInterval) -> None:
    q, nearer = question(seed, arrivals), 0
    for plan, stalled in bounded(q):
        if plan.deployment.pools[0].spec.parallelism.attention_dp == 1:
            assert stalled == math.inf, "ranks of their own hold nobody up"
            continue
        stream = plan.plan_cache.stream(plan.candidate)
        proven = slo_bound(plan.deployment, stream, q.study.slo, SAMPLED_CORES)
        if stalled < min(proven.rps, plan.bound_rps):
            nearer += 1
            for above in (1.0, 1.3):
                at_rate = stream.at_rate(stalled * above)
                assert not plan.deployment.simulate(at_rate, q.study.slo, cores=SAMPLED_CORES).meets_slo
    assert nearer > 0, "there were to be plans that the assumption bounds"


def test_it_bounds_plans_in_a_search_if_requests_come_at_random() -> None:
    for arrivals, used in ((Poisson(rate_rps=2.0), True), (Gamma(rate_rps=2.0, cv=2.0), False)):
        q = question(0, arrivals)
        names = set()
        for plan, stalled in bounded(q):
            CandidateFilter(q, plan.plan_cache).refine([plan])
            names.add(plan.row.bounded_by)
            if used:
                assert plan.bound_rps <= stalled
        assert ("stalls" in names) == used
