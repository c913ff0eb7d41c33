"""Weights and keys and values in the memory of the host, and the processor as a second device.

In a step the link to the host, the processor and the devices work beside one another, as FlexGen (Sheng et al., arXiv
2303.06865), HeteGen (arXiv 2403.01164) and APEX arrange it: T = max(devices, weights sent / link, what the processor
reads / rate of its memory). The processor is bound by its memory: products of many tokens would take it longer. The
devices are taken to multiply all weights, also those that the processor does: both lean little, for the one that is
waited for is another.
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
    """What a step waits for beside its devices."""

    floor_s: float
    """Of every step: sending weights, and reading those that the processor multiplies."""
    processor_s: float
    """Of that, what the processor reads."""
    per_context_s: float
    """For each token of context of a decode: reading the part of its keys and values that stands in the host, and those
    of a decode like it of every other group of ranks."""
    on_device: float
    """Share of the keys and values that stand on the devices."""

    @classmethod
    def of(cls, model: Model, hardware: Hardware, pool: Pool) -> Self | None:
        """Of a pool; None where it offloads nothing. Raises Infeasible where the profile knows no link to the host."""
        offload = pool.offload
        if offload is None:
            return None
        if "host" not in hardware.links:
            raise Infeasible(f"hardware {hardware.name}: no link to the host, over which weights would come")
        parallelism = pool.parallelism
        held = offload.weights * sum(weights_bytes(model, parallelism, stage) for stage in range(parallelism.pp))
        sent_s = (1 - offload.computed) * held / hardware.links["host"].bytes_per_s
        ranks = parallelism.devices // parallelism.pp
        reads = offload.bytes_per_s
        processor_s = 0.0 if reads is None else ranks * offload.computed * held / reads
        kv_dtype = pool.kv_cache.dtype or model.kv_dtype or model.dtype
        kept = 1.0 if pool.kv_cache.policy is None else pool.kv_cache.policy.read(kv_dtype)
        kv_bytes = kept * kv_bytes_per_token(model, Parallelism(), 0, kv_dtype)
        per_context_s = 0.0 if reads is None else parallelism.attention_dp * offload.kv_cache * kv_bytes / reads
        return cls(max(sent_s, processor_s), processor_s, per_context_s, 1 - offload.kv_cache)

    def beyond(self, num_decodes: int | Array, mean_context: Array, room: Array) -> Array:
        """Seconds of the processor that stand out beyond what the devices do besides attention, `room`."""
        return self.processor_s + self.per_context_s * num_decodes * mean_context - room


def floor_s(work: HostWork | None) -> float:
    """Seconds that no step goes below for what the host does."""
    return 0.0 if work is None else work.floor_s
