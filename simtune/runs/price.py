"""What a deployment costs, where the hardware profiles name a price."""

from __future__ import annotations

from simtune.results.summary import SimulationSummary
from simtune.runs.schema import CandidateRow, Price
from simtune.sim.deployment import Deployment

MILLION = 1e6
HOUR_S = 3600.0


def price(deployment: Deployment, simulated: SimulationSummary) -> Price | None:
    """Dollars of all GPUs, over what they deliver under this load; None where a pool's hardware names no price.

    GPUs of a stage cost what those of the pool that it serves cost; GPUs that two pools share count once.
    """
    each: dict[str, float] = {}
    for pool in deployment.pools:
        usd = pool.hardware.device.price_per_hour_usd
        if usd is None:
            return None
        each[pool.spec.name] = usd
    plan = deployment.plan
    own = [pool for pool in plan.pools if pool.share is None or pool.share.beside is None]
    per_hour = sum(each[pool.name] * pool.devices * pool.instances for pool in own)
    per_hour += sum(each[stage.pool] * stage.devices * stage.instances for stage in plan.stages or ())
    sources = dict.fromkeys(pool.hardware.device.price_source or "not said" for pool in deployment.pools)
    return Price(
        per_hour_usd=per_hour,
        per_million_output_tokens_usd=_over(per_hour, simulated.output_tokens_per_s, MILLION),
        per_million_tokens_usd=_over(per_hour, simulated.total_tokens_per_s, MILLION),
        per_thousand_requests_usd=_over(per_hour, simulated.request_throughput_rps, 1000.0),
        source="; ".join(sources),
    )


def _over(per_hour: float, per_s: float | None, count: float) -> float | None:
    return per_hour / HOUR_S / per_s * count if per_s else None


def priced(row: CandidateRow, usd_per_hour: float | None) -> CandidateRow:
    """A candidate with what a million output tokens cost on it, by the price of all its GPUs."""
    each = row.output_tokens_per_s_per_gpu
    usd = None if usd_per_hour is None or each is None else _over(usd_per_hour, each * row.num_gpus, MILLION)
    return row.model_copy(update={"usd_per_million_output_tokens": usd})
