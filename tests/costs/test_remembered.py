"""Operators that keep the times of their calls: the same times, predicted once, and apart for other links."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.costs.encoder import EncoderCosts, Work
from simtune.costs.predict import Predictor, Profile
from simtune.costs.remembered import RememberedPredictor, RememberedProfile
from simtune.specs.catalog import load_hardware, load_model
from tests.costs.test_encoder import pool

H100 = load_hardware("h100-sxm")
SIDES = st.integers(1, 20_000)


@settings(max_examples=50, deadline=None)
@given(calls=st.lists(st.tuples(SIDES, SIDES, SIDES), min_size=1, max_size=8))
def test_times_are_those_of_the_plain_operator(calls: list[tuple[int, int, int]]) -> None:
    plain, remembered = (profile.predictor("gemm", "bf16") for profile in (Profile(H100), RememberedProfile(H100)))
    for m, n, k in [*calls, *calls]:
        assert remembered.seconds(m=m, n=n, k=k) == plain.seconds(m=m, n=n, k=k)
    rows = np.array(calls, dtype=float).T
    together = dict(zip("mnk", rows, strict=True))
    assert np.array_equal(remembered.seconds(**together), plain.seconds(**together))


def test_a_step_is_predicted_once_for_all_pools_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools with other limits encode the same items; the second one predicts nothing."""
    hardware = load_hardware("h100-sxm")
    asked: list[str] = []
    seconds = Predictor.seconds

    def counted(self: Predictor, **shape: float) -> object:
        asked.append(self.operator.kind)
        return seconds(self, **shape)

    monkeypatch.setattr(Predictor, "seconds", counted)
    model, item = load_model("qwen2.5-vl-7b"), Work(1, 4784, 1196)
    first = EncoderCosts(model, hardware, pool()).seconds([item])
    predicted = len(asked)
    assert predicted > 0
    assert EncoderCosts(model, hardware, pool(cache_size=9000)).seconds([item]) == first
    assert len(asked) == predicted


def test_copies_of_a_device_with_other_operators_are_kept_apart() -> None:
    """Copies share their arrays, in which the profile is found."""
    gemm = H100.operators["gemm.bf16"]
    slow = gemm.model_copy(update={"base": gemm.base.model_copy(update={"overhead_s": 1.0})})
    changed = H100.model_copy(update={"operators": {**H100.operators, "gemm.bf16": slow}})
    assert changed.arrays is H100.arrays
    times = [
        float(np.ravel(RememberedProfile.of(hardware).predictor("gemm", "bf16").seconds(m=8, n=128, k=128))[0])
        for hardware in (H100, changed, H100)
    ]
    assert times[0] == times[2] < 0.1 < times[1]


def test_a_time_that_is_kept_cannot_be_changed() -> None:
    predictor = RememberedProfile(H100).predictor("gemm", "bf16")
    assert isinstance(predictor, RememberedPredictor)
    with pytest.raises(ValueError, match="read-only"):
        predictor.seconds(m=[8.0], n=[128.0], k=[128.0])[0] = 0.0
