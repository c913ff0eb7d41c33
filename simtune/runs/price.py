"""What a deployment costs, where the hardware profiles name a price."""

from __future__ import annotations

from simtune.runs.schema import CandidateRow, Price
from simtune.sim.deployment import Deployment
from simtune.sim.summary import SimulationSummary

MILLION = 1e6
HOUR_S = 3600.0


def price(deployment: Deployment, simulated: SimulationSummary) -> Price | None:
    """Dollars of all GPUs, over what they deliver under this load; None where a pool's hardware names no price."""
    known = [(pool.hardware.device.price_per_hour_usd, pool.spec) for pool in deployment.pools]
    per_hour = 0.0
    for usd, spec in known:
        if usd is None:
            return None
        per_hour += usd * spec.devices * spec.instances
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
