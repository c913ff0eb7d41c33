"""Filter candidates before the search: bound those that fit, and record why the others are refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from simtune.sim.deployment import Deployment
from simtune.specs.workload import FixedInterval, Poisson
from simtune.tuner.bounds import RateBound
from simtune.tuner.bounds.best_case import least_s, most_favourable, slo_bound
from simtune.tuner.bounds.floors import Floor
from simtune.tuner.bounds.stalls import stalled_rps
from simtune.tuner.objectives import Miss, Objective, PlanFacts, RateObjective
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import SAMPLED_CORES, Question
from simtune.tuner.search.climb import SimulationFinding
from simtune.tuner.search.implied_results import Allowed, tell_apart
from simtune.tuner.space.candidates import Candidate
from simtune.tuner.space.garbage_collection import gc_disabled
from simtune.tuner.space.plan_classes import PlanClass
from simtune.tuner.trial import Trial

ALLOCATION = "allocation"
"""Name of the bound of plans whose class was not opened."""


@dataclass
class BoundedCandidate:
    """A plan that may be the best."""

    row: Trial
    plan_cache: PlanCache
    facts: PlanFacts
    best: float
    """Bound on the objective."""
    sign: int
    """1 if more of the objective is better, -1 if less is."""
    missed: Miss | None = None
    """Simulation at the lowest rate at which the plan missed the SLO; None if there was none."""

    met_rps: float | None = None
    """Highest rate at which the plan met the SLO on the draw of the search; None if there was none."""
    tightest: str = ""
    """Metric of the limit of the SLO that the last run of full length used the largest share of; empty without one."""
    floors_s: dict[Floor, float] = field(default_factory=dict)
    """Lower bounds on latencies, in seconds, as they are computed."""
    given_up: bool = False
    """True if fresh draws leave it no rate that is better than that of a confirmed plan."""

    @cached_property
    def deployment(self) -> Deployment:
        """Deployment of the plan, ready to be simulated; made on first use."""
        return self.plan_cache.deployment(self.candidate)

    @property
    def candidate(self) -> Candidate:
        """Candidate of the plan."""
        return self.row.candidate

    def bound_of(self, objective: Objective, rate_rps: float) -> float:
        """Return a value of an objective that is no worse than anything the plan can reach at up to a rate."""
        floor = objective.floor
        if floor is not None and floor not in self.floors_s:
            stream = self.plan_cache.stream(self.candidate)
            self.floors_s[floor] = least_s(floor, self.deployment, stream, SAMPLED_CORES)
        return objective.best(self.facts, rate_rps, 0.0 if floor is None else self.floors_s[floor])

    @property
    def bound_rps(self) -> float:
        """Requests per second that the plan cannot exceed."""
        assert self.row.rate_bound_rps is not None
        return self.row.rate_bound_rps

    @property
    def offered_rps(self) -> float | None:
        """Requests per second of the study's own requests, by which plans are compared under its load; None for a
        batch, and without a rate. A run that is made longer has requests at another rate."""
        stream = self.plan_cache.stream(self.candidate)
        return None if stream.batch else stream.offered_rate_rps

    @property
    def ceiling_rps(self) -> float:
        """Requests per second that bound the plan, the lowest rate at which it missed the SLO included."""
        return self.bound_rps if self.missed is None else min(self.bound_rps, self._as_full(self.missed))

    def miss(self, miss: Miss) -> None:
        """Record that the plan missed the SLO at a rate, unless a lower rate was missed before."""
        objective = self.plan_cache.question.objective
        assert isinstance(objective, RateObjective)
        if self.missed is None or self._as_full(miss) <= self._as_full(self.missed):
            self.missed, self.row.best = miss, self._as_full(miss) * objective.worth(self.facts)

    def _as_full(self, miss: Miss) -> float:
        """Return the rate at which a run of the study's own length would prove as much as a miss."""
        question = self.plan_cache.question
        return miss.rate_rps * question.draw_spread.slack(question.requests, miss.requests)

    @property
    def reaches(self) -> float | None:
        """Upper bound on the objective over all draws of the requests.

        If a plan missed the SLO on one draw, a rate objective may be somewhat higher on another
        (`RateObjective.reaches`).
        """
        question = self.plan_cache.question
        if self.missed is None or self.row.best is None or not isinstance(question.objective, RateObjective):
            return self.row.best
        capacity_rps = self.plan_cache.capacity(self.candidate).rps
        return question.objective.reaches(self.facts, self.missed, question.draw_spread, capacity_rps)

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Key shared by plans that differ in limits alone: seats, token budgets, KV blocks."""
        pools = tuple((pool.prefix_caching, pool.drafter, pool.weight) for pool in self.candidate.pools)
        speculation = None if self.candidate.speculation is None else self.candidate.speculation.model_dump_json()
        return self.candidate.shape, self.candidate.router, pools, speculation

    @cached_property
    def shared_keys(self) -> list[tuple[object, ...]]:
        """Keys under which simulations of other plans apply to this one."""
        candidate, prefill = self.candidate, self.candidate.prefilling
        if prefill is None or candidate.scales:
            return [self.kind]
        decode = candidate.decoding
        like = (decode.shape, decode.instances, decode.prefix_caching, decode.drafter)
        return [self.kind, ("prefill", prefill, candidate.router), ("decode", like, candidate.router)]

    def ruled_out_by(self, other: BoundedCandidate, finding: SimulationFinding) -> str:
        """Return why this plan misses the SLO if another one did, at a rate no lower; empty if it might meet the
        SLO."""
        name = other.candidate.name
        if self.does_the_same(other, finding):
            return f"misses the SLO as {name} does: none of the limits that tell them apart is reached"
        if not finding.first_tokens_miss and not finding.decodes_miss:
            return ""
        shared = {key[0] for key in self.shared_keys[1:] if key in other.shared_keys[1:]}
        if finding.first_tokens_miss and "prefill" in shared:
            return f"has the prefill pool of {name}, whose first tokens miss the SLO whatever decodes"
        if finding.decodes_miss and "decode" in shared and finding.decodes_miss.tells(other.decodes, self.decodes):
            return f"decodes as {name} does, which takes too long for a token whatever prefills"
        return ""

    @cached_property
    def decodes(self) -> Allowed:
        """Limits of the decode pool."""
        pool = self.candidate.decoding
        return Allowed(pool.max_num_seqs, pool.max_num_batched_tokens, self.plan_cache.memory(pool).num_blocks)

    def does_the_same(self, other: BoundedCandidate, finding: SimulationFinding) -> bool:
        """True if this plan differs from a simulated one in limits alone, none of which it reached.

        Autoscalers read shares of limits, so nothing is known of their plans."""
        if self.candidate.scales:
            return False
        return other.kind == self.kind and bool(finding.used) and not tell_apart(self.deployment, finding.used or ())

    def order(self) -> tuple[float, ...]:
        """Return the sorting key of the search: best bound first, then the simplest cut, then small budgets and few
        seats."""
        budget = sum(pool.max_num_batched_tokens for pool in self.candidate.pools)
        seats = sum(pool.max_num_seqs for pool in self.candidate.pools)
        return (-self.sign * self.best, self.candidate.gpus_per_instance, -self.bound_rps, budget, seats)


def facts_of(candidate: Candidate, plan_cache: PlanCache) -> PlanFacts:
    """Return the facts about a settled candidate that objectives need.

    An autoscaled pool holds at least the GPU-hours in which its instances do the work of the requests, as fast as at
    capacity (`PoolCapacity`, on these very requests).
    """
    stream = plan_cache.stream(candidate)
    facts = plan_cache.question.facts(candidate, stream)
    if facts.run is None or not candidate.scales or candidate.of_kinds:
        return facts
    pools = []
    for choice, pool in zip(candidate.pools, facts.run.pools, strict=True):
        capacity_rps = plan_cache.sustains(choice, stream) * choice.instances
        worked_h = pool.gpus * stream.arrivals / capacity_rps / 3600 if pool.scales else 0.0
        pools.append(pool._replace(least_gpu_hours=max(pool.least_gpu_hours, worked_h)))
    return replace(facts, run=replace(facts.run, pools=tuple(pools)))


class CandidateFilter:
    """Bounds candidates and refuses those that cannot meet the objective; tightens bounds on request."""

    def __init__(self, question: Question, plan_cache: PlanCache) -> None:
        self.question, self.plan_cache = question, plan_cache
        load = question.workload
        apart = not (load.waits_for_answers or load.batch or question.sends_families or question.trace is not None)
        self._at_random = apart and isinstance(load.arrivals, Poisson | FixedInterval)
        """True if requests come at random, each for itself, or more evenly (`simtune.tuner.bounds.stalls`)."""

    def check(self, candidate: Candidate) -> BoundedCandidate | Trial:
        """Return a candidate bounded by its capacity, or its row with the reason if it cannot meet the objective."""
        settled = self.plan_cache.settled(candidate)
        if isinstance(settled, Refused):
            return Trial(candidate, settled.status, settled.reason)
        bound = self.plan_cache.capacity(settled)
        blocks = self.plan_cache.memory(settled.pools[0]).num_blocks
        row = Trial(settled, "pruned", "", blocks, bound.rps, bound.by)
        facts, sign = facts_of(settled, self.plan_cache), self.question.objective.sign
        bounded_candidate = BoundedCandidate(row, self.plan_cache, facts, 0.0, sign)
        self._weigh(bounded_candidate)
        return row if row.reason else bounded_candidate

    def sorted_by_kind(
        self, candidates: Iterable[Candidate]
    ) -> tuple[list[Trial], list[BoundedCandidate], list[list[BoundedCandidate]]]:
        """Return the rows of candidates, the plans that may be the best, and these plans by kinds that differ in limits
        alone."""
        rows, plans, kinds = [], [], dict[tuple[object, ...], list[BoundedCandidate]]()
        for candidate in candidates:
            bounded_candidate = self.check(candidate)
            if isinstance(bounded_candidate, Trial):
                rows.append(bounded_candidate)
            else:
                rows.append(bounded_candidate.row)
                plans.append(bounded_candidate)
                kinds.setdefault(bounded_candidate.kind, []).append(bounded_candidate)
        return rows, plans, [*kinds.values()]

    def unopened(self, group: PlanClass, reason: str) -> list[Trial]:
        """Return the rows of candidates whose class as a whole was ruled out, or that cannot meet the objective."""
        with gc_disabled():
            return [self._unopened(candidate, group, reason) for candidate in group.candidates]

    def _unopened(self, candidate: Candidate, group: PlanClass, reason: str) -> Trial:
        settled = self.plan_cache.settled(candidate)
        if isinstance(settled, Refused):
            return Trial(candidate, settled.status, settled.reason)
        blocks = self.plan_cache.memory(settled.pools[0]).num_blocks
        row = Trial(settled, "pruned", reason, blocks, bounded_by=ALLOCATION, best=group.best)
        row.allocation = group.name
        return row

    def refine(self, bounded_candidates: Sequence[BoundedCandidate]) -> bool:
        """Bound plans of one kind by their SLO, at the most favourable of their limits. Return True if a bound got
        lower.

        A plan that is ruled out by its new bound gets a reason in its row.
        """
        first = bounded_candidates[0]
        deployments = [bounded_candidate.deployment for bounded_candidate in bounded_candidates]
        stream, slo = self.plan_cache.stream(first.candidate), self.question.study.slo
        highest = max(bounded_candidate.bound_rps for bounded_candidate in bounded_candidates)
        favourable = most_favourable(deployments)
        bound = slo_bound(favourable, stream, slo, SAMPLED_CORES, below_rps=highest)
        if self._at_random and (stalled := stalled_rps(favourable, stream, slo)) < bound.rps:
            bound = RateBound(stalled, "stalls")
        lowered = [
            bounded_candidate for bounded_candidate in bounded_candidates if bound.rps < bounded_candidate.bound_rps
        ]
        for bounded_candidate in lowered:
            bounded_candidate.row.rate_bound_rps, bounded_candidate.row.bounded_by = bound.rps, bound.by
            self._weigh(bounded_candidate)
        return bool(lowered)

    def _weigh(self, bounded_candidate: BoundedCandidate) -> None:
        """Compute the objective's bound of a plan, and write a reason into its row if the bound rules it out."""
        row, objective = bounded_candidate.row, self.question.objective
        offered = bounded_candidate.offered_rps
        rate = bounded_candidate.bound_rps if objective.searches_rate or offered is None else offered
        bounded_candidate.best = bounded_candidate.bound_of(objective, rate)
        row.best = None
        if bounded_candidate.bound_rps <= 0:
            alone = ", even where no request has another beside it" if row.bounded_by == "floor" else ""
            row.status, row.reason = "infeasible", f"misses the SLO at any rate{alone} ({row.bounded_by})"
        elif not objective.searches_rate and offered is not None and bounded_candidate.bound_rps < offered:
            most = bounded_candidate.bound_rps
            row.reason = f"cannot exceed {most:.4g} requests/s ({row.bounded_by}); {offered:.4g} are offered"
        elif wrong := self._beyond_limits(bounded_candidate, rate):
            row.reason = wrong
        else:
            row.best = bounded_candidate.best

    def _beyond_limits(self, bounded_candidate: BoundedCandidate, rate: float) -> str:
        for limit in self.question.limits:
            best = bounded_candidate.bound_of(limit.objective, rate)
            if wrong := limit.violated(best, "at best"):
                return wrong
        return ""
