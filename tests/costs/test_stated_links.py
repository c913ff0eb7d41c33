"""A link that is stated outranks the tables of its collectives, or the statement is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from simtune.costs.predict import Basis, Predictor, Profile
from simtune.errors import UsageError
from simtune.specs.catalog import load_hardware
from tests.costs.made_up import hardware

LARGE = 2.0**29


def all_reduce(*settings: str, kind: str = "all_reduce", of: str = "rtx-pro-6000") -> Predictor:
    return Profile(load_hardware(of, settings)).predictor(kind, "bf16")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
@pytest.mark.parametrize("devices", [2, 4])
def test_large_messages_move_at_the_stated_rate_and_small_ones_keep_their_floor(kind: str, devices: int) -> None:
    measured, stated = all_reduce(kind=kind), all_reduce("links.intra_node.bytes_per_s=16e9", kind=kind)
    moved = (2 if kind == "all_reduce" else 1) * (devices - 1) / devices * LARGE
    assert moved / stated.seconds(devices=devices, bytes=LARGE) == pytest.approx(16e9, rel=0.03)
    floors = [float(p.seconds(devices=devices, bytes=512)) for p in (measured, stated)]
    assert floors[1] == pytest.approx(floors[0], rel=0.1)
    sizes = np.geomspace(2.0**20, LARGE, 40)
    assert (stated.seconds(devices=devices, bytes=sizes) > measured.seconds(devices=devices, bytes=sizes)).all()


def test_a_stated_link_says_that_its_table_is_of_another() -> None:
    stated = all_reduce("links.intra_node.bytes_per_s=16e9")
    assert stated.basis(devices=2, bytes=LARGE) == Basis.CARRIED_OVER
    assert "stated 16 GB/s of links.intra_node" in (stated.operator.provenance.note or "")
    assert all_reduce().basis(devices=2, bytes=LARGE) == Basis.INTERPOLATED


def test_a_whole_link_can_be_stated() -> None:
    one = all_reduce("links.intra_node={bytes_per_s: 16.0e+9, latency_s: 1.0e-5, source: measured}")
    assert one.seconds(devices=2, bytes=LARGE) == all_reduce("links.intra_node.bytes_per_s=16e9").seconds(
        devices=2, bytes=LARGE
    )


def test_operators_without_curves_take_the_stated_rate() -> None:
    made_up = hardware()
    link = made_up.links["intra_node"].model_copy(update={"bytes_per_s": 5e8, "stated": ("bytes_per_s",)})
    stated = Profile(made_up.model_copy(update={"links": {"intra_node": link}})).predictor("all_reduce", "bf16")
    assert stated.operator.base.bytes_per_s == 5e8


def test_a_stated_latency_of_measured_collectives_is_refused() -> None:
    with pytest.raises(UsageError, match=r"links.intra_node.latency_s is stated, but all_reduce was measured there"):
        all_reduce("links.intra_node.latency_s=1e-6")


@pytest.mark.parametrize(
    "settings",
    [
        ["device.memory_bytes_per_s=4e12"],
        ["device.flops_per_s.bf16=1e15"],
        ["device.processors=64"],
        ["device.cache_bytes=1e6"],
    ],
)
def test_facts_that_fitted_operators_would_not_follow_are_refused(settings: Sequence[str]) -> None:
    with pytest.raises(UsageError, match=r"fitted operators of h100-sxm would not follow it; .* --transfer-from"):
        load_hardware("h100-sxm", settings)


def test_what_no_operator_was_fitted_with_is_still_set() -> None:
    found = load_hardware("h100-sxm", ["device.memory_bytes=9e10", "device.price_per_hour_usd=1.5"])
    assert (found.device.memory_bytes, found.device.price_per_hour_usd) == (9e10, 1.5)
