"""Assisted generation of a real library beside the mathematics of a chain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles import chain as exact
from tests.oracles import rigged

VOCABULARY, LENGTH, DRAFT_TOKENS = 4003, 40, 4


def test_a_rig_walks_through_all_tokens_once_and_agrees_as_asked() -> None:
    rig = rigged.rig(VOCABULARY, 0.7, seed=0)
    starts = rig.starts(LENGTH)
    walked = np.concatenate([rig.walk(start, LENGTH) for start in starts.tolist()])
    assert sorted(walked.tolist()) == list(range(rigged.RESERVED, VOCABULARY))
    assert sorted(rig.draft.tolist()) == list(range(VOCABULARY)), "the draft's is a permutation, too"
    agreement = np.concatenate([rig.agreement(start, LENGTH) for start in starts.tolist()])
    assert agreement.mean() == 0.7


def test_rounds_of_a_known_agreement() -> None:
    yes, no = True, False
    assert rigged.rounds([yes] * 10, 4) == 2, "four drafts and the bonus, twice"
    assert rigged.rounds([no] * 3, 4) == 3
    assert rigged.rounds([yes, no, yes, yes], 4) == 2, (
        "draft kept, correction; draft kept, and the last is the target's"
    )
    assert rigged.rounds([yes, yes], 4) == 1, "nobody drafts the last token"
    assert rigged.rounds([], 4) == 0


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 6))
def test_rounds_are_no_more_than_tokens_and_no_fewer_than_drafts_allow(agreement: list[bool], drafts: int) -> None:
    assert -(-len(agreement) // (drafts + 1)) <= rigged.rounds(agreement, drafts) <= len(agreement)


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
def test_rounds_on_average_are_those_of_independent_draws(acceptance: float) -> None:
    rng = np.random.default_rng(0)
    rounds = [rigged.rounds(rng.random(LENGTH) < acceptance, DRAFT_TOKENS) for _ in range(4000)]
    predicted = exact.mean_seconds(LENGTH, exact.iid(acceptance, DRAFT_TOKENS), draft_s=0, target_s=1)
    error = np.std(rounds) / len(rounds) ** 0.5
    assert abs(np.mean(rounds) - predicted) < 4 * error


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
def test_assisted_generation_verifies_as_often_as_predicted(acceptance: float) -> None:
    """Each prompt as often as its own agreement says, exactly; all of them within 3 % of what the acceptance says."""
    pytest.importorskip("transformers")
    rig = rigged.rig(VOCABULARY, acceptance, seed=0)
    target, draft = rigged.llama(rig.target, 128, 2, seed=1), rigged.llama(rig.draft, 64, 1, seed=2)
    tokens = verifies = 0
    for start in rig.starts(LENGTH).tolist():
        did = rigged.generate(target, draft, start, LENGTH, DRAFT_TOKENS)
        assert did.answer.tolist() == rig.walk(start, LENGTH).tolist()
        assert did.verifies == rigged.rounds(rig.agreement(start, LENGTH), DRAFT_TOKENS)
        tokens, verifies = tokens + LENGTH, verifies + did.verifies
    predicted = LENGTH / exact.mean_seconds(LENGTH, exact.iid(acceptance, DRAFT_TOKENS), draft_s=0, target_s=1)
    assert tokens / verifies == pytest.approx(predicted, rel=0.03)
