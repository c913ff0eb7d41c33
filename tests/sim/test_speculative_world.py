"""Speculation under the clock: jumps and single steps agree to the tick; draws are the requests' own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.costs.drafting import CompiledRounds, RoundModel, draft_memory
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import DraftingTerms, Request, Tally, VllmFcfs
from simtune.errors import Infeasible
from simtune.results.outcome import Outcome
from simtune.sim.core import EngineCore
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.drafting import AcceptanceSampler, Drafting, SharedBudget, drafting_terms, uniform
from simtune.sim.idle import idle_settings
from simtune.sim.world import World
from simtune.specs import trees
from simtune.specs.acceptance import Acceptance, BetaMixture, Condition, PerPosition, PerRank, Rates, Revealed
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.drafters import BlockDrafter, Drafter, DraftModel, Eagle, Medusa, Ngram
from simtune.specs.feedback import GainRule, StepRule
from simtune.specs.plan import KvLink, Plan
from simtune.specs.pool import Batching, Pool, Role
from simtune.specs.schemes import (
    Adaptive,
    BatchRange,
    ByBatch,
    Chain,
    Dsi,
    DynamicTree,
    Frontier,
    Pearl,
    Scheme,
    StaticTree,
    Threshold,
    TokenBudget,
)
from simtune.specs.speculation import Speculation
from simtune.testing.clusters import Cluster, check, clusters, stream_of
from simtune.tuner.drafting import chain, tree
from simtune.workload.requests import RequestStream
from tests.oracles import chain as exact
from tests.oracles import overlap

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")

POSITIONS = PerPosition(conditional=(0.8, 0.7, 0.6, 0.5))
POSITIONS_OF_FIVE = PerPosition(conditional=(0.8, 0.7, 0.6, 0.5, 0.5))
RANKS = PerRank(probability=((0.6, 0.2, 0.1), (0.5, 0.18, 0.08), (0.45, 0.15, 0.06)))
NODES = ((1,), (2,), (3,), (1, 1), (1, 2), (2, 1), (1, 1, 1))
RANGES = (
    BatchRange(first=1, last=2, tokens=3),
    BatchRange(first=3, last=4, tokens=1),
    BatchRange(first=5, last=9, tokens=0),
)

SCHEMES: dict[str, tuple[Scheme, Rates]] = {
    "chain": (Chain(tokens=3), POSITIONS),
    "chain of unequal requests": (Chain(tokens=3), BetaMixture(a=4, b=1.5)),
    "by batch": (ByBatch(max_tokens=3, ranges=RANGES), POSITIONS),
    "threshold, revealed": (Threshold(max_tokens=5, stop_at=0.6), Revealed(rate=(0.95, 0.5), share=(0.6, 0.4))),
    "threshold of unequal requests": (Threshold(max_tokens=5, stop_at=0.6), BetaMixture(a=4, b=1.5)),
    "adaptive by steps": (Adaptive(start=2, max_tokens=5, rule=StepRule(up=2, down=1)), POSITIONS_OF_FIVE),
    "adaptive by gain": (Adaptive(start=3, max_tokens=6, rule=GainRule(draft_cost=0.1)), BetaMixture(a=4, b=1.5)),
    "static tree": (StaticTree(nodes=NODES), RANKS),
    "dynamic tree": (DynamicTree(steps=3, topk=2, tokens=6), RANKS),
    "budget": (TokenBudget(tokens=9, max_tokens=4), BetaMixture(a=4, b=1.5)),
    "overlapped": (Pearl(tokens=3), POSITIONS),
    "overlapped, of unequal requests": (Pearl(tokens=4), BetaMixture(a=9, b=1.5)),
    "replicas": (Dsi(tokens=3, replicas=3), POSITIONS),
    "replicas, one token at a time": (Dsi(tokens=1, replicas=4), BetaMixture(a=9, b=1.5)),
    "chunks": (Frontier(tokens=4, chunks=2, draft_share=0.3, verify_share=0.7), POSITIONS),
}

AHEAD = (
    "chain",
    "chain of unequal requests",
    "by batch",
    "threshold of unequal requests",
    "static tree",
    "dynamic tree",
)
"""Schemes that asynchronous scheduling goes with."""
STEP_BY_STEP = ("threshold, revealed", "adaptive by steps", "adaptive by gain")
"""Schemes whose drafts in turn may be others in every step, which is never repeated therefore."""

COLUMNS = ("arrival", "scheduled", "first_token", "finish", "preemptions", "transferred", "resent")


def acceptance(rates: Rates, **more: Any) -> Acceptance:
    return Acceptance(name="assumed", origin="assumed", source="made up", rates=rates, **more)


def sampler(scheme: Scheme, rates: Rates, stream: RequestStream, seed: int = 0) -> AcceptanceSampler:
    return AcceptanceSampler(scheme, acceptance(rates), stream, seed)


def drafter_for(scheme: Scheme) -> Drafter:
    return DraftModel(model="llama-3.2-1b") if scheme.shape.overlapped else Eagle()


def columns(outcome: Outcome) -> dict[str, list[int]]:
    return {name: getattr(outcome, name).tolist() for name in COLUMNS}


def tally(outcome: Outcome) -> Tally:
    return Tally(*map(sum, zip(*(core.drafting for core in outcome.cores), strict=True)))


def requests(n: int, tokens: int) -> RequestStream:
    return stream_of(np.arange(n) * 0.05, [10] * n, [tokens] * n)


# --- jumps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
def test_jumps_are_single_steps_to_the_tick(name: str) -> None:
    saved = 0

    @given(st.data())
    @hypothesis_settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(data: st.DataObject) -> None:
        nonlocal saved
        scheme, rates = SCHEMES[name]
        block_size, blocks = data.draw(st.sampled_from([1, 4, 16])), data.draw(st.sampled_from([12, 30, 80]))
        longest, n = blocks * block_size, data.draw(st.integers(1, 25))
        prompt = data.draw(st.lists(st.integers(1, longest // 2), min_size=n, max_size=n))
        output = data.draw(st.lists(st.integers(1, min(longest // 2, 250)), min_size=n, max_size=n))
        gaps = data.draw(st.lists(st.sampled_from([0.0, 1e-3, 0.02, 0.3]), min_size=n, max_size=n))
        closed = data.draw(st.booleans())
        arrival = None if closed else np.cumsum(gaps).tolist()
        stream = stream_of(arrival, prompt, output, users=4 if closed else 0)
        costs = LinearCosts(
            step_s=1e-3,
            per_token_s=data.draw(st.sampled_from([0.0, 2e-5])),
            per_context_s=data.draw(st.sampled_from([0.0, 3e-7, 1e-5])),
            per_depth_s=data.draw(st.sampled_from([0.0, 1e-4])),
        )
        seqs, extra = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 1))
        budget = max(seqs, 4, data.draw(st.sampled_from([8, 24, 512])))
        ahead = name in AHEAD and data.draw(st.booleans())

        def run(single_steps: bool) -> Outcome:
            drafts = drafting_terms(
                Speculation(drafter=drafter_for(scheme), scheme=scheme, acceptance="assumed"),
                sampler(scheme, rates, stream),
            )
            cores = [
                EngineCore(
                    VllmFcfs(
                        num_blocks=blocks,
                        block_size=block_size,
                        max_num_seqs=seqs,
                        max_num_batched_tokens=budget,
                        max_model_len=longest,
                        async_scheduling=ahead,
                        speculation=replace(drafts, extra_slots=extra),
                    ),
                    costs,
                )
                for _ in range(2)
            ]
            return World(cores, stream, single_steps=single_steps).run()

        jumped, stepped = run(False), run(True)
        assert columns(jumped) == columns(stepped)
        assert (jumped.steps, tally(jumped)) == (stepped.steps, tally(stepped))
        times = [np.sort(np.repeat(_expanded(o)[:, 0], _expanded(o)[:, 1])).tolist() for o in (jumped, stepped)]
        assert times[0] == times[1]
        if name in AHEAD:
            # A recomputed prompt gives a token too, some time after the last one.
            recomputed = int((stream.output_tokens - 1)[stepped.finish >= 0].sum()) - tally(stepped).tokens
            assert 0 <= recomputed <= stepped.preemptions.sum()
            assert len(times[0]) == tally(stepped).rounds + recomputed, "each round delivers, and nothing is discarded"
        fits = stream.prompt_tokens + stream.output_tokens <= longest
        # Everyone gets all tokens, and prompts give the first: the others come out of rounds, but for those that a
        # recomputed prompt gives again.
        assert tally(jumped).tokens <= int((stream.output_tokens - 1)[fits].sum())
        if not jumped.preemptions.any():
            assert tally(jumped).tokens == int((stream.output_tokens - 1)[fits].sum())
        saved += stepped.events - jumped.events

    check()
    assert (saved > 0) == (name not in STEP_BY_STEP)


@pytest.mark.parametrize("name", ["chain", "by batch", "threshold of unequal requests", "static tree"])
@pytest.mark.parametrize("apart", [False, True])
def test_drafts_in_clusters(name: str, apart: bool) -> None:
    """Pipelines, handovers, failures, and the prefix cache: still exact, and nothing is lost."""
    scheme, rates = SCHEMES[name]
    spec = Speculation(drafter=drafter_for(scheme), scheme=scheme, acceptance="assumed")

    @given(clusters(apart=apart, failing=True), st.booleans(), st.booleans())
    @hypothesis_settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    def drafting(cluster: Cluster, ahead: bool, caching: bool) -> None:
        options = {
            "speculation": drafting_terms(spec, sampler(scheme, rates, cluster.stream)),
            "prefix_caching": caching,
        }
        front = replace(cluster.front, budget=max(8, cluster.front.budget))
        back = cluster.back and replace(cluster.back, budget=max(8, cluster.back.budget))
        check(replace(cluster, front=front, back=back, async_scheduling=ahead, options=options, cores=[]))

    drafting()


def _expanded(outcome: Outcome) -> np.ndarray:
    """(ticks, decodes) of every step."""
    rows = [
        (first + k * slope, decodes)
        for first, slope, steps, decodes in outcome.intervals.tolist()
        for k in range(steps)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def deployed(
    scheme: Scheme,
    rates: Rates,
    drafter: Drafter,
    draft: str | None = None,
    *,
    apart: bool = False,
    seqs: int = 16,
    **pool: Any,
) -> Deployment:
    spec = Speculation(drafter=drafter, scheme=scheme, acceptance="assumed")
    batching = Batching(max_num_seqs=seqs, max_num_batched_tokens=512)
    one = {"hardware": HARDWARE.name, "instances": 1, "batching": batching, "max_model_len": 2048, **pool}
    if apart:
        decode = Pool(name="decode", role="decode", speculation=spec, **one)
        plan = Plan(
            name="plan", model=MODEL.name, pools=(Pool(name="prefill", role="prefill", **one), decode), link=KvLink()
        )
    else:
        plan = Plan(name="plan", model=MODEL.name, pools=(Pool(speculation=spec, **one),))
    model = None if draft is None else load_model(draft)
    return deploy(plan, MODEL, HARDWARE, drafting=Drafting(acceptance(rates), model))


DRAFTERS: dict[str, tuple[Drafter, str | None]] = {
    "model": (DraftModel(model="llama-3.2-1b"), "llama-3.2-1b"),
    "head": (Eagle(), None),
    "n-gram": (Ngram(lookup_max=3, host_s=2e-5), None),
}


OF_ALL = ("chain", "static tree", "threshold of unequal requests", "by batch")
JUMPS = [
    *((name, drafter, apart) for name in OF_ALL for drafter in DRAFTERS for apart in (False, True)),
    *((name, "model", apart) for name in ("overlapped", "chunks") for apart in (False, True)),
    ("replicas", "model", False),
    ("replicas, one token at a time", "model", False),
    ("chunks", "head", False),
]


@pytest.mark.parametrize(("name", "drafter", "apart"), JUMPS)
def test_compiled_rounds_jump_exactly_too(name: str, drafter: str, apart: bool) -> None:
    rng = np.random.default_rng(3)
    stream = stream_of(
        np.cumsum(rng.exponential(0.05, 60)), rng.integers(1, 900, 60).tolist(), rng.integers(1, 300, 60).tolist()
    )
    deployment = deployed(*SCHEMES[name], *DRAFTERS[drafter], apart=apart)
    jumped, stepped = (deployment.simulate(stream, single_steps=single).outcome for single in (False, True))
    assert columns(jumped) == columns(stepped)
    assert tally(jumped) == tally(stepped)
    assert jumped.events < stepped.events
    assert (jumped.transferred >= 0).any() == apart


# --- sampler ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chain", chain.expected_tokens(POSITIONS.conditional[:3])),
        ("chain of unequal requests", chain.expected_tokens(exact.beta(4, 1.5, 3))),
        ("static tree", 1 + tree.expected_accepted(NODES, RANKS.probability)),
        ("dynamic tree", 1 + tree.expected_accepted(trees.dynamic(RANKS.probability, 3, 2, 6), RANKS.probability)),
        ("threshold, revealed", 1 + chain.stopped((0.95, 0.5), (0.6, 0.4), 5, 0.4).accepted),
    ],
)
def test_tokens_per_round_are_those_of_the_formulas(name: str, expected: float) -> None:
    stream = requests(2000, 100)
    drawn = sampler(*SCHEMES[name], stream)
    rounds = np.array([drawn.accepted(Request(i, 10, 100), 0, 200) for i in range(2000)])
    made = 5 if not drawn.varies else np.array([drawn.stops(Request(i, 10, 100), 0, 200) for i in range(2000)])
    per_request = 1 + np.minimum(rounds, made).mean(axis=1)
    error = per_request.std() / np.sqrt(2000)
    assert abs(per_request.mean() - expected) < 4 * error
    assert error < 0.02 * expected


def test_a_world_yields_as_many_tokens_per_round_as_the_formula_that_knows_of_the_last_round() -> None:
    """One request at a time. A round may be cut short at the end of an answer: that is the renewal equation."""
    scheme, rates = SCHEMES["chain"]
    stream = stream_of(np.arange(400) * 10.0, [10] * 400, [61] * 400)
    found = tally(deployed(scheme, rates, Eagle()).simulate(stream).outcome)
    pmf = exact.accepted_pmf(rates.chain(3))
    rounds = np.zeros(61)
    for left in range(1, 61):
        rounds[left] = 1 + sum(p * rounds[max(0, left - 1 - j)] for j, p in enumerate(pmf))
    assert found.tokens == 400 * 60
    assert found.rounds / 400 == pytest.approx(rounds[60], rel=0.01)


@pytest.mark.parametrize(("acceptance", "window"), [(0.8, 4), (0.5, 2), (0.9, 7), (0.0, 3)])
def test_tokens_beside_every_step_are_those_of_the_formula(acceptance: float, window: int) -> None:
    """PEARL, told by its equilibrium; long answers, so that how one begins and ends does not matter."""
    n, tokens = (100 if acceptance else 2), 4000  # without chance every answer is alike
    stream = stream_of(np.arange(n) * 100.0, [10] * n, [tokens] * n)
    rates = PerPosition(conditional=(acceptance,) * window)
    own = deployed(Pearl(tokens=window), rates, *DRAFTERS["model"], max_model_len=8192)
    found = tally(own.simulate(stream).outcome)
    assert found.tokens == n * (tokens - 1)
    assert found.tokens / found.rounds == pytest.approx(overlap.pearl_tokens(acceptance, window), rel=5e-3)


@pytest.mark.parametrize(
    ("acceptance", "look_ahead", "replicas"), [(0.8, 1, 5), (0.5, 2, 3), (0.9, 4, 2), (0.8, 4, 1), (0.0, 2, 4)]
)
def test_tokens_in_every_tick_are_those_of_the_formula(acceptance: float, look_ahead: int, replicas: int) -> None:
    """DSI; a request alone, whose steps are its prompt and its ticks."""
    n, tokens = (60 if acceptance else 2), 3000  # without chance every answer is alike
    stream = stream_of(np.arange(n) * 1000.0, [10] * n, [tokens] * n)
    rates = PerPosition(conditional=(acceptance,) * look_ahead)
    scheme = Dsi(tokens=look_ahead, replicas=replicas)
    deployment = deployed(scheme, rates, *DRAFTERS["model"], max_model_len=8192)
    outcome = deployment.simulate(stream).outcome
    verdicts, ticks = tally(outcome), outcome.steps - n
    assert verdicts.tokens == n * (tokens - 1)
    its = deployment.pools[0].spec.speculation
    assert its is not None
    assert isinstance(its.scheme, Dsi)
    assert its.scheme.replicas <= replicas, "those that make no tick shorter are idle"
    expected = overlap.dsi_tokens(acceptance, look_ahead, its.scheme.replicas)
    assert verdicts.tokens / ticks == pytest.approx(expected, rel=8e-3)
    assert verdicts.tokens / verdicts.rounds == pytest.approx(overlap.pearl_tokens(acceptance, look_ahead), rel=8e-3), (
        "what a verdict brings does not depend on how long it takes"
    )


def test_replicas_are_counted_by_the_ticks_of_one_sequence_of_half_the_longest_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks: dict[int, int] = {}

    def two(scheme: Dsi, rates: object, tick: Callable[[int], int]) -> int:
        ticks.update({replicas: tick(replicas) for replicas in (1, 2, 3)})
        return 2

    monkeypatch.setattr("simtune.sim.deployment.useful_replicas", two)
    rates = PerPosition(conditional=(0.8, 0.8))
    deployment = deployed(Dsi(tokens=2, replicas=3), rates, *DRAFTERS["model"], max_model_len=8192)
    (in_use,) = deployment.pools
    assert in_use.spec.speculation is not None
    assert in_use.spec.speculation.scheme == Dsi(tokens=2, replicas=2)
    assert isinstance(in_use.costs, CompiledRounds)
    assert in_use.costs.round(1, 2, 2, 4096) == ticks[2]
    assert ticks[1] >= ticks[2] >= ticks[3]


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("replicas", [1, 5])
def test_an_answer_takes_as_long_as_the_formula_says(acceptance: float, replicas: int) -> None:
    """DSI with look-ahead 1 and a tick as long as a draft: its mean seconds for all tokens but the prompt's."""
    n, tokens, draft_s = (2000 if acceptance else 2), 51, 0.01  # without chance every answer is alike
    stream = stream_of(np.arange(n) * 100.0, [10] * n, [tokens] * n)
    scheme, rates = Dsi(tokens=1, replicas=replicas), PerPosition(conditional=(acceptance,))
    spec = Speculation(drafter=drafter_for(scheme), scheme=scheme, acceptance="assumed")
    core = EngineCore(
        VllmFcfs(
            num_blocks=100,
            block_size=16,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=256,
            speculation=drafting_terms(spec, sampler(scheme, rates, stream)),
        ),
        LinearCosts(step_s=draft_s),
    )
    outcome = World([core], stream).run()
    seconds = (outcome.finish - outcome.first_token).mean() / TICKS_PER_SECOND
    expected = overlap.dsi_mean_seconds(tokens - 1, acceptance, draft_s, replicas * draft_s)
    assert seconds == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("window", [2, 4, 8])
def test_a_request_alone_gets_its_tokens_as_fast_as_the_formula_says(window: int) -> None:
    """PEARL with little to draft, as much as a step of the target hides, and more than it hides."""
    tokens, acceptance = 4000, 0.8
    stream = stream_of(np.arange(40) * 100.0, [10] * 40, [tokens] * 40)
    rates = PerPosition(conditional=(acceptance,) * window)
    own = deployed(Pearl(tokens=window), rates, *DRAFTERS["model"], max_model_len=8192)
    pool = own.plan.pools[0]
    draft_s, target_s = (
        RoundModel(model, HARDWARE, pool, Ngram(lookup_max=3)).verify_s(1, tokens // 2, width)
        for model, width in ((load_model("llama-3.2-1b"), 1), (MODEL, window))
    )
    rate = 1 / own.simulate(stream).tpot_s.mean()
    assert rate == pytest.approx(overlap.pearl_tokens_per_s(acceptance, window, draft_s, target_s), rel=0.02)


def test_what_is_verified_beside_drafting_follows_from_what_was_right() -> None:
    """Gone through by hand: one token alone, then the rest of its window, then whole windows until one fails."""
    stream = requests(70, 300)
    plain, beside = sampler(Chain(tokens=3), POSITIONS, stream), sampler(Pearl(tokens=3), POSITIONS, stream)
    seen = set()
    for i in (0, 5, 69):
        request, window = Request(i, 10, 300), 0
        right = plain.accepted(request, 0, 300).tolist()
        for n, (made, kept) in enumerate(
            zip(beside.stops(request, 0, 300), beside.accepted(request, 0, 300), strict=True)
        ):
            seen.add(window)
            if window == 0:
                assert (made, kept) == (0, 0)
                window = 2 if right[n] >= 1 else 0
            else:
                assert 1 + made == window
                assert 1 + kept == min(right[n] + 1, window)
                window = 3 if right[n] >= window else 0
        far = beside.accepted(request, 700, 60)  # beyond what is drawn at first
        assert far.tolist() == beside.accepted(request, 0, 760)[700:].tolist()
        after = beside.tokens_after(request, 10, 50, 2, 1000)[:50]
        assert after.tolist() == (1000 + np.cumsum(1 + beside.accepted(request, 10, 50))).tolist()
    assert seen == {0, 2, 3}


@pytest.mark.parametrize(("look_ahead", "replicas"), [(3, 3), (2, 2), (1, 4), (1, 1)])
def test_nothing_is_verified_while_a_verdict_is_on_its_way(look_ahead: int, replicas: int) -> None:
    """Gone through by hand: what begins after a rejection, or after the prompt, is known so many ticks later."""
    stream = requests(70, 300)
    rates = PerPosition(conditional=(0.8,) * look_ahead)
    right = sampler(Chain(tokens=look_ahead), rates, stream)
    drawn = sampler(Dsi(tokens=look_ahead, replicas=replicas), rates, stream)
    for i in (0, 5, 69):
        request, tick, begun, due = Request(i, 10, 300), 0, 0, replicas
        found = drawn.accepted(request, 0, 400), drawn.stops(request, 0, 400)
        sampler_ = right.accepted(request, 0, 400).tolist()
        for kept, made in zip(*found, strict=True):
            tick += 1
            if tick < due:
                assert (made, kept) == (-1, -1)
                continue
            window = 1 if begun == 0 else look_ahead - 1 if begun == 1 and look_ahead > 1 else look_ahead
            assert 1 + made == window
            assert 1 + kept == min(sampler_[tick - 1] + 1, window)
            begun, due = (begun + 1, tick + 1) if sampler_[tick - 1] >= window else (0, tick + replicas)
        far = drawn.accepted(request, 2000, 60)  # beyond what is drawn at first
        assert far.tolist() == drawn.accepted(request, 0, 2060)[2000:].tolist()
        after = drawn.tokens_after(request, 10, 50, max(1, look_ahead - 1), 1000)[:50]
        assert after.tolist() == (1000 + np.cumsum(1 + drawn.accepted(request, 10, 50))).tolist()


def test_replicas_beyond_a_verification_idle_at_their_watts() -> None:
    """A verdict comes after as many ticks as a verification lasts, however many replicas there are."""
    stream = stream_of([0.0], [10], [400])
    rates = PerPosition(conditional=(0.85,))
    few, many = (deployed(Dsi(tokens=1, replicas=n), rates, *DRAFTERS["model"]) for n in (4, 7))
    used, model = many.pools[0].spec.speculation, load_model("llama-3.2-1b")
    assert used is not None
    one, all_used = (
        CompiledRounds(MODEL, HARDWARE, many.pools[0].spec, 2048, used.drafter, Dsi(tokens=1, replicas=n).shape, model)
        for n in (1, used.scheme.shape.replicas)
    )
    verification, tick = (rounds.round(1, 1, 1, 1024) for rounds in (one, all_used))
    assert used.scheme.shape.replicas == math.ceil(verification / tick - 0.01) == 4
    results = [deployment.simulate(stream) for deployment in (few, many)]
    assert (results[0].finish_s == results[1].finish_s).all()
    less, more = (result.summary().energy_j for result in results)
    watts = HARDWARE.device.power
    assert less is not None
    assert more is not None
    assert watts is not None
    assert more - less == pytest.approx(3 * watts.idle_w * results[1].summary().duration_s)
    assert [result.num_gpus for result in results] == [5, 8]
    (note,) = idle_settings(many)
    assert note.startswith("pools.0.speculation: 4 of 7 replicas give the most tokens per second")
    assert "the other 3 GPUs are idle" in note
    assert [*idle_settings(few)] == []


def test_one_replica_is_pearl() -> None:
    stream = requests(40, 200)
    one, pearl = (deployed(s, POSITIONS, *DRAFTERS["model"]) for s in (Dsi(tokens=3, replicas=1), Pearl(tokens=3)))
    found, expected = one.simulate(stream).outcome, pearl.simulate(stream).outcome
    assert columns(found) == columns(expected)
    assert tally(found) == tally(expected)
    assert one.plan.num_devices == pearl.plan.num_devices == 2


def test_sampler_belongs_to_the_request_and_the_round() -> None:
    """It does not depend on how much is asked at once, on who else is there, nor on the plan; it does on the seed."""
    stream = requests(200, 500)
    drawn, other = sampler(*SCHEMES["chain"], stream), sampler(*SCHEMES["chain"], stream, seed=1)
    whole = {i: drawn.accepted(Request(i, 10, 500), 0, 500) for i in (0, 63, 64, 199)}
    again = sampler(*SCHEMES["chain"], requests(2000, 500))
    for i, rounds in whole.items():
        request = Request(i, 10, 500)
        assert rounds.tolist() == again.accepted(request, 0, 500).tolist()
        assert rounds[130:400].tolist() == drawn.accepted(request, 130, 270).tolist()
        assert [drawn(request, k, 2) for k in range(70)] == np.minimum(rounds[:70], 2).tolist()
        assert rounds.tolist() != other.accepted(request, 0, 500).tolist()


def test_the_better_scheme_never_has_the_worse_sampler() -> None:
    stream = requests(50, 500)
    small, large = sampler(Chain(tokens=2), POSITIONS, stream), sampler(Chain(tokens=4), POSITIONS, stream)
    narrow = sampler(StaticTree(nodes=((1,), (1, 1), (1, 1, 1))), RANKS, stream)
    wide = sampler(StaticTree(nodes=NODES), RANKS, stream)
    for i in range(50):
        request = Request(i, 10, 500)
        assert (np.minimum(large.accepted(request, 0, 500), 2) == small.accepted(request, 0, 500)).all()
        assert (wide.accepted(request, 0, 500) >= narrow.accepted(request, 0, 500)).all()


def test_two_plans_see_the_same_sampler() -> None:
    """A request alone takes as many rounds on a small instance as on a large one, whatever the batch."""
    stream = requests(40, 200)
    counts = [
        tally(deployed(Chain(tokens=3), POSITIONS, Eagle(), seqs=seqs).simulate(stream).outcome) for seqs in (2, 16)
    ]
    assert counts[0] == counts[1]


def test_classes_have_acceptances_of_their_own() -> None:
    stream = replace(
        requests(2000, 50), class_index=np.arange(2000) % 2, class_names=("easy", "hard"), slos=(None, None)
    )
    rates = PerPosition(conditional=(0.9, 0.9))
    hard = Condition(request_class="hard", rates=PerPosition(conditional=(0.2, 0.2)))
    drawn = AcceptanceSampler(Chain(tokens=2), acceptance(rates, conditions=(hard,)), stream, 0)
    mean = [np.mean([drawn.accepted(Request(i, 10, 50), 0, 64).mean() for i in range(c, 2000, 2)]) for c in (0, 1)]
    assert mean == pytest.approx([0.9 + 0.81, 0.2 + 0.04], abs=0.01)


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    requests, rounds = (grid.ravel() for grid in np.meshgrid(np.arange(1000), np.arange(1000), indexing="ij"))
    drawn, other = (uniform(seed, requests, rounds).reshape(1000, 1000) for seed in (7, 8))
    counts = np.histogram(drawn, bins=50, range=(0, 1))[0]
    expected = 1_000_000 / 50
    assert ((counts - expected) ** 2 / expected).sum() < 100  # chi-square of 49 degrees: p < 1e-4
    for a, b in ((drawn[:-1], drawn[1:]), (drawn[:, :-1], drawn[:, 1:]), (drawn, other)):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5e-3


def test_a_budget_goes_to_the_likeliest_drafts() -> None:
    scheme = TokenBudget(tokens=5, max_tokens=3)
    drawn = sampler(scheme, PerPosition(conditional=(0.9, 0.5, 0.5)), requests(9, 9))
    shares, batch = SharedBudget(drawn.survival, scheme.tokens), [Request(i, 1, 1) for i in range(9)]
    assert shares(batch[:2]) == [3, 2]
    assert shares(batch[:4]) == [2, 1, 1, 1]
    assert shares(batch) == [1, 1, 1, 1, 1, 0, 0, 0, 0]
    assert shares([]) == []


# --- a pool that drafts -------------------------------------------------------------------------------------------


def test_a_summary_says_what_drafting_came_to() -> None:
    stream = requests(50, 100)
    result = deployed(Chain(tokens=3), POSITIONS, Eagle()).simulate(stream)
    drafting = result.summary().speculation
    assert drafting
    verified = drafting.draft_tokens + drafting.rounds
    assert drafting.tokens_per_round * drafting.rounds == pytest.approx(50 * 99)
    assert drafting.wasted_tokens == verified - 50 * 99
    assert drafting.wasted_share == drafting.wasted_tokens / verified
    assert drafting.acceptance == pytest.approx((0.8 + 0.56 + 0.336) / 3, abs=0.03)
    plain = Plan(name="plain", model=MODEL.name, pools=(_without(result, stream),))
    assert "speculation" not in deploy(plain, MODEL, HARDWARE).simulate(stream).summary().to_data()


def _without(result: Any, stream: RequestStream) -> Pool:
    return deployed(Chain(tokens=3), POSITIONS, Eagle()).plan.pools[0].model_copy(update={"speculation": None})


def test_drafting_pays_where_a_request_is_alone() -> None:
    stream = stream_of(np.arange(20) * 10.0, [100] * 20, [200] * 20)
    drafting = deployed(Chain(tokens=3), POSITIONS, Eagle())
    plain = deploy(drafting.plan.model_copy(update={"pools": (_without(None, stream),)}), MODEL, HARDWARE).simulate(
        stream
    )
    faster = drafting.simulate(stream)
    assert faster.tpot_s.mean() < 0.7 * plain.tpot_s.mean()
    assert faster.ttft_s.mean() > plain.ttft_s.mean()  # the drafter reads the prompt too


def test_a_drafter_takes_its_share_of_memory() -> None:
    drafting = deployed(Chain(tokens=3), POSITIONS, *DRAFTERS["model"])
    pool = drafting.plan.pools[0]
    taken = draft_memory(DraftModel(model="llama-3.2-1b"), MODEL, pool, load_model("llama-3.2-1b"))
    plain = deploy(
        drafting.plan.model_copy(update={"pools": (pool.model_copy(update={"speculation": None}),)}), MODEL, HARDWARE
    )
    assert drafting.memory.weights_bytes == pytest.approx(plain.memory.weights_bytes + taken.weights_bytes)
    assert drafting.memory.kv_bytes_per_token == plain.memory.kv_bytes_per_token + taken.kv_bytes_per_token
    assert taken.kv_bytes_per_token > 0


def test_a_drafter_beside_the_target_has_devices_of_its_own() -> None:
    """It takes nothing of the target's memory; the GPUs count, and it must have room for the same blocks itself."""
    chain_, beside = (deployed(scheme, POSITIONS, *DRAFTERS["model"]) for scheme in (Chain(tokens=3), Pearl(tokens=3)))
    plain = deploy(chain_.plan.model_copy(update={"pools": (_without(None, requests(1, 1)),)}), MODEL, HARDWARE)
    assert beside.memory == plain.memory
    assert chain_.memory.num_blocks < plain.memory.num_blocks
    assert (chain_.plan.num_devices, beside.plan.num_devices) == (1, 2)
    assert beside.simulate(requests(20, 50)).summary().num_gpus == 2
    split = deployed(
        Pearl(tokens=3), POSITIONS, DraftModel(model="llama-3.2-1b", tp=1), "llama-3.2-1b", parallelism={"tp": 4}
    )
    assert split.plan.num_devices == 5
    several = deployed(
        Dsi(tokens=3, replicas=3),
        POSITIONS,
        DraftModel(model="llama-3.2-1b", tp=1),
        "llama-3.2-1b",
        parallelism={"tp": 4},
    )
    assert several.plan.num_devices == 3 * 4 + 1
    assert several.memory == split.memory, "every replica holds the keys and values of all requests"
    assert several.simulate(requests(5, 20)).summary().num_gpus == 13
    large = deployed(
        Pearl(tokens=3), POSITIONS, DraftModel(model="llama-3.1-8b", tp=1), MODEL.name, parallelism={"tp": 8}
    )
    assert large.memory.num_blocks == plain.memory.num_blocks, "as many as one GPU holds of the same model"


@pytest.mark.parametrize(
    ("front", "back", "kv_bytes_per_token"),
    [
        (None, "model", 2 * 32 * 8 * 128 * 2),  # what only the decode pool has is not sent
        ("model", "model", 2 * 32 * 8 * 128 * 2 + 2 * 16 * 8 * 64 * 2),
        ("head", "head", 2 * 33 * 8 * 128 * 2),
        ("n-gram", "n-gram", 2 * 32 * 8 * 128 * 2),
        ("head", "model", 2 * 32 * 8 * 128 * 2),
    ],
)
def test_a_drafter_of_both_pools_has_its_keys_and_values_sent(
    front: str | None, back: str, kv_bytes_per_token: int
) -> None:
    """Layers x heads x width x 2 bytes, keys and values: of llama-3.1-8b, and of what drafts beside it."""
    own: dict[str, Any] = {"hardware": HARDWARE.name, "instances": 1, "max_model_len": 2048}
    batching = Batching(max_num_seqs=16, max_num_batched_tokens=512)
    pools = []
    drafting: dict[str, Drafting] = {}
    drafters: dict[Role, str | None] = {"prefill": front, "decode": back}
    for name, drafter in drafters.items():
        spec = None
        if drafter is not None:
            which, draft = DRAFTERS[drafter]
            spec = Speculation(drafter=which, scheme=Chain(tokens=3), acceptance="assumed")
            drafting[name] = Drafting(acceptance(POSITIONS), None if draft is None else load_model(draft))
        pools.append(Pool(name=name, role=name, batching=batching, speculation=spec, **own))
    plan = Plan(name="plan", model=MODEL.name, pools=tuple(pools), link=KvLink(descriptor_s=1e-6))
    deployment = deploy(plan, MODEL, HARDWARE, drafting=drafting)
    found = deployment.simulate(stream_of(np.arange(10) * 10.0, [100] * 10, [30] * 10))
    blocks = 7  # of 16 tokens
    assert found.outcome.transferred_bytes == 10 * blocks * 16 * kv_bytes_per_token
    assert found.completed.all()
    plain = deploy(
        plan.model_copy(update={"pools": tuple(pool.model_copy(update={"speculation": None}) for pool in pools)}),
        MODEL,
        HARDWARE,
    ).simulate(stream_of(np.arange(10) * 10.0, [100] * 10, [30] * 10))
    more = kv_bytes_per_token > 2 * 32 * 8 * 128 * 2
    assert (found.transfer_s.mean() > plain.transfer_s.mean()) == more


@pytest.mark.parametrize(
    ("scheme", "rates", "drafter", "ahead"),
    [
        ("chain", POSITIONS, Eagle(), True),
        ("chain", POSITIONS, DraftModel(model="llama-3.2-1b"), True),
        ("chain", POSITIONS, BlockDrafter(layers=3), True),
        ("by batch", POSITIONS, Eagle(), True),
        ("dynamic tree", RANKS, Eagle(), True),
        ("chain", POSITIONS, Ngram(lookup_max=3), False),
        ("chain", POSITIONS, Medusa(heads=4), False),
        ("threshold of unequal requests", SCHEMES["threshold of unequal requests"][1], Eagle(), False),
        ("overlapped", POSITIONS, DraftModel(model="llama-3.2-1b"), False),
        ("chunks", POSITIONS, Eagle(), False),
    ],
)
def test_steps_are_scheduled_ahead_where_an_engine_can(
    scheme: str, rates: Rates, drafter: Drafter, ahead: bool
) -> None:
    for asked in (True, False):
        pool = deployed(SCHEMES[scheme][0], rates, drafter, drafter.own_model, async_scheduling=asked).pools[0]
        (core,) = pool.cores(1, None, pool.speculation(requests(3, 3), 0))
        assert isinstance(core.scheduler, VllmFcfs)
        assert core.scheduler.async_scheduling is (ahead and asked)


@pytest.mark.parametrize(
    ("drafter", "lookahead", "slots", "drops"),
    [
        (Eagle(), 3, 0, True),
        (DraftModel(model="llama-3.2-1b"), 3, 1, False),
        (BlockDrafter(method="dflash", layers=3), 4, 3, True),
        (BlockDrafter(method="dspark", layers=3), 3, 2, True),
        (Medusa(heads=3), 0, 0, False),
        (Ngram(lookup_max=3), 0, 0, False),
    ],
)
def test_what_a_drafter_takes_of_blocks_and_budget(drafter: Drafter, lookahead: int, slots: int, drops: bool) -> None:
    """As in vllm/config of release 0.32: num_lookahead_tokens, max_num_new_slots_for_drafting, use_eagle."""
    stream = requests(3, 3)
    terms = drafting_terms(
        Speculation(drafter=drafter, scheme=Chain(tokens=3), acceptance="assumed"),
        sampler(Chain(tokens=3), POSITIONS, stream),
    )
    assert (terms.lookahead, terms.extra_slots, terms.drops_last_hit) == (lookahead, slots, drops)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("blocks", [45, 400])
def test_rounds_laid_out_for_many_requests_at_once_are_those_of_each(ahead: bool, blocks: int) -> None:
    rng = np.random.default_rng(0)
    stream = stream_of(rng.exponential(0.005, 200).cumsum(), rng.integers(1, 90, 200), rng.integers(1, 90, 200))
    chosen = sampler(Chain(tokens=3), POSITIONS, stream)
    found = []
    for laid_out in (chosen.laid_out, None):
        terms = DraftingTerms(3, chosen, lookahead=3, tokens_after=chosen.tokens_after, laid_out=laid_out)
        engine = VllmFcfs(
            num_blocks=blocks,
            block_size=4,
            max_num_seqs=24,
            max_num_batched_tokens=128,
            max_model_len=180,
            async_scheduling=ahead,
            speculation=terms,
        )
        outcome = World(
            [EngineCore(engine, LinearCosts(step_s=1e-3, per_token_s=2e-5, per_context_s=3e-7))], stream
        ).run()
        found.append((columns(outcome), tally(outcome)))
        assert outcome.preemptions.any() == (blocks == 45)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: deployed(Chain(tokens=3), POSITIONS, DraftModel(model="qwen3-8b"), "qwen3-8b"), "vocabulary"),
        (lambda: deployed(Chain(tokens=4), POSITIONS, Medusa(heads=3)), "3 Medusa heads cannot draft 4"),
        (
            lambda: deployed(StaticTree(nodes=tuple((i,) for i in range(1, 600))), RANKS, Eagle()),
            "tree of 599 drafts takes 600 tokens of a step, and max_num_batched_tokens is 512",
        ),
        (
            lambda: deployed(Chain(tokens=5), POSITIONS, Eagle()).simulate(requests(3, 3)),
            "drafts are 5 tokens deep, and the rates are known for 4",
        ),
        (
            lambda: deployed(StaticTree(nodes=((1,), (4,))), RANKS, Eagle()).simulate(requests(3, 3)),
            r"node \[4\] of the tree has rank 4 at depth 1, where the rates know 3",
        ),
        (lambda: deployed(Dsi(tokens=3, replicas=2), POSITIONS, *DRAFTERS["model"], apart=True),
         "pool decode: every replica of the target needs the prompt's keys and values"),
        (lambda: deployed(Dsi(tokens=3, replicas=2), POSITIONS, *DRAFTERS["model"], seqs=200),
         "800 tokens with max_num_seqs 200, and max_num_batched_tokens is 512; raise it"),
        (lambda: deployed(Chain(tokens=3), POSITIONS, Eagle(), batching=Batching(
            policy="vllm-v0", max_num_seqs=4, max_num_batched_tokens=512)), "vllm-v0 has no speculation: vLLM 0.2"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(build: Any, message: str) -> None:
    with pytest.raises(Infeasible, match=message):
        build()
