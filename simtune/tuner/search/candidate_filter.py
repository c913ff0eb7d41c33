"""Candidates as they enter the search: those that fit, with what they could reach at most, and why others do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from simtune.sim.deployment import Deployment
from simtune.tuner.bounds.best_case import least_e2el_s, most_favourable, slo_bound
from simtune.tuner.objectives import Miss, PlanFacts, RateObjective
from simtune.tuner.plan_cache import Refused, Workshop
from simtune.tuner.question import SAMPLED_CORES, Question
from simtune.tuner.search.climb import SimulationFinding
from simtune.tuner.search.implied_results import tell_apart
from simtune.tuner.space.candidates import Candidate
from simtune.tuner.space.garbage_collection import uncollected
from simtune.tuner.space.plan_classes import PlanClass
from simtune.tuner.trial import Trial

ALLOCATION = "allocation"
"""What bounds a plan of a class that was not opened."""


@dataclass
class Entrant:
    """A plan that may be the best."""

    row: Trial
    workshop: Workshop
    facts: PlanFacts
    best: float
    """What it could reach of the objective at most."""
    sign: int
    """Whether more (1) or less (-1) of that is better."""
    e2el_s: float = 0.0
    """Mean end-to-end latency at least."""
    missed: Miss | None = None
    """At the lowest rate at which it was seen to miss the SLO."""

    given_up: bool = False
    """True if fresh draws leave it no rate that is better than that of a confirmed plan."""

    @cached_property
    def deployment(self) -> Deployment:
        """The plan, ready to be simulated; made when it is first asked for."""
        return self.workshop.deployment(self.candidate)

    @property
    def candidate(self) -> Candidate:
        """Which plan it is."""
        return self.row.candidate

    @property
    def bound_rps(self) -> float:
        """No higher rate is possible."""
        assert self.row.rate_bound_rps is not None
        return self.row.rate_bound_rps

    @property
    def ceiling_rps(self) -> float:
        """The same, and no rate from that on at which it missed the SLO."""
        return self.bound_rps if self.missed is None else min(self.bound_rps, self.missed.rate_rps)

    @property
    def reaches(self) -> float | None:
        """The most of a rate objective on any draw, where it was seen to miss the SLO on one (`RateObjective.reaches`);
        else what is known without."""
        objective = self.workshop.question.objective
        if self.missed is None or self.row.best is None or not isinstance(objective, RateObjective):
            return self.row.best
        return objective.reaches(self.facts, self.missed, self.workshop.capacity(self.candidate).rps)

    @property
    def kind(self) -> tuple[object, ...]:
        """What plans have in common that differ in limits alone: seats, token budgets, KV blocks."""
        pools = tuple((pool.prefix_caching, pool.drafter, pool.weight) for pool in self.candidate.pools)
        speculation = None if self.candidate.speculation is None else self.candidate.speculation.model_dump_json()
        return self.candidate.shape, self.candidate.router, pools, speculation

    @property
    def kin(self) -> list[tuple[object, ...]]:
        """What a simulation of another plan that tells of this one must have in common with it."""
        prefill = self.candidate.prefilling
        return [self.kind] if prefill is None else [self.kind, (prefill, self.candidate.router)]

    def ruled_out_by(self, other: Entrant, finding: SimulationFinding) -> str:
        """Why this plan misses the SLO where another one did, at a rate no lower; nothing where it might meet it."""
        name = other.candidate.name
        if other.kind == self.kind and finding.used and not tell_apart(self.deployment, finding.used):
            return f"misses the SLO as {name} does: none of the limits that tell them apart is reached"
        if finding.first_tokens_miss and self.kin[1:] == other.kin[1:] != []:
            return f"has the prefill pool of {name}, whose first tokens miss the SLO whatever decodes"
        return ""

    def order(self) -> tuple[float, ...]:
        """What could reach more comes first, then the simplest cut, then small budgets and few seats."""
        budget = sum(pool.max_num_batched_tokens for pool in self.candidate.pools)
        seats = sum(pool.max_num_seqs for pool in self.candidate.pools)
        return (-self.sign * self.best, self.candidate.gpus_per_instance, -self.bound_rps, budget, seats)


class Admission:
    """Lets candidates in, and says more exactly what they could reach when that is asked."""

    def __init__(self, question: Question, workshop: Workshop) -> None:
        self.question, self.workshop = question, workshop

    def admitted(self, candidate: Candidate) -> Entrant | Trial:
        """A candidate bounded by its capacity, or its fate where it could not do what is asked."""
        settled = self.workshop.settled(candidate)
        if isinstance(settled, Refused):
            return Trial(candidate, settled.status, settled.reason)
        bound = self.workshop.capacity(settled)
        blocks = self.workshop.memory(settled.pools[0]).num_blocks
        row = Trial(settled, "pruned", "", blocks, bound.rps, bound.by)
        stream, objective = self.workshop.stream(settled), self.question.objective
        entrant = Entrant(row, self.workshop, self.question.facts(settled, stream), 0.0, objective.sign)
        if self.question.objective.name == "e2el":
            entrant.e2el_s = least_e2el_s(entrant.deployment, stream, SAMPLED_CORES)
        self._weigh(entrant)
        return row if row.reason else entrant

    def sorted_by_kind(self, candidates: Iterable[Candidate]) -> tuple[list[Trial], list[Entrant], list[list[Entrant]]]:
        """(the rows of candidates, those that may be the best, the same by kinds that differ in limits alone)."""
        rows, plans, kinds = [], [], dict[tuple[object, ...], list[Entrant]]()
        for candidate in candidates:
            entrant = self.admitted(candidate)
            if isinstance(entrant, Trial):
                rows.append(entrant)
            else:
                rows.append(entrant.row)
                plans.append(entrant)
                kinds.setdefault(entrant.kind, []).append(entrant)
        return rows, plans, [*kinds.values()]

    def unopened(self, group: PlanClass, reason: str) -> list[Trial]:
        """The fates of candidates whose class as a whole was ruled out, or that could not do what is asked."""
        with uncollected():
            return [self._unopened(candidate, group, reason) for candidate in group.candidates]

    def _unopened(self, candidate: Candidate, group: PlanClass, reason: str) -> Trial:
        settled = self.workshop.settled(candidate)
        if isinstance(settled, Refused):
            return Trial(candidate, settled.status, settled.reason)
        blocks = self.workshop.memory(settled.pools[0]).num_blocks
        row = Trial(settled, "pruned", reason, blocks, bounded_by=ALLOCATION, best=group.best)
        row.allocation = group.name
        return row

    def refine(self, entrants: Sequence[Entrant]) -> bool:
        """Bound plans of one kind by their SLO, at the most favourable of their limits. Whether that lowers a bound; a
        plan that is then known to be of no use has a reason in its row."""
        first = entrants[0]
        deployments = [entrant.deployment for entrant in entrants]
        stream, slo = self.workshop.stream(first.candidate), self.question.study.slo
        known = max(entrant.bound_rps for entrant in entrants)
        bound = slo_bound(most_favourable(deployments), stream, slo, SAMPLED_CORES, below_rps=known)
        lowered = [entrant for entrant in entrants if bound.rps < entrant.bound_rps]
        for entrant in lowered:
            entrant.row.rate_bound_rps, entrant.row.bounded_by = bound.rps, bound.by
            self._weigh(entrant)
        return bool(lowered)

    def _weigh(self, entrant: Entrant) -> None:
        """What the objective makes of a bound, and whether it leaves the plan a chance."""
        row, objective = entrant.row, self.question.objective
        stream = self.workshop.stream(entrant.candidate)
        offered = None if stream.batch else stream.offered_rate_rps
        rate = entrant.bound_rps if objective.searches_rate or offered is None else offered
        entrant.best = objective.best(entrant.facts, rate, entrant.e2el_s)
        row.best = None
        if entrant.bound_rps <= 0:
            alone = ", even where no request has another beside it" if row.bounded_by == "floor" else ""
            row.status, row.reason = "infeasible", f"misses the SLO at any rate{alone} ({row.bounded_by})"
        elif not objective.searches_rate and offered is not None and entrant.bound_rps < offered:
            row.reason = (
                f"cannot exceed {entrant.bound_rps:.4g} requests/s ({row.bounded_by}); {offered:.4g} are offered"
            )
        elif wrong := self._beyond_limits(entrant, rate):
            row.reason = wrong
        else:
            row.best = entrant.best

    def _beyond_limits(self, entrant: Entrant, rate: float) -> str:
        for limit in self.question.limits:
            best = limit.objective.best(entrant.facts, rate, entrant.e2el_s)
            if wrong := limit.violated(best):
                return f"at best {wrong}"
        return ""
