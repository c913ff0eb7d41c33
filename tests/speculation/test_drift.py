"""Acceptance that drifts: each request has what it has come to by then, and the clock stays exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.engine import Request, VllmFcfs
from simtune.errors import Infeasible, SpecError, UsageError
from simtune.results.outcome import Outcome
from simtune.sim.core import EngineCore
from simtune.sim.drafting import AcceptanceSampler, drafting_terms
from simtune.sim.world import World
from simtune.specs.acceptance import (
    Acceptance,
    BetaMixture,
    Condition,
    Drift,
    DriftPoint,
    ExponentialDrift,
    FixedRates,
    LinearDrift,
    PerPosition,
    PerRank,
    Rates,
)
from simtune.specs.drafters import Eagle
from simtune.specs.schemes import Chain, Scheme, StaticTree, Threshold, TokenBudget
from simtune.specs.speculation import Speculation
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream

LOW, HIGH = PerPosition(conditional=(0.4, 0.3, 0.2)), PerPosition(conditional=(0.9, 0.8, 0.7))
RANKS = PerRank(probability=((0.3, 0.2), (0.3, 0.1))), PerRank(probability=((0.6, 0.2), (0.5, 0.2)))
NODES = ((1,), (2,), (1, 1), (1, 2))
KEPT = {id(LOW): (0.4, 0.12, 0.024), id(HIGH): (0.9, 0.72, 0.504)}
"""P(at least d drafts are kept), by hand."""


def rising(over: Any = "requests", constant: float = 10, to: FixedRates = HIGH) -> Drift:
    return ExponentialDrift(over=over, to=to, constant=constant)


def line(*points: tuple[float, FixedRates], over: Any = "requests") -> Drift:
    return LinearDrift(over=over, points=tuple(DriftPoint(at=at, rates=rates) for at, rates in points))


def sampler(
    scheme: Scheme, stream: RequestStream, drift: Drift | None, rates: Rates = LOW, **more: Any
) -> AcceptanceSampler:
    spec = Acceptance(name="mine", origin="assumed", source="made up", rates=rates, drift=drift, **more)
    return AcceptanceSampler(scheme, spec, stream, seed=0)


def at_once(n: int, tokens: int = 100) -> RequestStream:
    return stream_of([0.0] * n, [10] * n, [tokens] * n)


def survival(drawn: AcceptanceSampler, *requests: int) -> list[list[float]]:
    found: list[list[float]] = drawn.survival.columns(np.array(requests)).tolist()
    return found


def kept(drawn: AcceptanceSampler, n: int, rounds: int) -> np.ndarray:
    return np.array([drawn.accepted(Request(i, 10, 100), 0, rounds) for i in range(n)])


# --- what holds when ----------------------------------------------------------------------------------------------


def test_a_line_is_followed_from_point_to_point_and_ends_at_the_last() -> None:
    drawn = sampler(Chain(tokens=3), at_once(60), line((10, HIGH), (30, LOW)))
    low, high = np.array(KEPT[id(LOW)]), np.array(KEPT[id(HIGH)])
    expected = [low, (low + high) / 2, high, 0.75 * high + 0.25 * low, low, low]
    assert survival(drawn, 0, 5, 10, 15, 30, 59) == [pytest.approx(row) for row in expected]


def test_an_approach_has_one_part_in_e_left_after_its_constant() -> None:
    drawn = sampler(Chain(tokens=3), at_once(60), rising(constant=10))
    low, high = np.array(KEPT[id(LOW)]), np.array(KEPT[id(HIGH)])
    for request, left in ((0, 1.0), (10, np.exp(-1)), (20, np.exp(-2)), (59, np.exp(-5.9))):
        assert survival(drawn, request) == [pytest.approx(left * low + (1 - left) * high)]


def test_seconds_are_those_of_arrivals_and_stay_so_at_another_rate() -> None:
    stream = stream_of([0.0, 2.0, 4.0, 8.0], [10] * 4, [100] * 4)
    low, high = np.array(KEPT[id(LOW)]), np.array(KEPT[id(HIGH)])
    for its, shares in ((stream, (0, 0.5, 1, 1)), (stream.at_rate(0.75), (0, 0.25, 0.5, 1))):
        drawn = sampler(Chain(tokens=3), its, line((4, HIGH), over="seconds"))
        assert survival(drawn, 0, 1, 2, 3) == [pytest.approx((1 - x) * low + x * high) for x in shares]


def test_some_instances_see_the_drift_of_the_whole_load() -> None:
    """Not one that is faster because they see fewer requests; nor do shares of shares."""
    whole = at_once(60)
    drawn = sampler(Chain(tokens=3), whole, rising())
    for share, mine in ((whole.share_of(1, 3), 3), (whole.share_of(1, 3).share_of(1, 2), 6)):
        assert survival(sampler(Chain(tokens=3), share, rising()), 0, 5) == survival(drawn, 0, 5 * mine)


def test_only_the_class_that_drifts_does() -> None:
    stream = stream_of([0.0] * 40, [10] * 40, [100] * 40)
    mixed = RequestStream(
        arrival_s=stream.arrival_s,
        prompt_tokens=stream.prompt_tokens,
        output_tokens=stream.output_tokens,
        class_index=np.arange(40) % 3,
        priority=stream.priority,
        class_names=("code", "chat", "other"),
        slos=(None,) * 3,
    )
    conditions = (
        Condition(request_class="code", rates=LOW, drift=line((30, HIGH))),
        Condition(request_class="other", rates=BetaMixture(a=4, b=2)),
    )
    drawn = sampler(Chain(tokens=3), mixed, None, HIGH, conditions=conditions)
    plain = sampler(Chain(tokens=3), mixed, None, HIGH, conditions=(conditions[1],))
    assert survival(drawn, 0, 30, 39) == [pytest.approx(KEPT[id(rates)]) for rates in (LOW, HIGH, HIGH)]
    assert survival(drawn, *range(1, 40, 3)) == [pytest.approx(KEPT[id(HIGH)])] * 13
    own = survival(drawn, *range(2, 40, 3))
    assert own == [pytest.approx([p, p**2, p**3]) for p, *_ in own], "each has an acceptance of its own"
    assert len({p for p, *_ in own}) == len(own)
    others = [i for i in range(40) if i % 3]
    assert survival(drawn, *others) == survival(plain, *others)


# --- what is drawn ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "ends"), [(Chain(tokens=3), (LOW, HIGH)), (StaticTree(nodes=NODES), RANKS)])
def test_a_drift_at_its_ends_draws_what_its_ends_draw(scheme: Scheme, ends: tuple[FixedRates, FixedRates]) -> None:
    """A sudden change between two requests is two loads, one after the other, to the last draft."""
    stream, (before, after) = at_once(40), ends
    sudden = kept(sampler(scheme, stream, line((19, before), (20, after)), before), 40, 50)
    first, second = (kept(sampler(scheme, stream, None, rates), 40, 50) for rates in ends)
    assert sudden[:20].tolist() == first[:20].tolist()
    assert sudden[20:].tolist() == second[20:].tolist()
    assert first.sum() < second.sum()


def test_on_the_way_rounds_keep_what_lies_between() -> None:
    stream = at_once(40)
    low, between, high = (
        kept(sampler(Chain(tokens=3), stream, drift, rates), 40, 400)
        for drift, rates in ((None, LOW), (rising(), LOW), (None, HIGH))
    )
    assert (low <= between).all()
    assert (between <= high).all()
    share = 1 - np.exp(-np.arange(40) / 10)
    expected = (1 - share) * sum(KEPT[id(LOW)]) + share * sum(KEPT[id(HIGH)])
    error = between.std(axis=1) / np.sqrt(400)
    assert (np.abs(between.mean(axis=1) - expected) < 4.5 * error).all()


def test_a_drafter_that_knows_its_confidence_follows_the_drift() -> None:
    """How many drafts are made where all are kept at least every other time: none at first, all in the end."""
    scheme = Threshold(max_tokens=3, stop_at=0.5)
    stream = at_once(60)
    terms = drafting_terms(
        Speculation(drafter=Eagle(), scheme=scheme, acceptance="mine"), sampler(scheme, stream, rising())
    )
    assert terms.lengths is not None
    made = [terms.lengths(Request(i, 10, 100)) for i in range(60)]
    assert (made[0], made[-1]) == (0, 3)
    assert made == sorted(made)


# --- the clock ----------------------------------------------------------------------------------------------------

WORLDS: dict[str, Scheme] = {
    "chain": Chain(tokens=3),
    "threshold": Threshold(max_tokens=3, stop_at=0.5),
    "budget": TokenBudget(tokens=7, max_tokens=3),
}


def run(scheme: Scheme, drawn: AcceptanceSampler, stream: RequestStream, single_steps: bool, **more: Any) -> Outcome:
    terms = drafting_terms(Speculation(drafter=Eagle(), scheme=scheme, acceptance="mine"), drawn)
    sizes: dict[str, Any] = {"num_blocks": 60, "block_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 32}
    core = EngineCore(
        VllmFcfs(**sizes, max_model_len=960, speculation=terms, **more),
        LinearCosts(step_s=1e-3, per_token_s=2e-5, per_context_s=3e-7),
    )
    return World([core], stream, single_steps=single_steps).run()


@pytest.mark.parametrize("name", WORLDS)
def test_jumps_are_single_steps_to_the_tick(name: str) -> None:
    scheme, saved = WORLDS[name], 0

    @given(st.data())
    @hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(data: st.DataObject) -> None:
        nonlocal saved
        n = data.draw(st.integers(1, 20))
        prompt, output = (data.draw(st.lists(st.integers(1, 400), min_size=n, max_size=n)) for _ in range(2))
        gaps = data.draw(st.lists(st.sampled_from([0.0, 1e-3, 0.3]), min_size=n, max_size=n))
        closed = data.draw(st.booleans())
        over = "requests" if closed else data.draw(st.sampled_from(["requests", "seconds"]))
        constant = data.draw(st.sampled_from([0.5, 4.0]))
        drift = data.draw(st.sampled_from([rising(over, constant), line((constant, HIGH), (9, LOW), over=over)]))
        stream = stream_of(None if closed else np.cumsum(gaps).tolist(), prompt, output, users=3 if closed else 0)
        ahead = name == "chain" and data.draw(st.booleans())
        jumped, stepped = (
            run(scheme, sampler(scheme, stream, drift), stream, single, async_scheduling=ahead)
            for single in (False, True)
        )
        for column in ("arrival", "scheduled", "first_token", "finish", "preemptions"):
            assert getattr(jumped, column).tolist() == getattr(stepped, column).tolist()
        assert jumped.steps == stepped.steps
        assert jumped.cores[0].drafting == stepped.cores[0].drafting
        saved += stepped.events - jumped.events

    check()
    assert saved > 0


def test_a_drift_that_goes_nowhere_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    stream = stream_of(np.cumsum(rng.exponential(0.01, 50)), [50] * 50, rng.integers(1, 200, 50).tolist())
    scheme = Chain(tokens=3)
    finishes = [
        run(scheme, sampler(scheme, stream, drift), stream, False).finish.tolist()
        for drift in (None, line((20, LOW), (21, LOW), over="seconds"))
    ]
    assert finishes[0] == finishes[1]


def test_a_drafter_that_learns_serves_a_load_sooner() -> None:
    stream, scheme = at_once(40), Chain(tokens=3)
    stays, learns, learnt = (
        run(scheme, sampler(scheme, stream, drift, rates), stream, False).finish.max()
        for drift, rates in ((None, LOW), (rising(), LOW), (None, HIGH))
    )
    assert learnt < learns < stays


# --- what is wrong ------------------------------------------------------------------------------------------------

HEAD = (
    "schema: simtune/acceptance@1\nname: mine\norigin: assumed\nsource: a test\n"
    "rates: {kind: per_position, conditional: [0.6, 0.6]}\n"
)
TO = "{kind: per_position, conditional: [0.8, 0.8]}"


@pytest.mark.parametrize(
    ("drift", "message"),
    [
        (
            f"{{kind: linear, points: [{{at: 9, rates: {TO}}}, {{at: 5, rates: {TO}}}]}}",
            "a.yaml:6:23: drift.points: points must ascend: 5 comes after 9",
        ),
        (f"{{kind: linear, points: [{{at: 0, rates: {TO}}}]}}", "drift.points.0.at: must be greater than 0"),
        ("{kind: linear, points: []}", "drift.points: must have at least 1 item"),
        (f"{{kind: exponential, to: {TO}, constant: 0}}", "drift.constant: must be greater than 0"),
        (f"{{kind: exponential, to: {TO}}}", "drift.constant: is required and missing"),
        (
            f"{{kind: exponential, over: minutes, to: {TO}, constant: 5}}",
            "drift.over: must be one of requests, seconds, not 'minutes'",
        ),
        ("{kind: exponential, to: {kind: beta, a: 1, b: 1}, constant: 5}", "drift.to: unknown kind 'beta': one of"),
        (f"{{kind: exponental, to: {TO}, constant: 5}}", "did you mean exponential"),
    ],
)  # fmt: skip
def test_a_wrong_drift_is_refused_with_its_place(drift: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        Acceptance.from_text(f"{HEAD}drift: {drift}\n", "a.yaml")
    assert message in str(refused.value)


def test_rates_that_are_a_request_s_own_cannot_drift() -> None:
    drift = f"drift: {{kind: exponential, to: {TO}, constant: 5}}"
    own = "rates: {kind: beta, a: 4.0, b: 1.0}"
    with pytest.raises(SpecError, match=r"a\.yaml:6:1: drift: rates of kind beta cannot drift, for each request"):
        Acceptance.from_text(f"{HEAD[: HEAD.index('rates')]}{own}\n{drift}\n", "a.yaml")
    with pytest.raises(SpecError, match=r"conditions\.0\.drift: rates of kind beta cannot drift"):
        Acceptance.from_text(f"{HEAD}conditions:\n- {{request_class: code, {own}, {drift}}}\n", "a.yaml")


def test_a_drift_reaches_as_deep_as_its_drafts() -> None:
    short = PerPosition(conditional=(0.8, 0.7))
    with pytest.raises(Infeasible, match="drafts are 3 tokens deep, and the rates are known for 2; draft less"):
        sampler(Chain(tokens=3), at_once(4), rising(to=short))


def test_a_closed_loop_has_no_seconds_to_drift_over() -> None:
    stream = stream_of(None, [10] * 4, [10] * 4, users=2)
    with pytest.raises(UsageError, match=r"mine: drifts over seconds, .* a closed loop has none; set `over: requests`"):
        sampler(Chain(tokens=3), stream, rising("seconds"))
    sampler(Chain(tokens=3), stream, rising("requests"))


def test_a_drift_is_read_as_it_was_written_told_and_shifted() -> None:
    erring = PerPosition(conditional=(0.8, 0.8), standard_error=(0.1, 0.05))
    for drift in (rising(to=erring), line((5, erring))):
        mine = Acceptance(
            name="mine",
            origin="assumed",
            source="made up",
            rates=erring,
            drift=drift,
            conditions=(Condition(request_class="code", rates=LOW, drift=drift),),
        )
        assert Acceptance.from_text(mine.to_yaml()) == mine
        assert [note.split(": ")[1] for note in mine.notices()] == ["drift", "conditions.0.drift"]
        worse = mine.shifted(-1)
        for its in (worse.drift, worse.drift_for("code")):
            assert its is not None
            assert its.later[0].chain(2) == pytest.approx((0.7, 0.75))
        assert worse.rates_for("code") == LOW
    still = Acceptance(name="mine", origin="assumed", source="made up", rates=LOW)
    assert "drift" not in still.to_yaml()
    assert still.notices() == []
