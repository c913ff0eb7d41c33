"""Schemes that draft while the target verifies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simtune.sim.drafting.drawn_rounds import overlapped
from simtune.tuner.drafting import chain
from tests.oracles import chain as exact
from tests.oracles import overlap


@pytest.fixture(scope="module")
def oracle(oracle_dir: Path) -> Any:
    return json.loads((oracle_dir / "spec_chain.json").read_text())


def test_pearl(oracle: Any) -> None:
    for row in oracle["pearl"]:
        tokens = overlap.pearl_tokens(row["alpha"], row["gamma"])
        assert tokens == pytest.approx(row["tokens_per_round"], rel=1e-9)
        assert tokens == pytest.approx(row["mc"], rel=0.01)
        # Draft and target take equally long: drafting first and then verifying takes two such times.
        blocking = chain.expected_tokens(exact.iid(row["alpha"], row["gamma"])) / 2
        assert blocking == pytest.approx(row["blocking_sd_same_costs"], rel=1e-9)
        assert tokens > blocking
    assert overlap.pearl_tokens(0.8, 1) == 1.0
    assert overlap.pearl_tokens(1.0, 4) == 4.0
    assert overlap.pearl_tokens(1 - 1e-9, 4) == pytest.approx(4.0, rel=1e-6)
    assert overlap.pearl_tokens_per_s(0.8, 4, 0.25, 1.0) == pytest.approx(overlap.pearl_tokens(0.8, 4))
    assert overlap.pearl_tokens_per_s(0.8, 8, 0.25, 1.0) < overlap.pearl_tokens_per_s(0.8, 4, 0.25, 1.0)


def test_dsi(oracle: Any) -> None:
    for row in oracle["dsi"]:
        seconds = overlap.dsi_mean_seconds(row["N"], row["alpha"], row["td"], row["tt"])
        assert seconds == pytest.approx(row["dsi"], rel=1e-9)
        assert seconds == pytest.approx(row["dsi_mc"], rel=0.01)
        assert seconds <= row["ar"], "never slower than no speculation"
    assert overlap.dsi_replicas(0.2, 1.0) == 5
    assert overlap.dsi_replicas(0.2, 1.0, look_ahead=2) == 3


@pytest.mark.parametrize(
    ("acceptance", "look_ahead", "replicas"), [(0.5, 1, 4), (0.8, 1, 1), (0.8, 4, 3), (0.95, 2, 8), (0.0, 3, 2)]
)
def test_dsi_in_lockstep(acceptance: float, look_ahead: int, replicas: int) -> None:
    """Verifications begin in every tick, of 1, look_ahead - 1, look_ahead, ... tokens, and each takes `replicas`."""
    first_wrong = np.random.default_rng(1).geometric(1 - acceptance, 400_000)
    sizes = [1, *([look_ahead - 1] if look_ahead > 1 else []), *([look_ahead] * int(first_wrong.max()))]
    begun = np.searchsorted(np.cumsum(sizes), first_wrong)
    expected = first_wrong.sum() / (begun + replicas).sum()
    assert overlap.dsi_tokens(acceptance, look_ahead, replicas) == pytest.approx(expected, rel=0.01)


def test_dsi_in_lockstep_is_dsi() -> None:
    """Look-ahead 1, and a tick as long as a draft."""
    for acceptance in (0.0, 0.3, 0.9, 1.0):
        per_token_s = overlap.dsi_mean_seconds(10**9, acceptance, 0.2, 1.0) / 10**9
        assert 0.2 / overlap.dsi_tokens(acceptance, 1, 5) == pytest.approx(per_token_s, rel=1e-6)
    assert overlap.dsi_tokens(1 - 1e-9, 3, 4) == pytest.approx(3.0, rel=1e-6)


def test_chunks_of_a_round_overlap() -> None:
    # Draft 1, then (draft 2 at half speed | verify 1 at half speed), then verify 2 alone.
    assert overlap.frontier_seconds([1.0, 1.0], [2.0, 2.0], 0.5, 0.5) == 1.0 + max(2.0, 4.0) + 2.0
    assert overlap.frontier_seconds([1.0], [2.0], 0.5, 0.5) == 3.0, "one chunk has nothing to overlap with"
    assert overlap.frontier_seconds([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], 1.0, 1.0) == 4.0


@pytest.mark.parametrize(
    ("replicas", "right", "kept", "computed"),
    [
        # 1 token, then 3, then 4 at a time; after a wrong draft anew, and again where the first is wrong.
        (1, [4, 4, 4, 1, 0, 4, 4], [0, 2, 3, 1, 0, 0, 2], [0, 2, 3, 3, 0, 0, 2]),
        # Each time a round before without any.
        (2, [4, 4, 4, 4, 1, 4, 4, 0], [-1, 0, 2, 3, 1, -1, 0, 0], [-1, 0, 2, 3, 3, -1, 0, 2]),
    ],
)
def test_rounds_of_a_window_of_four_drafts_by_hand(
    replicas: int, right: list[int], kept: list[int], computed: list[int]
) -> None:
    """Two requests with the same luck; each begins anew."""
    found = overlapped(np.array(right * 2), [0, len(right), 2 * len(right)], 4, replicas)
    assert [column.tolist() for column in found] == [kept * 2, computed * 2]
