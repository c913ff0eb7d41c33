"""Price of a deployment, if the hardware profiles name one."""

from __future__ import annotations

from pydantic import Field

from simtune.results.summary import SimulationSummary
from simtune.sim.deployment import Deployment
from simtune.specs.base import NonNegative, Positive, Record

MILLION = 1e6
HOUR_S = 3600.0


class Price(Record):
    """Price of the GPUs of a deployment, and per unit of what it delivers under its load."""

    per_hour_usd: Positive = Field(description="of all GPUs; of autoscaled pools of those that they hold on average")
    per_million_output_tokens_usd: NonNegative | None
    per_million_tokens_usd: NonNegative | None = Field(description="of prompts and outputs")
    per_thousand_requests_usd: NonNegative | None
    run_usd: NonNegative | None = Field(
        None, description="of the GPUs held from 0 s to the last step of the run; left out without autoscaled pools"
    )
    run_usd_of_most: NonNegative | None = Field(
        None, description="of the same time with max_instances throughout; left out without autoscaled pools"
    )
    source: str


def price(deployment: Deployment, simulated: SimulationSummary) -> Price | None:
    """Return dollars of all GPUs, over what they deliver under this load; None if a pool's hardware names no price.

    GPUs of a stage cost what those of the pool that it serves cost; GPUs that two pools share count once.
    """
    usd_per_hour: dict[str, float] = {}
    for pool in deployment.pools:
        usd = pool.hardware.device.price_per_hour_usd
        if usd is None:
            return None
        usd_per_hour[pool.spec.name] = usd
    plan = deployment.plan
    paid_pools = [pool for pool in plan.pools if pool.share is None or pool.share.beside is None]
    per_hour = sum(usd_per_hour[stage.pool] * stage.devices * stage.instances for stage in plan.stages or ())
    per_hour_of_most = per_hour
    mean = {of.pool: of.mean_instances for of in simulated.autoscaling}
    for paid in paid_pools:
        per_hour += usd_per_hour[paid.name] * paid.devices * mean.get(paid.name, paid.most_instances)
        per_hour_of_most += usd_per_hour[paid.name] * paid.devices * paid.most_instances
    hours = next((of.hours for of in simulated.autoscaling), None)
    of_run = {} if hours is None else {"run_usd": per_hour * hours, "run_usd_of_most": per_hour_of_most * hours}
    sources = dict.fromkeys(pool.hardware.device.price_source or "not said" for pool in deployment.pools)
    return Price(
        per_hour_usd=per_hour,
        per_million_output_tokens_usd=usd_per(per_hour, simulated.output_tokens_per_s, MILLION),
        per_million_tokens_usd=usd_per(per_hour, simulated.total_tokens_per_s, MILLION),
        per_thousand_requests_usd=usd_per(per_hour, simulated.request_throughput_rps, 1000.0),
        source="; ".join(sources),
        **of_run,
    )


def usd_per(per_hour: float, per_s: float | None, count: float) -> float | None:
    """Return the dollars of `count` units, at dollars an hour and units a second; None if there is no unit."""
    return per_hour / HOUR_S / per_s * count if per_s else None
