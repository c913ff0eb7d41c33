"""Curves: what they say at, between and beyond their knots, and about groups nobody measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs import curve
from simtune.errors import SpecError
from simtune.specs.hardware import Curve, Hardware
from tests.costs.made_up import hardware

LATENCY, RATE = 5e-6, 1e11


def link(x: np.ndarray) -> np.ndarray:
    """A latency and a rate, joined smoothly: flat at first, linear at last."""
    return np.hypot(LATENCY, x / RATE)


def test_at_between_and_beyond_the_knots() -> None:
    line = curve.exact({}, np.array([1.0, 4.0, 16.0]), np.array([2.0, 4.0, 32.0]))
    x = np.array([0.01, 1.0, 2.0, 4.0, 8.0, 16.0, 28.0])
    between = [2.0, 2.0, 8**0.5, 4.0, (4 * 32) ** 0.5, 32.0]
    assert curve.seconds(line, x) == pytest.approx([*between, 32 + 12 * (32 - 4) / (16 - 4)])


def test_time_does_not_fall_beyond_the_last_knot() -> None:
    line = curve.exact({}, np.array([1.0, 2.0]), np.array([3.0, 2.0]))
    assert curve.seconds(line, np.array([2.0, 1e9])).tolist() == [2.0, 2.0]


def test_few_knots_follow_many_noisy_rows() -> None:
    rng = np.random.default_rng(0)
    x = 2.0 ** np.arange(8.0, 31.0)
    measured = link(x) * np.exp(0.03 * rng.standard_normal(len(x)))
    measured[5] *= 30  # one interrupted measurement
    line = curve.fit_curve({"devices": 4}, x, measured)
    assert line.at == {"devices": 4}
    assert len(line.x) <= curve.MAX_KNOTS < len(x)
    assert not set(line.seconds) & set(measured.tolist())
    assert np.abs(curve.seconds(line, x) / link(x) - 1).max() < 0.12
    beyond = np.array([2.0**34])
    assert curve.seconds(line, beyond) == pytest.approx(link(beyond), rel=0.1), "a link at full rate stays there"


def test_knots_are_fewer_than_rows() -> None:
    for rows in range(4, 30):
        x = 2.0 ** np.arange(float(rows))
        line = curve.fit_curve({}, x, link(x))
        assert len(line.x) < rows


def test_rounded_times_count_for_less_where_they_are_short() -> None:
    x = np.repeat(np.geomspace(1e4, 1e9, 30), 5)
    truth = 1.4e-6 + x / 2e12
    line = curve.fit_curve({}, x, np.maximum(np.rint(truth * 1e6), 1) / 1e6, 1e-6)
    large = truth > 2e-5
    assert np.abs(curve.seconds(line, x) / truth - 1)[large].max() < 0.05


@given(devices=st.integers(2, 16), size=st.floats(1e3, 1e9))
def test_a_measured_group_answers_for_itself(devices: int, size: float) -> None:
    x = np.geomspace(1e3, 1e9, 12)
    groups = {n: curve.exact({}, x, n * link(x)) for n in (2, 4, 8)}
    found = curve.seconds_of_group(groups, devices, np.array([size]))
    if devices in groups:
        assert found.tolist() == curve.seconds(groups[devices], np.array([size])).tolist()
    assert found[0] > 0


def test_a_group_nobody_measured() -> None:
    """Eight devices from two and four: what four take for the same bytes moved, and four more latencies."""
    x = np.geomspace(1e3, 1e9, 12)
    per_rank = 1.5e-6
    groups = {n: curve.exact({}, x, n * per_rank + x / RATE) for n in (2, 4)}
    sizes = np.array([1e3, 1e6, 1e9])
    assert curve.seconds_of_group(groups, 8, sizes) == pytest.approx(8 * per_rank + sizes / RATE, rel=0.2)
    assert curve.seconds_of_group(groups, 8, sizes[:1]) == pytest.approx(8 * per_rank, rel=0.01)
    assert curve.seconds_of_group(groups, 3, sizes[:1]) == pytest.approx(3 * per_rank, rel=0.01)
    assert curve.per_rank_s({4: groups[4]}) == 0.0, "one size of group tells no difference"


def test_between_two_groups_on_the_line_through_them() -> None:
    x = np.geomspace(1e3, 1e9, 20)
    groups = {n: curve.exact({}, x, 1e-6 * n + n * x / RATE) for n in (2, 8)}
    assert curve.seconds_of_group(groups, 4, x) == pytest.approx(4e-6 + 4 * x / RATE)


def test_what_leaves_a_socket_goes_on_growing_by_half() -> None:
    """For the same bytes moved four devices take nine times as long as two: eight three times as long as four."""
    x = np.geomspace(1e3, 1e9, 20)
    groups = {n: curve.exact({}, x, factor * (1e-6 + x / RATE)) for n, factor in ((2, 1), (4, 9))}
    large = x[-1:]
    assert curve.seconds_of_group(groups, 8, large) == pytest.approx(27 * (1e-6 + large / RATE))
    assert curve.seconds_of_group({2: groups[4], 4: groups[2]}, 8, large)[0] == pytest.approx(large[0] / RATE, rel=0.01)


@given(devices=st.integers(2, 64), size=st.floats(1e3, 1e10))
def test_more_devices_never_take_less_time_than_the_largest_measured(devices: int, size: float) -> None:
    x = np.geomspace(1e3, 1e9, 20)
    groups = {n: curve.exact({}, x, 1e-6 * n + n**0.5 * x / RATE) for n in (2, 4)}
    found, four = (curve.seconds_of_group(groups, n, np.array([size]))[0] for n in (max(devices, 4), 4))
    assert found >= four


@pytest.mark.parametrize(
    ("x", "seconds", "rule"), [([1.0, 1.0], [1.0, 2.0], "ascend"), ([1.0, 2.0, 3.0], [1.0, 2.0], "one size")]
)
def test_a_curve_that_is_none(x: list[float], seconds: list[float], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Curve(x=tuple(x), seconds=tuple(seconds))
    data = hardware().to_data()
    data["operators"]["all_reduce.bf16"]["curves"] = [{"at": {"devices": 2.0}, "x": x, "seconds": seconds}]
    import yaml

    with pytest.raises(SpecError, match=rule):
        Hardware.from_text(yaml.safe_dump(data, sort_keys=False))
