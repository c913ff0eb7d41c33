"""Outlook on a search before it starts: the plans, roughly how long it takes, and what would shorten it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from simtune.errors import Infeasible, plural
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import Question
from simtune.tuner.search.climb import longer
from simtune.tuner.space.candidates import Candidate

Timer = Callable[[Callable[[], None]], float]
"""Returns the seconds that some work takes."""

SAMPLE = 200
"""Requests of the run that is timed."""
SAMPLE_LOAD = 0.7
"""Load of the run that is timed, as a share of the plan's capacity."""
FEWEST, MOST = (10, 0.02), (80, 0.3)
"""(simulations of any search, simulations for each plan) of searches that need few and many; docs/tuning.md has some
that were counted."""
CONFIRMED_RATES = 3
"""Rates at which a plan is confirmed on its fresh draws, in a search that needs many simulations."""


@dataclass(frozen=True)
class Outlook:
    """Size of a search, and how long its parts take on this machine."""

    plans: int
    shapes: int
    variants: int
    costs_s: float
    """Seconds to compile the step costs of a shape, and to bound a plan of it."""
    simulation_s: float
    """Seconds of a simulation as long as the search needs it."""
    confirming_s: float
    """Seconds of one fresh draw."""
    draws: int

    @classmethod
    def of(cls, question: Question, candidates: Sequence[Candidate], plan_cache: PlanCache, timer: Timer) -> Outlook:
        """Return the outlook on the search of some candidates, by a short run of the first one that fits."""
        search = question.study.search
        shapes = len({replace(pool.shape, role="mixed") for candidate in candidates for pool in candidate.pools})
        labels = {pool.shape.variant for candidate in candidates for pool in candidate.pools}
        size = (len(candidates), shapes, len(labels))
        costs_s, simulation_s, confirming_s = 0.0, 0.0, 0.0
        for candidate in candidates:
            settled = plan_cache.settled(candidate)
            if not isinstance(settled, Refused):
                try:
                    costs_s = timer(lambda plan=settled: _bound(plan_cache, plan))  # type: ignore[misc]
                    simulation_s, confirming_s = _timed(question, plan_cache, settled, timer)
                except Infeasible:
                    continue
                break
        return cls(*size, costs_s, simulation_s, confirming_s, search.confirm.draws)

    def seconds(self, processes: int) -> tuple[float, float]:
        """Return the least and the most seconds that a search with a number of processes is likely to take."""
        of_costs = self.shapes * self.costs_s
        few, many = (fixed + share * self.plans for fixed, share in (FEWEST, MOST))
        confirming_s = self.draws * self.confirming_s / min(processes, self.draws or 1)
        return (
            of_costs + few * self.simulation_s / processes + confirming_s,
            of_costs + many * self.simulation_s + CONFIRMED_RATES * confirming_s,
        )

    def lines(self, question: Question, processes: int) -> list[str]:
        """Return the outlook in words."""
        low, high = (_duration(seconds) for seconds in self.seconds(processes))
        of_variants = f", {plural(self.variants, 'variant')}" if self.variants > 1 else ""
        size = f"{self.plans:,} to search in {plural(self.shapes, 'cut')} of GPUs{of_variants}"
        return [
            f"{size}; one simulation takes {self.simulation_s:.2g} s here, so roughly {low} to {high}",
            f"shorter: {', '.join(self._shorter(question))}, --budget 60s for the best by then",
        ]

    def _shorter(self, question: Question) -> list[str]:
        search = question.study.search
        hints = [f"fewer variants than {self.variants}"] if self.variants > 1 else []
        sizes = len(search.max_num_seqs) * len(search.max_num_batched_tokens)
        hints += [f"fewer sizes of batches than {sizes}"] if sizes > 1 else []
        hints += [f"search.requests below {question.requests:,}"]
        hints += [f"search.confirm.draws below {self.draws}"] if self.draws else []
        return hints


def _bound(plan_cache: PlanCache, candidate: Candidate) -> None:
    plan_cache.capacity(candidate)


def _timed(question: Question, plan_cache: PlanCache, candidate: Candidate, timer: Timer) -> tuple[float, float]:
    """Return the seconds of a simulation of a candidate in the search, and of one that confirms it."""
    deployment, results = plan_cache.deployment(candidate), []
    rate = plan_cache.capacity(candidate).rps * SAMPLE_LOAD if question.searches_rate else None
    requests = min(SAMPLE, question.requests) if not question.workload.batch else question.requests
    seconds = timer(lambda: results.append(question.watch(candidate, deployment, rate, requests)))
    (result,) = results
    request_s, length = seconds / requests, question.requests
    if not question.workload.batch:
        length = max(length, longer(result, requests) or 0)
    return request_s * length, request_s * max(length, question.study.search.confirm.requests)


def _duration(seconds: float) -> str:
    """Return a duration in round words."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
