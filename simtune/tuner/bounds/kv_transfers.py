"""Transfers of KV caches from prefill to decode instances: the least time each takes, and how many a link can send.

A cache of b blocks takes setup + b x descriptors before its first byte, and bytes / bandwidth on a link to itself. Of a
cache sent layer by layer all but one layer may have gone while the prompt was computed, beside whatever is on the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simtune.arrays import Array
from simtune.sim.wiring import transfer_terms
from simtune.specs.model import Model
from simtune.specs.plan import KvLink
from simtune.tuner.bounds.work import PoolWork


class PlanWay(NamedTuple):
    """Bounds on the transfers of KV caches out of one prefill pool."""

    alone_s: Array
    """Seconds from the first token of a request until its KV cache has arrived, if the link is otherwise idle."""
    sending_s: Array
    """Seconds of link time that the transfer occupies."""
    links: float


def ways_of(model: Model, link: KvLink, front: Sequence[PoolWork]) -> list[PlanWay]:
    """Return the bounds of each prefill pool.

    If all pools share one link, return a single entry with the least time of any pool. The keys and values of a drafter
    come on top and are not counted.
    """
    ways = []
    for work in front:
        pool, prompt = work.pool, work.load.prompt
        terms = transfer_terms([model], pool, link)
        blocks = np.ceil(prompt / pool.spec.kv_cache.block_size)
        # A drafter's layers are sent as well, but their size is not known here: assume that the last one takes no time.
        last = 0.0 if pool.spec.speculation else 1 / model.num_layers
        share = last if link.layerwise else 1.0
        sending_s = blocks * pool.kv_block_bytes * share / terms.bytes_per_s
        ways.append(PlanWay(terms.setup_s + blocks * terms.block_s + sending_s, sending_s, float(pool.spec.instances)))
    if not link.shared:
        return ways
    fastest = max(transfer_terms([model], work.pool, link).bytes_per_s for work in front)
    relative_speeds = [transfer_terms([model], work.pool, link).bytes_per_s / fastest for work in front]
    least = np.min([way.sending_s * speed for way, speed in zip(ways, relative_speeds, strict=True)], axis=0)
    return [PlanWay(np.min([way.alone_s - way.sending_s for way in ways], axis=0) + least, least, 1.0)]
