"""Draft lengths that follow acceptance: against the stationary chain they make, the best fixed length, and by hand."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.engine import Request, VllmFcfs
from simtune.errors import SpecError
from simtune.results.outcome import Outcome
from simtune.sim.core import EngineCore
from simtune.sim.drafting import AcceptanceSampler, drafting_terms
from simtune.sim.world import World
from simtune.specs.acceptance import Acceptance, PerPosition
from simtune.specs.drafters import Eagle
from simtune.specs.feedback import GainRule, Rule, StepRule
from simtune.specs.plan import Plan
from simtune.specs.schemes import Adaptive, Chain, Scheme
from simtune.specs.speculation import Speculation
from simtune.testing.clusters import stream_of

MOST = 8
LONG = 60_000


def drawn(scheme: Scheme, alpha: float, tokens: int = LONG, requests: int = 1) -> AcceptanceSampler:
    rates = PerPosition(conditional=(alpha,) * scheme.shape.depth)
    spec = Acceptance(name="mine", origin="assumed", source="made up", rates=rates)
    stream = stream_of([0.0] * requests, [10] * requests, [tokens] * requests)
    return AcceptanceSampler(scheme, spec, stream, seed=1)


def rounds(scheme: Scheme, alpha: float, count: int = LONG // 8) -> tuple[np.ndarray, np.ndarray]:
    """(drafts made, drafts kept) of one long answer."""
    sampler, request = drawn(scheme, alpha), Request(0, 10, LONG)
    return np.asarray(sampler.stops(request, 0, count)), np.asarray(sampler.accepted(request, 0, count))


def made(rule: Rule, start: int, kept: list[int], least: int = 1, most: int = MOST) -> list[int]:
    return list(rule.lengths(start, least, most, iter(kept)))


# --- rules --------------------------------------------------------------------------------------------------------


def test_additive_and_multiplicative_steps_by_hand() -> None:
    heuristic = StepRule(up=2, down=1)  # 5 of 5 kept, 7 of 7, 3 of 8, 8 of 7 ...
    assert made(heuristic, 5, [5, 7, 3, 7, 0, 0]) == [5, 7, 8, 7, 8, 7]
    tcp = StepRule(up=1, down_times=0.5)
    assert made(tcp, 6, [8, 8, 2, 8, 8, 0, 0, 0, 0]) == [6, 7, 8, 4, 5, 6, 3, 1, 1]
    assert made(StepRule(up_times=2.0, down=3), 2, [8, 8, 0, 8]) == [2, 4, 8, 5]


@pytest.mark.parametrize("alpha", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("rule", [StepRule(up=2, down=1), StepRule(up=1, down_times=0.5)])
def test_steps_spend_their_time_at_each_length_as_the_chain_they_make(rule: StepRule, alpha: float) -> None:
    """All of K drafts are kept with alpha^K: lengths are a Markov chain, and so known from its stationary state."""
    after = np.zeros((MOST + 1, MOST + 1))
    for length in range(1, MOST + 1):
        for kept, probability in ((MOST, alpha**length), (0, 1 - alpha**length)):
            after[length, made(rule, length, [kept, 0])[1]] += probability
    values, vectors = np.linalg.eig(after[1:, 1:].T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    stationary /= stationary.sum()
    scheme = Adaptive(start=3, max_tokens=MOST, rule=rule)
    lengths, drafts_kept = rounds(scheme, alpha)
    share = np.bincount(lengths, minlength=MOST + 1)[1:] / len(lengths)
    assert share == pytest.approx(stationary, abs=0.03)
    by_length = np.array([sum(alpha**d for d in range(1, k + 1)) for k in range(1, MOST + 1)])
    assert drafts_kept.mean() == pytest.approx(float(stationary @ by_length), rel=0.03)


@pytest.mark.parametrize(("alpha", "cost"), [(0.5, 0.05), (0.7, 0.05), (0.8, 0.2), (0.9, 0.1), (0.3, 0.5)])
def test_the_gain_rule_comes_to_the_best_fixed_length(alpha: float, cost: float) -> None:
    def rate(length: int) -> float:
        return sum(alpha**d for d in range(length + 1)) / (1 + length * cost)

    best = max(range(1, MOST + 1), key=rate)
    scheme = Adaptive(start=MOST, max_tokens=MOST, rule=GainRule(draft_cost=cost, memory=0.998))
    lengths, kept = rounds(scheme, alpha)
    assert abs(np.median(lengths[len(lengths) // 2 :]) - best) <= 1
    gained = (kept + 1).sum() / (1 + lengths * cost).sum()
    assert gained > 0.98 * rate(best)


@given(st.sampled_from([StepRule(up=2, down=1), StepRule(up=1, down_times=0.5), GainRule(draft_cost=0.1)]),
       st.lists(st.integers(0, MOST), min_size=1, max_size=30), st.data())  # fmt: skip
def test_a_length_follows_from_earlier_rounds_alone_and_from_what_they_showed(
    rule: Rule, kept: list[int], data: st.DataObject
) -> None:
    lengths = made(rule, 3, kept)
    assert all(1 <= length <= MOST for length in lengths)
    cut = data.draw(st.integers(0, len(kept) - 1))
    assert made(rule, 3, kept[:cut] + [0] * (len(kept) - cut))[: cut + 1] == lengths[: cut + 1]
    shown = [min(right, length) for right, length in zip(kept, lengths, strict=True)]
    assert made(rule, 3, shown) == lengths, "it went by drafts that were never made"


# --- in the simulator ---------------------------------------------------------------------------------------------


def run(scheme: Scheme) -> Outcome:
    spec = Speculation(drafter=Eagle(), scheme=scheme, acceptance="mine")
    terms = drafting_terms(spec, drawn(scheme, 0.8, tokens=300, requests=20))
    sizes: dict[str, Any] = {"num_blocks": 800, "block_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 64}
    costs = LinearCosts(step_s=1e-3, per_token_s=2e-5, per_context_s=3e-7, per_depth_s=1e-4)
    core = EngineCore(VllmFcfs(**sizes, max_model_len=960, speculation=terms), costs)
    return World([core], stream_of([0.01 * i for i in range(20)], [10] * 20, [300] * 20)).run()


def test_one_that_may_not_move_is_a_chain() -> None:
    fixed = Adaptive(start=4, min_tokens=4, max_tokens=4, rule=StepRule(up=1, down=1))
    assert run(fixed).finish.tolist() == run(Chain(tokens=4)).finish.tolist()


def test_its_own_rounds_decide_and_nobody_else_s() -> None:
    """What is drafted for a request is the same alone and in company."""
    scheme = Adaptive(start=2, max_tokens=MOST, rule=StepRule(up=2, down=1))
    alone, together = drawn(scheme, 0.8, tokens=300), drawn(scheme, 0.8, tokens=300, requests=50)
    request = Request(0, 10, 300)
    assert list(alone.stops(request, 0, 40)) == list(together.stops(request, 0, 40))
    later = list(islice(together.stops(request, 10, 30), 30))
    assert later == list(together.stops(request, 0, 40))[10:]


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (
            "{start: 9, max_tokens: 8, rule: {kind: steps, up: 1}}",
            "scheme.start: start (9) must lie between min_tokens",
        ),
        ("{start: 2, max_tokens: 8, rule: {kind: steps}}", "scheme.rule: neither grows nor shrinks"),
        ("{start: 2, max_tokens: 8, rule: {kind: gian}}", "did you mean gain?"),
        ("{start: 2, max_tokens: 8, rule: {kind: gain}}", "scheme.rule.draft_cost: is required and missing"),
        ("{start: 2, max_tokens: 8, rule: {kind: steps, down_times: 2}}", "scheme.rule.down_times: must be less than"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_with_its_place(scheme: str, message: str) -> None:
    scheme = scheme.replace("{start", "{kind: adaptive, start", 1)
    text = (
        "schema: simtune/plan@1\nname: p\nmodel: llama-3.1-8b\npools:\n- hardware: h100-sxm\n  instances: 1\n"
        "  batching: {max_num_seqs: 8, max_num_batched_tokens: 512}\n"
        f"  speculation: {{drafter: {{kind: eagle}}, acceptance: mine, scheme: {scheme}}}\n"
    )
    with pytest.raises(SpecError) as error:
        Plan.from_text(text, "p.yaml")
    assert message in str(error.value)
