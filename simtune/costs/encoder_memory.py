"""Memory of a vision encoder on each rank of a pool that encodes images.

Weights are in the model's dtype. Activations are those of vLLM's dummy run (`profile_run` of
vllm/v1/worker/gpu_model_runner.py), which encodes as many of the largest images as one step may, keeps their
embeddings, and runs the largest step of the language model beside these.
"""

from __future__ import annotations

from typing import NamedTuple

from simtune.specs.base import DTYPE_BYTES
from simtune.specs.model import Model
from simtune.specs.pool import Pool


class EncoderMemory(NamedTuple):
    """Bytes on each rank; all zero for a pool that encodes nothing."""

    weights: float = 0.0
    kept: float = 0.0
    """Embeddings that are kept for requests to come."""
    inside: float = 0.0
    """Activations of the largest batch of images inside a layer."""


def encoder_memory(model: Model, pool: Pool) -> EncoderMemory:
    """Return the memory of a pool's vision encoder."""
    vision, encoder = model.vision, pool.encoder
    if vision is None or encoder is None:
        return EncoderMemory()
    shards = pool.parallelism.tp if encoder.tp_mode == "weights" else 1
    tokens, largest, per_value = pool.batching.max_num_batched_tokens, vision.largest, DTYPE_BYTES[model.dtype]
    images = encoder.budget(tokens, largest.vectors) // largest.vectors
    patches = images * largest.sequences * largest.patches
    width = 2 * vision.hidden_size + (2 + vision.gated) * vision.intermediate_size / shards
    embeddings = encoder.room(tokens, largest.vectors) * vision.width
    return EncoderMemory(*(per_value * values for values in (vision.parameters / shards, embeddings, patches * width)))
