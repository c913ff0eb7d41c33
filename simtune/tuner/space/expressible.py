"""Plans that a search has to look at: the study's engine can express them, and each of their pools could be.

An engine's refusal, memory, and drafts that do not pay are matters of one pool each, whatever pool is beside it. So
each choice of a pool is judged once, before prefill and decode pools are combined: plans with a pool that cannot be are
counted, not made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from simtune.emit import Emitter, emitter_of
from simtune.errors import Infeasible
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.space.candidates import (
    Candidate,
    PoolChoice,
    PoolProduct,
    Space,
    in_order,
    products,
    space_of,
    too_few_devices,
)
from simtune.tuner.space.garbage_collection import gc_disabled


@dataclass(frozen=True, kw_only=True)
class SearchSpace(Space):
    """Plans that a search has to look at, and what was computed to find them."""

    plan_cache: PlanCache
    """Memory, drafts and costs of the pools."""


def space_for(question: Question) -> SearchSpace:
    """Return the space of a question, without the plans that the engine would not start with or cannot express, and
    without most of those of several pools one of which cannot be: each such pool is in one plan, which tells why.

    If no engine has the policy, nothing is refused; nor is a plan that only the settings of its variant keep an engine
    from running. Drafts that an engine cannot express are refused when the study is read.
    Raise Infeasible, naming constraints or refusals, if nothing is left.
    """
    with gc_disabled():
        # Constraints may be about all pools together: each plan is asked.
        return _of_plans(question) if question.study.constraints else _of_products(question)


def left_out_names(question: Question, space: SearchSpace) -> set[str]:
    """Return the names of the plans of several pools that a study's constraints allow and its space leaves out."""
    with gc_disabled():
        every = {plan.name for plan in space_of(question.study).candidates if len(plan.pools) > 1}
    return every - {candidate.name for candidate in space.candidates}


def _of_plans(question: Question) -> SearchSpace:
    space = space_of(question.study)
    verdicts = PoolVerdicts(question, space.candidates)
    verdicts.settle_alone(space.candidates)
    plans = [candidate for candidate in space.candidates if verdicts.takes(candidate)]
    return verdicts.space(plans, space.left_out, len(space.candidates))


def _of_products(question: Question) -> SearchSpace:
    every = products(question.study)
    if not every:
        raise too_few_devices(question.study)
    alone = in_order([plan for plans in every if len(plans.sides) == 1 for plan in plans.plans()])
    together = [plans for plans in every if len(plans.sides) > 1]
    verdicts = PoolVerdicts(question, [*alone, *_one_for_each_choice(together)])
    if any(plans.sides[0][0].shape.role == "mixed" for plans in together):
        verdicts.settle_alone(alone)
    plans = [candidate for candidate in alone if verdicts.takes(candidate)]
    for product in together:
        plans += verdicts.taken_of(product)
    return verdicts.space(in_order(plans), {}, sum(map(len, every)))


def _one_for_each_choice(every: Sequence[PoolProduct]) -> Iterator[Candidate]:
    """Yield plans such that each choice of a pool is in one of them."""
    covered = set[int]()
    for plans in every:
        sides = tuple(map(id, plans.sides))
        if not covered.issuperset(sides):
            covered.update(sides)
            for pools in zip_longest(*plans.sides):
                yield plans.plan(tuple(pool or side[0] for pool, side in zip(pools, plans.sides, strict=True)))


@dataclass(frozen=True)
class JudgedSide:
    """Choices of a pool, judged."""

    size: int
    """Number of choices."""
    refused: Mapping[str, int]
    """Number of choices by the reason why the engine refuses them."""
    expressible: tuple[PoolChoice, ...]
    """Choices that the engine does not refuse."""
    unfit: Mapping[PoolChoice, str]
    """Expressible choices that cannot be, with the reason."""

    @property
    def fit(self) -> tuple[PoolChoice, ...]:
        """Choices that a search has to look at."""
        return tuple(choice for choice in self.expressible if choice not in self.unfit)


class PoolVerdicts:
    """Verdicts on the pools of a space, each made once, and the number of plans that they leave out."""

    def __init__(self, question: Question, plans: Sequence[Candidate]) -> None:
        """Judge pools of a space; `plans` are enough of its plans for each choice of a pool to be in one of them."""
        self._question, self._refuser = question, _Refuser(question, plans)
        self._plan_cache = PlanCache(question, plans)
        self._refused, self._unfit = Counter[str](), Counter[str]()
        self._shown = set[PoolChoice]()
        self._sides: dict[int, JudgedSide] = {}

    def settle_alone(self, candidates: Iterable[Candidate]) -> None:
        """Settle the pools of plans of one pool before those of pairs: the load of a plan of one pool counts."""
        for candidate in candidates:
            if len(candidate.pools) == 1 and not self._refuser.why(candidate.pools[0]):
                self._plan_cache.settled(candidate)

    def space(self, plans: Sequence[Candidate], left_out: Mapping[str, int], total: int) -> SearchSpace:
        """Return the space of the plans that remain of `total`. Raise Infeasible if none does."""
        if not plans:
            why, count = self._refused.most_common(1)[0]
            raise Infeasible(
                f"{self._question.study.name}: the engine refuses all {total:,} plans, {count:,} of them for "
                f"{why}; allow other choices in search, or another policy"
            )
        return SearchSpace(tuple(plans), left_out, self._refused, self._unfit, plan_cache=self._plan_cache)

    def takes(self, candidate: Candidate) -> bool:
        """Return True if a search has to look at a plan; count the plan otherwise."""
        why = next(filter(None, map(self._refuser.why, candidate.pools)), "")
        if why:
            self._refused[why] += 1
            return False
        for pool in candidate.pools if len(candidate.pools) > 1 else ():
            if why := self._plan_cache.unfit(pool, candidate):
                if self._is_first_of(pool):
                    return True
                self._unfit[why] += 1
                return False
        return True

    def taken_of(self, plans: PoolProduct) -> list[Candidate]:
        """Return the plans of a product that a search has to look at; count the others."""
        sides = [self._judged(side, plans) for side in plans.sides]
        examples = list[Candidate]()
        for number, side in enumerate(sides):
            # The first pool that something is wrong with gives the reason: with those before it nothing is.
            before, after = sides[:number], sides[number + 1 :]
            beside = math.prod(len(s.expressible) for s in before) * math.prod(s.size for s in after) * plans.routers
            for why, count in side.refused.items():
                self._refused[why] += count * beside
            pools_beside = [*(s.fit for s in before), *(s.expressible for s in after)]
            beside = math.prod(map(len, pools_beside)) * plans.routers
            for choice, why in side.unfit.items() if beside else ():
                first = self._is_first_of(choice)
                self._unfit[why] += beside - first
                if first:
                    companions = [pools[0] for pools in pools_beside]
                    examples.append(plans.plan((*companions[:number], choice, *companions[number:])))
        fit = replace(plans, sides=tuple(side.fit for side in sides))
        return [*examples, *fit.plans()]

    def _is_first_of(self, pool: PoolChoice) -> bool:
        """Return True at the first plan that has a pool that cannot be, in any number of instances."""
        is_first = pool.alone not in self._shown
        self._shown.add(pool.alone)
        return is_first

    def _judged(self, side: tuple[PoolChoice, ...], plans: PoolProduct) -> JudgedSide:
        """Return a side of a product, judged; cached by the object, which many products share."""
        if id(side) not in self._sides:
            reasons = {choice: self._refuser.why(choice) for choice in side}
            expressible = tuple(choice for choice, why in reasons.items() if not why)
            unfit = {choice: self._plan_cache.unfit(choice, plans.first) for choice in expressible}
            self._sides[id(side)] = JudgedSide(
                len(side),
                Counter(filter(None, reasons.values())),
                expressible,
                {choice: why for choice, why in unfit.items() if why},
            )
        return self._sides[id(side)]


class _Refuser:
    """Collects refusals by the emitter of each pool's policy, once for all pools that differ in instances alone."""

    def __init__(self, question: Question, plans: Sequence[Candidate]) -> None:
        self._question = question
        self._max_model_len = question.length_limit(plans)
        self._settings: dict[tuple[str, str, int, str, str, bool], Mapping[str, Any]] = {}
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
        of = (shape.gpu, shape.weight_dtype, shape.pp, shape.engine, shape.checkpoint, shape.encodes)
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
        return next((f"{emitter.title}: {why}" for why in emitter.refusals(plain, question.model_of(shape), {})), "")
