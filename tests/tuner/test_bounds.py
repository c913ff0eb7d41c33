"""The bounds against the simulator on random small worlds, against the study they come from, and by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.costs.protocol import StepCosts
from simtune.engine import POLICIES
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.requests import RequestStream
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Batching, KvCache, KvLink, Parallelism, Plan, Pool
from simtune.specs.workload import Slo
from simtune.testing.clusters import stream_of
from simtune.tuner.bounds import attainment_bound, rate_bound

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
COSTS = LinearCosts(step_s=4e-3, per_token_s=2e-5, per_context_s=3e-8, per_pair_s=2e-9)
ROUTERS = ("round_robin", "least_outstanding", "least_tokens", "power_of_two")


def pool(role: Any = "mixed", *, blocks: int = 2000, policy: str = "vllm-fcfs", **given: Any) -> Pool:
    batching = {"policy": policy, "max_num_seqs": 16, "max_num_batched_tokens": 512, **given.pop("batching", {})}
    kv_cache = {"num_blocks": blocks, **given.pop("kv_cache", {})}
    return Pool(
        name=given.pop("name", role),
        role=role,
        hardware="h100-sxm",
        batching=Batching(**batching),
        kv_cache=KvCache(**kv_cache),
        **{"instances": 1, "max_model_len": 512, **given},
    )


def deployed(*pools: Pool, costs: StepCosts | None = COSTS, **given: Any) -> Deployment:
    apart = {} if len({p.role for p in pools}) == 1 else {"link": KvLink(bytes_per_s=5e9, setup_s=1e-4, descriptor_s=0)}
    return deploy(Plan(name="plan", model=MODEL.name, pools=pools, **apart, **given), MODEL, HARDWARE, costs)


def poisson(n: int, rate_rps: float, prompt: float, output: float, seed: int = 0) -> RequestStream:
    rng = np.random.default_rng(seed)
    lengths = [np.clip(rng.lognormal(np.log(x) - 0.2, 0.6, n).astype(int), 1, 240) for x in (prompt, output)]
    return stream_of(np.cumsum(rng.exponential(1 / rate_rps, n)).tolist(), *(x.tolist() for x in lengths))


# --- never below what a simulation shows ------------------------------------------------------------------

LIMITS = st.sampled_from([0.01, 0.03, 0.1, 0.4])


@st.composite
def objectives(draw: st.DrawFn) -> Slo:
    statistics = st.sampled_from(["mean", "p50", "p90", "p99"])
    ttft = draw(st.dictionaries(statistics, LIMITS, max_size=2))
    tpot = draw(st.dictionaries(statistics, st.sampled_from([0.004, 0.006, 0.01, 0.03]), max_size=2))
    e2el = draw(st.dictionaries(statistics, st.sampled_from([0.1, 0.3, 1.0]), max_size=1))
    if not ttft and not e2el:
        e2el = {"p90": draw(st.sampled_from([0.5, 2.0]))}
    return Slo(ttft_s=ttft, tpot_s=tpot, e2el_s=e2el)


@dataclass
class World:
    deployment: Deployment = field(repr=False)
    stream: RequestStream = field(repr=False)
    slo: Slo
    drawn: str

    def meets_slo(self, rate_rps: float) -> bool:
        return self.deployment.simulate(self.stream.at_rate(rate_rps), self.slo).meets_slo


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Mixed pools, one or two, or prefill and decode apart, under any policy and router, with memory tight or not."""
    apart = draw(st.booleans())

    def some_pool(role: str, name: str) -> Pool:
        policy = draw(st.one_of(st.just("vllm-fcfs"), st.sampled_from(sorted(POLICIES))))
        if role == "decode" and not POLICIES[policy].takes_over:
            policy = "vllm-fcfs"
        whole = POLICIES[policy].cuts_prompts == "never"
        seats = draw(st.sampled_from([2, 8, 32]))
        batching: dict[str, Any] = {
            "max_num_seqs": seats,
            "max_num_batched_tokens": 1024 if whole else draw(st.sampled_from([32, 128, 512])),
        }
        if "long_prefills" in POLICIES[policy].offers and draw(st.booleans()):
            batching["long_prefill_token_threshold"] = 16
        swaps = "swap" in POLICIES[policy].offers and draw(st.booleans())
        return pool(
            role,
            name=name,
            policy=policy,
            batching=batching,
            blocks=draw(st.sampled_from([72, 200, 1000])),
            kv_cache={"preemption": "swap" if swaps else "recompute"},
            instances=draw(st.integers(1, 3)),
            parallelism=Parallelism(pp=2 if draw(st.booleans()) and not swaps else 1),
            async_scheduling=draw(st.booleans()),
        )

    if apart:
        pools = [some_pool("prefill", "prefill"), some_pool("decode", "decode")]
    else:
        pools = [some_pool("mixed", name) for name in ("a", "b")[: draw(st.integers(1, 2))]]
    costs = LinearCosts(
        step_s=draw(st.sampled_from([1e-3, 4e-3])),
        per_token_s=draw(st.sampled_from([0.0, 2e-5])),
        per_context_s=draw(st.sampled_from([0.0, 3e-7, 1e-5])),
        per_pair_s=draw(st.sampled_from([0.0, 1e-7])),
    )
    deployment = deployed(*pools, costs=costs, router={"kind": draw(st.sampled_from(ROUTERS))})
    load = (
        draw(st.sampled_from([3, 100, 300])),
        draw(st.sampled_from([20.0, 200.0])),
        draw(st.sampled_from([10, 60, 150])),
        draw(st.sampled_from([3, 15, 60])),
        draw(st.integers(0, 99)),
    )
    return World(deployment, poisson(*load), draw(objectives()), f"{load} {costs} {deployment.plan}")


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_no_simulation_is_better_than_its_bound(world: World) -> None:
    deployment, stream, slo = world.deployment, world.stream, world.slo
    result = deployment.simulate(stream, slo)
    attained, offered = result.slo_attainment, stream.offered_rate_rps
    assert attained is not None
    assert offered is not None
    ceiling = attainment_bound(deployment, stream, slo)
    assert attained <= ceiling + 1e-12
    event(f"ceiling {ceiling:.1f}")
    bound = rate_bound(deployment, stream, slo)
    event(f"bound by {bound.by}")
    if bound.by == "capacity":
        return  # of what can go on for ever; a short run may see more
    assert not (result.meets_slo and offered > bound.rps * (1 + 1e-9))
    for factor in (1.001, 1.3, 4.0) if 0 < bound.rps < np.inf else ():
        assert not world.meets_slo(bound.rps * factor)
    if bound.rps == 0:
        assert not world.meets_slo(offered / 1000)
