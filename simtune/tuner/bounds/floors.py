"""Least latencies of a load on a plan, by the bounds of the plan: lower bounds on what objectives are made of.

The makespan of a batch, from its first arrival to its last finish, is at least

    the arrival of a request and what it takes alone, for each request
    a_k + (work of the requests k, k + 1, ... in order of arrival) / speed, for each k and each resource

since none of the latter can be worked at before a_k. The resources are the cores of mixed pools; or those of prefill
pools, after whose last prompt a decode follows, those of decode pools, before whose first step a prompt is computed and
sent, and the link between them. Requests that may be aborted (`FamilyGraph.needed`) count for nothing.

The latency of a family is at least the longest way through its graph: a node is sent when those that it waits for are
over, and over when the number of its requests that it needs could be answered, each as if it were alone. A turn of a
session is a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array
from simtune.tuner.bounds.plans import PlanBounds, combined
from simtune.tuner.bounds.windows import ROUNDING

Floor = Literal["e2el", "makespan", "family", "family_active"]


def least_e2el_s(bounds: PlanBounds) -> float:
    """Return a lower bound on the mean end-to-end latency of the answered requests, in seconds."""
    counted = slice(bounds.stream.warm_up, None)
    alone_s, cannot_abort = (bounds.ttft_s + bounds.decode_s)[counted], bounds.needed[counted]
    needed_s, abortable_s = alone_s[cannot_abort], alone_s[~cannot_abort]
    # Of requests that may be aborted any number may be answered, none sooner than the shortest.
    least = [float(needed_s.mean())] if len(needed_s) else []
    if len(abortable_s):
        shortest_s = float(abortable_s.min()) * len(abortable_s)
        least.append((float(needed_s.sum()) + shortest_s) / len(alone_s))
    return min(least)


def least_makespan_s(bounds: PlanBounds) -> float:
    """Return a lower bound on the seconds from the first arrival to the last finish."""
    stream, counted = bounds.stream, bounds.needed & bounds.load.fits
    if not counted.any():
        return 0.0
    arrival_s = np.zeros(len(stream)) if stream.arrival_s is None else stream.arrival_s - stream.arrival_s.min()
    alone_s = float((arrival_s + bounds.ttft_s + bounds.decode_s)[counted].max())
    if stream.families is not None:
        alone_s = max(alone_s, float((arrival_s[stream.families.begin[:-1]] + bounds.family_s).max()))
    busy_s = max(_busy_s(arrival_s, resource) for resource in _resources(bounds, counted))
    return max(0.0, max(alone_s, busy_s) * (1 - ROUNDING) - ROUNDING)


def least_family_s(bounds: PlanBounds) -> float:
    """Return a lower bound on the mean latency of a family, in seconds; 0 for a load without families."""
    return 0.0 if bounds.stream.families is None else float(bounds.family_s[bounds.stream.warm_up_arrivals :].mean())


def least_active_s(bounds: PlanBounds) -> float:
    """Return a lower bound on the mean time in which requests of a family are under way, in seconds; 0 for a load
    without families."""
    return (
        0.0
        if bounds.stream.families is None
        else float(bounds.family_active_s[bounds.stream.warm_up_arrivals :].mean())
    )


_Resource = tuple[NDArray[np.bool_], list[Array], float, Array, Array]
"""Requests; their works, one array each; servers; seconds before and after the work of each request at least."""


def _resources(bounds: PlanBounds, counted: NDArray[np.bool_]) -> Iterator[_Resource]:
    if not bounds.back:
        totals = [pool.total_s(counted, np.inf) for pool in bounds.front]
        yield _resource([pool.speed for pool in bounds.front], totals, counted, 0.0, 0.0)
        return
    prompts = [[pool.prefill_s] for pool in bounds.front]
    yield _resource([pool.speed for pool in bounds.front], prompts, counted, 0.0, bounds.decode_s)
    decoding = counted & (bounds.load.decodes > 0)
    if not decoding.any():
        return
    totals = [pool.total_s(decoding, np.inf) for pool in bounds.back]
    yield _resource([pool.speed for pool in bounds.back], totals, decoding, bounds.prompt_s + bounds.way_s, 0.0)
    if bounds.ways:
        sent = [[way.sending_s] for way in bounds.ways]
        yield _resource([way.links for way in bounds.ways], sent, decoding, bounds.prompt_s, bounds.steps_s)


def _resource(
    speeds: Sequence[float],
    works: Sequence[Sequence[Array]],
    counted: NDArray[np.bool_],
    before_s: Array | float,
    after_s: Array | float,
) -> _Resource:
    """Return several servers of some requests as one resource."""
    shared, speed = combined(speeds, works, counted)
    before, after = (np.broadcast_to(seconds, counted.shape)[counted] for seconds in (before_s, after_s))
    return counted, [work[counted] for work in shared], speed, before, after


def _busy_s(arrival_s: Array, resource: _Resource) -> float:
    """Return the least seconds until all requests have passed a resource, and what follows it."""
    counted, works, speed, before_s, after_s = resource

    def from_here(values: Array) -> Array:
        """Return the least value of each request and those after it."""
        least: Array = np.minimum.accumulate(values[::-1])[::-1]
        return least

    begun_s, ended_s = from_here(arrival_s[counted] + before_s), from_here(after_s)
    return max(float((begun_s + np.cumsum(work[::-1])[::-1] / speed + ended_s).max()) for work in works)


FLOORS: dict[Floor, Callable[[PlanBounds], float]] = {
    "e2el": least_e2el_s,
    "makespan": least_makespan_s,
    "family": least_family_s,
    "family_active": least_active_s,
}
