"""Points of a front, and the loads of its ladder."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from simtune.specs.base import Count, NonNegative, Positive, Record


class FrontPoint(Record):
    """A plan at a rate at which no plan of the space has more tokens/s/user at as many tokens/s/GPU."""

    candidate: str
    num_gpus: Count
    rate_rps: Positive = Field(description="offered, and not piling up")
    output_tokens_per_s_per_gpu: Positive = Field(description="offered, and not piling up")
    delivered_tokens_per_s_per_gpu: NonNegative = Field(
        description="from the first arrival to the last finish; less than the load, as a run begins and ends empty"
    )
    output_tokens_per_s_per_user: Positive = Field(description="1 / mean TPOT, simulated on all cores")
    ttft_p99_s: NonNegative | None
    tpot_p99_s: NonNegative | None
    requests: Count | None = Field(None, description="simulated on all cores; null in files of earlier releases")

    @property
    def power(self) -> float:
        """Return throughput over delay, the product of the two coordinates (Kleinrock, ICC 1979)."""
        return self.output_tokens_per_s_per_gpu * self.output_tokens_per_s_per_user


class Ladder(NamedTuple):
    """A front, and the loads at which it was searched, in output tokens/s/GPU; the highest first."""

    loads: tuple[float, ...]
    settled: int
    """Number of loads that were decided."""
    points: tuple[FrontPoint, ...]
