"""Random small studies against simulating every plan of theirs: nothing is better than the search says it could be."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from simtune.errors import Infeasible
from simtune.results.result import Result
from simtune.sim.deployment import Deployment
from simtune.specs.adapters import Adapters
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Hardware
from simtune.specs.plan import KvLink
from simtune.specs.study import Confirmation, HardwareCount, Search, Study
from simtune.specs.workload import FixedInterval, Lognormal, Poisson, Slo, Workload
from simtune.tuner.bounds.best_case import slo_bound, sustained_rps
from simtune.tuner.objectives import Judged, RateObjective
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import SAMPLED_CORES, Question
from simtune.tuner.search import short_runs
from simtune.tuner.search.best_first import BestFirst, optimize
from simtune.tuner.search.candidate_filter import BoundedCandidate
from simtune.tuner.search.climb import SimulationFinding, longer, too_short
from simtune.tuner.search.plan_judge import PlanJudge
from simtune.tuner.space.candidates import Candidate, space_of
from simtune.tuner.trial import Tuned
from tests.tuner.fragments import with_fragments, with_variants

MODEL = load_model("llama-3.1-8b")
LOCAL: tuple[dict[str, Any], ...] = ({"below_tokens": 300}, {"below_tokens": 0, "queue_above": 1})


@cache
def hardware(name: str) -> Hardware:
    return load_hardware(name)


def random_question(seed: int, most_devices: int) -> Question:
    """Mixed pools, prefill and decode pools, or both, on one or two kinds of hardware, under a load and an SLO that are
    drawn too."""
    draw = np.random.default_rng(seed)

    def one_of(*choices: Any) -> Any:
        return choices[int(draw.integers(len(choices)))]

    kinds = one_of(("h100-sxm",), ("l40s",), ("h100-sxm", "l40s"))
    devices = [int(n) for n in draw.integers(2, most_devices // len(kinds) + 1, len(kinds))]
    statistic = one_of("p99", "p90", "mean")
    workload = Workload(
        name="load",
        requests=int(draw.integers(40, 120)),
        arrivals=Poisson(rate_rps=float(draw.uniform(2, 20))),
        prompt=Lognormal(mean_tokens=float(draw.uniform(100, 2000)), sigma=0.8, max_tokens=6000),
        output=Lognormal(mean_tokens=float(draw.uniform(10, 200)), sigma=0.8, max_tokens=1000),
    )
    study = Study(
        name=f"study-{seed}",
        model=MODEL.name,
        hardware=tuple(HardwareCount(profile=kind, devices=n) for kind, n in zip(kinds, devices, strict=True)),
        workload=workload.name,
        slo=Slo(
            ttft_s={statistic: float(draw.uniform(0.1, 1.5))}, tpot_s={statistic: float(draw.uniform(0.015, 0.06))}
        ),
        objective=one_of("goodput", "goodput_per_gpu", "goodput_per_dollar", "gpus", "e2el", "usd_per_million_tokens"),
        search=Search(
            confirm=Confirmation(draws=0),
            layouts=one_of(("mixed",), ("prefill-decode",), ("mixed", "prefill-decode")),
            tp=(1, 2),
            pp=one_of((1,), (1, 2)),
            max_num_seqs=(8, 64),
            max_num_batched_tokens=(512, 2048),
        ),
        seed=seed,
    )
    if "prefill-decode" in study.search.layouts:
        study = study.model_copy(update={"link": KvLink(path="intra_node")})
    return Question(study, MODEL, tuple(map(hardware, kinds)), workload, None)


def question_with_fragments(seed: int) -> Question:
    """A random study with one size of batch and random fragments, whose objective does not depend on a run's length."""
    q = random_question(seed, 4)
    objectives = ("goodput", "goodput_per_gpu", "goodput_per_dollar", "gpus")
    objective = q.study.objective if q.study.objective in objectives else objectives[seed % 4]
    search = {"pp": (1,), "max_num_seqs": (32,), "max_num_batched_tokens": (2048,)}
    update = {"objective": objective, "search": q.study.search.model_copy(update=search)}
    return with_fragments(replace(q, study=q.study.model_copy(update=update)), seed)


def deployments(q: Question) -> list[tuple[Candidate, Deployment, float]]:
    """Every plan that fits, with costs of its own, and the rate that it sustains at most."""
    candidates = space_of(q.study).candidates
    plan_cache, found = PlanCache(q, candidates), []
    for candidate in candidates:
        settled = plan_cache.settled(candidate)
        if not isinstance(settled, Refused):
            deployment = plan_cache.deployment(settled)
            found.append((settled, deployment, plan_cache.capacity(settled).rps))
    return found


def check(q: Question) -> tuple[int, int] | None:
    """(plans simulated, plans) of a search that no plan disproves; None where no plan meets the SLO."""
    try:
        tuned = optimize(q, jobs=1)
    except Infeasible:
        for candidate, deployment, sustained in deployments(q):
            rates = [sustained * share for share in (0.02, 0.3, 0.9)] if q.searches_rate else [None]
            for rate in rates:
                result = _lasting(q, candidate, deployment, rate)
                assert too_short(result) or not result.meets_slo, (candidate.name, rate)
        return None
    for plan in deployments(q):
        _not_better(q, tuned, *plan)
    assert all(len(row.tried) == len(set(row.tried)) for row in tuned.rows)
    return sum(row.simulations > 0 for row in tuned.rows), len(tuned.rows)


def _lasting(q: Question, candidate: Candidate, deployment: Deployment, rate_rps: float | None) -> Result:
    """The run of the search's draw at a rate, or at the load's own, that lasts ten lifetimes if it can."""
    stream = q.stream(candidate)
    while True:
        at_rate = stream if rate_rps is None else stream.at_rate(rate_rps)
        result = deployment.simulate(at_rate, q.study.slo, cores=SAMPLED_CORES)
        more = longer(result, stream.arrivals)
        if more is None:
            return result
        stream = q.draws.stream(more)


def _keeps(q: Question, candidate: Candidate, deployment: Deployment, rate_rps: float) -> bool:
    """Whether each limit holds, by the latencies of a run of the search's draw that lasts ten lifetimes."""
    result = _lasting(q, candidate, deployment, rate_rps)
    columns = {"ttft": result.ttft_s, "tpot": result.tpot_s, "e2el": result.e2el_s}
    for metric, statistic, limit in q.study.slo.limits():
        values = columns[metric][np.isfinite(columns[metric])]
        seen = values.mean() if statistic == "mean" else np.percentile(values, float(statistic[1:]))
        if seen > limit:
            return False
    return not too_short(result)


def _not_better(q: Question, tuned: Tuned, candidate: Candidate, deployment: Deployment, sustained: float) -> None:
    """No plan keeps the SLO above what the search says that it could reach, whether it was simulated or ruled out.

    Judged are the latencies of runs that last ten lifetimes, at rates above the bound of all plans.
    """
    facts, objective = q.facts(candidate, q.stream(candidate)), q.objective
    (row,) = (row for row in tuned.rows if row.candidate == candidate)
    if isinstance(objective, RateObjective):
        assert row.best is None or row.best <= tuned.bound
        rate = objective.rate_for(facts, tuned.bound)
        for higher in (rate * (1 + 1e-9), rate * 1.1, rate * 1.4):
            if higher <= sustained:
                assert not _keeps(q, candidate, deployment, higher), (candidate.name, higher)
        return
    offered = 0.0 if q.workload.batch else q.stream(candidate).offered_rate_rps
    assert offered is not None
    result = _lasting(q, candidate, deployment, None)
    if on_all := [tried.requests for tried in row.tried if tried.all_cores and tried.requests]:
        # Confirmed on all cores, whose run has more requests.
        result = deployment.simulate(q.draws.stream(max(on_all)), q.study.slo)
    if result.meets_slo and offered <= sustained:
        summary = result.summary()
        mean_s, makespan_s = summary.metrics["e2el"].mean, summary.duration_s
        judged = Judged(offered, summary.output_tokens_per_s, mean_s, makespan_s=makespan_s)
        assert not objective.better(objective.value(facts, judged), tuned.bound, 1e-9), candidate.name


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_better_than_the_search_says(seed: int) -> None:
    simulated = check(random_question(seed, 4))
    assert simulated is None or simulated[0] <= simulated[1]


@pytest.mark.parametrize(("seed", "objective"), [(0, "makespan"), (4, "makespan"), (7, "usd_per_million_tokens")])
def test_no_plan_ends_a_batch_sooner_than_the_search_says(seed: int, objective: Any) -> None:
    q = random_question(seed, 4)
    load = q.workload.model_copy(update={"batch": True, "arrivals": FixedInterval(rate_rps=300.0)})
    study = q.study.model_copy(update={"objective": objective, "slo": Slo()})
    counts = check(replace(q, workload=load, study=study))
    assert counts is not None
    assert counts[0] < counts[1], "some plans are ruled out by their bounds"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_no_plan_that_a_short_run_ruled_out_is_better(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a quarter and a sixteenth, which studies of this size are too short for."""
    monkeypatch.setattr(short_runs, "LEAST", 100)
    q = random_question(3000 + seed, 8)
    load = q.workload.model_copy(update={"requests": 1600})
    objective = ("goodput", "goodput_per_gpu")[seed % 2]
    check(replace(q, workload=load, study=q.study.model_copy(update={"objective": objective})))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_no_plan_with_fragments_is_better_than_the_search_says(seed: int) -> None:
    check(question_with_fragments(seed))


class Needless:
    """Counts simulations that a bound of the plan, or another simulation, could have told the result of.

    That which says by how much an SLO is missed that bounds alone rule out decides nothing, and is not counted.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.simulations, self.told = 0, list[str]()
        self._seen: list[tuple[BoundedCandidate, float | None, SimulationFinding]] = []
        simulated, begun = PlanJudge.simulated, BestFirst.run

        def counted(judge: PlanJudge, plan: BoundedCandidate, rate: float | None) -> SimulationFinding:
            finding = simulated(judge, plan, rate)
            if not self._over:
                self._count(judge, plan, rate, finding)
            return finding

        def run(search: BestFirst) -> bool:
            self._over = False
            self._seen.clear()
            interrupted = begun(search)
            self._over = True
            return interrupted

        monkeypatch.setattr(PlanJudge, "simulated", counted)
        monkeypatch.setattr(BestFirst, "run", run)

    def _count(self, judge: PlanJudge, plan: BoundedCandidate, rate: float | None, finding: SimulationFinding) -> None:
        q, stream = judge.question, judge.plan_cache.stream(plan.candidate)
        offered = stream.offered_rate_rps if rate is None else rate
        bound = slo_bound(plan.deployment, stream, q.study.slo, SAMPLED_CORES)
        assert offered is not None
        if bound.rps < offered:
            self.told.append(f"{plan.candidate.name} at {offered:.4g}: {bound}")
        for other, r, earlier in self._seen:
            no_higher = r == rate or (r is not None and rate is not None and r <= rate and not earlier.met)
            if no_higher and other is not plan and plan.ruled_out_by(other, earlier):
                self.told.append(f"{plan.candidate.name} at {offered:.4g}: {other.candidate.name}")
        self._seen.append((plan, rate, finding))
        self.simulations += 1


@pytest.mark.parametrize("seed", [1014, 1053, 1056])
def test_nothing_is_simulated_that_could_have_been_told(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a plan's own SLO says more than that of its kind, and where the latencies of several plans are the same."""
    needless = Needless(monkeypatch)
    optimize(random_question(seed, 16), jobs=1)
    assert needless.simulations
    assert needless.told == []


@pytest.mark.slow
def test_of_many_studies_nothing_is_simulated_that_could_have_been_told(monkeypatch: pytest.MonkeyPatch) -> None:
    needless = Needless(monkeypatch)
    for seed in range(2000, 2060):
        with suppress(Infeasible):
            optimize(random_question(seed, 16), jobs=1)
    assert needless.simulations > 300
    assert needless.told == []


@pytest.mark.slow
def test_over_many_studies_few_plans_are_simulated() -> None:
    """200 studies on up to 16 GPUs: none is lost, and the share of the plans that was simulated is small."""
    counts = [counted for seed in range(1000, 1200) if (counted := check(random_question(seed, 16))) is not None]
    assert len(counts) > 100
    assert float(np.mean([simulated / plans for simulated, plans in counts])) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize(("fragment", "seed"), [(fragment, seed) for fragment in LOCAL for seed in (1, 2)])
def test_no_plan_whose_decode_instances_compute_prompts_is_better(fragment: dict[str, Any], seed: int) -> None:
    q = random_question(seed, 4)
    update = {"pp": (1,), "tp": (1,), "max_num_seqs": (32,), "layouts": ("prefill-decode",)}
    study = q.study.model_copy(
        update={
            "objective": "goodput",
            "search": q.study.search.model_copy(update=update),
            "link": KvLink(path="intra_node"),
        }
    )
    asked = with_variants(replace(q, study=study), {}, {"local_prefill": fragment})
    check(asked)
    for candidate, deployment, sustained in deployments(asked):
        rate = sustained_rps(deployment, asked.stream(candidate, sustained))
        assert rate == pytest.approx(sustained, rel=0.2), candidate.name


ADAPTED = tuple({"lora": {"rank": 16, "slots": slots, "host_slots": 6}} for slots in (2, 6))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "layout", "stages"), [(3, "mixed", 2), (5, "prefill-decode", 1)])
def test_no_plan_with_adapters_is_better_than_the_search_says(seed: int, layout: Any, stages: int) -> None:
    """Slots that virtual engines share, and those of prefill and of decode pools."""
    q = random_question(seed, 4)
    search = {"layouts": (layout,), "tp": (1,), "pp": (stages,), "max_num_seqs": (32,)}
    update = {"objective": "goodput", "search": q.study.search.model_copy(update=search)}
    if layout == "prefill-decode":
        update["link"] = KvLink(path="intra_node")
    load = q.workload.model_copy(update={"adapters": Adapters(count=6, zipf=0.5)})
    asked = with_variants(replace(q, study=q.study.model_copy(update=update), workload=load), *ADAPTED)
    slots = {pool.lora.slots for _, deployment, _ in deployments(asked) for pool in deployment.plan.pools if pool.lora}
    assert slots == {2, 6}
    assert check(asked) is not None
