"""The sentence of a limit: the same in messages, in the headline and in the bottleneck of a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from simtune.report import info, verdict
from simtune.results.summary import SloLimit
from simtune.runs.run_reader import read_run
from simtune.tuner.objectives import OBJECTIVES, Limit


def limit(value_s: float | None, request_class: str | None = None) -> SloLimit:
    return SloLimit.model_validate(
        {"metric": "ttft", "statistic": "p99", "limit_s": 1.0, "value_s": value_s, "met": False, "class": request_class}
    )


def test_sentence_of_a_limit_names_bound_class_and_value() -> None:
    assert str(limit(1.34, "chat")) == "p99 TTFT ≤ 1,000 ms for chat (it reaches 1,340.0 ms)"
    assert str(limit(None)) == "p99 TTFT ≤ 1,000 ms (it reaches no finite value)"
    assert limit(1.34).sentence() == "p99 TTFT ≤ 1,000 ms"


def test_limit_on_an_objective_has_the_same_sentence() -> None:
    price, rate = Limit(OBJECTIVES["usd_per_hour"], 4.0), Limit(OBJECTIVES["goodput"], 10.0)
    assert price.violated(4.0) == rate.violated(10.0) == ""
    assert price.violated(5.0) == "usd_per_hour ≤ 4 USD/h (it reaches 5 USD/h)"
    assert rate.violated(5.0, "at best") == "goodput ≥ 10 requests/s (it reaches at best 5 requests/s)"


def test_report_uses_the_sentence_of_a_limit(make_run: Callable[..., Path]) -> None:
    missed = limit(1.34)
    run = read_run(make_run(searched=False, slo=[missed.to_data()]))
    words = "p99 TTFT ≤ 1,000 ms (it reaches 1,340 ms)"
    assert missed.sentence("1,340 ms") == words
    assert words in info.headline(run).replace(info.NO_BREAK, " ")
    assert f"A limit is missed: {words}" in (verdict.bottleneck(run.summary) or "").replace(info.NO_BREAK, " ")
