"""Pipelines, prefill and decode apart, routers and failures: still exact, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine.policies.listed import StallFree
from simtune.engine.policies.static import StaticBatching
from simtune.engine.request import Request
from simtune.results.result import Result
from simtune.sim.router import RoundRobin
from simtune.specs.plan import FirstToken
from simtune.testing.clusters import Cluster, Incident, SmallPool, Way, check, clusters, controlled
from simtune.workload.requests import RequestStream

many = hypothesis_settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(clusters(apart=False, failing=False))
@many
def test_pipelines_and_routers(cluster: Cluster) -> None:
    check(cluster)


@given(clusters(apart=True, failing=False))
@many
def test_prefill_and_decode_apart(cluster: Cluster) -> None:
    check(cluster)


@given(clusters(apart=False, failing=True))
@many
def test_instances_come_fail_and_switch(cluster: Cluster) -> None:
    check(cluster)


@given(clusters(apart=True, failing=True))
@many
def test_they_do_so_with_prefill_and_decode_apart_too(cluster: Cluster) -> None:
    check(cluster)


@given(controlled())
@many
def test_instances_take_the_other_role(cluster: Cluster) -> None:
    check(cluster)


def _pair(first_token: FirstToken, prompts: list[int], outputs: list[int], seats: int) -> Cluster:
    """A prefill and a decode instance, and requests that arrive together; those that come first are served first."""
    requests = len(prompts)
    stream = RequestStream(
        np.zeros(requests),
        np.array(prompts),
        np.array(outputs),
        class_index=np.zeros(requests, dtype=np.int64),
        priority=np.arange(requests),
        class_names=("default",),
        slos=(None,),
    )
    back = SmallPool(instances=1, pp=1, blocks=30, seqs=seats, budget=4, step_s=0.001)
    way = Way(bytes_per_s=1e6, setup_s=0.0, block_s=0.0, layers=1, shared=False, first_token=first_token)
    return Cluster(replace(back, seqs=1), back, 1, stream, RoundRobin, 0.0, way)


@pytest.mark.parametrize("first_token", ["prefill", "transfer", "decode"])
def test_a_prompt_computed_again_after_the_first_token_moves_no_times(first_token: FirstToken) -> None:
    """A decode instance fails before the last token: the prefill instance computes it, and nothing is sent."""
    quiet = _pair(first_token, [7], [5], seats=1)
    before = quiet.run()
    at_s = (int(before.finish[0]) / TICKS_PER_SECOND) - 0.0005
    failing = replace(quiet, incidents=(Incident("failure", at_s, 1, 0, 0.001),))
    after = failing.run()
    assert after.resent.tolist() == [1]
    assert after.finish[0] > before.finish[0]
    for name in ("scheduled", "prompt_done", "transferred", "first_token"):
        assert getattr(after, name).tolist() == getattr(before, name).tolist(), name


@given(
    st.just(
        replace(
            _pair("decode", [7, 1, 1, 1, 15, 1, 1, 1, 1], [10, 1, 1, 1, 1, 1, 1, 1, 1], seats=2),
            policy=StaticBatching,
            options={"watermark_blocks": 0},
            incidents=(Incident("switch", 0.0211, 1, 0, 0.001),),
        )
    )
)
@hypothesis_settings(max_examples=1, deadline=None)
def test_who_is_preempted_and_withdrawn_keeps_its_first_transfer(cluster: Cluster) -> None:
    """It is sent a second time, once its first token is long delivered."""
    check(cluster)


class _LeastServed(StallFree):
    """The most served is preempted first."""

    def key(self, request: Request) -> int:
        return request.emitted // 4


def test_a_jump_evicts_what_single_steps_do() -> None:
    """A request whose blocks are cached waits while two others take their last blocks, and end in the same jump."""
    stream = RequestStream(
        arrival_s=np.zeros(3), class_index=np.zeros(3, dtype=int), priority=np.zeros(3, dtype=int),
        class_names=("default",), slos=(None,), hash_ids=((), (0, 1), ()),
        prompt_tokens=np.array([36, 130, 200]), output_tokens=np.array([46, 34, 26]),
    )  # fmt: skip
    front = SmallPool(instances=1, pp=1, blocks=30, seqs=1, budget=200, step_s=0.001)
    cluster = Cluster(
        front=front, back=replace(front, seqs=3, budget=4), block_size=16, stream=stream, router=RoundRobin,
        stale_s=0.0, way=Way(1e6, 0.0, 0.0, 1, False, False), incidents=(), policy=_LeastServed,
        options={"prefix_caching": True, "hash_block_tokens": 16},
    )  # fmt: skip
    flown, stepped = cluster.run(), cluster.run(single_steps=True)
    assert flown.finish.tolist() == stepped.finish.tolist()
    assert flown.preemptions.sum() > 0


@pytest.mark.parametrize("first_token", ["prefill", "transfer", "decode"])
def test_parts_of_the_first_token_add_up_wherever_it_comes_from(first_token: FirstToken) -> None:
    cluster = _pair(first_token, [7, 3, 12, 1, 9, 4, 2, 8, 5, 6, 11, 3], [5] * 12, seats=2)
    result = Result(cluster.stream, cluster.run(), num_gpus=2)
    (every,) = result.first_token_parts()[:1]
    assert sum(every.parts.values()) == pytest.approx(result.ttft_s.mean())
    assert (every.handover_s > 0) == (first_token != "prefill")
    assert (every.delivery_s > 0) == (first_token == "decode")
