"""The bounds against the simulator on random small worlds, against the study they come from, and by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.costs.protocol import StepCosts
from simtune.engine import POLICIES
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.encoder import Encoder
from simtune.specs.media import LoadImages, LoadVideos
from simtune.specs.plan import KvLink, Plan
from simtune.specs.pool import Batching, KvCache, Parallelism, Pool
from simtune.specs.schemes import Chain
from simtune.specs.stages import Stage
from simtune.specs.workload import (
    ClosedLoop,
    FixedLength,
    GraphNode,
    Lognormal,
    Poisson,
    SharedPrefix,
    Slo,
    Workload,
)
from simtune.testing.clusters import stream_of
from simtune.tuner.bounds import PlanBounds, attainment_bound, rate_bound
from simtune.tuner.bounds.best_case import sustained_rps
from simtune.tuner.bounds.floors import least_e2el_s, least_family_s, least_makespan_s
from simtune.tuner.bounds.limits import of_statistics
from simtune.tuner.bounds.windows import WindowJobs, first_come, of_each
from simtune.tuner.space.candidates import Candidate
from simtune.workload.requests import RequestStream, build_stream
from tests.costs.made_up import hardware as experts_hardware
from tests.costs.made_up import pool as experts_pool
from tests.sim.test_data_parallel import EXPERTS
from tests.speculation.test_study import draft
from tests.speculation.test_study import question as drafting_question
from tests.tuner.bound_worlds import plans, worlds

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
SLOW = LinearCosts(step_s=4e-3, per_token_s=3e-4)
BATCHING = Batching(max_num_seqs=16, max_num_batched_tokens=512)
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
    link = KvLink(bytes_per_s=5e9, setup_s=1e-4, descriptor_s=0)
    apart: dict[str, Any] = {} if len({p.role for p in pools}) == 1 else {"link": link}
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
def drawn_worlds(draw: st.DrawFn) -> World:
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
        if "prefill_interval" in POLICIES[policy].offers and draw(st.booleans()):
            batching |= {"prefill_schedule_interval": draw(st.sampled_from([1, 4, 30])), "max_num_active_seqs": 2}
        if (
            chunks := draw(st.sampled_from([None, None, "one", "fixed", "dynamic"]))
        ) != "dynamic" or policy == "sglang":
            batching["chunk_pipeline"] = chunks
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
    local = draw(st.sampled_from([None, None, {"below_tokens": 40}])) if apart else None
    router = {"kind": draw(st.sampled_from(ROUTERS))}
    deployment = deployed(*pools, costs=costs, router=router, local_prefill=local)
    load = (
        draw(st.sampled_from([3, 100, 300])),
        draw(st.sampled_from([20.0, 200.0])),
        draw(st.sampled_from([10, 60, 150])),
        draw(st.sampled_from([3, 15, 60])),
        draw(st.integers(0, 99)),
    )
    return World(deployment, poisson(*load), draw(objectives()), f"{load} {costs} {deployment.plan}")


@given(drawn_worlds())
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
    assert not (result.meets_slo and offered > bound.rps * (1 + 1e-9))
    for factor in (1.001, 1.3, 4.0) if 0 < bound.rps < np.inf else ():
        assert not world.meets_slo(bound.rps * factor)
    if bound.rps == 0:
        assert not world.meets_slo(offered / 1000)
    floors = PlanBounds(deployment, stream)
    assert least_makespan_s(floors) <= result.duration_s
    assert least_e2el_s(floors) <= float(result.e2el_s.mean()) * (1 + 1e-9)


# --- with tables ------------------------------------------------------------------------------------------

TABLED: dict[str, dict[str, Any]] = {
    "plain": {},
    "host in the way": {"async_scheduling": False, "cuda_graphs": False},
    "pipeline": {"parallelism": Parallelism(pp=2)},
    "divided prompts": {"parallelism": Parallelism(prefill_context_parallel=2)},
    "tensor parallel": {"parallelism": Parallelism(tp=2), "instances": 2},
    "prefix caching": {"kv_cache": {"prefix_caching": True, "num_blocks": 700}},
    "little memory": {"kv_cache": {"num_blocks": 200}},
    "router": {"instances": 2, "router": {"kind": "least_outstanding"}},
}


def _never_above(deployment: Deployment, stream: RequestStream, slo: Slo) -> None:
    """At rates about the bound, and far above."""
    bound = rate_bound(deployment, stream, slo)
    assert 0 < bound.rps < np.inf
    for factor in (1.0005, 1.1, 2.0, 10.0):
        beyond = stream.at_rate(bound.rps * factor)
        assert not deployment.simulate(beyond, slo).meets_slo, (bound, factor)
    for factor in (0.3, 1.0, 3.0):
        near = stream.at_rate(bound.rps * factor)
        attained = deployment.simulate(near, slo).slo_attainment
        assert attained is not None
        assert attained <= attainment_bound(deployment, near, slo) + 1e-12


@pytest.mark.parametrize("given", TABLED.values(), ids=TABLED)
def test_bounds_hold_of_compiled_costs(given: dict[str, Any]) -> None:
    workload = Workload(
        name="load",
        arrivals=Poisson(rate_rps=10.0),
        prompt=Lognormal(mean_tokens=500, sigma=0.6, max_tokens=1400),
        output=Lognormal(mean_tokens=60, sigma=0.6, max_tokens=500),
        shared_prefix=SharedPrefix(groups=3, tokens=320),
    )
    given = dict(given)
    router = {"router": given.pop("router")} if "router" in given else {}
    deployment = deployed(pool(**{"max_model_len": 2048, **given}), costs=None, **router)
    stream = build_stream(workload, None, requests=250, seed=1)
    for slo in (Slo(ttft_s={"p90": 0.3}, tpot_s={"p90": 0.02}), Slo(ttft_s={"mean": 0.1}, e2el_s={"p90": 2.0})):
        _never_above(deployment, stream, slo)


@pytest.mark.parametrize("apart", [0, 1, 3])
def test_bounds_hold_of_prompts_with_images(apart: int) -> None:
    """A prompt that waits for its image lets those behind it pass, as it does at `apart` servers that encode; images
    come again, some have a video."""
    model = load_model("qwen2.5-vl-7b")
    sizes = [{"width": 1280, "height": 720}]
    images = LoadImages.model_validate(
        {"per_request": [1, 3], "sizes": sizes, "repeats": {"share": 0.5, "images": 4}, "share": 0.6}
    )
    workload = Workload(
        name="load",
        arrivals=Poisson(rate_rps=4.0),
        prompt=Lognormal(mean_tokens=200, sigma=0.6, max_tokens=900),
        output=Lognormal(mean_tokens=40, sigma=0.6, max_tokens=200),
        images=images,
        videos=LoadVideos.model_validate({"share": 0.3, "sizes": [{"width": 320, "height": 240}], "seconds": 4}),
    )
    encoder: dict[str, Any] = {} if apart else {"encoder": Encoder(cache_size=1200)}
    given: dict[str, Any] = {"kv_cache": {"prefix_caching": True}, "batching": {"max_num_batched_tokens": 2048}}
    parts = pool(max_model_len=8192, **given, **encoder)
    stage = {"name": "encode", "pool": "mixed", "encoder": "weights", "devices": 1, "instances": apart}
    stages = (Stage.model_validate(stage),) if apart else None
    plan = Plan(name="plan", model=model.name, pools=(parts,), stages=stages)
    deployment = deploy(plan, model, HARDWARE)
    stream = build_stream(workload, None, requests=150, seed=1, towers=model.towers)
    for slo in (Slo(ttft_s={"p90": 0.5}, tpot_s={"p90": 0.03}), Slo(ttft_s={"mean": 0.3}, e2el_s={"p90": 3.0})):
        _never_above(deployment, stream, slo)


def test_bounds_hold_with_drafts() -> None:
    d = draft(0.9, 0.8, 0.7, scheme=Chain(tokens=3))
    q = drafting_question(d)
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    candidate = Candidate.mixed("h100-sxm", 1, drafter="eagle3", speculation=d.speculation(Chain(tokens=3)), **settings)
    _never_above(q.deploy(candidate, 8192), q.stream(candidate), Slo(ttft_s={"p90": 0.5}, tpot_s={"p90": 0.01}))


def test_bounds_hold_where_groups_share_experts() -> None:
    given = {"max_model_len": 512, "kv_cache": KvCache(num_blocks=400), "batching": BATCHING}
    parts = experts_pool(attention_dp=2, expert_parallel=True).model_copy(update=given)
    plan = Plan(name="plan", model=EXPERTS.name, pools=(parts,))
    deployment = deploy(plan, EXPERTS, experts_hardware())
    stream = poisson(200, 50.0, 30, 20)
    floor = PlanBounds(deployment, stream)
    slo = Slo(
        ttft_s={"p90": 20 * float(floor.ttft_s.mean())},
        e2el_s={"p90": 4 * float((floor.ttft_s + floor.decode_s).mean())},
    )
    _never_above(deployment, stream, slo)


def test_classes_are_bounded_by_their_own_limits() -> None:
    stream = poisson(300, 20.0, 80, 20)
    strict, loose = Slo(ttft_s={"p90": 0.05}, tpot_s={"p90": 0.02}), Slo(e2el_s={"p90": 30.0})
    halves = replace(stream, class_index=np.arange(300) % 2, class_names=("strict", "loose"), slos=(strict, loose))
    deployment = deployed(pool(instances=2))
    _never_above(deployment, halves, Slo())
    relaxed = replace(halves, slos=(loose, loose))
    assert rate_bound(deployment, halves, Slo()).rps < rate_bound(deployment, relaxed, Slo()).rps


# --- floors of latencies ----------------------------------------------------------------------------------


def test_the_makespan_is_bounded_by_work_and_by_the_longest_request() -> None:
    deployment = deployed(pool(instances=2))
    at_once = stream_of([0.0] * 100, [100] * 100, [20] * 100)
    least_s, took_s = least_makespan_s(PlanBounds(deployment, at_once)), deployment.simulate(at_once).duration_s
    alone_s = least_makespan_s(PlanBounds(deployment, stream_of([0.0], [100], [20])))
    assert 3 * alone_s < least_s <= took_s < 1.5 * least_s, "100 requests on 32 seats: their work is what takes long"
    late = stream_of([0.0] * 99 + [60.0], [100] * 100, [20] * 100)
    assert least_makespan_s(PlanBounds(deployment, late)) == pytest.approx(60 + alone_s)
    apart = deployed(pool("prefill"), pool("decode"))
    least_s, took_s = least_makespan_s(PlanBounds(apart, at_once)), apart.simulate(at_once).duration_s
    assert 0.5 * took_s < least_s <= took_s


def test_a_batch_in_a_closed_loop_is_bounded_by_its_work() -> None:
    load = Workload(
        name="load",
        batch=True,
        arrivals=ClosedLoop(users=40),
        prompt=FixedLength(tokens=100),
        output=FixedLength(tokens=20),
    )
    stream, deployment = build_stream(load, None, requests=200, seed=0), deployed(pool())
    assert 0 < least_makespan_s(PlanBounds(deployment, stream)) <= deployment.simulate(stream).duration_s


GRAPHS: dict[str, list[GraphNode]] = {
    "fork and join": [
        GraphNode(name="plan"),
        GraphNode(name="branch", count=4, after=("plan",), inherits="plan", delay_s=0.5),
        GraphNode(name="join", after=("branch",), reads=("branch",)),
    ],
    "first of several": [
        GraphNode(name="try", count=6, first=2, output=Lognormal(mean_tokens=40, sigma=1.0, max_tokens=120)),
        GraphNode(name="check", after=("try",), from_s=1.0),
    ],
}


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("nodes", GRAPHS.values(), ids=GRAPHS)
def test_bounds_hold_of_families(nodes: list[GraphNode], caching: bool) -> None:
    load = Workload(
        name="families",
        arrivals=Poisson(rate_rps=5.0),
        prompt=Lognormal(mean_tokens=40, sigma=0.5, max_tokens=90),
        output=Lognormal(mean_tokens=15, sigma=0.5, max_tokens=40),
        graph=tuple(nodes),
    )
    deployment = deployed(pool(max_model_len=1024, kv_cache={"prefix_caching": caching}), costs=None)
    stream = build_stream(load, None, requests=60, seed=3)
    result, floors = deployment.simulate(stream), PlanBounds(deployment, stream)
    took_s = result.values("family")
    assert (floors.family_s <= took_s).all()
    assert 0 < least_family_s(floors) <= float(took_s.mean())
    assert least_e2el_s(floors) <= float(result.values("e2el").mean())
    assert least_makespan_s(floors) <= result.duration_s
    # Members of later nodes arrive after their family, and some are aborted: no window holds their work.
    bound = rate_bound(deployment, stream, Slo(e2el_s={"p90": float(np.percentile(result.values("e2el"), 90))}))
    assert bound.rps > 5.0
    at_once = stream.at_rate(1e6)
    assert stream.arrivals / deployment.simulate(at_once).duration_s <= sustained_rps(deployment, stream)


def test_a_family_that_takes_too_long_alone_is_ruled_out() -> None:
    load = Workload(
        name="families",
        arrivals=Poisson(rate_rps=5.0),
        prompt=FixedLength(tokens=40),
        output=FixedLength(tokens=15),
        graph=(GraphNode(name="ask"), GraphNode(name="tool", after=("ask",), delay_s=3.0)),
    )
    stream, deployment = build_stream(load, None, requests=40, seed=0), deployed(pool())
    assert rate_bound(deployment, stream, Slo(family_s={"p90": 3.0})) == (0.0, "floor")
    assert rate_bound(deployment, stream, Slo(family_s={"p90": 4.0})).rps == np.inf


# --- the study that they come from ------------------------------------------------------------------------

PLANS = list(plans())
STUDIED = {1: (11, 12, 13), 5: (300, 0, 21), 7: (300, 42, 8)}
"""Of some worlds: requests that the best plan serves within the limits, plans that can serve none, and simulations that
the study's own search took (its oracle bounds.json, with limits in order of arrival)."""


@pytest.mark.parametrize("number", STUDIED)
def test_the_study_is_reproduced(number: int) -> None:
    """136 plans, best bound first, until no bound is above the best: the optimum, in about as many simulations."""
    world = next(islice(worlds(42), number, None))
    best, none_at_all, simulations = STUDIED[number]
    ceilings = [round(300 * attainment_bound(plan, world.stream, world.slo)) for plan in PLANS]
    assert ceilings.count(0) == none_at_all
    known: dict[int, int] = {}

    def good(at: int) -> int:
        if at not in known:
            known[at] = int(PLANS[at].simulate(world.stream, world.slo).good.sum())
        return known[at]

    incumbent = -1
    for at in sorted(range(len(PLANS)), key=lambda at: -ceilings[at]):
        if ceilings[at] <= incumbent:
            break
        incumbent = max(incumbent, good(at))
    assert incumbent == best
    assert len(known) <= 1.5 * simulations
    for at in range(number, len(PLANS), 17):
        assert good(at) <= min(ceilings[at], best)


def test_a_class_of_plans_is_bounded_at_its_most_favourable_member() -> None:
    for world in islice(worlds(77), 4):
        for tp in (1, 4):
            members = [plan for plan in PLANS if plan.plan.name.startswith(f"tp{tp}-t")]
            (widest,) = (plan for plan in members if plan.plan.name == f"tp{tp}-t4096-s256")
            most = attainment_bound(widest, world.stream, world.slo)
            rate = rate_bound(widest, world.stream, world.slo).rps
            for plan in members[::3]:
                assert attainment_bound(plan, world.stream, world.slo) <= most + 1e-12
                assert rate_bound(plan, world.stream, world.slo).rps <= rate * (1 + 1e-3)


def test_the_order_of_arrival_bounds_only_who_keeps_it() -> None:
    """Under shortest first many more are in time than could be in order of arrival, and no more than any policy can."""
    stream = poisson(300, 60.0, 100, 3)
    slo = Slo(ttft_s={"p50": 0.1})
    batching = {"prediction_sigma": 0.0}
    shortest = deployed(pool(policy="shortest-predicted-first", batching=batching), costs=SLOW)
    in_order = deployed(pool(), costs=SLOW)
    good = shortest.simulate(replace(stream, output_tokens=stream.prompt_tokens // 20 + 1), slo).slo_attainment
    stream = replace(stream, output_tokens=stream.prompt_tokens // 20 + 1)
    assert good is not None
    assert good <= attainment_bound(shortest, stream, slo)
    assert good > attainment_bound(in_order, stream, slo)
    assert rate_bound(in_order, stream, slo).rps < rate_bound(shortest, stream, slo).rps
    assert rate_bound(in_order, stream, slo).by == "order of arrival"


@pytest.mark.parametrize("policy", [name for name, policy in sorted(POLICIES.items()) if policy.first_come])
def test_who_says_so_keeps_the_order_of_arrival(policy: str) -> None:
    for seed, blocks in ((0, 66), (1, 130), (2, 1000)):
        batching = {"max_num_seqs": 8, "max_num_batched_tokens": 1024 if blocks == 1000 else 512}
        deployment = deployed(pool(policy=policy, blocks=blocks, batching=batching, instances=2), costs=SLOW)
        stream = poisson(120, 40.0, 120, 60, seed)
        first = deployment.simulate(stream).first_token_s
        for core in (first[::2], first[1::2]):
            assert (np.diff(core) >= 0).all()


# --- by hand ----------------------------------------------------------------------------------------------


def test_one_after_the_other() -> None:
    arrival_s, works = np.array([0.0, 1.0, 1.0, 10.0]), np.array([3.0, 5.0, 1.0, 1.0])
    assert first_come(arrival_s, works, of_each(np.array([0, 0, 1, 0]))).tolist() == [3.0, 8.0, 2.0, 11.0]


def test_a_window_drops_its_largest_works() -> None:
    """Three works of 4, 3 and 2 s within 6 s of each arrival, which come within 1 s: one must miss; at leisure none."""

    def jobs(gap_s: float) -> WindowJobs:
        arrival_s = np.array([0.0, gap_s, 2 * gap_s])
        return WindowJobs(arrival_s, np.zeros(3), np.full(3, 6.0), [np.array([4.0, 3.0, 2.0])], 1.0)

    assert jobs(0.5).must_miss() == 1
    assert jobs(2.0).must_miss() == 0
    # With all of them 9 s of work fit into 6 s and the arrivals: three times as much time between these as 1 s has.
    assert jobs(0.5).highest_rate(0) == pytest.approx(1 / 3)
    assert jobs(0.5).highest_rate(1) == np.inf


@pytest.mark.parametrize("speed", [0.01, 0.3, 3.0, 100.0])
def test_servers_that_are_as_much_faster_as_works_are_larger_make_no_difference(speed: float) -> None:
    draw = np.random.default_rng(4)
    arrival_s = np.sort(draw.uniform(0, 10.0, 60))
    lead_s, slack_s, work_s = draw.uniform(0, 0.5, 60), draw.uniform(0.5, 2.0, 60), draw.exponential(0.5, 60)
    plain = WindowJobs(arrival_s, lead_s, slack_s, [work_s, work_s[::-1]], 1.0)
    scaled = WindowJobs(arrival_s, lead_s, slack_s, [speed * work_s, speed * work_s[::-1]], speed)
    assert plain.must_miss() == scaled.must_miss() > 0
    for allowed in (0, 6, 20):
        factor = plain.highest_rate(allowed)
        assert 0 < factor < np.inf
        assert scaled.highest_rate(allowed) == pytest.approx(factor)
        assert scaled.highest_rate(allowed, below=1.01 * factor) == pytest.approx(factor)
        assert scaled.highest_rate(allowed, below=0.99 * factor) == np.inf


def test_a_percentile_leaves_so_many_out_and_a_mean_by_markov() -> None:
    stream = poisson(100, 20.0, 50, 20)
    lines, means = of_statistics(stream, Slo(ttft_s={"p90": 1.0, "mean": 0.5}))
    assert [(line.allowed, line.ttft_s[0]) for line in lines[:1]] == [(100 - 1 - 89, 1.0)]
    assert [(line.allowed, line.ttft_s[0]) for line in lines[1:-1]] == [(66, 0.75), (24, 2.0), (4, 10.0)]
    assert [(mean.metric, mean.limit_s) for mean in means] == [("ttft", 0.5)]


def test_what_nothing_bounds_and_what_cannot_be_at_all() -> None:
    stream, deployment = poisson(100, 20.0, 50, 20), deployed(pool())
    assert rate_bound(deployment, stream, Slo(tpot_s={"p99": 1.0})) == (np.inf, "nothing")
    assert rate_bound(deployment, stream, Slo(tpot_s={"p99": 1e-4})) == (0.0, "floor")
    long = replace(stream, prompt_tokens=stream.prompt_tokens * 0 + 512)
    assert rate_bound(deployment, long, Slo(ttft_s={"p99": 1.0})) == (0.0, "length")
    assert attainment_bound(deployment, stream, Slo()) == 1.0


def test_a_link_bounds_what_is_sent_over_it() -> None:
    stream = poisson(300, 20.0, 200, 3)
    slow = KvLink(bytes_per_s=1e8, setup_s=0.0, descriptor_s=0.0)
    plan = Plan(name="plan", model=MODEL.name, pools=(pool("prefill"), pool("decode")), link=slow)
    deployment = deploy(plan, MODEL, HARDWARE, COSTS)
    slo = Slo(e2el_s={"p90": 3.0})
    bound = rate_bound(deployment, stream, slo)
    assert bound.by == "link"
    bytes_each = float((-(-stream.prompt_tokens // 16)).mean()) * deployment.pools[0].kv_block_bytes
    assert 1e8 / bytes_each < bound.rps < 2.5 * 1e8 / bytes_each
    _never_above(deployment, stream, slo)
