"""Every policy under the simulated clock: alone and in pools, open and closed loops, with all that may happen."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simtune.engine import POLICIES
from tests.sim.clusters import of_policy
from tests.sim.test_cluster import check


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data())
@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_jumps_equal_steps_and_nothing_is_lost(policy: str, data: st.DataObject) -> None:
    check(data.draw(of_policy(policy)))
