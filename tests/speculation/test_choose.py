"""The schedule: the best setting of every cell, its gain, and what is left of it in an engine's own terms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.drafting import RoundModel
from simtune.emit import ENGINES
from simtune.specs.acceptance import BetaMixture, PerPosition, PerRank, Revealed
from simtune.specs.catalog import load_acceptance, load_hardware, load_model
from simtune.specs.drafters import Eagle
from simtune.specs.pool import Batching, Pool
from simtune.specs.schemes import BatchRange, ByBatch, DynamicTree, StaticTree, Threshold
from simtune.specs.speculation import Speculation
from simtune.specs.trees import depth_of, width_of
from simtune.tuner.drafting import Schedule, choose, tree
from tests.oracles import chain as exact

BATCHES, CONTEXTS = (1, 16, 256), (512, 8192)
RANKS = PerRank(probability=((0.6, 0.2, 0.1), (0.5, 0.2, 0.1), (0.4, 0.2, 0.1)))


def roofline(batch: int, context: int, verify_tokens: int, draft_depth: int, draft_width: int) -> float:
    """Weights and KV are read once, every token costs, every level of a draft costs."""
    memory = 5.0 + 1e-5 * batch * context
    return max(memory, 0.03 * batch * verify_tokens) + draft_depth * (0.4 + 0.002 * batch * draft_width)


def small(rates: object = RANKS, **settings: object) -> Schedule:
    return choose(rates, roofline, BATCHES, CONTEXTS, **settings)  # type: ignore[arg-type]


def test_every_cell_has_its_best_setting() -> None:
    schedule = small(max_nodes=12)
    for batch in BATCHES:
        for context in CONTEXTS:
            best, gain = schedule.best(batch, context)
            none_s = roofline(batch, context, 1, 0, 1)
            seconds = roofline(batch, context, best.verify_tokens, best.depth, best.width)
            assert gain == pytest.approx(best.tokens * none_s / seconds)
            # No tree of any shape, and no chain, does better.
            for size in range(13):
                for depth in range(4):
                    nodes = tree.greedy(RANKS.ranks(depth), size)
                    other = roofline(batch, context, len(nodes) + 1, depth_of(nodes), max(1, width_of(nodes)))
                    assert (1 + tree.expected_accepted(nodes, RANKS.ranks(3))) * none_s / other <= gain + 1e-9
            length, kept = exact.best_length(RANKS.chain(3), [roofline(batch, context, k + 1, k, 1) for k in range(4)])
            setting, chain_gain = schedule.best(batch, context, "chain")
            assert setting.depth == length
            assert chain_gain == pytest.approx(kept * none_s)
    assert schedule.best(1, 512)[0].kind == "static_tree"
    assert schedule.best(256, 512)[0].kind == "none", "compute-bound: every token costs its full price"
    assert schedule.chain_lengths()[:, 0].tolist() == [2, 2, 0]


def test_gains_are_of_time() -> None:
    schedule = small()
    shares = schedule.shares
    assert shares.sum() == pytest.approx(1)
    assert schedule.gain == pytest.approx(1 / (shares / schedule.gains()).sum())
    fixed, gain = schedule.fixed()
    by_hand = 1 / sum(
        shares[b, c] * schedule.rates[b, c, 0] / schedule.rates[b, c, schedule.settings.index(fixed)]
        for b in range(3)
        for c in range(2)
    )
    assert gain == pytest.approx(by_hand)
    assert 1 <= gain <= schedule.gain
    only = small(shares=[[0, 0], [0, 0], [1, 0]])
    assert only.gain == pytest.approx(only.gains()[2, 0])
    assert only.fixed()[0].scheme is None


def test_what_engines_can_be_told_is_never_better() -> None:
    schedule = small()
    for projection in (schedule.by_batch(), schedule.dynamic_tree()):
        assert 1 <= projection.gain <= schedule.gain + 1e-9
        assert projection.loss == pytest.approx(1 - projection.gain / schedule.gain)
    by_batch = schedule.by_batch().scheme
    assert isinstance(by_batch, ByBatch)
    assert by_batch.ranges[0] == BatchRange(first=1, last=255, tokens=2)
    assert by_batch.ranges[-1].last == 256
    wide = small(shares=[[1, 1], [1, 1], [0, 0]]).dynamic_tree().scheme
    assert isinstance(wide, DynamicTree)
    assert wide.topk > 1
    assert wide.steps <= wide.tokens <= wide.topk * wide.steps
    hopeless = small(PerPosition(conditional=(0.01,)))
    assert (hopeless.by_batch().scheme, hopeless.dynamic_tree().scheme) == (None, None)
    gains = hopeless.gain, hopeless.by_batch().gain, hopeless.dynamic_tree().gain
    assert gains == pytest.approx((1, 1, 1))


def test_ranks_out_of_order_are_chosen_by_the_dynamic_programme() -> None:
    noisy = PerRank(probability=((0.5, 0.02, 0.3),) * 3)
    schedule = small(noisy, max_nodes=4)
    by_size = {s.verify_tokens - 1: s.tokens for s in schedule.settings if s.kind == "static_tree"}
    assert by_size[4] == pytest.approx(2.07), "greedy choice would stop at 1.895"


def test_a_threshold_pays_where_confidence_tells() -> None:
    sure = Revealed(rate=(0.98, 0.3), share=(0.6, 0.4))
    schedule = small(sure)
    best, gain = schedule.best(1, 512, "threshold")
    assert isinstance(best.scheme, Threshold)
    assert gain > schedule.best(1, 512, "chain")[1]
    # One sequence at a time, at affine cost: the rule that looks one step ahead, but for the grid of thresholds.
    case = exact.Stopping(sure.rate, sure.share, 0.402, 5.0 + 0.00512, 8)
    _, rate = case.look_ahead()
    assert gain == pytest.approx(rate * roofline(1, 512, 1, 0, 1), rel=0.01)

    # In a batch somebody drafts to the end, so there is less to save on drafting.
    def saved(batch: int) -> float:
        return schedule.best(batch, 8192, "threshold")[1] / schedule.best(batch, 8192, "chain")[1]

    assert saved(1) > saved(16)
    assert any(s.kind == "threshold" for s in small(BetaMixture(a=4.0, b=1.5)).settings)
    assert not any(s.kind == "threshold" for s in small().settings), "nothing is revealed"


@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=5), st.floats(0.01, 0.2))
def test_more_compute_never_lengthens_the_chain(conditional: list[float], token_s: float) -> None:
    """Where each token verified costs more, and nothing else changes, drafts are no longer."""

    def dearer(factor: float) -> int:
        def cost(batch: int, context: int, verify_tokens: int, draft_depth: int, draft_width: int) -> float:
            # One more draft token costs a share (f t + .01) / (1 + f t) of a step without, rising in f.
            return 1.0 + factor * token_s * verify_tokens + 0.01 * draft_depth

        return int(choose(PerPosition(conditional=tuple(conditional)), cost, (1,), (1,)).chain_lengths()[0, 0])

    lengths = [dearer(f) for f in (0.5, 1.0, 2.0, 4.0)]
    assert lengths == sorted(lengths, reverse=True)


# --- a real model on a real device ------------------------------------------------------------------------

H100_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def on_h100(rates: PerPosition, contexts: tuple[int, ...]) -> Schedule:
    model, hardware = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
    pool = Pool(hardware="h100-sxm", instances=1, batching=Batching(max_num_seqs=512, max_num_batched_tokens=8192))
    costs = RoundModel(model, hardware, pool, Eagle(draft_vocab_size=32000))
    return choose(rates, costs, H100_BATCHES, contexts)


def test_a_short_context_stops_speculation_at_large_batches_and_a_long_one_does_not() -> None:
    """Llama-3.1-8B with an EAGLE head of which less than half of the drafts are kept: at 512 tokens of context half
    of a large batch's time goes with its tokens, at 8,192 nearly all goes into reading KV, which a draft shares.
    """
    schedule = on_h100(PerPosition(conditional=(0.45, 0.45, 0.45)), (512, 8192))
    short, long = schedule.chain_lengths().T
    assert short[0] == 3
    assert short[-1] == 0
    assert np.diff(short).max() <= 1, "lengths fall with the batch, but for the sizes of CUDA graphs"
    assert (long > 0).all()
    for context, off in ((512, True), (8192, False)):
        one = on_h100(PerPosition(conditional=(0.45, 0.45, 0.45)), (context,)).by_batch().scheme
        assert isinstance(one, ByBatch)
        assert (one.tokens_for(512) == 0) == off
        drafter = Eagle(checkpoint="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", draft_vocab_size=32000)
        settings = ENGINES["vllm"].speculation(Speculation(drafter=drafter, scheme=one, acceptance="mine"))
        assert ENGINES["vllm"].problems(settings) == []
        assert settings["num_speculative_tokens_per_batch_size"][0][0] == 1
        assert settings["num_speculative_tokens_per_batch_size"][-1][1:] == [512, one.tokens_for(512)]


def test_a_good_drafter_is_only_shortened() -> None:
    """The published EAGLE-3 keeps more than verification of one token costs, at any batch of this model."""
    rates = load_acceptance("eagle3-llama-3.1-8b").rates
    assert isinstance(rates, PerPosition)
    short, long = on_h100(rates, (512, 8192)).chain_lengths().T
    assert (short[0], long[0]) == (3, 3)
    assert short[-1] == 1
    assert long[-1] == 3


def test_trees_shrink_with_the_batch() -> None:
    medusa = load_acceptance("medusa-vicuna-7b").rates
    schedule = choose(medusa, roofline, (1, 4, 16, 64, 256), (512,))
    sizes = [schedule.best(b, 512)[0].verify_tokens for b in schedule.batches]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 10 > sizes[-1]
    best = schedule.best(1, 512)[0].scheme
    assert isinstance(best, StaticTree)
