"""Parts of the search against short formulas and numbers worked out by hand: rates, bounds, gaps, counts."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, KvCache, Pool
from simtune.specs.workload import RequestClass, Slo
from simtune.testing.clusters import stream_of
from simtune.tuner.bounds.best_case import least_s, slo_bound
from simtune.tuner.bounds.plans import CLOSE, PlanBounds, RateBound, _bisected
from simtune.tuner.bounds.work import CostLine, PoolWork
from simtune.tuner.objectives import Miss
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.search import short_runs
from simtune.tuner.search.candidate_filter import BoundedCandidate, CandidateFilter
from simtune.tuner.search.climb import Climb, Rung, Simulation, SimulationFinding
from simtune.tuner.search.confirm import felt_after_s
from simtune.tuner.search.evaluator import Evaluator, Keyed, SimulationKey
from simtune.tuner.search.implied_results import Allowed, DraftRoom, Use
from simtune.tuner.search.plan_judge import PlanJudge
from simtune.tuner.search.variant_gains import family_gains
from simtune.tuner.space.expressible import space_for
from simtune.tuner.trial import Attempt, Tuned
from tests.tuner.bound_worlds import HARDWARE, MODEL
from tests.tuner.test_confirm import asked

# --- a judge of plans whose highest rate is stated ---------------------------------------------------------------


@functools.cache
def a_finding() -> SimulationFinding:
    """A simulation that met its SLO; its verdict is replaced by a stated one."""
    q = asked()
    candidate = space_for(q).candidates[0]
    return Simulation(q.deploy(candidate, 8192), q.stream(candidate, 0.5, 20), Slo(), None).run()


class Stated(Evaluator):
    """Answers that a plan meets the SLO up to a stated rate, and counts what it is asked for."""

    def __init__(self, highest_rps: float) -> None:
        super().__init__(None, None)
        self.highest_rps = highest_rps
        self.calls: list[tuple[str, float, int]] = []
        """Plan, rate, and requests of a short run (0 for a full one) of every simulation."""

    def finding(self, key: SimulationKey, task: Simulation, expected: Any) -> SimulationFinding:
        name, rate, draw = key
        assert rate is not None
        assert task.rate_rps == rate
        self.calls.append((name, rate, -draw))
        met = rate <= self.highest_rps
        unreached = tuple(Use(Allowed.of(pool), Allowed(1, 1, 1)) for pool in task.deployment.pools)
        summary = a_finding().summary.model_copy(update={"lifetimes": None})
        missed_by = 0 if met else len(task.stream)
        return replace(
            a_finding(), met=met, summary=summary, used=unreached, strain=rate / self.highest_rps, missed_by=missed_by
        )


def plans_of(q: Question) -> tuple[PlanCache, list[BoundedCandidate]]:
    candidates = space_for(q).candidates
    cache = PlanCache(q, candidates)
    checked = map(CandidateFilter(q, cache).check, candidates)
    return cache, [plan for plan in checked if isinstance(plan, BoundedCandidate)]


def none_upcoming() -> Any:
    return iter(list[Keyed]())


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 15 of the 60 requests come before full ones."""
    monkeypatch.setattr(short_runs, "LEAST", 10)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("share", [0.011, 0.05, 0.2, 0.5, 0.749, 0.9, 0.999, 2.0])
def test_a_plan_is_judged_at_the_highest_rate_that_it_keeps(share: float) -> None:
    """Within the tolerance of the search, by as many simulations as its row counts and lists."""
    cache, (plan,) = plans_of(asked())
    bound, step = plan.bound_rps, 1 + plan.plan_cache.question.study.search.rate_tolerance
    stated, met = Stated(share * bound), list[BoundedCandidate]()
    PlanJudge(cache.question, cache, stated, none_upcoming, met.append).judge(plan, None)
    row, highest = plan.row, min(stated.highest_rps, bound)
    assert row.status == "feasible"
    assert row.rate_rps is not None
    assert highest / step * (1 - 1e-9) <= row.rate_rps <= highest
    assert met[-1] is plan
    assert row.simulations == len(stated.calls)
    full = [Attempt(rate, rate <= highest) for _, rate, requests in stated.calls if not requests]
    assert row.tried == full
    assert {requests for _, _, requests in stated.calls} == {0, 15}
    # No more than a halving of the interval takes, besides a few that find where to begin.
    assert len(stated.calls) <= 2 * (4 + math.log2(math.log(100) / math.log(step)))
    missed = [attempt.rate_rps for attempt in full if not attempt.met and attempt.rate_rps is not None]
    lowest = min([*missed, bound])
    # One GPU: the objective, goodput per GPU, is the rate.
    assert plan.row.best == pytest.approx(lowest if missed else plan.best)
    assert plan.ceiling_rps == pytest.approx(lowest)
    assert lowest <= row.rate_rps * step * (1 + 1e-9)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("share", [0.5, 1.2])
def test_a_plan_that_is_to_beat_another_is_first_judged_by_a_short_run(share: float) -> None:
    cache, (plan,) = plans_of(asked())
    low = 0.6 * plan.bound_rps
    stated = Stated(share * low)
    first, _ = PlanJudge(q := cache.question, cache, stated, none_upcoming, lambda _: None).first(plan, low)
    PlanJudge(q, cache, stated, none_upcoming, lambda _: None).judge(plan, low)
    begun = low / cache.question.draw_spread.slack(60, 15)
    name = plan.candidate.name
    assert first == (name, begun, -15)
    assert stated.calls[0] == (name, begun, 15)
    assert plan.row.simulations == len(stated.calls)
    if share < 1:
        assert len(stated.calls) == 1, "the short run rules it out"
        assert plan.row.tried == [Attempt(begun, False, requests=15)]
        assert plan.missed == Miss(begun, 15)
        assert plan.ceiling_rps == pytest.approx(low), "it proves as much as a full run at the rate to beat"
        assert plan.row.status == "infeasible"
    else:
        assert stated.calls[1] == (name, low, 0)
        assert plan.row.status == "feasible"
        assert plan.row.rate_rps is not None
        step = 1 + q.study.search.rate_tolerance
        assert stated.highest_rps / step * (1 - 1e-9) <= plan.row.rate_rps <= stated.highest_rps


@pytest.mark.parametrize("low", [None, 0.5, 1.0, 1.5])
def test_a_plan_that_does_the_same_takes_over_the_rates_of_the_other(low: float | None) -> None:
    """Two numbers of seats, neither of which is reached; `low` is the rate to beat, as a share of the highest one."""
    cache, (first, second) = plans_of(asked(max_num_seqs=(512, 1024)))
    stated = Stated(0.4 * first.bound_rps)
    judge = PlanJudge(cache.question, cache, stated, none_upcoming, lambda _: None)
    judge.judge(first, None)
    assert first.row.rate_rps is not None
    simulated = len(stated.calls)
    beats = None if low is None else low * first.row.rate_rps
    judge.judge(second, beats)
    highest = max(rate for _, rate, _ in stated.calls[:simulated] if rate <= stated.highest_rps)
    lowest = min(rate for _, rate, _ in stated.calls[:simulated] if rate > stated.highest_rps)
    if beats is None or beats <= first.row.rate_rps:
        assert len(stated.calls) == simulated
        assert second.row.tried == [Attempt(highest, True), Attempt(lowest, False)]
        assert (second.row.simulations, second.row.rate_rps) == (0, highest)
        assert (second.row.best, second.ceiling_rps) == (first.row.best, first.ceiling_rps)
    else:
        assert [(rate, requests) for _, rate, requests in stated.calls[simulated:]] == [(beats, 0)]
        assert second.row.tried == [Attempt(beats, False)]
        assert second.row.status == "infeasible"


@pytest.mark.parametrize(
    ("strain", "share"),
    [(None, 0.75), (1.0, 0.75), (1.2, 0.75), (1.6, 1 / (1.6 * 1.02)), (1.9, 1 / (1.9 * 1.02)), (2.5, 0.5)],
)
def test_the_next_lower_rate_is_that_at_which_the_strain_would_be_gone(strain: float | None, share: float) -> None:
    """Three quarters at most and a half at least; 1 / (1.2 x 1.02) is 0.82."""
    assert Climb(100.0, 1.02, None, missed=Rung(40.0, strain)).rate_rps == pytest.approx(40.0 * share)


# --- what a simulation implies, gains, gaps ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "seats", "most_tokens", "budget"),
    [
        (DraftRoom(), 8, 5, 8),
        (DraftRoom(), 8, 50, 50),
        # A drafter without drafts takes nothing.
        (DraftRoom(1, 3), 8, 50, 50),
        # 50, a draft for each of 8 seats, and the 2 tokens of a request that finds no room.
        (DraftRoom(2), 8, 50, 60),
        # 50, 3 drafts for each of 8 seats, a slot for each of them and two more, and 4 tokens of a last request.
        (DraftRoom(4, 1), 8, 50, 88),
    ],
)
def test_tokens_of_a_step_with_drafts(room: DraftRoom, seats: int, most_tokens: int, budget: int) -> None:
    assert room.budget(seats, most_tokens) == budget


def a_tuned(q: Question | SimpleNamespace, value: float, bound: float, rows: list[Any] | None = None) -> Tuned:
    nothing = cast(Any, None)
    return Tuned(cast(Question, q), rows or [], nothing, nothing, value, bound)


@pytest.mark.parametrize(
    ("sign", "value", "bound", "gap"),
    [(1, 8.0, 10.0, 0.25), (-1, 8.0, 6.0, 0.25), (1, 8.0, 8.0, 0.0), (-1, 0.0, 0.0, 0.0), (1, 8.0, 7.0, 0.0)],
)
def test_the_gap_is_the_distance_to_the_bound_as_a_share_of_the_value(
    sign: int, value: float, bound: float, gap: float
) -> None:
    q = SimpleNamespace(objective=SimpleNamespace(sign=sign))
    assert a_tuned(q, value, bound).gap == gap


def test_plans_belong_to_the_family_of_their_roles() -> None:
    q = asked(layouts=("mixed", "prefill-decode"), devices=2)
    _, plans = plans_of(q)
    for number, plan in enumerate(plans):
        plan.row.status, plan.row.rate_rps, plan.row.best = "feasible", 4.0 + number, 20.0 + number
    rows = [plan.row for plan in plans]
    apart = ["prefill" in row.candidate.name or len(row.candidate.pools) == 2 for row in rows]
    assert len(set(apart)) == 2, "plans of both layouts are searched"
    # The first of the rows is the chosen plan, whose value the search states.
    tuned = a_tuned(q, 4.0 / rows[0].candidate.num_gpus, 0.0, rows)
    gains = {gain.family: gain for gain in family_gains(tuned)}
    assert set(gains) == {"mixed", "prefill/decode"}
    for family, of_pairs in (("mixed", False), ("prefill/decode", True)):
        numbers = [number for number, pair in enumerate(apart) if pair == of_pairs]
        values = {(4.0 + number) / rows[number].candidate.num_gpus: rows[number].candidate.name for number in numbers}
        assert gains[family].reached == max(values)
        assert gains[family].plan == values[max(values)]
        assert gains[family].at_most == 20.0 + max(numbers)


def test_an_overload_is_felt_when_the_tightest_limit_on_waiting_is_reached() -> None:
    """Waits grow by 1 % of the time: p90 of 2 s is reached after 2 / 0.01 / 0.9 s, a mean of 1 s after 1 / 0.01 / 0.5.
    Classes with an SLO of their own are judged by it, and the slowest of them decides."""
    slo = Slo(ttft_s={"p90": 2.0}, tpot_s={"mean": 1e-3})
    q = asked(slo=slo)
    assert felt_after_s(q) == pytest.approx(2 / 0.01 / 0.9)
    two_limits = replace(q, study=q.study.model_copy(update={"slo": Slo(ttft_s={"p90": 2.0}, e2el_s={"mean": 1.0})}))
    assert felt_after_s(two_limits) == pytest.approx(1 / 0.01 / 0.5)

    def with_classes(*slos: Slo | None) -> Question:
        share = 1 / len(slos)
        classes = tuple(RequestClass(name=f"c{i}", share=share, slo=item) for i, item in enumerate(slos))
        return replace(q, workload=q.workload.model_copy(update={"classes": classes}))

    assert felt_after_s(with_classes(None, None)) == felt_after_s(q)
    assert felt_after_s(with_classes(Slo(ttft_s={"mean": 3.0}), None)) == pytest.approx(3 / 0.01 / 0.5)
    assert felt_after_s(with_classes(Slo(ttft_s={"mean": 0.1}), Slo(ttft_s={"mean": 0.2}))) == pytest.approx(40.0)


# --- bounds ------------------------------------------------------------------------------------------------------


@given(
    limit=st.floats(1e-9, 1e6),
    start=st.floats(0.01, 100.0),
    width=st.floats(1.0, 1e9),
)
def test_a_rate_bound_is_bisected_to_the_lowest_rate_that_fails(limit: float, start: float, width: float) -> None:
    """All rates above `limit` fail; no rate above the one to improve on is of interest."""
    high, best, calls = start * width, RateBound(start * width, "floor"), list[float]()

    def fails(rps: float) -> bool:
        calls.append(rps)
        return rps > limit

    bound = _bisected(fails, start, high, best)
    assert max(calls) <= high
    if limit >= high:
        assert bound is best
    else:
        assert bound.by == "order of arrival"
        assert limit <= bound.rps <= limit * (1 + CLOSE) * (1 + 1e-12)
    # Doublings or halvings to the limit, then halvings of an octave until it is CLOSE wide.
    assert len(calls) <= 6 + abs(math.log2(max(limit, 1e-9) / start)) + math.log2(math.log(2) / math.log(1 + CLOSE))


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_the_linear_part_of_steps_is_the_highest_line_at_their_tokens(count: int) -> None:
    """Tangents of 200 + x^2, sorted by slope: the highest at x is the one that touches nearest to x."""
    draw = np.random.default_rng(count)
    steps, tokens = draw.integers(1, 50, 200).astype(np.float64), draw.integers(0, 500, 200).astype(np.float64)
    work = object.__new__(PoolWork)
    for _ in range(5):
        touching = np.sort(draw.uniform(0.1, 10.0, count))
        work.lines = [CostLine(200 - x * x, 2 * x, 0.0) for x in touching]
        highest = max_of_lines(work.lines, steps, tokens)
        assert work._linear_s(steps, tokens) == pytest.approx(highest, rel=1e-9)
        assert work._linear_s(0 * steps, 0 * tokens) == pytest.approx(0 * steps)


def max_of_lines(lines: list[CostLine], steps: Any, tokens: Any) -> Any:
    return np.max([line.start_s * steps + line.token_s * tokens for line in lines], axis=0)


STEP_S, TOKEN_S, CONTEXT_S, PAIR_S = (
    to_ticks(seconds) / TICKS_PER_SECOND for seconds in (2e-3, 1e-5, 1e-8, 1e-9)
)  # whole ticks, so that nothing is rounded


def linear(instances: int = 1, budget: int = 512) -> Deployment:
    pool = Pool(
        hardware="h100-sxm",
        instances=instances,
        batching=Batching(max_num_seqs=64, max_num_batched_tokens=budget),
        kv_cache=KvCache(num_blocks=4001),  # one of them is vLLM's null block
        max_model_len=16384,
        async_scheduling=False,
    )
    costs = LinearCosts(STEP_S, TOKEN_S, CONTEXT_S, PAIR_S)
    return deploy(Plan(name="plan", model=MODEL.name, pools=(pool,)), MODEL, HARDWARE, costs)


@settings(max_examples=30)
@given(st.integers(1, 3000), st.integers(1, 200))
def test_a_request_that_is_alone_takes_its_floor(prompt: int, output: int) -> None:
    """A step takes a + b m + c C + d A where costs are linear in tokens, context and pairs."""
    deployment, stream = linear(), stream_of([0.0], [prompt], [output])
    bounds = PlanBounds(deployment, stream)
    chunks, pairs = -(-prompt // 512), prompt * (prompt + 1) / 2
    ttft_s = chunks * STEP_S + prompt * TOKEN_S + pairs * PAIR_S
    assert bounds.ttft_s[0] == pytest.approx(ttft_s, rel=1e-9)
    # The step of token k of the answer, k = 2 ..., reads the prompt and k - 1 tokens of the answer.
    decode_s = sum(STEP_S + TOKEN_S + CONTEXT_S * (prompt + k - 1) for k in range(2, output + 1))
    assert bounds.decode_s[0] == pytest.approx(decode_s, rel=1e-9, abs=1e-15)
    result = deployment.simulate(stream)
    assert least_s("e2el", deployment, stream) == pytest.approx(result.values("e2el").mean(), rel=1e-8)
    assert least_s("makespan", deployment, stream) == pytest.approx(ttft_s + decode_s, rel=1e-6)


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 100)), min_size=1, max_size=20),
    st.integers(1, 4),
    st.sampled_from([64, 512, 4096]),
)
def test_work_of_requests_with_linear_costs(requests: list[tuple[int, int]], instances: int, budget: int) -> None:
    """Tokens share steps as far as budget, seats and KV tokens go; all else is the sum over tokens."""
    prompts, outputs = np.array(requests).T
    stream = stream_of(0.0 * prompts, prompts, outputs)
    (work,) = PlanBounds(linear(instances, budget), stream).front
    assert (work.speed, work.seats, work.budget, work.kv_tokens) == (instances, 64, budget, 64000)
    decodes = outputs - 1
    context = decodes * prompts + decodes * (decodes + 1) / 2
    attention_s = prompts * (prompts + 1) / 2 * PAIR_S
    assert work.prefill_s == pytest.approx(prompts * (TOKEN_S + STEP_S / budget) + attention_s, rel=1e-9)
    everyone = np.ones(len(prompts), dtype=bool)
    of_tokens, of_seats, of_kv, of_tpot = work.total_s(everyone, 0.01)
    fixed = attention_s + (prompts + decodes) * TOKEN_S + context * CONTEXT_S
    assert of_tokens == pytest.approx(fixed + STEP_S * (prompts + decodes) / budget, rel=1e-9)
    assert of_seats == pytest.approx(fixed + STEP_S * decodes / 64, rel=1e-9)
    assert of_kv == pytest.approx(fixed + STEP_S * context / 64000, rel=1e-9)
    # A step of B decodes within 10 ms: a + B (b + c P) <= 10 ms for the shortest prompt P.
    most = (0.01 - STEP_S) / (TOKEN_S + CONTEXT_S * min(prompts))
    assert of_tpot == pytest.approx(fixed + STEP_S * decodes / most, rel=1e-9)
    assert len(work.total_s(everyone, math.inf)) == 3


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_the_bound_of_some_cores_is_scaled_to_all(cores: int) -> None:
    """Requests that are alike and arrive evenly are as hard for two of eight instances as for all."""
    deployment, n = linear(instances=8), 4000
    stream = stream_of(np.arange(n) / 50.0, [512] * n, [100] * n)
    slo = Slo(ttft_s={"p90": 0.5}, tpot_s={"p90": 0.01})
    bound, of_all = slo_bound(deployment, stream, slo, cores), slo_bound(deployment, stream, slo)
    assert math.isfinite(of_all.rps)
    assert bound.by == of_all.by
    assert bound.rps == pytest.approx(of_all.rps, rel=0.02)
    below = slo_bound(deployment, stream, slo, cores, below_rps=1.01 * bound.rps)
    assert below.rps == pytest.approx(bound.rps, rel=2 * CLOSE)
    assert slo_bound(deployment, stream, slo, cores, below_rps=0.99 * bound.rps) == RateBound(math.inf, "nothing")
