"""Plans that the study's engine can be told: those that its emitter would refuse are no part of a space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from simtune.emit import Emitter, emitter_of
from simtune.errors import Infeasible
from simtune.tuner.question import Question
from simtune.tuner.space.candidates import PoolChoice, Space, space_of
from simtune.tuner.space.garbage_collection import gc_disabled


def space_for(question: Question) -> Space:
    """The space of a question, without the plans that the engine with its policy would not start with or is not told.

    Where no engine has the policy nothing is refused. How pools draft is settled later, and refused where the study is
    read. Raises Infeasible, naming constraints or refusals, where nothing is left.
    """
    with gc_disabled():
        return _said(question, space_of(question.study))


def _said(question: Question, space: Space) -> Space:
    refuser = _Refuser(question, space)
    kept, refused = [], Counter[str]()
    for candidate in space.candidates:
        why = next(filter(None, map(refuser.why, candidate.pools)), "")
        if why:
            refused[why] += 1
        else:
            kept.append(candidate)
    if not kept:
        why, count = refused.most_common(1)[0]
        raise Infeasible(
            f"{question.study.name}: the engine refuses all {len(space.candidates):,} plans, {count:,} of them for "
            f"{why}; allow other choices in search, or another policy"
        )
    return Space(tuple(kept), space.left_out, refused)


class _Refuser:
    """Asks the emitter of each pool's policy, once for all pools that are alike but for their number."""

    def __init__(self, question: Question, space: Space) -> None:
        self._question = question
        self._max_model_len = question.length_limit(space.candidates)
        self._settings: dict[tuple[str, str, int], Mapping[str, Any]] = {}
        self._emitters: dict[tuple[str | None, str], Emitter | None] = {}
        self._known: dict[PoolChoice, str] = {}

    def why(self, choice: PoolChoice) -> str:
        """Why an engine would refuse a pool; empty where it would not."""
        alone = choice.alone
        if alone not in self._known:
            self._known[alone] = self._asked(alone)
        return self._known[alone]

    def _asked(self, choice: PoolChoice) -> str:
        question, of = self._question, (choice.shape.gpu, choice.shape.weight_dtype, choice.shape.pp)
        if of not in self._settings:
            self._settings[of] = question.settings_of(choice.shape)
        pool = choice.pool(question.study, self._max_model_len, self._settings[of])
        key = (pool.engine, pool.batching.policy)
        if key not in self._emitters:
            named = emitter_of(pool)
            self._emitters[key] = None if named is None else named.of(pool.engine)
        emitter = self._emitters[key]
        if emitter is None:
            return ""
        plain = pool.model_copy(update={"speculation": None})
        return next((f"{emitter.title}: {why}" for why in emitter.refusals(plain, question.model, {})), "")
