"""The simulator against closed forms of queueing theory: what it must say when the engine is that simple."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import VllmFcfs
from simtune.results.result import Result
from simtune.sim.core import EngineCore
from simtune.sim.world import World
from simtune.specs.workload import FixedLength, Lengths, Lognormal, Poisson, Workload
from simtune.workload.requests import RequestStream, build_stream

PLENTY = 10**7


def simulate(stream: RequestStream, costs: LinearCosts, seqs: int) -> Result:
    scheduler = VllmFcfs(
        num_blocks=PLENTY, block_size=16, max_num_seqs=seqs, max_num_batched_tokens=PLENTY, max_model_len=10**6
    )
    return Result(stream, World([EngineCore(scheduler, costs)], stream).run(), num_gpus=1)


def poisson(rate_rps: float, prompt: Lengths, output: Lengths, requests: int, seed: int) -> RequestStream:
    workload = Workload(name="oracle", arrivals=Poisson(rate_rps=rate_rps), prompt=prompt, output=output)
    return build_stream(workload, None, requests=requests, seed=seed)


@pytest.mark.parametrize("row", range(6))
def test_decode_is_processor_sharing(row: int, oracle_dir: Path) -> None:
    """Steps of t0 + al n, no seat limit: N ~ NegBin(1 + t0/al, rho), TPOT = (t0 + al)/(1 - rho), for any lengths."""
    oracle = json.loads((oracle_dir / "queueing.json").read_text())["decode_negative_binomial"][row]
    t0, al, rate, mean = oracle["t0"], oracle["al"], oracle["lam"], oracle["mean_tokens"]
    # One-token prompts make the first step of a request like its others. A higher rho forgets slowly: more requests.
    requests = {0.15: 20_000, 0.45: 60_000, 0.7: 125_000}[rate]
    output: Lengths = FixedLength(tokens=mean)
    if oracle["lengths"] == "lognormal":
        output = Lognormal(mean_tokens=mean, sigma=1.0, max_tokens=100_000)
    stream = poisson(rate, FixedLength(tokens=1), output, requests, seed=11)
    if oracle["lengths"] == "geometric":
        uniforms = np.random.default_rng(5).random(requests)
        lengths = np.ceil(np.log1p(-uniforms) / math.log1p(-1 / mean)).astype(np.int64)
        stream = RequestStream(
            **{**{f: getattr(stream, f) for f in stream.__dataclass_fields__}, "output_tokens": np.maximum(1, lengths)}
        )
    result = simulate(stream, LinearCosts(step_s=t0, per_token_s=al), seqs=PLENTY)
    # A request is in steps from the first boundary after its arrival on; the fluid limit has no such boundary.
    served = (result.finish_s - result.scheduled_s)[requests // 10 :]
    tokens = stream.output_tokens[requests // 10 :]
    tpot = served.sum() / tokens.sum()
    assert tpot == pytest.approx(oracle["closed_form_tpot"], rel=0.02)
    # Little's law with the steps' own count of residents.
    resident = served.sum() / (result.finish_s.max() - result.arrival_s[requests // 10])
    rho = rate * al * mean
    assert oracle["closed_form_mean_batch"] == pytest.approx((1 + t0 / al) * rho / (1 - rho))
    assert resident == pytest.approx(oracle["closed_form_mean_batch"], rel=0.03)


def test_batch_occupancy_is_negative_binomial() -> None:
    t0, al, rate, mean = 0.2, 0.01, 0.45, 100
    stream = poisson(rate, FixedLength(tokens=1), FixedLength(tokens=mean), 60_000, seed=3)
    scheduler = VllmFcfs(
        num_blocks=PLENTY, block_size=16, max_num_seqs=PLENTY, max_num_batched_tokens=PLENTY, max_model_len=10**6
    )
    outcome = World([EngineCore(scheduler, LinearCosts(t0, al))], stream, record=True).run()
    records = outcome.records[len(outcome.records) // 10 :]
    time_at = np.bincount([r.running for r in records], [r.end - r.start for r in records]) / TICKS_PER_SECOND
    seen = time_at[1:] / time_at[1:].sum()  # an idle engine has no record
    r, rho = 1 + t0 / al, rate * al * mean
    n = np.arange(1, len(time_at))
    log_pmf = [
        math.lgamma(k + r) - math.lgamma(r) - math.lgamma(k + 1) + r * math.log(1 - rho) + k * math.log(rho) for k in n
    ]
    law = np.exp(log_pmf)
    law /= law.sum()
    assert np.abs(np.cumsum(seen) - np.cumsum(law)).max() < 0.02


def waits(stream: RequestStream, service_s: np.ndarray) -> np.ndarray:
    """Return the wait of each request for a server that takes one at a time (Lindley's recursion)."""
    assert stream.arrival_s is not None
    # Work that came before a request, less the time that it had: how far that is above its least value so far.
    backlog = np.concatenate([[0.0], np.cumsum(service_s[:-1] - np.diff(stream.arrival_s))])
    return np.asarray(backlog - np.minimum.accumulate(backlog))


def test_batch_of_one_is_pollaczek_khinchine(oracle_dir: Path) -> None:
    """One seat and one-token answers: an M/G/1 queue whose service times are the prompts'.

    Each wait of the simulator is that of the recursion; its longer runs follow the closed forms.
    """
    oracle = json.loads((oracle_dir / "queueing.json").read_text())
    md1 = oracle["md1"]
    per_token = md1["D"] / 1000
    stream = poisson(md1["lam"], FixedLength(tokens=1000), FixedLength(tokens=1), 100_000, seed=2)
    fixed = waits(stream, stream.prompt_tokens * per_token)
    assert fixed.mean() == pytest.approx(md1["mean_wait"], rel=0.02)
    for point in md1["cdf"]:
        assert (fixed <= point["t"] + 1e-9).mean() == pytest.approx(point["P"], abs=0.01)

    rate, sigma = 0.7, 0.8
    lengths = Lognormal(mean_tokens=1000, sigma=sigma, max_tokens=900_000)
    stream = poisson(rate, lengths, FixedLength(tokens=1), 200_000, seed=8)
    service = stream.prompt_tokens * 1e-3
    wait = rate * float((service**2).mean()) / 2 / (1 - rate * float(service.mean()))
    assert waits(stream, service).mean() == pytest.approx(wait, rel=0.02)


@pytest.mark.parametrize(
    "lengths",
    [FixedLength(tokens=1000), Lognormal(mean_tokens=1000, sigma=0.8, max_tokens=900_000)],
    ids=["fixed", "varying"],
)
def test_waits_for_one_seat_are_those_of_the_recursion(lengths: Lengths) -> None:
    stream = poisson(0.7, lengths, FixedLength(tokens=1), 10_000, seed=8)
    result = simulate(stream, LinearCosts(step_s=0.0, per_token_s=1e-3), seqs=1)
    expected = waits(stream, stream.prompt_tokens * 1e-3)
    assert (expected > 0).mean() > 0.5
    np.testing.assert_allclose(result.queue_s, expected, atol=1e-5)


def test_littles_law() -> None:
    stream = poisson(3.0, Lognormal(mean_tokens=300, sigma=1, max_tokens=4000), FixedLength(tokens=50), 5000, seed=1)
    result = simulate(stream, LinearCosts(5e-3, 2e-5, 1e-8, 1e-9), seqs=16)
    ends = np.concatenate([result.arrival_s, result.finish_s])
    steps = np.concatenate([np.ones(5000), -np.ones(5000)])
    order = np.argsort(ends, kind="stable")
    present = np.cumsum(steps[order])[:-1]
    mean_present = float((present * np.diff(ends[order])).sum()) / (ends.max() - ends.min())
    rate = 5000 / (ends.max() - ends.min())
    assert mean_present == pytest.approx(rate * result.e2el_s.mean(), rel=1e-6)
