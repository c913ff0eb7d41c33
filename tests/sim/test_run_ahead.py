"""The loop in which a core runs ahead of the agenda comes to what step after step comes to, to the last tick."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simtune.engine import POLICIES, DraftingTerms, Request
from simtune.results.outcome import Outcome
from simtune.testing.clusters import Cluster, clusters, of_policy
from tests.engine.small import SMALL
from tests.sim.worlds import Setting, settings

many = hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
few = hypothesis_settings(many, max_examples=25)


def contents(outcome: Outcome) -> dict[str, Any]:
    """All of it but the records, but how often an event was void because a jump had been cut, and but the order of
    times between tokens and how many are in a row."""
    left_out = ("records", "events", "intervals")
    values = {f.name: getattr(outcome, f.name) for f in fields(outcome) if f.name not in left_out}
    values["intervals"] = sorted(
        (first + k * slope, decodes)
        for first, slope, steps, decodes in outcome.intervals.tolist()
        for k in range(steps)
    )
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def check(world: Setting | Cluster, *, samples: bool = True) -> None:
    """Where jumps are recorded no core runs ahead. With drafts the steps that are sampled may be others."""
    ahead, plain = world.run(), world.run(record=True)
    of_ahead, of_plain = contents(ahead), contents(plain)
    if not samples:
        for outcome in (of_ahead, of_plain):
            outcome["cores"] = [use._replace(sampled=()) for use in outcome["cores"]]
    assert of_ahead == of_plain
    assert plain.records
    assert not ahead.records


def accepted(request: Request, number: int, drafts: int) -> int:
    """Anything from none to all."""
    return min(drafts, (7 * request.id + 5 * number) % 11 % 4)


@given(settings() | settings(closed=True))
@many
def test_worlds(world: Setting) -> None:
    check(world)


@given(clusters(apart=False, failing=True) | clusters(apart=True, failing=True))
@many
def test_clusters(cluster: Cluster) -> None:
    check(cluster)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy: str) -> None:
    @given(of_policy(POLICIES[policy], constants=SMALL))
    @few
    def compare(cluster: Cluster) -> None:
        check(cluster)

    compare()


@given(clusters(apart=False, failing=True) | clusters(apart=True, failing=True), st.booleans())
@many
def test_drafts(cluster: Cluster, ahead: bool) -> None:
    """With drafts the ends of a jump are listed, and some of its tokens may be discarded."""
    front = replace(cluster.front, budget=max(8, cluster.front.budget))
    back = cluster.back and replace(cluster.back, budget=max(8, cluster.back.budget))
    options = {"speculation": DraftingTerms(3, accepted, lookahead=3)}
    changed = replace(cluster, front=front, back=back, async_scheduling=ahead, options=options, cores=[])
    check(changed, samples=False)
