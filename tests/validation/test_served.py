"""An engine's log beside a simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import simtune
from tests.validation.served import Served, compare


def served(*rows: tuple[float, float, float, float, int]) -> Served:
    return Served(*(np.array(column) for column in zip(*rows, strict=True)))


def test_latencies_and_queues_by_hand() -> None:
    log = served((0.0, 0.0, 1.0, 3.0, 5), (0.5, 1.0, 2.0, 2.0, 1), (1.0, 3.0, 3.5, 4.5, 3))
    latencies = log.latencies()
    assert latencies["ttft"].tolist() == [1.0, 1.5, 2.5]
    assert latencies["tpot"].tolist() == [0.5, 0.5], "an answer of one token has none"
    assert latencies["e2el"].tolist() == [3.0, 1.5, 3.5]
    running, waiting = log.in_flight([-1, 0, 0.7, 1, 2.5, 3, 9])
    assert running.tolist() == [0, 1, 1, 2, 1, 1, 0]
    assert waiting.tolist() == [0, 0, 1, 1, 1, 0, 0]


def test_errors_are_of_the_prediction() -> None:
    log = served((0.0, 0.0, 1.0, 3.0, 5), (0.0, 0.0, 2.0, 4.0, 5))
    slower = log._replace(first_token_s=log.first_token_s * 1.5)
    rows = {(row.metric, row.statistic): row for row in compare(log, slower)}
    assert rows["ttft", "mean"].error == pytest.approx(0.5)
    assert rows["ttft", "p50"].predicted_s == 2.25
    assert rows["e2el", "p90"].error == 0
    assert len(rows) == 12


def test_a_simulation_is_served_as_its_summary_says() -> None:
    result = simtune.simulate("chat", model="llama-3.1-8b", hardware="h100-sxm", rate_rps=4, requests=50)
    found = Served.of(result)
    metrics: dict[str, Any] = dict(result.summary().metrics.items())
    for row in compare(found, found):
        assert row.error == 0
        assert row.predicted_s == pytest.approx(getattr(metrics[row.metric], row.statistic))
    running, waiting = found.in_flight(found.finish_s.max())
    assert running == 0
    assert waiting == 0
    finish = result.outcome.finish.copy()
    finish[3] = -1
    lost = replace(result, outcome=replace(result.outcome, finish=finish))
    with pytest.raises(ValueError, match="never answered"):
        Served.of(lost)
