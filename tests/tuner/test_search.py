"""The search against exhaustive trial, its bound against the simulator, and its answers when there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simtune.costs.compiled import CompiledCosts
from simtune.errors import Infeasible, UsageError
from simtune.sim.deployment import Deployment
from simtune.specs.catalog import load_hardware, load_model, load_workload
from simtune.specs.study import Confirmation, HardwareCount, Search, Study
from simtune.specs.workload import (
    ClosedLoop,
    FixedLength,
    Lognormal,
    Poisson,
    RequestClass,
    SharedPrefix,
    Slo,
    Workload,
)
from simtune.tuner.bounds import Capacity
from simtune.tuner.doubt.robust import robust
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.search import rate_sweep
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.course import SearchCourse
from simtune.tuner.space.candidates import Candidate, space_of
from simtune.tuner.space.expressible import space_for
from simtune.tuner.trial import Confirmed
from simtune.workload.requests import RequestStream

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")

LOAD = Workload(
    name="load",
    requests=400,
    arrivals=Poisson(rate_rps=4.0),
    prompt=Lognormal(mean_tokens=900, sigma=0.7, max_tokens=6000),
    output=Lognormal(mean_tokens=120, sigma=0.8, max_tokens=1500),
)


ON_ONE_DRAW = Confirmation(draws=0)
"""What a search does with the draw it is given; `tests/tuner/test_confirm.py` has the fresh ones."""


def question(
    *, slo: Slo | None = None, workload: Workload = LOAD, devices: int = 2, model: Any = MODEL, **given: Any
) -> Question:
    search: dict[str, Any] = {
        "confirm": ON_ONE_DRAW,
        "tp": (1, 2),
        "pp": (1, 2),
        "max_num_seqs": (8, 64),
        "max_num_batched_tokens": (512, 2048),
    }
    objective = given.pop("objective", "goodput_per_gpu")
    study = Study(
        name="study",
        model=model.name,
        hardware=(HardwareCount(profile="h100-sxm", devices=devices),),
        workload=workload.name,
        slo=slo or Slo(ttft_s={"p99": 0.5}, tpot_s={"p99": 0.025}),
        objective=objective,
        search=Search(**{**search, **given}),
    )
    return Question(study, model, (HARDWARE,), workload, None)


def capacity_rps(deployment: Deployment, stream: RequestStream) -> float:
    """Upper bound on the requests per second that the first pool of a deployment serves."""
    costs = deployment.costs
    assert isinstance(costs, CompiledCosts)
    return Capacity(costs.tables, stream, 8192).rps(deployment.pools[0])


def candidates(q: Question) -> tuple[Candidate, ...]:
    return space_of(q.study).candidates


def test_finds_what_exhaustive_trial_finds() -> None:
    """Every candidate on a fine ladder of rates: none does better than the chosen one by more than the tolerances."""
    q = question()
    tuned = optimize(q, jobs=1)
    tolerance = 1 + q.study.search.rate_tolerance
    best = 0.0
    for candidate in candidates(q):
        deployment = q.deploy(candidate, tuned.deployment.max_model_len)
        rate = tuned.value * candidate.num_gpus / tolerance**6
        while q.judge(candidate, deployment, rate * tolerance).meets_slo:
            rate *= tolerance
            best = max(best, rate / candidate.num_gpus)
    assert best <= tuned.value * tolerance**3
    assert tuned.result.meets_slo
    assert tuned.result.offered_rate_rps == pytest.approx(tuned.value * tuned.chosen.candidate.num_gpus)


def test_every_candidate_is_kept_with_a_reason() -> None:
    q = question(max_num_seqs=(8, 64, 1024))
    tuned = optimize(q, jobs=1)
    space = space_for(q)
    assert sorted(r.candidate.name for r in tuned.rows) == sorted(c.name for c in space.candidates)
    assert all(r.reason for r in tuned.rows)
    assert [r.status for r in tuned.rows].count("chosen") == 1
    assert tuned.rows[0].status == "chosen"
    # 1,024 seats do not go with a budget of 512 tokens: an engine would refuse it.
    assert sum(space.refused.values()) == len(candidates(q)) - len(space.candidates) > 0
    seats = [
        r.candidate.decoding.max_num_seqs for r in tuned.rows if r.candidate.decoding.max_num_batched_tokens == 512
    ]
    assert set(seats) == {8, 64}
    for row in tuned.rows:
        if row.status in ("chosen", "feasible"):
            assert row.rate_rps is not None
            assert row.rate_bound_rps is not None
            assert row.rate_rps <= row.rate_bound_rps * (1 + 1e-9)


def test_the_answer_does_not_depend_on_the_number_of_processes() -> None:
    q = question(max_num_seqs=(64,), max_num_batched_tokens=(512, 2048))
    alone, together = optimize(q, jobs=1), optimize(q, jobs=2)
    assert [(r.candidate, r.status, r.reason, r.summary) for r in alone.rows] == [
        (r.candidate, r.status, r.reason, r.summary) for r in together.rows
    ]


@pytest.mark.parametrize("objective", ["gpus", "e2el"])
def test_objectives_at_a_given_load(objective: str) -> None:
    q = question(
        objective=objective,
        devices=4,
        tp=(1, 2, 4),
        pp=(1,),
        workload=LOAD.model_copy(update={"arrivals": Poisson(rate_rps=60.0)}),
    )
    tuned = optimize(q, jobs=1)
    assert tuned.result.meets_slo
    assert tuned.result.offered_rate_rps == pytest.approx(60.0, rel=0.15)
    judged = {c.name: q.watch(c, q.deploy(c, tuned.deployment.max_model_len), None) for c in candidates(q)}
    meeting = {name for name, result in judged.items() if result.meets_slo}
    if objective == "gpus":
        fewest = min(c.num_gpus for c in candidates(q) if c.name in meeting)
        assert tuned.chosen.candidate.num_gpus == tuned.value == fewest
        assert fewest > 1, "the load was to need more than one GPU"
    else:
        assert tuned.value == pytest.approx(min(float(judged[name].e2el_s.mean()) for name in meeting), rel=0.05)


def test_a_closed_loop_has_no_rate_to_look_for_but_can_be_judged() -> None:
    users = LOAD.model_copy(update={"arrivals": ClosedLoop(users=20)})
    with pytest.raises(UsageError, match="closed loop; use objective"):
        optimize(question(workload=users), jobs=1)
    tuned = optimize(question(workload=users, objective="e2el", tp=(1,), pp=(1,)), jobs=1)
    assert tuned.result.meets_slo
    assert tuned.result.offered_rate_rps is None


def test_a_capped_rate_saturates_no_plan_but_can_be_judged() -> None:
    capped = LOAD.model_copy(update={"arrivals": Poisson(rate_rps=200.0, max_in_flight=20)})
    with pytest.raises(UsageError, match=r"holds requests back .*use objective e2el"):
        optimize(question(workload=capped), jobs=1)
    tuned = optimize(question(workload=capped, objective="e2el", tp=(1,), pp=(1,)), jobs=1)
    assert tuned.result.meets_slo
    assert tuned.result.summary().held_back is not None


def test_classes_are_held_to_their_own_objectives() -> None:
    classes = (
        RequestClass(name="interactive", share=3, slo=Slo(tpot_s={"p99": 0.012})),
        RequestClass(name="bulk", share=1, output=FixedLength(tokens=300)),
    )
    q = question(workload=LOAD.model_copy(update={"classes": classes}), tp=(1,), pp=(1,), devices=1)
    tuned, loose = optimize(q, jobs=1), optimize(question(tp=(1,), pp=(1,), devices=1), jobs=1)
    assert {limit.request_class for limit in tuned.result.limits} == {"interactive", "bulk"}
    assert tuned.value < loose.value


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_nearest_plan_is_named_if_none_meets_the_slo(jobs: int) -> None:
    with pytest.raises(
        Infeasible,
        match=r"none meets the SLO\. The nearest, \d servers? of .* \(tp\S+\), at .*: p99 TPOT ≤ 0\.1 ms \(it reaches ",
    ):
        optimize(question(slo=Slo(tpot_s={"p99": 0.0001})), jobs=jobs)


def test_says_what_stood_in_the_way() -> None:
    with pytest.raises(Infeasible, match="no tp x pp of the search space fits 1 h100-sxm devices"):
        optimize(question(devices=1, tp=(2,)), jobs=1)
    large = load_model("llama-3.1-70b")
    with pytest.raises(
        Infeasible, match=r"no plan fits the hardware\. The widest one, 1 server of 1 GPU, .* \(tp1-pp1-\S+\): .* GiB"
    ):
        optimize(question(model=large, devices=1, tp=(1,), pp=(1,)), jobs=1)
    with pytest.raises(UsageError, match="needs an slo"):
        optimize(question(slo=Slo()), jobs=1)


def test_an_interrupt_keeps_what_was_found() -> None:
    calls: list[SearchCourse] = []

    def interrupt(now: SearchCourse) -> None:
        calls.append(now)
        if now.best is not None:
            raise KeyboardInterrupt

    q = question(devices=2)
    tuned, whole = optimize(q, jobs=1, progress=interrupt), optimize(q, jobs=1)
    assert tuned.interrupted
    assert tuned.result.meets_slo
    assert sum(row.simulations for row in tuned.rows) < sum(row.simulations for row in whole.rows)
    left_open = [row for row in tuned.rows if row.reason.startswith("left open by an interrupt")]
    assert left_open
    assert len(tuned.rows) == len(whole.rows)
    # What it says of the best of all plans holds, and says less than a search that was finished.
    assert whole.value <= tuned.bound
    assert tuned.gap > whole.gap
    assert calls[-1].bound is not None


def test_sweeps_are_of_the_chosen_plan_and_its_rivals() -> None:
    q = replace(question(rate_tolerance=0.01), hardware=(load_hardware("h100-sxm-trtllm"),))
    tuned = optimize(q, jobs=1)
    own = tuned.chosen.rate_rps
    assert own is not None
    swept = rate_sweep.sweeps(tuned, jobs=1)
    assert swept[0].candidate == tuned.chosen.candidate.name
    assert len(swept) > 1
    cuts = [sweep.candidate.split("-x")[0] for sweep in swept]
    assert len(set(cuts)) == len(cuts), "one per tp x pp"
    for sweep in swept:
        rates = [rate for rate, _ in sweep.points]
        assert rates == sorted(rates)
        assert rates == pytest.approx([own * f for f in rate_sweep.FRACTIONS if sweep is swept[0] or f <= 1.0])
        assert len(sweep.judged.ttft_s) == 101
        # Points are a quarter of the longest run, but no fewer than 1,000 requests.
        assert {summary.requests for rate, summary in sweep.points if rate != own} == {min(q.requests, 1000)}
    (light_rate, light), *_, (heavy_rate, heavy) = swept[0].points
    assert light.slo_attainment == 1.0
    # Too short to tell whether it keeps up: what finished is counted over the whole run, its tail included.
    assert light.goodput_rps == pytest.approx(light_rate, rel=0.1)
    assert heavy.goodput_rps is not None
    assert heavy.goodput_rps < 0.9 * heavy_rate
    # Of a confirmed rate it is known that it, and lower ones, are kept up with: then the tail does not count.
    assert light.goodput_rps is not None
    assert light.goodput_rps < 0.999 * light_rate
    confirmed = replace(tuned, confirmed=Confirmed(3, q.requests, 30.0))
    for rate, summary in rate_sweep.sweeps(confirmed, jobs=1)[0].points:
        if rate <= own:
            assert summary.goodput_rps == pytest.approx(rate * (summary.slo_attainment or 0.0))


@pytest.mark.parametrize("most", [300, 2000, 8000, 18423, 64000])
def test_points_of_a_sweep_last_as_long_at_every_rate_below_the_chosen_one(most: int) -> None:
    requests = rate_sweep._requests_at(most)
    quarter = min(most, max(rate_sweep.LEAST, most // rate_sweep.SHORTER))
    assert set(requests) == set(rate_sweep.FRACTIONS) - {1.0}
    for share, n in requests.items():
        assert min(most, rate_sweep.LEAST) <= n <= most
        # The mean interval between requests is 1 / share of that at the chosen rate.
        assert n / share >= quarter if share < 1.0 else n >= quarter


@given(
    seqs=st.sampled_from([1, 4, 32, 256]),
    tokens=st.sampled_from([256, 1024, 8192]),
    tp=st.sampled_from([1, 2]),
    prompt=st.sampled_from([20, 400, 3000]),
    output=st.sampled_from([1, 30, 500]),
    seed=st.integers(0, 5),
)
@hypothesis_settings(max_examples=60)
def test_no_schedule_beats_the_capacity_bound(
    seqs: int, tokens: int, tp: int, prompt: int, output: int, seed: int
) -> None:
    """All requests at once, so that the engine is never idle: what it serves per second stays below the bound."""
    load = LOAD.model_copy(
        update={
            "arrivals": Poisson(rate_rps=1e6),
            "prompt": Lognormal(mean_tokens=prompt, sigma=0.5, max_tokens=6000),
            "output": Lognormal(mean_tokens=output, sigma=0.5, max_tokens=2000),
        }
    )
    q = replace(question(workload=load), study=question(workload=load).study.model_copy(update={"seed": seed}))
    candidate = Candidate.mixed("h100-sxm", tp, max_num_seqs=seqs, max_num_batched_tokens=max(seqs, tokens))
    deployment = q.deploy(candidate, 8192)
    stream = q.stream(candidate)
    bound = capacity_rps(deployment, stream)
    served = len(stream) / deployment.simulate(stream).duration_s
    assert served <= bound * (1 + 1e-9)


def test_the_bound_is_not_idle_talk() -> None:
    """Under saturation the best engine settings reach a good part of the bound."""
    load = LOAD.model_copy(update={"arrivals": Poisson(rate_rps=1e6), "requests": 3000})
    q = question(workload=load)
    candidate = Candidate.mixed("h100-sxm", 1, max_num_seqs=256, max_num_batched_tokens=2048)
    deployment = q.deploy(candidate, 8192)
    stream = q.stream(candidate)
    bound = capacity_rps(deployment, stream)
    assert len(stream) / deployment.simulate(stream).duration_s > 0.6 * bound


@pytest.mark.parametrize("caching", [False, True])
def test_a_prefix_cache_lifts_the_capacity(caching: bool) -> None:
    """Prompts of which most is shared: what the engine serves stays below the capacity, and comes near to it."""
    prompts = {"prompt": FixedLength(tokens=2000), "shared_prefix": SharedPrefix(groups=2, tokens=1920)}
    load = LOAD.model_copy(
        update={"arrivals": Poisson(rate_rps=1e6), "requests": 600, "output": FixedLength(tokens=4), **prompts}
    )
    q = question(workload=load, tp=(1,), pp=(1,), devices=1, max_num_seqs=(64,), max_num_batched_tokens=(2048,),
                 prefix_caching=(caching,))  # fmt: skip
    (candidate,) = candidates(q)
    cache = PlanCache(q, [candidate])
    settled = cache.settled(candidate)
    assert isinstance(settled, Candidate)
    served = 600 / cache.deployment(settled).simulate(cache.stream(settled)).duration_s
    assert 0.8 * cache.capacity(settled).rps < served <= cache.capacity(settled).rps
    assert (served > 50) == caching


def test_some_cores_stand_for_all() -> None:
    """Some cores of a wide deployment give the statistics of all of them, within what fewer requests allow."""
    q = question(devices=8, workload=LOAD.model_copy(update={"requests": 4000}))
    candidate = next(c for c in candidates(q) if c.decoding.instances == 8)
    deployment = q.deploy(candidate, 8192)
    stream = q.stream(candidate, 20.0)
    some, all_of_them = deployment.simulate(stream, cores=4), deployment.simulate(stream)
    assert len(some.stream) == len(all_of_them.stream) / 2
    assert some.offered_rate_rps == all_of_them.offered_rate_rps
    for metric in ("ttft", "tpot", "e2el"):
        ours, theirs = some.statistic(metric, "mean"), all_of_them.statistic(metric, "mean")
        assert ours == pytest.approx(theirs, rel=0.05)
    ours, theirs = some.summary().output_tokens_per_s, all_of_them.summary().output_tokens_per_s
    assert ours == pytest.approx(theirs, rel=0.05)


@pytest.mark.slow
def test_no_plan_is_asked_twice_what_it_has_answered() -> None:
    """Where a fresh draw misses what that of the search met, other plans come into play again, each of them once."""
    chat, _ = load_workload("chat")
    asked = question(
        slo=Slo(ttft_s={"p99": 1.0}, tpot_s={"p99": 0.030}), workload=chat, devices=8, tp=(1,), pp=(1,),
        prefix_caching=(False, True), max_num_seqs=(256, 384), max_num_batched_tokens=(2048,), requests=100,
        confirm=Confirmation(draws=2, requests=1000),
    )  # fmt: skip
    tuned = optimize(replace(asked, study=asked.study.model_copy(update={"seed": 1})), jobs=1)
    assert sum(bool(tried.draw) and not tried.met for row in tuned.rows for tried in row.tried) > 4
    assert [row.candidate.name for row in tuned.rows if len(row.tried) > len(set(row.tried))] == []


class _Surer:
    """A confidence in which one plan is worth most."""

    worlds = 2

    def __init__(self, name: str) -> None:
        self._name = name

    def robust(self, level: float) -> str:
        return self._name


def test_a_robust_plan_that_missed_its_last_rate_is_chosen_at_one_that_it_meets() -> None:
    tuned = optimize(question(max_num_seqs=(8, 64, 1024)), jobs=1)
    missed = next(row for row in tuned.rows if row.status == "infeasible" and row.rate_rps is not None)
    at = missed.rate_rps
    chosen: Any = robust(tuned, _Surer(missed.candidate.name), 0.1)  # type: ignore[arg-type]
    assert chosen.chosen.candidate == missed.candidate
    assert chosen.result.meets_slo
    assert chosen.chosen.rate_rps < at
    assert chosen.value == pytest.approx(chosen.chosen.rate_rps / missed.candidate.num_gpus)
