"""Ranks that come and go as a variant of a search: bounds that no run exceeds, the best plan of all, bad input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.bounds import lines_below
from simtune.errors import Infeasible, SpecError, UsageError
from simtune.specs.hardware import Link
from simtune.specs.plan import KvLink
from simtune.specs.study import Confirmation, HardwareCount, Search, Study
from simtune.specs.workload import Lognormal, Piecewise, Segment, Slo, Workload
from simtune.tuner.bounds import attainment_bound, rate_bound
from simtune.tuner.bounds.best_case import sustained_rps
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.climb import Simulation
from simtune.tuner.space.candidates import Candidate, space_of
from simtune.tuner.trial import judged_of
from simtune.workload.requests import RequestStream
from tests.costs.made_up import hardware, model, moe

EXPERTS = model(feed_forward=moe())
NEAR = hardware(host_step_s=1e-3, memory_bytes=4e9)
FAR = NEAR.model_copy(
    update={
        "device": NEAR.device.model_copy(update={"devices_per_node": 2}),
        "links": {**NEAR.links, "inter_node": Link(bytes_per_s=2e6, latency_s=1e-3, source="made up")},
    }
)
"""Two devices in a node and a slow link between nodes: steps on two ranks take less than steps on four."""
MOST = 4
RANKS = {"attention_dp": MOST, "expert_parallel": True, "expert_replicas": 24, "elastic_experts": True}


def workload(**keys: Any) -> Workload:
    segments = tuple(Segment(for_s=3, rate_rps=rate) for rate in (10, 60, 5))
    load = {
        "requests": 200,
        "arrivals": Piecewise(segments=segments),
        "prompt": Lognormal(mean_tokens=100, sigma=0.7, max_tokens=600),
        "output": Lognormal(mean_tokens=40, sigma=0.6, max_tokens=200),
    }
    return Workload(name="rush", **{**load, **keys})


def question(*variants: dict[str, Any], far: bool = False, load: Workload | None = None, **keys: Any) -> Question:
    search = {
        "confirm": Confirmation(draws=0), "tp": (1,), "pp": (1,), "attention_dp": (MOST,), "expert_parallel": (True,),
        "max_num_seqs": (8,), "max_num_batched_tokens": (256,), "variants": variants, **keys.pop("search", {}),
    }  # fmt: skip
    study: dict[str, Any] = {
        "name": "scaled",
        "model": EXPERTS.name,
        "hardware": (HardwareCount(profile="made-up", devices=8),),
        "workload": "rush",
        "slo": Slo(ttft_s={"p95": 2.0}, tpot_s={"p95": 0.5}),
        "objective": "gpu_hours_per_million_tokens",
        "search": Search(**search),
    }
    return Question(Study(**{**study, **keys}), EXPERTS, (FAR if far else NEAR,), load or workload(), None)


def scaling(draw: np.random.Generator, **keys: Any) -> dict[str, Any]:
    """A variant whose ranks come and go by a rule that is drawn."""
    rules: list[dict[str, Any]] = [
        {"kind": "rate", "requests_per_s": float(draw.uniform(5, 25))},
        {"kind": "target", "watch": "under_way", "load": float(draw.uniform(1, 8))},
        {"kind": "thresholds", "watch": "under_way", "up": float(draw.uniform(3, 8)), "down": 2.0},
        {"kind": "sla", "ttft_s": 0.5, "tpot_s": 0.05},
    ]
    least = int(draw.integers(1, MOST))
    autoscaling = {
        "rule": rules[int(draw.integers(len(rules)))],
        "startup_s": float(draw.uniform(0, 0.5)),
        "every_s": float(draw.uniform(0.2, 1)),
        "stabilise_s": float(draw.choice([0.0, 1.0])),
        "min_ranks": least,
        "initial_ranks": int(draw.integers(least, MOST + 1)),
        "pause_s": float(draw.choice([0.0, 0.05])),
    }
    return {"parallelism": RANKS, "autoscaling": autoscaling, **keys}


FIXED = {"parallelism": RANKS, "name": "fixed"}


def simulated(q: Question) -> dict[str, float | None]:
    """Objective of every plan that fits, simulated by itself; None if it misses the SLO."""
    candidates = space_of(q.study).candidates
    plan_cache, found = PlanCache(q, candidates), dict[str, float | None]()
    for candidate in candidates:
        settled = plan_cache.settled(candidate)
        if isinstance(settled, Refused):
            continue
        deployment, stream = q.deploy(settled, plan_cache.max_model_len), plan_cache.stream(settled)
        finding = Simulation(deployment, stream, q.study.slo, None, draws=q.draws).run()
        judged = judged_of(finding.summary, finding.summary.offered_rate_rps)
        found[settled.name] = q.objective.value(q.facts(settled, stream), judged) if finding.met else None
    return found


def test_decode_ranks_come_and_go_beside_prefill_instances() -> None:
    draw = np.random.default_rng(5)
    by_load = scaling(draw, name="by-load")
    rule = {"kind": "target", "watch": "under_way", "load": 3.0}
    by_load["autoscaling"] |= {"rule": rule, "min_ranks": 1, "initial_ranks": 1}
    decode = {"name": "decode", "parallelism": RANKS, "decode": {"autoscaling": by_load["autoscaling"]}}
    link = KvLink(bytes_per_s=1e9, setup_s=1e-3, descriptor_s=0.0)
    search, slo = {"layouts": ("prefill-decode",)}, Slo(ttft_s={"p95": 9.0})
    q = question(FIXED, decode, search=search, link=link, slo=slo)
    met = {name: value for name, value in simulated(q).items() if value is not None}
    assert len(met) == 2
    tuned = optimize(q, jobs=1)
    assert "v-decode" in tuned.chosen.candidate.name
    assert tuned.value == pytest.approx(min(met.values()))


@pytest.mark.parametrize("seed", range(6))
def test_the_chosen_plan_is_the_best_of_all_that_are_simulated(seed: int) -> None:
    draw = np.random.default_rng(seed)
    variants = [FIXED, *(scaling(draw, name=f"rule-{n}") for n in range(3))]
    slo = Slo(ttft_s={"p95": float(draw.uniform(0.3, 3))}, tpot_s={"p95": float(draw.uniform(0.03, 0.2))})
    objective = ("gpu_hours_per_million_tokens", "gpus", "e2el")[seed % 3]
    q = question(*variants, far=seed % 2 == 1, slo=slo, objective=objective, seed=seed)
    met = {name: value for name, value in simulated(q).items() if value is not None}
    try:
        tuned = optimize(q, jobs=1)
    except Infeasible:
        assert not met
        return
    best = max(met.values(), key=lambda value: q.objective.sign * value)
    assert tuned.value == pytest.approx(best, rel=1e-9), (tuned.chosen.candidate.name, met)
    for row in tuned.rows:
        value = met.get(row.candidate.name)
        if value is not None:
            assert row.best is not None
            assert not q.objective.better(value, row.best, 1e-9), row.candidate.name


def at_once(stream: RequestStream) -> RequestStream:
    assert stream.arrival_s is not None
    return replace(stream, arrival_s=np.zeros(len(stream)))


@pytest.mark.parametrize("far", [False, True])
def test_bounds_leave_a_plan_what_it_reaches(far: bool) -> None:
    """The limits are the very latencies of the run, so a bound below its rate would be wrong; nor is more served per
    second than the capacity, or with fewer GPU-hours than the work takes. The costs of all ranks alone would be wrong
    where fewer ranks step faster."""
    changed, closest, exceeded = 0, 0.0, 0
    for seed in range(16):
        q = question(scaling(np.random.default_rng(seed)), far=far, seed=seed)
        candidates = space_of(q.study).candidates
        candidate = candidates[0]
        plan_cache = PlanCache(q, candidates)
        settled = plan_cache.settled(candidate)
        assert isinstance(settled, Candidate)
        deployment, stream = plan_cache.deployment(settled), plan_cache.stream(settled)
        result = deployment.simulate(stream)
        changed += bool(result.outcome.rank_turns)
        slo = Slo(
            ttft_s={"p90": float(np.percentile(result.ttft_s, 90)), "mean": float(result.ttft_s.mean())},
            tpot_s={"p90": float(np.nanpercentile(result.tpot_s, 90))},
        )
        offered = stream.offered_rate_rps
        assert offered is not None
        assert rate_bound(deployment, stream, slo).rps >= offered * (1 - 1e-9)
        of_one = Slo(ttft_s={"p50": float(np.median(result.ttft_s))})
        share = deployment.simulate(stream, of_one).slo_attainment
        assert share is not None
        assert attainment_bound(deployment, stream, of_one) >= share
        capacity_rps = sustained_rps(deployment, stream)
        full = deployment.simulate(at_once(stream))
        served_rps = len(stream) / float(full.finish_s.max())
        assert served_rps <= capacity_rps * (1 + 1e-9)
        of_all_ranks = replace(deployment, pools=(replace(deployment.pools[0], by_ranks={}),))
        exceeded += served_rps > sustained_rps(of_all_ranks, stream)
        (use,) = full.summary(noise=False).autoscaling
        least_h = deployment.plan.num_devices * len(stream) / capacity_rps / 3600
        assert use.gpu_hours >= least_h * (1 - 1e-9)
        closest = max(closest, served_rps / capacity_rps)
    assert changed > 8, "ranks came or went in most of these runs"
    assert closest > 0.3, "the bound is no more than three times what is served"
    assert bool(exceeded) == far


def test_the_bound_takes_the_least_of_all_numbers_of_ranks() -> None:
    """Where fewer ranks step faster, the costs of all ranks would promise too little."""
    rates = []
    by_load = scaling(np.random.default_rng(0))
    by_load["autoscaling"] |= {"min_ranks": 1, "initial_ranks": 1}
    for variant in (FIXED, by_load):
        q = question(variant, far=True)
        plan_cache = PlanCache(q, space_of(q.study).candidates)
        settled = plan_cache.settled(space_of(q.study).candidates[0])
        assert isinstance(settled, Candidate)
        rates.append(plan_cache.capacity(settled).rps)
        assert sustained_rps(plan_cache.deployment(settled), q.capacity_stream(settled)) == pytest.approx(rates[-1])
    assert rates[1] > 1.01 * rates[0]


LINES = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=4).map(lambda lines: [(0.5, 0.0), *lines])


@given(st.lists(LINES, min_size=1, max_size=3), st.floats(0, 100))
def test_lines_below_several_lists_are_below_each(several: list[list[tuple[float, float]]], tokens: float) -> None:
    lines = lines_below(several)
    highest = max(c0 + c1 * tokens for c0, c1 in lines)
    lowest = min(max(c0 + c1 * tokens for c0, c1 in of_one) for of_one in several)
    assert highest <= lowest * (1 + 1e-9)
    assert [c1 for _, c1 in lines] == sorted({c1 for _, c1 in lines})
    if len(several) == 1:
        assert highest == pytest.approx(lowest)


def test_plans_count_the_gpus_of_all_ranks_and_hold_those_of_the_fewest() -> None:
    q = question(scaling(np.random.default_rng(3)), search={"instances": (2,)})
    (candidate,) = space_of(q.study).candidates
    (pool,) = candidate.pools
    assert pool.scaling is not None
    assert pool.scaling.min_ranks is not None
    assert (candidate.num_gpus, pool.least_devices) == (2 * MOST, 2 * pool.scaling.min_ranks)
    assert candidate.scales


def test_ranks_without_room_for_all_experts_do_not_fit() -> None:
    tight = {**scaling(np.random.default_rng(0)), "parallelism": {**RANKS, "expert_replicas": 8}}
    tight["autoscaling"] = {**tight["autoscaling"], "min_ranks": 1}
    q = question(tight)
    plan_cache = PlanCache(q, space_of(q.study).candidates)
    refused = plan_cache.settled(space_of(q.study).candidates[0])
    assert isinstance(refused, Refused)
    assert "with 1 of 4 data-parallel ranks" in refused.reason


def test_a_confidence_is_not_judged() -> None:
    slo = Slo(ttft_s={"p95": 2.0}, confidence=0.9)
    with pytest.raises(UsageError, match="errors of operators are not judged of instances whose ranks come and go"):
        optimize(question(scaling(np.random.default_rng(0)), slo=slo))


def test_a_fragment_without_such_ranks_is_refused_with_its_place() -> None:
    text = (
        "schema: simtune/study@1\nname: scaled\nmodel: llama-3.1-8b\nhardware: {profile: l40s, devices: 4}\n"
        "workload: load.yaml\nslo: {ttft_s: {p95: 1.0}}\nobjective: gpu_hours_per_million_tokens\n"
        "search: {variants: [{autoscaling: {rule: {kind: rate, requests_per_s: 4}, startup_s: 5, min_ranks: 2}}]}\n"
    )
    with pytest.raises(SpecError) as error:
        Study.from_text(text)
    assert "search.variants.0.autoscaling.min_ranks: requires instances that go on with fewer ranks" in str(error.value)
