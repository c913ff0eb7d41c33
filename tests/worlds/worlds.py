"""Random worlds by number: what must hold of every world, and laws between a world and the same one otherwise told.

    python -m tests.worlds.worlds --worlds 100000 --first 0 --journal worlds.txt

A number stands for SIZE worlds: CLUSTERS of them wired by hand and drawn by hypothesis from that seed, the others whole
plans (`tests.worlds.plans`). Numbers that failed once are kept in seeds.txt, plans that did in plans.jsonl. A campaign
with a journal goes on where it was.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from simtune.engine import POLICIES
from simtune.sim.drafting import AcceptanceSampler, drafting_terms
from simtune.sim.router import ByLength, RoundRobin
from simtune.sim.stations import passed
from simtune.specs.acceptance import Drift, DriftPoint, ExponentialDrift, LinearDrift, PerPosition, PerRank
from simtune.specs.speculation import Speculation
from simtune.specs.stages import Stage
from simtune.testing.clusters import (
    COLUMNS,
    EVEN,
    Cluster,
    SmallPool,
    check,
    check_nothing_is_left,
    clusters,
    even,
    of_policy,
)
from simtune.workload.graphs import FamilyGraph
from simtune.workload.requests import RequestStream
from tests.engine.small import SMALL
from tests.sim.test_speculative_world import AHEAD, SCHEMES, acceptance, drafter_for
from tests.worlds import plans

SIZE, CLUSTERS = 100, 10
PAST = Path(__file__).with_name("seeds.txt")
RENAMED = 7919
"""Blocks of prompts get other names: n becomes n * RENAMED + 1."""


OPTIONS: dict[str, dict[str, list[int]]] = {"layered-prefill": {"group_tokens": [8, 100, 512]}}
"""Of policies, on the scale of small worlds."""
FARTHEST = (
    PerPosition(conditional=(0.1, 0.9, 0.3, 0.2, 0.4)),
    PerRank(probability=((0.2, 0.1, 0.3), (0.6, 0.1, 0.1), (0.1, 0.2, 0))),
)
"""What acceptance drifts to."""


@st.composite
def any_world(draw: st.DrawFn) -> Cluster:
    """Under any policy, prefill and decode apart or not, failing or not, with drafts, pipelines, data-parallel
    attention, or one core to an instance, with pools for prompts of some lengths, or families of requests."""
    kind = draw(st.sampled_from(["drafts", "families", *["one by one"] * 4]))
    if kind == "drafts":
        return draw(drafting())
    name = draw(st.sampled_from(list(POLICIES)))
    options = {key: draw(st.sampled_from(values)) for key, values in OPTIONS.get(name, {}).items()}
    cluster = draw(of_policy(POLICIES[name], options, draw(st.sampled_from([{}, SMALL]))))
    front, back = (pool and _grouped(draw, pool) for pool in (cluster.front, cluster.back))
    assert front is not None
    cluster = _by_pools(draw, replace(cluster, front=front, back=back, cores=[]))
    return _in_families(draw, cluster) if kind == "families" else cluster


def _grouped(draw: st.DrawFn, pool: SmallPool) -> SmallPool:
    return replace(pool, dp=draw(st.sampled_from([1, 1, 2, 3]))) if pool.pp == 1 else pool


def _by_pools(draw: st.DrawFn, cluster: Cluster) -> Cluster:
    """Routers that tell pools apart have some to tell apart."""
    names = [f"front-{i}" for i in range(cluster.front.instances)]
    if cluster.back is not None or cluster.router not in (ByLength, RoundRobin) or draw(st.booleans()):
        return cluster
    values = [4, 30, 30, 200] if cluster.router is ByLength else [0.5, 1.0, 3.0]
    key = "longest" if cluster.router is ByLength else "weights"
    given_ = {name: draw(st.sampled_from(values)) for name in names if draw(st.booleans())}
    return replace(cluster, named=True, router_options={key: given_})


def _in_families(draw: st.DrawFn, cluster: Cluster) -> Cluster:
    """The same requests, so many as make whole families of a graph, all of whose pools are mixed and stay up."""
    graph, stream = draw(graphs()), cluster.stream
    families = -(-len(stream) // graph.size)
    at = np.arange(families * graph.size) % len(stream)
    arrival_s = None
    if stream.arrival_s is not None:
        arrival_s = np.repeat(stream.arrival_s[:families], graph.size)
    lengths = stream.prompt_tokens[at], stream.output_tokens[at]
    return replace(
        cluster,
        back=None,
        incidents=(),
        stream=replace(
            stream,
            arrival_s=arrival_s,
            prompt_tokens=lengths[0],
            output_tokens=lengths[1],
            class_index=stream.class_index[at],
            priority=stream.priority[at],
            hash_ids=None if stream.hash_ids is None else tuple(stream.hash_ids[i] for i in at.tolist()),
            graph=graph,
        ),
        predicted_tokens=np.array(cluster.predicted_tokens)[at].tolist(),
        deadlines=np.array(cluster.deadlines)[at].tolist(),
    )


@st.composite
def graphs(draw: st.DrawFn) -> FamilyGraph:
    """Up to four nodes, each after any of those before it."""
    nodes = draw(st.integers(1, 4))
    count = [draw(st.sampled_from([1, 1, 2, 4])) for _ in range(nodes)]
    ticks = st.sampled_from([0, 0, 7 * EVEN, 100 * EVEN * EVEN])
    return FamilyGraph(
        names=tuple("abcd"[:nodes]),
        count=tuple(count),
        first=tuple(draw(st.integers(1, n)) for n in count),
        after=tuple(tuple(i for i in range(node) if draw(st.booleans())) for node in range(nodes)),
        delay=tuple(draw(ticks) for _ in range(nodes)),
        since=tuple(draw(ticks) for _ in range(nodes)),
        inherits=(-1,) * nodes,
        reads=((),) * nodes,
    )


@st.composite
def drafting(draw: st.DrawFn) -> Cluster:
    """Under vLLM's policy, with drafts of any scheme, whose acceptance may drift."""
    cluster = draw(clusters(apart=draw(st.booleans()), failing=draw(st.booleans()), max_pp=2))
    name = draw(st.sampled_from(list(SCHEMES)))
    scheme, rates = SCHEMES[name]
    spec = Speculation(drafter=drafter_for(scheme), scheme=scheme, acceptance="assumed")
    front, back = (pool and replace(pool, budget=max(8, pool.budget)) for pool in (cluster.front, cluster.back))
    assert front is not None
    drift = {"drift": draw(_drifts(rates, cluster))} if isinstance(rates, PerPosition | PerRank) else {}
    kept = AcceptanceSampler(scheme, acceptance(rates, **drift), cluster.stream, draw(st.integers(0, 9)))
    options = {"speculation": drafting_terms(spec, kept), "prefix_caching": draw(st.booleans())}
    ahead = name in AHEAD and draw(st.booleans())
    return replace(cluster, front=front, back=back, async_scheduling=ahead, options=options, cores=[])


def _drifts(rates: PerPosition | PerRank, cluster: Cluster) -> st.SearchStrategy[Drift | None]:
    """By requests or seconds, in a line or as an exponential, or not at all."""
    later = FARTHEST[isinstance(rates, PerRank)]
    over = st.sampled_from(["requests"] if cluster.stream.arrival_s is None else ["requests", "seconds"])
    lines = st.builds(LinearDrift, over=over, points=st.just((DriftPoint(at=0.05, rates=later),)))
    return st.none() | lines | st.builds(ExponentialDrift, over=over, to=st.just(later), constant=st.just(3.0))


@st.composite
def any_stages(draw: st.DrawFn) -> tuple[Stage, ...]:
    """Up to three stages, which may go on with one another."""
    parts, stages = draw(st.sampled_from([1, 1, 3])), []
    seconds = st.floats(1e-4, 0.05)
    for i in range(draw(st.integers(1, 3))):
        stages.append(
            Stage(
                name="abc"[i],
                pool="front",
                place=draw(st.sampled_from(["before", "beside"])),
                after=tuple("abc"[j] for j in range(i) if draw(st.booleans())),
                instances=draw(st.integers(1, 3)),
                seconds=draw(seconds),
                seconds_per_token=draw(seconds) / 100,
                parts=parts,
            )
        )
    return tuple(stages)


def twice(cluster: Cluster) -> Cluster:
    """Twice the instances, and every request twice at its moment."""
    stream = cluster.stream
    assert stream.arrival_s is not None
    return replace(
        cluster,
        front=replace(cluster.front, instances=2 * cluster.front.instances),
        stream=replace(
            stream,
            arrival_s=np.repeat(stream.arrival_s, 2),
            prompt_tokens=np.repeat(stream.prompt_tokens, 2),
            output_tokens=np.repeat(stream.output_tokens, 2),
            class_index=np.repeat(stream.class_index, 2),
            priority=np.repeat(stream.priority, 2),
            hash_ids=None if stream.hash_ids is None else tuple(row for row in stream.hash_ids for _ in range(2)),
        ),
        predicted_tokens=np.repeat(cluster.predicted_tokens or [], 2).tolist(),
        deadlines=np.repeat(cluster.deadlines or [], 2).tolist(),
        cores=[],
    )


def check_twice(cluster: Cluster) -> None:
    """Twice the cards serve twice the load exactly as well, in turn: every instance sees what its like saw."""
    cluster = replace(cluster, router=RoundRobin, router_options={}, incidents=(), cores=[])
    if (
        cluster.stream.graph is not None
        or cluster.back is not None
        or cluster.stream.arrival_s is None
        or "speculation" in cluster.options
    ):
        return  # what is kept of a request's drafts depends on its number
    one, two = cluster.run(), twice(cluster).run()
    for name in ("arrival", "scheduled", "first_token", "finish", "preemptions"):
        for half in (0, 1):
            same = getattr(two, name)[half::2].tolist() == getattr(one, name).tolist()
            assert same, f"{name} of request copies {half} differs with twice the cards and twice the rate"
    assert two.steps == 2 * one.steps, "twice the cards take twice the steps"


def check_renamed(cluster: Cluster) -> None:
    """What the blocks of prompts are called makes no difference; that they are the same does."""
    ids = cluster.stream.hash_ids
    if ids is None or cluster.router.__name__ == "PrefixAware":
        return
    others = tuple(tuple(RENAMED * name + 1 for name in row) for row in ids)
    one = replace(cluster, cores=[]).run()
    two = replace(cluster, stream=replace(cluster.stream, hash_ids=others), cores=[]).run()
    for name in COLUMNS:
        assert getattr(one, name).tolist() == getattr(two, name).tolist(), f"{name} differs where blocks are renamed"


def slower(cluster: Cluster, times: float) -> Cluster:
    """The same at another speed: all that takes time takes so many times as long, and requests come as much later."""
    stream = cluster.stream
    at = None if stream.arrival_s is None else np.array([times * even(x) for x in stream.arrival_s.tolist()])
    graph = stream.graph and replace(
        stream.graph,
        delay=tuple(round(times * ticks) for ticks in stream.graph.delay),
        since=tuple(round(times * ticks) for ticks in stream.graph.since),
    )
    incidents = tuple(
        incident._replace(at_s=times * even(incident.at_s), for_s=times * even(incident.for_s))
        for incident in cluster.incidents
    )
    return replace(
        cluster,
        slower=times,
        stream=replace(stream, arrival_s=at, think_s=times * even(stream.think_s), graph=graph),
        stale_s=times * even(cluster.stale_s),
        incidents=incidents,
        deadlines=cluster.deadlines and [times * even(x) for x in cluster.deadlines],
        cores=[],
    )


def check_slower(cluster: Cluster) -> None:
    """At half the speed the same happens, and every time is twice as long to the tick."""
    if cluster.back is not None or cluster.imbalanced or cluster.options.get("group_tokens", EVEN) < 100:
        return  # transfers are rounded by themselves, imbalance costs ticks, and steps of many parts are uneven
    one, two = slower(cluster, 1.0).run(), slower(cluster, 2.0).run()
    for name in ("arrival", "scheduled", "first_token", "finish"):
        ticks = getattr(one, name)
        assert np.where(ticks < 0, -1, 2 * ticks).tolist() == getattr(two, name).tolist(), f"{name} at half the speed"
    assert one.preemptions.tolist() == two.preemptions.tolist()
    assert one.steps == two.steps


def check_families(cluster: Cluster) -> None:
    """Jumps and single steps agree; members come when their graph says, and are answered, or aborted once enough of
    their node are."""
    stream, graph = cluster.stream, cluster.stream.graph
    assert graph is not None
    stepped, jumped = cluster.run(single_steps=True), cluster.run()
    for name in COLUMNS:
        assert getattr(stepped, name).tolist() == getattr(jumped, name).tolist(), f"{name} of families differs"
    assert stepped.stopped == jumped.stopped, "others are aborted, or later"
    check_nothing_is_left(cluster)
    assert ((jumped.finish < 0) == np.isin(np.arange(len(stream)), [*jumped.stopped])).all(), "answered, or aborted"
    assert all(tokens < stream.output_tokens[number] for number, tokens in jumped.stopped.items())
    ends = np.where(jumped.finish < 0, np.iinfo(np.int64).max, jumped.finish).reshape(-1, graph.size)
    comes = jumped.arrival.reshape(-1, graph.size)
    over: list[Any] = []
    for node, begin in enumerate(graph.begin):
        members = slice(begin, begin + graph.count[node])
        over.append(np.sort(ends[:, members], axis=1)[:, graph.first[node] - 1])
        behind = [over[other] for other in graph.after[node]]
        if behind:
            sent = np.maximum.reduce(behind) + graph.delay[node]
            if not any(graph.since):
                assert (comes[:, members] == sent[:, None]).all(), "a node is not sent when those before it are over"
            assert (comes[:, members] >= sent[:, None]).all(), "a node is sent before those before it are over"
        assert (comes[:, members] == comes[:, [begin]]).all(), "members of a node come at different times"


def check_stages(cluster: Cluster, stages: Sequence[Stage]) -> None:
    """What comes out of stages is what queues worked out one by one say; and jumps agree with single steps behind."""
    stream = cluster.stream
    if stream.arrival_s is None or stream.graph is not None or "speculation" in cluster.options:
        return  # what is kept of a request's drafts depends on its number, and stages may change that
    stream = replace(stream, arrival_s=stream.arrival_s + 1e-7 * np.arange(len(stream)))
    through = passed(Behind(stages), stream, {})  # type: ignore[arg-type]
    assert through.arrival_s is not None
    assert through.beside_s is not None
    left = queued(stages, stream)
    before = [left[stage.name] for stage in stages if stage.place == "before"]
    beside = [left[stage.name] for stage in stages if stage.place == "beside"]
    ready = np.maximum.reduce([stream.arrival_s, *before])
    order = np.argsort(ready, kind="stable")
    assert through.stream.arrival_s == pytest.approx(ready[order], abs=1e-9)
    assert through.beside_s == pytest.approx(np.maximum.reduce([0 * ready, *beside])[order], abs=1e-9)
    behind = replace(cluster, stream=through.stream, cores=[])
    stepped, jumped = (through.written(behind.run(single_steps=single)) for single in (True, False))
    for name in COLUMNS:
        assert getattr(stepped, name).tolist() == getattr(jumped, name).tolist(), f"{name} behind stages differs"
    assert (jumped.arrival <= jumped.scheduled).all()
    assert (jumped.first_token <= jumped.finish).all()


class Behind(NamedTuple):
    """All that stages ask of a plan."""

    stages: Sequence[Stage]
    name: str = "behind"


def queued(stages: Sequence[Stage], stream: RequestStream) -> dict[str, Any]:
    """When each request leaves each stage, worked out queue by queue: each part goes to the server that is free first,
    in the order in which they come."""
    ends: dict[str, Any] = {}
    of_parts: dict[str, Any] = {}
    assert stream.arrival_s is not None
    for stage in stages:
        ready = np.repeat(stream.arrival_s[:, None], stage.parts, axis=1)
        ready = np.maximum.reduce([ready, *(of_parts[name] for name in stage.after)])
        seconds = (stage.seconds + stage.seconds_per_token * stream.prompt_tokens) / stage.parts
        free, done = [0.0] * stage.instances, np.zeros_like(ready)
        for at in np.argsort(ready, axis=None, kind="stable").tolist():
            number, part = divmod(at, stage.parts)
            begin = max(heapq.heappop(free), ready[number, part])
            done[number, part] = begin + seconds[number]
            heapq.heappush(free, done[number, part])
        of_parts[stage.name], ends[stage.name] = done, done.max(axis=1)
    return ends


def run(number: int) -> None:
    """Check all worlds of a number. Raise AssertionError for one that fails."""
    run_clusters(number)
    plans_each = SIZE - CLUSTERS
    for plan in range(plans_each * number, plans_each * (number + 1)):
        plans.check(plan)


def run_clusters(number: int, size: int = CLUSTERS) -> None:
    """Check clusters of a number. Raise AssertionError, with the smallest one that fails."""

    @hypothesis.seed(number)
    @hypothesis.settings(
        max_examples=size, deadline=None, database=None, derandomize=False, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(any_world(), st.none() | any_stages())
    def hold(cluster: Cluster, stages: tuple[Stage, ...] | None) -> None:
        if cluster.stream.graph is not None:
            check_families(cluster)
        else:
            check(cluster)
        if stages is not None:
            check_stages(cluster, stages)
        check_twice(cluster)
        check_renamed(cluster)
        check_slower(cluster)

    hold()


def past(path: Path = PAST) -> list[int]:
    """Numbers of which a world failed once."""
    return [int(line.split("#")[0]) for line in path.read_text().splitlines() if line.split("#")[0].strip()]


def main() -> int:
    """Try many numbers, and say which failed."""
    options = argparse.ArgumentParser()
    options.add_argument("--worlds", type=int, default=100_000)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--seconds", type=float, default=float("inf"), help="begin no further number after these")
    options.add_argument("--journal", type=Path, help="file of numbers that were tried, each with ok or failed")
    given_ = options.parse_args()
    begun, fates = time.monotonic(), _fates(given_.journal)
    # What was imported stays: looking through it for garbage takes a tenth of the time.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    numbers = range(given_.first, given_.first + -(-given_.worlds // SIZE))
    for number in numbers:
        if time.monotonic() - begun > given_.seconds:
            break
        if number in fates:
            continue
        try:
            run(number)
            fates[number] = "ok"
        except Exception:
            fates[number] = "failed"
            print(f"{number} failed; add it to {PAST.name}, or `plans.stored` to {plans.PAST.name}", flush=True)
            traceback.print_exc()
        if given_.journal is not None:
            with given_.journal.open("a") as file:
                file.write(f"{number} {fates[number]}\n")
    tried = [number for number in numbers if number in fates]
    failed = [number for number in tried if fates[number] == "failed"]
    seconds = time.monotonic() - begun, time.process_time()
    print(f"{SIZE * len(tried):,} worlds; {seconds[0]:,.0f} s, {seconds[1]:,.0f} of the processor; "
          f"of {len(failed)} numbers a world failed: {failed}")  # fmt: skip
    return 1 if failed else 0


def _fates(journal: Path | None) -> dict[int, str]:
    """Return how each number in a journal ended."""
    if journal is None or not journal.exists():
        return {}
    rows = [line.split() for line in journal.read_text().splitlines()]
    return {int(number): fate for number, fate in rows}


if __name__ == "__main__":
    sys.exit(main())
