"""Costs of a candidate that need no simulation: shares of its GPUs, the power of idle ones, the GPU-hours of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from simtune.costs.share import share_of
from simtune.errors import Infeasible, UsageError
from simtune.specs.hardware import Hardware
from simtune.tuner.objectives import PoolHours, RunHours
from simtune.tuner.space.candidates import Candidate, PoolChoice
from simtune.workload.requests import RequestStream


class ShareKey(NamedTuple):
    """A share of the hardware of a pool."""

    engine: str
    gpu: str
    processors: float
    bandwidth: float


def shared_hardware(choice: PoolChoice, hardware: Hardware, cache: dict[ShareKey, Hardware]) -> Hardware:
    """Return the hardware of a pool: the share of it that the variant of the pool sets, if it sets one.

    Shares are kept in `cache`. Raise Infeasible if nothing is known of shares of the hardware.
    """
    share = (choice.changes or {}).get("share")
    if not share:
        return hardware
    key = ShareKey(choice.shape.engine, choice.shape.gpu, share["processors"], share["bandwidth"])
    if key not in cache:
        try:
            cache[key] = share_of(hardware, key.processors, key.bandwidth)
        except UsageError as error:
            raise Infeasible(str(error)) from None
    return cache[key]


class PartOfLoad(NamedTuple):
    """Requests that are simulated for a candidate: all, or those of some cores that stand for all."""

    stream: RequestStream
    share: float
    """Share of the cores that serve them."""

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        times_s = self.stream.arrival_s
        return 0.0 if times_s is None else float(times_s[-1] - times_s[0])

    @property
    def output_tokens(self) -> float:
        """Output tokens on all cores."""
        return float(self.stream.output_tokens.sum()) / self.share


def parts_of_load(stream: RequestStream, simulated: int, instances: int) -> tuple[PartOfLoad, PartOfLoad]:
    """Return all requests, and those that `simulated` of `instances` instances receive."""
    return PartOfLoad(stream, 1.0), PartOfLoad(stream.share_of(simulated, instances), simulated / instances)


def idle_j_per_token(
    candidate: Candidate, profiles: Mapping[str, Hardware], parts: Sequence[PartOfLoad], offered_rps: float | None
) -> float | None:
    """Return the joules that the GPUs would draw from the first arrival to the last if nothing ran, per output token,
    at one request per second; of autoscaled pools those that they always hold.

    The result is the least for the given parts of the load. None if the profile of a pool has no power.
    """
    powers = [profiles[pool.shape.gpu].device.power for pool in candidate.pools]
    idle_w = [None if power is None else power.idle_w for power in powers]
    watts = of_all(idle_w, [pool.least_devices for pool in candidate.pools])
    if watts is None or offered_rps is None:
        return watts and 0.0
    return min(watts * part.span_s * offered_rps / part.output_tokens for part in parts)


def run_hours(candidate: Candidate, profiles: Mapping[str, Hardware], parts: Sequence[PartOfLoad]) -> RunHours:
    """Return the GPU-hours of a run: at least what each pool always holds, from the first arrival to the last, of the
    part of the load that has the fewest hours for each token."""
    part = min(parts, key=lambda part: part.span_s / part.output_tokens)
    pools = tuple(
        PoolHours(
            pool.pool_name if pool.fixed is None else pool.fixed.name,
            pool.devices,
            profiles[pool.shape.gpu].device.price_per_hour_usd,
            pool.scaling is not None,
            pool.least_devices * part.span_s / 3600,
        )
        for pool in candidate.pools
    )
    return RunHours(pools, part.output_tokens)


def of_all(of_a_gpu: Sequence[float | None], gpus: Sequence[int]) -> float | None:
    """Return the sum of a number for a GPU of each pool over the GPUs of all pools; None if a pool has none."""
    numbers = [number for number in of_a_gpu if number is not None]
    if len(numbers) < len(of_a_gpu):
        return None
    return sum(number * devices for number, devices in zip(numbers, gpus, strict=True))
