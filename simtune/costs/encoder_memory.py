"""Memory of the encoders of media on each rank of a pool that encodes them.

Weights are in the model's dtype. Activations are those of vLLM's dummy run (`profile_run` of
vllm/v1/worker/gpu_model_runner.py), which encodes as many of the largest items as one step may, keeps their
embeddings, and runs the largest step of the language model beside these.
"""

from __future__ import annotations

from typing import NamedTuple

from simtune.costs.encoder import sharing_ranks
from simtune.specs.base import DTYPE_BYTES
from simtune.specs.model import Model
from simtune.specs.pool import Pool
from simtune.specs.tower import Tower


class EncoderMemory(NamedTuple):
    """Bytes on each rank; all zero for a pool that encodes nothing."""

    weights: float = 0.0
    kept: float = 0.0
    """Embeddings that are kept for requests to come."""
    inside: float = 0.0
    """Activations of the largest batch of items inside a layer."""


def encoder_memory(model: Model, pool: Pool) -> EncoderMemory:
    """Return the memory of a pool's encoders."""
    encoder, towers = pool.encoder, model.towers
    if encoder is None:
        return EncoderMemory()
    item = encoder.largest(towers, pool.max_model_len or model.max_position)
    if item is None:
        return EncoderMemory()
    (kind, largest), tokens = item, pool.batching.max_num_batched_tokens
    tower = towers.of(kind)
    assert tower is not None
    items = encoder.budget(tokens, largest.vectors) // largest.vectors
    patches = items * largest.sequences * largest.patches
    width = 2 * tower.hidden_size + (2 + tower.gated) * tower.intermediate_size / _shards(tower, pool)
    loaded = towers.distinct(encoder.kinds(towers))
    weights = sum(tower.parameters / _shards(tower, pool) for tower in loaded)
    embeddings = encoder.room(tokens, largest.vectors) * max(tower.width for tower in loaded)
    return EncoderMemory(*(DTYPE_BYTES[model.dtype] * values for values in (weights, embeddings, patches * width)))


def _shards(tower: Tower, pool: Pool) -> int:
    """Return the ranks that share each layer; where they cannot, `EncoderCosts` refuses the pool."""
    return sharing_ranks(tower, pool) or pool.parallelism.tp
