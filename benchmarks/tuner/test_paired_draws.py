"""Do the highest rates of two plans go up and down together from draw to draw of the requests?

    python -m pytest benchmarks/tuner/test_paired_draws.py -m benchmark_only -s

Of random studies (llama-3.1-8b on two h100-sxm; lengths, SLO and number of requests drawn) four plans each are bisected
to their highest rate on six draws. Printed is the standard deviation, over draws, of the logarithm of one plan's rate
and of the ratio of two, each times the root of the requests: of pairs within 5 % of each other on the mean, by the
statistic of the SLO and by whether the same limit ends both rates; beside what `simtune.tuner.doubt.draw_spread` allows
for. Its constants were chosen on the first 12 studies.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.study import HardwareCount, Search, Study
from simtune.specs.workload import Lognormal, Poisson, Slo, Workload
from simtune.tuner.doubt.draw_spread import TOGETHER, DrawSpread
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.search.candidate_filter import BoundedCandidate, CandidateFilter
from simtune.tuner.search.climb import Simulation
from simtune.tuner.search.plan_judge import tightest
from simtune.tuner.space.expressible import space_for

pytestmark = pytest.mark.benchmark_only

STUDIES, PLANS, DRAWS, NEAR, CLOSE = 40, 4, 6, 0.05, 1.003


class OverDraws(NamedTuple):
    """The highest rates of a plan on draws, and the limits that end them."""

    log_rates: np.ndarray[tuple[int], np.dtype[np.float64]]
    limits: tuple[str, ...]


def random_study(seed: int) -> Question:
    """Two cards, mixed pools or a prefill and a decode pool."""
    draw = np.random.default_rng((77, seed))
    statistic = str(draw.choice(["p99", "p90", "mean"]))
    workload = Workload(
        name="load",
        requests=int(draw.choice([400, 1000, 2000])),
        arrivals=Poisson(rate_rps=5.0),
        prompt=Lognormal(mean_tokens=float(draw.uniform(100, 4000)), sigma=0.8, max_tokens=8000),
        output=Lognormal(mean_tokens=float(draw.uniform(50, 400)), sigma=0.8, max_tokens=1500),
    )
    study = Study(
        name=f"study-{seed}",
        model="llama-3.1-8b",
        hardware=(HardwareCount(profile="h100-sxm", devices=2),),
        workload=workload.name,
        slo=Slo(
            ttft_s={statistic: float(draw.uniform(0.2, 3.0))}, tpot_s={statistic: float(draw.uniform(0.010, 0.04))}
        ),
        objective="goodput",
        search=Search(
            layouts=("mixed", "prefill-decode"),
            tp=(1, 2),
            pp=(1,),
            max_num_seqs=(64, 256),
            max_num_batched_tokens=(1024, 8192),
        ),
        seed=seed,
    )
    return Question(study, load_model("llama-3.1-8b"), (load_hardware("h100-sxm"),), workload, None)


def over_draws(question: Question, plan: BoundedCandidate) -> OverDraws | None:
    """Return the highest rates of a plan; None if it misses the SLO at any."""
    rates, limits = [], []
    for draw in range(DRAWS):
        stream = question.draws.stream(question.num_requests(plan.candidate), draw)
        low, high, limit = plan.bound_rps * 0.02, plan.bound_rps * 1.05, ""
        if not Simulation(plan.deployment, stream, question.study.slo, low).run().met:
            return None
        while high > low * CLOSE:
            rate = math.sqrt(low * high)
            finding = Simulation(plan.deployment, stream, question.study.slo, rate).run()
            limit = tightest(finding.summary) or limit
            low, high = (rate, high) if finding.met else (low, rate)
        rates.append(math.log(low))
        limits.append(limit)
    return OverDraws(np.array(rates), tuple(limits))


class Deviations(NamedTuple):
    """Standard deviations of logarithms over draws, each times the root of the requests."""

    alone: dict[str, list[float]]
    """Rates of plans by the statistic of the SLO."""
    near: dict[str, list[float]]
    """Ratios of plans that differ by at most NEAR on the mean, by the statistic of the SLO."""
    limits: dict[str, list[float]]
    """The same ratios, by the limits that end the rates of the two."""


def measured() -> Deviations:
    """Bisect plans of random studies to their highest rates on several draws."""
    found = Deviations(defaultdict(list), defaultdict(list), defaultdict(list))
    for seed in range(100, 100 + STUDIES):
        question = random_study(seed)
        (_, statistic, _), *_ = question.study.slo.limits()
        candidates = space_for(question).candidates
        _, plans, _ = CandidateFilter(question, PlanCache(question, candidates)).sorted_by_kind(candidates)
        order = np.random.default_rng(seed).permutation(len(plans))[:PLANS]
        runs = [run for run in (over_draws(question, plans[at]) for at in order) if run is not None]
        root = math.sqrt(question.requests)
        found.alone[statistic] += [float(run.log_rates.std(ddof=1)) * root for run in runs]
        for a, b in itertools.combinations(runs, 2):
            ratio = a.log_rates - b.log_rates
            if abs(float(ratio.mean())) <= NEAR:
                deviation = float(ratio.std(ddof=1)) * root
                found.near[statistic].append(deviation)
                found.limits["the same limit" if a.limits == b.limits else "other limits"].append(deviation)
    return found


def test_rates_go_up_and_down_together(record: Recorder) -> None:
    found = measured()
    allowed = {statistic: DrawSpread.of([Slo(tpot_s={statistic: 0.1})]).alone for statistic in found.alone}
    for statistic, values in sorted(found.alone.items()):
        show(record, f"{statistic} alone", values, allowed[statistic])
    for statistic, values in sorted(found.near.items()):
        show(record, f"{statistic} of near plans", values, TOGETHER * allowed[statistic])
    for name, values in sorted(found.limits.items()):
        show(record, f"near plans, {name}", values, None)
    assert found.alone
    assert found.near


def show(record: Recorder, name: str, values: list[float], allowed: float | None) -> None:
    """Print deviations beside the one that searches allow for; None where it is not the same for all."""
    above = ""
    if allowed is not None:
        above = f"; above {allowed:.2f}: {sum(value > allowed for value in values) / len(values):.0%}"
    p90 = float(np.quantile(values, 0.9))
    words = f"median {statistics.median(values):.2f}, p90 {p90:.2f}, largest {max(values):.2f}"
    print(f"\n{name:28} {len(values):3}: {words}{above}", end="")
    record(f"{name}, median deviation times the root of the requests", statistics.median(values), "", "lower")
