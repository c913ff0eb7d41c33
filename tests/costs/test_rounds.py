"""Compiled rounds are those of the cost model, jump or step, and cost nothing extra where nothing is drafted."""

from __future__ import annotations

import pickle
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.compiled import compile_costs
from simtune.costs.drafting import CompiledRounds, RoundModel
from simtune.costs.drafting.lines import TickLine
from simtune.costs.drafting.orders import InChunks, RoundOrder
from simtune.costs.drafting.passes import TargetPasses
from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.drafters import BlockDrafter, Drafter, DraftModel, Eagle, Medusa, Ngram
from simtune.specs.hardware import Calibration, Correction
from simtune.specs.pool import Batching, Pool
from simtune.specs.schemes import Chain, Dsi, Frontier, Pearl, Scheme, StaticTree
from tests.oracles import overlap

MODEL, HARDWARE, DRAFT = load_model("llama-3.1-8b"), load_hardware("h100-sxm"), load_model("llama-3.2-1b")
LONGEST = 8192

SCHEMES: dict[str, Scheme] = {
    "chain": Chain(tokens=4),
    "tree": StaticTree(nodes=((1,), (2,), (1, 1), (1, 2), (2, 1), (1, 1, 1))),
}
CHUNKS = Frontier(tokens=7, chunks=3, draft_share=0.25, verify_share=0.75)
DRAFTERS: dict[str, Drafter] = {
    "head": Eagle(),
    "model": DraftModel(model=DRAFT.name),
    "medusa": Medusa(heads=4),
    "n-gram": Ngram(lookup_max=3, host_s=1e-5),
    "block": BlockDrafter(layers=2),
}


def pool(**settings: object) -> Pool:
    batching = Batching(max_num_seqs=64, max_num_batched_tokens=2048)
    given = {"hardware": HARDWARE.name, "instances": 1, "batching": batching, "max_model_len": LONGEST, **settings}
    return Pool.model_validate(given)


FEW_GRAPHS = pool(graph_sizes={"most": 32, "launch_s": 1e-3})
"""Verifications of more than six sequences, and all prompts, are launched kernel by kernel."""


def rounds(drafter: str, scheme: str = "chain", its: Pool | None = None) -> CompiledRounds:
    draft = DRAFT if drafter == "model" else None
    return CompiledRounds(MODEL, HARDWARE, its or pool(), LONGEST, DRAFTERS[drafter], SCHEMES[scheme].shape, draft)


@pytest.mark.parametrize(
    "its",
    [pool(), pool(async_scheduling=False), pool(exposed_host={"step_s": 1e-3, "per_sequence_s": 1e-5}), FEW_GRAPHS],
    ids=["asynchronous", "synchronous", "partly exposed", "few graphs"],
)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_compiled_round_takes_what_the_model_says(drafter: str, scheme: str, its: Pool) -> None:
    shape, compiled = SCHEMES[scheme].shape, rounds(drafter, scheme, its)
    told = RoundModel(MODEL, HARDWARE, its, DRAFTERS[drafter], DRAFT if drafter == "model" else None)
    for batch, context in ((1, 500), (8, 1000), (33, 777), (64, 3000)):
        tokens = 1 + shape.drafts
        ticks = compiled.round(batch, batch * tokens, shape.depth, batch * (context + tokens))
        expected = told(batch, context, tokens, shape.depth, shape.width)
        assert ticks / TICKS_PER_SECOND == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("its", [pool(), pool(cuda_graphs=False), FEW_GRAPHS], ids=["graphs", "no graphs", "few"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("number", [1, 5, 400])
def test_a_jump_is_the_sum_of_its_rounds(drafter: str, its: Pool, number: int) -> None:
    """Over many pieces of the tables, and where the verified tokens are no multiple of the batch."""
    compiled = rounds(drafter, its=its)
    contexts = np.cumsum(np.random.default_rng(1).integers(0, 150, number)) + 2000
    for batch, tokens in ((8, 40), (8, 27), (1, 5)):
        ends = list(compiled.rounds(batch, tokens, 4, contexts - tokens))
        assert ends == list(compiled.rounds(batch, tokens, 4, (contexts - tokens).tolist()))
        assert ends == np.cumsum([compiled.round(batch, tokens, 4, c) for c in contexts.tolist()]).tolist()


def beside(its: Pool | None = None, window: int = 4) -> CompiledRounds:
    drafter, shape = DRAFTERS["model"], Pearl(tokens=window).shape
    return CompiledRounds(MODEL, HARDWARE, its or pool(), LONGEST, drafter, shape, DRAFT)


def test_drafting_beside_the_target_takes_the_longer_of_the_two() -> None:
    """Few drafts hide behind the target, many the target behind them; each is one step of the draft model."""
    target, draft = (RoundModel(model, HARDWARE, pool(), Ngram(lookup_max=3)) for model in (MODEL, DRAFT))
    longer = set()
    for window in (2, 4, 12):
        compiled = beside(window=window)
        for batch, context in ((1, 500), (8, 1000), (64, 3000)):
            verify = target(batch, context, window)
            drafting = window * draft.verify_s(batch, context + 2 * window - 1, 1)
            ticks = compiled.round(batch, batch * window, window, batch * (context + window))
            assert ticks / TICKS_PER_SECOND == pytest.approx(max(verify, drafting), rel=1e-3)
            longer.add(verify > drafting)
    assert longer == {True, False}


def replicated(window: int, replicas: int, its: Pool | None = None) -> CompiledRounds:
    drafter, shape = DRAFTERS["model"], Dsi(tokens=window, replicas=replicas).shape
    return CompiledRounds(MODEL, HARDWARE, its or pool(), LONGEST, drafter, shape, DRAFT)


def test_a_tick_of_replicas_takes_a_share_of_a_verification_or_a_window_of_drafts() -> None:
    """Whatever the verdicts of this tick come to: a window of every sequence is verified, on one replica or another."""
    target, draft = (RoundModel(model, HARDWARE, pool(), Ngram(lookup_max=3)) for model in (MODEL, DRAFT))
    longer = set()
    for window, replicas in ((1, 2), (1, 8), (3, 2), (6, 3)):
        compiled = replicated(window, replicas)
        for batch, context in ((1, 500), (8, 1000), (64, 3000)):
            verify = target.verify_s(batch, context, window) / replicas
            drafting = window * draft.verify_s(batch, context + window * (replicas + 1) - 1, 1)
            for verdicts in (0, batch, batch * window):
                ticks = compiled.round(batch, verdicts, window, batch * (context + window))
                floor = compiled.tables.pure.floor[batch] / TICKS_PER_SECOND
                assert ticks / TICKS_PER_SECOND == pytest.approx(max(verify, drafting, floor), rel=1e-3)
            longer.add(verify > drafting)
    assert longer == {True, False}


def test_every_replica_reads_the_prompts() -> None:
    """What prompts take longer is not divided by the replicas; alone they take what they take on one target."""
    chunks, one, several = [(0, 1500)], replicated(4, 1), replicated(4, 3)
    assert several.round(0, 0, 4, 0, chunks, 1) == one.round(0, 0, 4, 0, chunks, 1)
    context = 8 * 1000
    verify = replicated(4, 1).round(8, 32, 0, context)
    both = [compiled.round(8, 32, 4, context, chunks, 1) for compiled in (one, several)]
    assert both[0] - both[1] == verify - -(-verify // 3)
    full = [(0, 2048)]  # the verdicts of a tick leave the prompt all of the budget, its verifications none
    assert several.round(8, 0, 4, context, full) > both[1]


@pytest.mark.parametrize("its", [pool(), pool(cuda_graphs=False), pool(cuda_graphs=False, async_scheduling=False)])
def test_a_jump_of_replicas_is_the_sum_of_its_ticks(its: Pool) -> None:
    compiled = replicated(4, 3, its)
    for number in (5, 400):
        contexts = np.cumsum(np.random.default_rng(1).integers(0, 150, number)) + 2000
        for batch, tokens in ((8, 32), (8, 3), (1, 0)):
            ends = list(compiled.rounds(batch, tokens, 4, contexts - tokens))
            assert ends == list(compiled.rounds(batch, tokens, 4, (contexts - tokens).tolist()))
            assert ends == np.cumsum([compiled.round(batch, tokens, 4, c) for c in contexts.tolist()]).tolist()


def in_chunks(drafter: str, its: Pool | None = None, scheme: Frontier = CHUNKS) -> CompiledRounds:
    draft = DRAFT if drafter == "model" else None
    return CompiledRounds(MODEL, HARDWARE, its or pool(), LONGEST, DRAFTERS[drafter], scheme.shape, draft)


@pytest.mark.parametrize("drafter", ["model", "head"])
@pytest.mark.parametrize("share", [0.1, 0.5], ids=["slow drafts", "fast drafts"])
def test_a_round_in_chunks_takes_what_the_formula_says(drafter: str, share: float) -> None:
    """Chunks of 3, 2 and 2 drafts; the target computes 3, 2 and 3 tokens of each sequence."""
    scheme = Frontier(tokens=7, chunks=3, draft_share=share, verify_share=1 - share)
    assert scheme.sizes == (3, 2, 2)
    own = DRAFT if drafter == "model" else None
    told = RoundModel(MODEL, HARDWARE, pool(), DRAFTERS[drafter], own)
    network = DRAFTERS[drafter].network(MODEL, own)
    assert network is not None
    alone = RoundModel(network, HARDWARE, pool(), Ngram(lookup_max=3))
    compiled, longer = in_chunks(drafter, scheme=scheme), set()
    for batch, context in ((1, 500), (8, 1000), (64, 3000)):
        each = alone.verify_s(batch, context + 6, 1) + told.join_s(batch)
        drafts = [told.draft_s(batch, context, 7) - 4 * each, 2 * each, 2 * each]
        verifies = [told.verify_s(batch, context + done, width) for done, width in ((0, 3), (3, 2), (5, 3))]
        expected = overlap.frontier_seconds(drafts, verifies, share, 1 - share)
        ticks = compiled.round(batch, batch * 8, 7, batch * (context + 8))
        assert ticks / TICKS_PER_SECOND == pytest.approx(expected, rel=1e-3)
        longer.add(drafts[1] / share > verifies[0] / (1 - share))
    assert longer == {share < 0.5}


class PassesByHand:
    """Verifications of 100 ticks and 1 for each token; drafts of 10 ticks each, the first with 5 more."""

    launch = (0, 0)

    def alone(self, num_decodes: int, verify_tokens: int) -> TickLine:
        return TickLine.flat(100 + verify_tokens)

    def beside_chunks(self, num_decodes: int, verify_tokens: int, context_tokens: int) -> int:
        return 100 + verify_tokens if num_decodes else 0

    def line(self, sequences: int, depth: int, mixed: bool, part: int = 0) -> TickLine:
        return TickLine.flat(10 * CHUNKS.sizes[part] + 5 * (part == 0))

    def ticks(self, sequences: int, depth: int, context_tokens: int, mixed: bool, part: int = 0) -> int:
        return self.line(sequences, depth, mixed, part).ticks[0] if sequences else 0


class TargetByHand(PassesByHand):
    def least(self, *given: object) -> int:
        return 0

    def chunks(self, *given: object) -> int:
        return 400


class DrafterByHand(PassesByHand):
    def chunks(self, *given: object) -> int:
        return 7


def test_chunks_of_ticks_made_by_hand() -> None:
    order = InChunks(CHUNKS.shape, TargetByHand(), DrafterByHand())  # type: ignore[arg-type]
    expected = overlap.frontier_seconds([35, 20, 20], [103, 102, 103], 0.25, 0.75)
    assert expected == 35 + 103 / 0.75 + 102 / 0.75 + 103
    assert order.line(1, 8, 7).at(500) == pytest.approx(expected, abs=2)
    assert order.line(1, 1, 7).at(500) == pytest.approx(35 + 101 / 0.75 + 100 / 0.75 + 100, abs=2)
    assert order.line(1, 8, 0).at(500) == 108, "without drafts there is one pass"
    with_chunk = order.beside_chunks(1, 8, 7, 500, [(0, 50)], 1)
    assert with_chunk == pytest.approx(35 + 7 + 503 / 0.75 + 102 / 0.75 + 103, abs=2)
    assert order.beside_chunks(0, 0, 7, 0, [(0, 50)], 1) == 400 + 7, "no chunk of drafts to go on beside"


@pytest.mark.parametrize("its", [pool(), pool(cuda_graphs=False), pool(cuda_graphs=False, async_scheduling=False)])
@pytest.mark.parametrize("drafter", ["model", "head"])
def test_a_jump_in_chunks_is_the_sum_of_its_rounds(drafter: str, its: Pool) -> None:
    compiled = in_chunks(drafter, its)
    for number in (5, 400):
        contexts = np.cumsum(np.random.default_rng(1).integers(0, 150, number)) + 2000
        for batch, tokens in ((8, 64), (8, 19), (8, 8), (1, 8)):
            ends = list(compiled.rounds(batch, tokens, 7, contexts - tokens))
            assert ends == list(compiled.rounds(batch, tokens, 7, (contexts - tokens).tolist()))
            assert ends == np.cumsum([compiled.round(batch, tokens, 7, c) for c in contexts.tolist()]).tolist()


def test_each_pass_over_a_chunk_is_launched_and_prepared() -> None:
    """Without graphs the target's launches floor every one of its passes."""
    eager = pool(cuda_graphs=False)
    chain = CompiledRounds(MODEL, HARDWARE, eager, LONGEST, DRAFTERS["head"], Chain(tokens=7).shape)
    compiled, launch = in_chunks("head", eager), TargetPasses(chain.tables).launch[False]
    assert launch > 0
    more = compiled.round(1, 8, 7, 500) - chain.round(1, 8, 7, 500)
    assert more >= 2 * launch / CHUNKS.verify_share - 7 * launch
    alone, more_s = pool(cuda_graphs=False, async_scheduling=False), 1e-3
    slower = HARDWARE.model_copy(
        update={"host": HARDWARE.host.model_copy(update={"step_s": HARDWARE.host.step_s + more_s})}
    )
    for scheme, prepared in ((CHUNKS, 3 + 7), (Chain(tokens=7), 1 + 7)):
        ticks = [
            CompiledRounds(MODEL, hardware, alone, LONGEST, DRAFTERS["head"], scheme.shape).round(1, 8, 7, 500)
            for hardware in (HARDWARE, slower)
        ]
        assert ticks[1] - ticks[0] == pytest.approx(prepared * to_ticks(more_s), abs=prepared)


def lines(limit: int) -> st.SearchStrategy[TickLine]:
    pieces = st.tuples(st.integers(1, 40), st.integers(0, limit), st.integers(-9, 9))
    return st.lists(pieces, min_size=1, max_size=5).map(
        lambda found: TickLine(list(accumulate(p[0] for p in found)), [p[1] for p in found], [p[2] for p in found])
    )


@given(lines(200), lines(200), st.integers(-30, 30))
def test_the_larger_of_two_lines_is_that_everywhere(a: TickLine, b: TickLine, shift: int) -> None:
    found = a.or_larger(b.moved(shift))
    everywhere = range(a.starts[0], 300)
    assert [found.at(x) for x in everywhere] == [max(a.at(x), b.at(x - shift)) for x in everywhere]
    assert found.many(np.array(everywhere)).tolist() == [found.at(x) for x in everywhere]


def test_which_is_the_longer_may_change_as_contexts_grow() -> None:
    """The line that is looked up is the larger of the two at every single context."""
    target, crossed = rounds("head"), 0
    for batch, window in ((1, 2), (8, 3), (64, 5)):
        compiled = beside(window=window)
        draft = compiled.order.drafter.line(batch, window, False)
        contexts = np.arange(batch * 20, batch * LONGEST, 11 * batch)
        target_ticks = [target.round(batch, batch * window, 0, c) for c in contexts.tolist()]
        draft_ticks = [draft.at(c + window * batch) for c in contexts.tolist()]
        expected = np.maximum(target_ticks, draft_ticks)
        assert [compiled.round(batch, batch * window, window, c) for c in contexts.tolist()] == expected.tolist()
        ends = compiled.rounds(batch, batch * window, window, contexts - batch * window)
        assert list(ends) == expected.cumsum().tolist()
        crossed += bool((np.diff(np.sign(np.subtract(target_ticks, draft_ticks))) != 0).any())
    assert crossed


def test_a_prompt_is_read_by_both_beside_each_other() -> None:
    chunks, compiled = [(0, 1500)], beside()
    plain = rounds("head")
    alone = plain.round(0, 0, 0, 0, chunks, 1)
    assert compiled.round(0, 0, 4, 0, chunks, 1) == alone, "the smaller model is done before"
    with_decodes = compiled.round(8, 32, 4, 8 * 1000, chunks, 1)
    assert with_decodes >= plain.round(8, 32, 0, 8 * 1000, chunks, 1)
    assert with_decodes < rounds("model").round(8, 32, 4, 8 * 1000, chunks, 1)


@pytest.mark.parametrize("its", [pool(), pool(cuda_graphs=False), pool(cuda_graphs=False, async_scheduling=False)])
def test_a_jump_beside_drafting_is_the_sum_of_its_rounds(its: Pool) -> None:
    compiled = beside(its)
    for number in (5, 400):
        contexts = np.cumsum(np.random.default_rng(1).integers(0, 150, number)) + 2000
        for batch, tokens in ((8, 32), (8, 19), (1, 4)):
            ends = list(compiled.rounds(batch, tokens, 4, contexts - tokens))
            assert ends == list(compiled.rounds(batch, tokens, 4, (contexts - tokens).tolist()))
            assert ends == np.cumsum([compiled.round(batch, tokens, 4, c) for c in contexts.tolist()]).tolist()


def test_without_drafts_a_round_is_a_step() -> None:
    compiled, plain = rounds("head"), compile_costs(MODEL, HARDWARE, pool(), LONGEST)
    for batch, context in ((1, 700), (8, 9000), (60, 100_000)):
        assert compiled.round(batch, batch, 0, context) == plain.decode(batch, context)[0]
        chunks = [(0, 300), (512, 200)]
        assert compiled.round(batch, batch, 0, context, chunks, 1) == plain.mixed(batch, context, chunks, batch + 1)


@pytest.mark.parametrize(
    "its",
    [pool(), pool(cuda_graphs=False, async_scheduling=False), FEW_GRAPHS, pool(prompt_launch_s=1e-3)],
    ids=["graphs", "eager", "few graphs", "prompts launched"],
)
@pytest.mark.parametrize("drafter", ["head", "model", "medusa", "n-gram"])
def test_the_short_way_to_a_round_with_chunks_comes_to_the_same(drafter: str, its: Pool) -> None:
    order = rounds(drafter, its=its).order
    for decodes, chunks, completing in ((0, [(0, 300)], 1), (8, [(0, 300), (512, 200)], 1), (3, [(96, 64)], 0)):
        for depth in (0, 4):
            batch = (decodes, decodes * (1 + depth), depth, decodes * 1000)
            assert order.beside_chunks(*batch, chunks, completing) == in_turn(order, *batch, chunks, completing)


def in_turn(
    order: RoundOrder,
    decodes: int,
    tokens: int,
    depth: int,
    context: int,
    chunks: list[tuple[int, int]],
    completing: int,
) -> int:
    """Pass by pass: the target's, then the drafter's."""
    verify = order.target.beside_chunks(decodes, tokens, context) + order.target.chunks(tokens, chunks, completing)
    length, new = (sum(column) for column in ((past + new for past, new in chunks), (new for _, new in chunks)))
    verify = max(verify, order.target.least(tokens + new, True))
    if depth == 0:
        return verify
    context += depth * decodes - tokens + completing * (length // len(chunks) + depth)
    draft = order.drafter.ticks(decodes + completing, depth, context, True)
    return verify + draft + order.drafter.chunks(decodes + completing, depth, chunks, new)


def test_the_drafter_reads_prompts_too() -> None:
    chunks = [(0, 1500)]
    took = {}
    for drafter in ("n-gram", "head", "model"):
        compiled = rounds(drafter)
        took[drafter] = compiled.round(8, 40, 4, 8 * 1000, chunks) - compiled.round(8, 40, 4, 8 * 1000)
    assert took["n-gram"] < took["head"] < took["model"]


def test_they_are_compiled_again_elsewhere() -> None:
    compiled = rounds("model", "tree")
    again = pickle.loads(pickle.dumps(compiled))
    assert again.round(8, 56, 3, 9000) == compiled.round(8, 56, 3, 9000)


def test_more_costs_more() -> None:
    compiled = rounds("model")
    base = compiled.round(8, 24, 2, 8000)
    assert compiled.round(8, 25, 2, 8000) >= base
    assert compiled.round(8, 32, 3, 8000) > base
    assert compiled.round(8, 24, 2, 80_000) > base


def test_a_correction_of_steps_goes_for_rounds() -> None:
    """An engine's log has all of the GPU time off by a factor, and an offset in place of the host."""
    errors = dict.fromkeys(("median_before", "p90_before", "median_after", "p90_after"), 0.1)
    decode = Correction(scale=1.5, offset_s=1e-3, steps=100, **errors)
    calibration = Calibration(model=MODEL.name, tp=1, pp=1, source="a log", decode=decode)
    corrected = HARDWARE.model_copy(update={"calibration": calibration})
    shape = SCHEMES["chain"].shape
    compiled = CompiledRounds(MODEL, corrected, pool(), LONGEST, DRAFTERS["head"], shape)
    expected = RoundModel(MODEL, corrected, pool(), DRAFTERS["head"])(8, 1000, 5, 4, 1)
    assert compiled.round(8, 40, 4, 8 * 1005) / TICKS_PER_SECOND == pytest.approx(expected, rel=1e-3)
