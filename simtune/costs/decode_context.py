"""Decode attention of tensor-parallel ranks that share the keys and values of sequences: decode context parallelism.

Ranks that would keep the same KV heads keep a part of the tokens instead (vLLM's `--decode-context-parallel-size`, from
Helix, arXiv 2507.07120). To decode, a group of d ranks gathers its queries, each rank attends with all heads of the
group to its 1 / d of the context, and the partial results are combined and scattered: one exchange a layer.

To the fast side: prompts are as without, though ranks gather the keys and values of the tokens before a chunk; and
latent attention exchanges results of its latents, which are wider than the outputs that are counted.
"""

from __future__ import annotations

import numpy as np

from simtune.arrays import Array
from simtune.costs.layers import AttentionCosts
from simtune.costs.predict import Profile
from simtune.specs.base import DTYPE_BYTES


def over_decode_ranks(
    costs: AttentionCosts, grouped: AttentionCosts, output_width: int, ranks: int, profile: Profile, dtype: str
) -> AttentionCosts:
    """Return the costs if groups of `ranks` ranks share the cache. `grouped` are those of a rank with all heads of its
    group, which put out `output_width` values per token."""
    gather, scatter = (profile.predictor(kind, dtype) for kind in ("all_gather", "reduce_scatter"))
    row_bytes, mixed = output_width * DTYPE_BYTES[dtype], grouped.mixed

    def part(context: Array) -> Array:
        return np.maximum(1.0, context / ranks)

    def exchanged(batch: int | Array, width: int) -> Array:
        size = np.asarray(batch, dtype=np.float64) * width * row_bytes
        return gather.seconds(devices=ranks, bytes=size) + scatter.seconds(devices=ranks, bytes=size)

    return costs._replace(
        decode=lambda batch, context, width: grouped.decode(batch, part(context), width) + exchanged(batch, width),
        mixed=None
        if mixed is None
        else lambda batch, context, chunk: mixed(batch, part(context), chunk) + exchanged(batch, 1),
        imbalance_s=lambda num_decodes, with_chunks: grouped.imbalance_s(num_decodes, with_chunks) / ranks,
    )
