"""How slow a shared processor is, and for which steps."""

from __future__ import annotations

from itertools import chain, repeat

import pytest


def test_a_step_of_many_rows_is_slowed_less_than_one_that_reads_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from simtune.validation.servers import gauge

    # One look to warm up, nine at first, three of many rows, which take as long to compute as the weights to read.
    times = chain(repeat(1.0, 10), repeat(256 / 32, 3), repeat(3.0))
    monkeypatch.setattr(gauge.Gauge, "_seconds", lambda self, x: next(times))
    looked = gauge.Gauge()
    assert looked.reference_s == 1.0
    assert looked() == 3.0
    assert looked(32) == 2.0
    assert looked(96) == 1.5
