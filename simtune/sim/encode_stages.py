"""Stages that encode images on servers of their own, before the pool computes the prompts (EPD).

A server encodes the images of one request at a time, all of them together; embeddings then go to the pool, and the
server takes the next request meanwhile. Every image is encoded, also one that was shown before: a server keeps nothing.
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
from simtune.workload.images import RequestImages
from simtune.workload.requests import RequestStream


class EncodeWork(NamedTuple):
    """Seconds of each request in a stage that encodes images, besides those that the stage states itself."""

    busy_s: Array
    """Seconds for which a server encodes its images."""
    sent_s: Array
    """Seconds until their embeddings have reached the pool, after the server is done."""


def encode_works(
    plan: Plan, model: Model, pools: Sequence[DeployedPool], stream: RequestStream
) -> dict[str, EncodeWork]:
    """Return the work of requests with images in each stage that encodes them, by its name. Raise UsageError for a
    stage that cannot."""
    works = {}
    for stage in plan.stages or ():
        if stage.encoder is None or stream.images is None:
            continue
        pool = next(pool for pool in pools if pool.spec.name == stage.pool)
        try:
            works[stage.name] = EncodeWork(*_encoding(stage, model, pool, stream.images))
        except Infeasible as error:
            raise UsageError(f"plan {plan.name}: stage {stage.name}: {error}") from None
    return works


def _encoding(stage: Stage, model: Model, pool: DeployedPool, images: RequestImages) -> tuple[Array, Array]:
    """Return the seconds of encoding the images of each request, and of sending their embeddings."""
    assert stage.encoder is not None
    if model.vision is None:
        raise Infeasible(f"model {model.name} states no vision encoder; add vision to the model, or remove the stage")
    changes = {"parallelism": Parallelism(tp=stage.devices), "encoder": Encoder(tp_mode=stage.encoder)}
    costs = EncoderCosts(model, pool.hardware, pool.spec.model_copy(update=changes))
    rate = stage.bytes_per_s or link_of(pool.hardware, "inter_node").bytes_per_s
    row_bytes = model.vision.width * DTYPE_BYTES[model.dtype]
    encoding_s, vectors = [], []
    for request in range(len(images.per_request)):
        shapes = [image.shape for image in images.of(request)]
        work: list[Work] = [(shape.sequences, shape.patches, shape.vectors) for shape in shapes]
        encoding_s.append(costs.seconds(work))
        vectors.append(sum(shape.vectors for shape in shapes))
    return np.array(encoding_s), np.array(vectors) * (row_bytes / rate)
