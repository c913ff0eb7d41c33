"""The swimlanes of a run: every tick in one span, nothing averaged, and each request's life as it was simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.api import load_specs, set_up
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.results.result import Result
from simtune.runs.swimlanes import KINDS, Swimlanes, swimlanes_of
from simtune.runs.timeline import sampled

ROOT = Path(__file__).resolve().parents[2]
US = 1e6 / TICKS_PER_SECOND


@pytest.fixture(scope="module")
def result() -> Result:
    """Prefill and decode apart, with few KV blocks, so that requests are transferred and preempted."""
    plan = ROOT / "examples" / "prefill-decode" / "plan.yaml"
    changed = {"plan": ["pools.1.kv_cache.num_blocks=1100"], "model": [], "hardware": [], "workload": []}
    specs = load_specs(None, None, "chat", str(plan), changed, None)
    return set_up(specs, rate_rps=40, requests=150, seed=0).run(record=True)


def whole(result: Result, **cut: int) -> Swimlanes:
    swimlanes = swimlanes_of(result, **cut)
    assert swimlanes is not None
    return swimlanes


def test_a_span_is_one_jump_and_its_time_has_one_kind(result: Result) -> None:
    swimlanes = whole(result)
    records = result.outcome.records
    assert swimlanes.steps_per_span == 1
    assert sum(len(swimlane.length_us) for swimlane in swimlanes.swimlanes) == len(records)
    for number, swimlane in enumerate(swimlanes.swimlanes):
        mine = [r for r in records if r.core == number]
        starts = [sum(swimlane.start_us[: i + 1]) for i in range(len(mine))]
        assert starts == [round(r.start * US) for r in mine]
        for i, r in enumerate(mine):
            spent = [getattr(swimlane, f"{kind}_us")[i] for kind in KINDS]
            assert sum(spent) == swimlane.length_us[i]
            assert sum(x > 0 for x in spent) == 1
            assert swimlane.running_low[i] == swimlane.running_high[i] == r.running
    assert [swimlane.instance for swimlane in swimlanes.swimlanes] == ["prefill 0", "prefill 1", "decode 0"]
    assert not any(swimlanes.swimlanes[0].decode_us)
    assert not any(swimlanes.swimlanes[2].draft_us)


def test_many_jumps_are_few_spans_with_their_least_and_most(result: Result) -> None:
    exact, coarse = whole(result), whole(result, most_spans=40)
    assert coarse.steps_per_span == -(-len(result.outcome.records) // 40)
    for fine, swimlane in zip(exact.swimlanes, coarse.swimlanes, strict=True):
        assert sum(swimlane.steps) == sum(fine.steps)
        for kind in KINDS:
            assert swimlane.share(kind, 1) == fine.share(kind, 1)
        for what in ("running", "waiting", "free_blocks"):
            assert min(getattr(swimlane, f"{what}_low")) == min(getattr(fine, f"{what}_low"))
            assert max(getattr(swimlane, f"{what}_high")) == max(getattr(fine, f"{what}_high"))
        assert all(low <= high for low, high in zip(swimlane.running_low, swimlane.running_high, strict=True))


def test_a_life_is_what_happened_to_the_request(result: Result) -> None:
    swimlanes, outcome = whole(result), result.outcome
    assert len(swimlanes.lives) == swimlanes.requests == 150
    assert sum(len(life.preempted_us) for life in swimlanes.lives) == outcome.preemptions.sum() > 0
    for life in swimlanes.lives:
        i = life.request
        times = (life.arrival_us, life.scheduled_us, life.first_token_us, life.transferred_us, life.finish_us)
        columns = (outcome.arrival, outcome.scheduled, outcome.first_token, outcome.transferred, outcome.finish)
        assert times == tuple(round(column[i] * US) for column in columns)
        first = [chunk for chunk in life.chunks if chunk[0] < 2]  # on a prefill instance, before it was sent
        assert sum(tokens for *_, tokens in first) == life.prompt_tokens
        assert life.scheduled_us == first[0][1]
        assert abs(first[-1][1] + first[-1][2] - round(outcome.prefilled[i] * US)) <= 1
        assert (life.first_token_us or 0) > (life.transferred_us or 0), "the decode instance delivers the first token"
        assert life.swimlane == 2
        received = swimlanes.swimlanes[2].transfer_us
        assert any(begin <= (life.transferred_us or 0) <= end for begin, end in received)


def test_of_many_requests_the_slowest_are_kept(result: Result) -> None:
    few = whole(result, most_lives=30)
    assert len(few.lives) <= 30
    slowest = {int(i) for i in (-result.e2el_s).argsort(kind="stable")[:3]}
    assert slowest <= {life.request for life in few.lives}


def test_steps_that_were_not_recorded_leave_no_lanes() -> None:
    specs = load_specs("llama-3.1-8b", "h100-sxm", "chat", None, {}, None)
    assert swimlanes_of(set_up(specs, rate_rps=2, requests=5, seed=0).run(record=False)) is None


def test_columns_of_lanes_are_of_one_length_and_without_steps_nothing_is_drawn() -> None:
    experiment = set_up(load_specs("llama-3.1-8b", "h100-sxm", "chat"), requests=5)
    result = experiment.deployment.simulate(experiment.stream)
    assert not result.outcome.records
    assert swimlanes_of(result) is None
    assert sampled(result).t_s == ()
