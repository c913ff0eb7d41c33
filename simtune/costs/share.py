"""A share of a device's processors and memory bandwidth, as a device of its own.

Kernels of two instances run beside one another, each on its own processors. What a share takes is the fit of the whole
device with its rate of flops times the share of the processors and its rate of bytes times the share of the bandwidth:
a step is as long as the resource it waits for. A share is kept while the other instance is idle, and caches are taken
not to be fought over.
"""

from __future__ import annotations

from simtune.costs.device_transfer import transfer
from simtune.specs.hardware import Facts, Hardware

_LEAST = 2
"""Processors of a GPU: a device with one is taken for a processor of its own, whose operators have other terms."""


def share_of(profile: Hardware, processors: float, bandwidth: float) -> Hardware:
    """The profile of so large shares of the device, with the intervals of a transfer within one architecture.

    Raises UsageError where the profile is itself taken from a data sheet.
    """
    whole = profile.device
    device = whole.model_copy(
        update={
            "processors": min(whole.processors, max(_LEAST, round(whole.processors * processors))),
            "memory_bytes_per_s": whole.memory_bytes_per_s * bandwidth,
            "flops_per_s": {dtype: rate * processors for dtype, rate in whole.flops_per_s.items()},
        }
    )
    moved = transfer(profile, Facts(name=profile.name, engine=profile.engine, device=device, links=profile.links))
    return moved if profile.calibration is None else moved.model_copy(update={"calibration": profile.calibration})
