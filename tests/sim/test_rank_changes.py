"""Ranks that fail, leave and join: who computes what again, what steps take before, during and after the pause."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import pytest

from simtune.costs.compiled import CompiledCosts, LinearCosts, compile_costs
from simtune.costs.elastic_experts import placing_s, with_ranks
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.errors import Infeasible
from simtune.results.result import Result
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.drafting import Drafting
from simtune.sim.plan_parts import OwnCosts
from simtune.specs.catalog import load_model
from simtune.specs.plan import Plan
from simtune.specs.speculation import Speculation
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream
from tests.costs.made_up import hardware, model, moe
from tests.oracles.rank_group import Batch, Change, Group, Rank
from tests.sim.test_speculative_world import AHEAD, SCHEMES, acceptance, drafter_for
from tests.sim.worlds import ByRanks as SharedByRanks

EXPERTS = model(feed_forward=moe())
HARDWARE = hardware(host_step_s=1e-4)
BUDGET = 64


def plan(*events: dict[str, Any], elastic: bool | None = True, **pool: Any) -> Plan:
    """A plan of one instance of four ranks with 4 of 8 experts each, so that two ranks have room for all."""
    parallelism = {"attention_dp": 4, "expert_parallel": True, "expert_replicas": 8, "elastic_experts": elastic}
    mixed = {
        "hardware": "made-up",
        "instances": 1,
        "parallelism": parallelism,
        "batching": {"max_num_seqs": 32, "max_num_batched_tokens": BUDGET},
        "kv_cache": {"num_blocks": 2000, "block_size": 16},
        "async_scheduling": False,
        "max_model_len": 4096,
    }
    block = {"name": "ranks", "model": "tiny", "pools": [mixed | pool], "events": list(events)}
    return Plan.model_validate(block, strict=False)


def fails(rank: int, at_s: float, pause_s: float | None = 1.0, recover_s: float | None = None) -> dict[str, Any]:
    event = {"kind": "rank_failure", "pool": "mixed", "instance": 0, "rank": rank, "at_s": at_s}
    return event | {"pause_s": pause_s, "recover_s": recover_s}


def scaled(ranks: int, at_s: float, pause_s: float | None = 1.0) -> dict[str, Any]:
    return {"kind": "scale", "pool": "mixed", "instance": 0, "ranks": ranks, "at_s": at_s, "pause_s": pause_s}


def deployed(*events: dict[str, Any], **how: Any) -> Deployment:
    return deploy(plan(*events, **how), EXPERTS, HARDWARE)


def decoding(deployment: Deployment, *, requests: int = 8, tokens: int = 2000, **how: Any) -> Result:
    """Requests with one token of prompt each, all at once, so that four ranks decode two each."""
    stream = stream_of([0.0] * requests, [1] * requests, [tokens] * requests)
    return deployment.simulate(stream, **how)


@cache
def costs_of(ranks: int) -> CompiledCosts:
    return compile_costs(EXPERTS, HARDWARE, with_ranks(plan().pools[0], EXPERTS, ranks), 4096)


def step_ticks(ranks: int, batches: list[Batch]) -> int:
    """Ticks of a step of a group, by the costs of single ranks."""
    costs = costs_of(ranks)
    tokens = [batch.decodes + sum(n for _, n in batch.chunks) for batch in batches]
    ticks = []
    for batch, num_tokens in zip(batches, tokens, strict=True):
        if batch.chunks:
            alone = costs.mixed(batch.decodes, batch.context_tokens, batch.chunks, batch.samples)
        else:
            alone = costs.decode(batch.decodes, batch.context_tokens)[0]
        num_seqs = batch.decodes + len(batch.chunks)
        ticks.append(costs.together(alone, num_tokens, num_seqs, sum(tokens), bool(batch.chunks)))
    return max(ticks)


def token_ticks(result: Result) -> list[int]:
    """Times between tokens of all requests."""
    return [
        int(first + k * slope)
        for first, slope, n, decodes in result.outcome.intervals
        for k in range(n)
        for _ in range(decodes)
    ]


# --- by hand ------------------------------------------------------------------------------------------------


def test_a_group_goes_on_after_a_pause_at_the_costs_of_the_ranks_that_stay() -> None:
    """Eight requests decode on four ranks; one of these fails. Its two requests are computed again on two of the three
    others: steps of 2, 2, 2, 2 decodes before, of 3, 3, 2 after the step that is computed again and the one in which
    their tokens are computed."""
    at_s, pause_s = 0.5, 1.0
    result = decoding(deployed(fails(3, at_s, pause_s)))
    assert result.outcome.resent.tolist() == [0, 0, 0, 1, 0, 0, 0, 1]

    at, until = round(at_s * TICKS_PER_SECOND), round((at_s + pause_s) * TICKS_PER_SECOND)
    now, context = step_ticks(4, [Batch(0, 0, ((0, 1), (0, 1)), 2)] * 4), 1
    while (end := now + step_ticks(4, [Batch(2, 2 * (context + 1), (), 2)] * 4)) <= at:
        now, context = end, context + 1
    emitted = context
    # The step that is lost is computed again by three ranks.
    again = until + step_ticks(3, [Batch(2, 2 * (context + 1), (), 2)] * 3)
    context += 1
    # Then two of them compute a lost request anew beside their own.
    chunk = ((0, emitted + 1),)
    with_chunk = Batch(2, 2 * (context + 1), ((0, BUDGET - 2),), 2)
    assert chunk[0][1] > BUDGET
    gaps = token_ticks(result)
    assert gaps.count(again - now) == 6, "of the six requests on ranks that stay"
    assert max(gaps) == again - now
    assert gaps.count(step_ticks(3, [with_chunk, with_chunk, Batch(2, 2 * (context + 1), (), 2)])) == 6


def test_an_idle_instance_begins_at_the_end_of_the_pause() -> None:
    events = (scaled(3, 1.0, 5.0),)
    stream = stream_of([2.0], [8], [1])
    outcome = deployed(*events).simulate(stream).outcome
    ticks = step_ticks(3, [Batch(0, 0, ((0, 8),), 1)])
    assert outcome.finish.tolist() == [6 * TICKS_PER_SECOND + ticks]


def test_a_rank_that_joins_gets_requests_after_the_pause() -> None:
    """Requests in turn: rank 3 is passed over until it is back."""
    arrivals = [0.1 * i for i in range(60)]
    outcome = deployed(fails(3, 1.0, 0.0, 2.0)).simulate(stream_of(arrivals, [8] * 60, [2] * 60)).outcome
    on_third = [i for i, core in enumerate(outcome.core.tolist()) if core == 3]
    assert [i for i in on_third if i < 10] == [3, 7]
    assert min(i for i in on_third if i > 10) == pytest.approx(30, abs=4)
    assert not any(10 < i < 30 for i in on_third)


def test_without_elastic_experts_the_instance_fails_with_the_rank() -> None:
    event = {"kind": "failure", "pool": "mixed", "instance": 0, "at_s": 0.5, "recover_s": 2.0}
    lost = fails(2, 0.5, None, 2.0)
    whole, one = (decoding(deployed(of, elastic=None)).outcome for of in (event, lost))
    assert whole.resent.tolist() == [1] * 8
    assert (whole.finish == one.finish).all()
    assert whole.resent.tolist() == one.resent.tolist()


def test_a_pause_follows_from_the_bytes_of_experts() -> None:
    """Three ranks hold 4 of 8 experts of 3 x 64 x 32 values in each of two layers; half of these were there before."""
    pool = with_ranks(plan().pools[0], EXPERTS, 3)
    assert pool.parallelism.expert_replicas == 4
    pause_s = placing_s(pool, EXPERTS, HARDWARE)
    assert pause_s == pytest.approx(2 * 4 * 3 * 64 * 32 * 2 * 0.5 / 1e8)
    computed, stated = (decoding(deployed(fails(0, 0.5, of))).outcome for of in (None, pause_s))
    assert (computed.finish == stated.finish).all()


def test_ranks_without_room_for_all_experts_are_refused() -> None:
    with pytest.raises(Infeasible, match=r"with 1 of 4 data-parallel ranks .* room for 4 experts of tiny") as refused:
        deployed(scaled(1, 1.0))
    assert "expert_replicas to at least 24" in str(refused.value)
    roomy = plan(scaled(1, 1.0)).pools[0].parallelism.model_copy(update={"expert_replicas": 24})
    decoding(deployed(scaled(1, 1.0), parallelism=roomy.model_dump()))


class ByRanks:
    """Steps of a second, divided by the number of ranks."""

    def __init__(self, ranks: int = 4) -> None:
        self._costs = LinearCosts(step_s=1 / ranks)

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        return self._costs.decode(num_decodes, context_tokens)

    def mixed(self, *step: Any) -> int:
        return self._costs.mixed(*step)

    def with_ranks(self, ranks: int) -> ByRanks:
        return ByRanks(ranks)


def test_rates_before_and_after_are_those_of_the_ranks() -> None:
    """Eight requests, two on each of four ranks: eight tokens in 0.25 s up to 3.5 s, then a step that is lost at 3.6 s,
    a pause of 2 s, and the same step again on two ranks, up to 6.1 s. In the next step, up to 6.6 s, the other four
    requests are computed again; from then on there are eight tokens in 0.5 s."""
    deployment = deploy(plan(scaled(2, 3.6, 2.0)), EXPERTS, HARDWARE, OwnCosts(ByRanks()))
    result = decoding(deployment, tokens=40)
    stay, leave = 6.1 + 25 * 0.5, 6.6 + 25 * 0.5
    ends = [stay, stay, leave, leave] * 2
    assert result.outcome.finish.tolist() == [round(end * TICKS_PER_SECOND) for end in ends]
    assert result.outcome.resent.tolist() == [0, 0, 1, 1] * 2
    gaps = [gap / TICKS_PER_SECOND for gap in token_ticks(result)]
    assert gaps.count(0.25) == 8 * 13
    assert gaps.count(0.5) == 8 * 25
    assert [gap for gap in gaps if gap not in (0.25, 0.5)] == pytest.approx([2.6] * 4)


def test_costs_from_outside_may_know_other_numbers_of_ranks() -> None:
    with pytest.raises(Infeasible, match="step costs from outside are those of 4 ranks"):
        deploy(plan(scaled(2, 0.6)), EXPERTS, HARDWARE, OwnCosts(LinearCosts(step_s=1.0)))


# --- an oracle ----------------------------------------------------------------------------------------------


def world(seed: int) -> tuple[list[dict[str, Any]], list[Change], RequestStream]:
    """A load, and events of ranks as the plan and the oracle have them."""
    random = Random(seed)
    events: list[dict[str, Any]] = []
    changes: list[Change] = []
    at_s, ranks, present = 0.0, 4, 4
    away: dict[int, float] = {}
    for _ in range(random.randint(1, 4)):
        at_s += random.choice((0.0, 1e-3, 0.01, 0.05, 0.2))
        pause_s = random.choice((0.0, 1e-3, 0.02, 0.3))
        if seed % 2:
            target = random.choice([n for n in (2, 3, 4) if n != present])
            events.append(scaled(target, at_s, pause_s))
            leaving, joining = range(target, present), range(present, target)
            changes.append(change(at_s, leaving, joining, target, pause_s))
            present = target
        else:
            rank = random.randrange(ranks)
            if rank in away or sum(back_s > at_s for back_s in away.values()) > 1 or len(away) > 1:
                continue
            recover_s = random.choice((None, 0.01, 0.1))
            away[rank] = float("inf") if recover_s is None else at_s + recover_s
            events.append(fails(rank, at_s, pause_s, recover_s))
            changes.append(change(at_s, (rank,), (), 0, pause_s))
            if recover_s is not None:
                changes.append(change(at_s + recover_s, (), (rank,), 0, pause_s))
    if not seed % 2:
        changes.sort(key=lambda of: (of.tick, bool(of.joining)))
        for i, of in enumerate(changes):
            present += len(of.joining) - len(of.leaving)
            changes[i] = of._replace(ranks=present)
    count = random.randint(3, 25)
    arrivals = sorted(random.choice((0.0, 0.01, 0.1 * random.random())) for _ in range(count))
    prompts = [random.randint(1, 90) for _ in range(count)]
    outputs = [random.randint(1, 150) for _ in range(count)]
    return events, changes, stream_of(arrivals, prompts, outputs)


def change(at_s: float, leaving: Any, joining: Any, ranks: int, pause_s: float) -> Change:
    tick = round(at_s * TICKS_PER_SECOND)
    return Change(tick, tuple(leaving), tuple(joining), ranks, tick + round(pause_s * TICKS_PER_SECOND))


def left_early(changes: list[Change]) -> list[Change]:
    """Without ranks that leave again before they are there."""
    kept = [list(of.joining) for of in changes]
    for i, later in enumerate(changes):
        for rank in later.leaving:
            for of, joining in zip(changes[:i], kept, strict=False):
                if of.until > later.tick and rank in joining:
                    joining.remove(rank)
    return [of._replace(joining=tuple(joining)) for of, joining in zip(changes, kept, strict=True)]


@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_when_the_oracle_says(seed: int) -> None:
    events, changes, stream = world(seed)
    assert stream.arrival_s is not None
    group = Group(
        stream.prompt_tokens.tolist(), stream.output_tokens.tolist(), BUDGET, step_ticks, [Rank() for _ in range(4)]
    )
    group.run([round(at_s * TICKS_PER_SECOND) for at_s in stream.arrival_s.tolist()], left_early(changes))
    deployment = deployed(*events)
    for single_steps in (False, True):
        outcome = deployment.simulate(stream, single_steps=single_steps).outcome
        assert outcome.first_token.tolist() == [group.first_token[i] for i in range(len(stream))]
        assert outcome.finish.tolist() == [group.finish[i] for i in range(len(stream))]
        assert outcome.resent.tolist() == [group.resent.get(i, 0) for i in range(len(stream))]


def of_the_instance(kind: str, at_s: float, **more: float) -> dict[str, Any]:
    return {"kind": kind, "pool": "mixed", "instance": 0, "at_s": at_s, **more}


@pytest.mark.parametrize(
    "events",
    [
        (of_the_instance("failure", 0.05, recover_s=0.1), fails(1, 0.2, 0.05, 0.1)),
        (of_the_instance("failure", 0.05, recover_s=0.1), scaled(2, 0.2, 0.05), scaled(4, 0.21, 0.1)),
        (of_the_instance("start", 0.05, delay_s=0.05), scaled(2, 0.1, 0.0)),
        (of_the_instance("start", 0.05), fails(0, 0.05, 0.2)),
    ],
)
@pytest.mark.parametrize("num_blocks", [27, 2000])
def test_ranks_change_after_the_whole_instance(events: tuple[dict[str, Any], ...], num_blocks: int) -> None:
    """Also if requests are preempted: jumps are single steps to the tick, and every request ends."""
    room = {"kv_cache": {"num_blocks": num_blocks, "block_size": 16}, "max_model_len": 400}
    deployment = deployed(*events, **room)
    preempted = 0
    for seed in range(4):
        random = Random(seed)
        arrivals = sorted(0.1 * random.random() for _ in range(32))
        lengths = [[random.randint(1, most) for _ in arrivals] for most in (90, 150)]
        stream = stream_of(arrivals, *lengths)
        jumped, stepped = (deployment.simulate(stream, single_steps=single).outcome for single in (False, True))
        for column in ("first_token", "finish", "resent", "preemptions"):
            assert getattr(jumped, column).tolist() == getattr(stepped, column).tolist()
        assert (jumped.finish >= 0).all()
        preempted += int(jumped.preemptions.sum())
    assert (preempted > 0) == (num_blocks == 27)


# --- drafts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chain of unequal requests", "adaptive by steps", "static tree"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_jumps_of_drafting_ranks_are_single_steps_to_the_tick(name: str, asynchronous: bool) -> None:
    if asynchronous and name not in AHEAD:
        pytest.skip("its drafts are not counted ahead")
    scheme, rates = SCHEMES[name]
    speculation = Speculation(drafter=drafter_for(scheme), scheme=scheme, acceptance="made up")
    drafting = Drafting(acceptance(rates), load_model("llama-3.2-1b"))
    for seed in range(12):
        events, _, stream = world(seed)
        pool: dict[str, Any] = {"speculation": speculation.model_dump(), "async_scheduling": asynchronous}
        costs = OwnCosts(SharedByRanks(LinearCosts(step_s=1e-3, per_token_s=2e-5, per_context_s=3e-7)))
        deployment = deploy(plan(*events, **pool), EXPERTS, HARDWARE, costs, drafting=drafting)
        jumped, stepped = (deployment.simulate(stream, single_steps=single).outcome for single in (False, True))
        for column in ("first_token", "finish", "resent"):
            assert getattr(jumped, column).tolist() == getattr(stepped, column).tolist()
        assert jumped.steps == stepped.steps
        assert [core.drafting for core in jumped.cores] == [core.drafting for core in stepped.cores]
        assert [core.busy for core in jumped.cores] == [core.busy for core in stepped.cores]
        assert (jumped.finish >= 0).all()
