"""Random worlds by number: what must hold of every world, and laws between a world and the same one otherwise told.

    python -m tests.worlds.worlds --worlds 100000 --first 0

A number stands for SIZE worlds, drawn by hypothesis from that seed; numbers that failed once are kept in seeds.txt.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from simtune.engine import POLICIES
from simtune.sim.drafting import drafting_terms
from simtune.sim.router import RoundRobin
from simtune.specs.speculation import Speculation
from simtune.testing.clusters import COLUMNS, Cluster, SmallPool, check, clusters, even, of_policy
from tests.sim.test_speculative_world import AHEAD, SCHEMES, drafter_for, sampler

SIZE = 100
PAST = Path(__file__).with_name("seeds.txt")
RENAMED = 7919
"""Blocks of prompts get other names: n becomes n * RENAMED + 1."""


@st.composite
def any_world(draw: st.DrawFn) -> Cluster:
    """Under any policy with its defaults, prefill and decode apart or not, failing or not, with drafts, pipelines,
    data-parallel attention, or one core to an instance."""
    if draw(st.integers(0, 4)) == 0:
        return draw(drafting())
    cluster = draw(st.sampled_from(list(POLICIES.values())).flatmap(of_policy))
    front, back = (pool and _grouped(draw, pool) for pool in (cluster.front, cluster.back))
    assert front is not None
    return replace(cluster, front=front, back=back, cores=[])


def _grouped(draw: st.DrawFn, pool: SmallPool) -> SmallPool:
    return replace(pool, dp=draw(st.sampled_from([1, 1, 2, 3]))) if pool.pp == 1 else pool


@st.composite
def drafting(draw: st.DrawFn) -> Cluster:
    """Under vLLM's policy, with drafts of any scheme."""
    cluster = draw(clusters(apart=draw(st.booleans()), failing=draw(st.booleans()), max_pp=2))
    name = draw(st.sampled_from(list(SCHEMES)))
    scheme, rates = SCHEMES[name]
    spec = Speculation(drafter=drafter_for(scheme), scheme=scheme, acceptance="assumed")
    front, back = (pool and replace(pool, budget=max(8, pool.budget)) for pool in (cluster.front, cluster.back))
    assert front is not None
    terms = drafting_terms(spec, sampler(scheme, rates, cluster.stream, draw(st.integers(0, 9))))
    options = {"speculation": terms, "prefix_caching": draw(st.booleans())}
    ahead = name in AHEAD and draw(st.booleans())
    return replace(cluster, front=front, back=back, async_scheduling=ahead, options=options, cores=[])


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
    cluster = replace(cluster, router=RoundRobin, incidents=(), cores=[])
    if cluster.back is not None or cluster.stream.arrival_s is None or "speculation" in cluster.options:
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
    incidents = tuple(
        incident._replace(at_s=times * even(incident.at_s), for_s=times * even(incident.for_s))
        for incident in cluster.incidents
    )
    return replace(
        cluster,
        slower=times,
        stream=replace(stream, arrival_s=at, think_s=times * even(stream.think_s)),
        stale_s=times * even(cluster.stale_s),
        incidents=incidents,
        deadlines=cluster.deadlines and [times * even(x) for x in cluster.deadlines],
        cores=[],
    )


def check_slower(cluster: Cluster) -> None:
    """At half the speed the same happens, and every time is twice as long to the tick."""
    if cluster.back is not None or cluster.imbalanced:
        return  # transfers are rounded to ticks by themselves, and imbalance costs ticks, not seconds
    one, two = slower(cluster, 1.0).run(), slower(cluster, 2.0).run()
    for name in ("arrival", "scheduled", "first_token", "finish"):
        ticks = getattr(one, name)
        assert np.where(ticks < 0, -1, 2 * ticks).tolist() == getattr(two, name).tolist(), f"{name} at half the speed"
    assert one.preemptions.tolist() == two.preemptions.tolist()
    assert one.steps == two.steps


def run(number: int, size: int = SIZE) -> None:
    """The worlds of a number. Raises AssertionError, with the smallest world that fails."""

    @hypothesis.seed(number)
    @hypothesis.settings(
        max_examples=size, deadline=None, database=None, derandomize=False, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(any_world())
    def hold(cluster: Cluster) -> None:
        check(cluster)
        check_twice(cluster)
        check_renamed(cluster)
        check_slower(cluster)

    hold()


def past() -> list[int]:
    """Numbers of which a world failed once."""
    return [int(line.split("#")[0]) for line in PAST.read_text().splitlines() if line.split("#")[0].strip()]


def main() -> int:
    """Try many numbers, and say which failed."""
    options = argparse.ArgumentParser()
    options.add_argument("--worlds", type=int, default=100_000)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--seconds", type=float, default=float("inf"))
    given_ = options.parse_args()
    begun, tried, failed = time.monotonic(), 0, []
    for number in range(given_.first, given_.first + -(-given_.worlds // SIZE)):
        if time.monotonic() - begun > given_.seconds:
            break
        try:
            run(number)
        except Exception:
            failed.append(number)
            print(f"{number} failed; add it to {PAST.name}", flush=True)
            traceback.print_exc()
        tried += SIZE
    print(f"{tried:,} worlds in {time.monotonic() - begun:,.0f} s, of {len(failed)} numbers one failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
