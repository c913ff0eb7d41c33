"""Tokens that one sequence verifies together share experts, if the model's routing is said to keep its choices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simtune.costs.basis import StepBasis, WeightedStep
from simtune.costs.bounds import CostBounds
from simtune.costs.drafting import CompiledRounds, RoundModel
from simtune.costs.experts import independent_tokens
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.operators.moe import active_experts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.drafters import Ngram
from simtune.specs.model import Model, MoeFeedForward
from simtune.specs.schemes import Chain
from tests.costs.made_up import hardware, model, moe, pool


def reusing(target: Model, reuse: float) -> Model:
    layers = []
    for group in target.layers:
        block = group.feed_forward
        assert isinstance(block, MoeFeedForward)
        block = block.model_copy(update={"neighbour_reuse": reuse})
        layers.append(group.model_copy(update={"feed_forward": block}))
    return target.model_copy(update={"layers": tuple(layers)})


@pytest.mark.parametrize(("experts", "visited", "width", "reuse"), [(128, 8, 6, 0.4), (8, 2, 4, 0.8), (64, 6, 3, 0.0)])
def test_as_many_experts_wake_as_in_a_draw(experts: int, visited: int, width: int, reuse: float) -> None:
    sequences, draws, rng = 3, 3000, np.random.default_rng(0)
    chosen = np.argsort(rng.random((draws, sequences, width, experts)), axis=-1)[..., :visited]
    for token in range(1, width):
        keeps = rng.random((draws, sequences, 1)) < reuse
        chosen[:, :, token] = np.where(keeps, chosen[:, :, token - 1], chosen[:, :, token])
    awake = np.zeros((draws, experts), dtype=bool)
    awake[np.arange(draws)[:, None], chosen.reshape(draws, -1)] = True
    few = independent_tokens(np.array(float(sequences * width)), np.array(float(sequences)), visited / experts, reuse)
    expected = active_experts(few, *(np.array(float(x)) for x in (experts, visited, 0)))
    assert expected == pytest.approx(awake.sum(axis=1).mean(), rel=0.01)


def test_verifying_six_tokens_costs_as_one_if_all_keep_their_experts() -> None:
    """Qwen3-30B-A3B on an H100: by chance six tokens cost almost twice as much as one, for more experts."""
    device, target = load_hardware("h100-sxm"), load_model("qwen3-30b-a3b")
    its = pool(max_num_seqs=8)
    one, *six = (
        RoundModel(reusing(target, reuse), device, its, Ngram(lookup_max=3)).verify_s(1, 1000, tokens)
        for reuse, tokens in ((0.0, 1), (0.0, 6), (0.25, 6), (0.5, 6), (1.0, 6))
    )
    ratios = [seconds / one for seconds in six]
    assert ratios == sorted(set(ratios), reverse=True)
    assert ratios[0] > 1.8
    assert ratios[-1] < 1.1


def test_only_neighbours_share_and_prompts_do_not() -> None:
    plain, keeping = model(feed_forward=moe()), reusing(model(feed_forward=moe()), 0.6)
    chance, shared = (compiled(target) for target in (plain, keeping))
    assert shared.round(5, 5, 0, 500) == chance.round(5, 5, 0, 500), "a token of each sequence"
    assert shared.round(5, 20, 3, 500) < chance.round(5, 20, 3, 500)
    chunks: list[tuple[int, int]] = [(0, 20)]
    assert shared.round(5, 20, 3, 500, chunks) == chance.round(5, 20, 3, 500, chunks)
    assert shared.mixed(5, 500, chunks, 6) == chance.mixed(5, 500, chunks, 6)
    sharing, tokens = StepModel(keeping, hardware(), pool()).sharing, np.array([20.0])
    assert sharing is not None
    assert sharing.saved_s(tokens, tokens) == 0.0
    hiding = pool().model_copy(update={"overlap": "ladder"})
    assert StepModel(keeping, hardware(), hiding).sharing is None


def compiled(target: Model, **options: Any) -> CompiledRounds:
    drafter = Ngram(lookup_max=3)
    return CompiledRounds(target, hardware(), pool(max_num_seqs=32), 256, drafter, Chain(tokens=3).shape, **options)


@pytest.mark.parametrize("reuse", [0.0, 0.3, 1.0])
def test_no_verification_is_below_the_bound_on_its_tokens(reuse: float) -> None:
    costs = compiled(reusing(model(feed_forward=moe()), reuse))
    lines = CostBounds(costs.tables).linear_minorants()
    for decodes in (1, 2, 7, 32):
        for tokens in range(decodes, 4 * decodes + 1):
            shared = costs.tables.shared
            saved = 0 if shared is None else shared.ticks(decodes, tokens)
            seconds = (costs.tables.pure.linear[tokens] - saved) / TICKS_PER_SECOND
            assert seconds >= max(c0 + c1 * tokens for c0, c1 in lines) - 1e-12


def test_rounds_of_tables_and_of_the_model_agree() -> None:
    target = reusing(model(feed_forward=moe()), 0.5)
    costs, rounds = compiled(target), RoundModel(target, hardware(), pool(max_num_seqs=32), Ngram(lookup_max=3))
    for decodes in (1, 4, 16):
        seconds = rounds(decodes, 100, 4) * TICKS_PER_SECOND
        assert costs.round(decodes, 4 * decodes, 0, 104 * decodes) == pytest.approx(seconds, rel=1e-3)


def test_the_parts_of_a_verification_are_those_of_its_time() -> None:
    plain, keeping = model(feed_forward=moe()), reusing(model(feed_forward=moe()), 1.0)
    steps = [WeightedStep(1.0, StepWork(4, 400, (), 4), width) for width in (1, 4)]
    shares = []
    for target in (plain, keeping):
        parts = [StepBasis(target, hardware(), pool()).of([step]) for step in steps]
        shares.append([basis["moe"].seconds.sum() for basis in parts])
    assert shares[0][0] == shares[1][0]
    assert shares[0][1] > shares[1][1] > 0
