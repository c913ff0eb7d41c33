"""Profile of a share of a device's processors and memory bandwidth, as a separate device.

Kernels of two instances run in parallel, each on its own processors. The times of a share are the fit of the whole
device with its rate of flops times the share of the processors and its rate of bytes times the share of the bandwidth:
a step is as long as the resource it waits for. A share stays reserved while the other instance is idle, and
contention for caches is not modelled.
"""

from __future__ import annotations

from simtune.costs.device_transfer import transfer
from simtune.specs.hardware import Facts, Hardware

_LEAST = 2
"""Least processors of a share: a device with one counts as a CPU, whose operators have other terms."""


def share_of(profile: Hardware, processors: float, bandwidth: float) -> Hardware:
    """Return the profile of these shares of the device, with the intervals of a transfer within one architecture.

    Raises UsageError if the profile has operators from a data sheet.
    """
    full_device = profile.device
    device = full_device.model_copy(
        update={
            "processors": min(full_device.processors, max(_LEAST, round(full_device.processors * processors))),
            "memory_bytes_per_s": full_device.memory_bytes_per_s * bandwidth,
            "flops_per_s": {dtype: rate * processors for dtype, rate in full_device.flops_per_s.items()},
        }
    )
    moved = transfer(profile, Facts(name=profile.name, engine=profile.engine, device=device, links=profile.links))
    return moved if profile.calibration is None else moved.model_copy(update={"calibration": profile.calibration})
