"""Memory of a drafter, and the devices it runs on."""

from __future__ import annotations

from typing import NamedTuple

from simtune.costs.memory import kv_bytes_per_token, weights_bytes
from simtune.specs.base import DTYPE_BYTES
from simtune.specs.drafters import Drafter
from simtune.specs.model import Model
from simtune.specs.pool import Parallelism, Pool


class DraftMemory(NamedTuple):
    """Bytes on each rank of the target."""

    weights_bytes: float
    kv_bytes_per_token: float


def draft_memory(drafter: Drafter, target: Model, pool: Pool, draft: Model | None = None) -> DraftMemory:
    """Return the drafter's memory; embedding and head count only if they are not the target's.

    `draft` is the model that a draft model names.
    """
    parallelism = drafting_parallelism(drafter, pool)
    network = drafter.network(target, draft)
    plain, matrix = DTYPE_BYTES[target.dtype], DTYPE_BYTES[target.weight_dtype]
    hidden, tp = target.hidden_size, parallelism.tp
    if network is None:
        return DraftMemory(drafter.parallel_heads * plain * hidden * (hidden + -(-target.vocab_size // tp)), 0.0)
    if drafter.own_model is not None:
        weights = weights_bytes(network, parallelism, 0)
    else:
        head = plain * hidden * -(-network.vocab_size // tp)
        shared = network.model_copy(update={"tie_embeddings": True})
        weights = weights_bytes(shared, parallelism, 0) - head
        if drafter.joins_hidden_states:
            weights += matrix * 2 * hidden * hidden
        if drafter.own_head:
            weights += head
    kv_dtype = pool.kv_cache.dtype or network.dtype
    return DraftMemory(weights, kv_bytes_per_token(network, parallelism, 0, kv_dtype))


def drafting_parallelism(drafter: Drafter, pool: Pool) -> Parallelism:
    """Return the parallelism of the drafter, on one pipeline stage; groups that divide prompts do so for it too."""
    groups = pool.parallelism.prefill_context_parallel
    return Parallelism(tp=drafter.ranks(pool.parallelism.tp), expert_parallel=False, prefill_context_parallel=groups)


def drafting_pool(drafter: Drafter, pool: Pool) -> Pool:
    """Return the pool for the drafter's own network: one pipeline stage, with the weights of its checkpoint."""
    update = {"parallelism": drafting_parallelism(drafter, pool), "weight_dtype": None}
    return pool.model_copy(update=update)
