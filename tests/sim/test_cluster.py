"""Pipelines, prefill and decode apart, routers and failures: still exact, and nothing is lost."""

from __future__ import annotations

from hypothesis import HealthCheck, event, given
from hypothesis import settings as hypothesis_settings

from simtune.sim.outcome import Outcome
from tests.sim.clusters import BLOCK_BYTES, Cluster, clusters

COLUMNS = ("arrival", "scheduled", "first_token", "transferred", "finish", "core", "preemptions", "resent")

many = hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def columns(outcome: Outcome) -> dict[str, list[int]]:
    return {name: getattr(outcome, name).tolist() for name in COLUMNS} | {"bytes": [outcome.transferred_bytes]}


def check(cluster: Cluster) -> None:
    jumped = cluster.run(record=True)
    stepped = cluster.run(single_steps=True)
    assert columns(jumped) == columns(stepped)
    assert jumped.steps == stepped.steps
    # Conserved: everybody fits here, so everybody is answered; nothing is left anywhere.
    assert (jumped.finish >= 0).all()
    for core in cluster.cores:
        assert core.scheduler.kv.free == core.scheduler.kv.total
        assert not core.has_work
        assert not core.holding
    assert (jumped.arrival <= jumped.scheduled).all()
    assert (jumped.scheduled < jumped.first_token).all()
    assert (jumped.first_token <= jumped.finish).all()
    sent = jumped.transferred >= 0
    if cluster.back is None:
        assert not sent.any()
    else:
        whole = jumped.resent == 0
        assert (sent == (cluster.stream.output_tokens > 1))[whole].all()
        assert (jumped.first_token[sent] <= jumped.transferred[sent]).all()
        assert (jumped.transferred[sent & whole] < jumped.finish[sent & whole]).all()
        if whole.all() and not any(what == "switch" for what, *_ in cluster.events):
            blocks = -(-cluster.stream.prompt_tokens[sent] // cluster.block_size)
            assert jumped.transferred_bytes == BLOCK_BYTES * int(blocks.sum())
    ends: dict[int, int] = {}
    for r in jumped.records:
        assert ends.get(r.core, 0) <= r.start < r.end
        ends[r.core] = r.end
    event(f"resent: {min(3, int(jumped.resent.sum()))}+")
    event(f"preempted: {min(3, int(jumped.preemptions.sum()))}+")


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
