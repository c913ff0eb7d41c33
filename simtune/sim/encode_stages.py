"""Stages that encode media on servers of their own, before the pool computes the prompts (EPD).

A server encodes the media of one request at a time, all of a kind together; embeddings then go to the pool, and the
server takes the next request meanwhile. Every item is encoded, also one that was there before: a server keeps nothing.
Embeddings are as wide as the language model, in its dtype, as many times over as the encoder has projectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simtune.arrays import Array
from simtune.costs.encoder import EncoderCosts, Work
from simtune.costs.estimate import link_of
from simtune.errors import Infeasible, UsageError
from simtune.sim.pools import DeployedPool
from simtune.specs.base import DTYPE_BYTES
from simtune.specs.encoder import Encoder
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Parallelism
from simtune.specs.stages import Stage
from simtune.workload.media import RequestMedia
from simtune.workload.requests import RequestStream


class EncodeWork(NamedTuple):
    """Seconds of each request in a stage that encodes media, besides those that the stage states itself."""

    busy_s: Array
    """Seconds for which a server encodes its media."""
    sent_s: Array
    """Seconds until their embeddings have reached the pool, after the server is done."""


def encode_works(
    plan: Plan, model: Model, pools: Sequence[DeployedPool], stream: RequestStream
) -> dict[str, EncodeWork]:
    """Return the work of requests with media in each stage that encodes them, by its name. Raise UsageError for a
    stage that cannot."""
    works = {}
    for stage in plan.stages or ():
        if stage.encoder is None or stream.media is None:
            continue
        pool = next(pool for pool in pools if pool.spec.name == stage.pool)
        try:
            works[stage.name] = EncodeWork(*_encoding(stage, model, pool, stream.media))
        except Infeasible as error:
            raise UsageError(f"plan {plan.name}: stage {stage.name}: {error}") from None
    return works


def _encoding(stage: Stage, model: Model, pool: DeployedPool, media: RequestMedia) -> tuple[Array, Array]:
    """Return the seconds of encoding the media of each request, and of sending their embeddings."""
    assert stage.encoder is not None
    for kind in media.kinds:
        if model.towers.of(kind) is None:
            name = "audio" if kind == "audio" else "vision"
            raise Infeasible(
                f"model {model.name} states no {name} encoder; add {name} to the model, or remove the stage"
            )
    changes = {"parallelism": Parallelism(tp=stage.devices), "encoder": Encoder(tp_mode=stage.encoder)}
    costs = EncoderCosts(model, pool.hardware, pool.spec.model_copy(update=changes))
    rate = stage.bytes_per_s or link_of(pool.hardware, "inter_node").bytes_per_s
    row_bytes = {
        kind: tower.width * DTYPE_BYTES[model.dtype] for kind in media.kinds if (tower := model.towers.of(kind))
    }
    encoding_s, sent_bytes = [], []
    for request in range(len(media.per_request)):
        items = media.of(request)
        encoding_s.append(costs.seconds([Work.of(item.shape, item.kind) for item in items]))
        sent_bytes.append(sum(item.shape.vectors * row_bytes[item.kind] for item in items))
    return np.array(encoding_s), np.array(sent_bytes) / rate
