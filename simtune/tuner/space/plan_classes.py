"""Classes of plans of several pools: all divisions of the GPUs among instances of the same roles and types, bounded
together by the allocation programme (`simtune.tuner.bounds.relaxation`) before any plan of the class is simulated.

A class enters the search with a bound by the rates that its instances could sustain at most. When it is its turn, it
is split by how GPUs are cut into instances, each part with a bound of its own; only parts whose turn comes are opened
into plans. A class whose turn never comes is pruned as a whole.
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


def _by_itself(candidate: Candidate) -> bool:
    """True if a plan of several pools is in no class: instances that serve requests as a whole or in part, that come
    and go, or that share GPUs have no rate and no cost of their own in a programme."""
    return candidate.prefills_locally or candidate.scales or candidate.shares


@dataclass(frozen=True)
class PlanClass:
    """A class of plans with a bound on all of them."""

    name: str
    """Name of the class, e.g. prefill h100-sxm tp2-pp1 + decode l40s tp4-pp1."""
    candidates: tuple[Candidate, ...]
    worths: Worths
    """Worths that prove the bound."""
    best: float | None
    """Bound on the objective; infinite if nothing is proved; None if no plan of the class can meet the objective."""
    reason: str = ""
    """Reason why no plan can; empty otherwise."""

    @property
    def proved(self) -> bool:
        """True if a bound on its plans is proved."""
        return self.best is None or math.isfinite(self.best)


class PlanClasses:
    """Classes of the plans of a study."""

    def __init__(self, question: Question, plan_cache: PlanCache) -> None:
        self._question, self._plan_cache = question, plan_cache
        self.sign = question.objective.sign
        """1 if more of the objective is better, -1 if less is."""

    def sorted_out(self, candidates: Iterable[Candidate]) -> tuple[list[Candidate], dict[str, list[Candidate]]]:
        """Return (plans that are in no class, plans of each class, by the roles and GPU types of their pools).

        A plan of one pool needs no programme to be bounded; one whose decode instances compute prompts has none.
        There are no classes if the objective is not one of rates and costs, if the study fixes a pool, if requests come
        only when others are answered, or for a batch, whose rate need not be kept up with.
        """
        every, question = list(candidates), self._question
        together = [c for c in every if len(c.pools) > 1 and not _by_itself(c)]
        if not together or question.objective.aim is None or question.study.fixed:
            return every, {}
        stream = self._plan_cache.stream(together[0])
        if stream.offered_rate_rps is None or stream.batch:
            return every, {}
        alone = [c for c in every if len(c.pools) == 1 or _by_itself(c)]
        return alone, _by(_types, together)

    def bounded_all(self, classes: Mapping[str, Sequence[Candidate]]) -> list[PlanClass]:
        """Return classes with the bounds of their programmes."""
        return [self.bounded(name, plans, solver=True) for name, plans in classes.items()]

    def split(self, whole: PlanClass) -> list[PlanClass]:
        """Return the parts of a class, by the cut of their GPUs; empty if there is only one."""
        parts = _by(_cuts, whole.candidates)
        if len(parts) < 2:
            return []
        return [self.bounded(name, plans, solver=False) for name, plans in parts.items()]

    def named(self, candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
        """Return the plans of every class and of every part of a class, by its name."""
        _, classes = self.sorted_out(candidates)
        return classes | {name: part for plans in classes.values() for name, part in _by(_cuts, plans).items()}

    def bounded(self, name: str, candidates: Sequence[Candidate], *, solver: bool) -> PlanClass:
        """Return a class with the best bound that is found, with or without a solver."""
        programme = self.programme(candidates)
        return self.bounded_by(name, candidates, programme, programme.best(solver=solver))

    def bounded_by(
        self, name: str, candidates: Sequence[Candidate], programme: Relaxation, worths: Worths
    ) -> PlanClass:
        """Return a class with the bound that the given worths prove."""
        objective, stream = self._question.objective, self._plan_cache.stream(candidates[0])
        amount, offered = programme.bound(worths), stream.offered_rate_rps or 0.0
        reason = ""
        if programme.aim != "least cost":
            reason = "" if amount > 0 else "no allocation of it serves anything"
        elif (serves := programme.serves()) < offered:
            reason = (
                f"no allocation of its instances serves more than {serves:.4g} requests/s; {offered:.4g} are offered"
            )
        best = objective.of_allocation(amount, offered * float(stream.output_tokens.sum()) / stream.arrivals)
        return PlanClass(name, tuple(candidates), worths, None if reason else best, reason)

    def programme(self, candidates: Sequence[Candidate]) -> Relaxation:
        """Return the programme of all allocations of a study's GPUs to the instances that some plans have."""
        question, first = self._question, candidates[0]
        aim, stream = question.objective.aim, self._plan_cache.stream(first)
        assert aim is not None
        choices = {id(pool): pool for candidate in candidates for pool in candidate.pools}
        best: dict[tuple[PoolShape, int], float] = {}
        for choice in choices.values():
            instance_rate = self._plan_cache.instance_rate(choice, first)
            if instance_rate is not None:
                devices, rps = instance_rate
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
    """Classes whose plans are not simulated yet."""

    def __init__(self, classes: PlanClasses, candidates: Iterable[Candidate]) -> None:
        self._classes = classes
        self.alone, apart = classes.sorted_out(candidates)
        """Plans that are in no class."""
        self._waiting = classes.bounded_all(apart)
        self.bounded = [group for group in self._waiting if group.proved]
        """All bounds that are certified: classes as they were bounded first, and parts that stay closed."""
        self._sort()

    def __iter__(self) -> Iterator[PlanClass]:
        return iter(self._waiting)

    @property
    def best(self) -> float | None:
        """Best bound of all waiting classes; None if no plan of them can meet the objective."""
        return self._waiting[0].best if self._waiting else None

    def opened(self) -> tuple[Candidate, ...]:
        """Return the plans of the most promising class; empty if the class is split into parts instead."""
        group = self._waiting.pop(0)
        parts = self._classes.split(group)
        self._waiting += parts
        self._sort()
        return () if parts else group.candidates

    def closed(self) -> list[PlanClass]:
        """Return all waiting classes, and close them for good."""
        groups, self._waiting = self._waiting, []
        self.bounded += [group for group in groups if group.proved and group not in self.bounded]
        return groups

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
    """Return the candidates grouped by name, in their order."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(name(candidate), []).append(candidate)
    return groups
