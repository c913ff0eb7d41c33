"""The sentence below a headline: how sure it is that the limits hold, in worlds or by the cost model alone."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from simtune.costs.predict import Z90
from simtune.report.certainty import certainty
from simtune.report.page import render
from simtune.runs.run_reader import read_run
from tests.report.test_report_search import SURE
from tests.runs.made_up import RunMaker

QUANTILES = [{"candidate": "chosen", "levels": [0.05, 0.5, 0.95], "values": [16.04, 17.0, 18.08]}]
WORLDS = {"worlds": 20, "level": 0.9, "saturated_probability": 0.0, "slo_probability": 0.45}


def test_certainty_of_drawn_worlds_has_probability_and_nearest_limit(make_run: RunMaker) -> None:
    run = read_run(make_run())
    nearest = max(
        range(len(run.summary.slo)), key=lambda i: (run.summary.slo[i].value_s or 0) / run.summary.slo[i].limit_s
    )
    slo: list[dict[str, Any]] = [{"value_s": [0.9, 0.95]} for _ in run.summary.slo]
    slo[nearest] = {"value_s": [0.024, None]}
    run = read_run(
        make_run(confidence=SURE | {"quantiles": QUANTILES}, uncertainty=WORLDS | {"intervals": {"slo": slo}})
    )
    said = certainty(run.summary)
    assert said is not None
    metric = run.summary.slo[nearest].metric.upper()
    assert said.startswith(
        f"P(SLO holds) is 45.0 % over 20 redrawn worlds; in 90 % of them p99 {metric} is 24.0–unbounded ms"
    )
    assert "and 16.0–18.1 requests/s/GPU are served inside the limits" in said
    assert said in render(run)


def stated(**changes: object) -> dict[str, object]:
    return {
        "worlds": 200, "simulations": 0, "level": 0.9, "probability": 0.63, "low": 0.61, "high": 0.67,
        "limits": [{"low_s": 0.25, "high_s": None}, {"low_s": 0.02, "high_s": 0.034}],
        "value": [17.6, 22.2], "safe_probability": 0.9, "safe_rate_rps": 144.32, **changes,
    }  # fmt: skip


def test_certainty_of_a_search_covers_all_limits_and_names_a_safer_rate(make_run: RunMaker) -> None:
    run = read_run(make_run(slo_probability=stated(), uncertainty=None))
    assert [one.metric for one in run.summary.slo] == ["ttft", "tpot"]
    said = certainty(run.summary)
    assert said is not None
    assert said == (
        "P(SLO holds) is 63.0 % (61.0 % to 67.0 %) over 200 drawn worlds; in 90 % of them p99 TTFT is 250–unbounded "
        "ms, p99 TPOT is 20.0–34.0 ms and 17.6–22.2 requests/s/GPU are served inside the limits. The highest rate was "
        "looked for, so it lies at the edge of the limits; 144 requests/s keep them in 90 % of these worlds."
    )
    assert said in render(run)


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({"safe_rate_rps": None}, "no rate keeps them in 90 % of these worlds."),
        ({"probability": 0.95}, "are served inside the limits."),
        ({"value": None, "safe_rate_rps": None}, "and p99 TPOT is 20.0–34.0 ms."),
    ],
)
def test_certainty_names_no_safer_rate_if_sure_or_without_a_rate(
    make_run: RunMaker, changes: dict[str, object], last: str
) -> None:
    said = certainty(read_run(make_run(slo_probability=stated(**changes), uncertainty=None)).summary)
    assert said is not None
    assert said.endswith(last)


def test_certainty_without_worlds_is_the_error_of_the_cost_model(make_run: RunMaker) -> None:
    shares = {"measured": 0, "interpolated": 1, "extrapolated": 0, "carried_over": 0, "data_sheet": 0}
    kinds = [("gemm", 0.6, 0.1), ("host", 0.4, 0.05)]
    operators = [{"operator": name, "share": share, "log_sd": sd, "basis": shares} for name, share, sd in kinds]
    run = read_run(make_run(uncertainty=None, cost_basis={**shares, "operators": operators}))
    said = certainty(run.summary)
    assert said is not None
    assert said.startswith("No worlds were drawn, so P(SLO holds) is not known")
    log_sd = math.sqrt(0.06**2 + 0.02**2)
    assert f"{-math.expm1(-Z90 * log_sd) * 100:.1f} % less to {math.expm1(Z90 * log_sd) * 100:.1f} % more" in said
    assert said in render(run).replace("&#39;", "'")


@pytest.mark.parametrize("changes", [{"slo": []}, {"cost_basis": None, "uncertainty": None}])
def test_certainty_is_absent_without_limits_or_known_errors(make_run: RunMaker, changes: dict[str, object]) -> None:
    assert certainty(read_run(make_run(**changes)).summary) is None


def test_summary_version_1_with_key_odds_is_read(make_run: RunMaker) -> None:
    run = make_run(slo_probability=stated(), uncertainty=None)
    new = read_run(run).summary
    document = json.loads((run / "summary.json").read_text())
    odds = document.pop("slo_probability")
    document |= {"schema": "simtune/summary@1", "odds": {"slo_probability": odds.pop("probability"), **odds}}
    (run / "summary.json").write_text(json.dumps(document))
    assert read_run(run).summary == new
    assert new.p_slo == (0.63, 200)
