"""Classes of plans of several pools: all divisions of the GPUs among instances of the same roles and types, bounded as
one by the allocation programme (`simtune.tuner.bounds.relaxation`) before any of them is looked at.

A class comes to the search with a bound by the rates that its instances could sustain at most. When it is its turn, it
is parted by how GPUs are cut into instances, each part with a bound of its own; only what is left of these becomes
plans. A class whose turn never comes is pruned whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from simtune.specs.hardware import Hardware
from simtune.tuner.bounds.relaxation import Relaxation, Worths, nodes_of
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.space.allocation import Fleet, InstanceRate
from simtune.tuner.space.candidates import Candidate, PoolShape


@dataclass(frozen=True)
class PlanClass:
    """Plans, and what none of them exceeds."""

    name: str
    """E.g. prefill h100-sxm tp2-pp1 + decode l40s tp4-pp1."""
    candidates: tuple[Candidate, ...]
    worths: Worths
    """What proves the bound."""
    best: float | None
    """Of the objective, at most; infinite where nothing is proved; None where no plan of it can do what is asked."""
    reason: str = ""
    """Why none can."""

    @property
    def proved(self) -> bool:
        """Whether anything is said of its plans."""
        return self.best is None or math.isfinite(self.best)


class PlanClasses:
    """The classes of a study's plans."""

    def __init__(self, question: Question, plan_cache: PlanCache) -> None:
        self._question, self._plan_cache = question, plan_cache
        self.sign = question.objective.sign
        """Whether more (1) or less (-1) of the objective is better."""

    def sorted_out(self, candidates: Iterable[Candidate]) -> tuple[list[Candidate], dict[str, list[Candidate]]]:
        """(plans that are in no class, those of each class, by the roles and GPU types of their pools).

        A plan of one pool needs no programme to be bounded. Nor are there classes where the objective is not one of
        rates and costs, where the study gives a pool whole, or where requests come only when others are answered.
        """
        every, question = list(candidates), self._question
        together = [candidate for candidate in every if len(candidate.pools) > 1]
        if not together or question.objective.aim is None or question.study.fixed:
            return every, {}
        if self._plan_cache.stream(together[0]).offered_rate_rps is None:
            return every, {}
        return [candidate for candidate in every if len(candidate.pools) == 1], _by(_types, together)

    def bounded_all(self, classes: Mapping[str, Sequence[Candidate]]) -> list[PlanClass]:
        """Classes with the bounds of their programmes."""
        return [self.bounded(name, those, solver=True) for name, those in classes.items()]

    def split(self, whole: PlanClass) -> list[PlanClass]:
        """Its parts, by the cut of their GPUs; nothing where it has no parts."""
        parts = _by(_cuts, whole.candidates)
        if len(parts) < 2:
            return []
        return [self.bounded(name, those, solver=False) for name, those in parts.items()]

    def named(self, candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
        """The plans of every class and of every part of one, by its name."""
        _, classes = self.sorted_out(candidates)
        return classes | {name: those for whole in classes.values() for name, those in _by(_cuts, whole).items()}

    def bounded(self, name: str, candidates: Sequence[Candidate], *, solver: bool) -> PlanClass:
        """A class with the best bound that is found, with or without a solver."""
        programme = self.programme(candidates)
        return self.bounded_by(name, candidates, programme, programme.best(solver=solver))

    def bounded_by(
        self, name: str, candidates: Sequence[Candidate], programme: Relaxation, worths: Worths
    ) -> PlanClass:
        """A class with the bound that given numbers prove."""
        objective, stream = self._question.objective, self._plan_cache.stream(candidates[0])
        amount, offered = programme.bound(worths), stream.offered_rate_rps or 0.0
        reason = ""
        if programme.aim != "least cost":
            reason = "" if amount > 0 else "no allocation of it serves anything"
        elif (serves := programme.serves()) < offered:
            reason = (
                f"no allocation of its instances serves more than {serves:.4g} requests/s; {offered:.4g} are offered"
            )
        best = objective.of_allocation(amount, offered * float(stream.output_tokens.mean()))
        return PlanClass(name, tuple(candidates), worths, None if reason else best, reason)

    def programme(self, candidates: Sequence[Candidate]) -> Relaxation:
        """All allocations of a study's GPUs to the instances that some plans have."""
        question, first = self._question, candidates[0]
        aim, stream = question.objective.aim, self._plan_cache.stream(first)
        assert aim is not None
        choices = {id(pool): pool for candidate in candidates for pool in candidate.pools}
        best: dict[tuple[PoolShape, int], float] = {}
        for choice in choices.values():
            known = self._plan_cache.instance_rate(choice, first)
            if known is not None:
                devices, rps = known
                best[choice.shape, devices] = max(best.get((choice.shape, devices), 0.0), rps)
        rates = tuple(
            InstanceRate(f"{shape.role} {shape.gpu} {shape.name} {devices}", shape.role, shape.gpu, devices, rps)
            for (shape, devices), rps in sorted(best.items())
        )
        return Relaxation(self._fleet(), rates, aim, stream.offered_rate_rps or 0.0, one_of_each=True)

    def _fleet(self) -> Fleet:
        question = self._question
        study, budget = question.study, question.study.limits.usd_per_hour
        dollars = question.objective.needs_prices or (question.objective.aim == "most" and budget is not None)
        nodes = []
        for entry in study.hardware:
            hardware = question.profiles[entry.profile]
            gpus = min(entry.devices, study.limits.gpus or entry.devices)
            price = _price(hardware) if dollars else 1.0
            nodes += nodes_of(entry.profile, gpus, hardware.device.devices_per_node, price)
        return Fleet(tuple(nodes), budget_per_hour=budget if budget is not None and dollars else math.inf)


class UnopenedClasses:
    """Classes whose plans nobody has looked at yet."""

    def __init__(self, classes: PlanClasses, candidates: Iterable[Candidate]) -> None:
        self._classes = classes
        self.alone, apart = classes.sorted_out(candidates)
        """Plans that are in no class."""
        self._waiting = classes.bounded_all(apart)
        self.bounded = [group for group in self._waiting if group.proved]
        """Whatever has a bound that somebody may want to know: classes as they came, and parts that stay closed."""
        self._sort()

    def __iter__(self) -> Iterator[PlanClass]:
        return iter(self._waiting)

    @property
    def best(self) -> float | None:
        """What no plan of them exceeds; None where none can do what is asked."""
        return self._waiting[0].best if self._waiting else None

    def opened(self) -> tuple[Candidate, ...]:
        """The plans of the most promising class; none yet where it is parted into several."""
        whole = self._waiting.pop(0)
        parts = self._classes.split(whole)
        self._waiting += parts
        self._sort()
        return () if parts else whole.candidates

    def closed(self) -> list[PlanClass]:
        """All of them, for good."""
        left, self._waiting = self._waiting, []
        self.bounded += [group for group in left if group.proved and group not in self.bounded]
        return left

    def _sort(self) -> None:
        sign = self._classes.sign
        self._waiting.sort(key=lambda group: math.inf if group.best is None else -sign * group.best)


def _price(hardware: Hardware) -> float:
    price = hardware.device.price_per_hour_usd
    assert price is not None
    return price


def _types(candidate: Candidate) -> str:
    return " + ".join(f"{pool.shape.role} {pool.shape.gpu}" for pool in candidate.pools)


def _cuts(candidate: Candidate) -> str:
    return " + ".join(f"{pool.shape.role} {pool.shape.gpu} {pool.shape.name}" for pool in candidate.pools)


def _by(name: Callable[[Candidate], str], candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    """Those of one name each, in their order."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(name(candidate), []).append(candidate)
    return groups
