"""Service stages before or beside the engines.

Stages feed forward: nothing after them acts upon them. So all requests pass them in one go, stage by stage, before the
world begins, and the world's own loop does not depend on them.
Each server takes parts first come, first served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapreplace
from typing import NamedTuple

import numpy as np

from simtune.arrays import Array, Ints
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.errors import UsageError
from simtune.results.outcome import Outcome
from simtune.sim.encode_stages import EncodeWork
from simtune.specs.base import LONGEST_S
from simtune.specs.plan import Plan
from simtune.specs.stages import Stage
from simtune.workload.requests import RequestStream


class Passed(NamedTuple):
    """Requests after the stages, and times that their outcome must account for."""

    stream: RequestStream
    """The requests in the order and at the times at which they leave the stages before the engines."""
    arrival_s: Array | None = None
    """Arrival of each request at the first stage, in seconds; None without stages."""
    beside_s: Array | None = None
    """Seconds at which the stages beside the engines are done with each request."""

    def written(self, outcome: Outcome) -> Outcome:
        """Return the outcome counted from the first stage; nothing is delivered before the stages beside are done."""
        if self.arrival_s is None or self.beside_s is None:
            return outcome
        outcome.arrival = np.where(outcome.arrival >= 0, _ticks(self.arrival_s), outcome.arrival)
        beside = _ticks(self.beside_s)
        # Keys and values are sent when the prompt is done, whenever its token may be delivered.
        sent = (outcome.transferred >= 0) & (outcome.prefilled < 0)
        outcome.prefilled = np.where(sent, outcome.first_token, outcome.prefilled)
        for column in ("first_token", "finish"):
            ticks = getattr(outcome, column)
            setattr(outcome, column, np.where(ticks >= 0, np.maximum(ticks, beside), ticks))
        return outcome


def passed(plan: Plan, stream: RequestStream, works: Mapping[str, EncodeWork] | None = None) -> Passed:
    """Pass all requests through the stages of a plan; return them unchanged if there are none. `works` is the work of
    stages that encode images.

    Raises UsageError for requests whose arrival waits for answers: a closed loop, or families.
    """
    if not plan.stages:
        return Passed(stream)
    if stream.arrival_s is None or stream.families is not None:
        raise UsageError(
            f"plan {plan.name}: stages need arrival times known in advance; use open arrivals without a graph and "
            "without sessions whose turns follow answers"
        )
    ends = serve(plan.stages, stream.arrival_s, stream.prompt_tokens, works)
    slowest = max(plan.stages, key=lambda stage: ends[stage.name].max(initial=0.0))
    last = ends[slowest.name].max(initial=0.0)
    if last > LONGEST_S >= stream.arrival_s.max(initial=0.0):
        raise UsageError(
            f"plan {plan.name}: stages: requests leave {slowest.name} after up to {last / 86400:,.0f} days; the "
            f"simulated clock counts to {LONGEST_S / 86400:.0f}. Lower its seconds or seconds_per_token"
        )
    before = [ends[stage.name] for stage in plan.stages if stage.place == "before"]
    beside = [ends[stage.name] for stage in plan.stages if stage.place == "beside"]
    ready: Array = np.maximum.reduce([stream.arrival_s, *before])
    beside_done: Array = np.maximum.reduce([np.zeros(len(stream)), *beside])
    order = np.argsort(ready, kind="stable")
    return Passed(_reordered(stream, order, ready), stream.arrival_s[order], beside_done[order])


def serve(
    stages: Sequence[Stage], arrival_s: Array, prompt_tokens: Ints, works: Mapping[str, EncodeWork] | None = None
) -> dict[str, Array]:
    """Return the seconds at which each request has left each stage; `works` is that of stages that encode images.

    A part of a request is served in the order in which parts become ready, by the instance that is free first.
    """
    ends: dict[str, Array] = {}
    for stage in stages:
        before = [ends[name] for name in stage.after]
        # A stage stands behind those that it comes after, part by part.
        ready = np.maximum.reduce(before) if before else np.repeat(arrival_s[:, None], stage.parts, axis=1)
        seconds = (stage.seconds + stage.seconds_per_token * prompt_tokens) / stage.parts
        work = None if works is None else works.get(stage.name)
        if work is None:
            ends[stage.name] = _served(ready, seconds.tolist(), stage.instances)
        else:
            # a server takes the next request while embeddings are sent
            served = _served(ready, (seconds + work.busy_s).tolist(), stage.instances)
            ends[stage.name] = served + work.sent_s[:, None]
    return {name: parts.max(axis=1) for name, parts in ends.items()}


def _served(ready: Array, seconds: Sequence[float], instances: int) -> Array:
    """Return the seconds at which parts (a row for each request) are done that become ready at these times."""
    free, ends = [0.0] * instances, np.zeros(ready.size)
    flat, parts = ready.ravel().tolist(), ready.shape[1]
    for at in np.argsort(ready.ravel(), kind="stable").tolist():
        end = max(free[0], flat[at]) + seconds[at // parts]
        heapreplace(free, end)
        ends[at] = end
    return ends.reshape(ready.shape)


def _reordered(stream: RequestStream, order: Ints, arrival_s: Array) -> RequestStream:
    """Return the same requests in another order, at other times."""
    if (order[:-1] < order[1:]).all():
        return replace(stream, arrival_s=arrival_s)
    blocks = None if stream.hash_ids is None else tuple(stream.hash_ids[i] for i in order.tolist())
    return replace(
        stream,
        arrival_s=arrival_s[order],
        prompt_tokens=stream.prompt_tokens[order],
        output_tokens=stream.output_tokens[order],
        class_index=stream.class_index[order],
        priority=stream.priority[order],
        hash_ids=blocks,
        session=None if stream.session is None else stream.session[order],
        media=None if stream.media is None else stream.media.rows(order),
        adapter=None if stream.adapter is None else stream.adapter[order],
    )


def _ticks(seconds: Array) -> Ints:
    ticks: Ints = np.rint(seconds * TICKS_PER_SECOND).astype(np.int64)
    return ticks
