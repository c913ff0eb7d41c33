"""Attention of sequences that several ranks share: each has a part of the tokens, and of their keys and values.

Prompts are dealt out so that all ranks relate equally many pairs of tokens, and keys and values go round them in a ring
while each attends to those it has (ring attention, Liu, Zaharia and Abbeel, arXiv 2310.01889): a prompt takes
max(attention / cp, (cp - 1) sends). Going both ways halves what a link carries one way (TokenRing, arXiv 2412.20501).
Decodes read a context that is cp times as short on each rank; their queries are gathered by all ranks, and the outputs
are summed and scattered (KV parallelism, Mnemosyne, arXiv 2409.17264).

To the fast side: the keys and values of the tokens before a chunk are not sent round repeatedly for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np

from simtune.arrays import Array
from simtune.costs.layers import AttentionCosts, AttentionLayer
from simtune.costs.predict import Profile
from simtune.specs.base import DTYPE_BYTES
from simtune.specs.pool import Pool


class ContextRanks(NamedTuple):
    """Groups of ranks that share a sequence, and the time to exchange bytes among them."""

    number: int
    send: Callable[[Array], Array]
    """Seconds of sending a number of bytes to the next rank."""
    collect: Callable[[Array], Array]
    """Seconds of gathering rows of a number of bytes in all, or of summing and scattering them."""
    row_bytes: float
    """Bytes of a value of a query or of an output."""
    kv_bytes: float
    """Bytes of a value in the cache."""
    directions: int

    @classmethod
    def of(cls, pool: Pool, profile: Profile, dtype: str, kv_dtype: str) -> Self:
        """Return the ranks of a plan; between nodes by the data sheet's link, since collectives were measured in one
        node."""
        parallelism = pool.parallelism
        cp = parallelism.context_ranks
        across = parallelism.tp * cp > profile.hardware.device.devices_per_node
        sends = profile.predictor("send_recv", dtype, variant="inter_node" if across else None)

        def send(size: Array) -> Array:
            return sends.seconds(bytes=size)

        def between(size: Array) -> Array:
            return 2 * sends.seconds(bytes=(cp - 1) / cp * size)

        if across:
            collect = between
        else:
            gather, scatter = (profile.predictor(kind, dtype) for kind in ("all_gather", "reduce_scatter"))

            def collect(size: Array) -> Array:
                return gather.seconds(devices=cp, bytes=size) + scatter.seconds(devices=cp, bytes=size)

        directions = 2 if pool.studied.cp_ring == "both_ways" else 1
        return cls(cp, send, collect, DTYPE_BYTES[dtype], DTYPE_BYTES[kv_dtype], directions)


def across_ranks(costs: AttentionCosts, layer: AttentionLayer, ranks: ContextRanks) -> AttentionCosts:
    """Return the costs if each rank has its part of every sequence; see the module."""
    cp, mixed = ranks.number, costs.mixed

    def part(context: Array) -> Array:
        return np.maximum(1.0, context / cp)

    def collected(batch: int | Array, width: int) -> Array:
        return ranks.collect(np.asarray(batch, dtype=np.float64) * width * layer.output_width * ranks.row_bytes)

    def ring(tokens: Array) -> Array:
        size = tokens / cp * layer.values_per_token * ranks.kv_bytes / ranks.directions
        return np.where(tokens > 0, (cp - 1) * ranks.send(np.maximum(size, 1.0)), 0.0)

    if not layer.values_per_token:
        return costs
    return costs._replace(
        decode=lambda batch, context, width: costs.decode(batch, part(context), width) + collected(batch, width),
        prefill=lambda tokens: np.maximum(costs.prefill(tokens) / cp, ring(tokens)),
        among=lambda tokens: np.maximum(costs.among(tokens) / cp, ring(tokens)),
        overhead_s=costs.overhead_s * cp,
        past=lambda tokens: costs.past(tokens) / cp,
        mixed=None
        if mixed is None
        else lambda batch, context, chunk: mixed(batch, part(context), chunk) + collected(batch, 1),
        imbalance_s=lambda num_decodes, with_chunks: costs.imbalance_s(num_decodes, with_chunks) / cp,
    )
