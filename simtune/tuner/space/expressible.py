"""Plans that the study's engine can express: plans that its emitter would refuse are removed from the space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from simtune.emit import Emitter, emitter_of
from simtune.errors import Infeasible
from simtune.tuner.question import Question
from simtune.tuner.space.candidates import PoolChoice, Space, space_of
from simtune.tuner.space.garbage_collection import gc_disabled


def space_for(question: Question) -> Space:
    """Return the space of a question, without the plans that the engine would not start with or cannot express.

    If no engine has the policy, nothing is refused; nor is a plan that only the settings of its variant keep an engine
    from running. Drafting is settled later, and refused when the study is read.
    Raise Infeasible, naming constraints or refusals, if nothing is left.
    """
    with gc_disabled():
        return _said(question, space_of(question.study))


def _said(question: Question, space: Space) -> Space:
    refuser = _Refuser(question, space)
    expressible, refused = [], Counter[str]()
    for candidate in space.candidates:
        why = next(filter(None, map(refuser.why, candidate.pools)), "")
        if why:
            refused[why] += 1
        else:
            expressible.append(candidate)
    if not expressible:
        why, count = refused.most_common(1)[0]
        raise Infeasible(
            f"{question.study.name}: the engine refuses all {len(space.candidates):,} plans, {count:,} of them for "
            f"{why}; allow other choices in search, or another policy"
        )
    return Space(tuple(expressible), space.left_out, refused)


class _Refuser:
    """Collects refusals by the emitter of each pool's policy, once for all pools that differ in instances alone."""

    def __init__(self, question: Question, space: Space) -> None:
        self._question = question
        self._max_model_len = question.length_limit(space.candidates)
        self._settings: dict[tuple[str, str, int, str], Mapping[str, Any]] = {}
        self._emitters: dict[tuple[str | None, str], Emitter | None] = {}
        self._known: dict[PoolChoice, str] = {}
        self._known_objects: dict[int, tuple[PoolChoice, str]] = {}

    def why(self, choice: PoolChoice) -> str:
        """Return why an engine would refuse a pool; empty if it would not.

        Cached by the object, which many plans of a space share, and among objects by the pool of one instance.
        """
        cached_pool = self._known_objects.get(id(choice))
        if cached_pool is not None:
            return cached_pool[1]
        alone = choice.alone
        if alone not in self._known:
            self._known[alone] = self._asked(alone)
        self._known_objects[id(choice)] = choice, self._known[alone]
        return self._known[alone]

    def _asked(self, choice: PoolChoice) -> str:
        question, shape = self._question, choice.shape
        of = (shape.gpu, shape.weight_dtype, shape.pp, shape.engine)
        if of not in self._settings:
            self._settings[of] = question.settings_of(shape)
        pool = replace(choice, changes=None).pool(question.study, self._max_model_len, self._settings[of])
        key = (pool.engine, pool.batching.policy)
        if key not in self._emitters:
            emitter_class = emitter_of(pool)
            self._emitters[key] = None if emitter_class is None else emitter_class.of(pool.engine)
        emitter = self._emitters[key]
        if emitter is None:
            return ""
        plain = pool.model_copy(update={"speculation": None})
        return next((f"{emitter.title}: {why}" for why in emitter.refusals(plain, question.model, {})), "")
