"""Host time belongs to an engine's release: vLLM 0.11 on an H100, measured by inference-perf.

Source: kubernetes-sigs/inference-perf, demos/kubecon-na-2025/vllm+chunking_and_prefix_caching, stages 0 to 6.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from simtune.api import load_specs, set_up
from simtune.costs.host import PUBLISHED_LOG_SD, HostCosts
from simtune.costs.iteration import HOST
from simtune.costs.predict import Basis
from simtune.results.result import Result
from simtune.sim.deployment import Deployment
from simtune.sim.drawn_worlds import Blueprint, PerturbedWorld, spreads
from simtune.sim.run_basis import cost_basis
from simtune.sim.uncertainty import uncertainty
from simtune.specs.catalog import load_engine, load_hardware, names
from simtune.specs.pool import Pool
from simtune.specs.preset import merged
from simtune.specs.workload import Workload
from simtune.workload.requests import build_stream

PLAN = str(Path(__file__).parent / "data" / "e01-host-time-synchronous" / "plan.yaml")
MEASURED_E2EL_S = {1.0: 0.480, 43.2: 0.524, 85.5: 0.579, 127.8: 0.666}
MEASURED_TPOT_S = {1.0: 0.00724, 43.2: 0.00809, 85.5: 0.00896, 127.8: 0.01033}
SATURATED_RPS = 173.0


def load(requests: int, arrivals: dict[str, Any]) -> Workload:
    fields = {
        "prompt": {"kind": "fixed", "tokens": 11},
        "output": {"kind": "fixed", "tokens": 62},
        "shared_prefix": {"groups": 100, "tokens": 192},
    }
    return Workload.model_validate({"name": "field", "requests": requests, "arrivals": arrivals, **fields})


@cache
def deployment() -> Deployment:
    return set_up(load_specs(None, None, "chat", PLAN, {})).deployment


def result(requests: int, arrivals: dict[str, Any]) -> Result:
    workload = load(requests, arrivals)
    return deployment().simulate(build_stream(workload, None, requests=requests, seed=0))


@pytest.mark.parametrize("rate", MEASURED_E2EL_S)
def test_latency_is_within_six_per_cent_at_every_load(rate: float) -> None:
    requests = max(60, round(6 * rate))
    run = result(requests, {"kind": "fixed", "rate_rps": rate})
    steady = run.e2el_s[requests // 2 :]
    # of an idle server first tokens are measured 26 ms later than here, which is 5.4 % of so short an answer; at 127.8
    # requests a second answers end 5.1 % too soon, and would 11 % too late beside prompts of 203 tokens (case e02) if
    # the host took one microsecond more a sequence
    assert steady.mean() == pytest.approx(MEASURED_E2EL_S[rate], rel=0.06)
    assert run.tpot_s[requests // 2 :].mean() == pytest.approx(MEASURED_TPOT_S[rate], rel=0.025)


def saturated() -> Result:
    return result(1760, {"kind": "fixed", "rate_rps": 254.0, "max_in_flight": 440})


def test_throughput_of_capped_clients_is_within_five_per_cent() -> None:
    finish_s = sorted(saturated().finish_s)[440:-440]
    assert (len(finish_s) - 1) / (finish_s[-1] - finish_s[0]) == pytest.approx(SATURATED_RPS, rel=0.05)


def test_its_error_is_in_the_worlds_and_its_share_in_the_line_of_what_steps_rest_on() -> None:
    run = saturated()
    basis = cost_basis(deployment(), run)
    assert basis is not None
    (host,) = (kind for kind in basis.operators if kind.operator == HOST)
    assert 0.2 < host.share < 0.3, "2.9 of 11.9 ms"
    assert (host.log_sd, host.basis.interpolated) == (0.3, 1.0)
    assert sum(kind.share for kind in basis.operators) == pytest.approx(1.0, abs=1e-4)
    assert spreads(deployment(), run)[HOST] == 0.3


def test_redrawn_worlds_differ_by_the_host() -> None:
    stream = build_stream(load(200, {"kind": "closed_loop", "users": 100}), None, requests=200, seed=0)
    intervals = uncertainty(deployment(), stream, count=4, seed=0, jobs=1).intervals
    low, high = intervals["request_throughput_rps"]
    plain = deployment().simulate(stream).duration_s
    slower = Blueprint.of(deployment()).deploy(PerturbedWorld({HOST: 1.5})).simulate(stream).duration_s
    assert 1.07 < slower / plain < 1.2, "the host has a quarter of a step, or less with fewer requests"
    assert high / low > 1.08


def pool_of(engine: str, hardware: str, **more: Any) -> Pool:
    profile, model = load_hardware(hardware), deployment().model
    settings = load_engine(engine).settings(profile.device, model)
    rest = {"hardware": hardware, "instances": 1, "batching": {"max_num_seqs": 8, "max_num_batched_tokens": 512}}
    return Pool.model_validate(merged({**rest, **more}, settings))


def test_the_plan_comes_before_the_engine_and_the_engine_before_the_profile() -> None:
    l4 = load_hardware("l4")
    of_engine = HostCosts.of(pool_of("vllm-0.11", "l4"), l4)
    assert (of_engine.times.step_s, of_engine.times.per_sequence_s, of_engine.basis) == (
        0.0009,
        17e-6,
        Basis.INTERPOLATED,
    )
    own = {"step_s": 0.002, "per_sequence_s": 0.0, "origin": None, "log_sd": None}
    stated = HostCosts.of(pool_of("vllm-0.11", "l4", host=own), l4)
    assert (stated.seconds(10), stated.log_sd, stated.basis) == (0.002, 0.0, Basis.MEASURED)
    plain = pool_of("vllm-0.11", "l4").model_copy(update={"host": None})
    h100, torch = load_hardware("h100-sxm"), load_hardware("h100-torch")
    assert HostCosts.of(plain, h100).log_sd == PUBLISHED_LOG_SD
    assert HostCosts.of(plain, torch).times.step_s == torch.host.step_s
    assert HostCosts.of(plain, torch).basis == Basis.INTERPOLATED


@pytest.mark.parametrize("engine", names("engine"))
def test_every_release_states_its_host_time_and_what_that_is_from(engine: str) -> None:
    host = pool_of(engine, "l4").host
    assert host is not None
    assert host.origin is not None
    assert host.step_s > 0 < host.per_sequence_s
