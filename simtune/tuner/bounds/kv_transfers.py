"""The way of KV caches from prefill to decode instances: what each takes at least, and how many can be sent.

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
    """Of the KV caches of one prefill pool."""

    alone_s: Array
    """From the first token until the cache of a request has come, if it is alone."""
    sending_s: Array
    """The time of a link that it takes."""
    links: float


def ways_of(model: Model, link: KvLink, front: Sequence[PoolWork]) -> list[PlanWay]:
    """Of each prefill pool; where all share a link, of that one as if each had it in turn. A drafter's keys and values
    come on top."""
    ways = []
    for work in front:
        pool, prompt = work.pool, work.load.prompt
        terms = transfer_terms([model], pool, link)
        blocks = np.ceil(prompt / pool.spec.kv_cache.block_size)
        # Of a drafter's layers that are sent as well it is not known here how large they are.
        last = 0.0 if pool.spec.speculation else 1 / model.num_layers
        share = last if link.layerwise else 1.0
        sending_s = blocks * pool.kv_block_bytes * share / terms.bytes_per_s
        ways.append(PlanWay(terms.setup_s + blocks * terms.block_s + sending_s, sending_s, float(pool.spec.instances)))
    if not link.shared:
        return ways
    fastest = max(transfer_terms([model], work.pool, link).bytes_per_s for work in front)
    own = [transfer_terms([model], work.pool, link).bytes_per_s / fastest for work in front]
    least = np.min([way.sending_s * speed for way, speed in zip(ways, own, strict=True)], axis=0)
    return [PlanWay(np.min([way.alone_s - way.sending_s for way in ways], axis=0) + least, least, 1.0)]
