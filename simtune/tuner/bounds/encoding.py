"""Least time that media of requests take to be encoded: in the steps of a pool, or on servers in front of it.

In steps an item is encoded at least once, by the first request that has it, unless it comes from a set whose items come
again and again: of these a long load has as few as one likes for each request. Servers in front of a pool encode all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simtune.arrays import Array
from simtune.costs.encoder import Work
from simtune.sim.encode_stages import encode_works
from simtune.sim.encoding import PoolEncoder
from simtune.sim.pools import DeployedPool
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.tower import MEDIA_KINDS
from simtune.workload.requests import RequestStream

ROUNDING = 1e-9
"""Relative error of sums of seconds."""


def least_encoding_s(encoder: PoolEncoder | None, stream: RequestStream) -> Array:
    """Return the least seconds of steps in which the media of each request are encoded; of items that several requests
    have, those of the first one."""
    media, per_request = stream.media, np.zeros(len(stream))
    if encoder is None or media is None or not len(media):
        return per_request
    shapes, shape_of = np.unique(np.column_stack([media.kind, media.shape[:, :3]]), axis=0, return_inverse=True)
    works = [
        Work(sequences, patches, vectors, MEDIA_KINDS[kind]) for kind, sequences, patches, vectors in shapes.tolist()
    ]
    seconds = encoder.costs.least_seconds(works, encoder.limits.budget)[shape_of.ravel()]
    first = np.zeros(len(media), dtype=bool)
    first[np.unique(media.name, return_index=True)[1]] = True
    requests = np.repeat(np.arange(len(stream)), media.per_request)
    counted = np.where(first & ~media.repeated, seconds, 0.0)
    per_request += np.bincount(requests, counted, minlength=len(stream)) * (1 - ROUNDING)
    return per_request


def stage_rates(plan: Plan, model: Model, pools: Sequence[DeployedPool], stream: RequestStream) -> dict[str, float]:
    """Return the requests per second that the servers of each stage of a plan serve at most, by its name."""
    works = encode_works(plan, model, pools, stream)
    rates = {}
    for stage in plan.stages or ():
        work_s = stage.seconds + stage.seconds_per_token * stream.prompt_tokens
        if stage.name in works:
            work_s = work_s + works[stage.name].busy_s
        mean_s = float(np.mean(work_s)) * (1 - ROUNDING)
        rates[stage.name] = stage.instances / mean_s if mean_s > 0 else float("inf")
    return rates
