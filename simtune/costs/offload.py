"""Weights, keys and values in the memory of the host, and the processor as a second device.

In a step the link to the host, the processor and the devices work in parallel, as in FlexGen (Sheng et al., arXiv
2303.06865), HeteGen (arXiv 2403.01164) and APEX: T = max(devices, weights sent / link, bytes that the processor reads /
rate of its memory). The processor is bound by its memory: products of many tokens would take it longer. The devices are
taken to multiply all weights, also those that the processor multiplies. Both biases are small, because they hardly ever
concern the resource that is waited for.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from simtune.arrays import Array
from simtune.costs.memory import kv_bytes_per_token, weights_bytes
from simtune.errors import Infeasible
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.pool import Parallelism, Pool


class HostWork(NamedTuple):
    """Seconds that a step waits for the host."""

    floor_s: float
    """Seconds of every step: sending weights, and reading those that the processor multiplies."""
    processor_s: float
    """Seconds of that for the processor's reads."""
    per_context_s: float
    """Seconds for each token of context of a decode: reading the part of its keys and values that is stored in the
    host, and those of a similar decode of every other group of ranks."""
    on_device: float
    """Share of the keys and values that are stored on the devices."""

    @classmethod
    def of(cls, model: Model, hardware: Hardware, pool: Pool) -> Self | None:
        """Return the host's work for a pool; None if it offloads nothing. Raises Infeasible if the profile has no host
        link."""
        offload = pool.studied.offload
        if offload is None:
            return None
        if "host" not in hardware.links:
            raise Infeasible(
                f"hardware {hardware.name}: no link to the host for offloaded weights; add links.host to its profile"
            )
        parallelism = pool.parallelism
        offloaded_bytes = offload.weights * sum(
            weights_bytes(model, parallelism, stage) for stage in range(parallelism.pp)
        )
        sent_s = (1 - offload.computed) * offloaded_bytes / hardware.links["host"].bytes_per_s
        ranks = parallelism.devices // parallelism.pp
        reads = offload.bytes_per_s
        processor_s = 0.0 if reads is None else ranks * offload.computed * offloaded_bytes / reads
        kv_dtype = pool.kv_cache.dtype or model.kv_dtype or model.dtype
        read_share = 1.0 if pool.studied.kv_policy is None else pool.studied.kv_policy.read(kv_dtype)
        kv_bytes = read_share * kv_bytes_per_token(model, Parallelism(), 0, kv_dtype)
        per_context_s = 0.0 if reads is None else parallelism.attention_dp * offload.kv_cache * kv_bytes / reads
        return cls(max(sent_s, processor_s), processor_s, per_context_s, 1 - offload.kv_cache)

    def beyond(self, num_decodes: int | Array, mean_context: Array, room: Array) -> Array:
        """Seconds of the processor in excess of `room`, the time of the devices besides attention."""
        return self.processor_s + self.per_context_s * num_decodes * mean_context - room


def floor_s(work: HostWork | None) -> float:
    """Least seconds of a step because of the host's work; 0 without any."""
    return 0.0 if work is None else work.floor_s
