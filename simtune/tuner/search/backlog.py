"""Rate at which a plan serves requests that are all present at once: lower rates are kept up with.

While requests wait, an engine that serves them in order of arrival does what it does if all of them are present from
the beginning. So if it serves them faster then than they come, every queue shrinks again, and the load is kept up with
(the saturation rule of Baccelli and Foss, *On the saturation rule for the stability of queues*, Journal of Applied
Probability 32, 1995; only its sufficient half is used, which asks for no more than the drift of a long queue). It needs
a run of a few thousand requests, where the number of requests in the system near the capacity strays so slowly that
one of many times that length does not show that it comes back.

The rate of n served requests differs from draw to draw less than the highest rate within an SLO does (by 0.7 % for
8,000 chat requests on four cores), so `simtune.tuner.doubt.draw_spread.CAPACITY` allows for more than it may be too
high by.
"""

from __future__ import annotations

import numpy as np

from simtune.results.result import Result
from simtune.sim.deployment import Deployment
from simtune.sim.plan_parts import POLICY, ROUTER
from simtune.specs.workload import FixedInterval, Gamma, Poisson
from simtune.tuner.doubt.draw_spread import CAPACITY
from simtune.tuner.question import Question

AT_ONCE_RPS = 1e9
"""Rate at which all requests of a run are present before the first step has ended."""
BEGINNING = 0.25
"""Share of the time with a backlog that is not counted: seats are filled at first."""
FEWEST = 1000
"""Fewest requests that are counted."""


def shows_drift(question: Question, deployment: Deployment) -> bool:
    """True if a deployment with a backlog does what it does with all requests present: they come by themselves, are
    dealt in turn, served in order of arrival, and neither rejected nor sent to instances that start or stop."""
    load, plan = question.workload, deployment.plan
    by_themselves = isinstance(load.arrivals, Poisson | Gamma | FixedInterval) and not load.waits_for_answers
    if not by_themselves or question.sends_families or load.batch or question.trace is not None:
        return False
    if plan.events or plan.control is not None or plan.stages or plan.prefills_locally or plan.autoscales:
        return False
    in_order = all(
        POLICY.find(pool.spec.batching.policy).first_come and not pool.spec.queue_limits for pool in deployment.pools
    )
    return in_order and ROUTER.find(plan.router.kind).deals_in_turn


def kept_up_below_rps(result: Result) -> float:
    """Return the rate below which a deployment keeps up, by a run of requests that were all present at once.

    Counted are the answers that end while requests wait at every core, after the BEGINNING of that time. The rate is
    lower than theirs by the `allowance` for their number; 0 if fewer than FEWEST are counted, or if that beginning is
    shorter than the mean time from the first step of a request to its end.
    """
    core, scheduled_s, finish_s = result.outcome.core, result.scheduled_s, result.finish_s
    served = result.completed
    if not served.any():
        return 0.0
    begin_s = float(result.arrival_s[served].min())
    # From the start of the last request of a core on, no request waits there.
    end_s = min(float(scheduled_s[served & (core == number)].max()) for number in np.unique(core[served]))
    from_s = begin_s + BEGINNING * (end_s - begin_s)
    counted = served & (finish_s > from_s) & (finish_s <= end_s)
    num_counted = int(counted.sum())
    if num_counted < FEWEST or from_s - begin_s < float((finish_s - scheduled_s)[counted].mean()):
        return 0.0
    return result.scale * num_counted / (end_s - from_s) / CAPACITY.allowance(num_counted)
