"""Pipelines, prefill and decode apart, routers and failures: still exact, and nothing is lost."""

from __future__ import annotations

from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings

from simtune.testing.clusters import Cluster, check, clusters, controlled

many = hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


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
