"""Data with which the page ranks the candidates again when the reader moves the limits."""

from __future__ import annotations

import json
from typing import Any

from simtune.report import info
from simtune.runs.schema import Run
from simtune.specs.plan_words import differing, shared


def points(run: Run) -> list[dict[str, Any]]:
    """Return every simulation that ran to its end: the candidate, the rate and the results. Latencies in milliseconds.

    Of most candidates only the last simulation is known; of the chosen plan and the runners-up the whole sweep.
    """
    rows = {c.candidate: c for c in run.candidates}
    simulations: list[dict[str, Any]] = []
    for c in run.candidates:
        if c.finished is False or c.saturated or None in (c.rate_rps, c.ttft_p99_s, c.tpot_p99_s):
            continue
        simulations.append(
            _point(c.candidate, c.num_gpus, c.rate_rps, c.ttft_p99_s, c.tpot_p99_s)
            | {"x": c.output_tokens_per_s_per_user, "y": c.output_tokens_per_s_per_gpu}
            | {"usd": c.usd_per_million_output_tokens}
        )
    for p in run.summary.sweep or ():
        if p.candidate in rows and not p.saturated and p.ttft_p99_s is not None and p.tpot_p99_s is not None:
            simulations.append(_point(p.candidate, rows[p.candidate].num_gpus, p.rate_rps, p.ttft_p99_s, p.tpot_p99_s))
    return simulations


def _point(name: str, gpus: int, rate: float | None, ttft_s: float | None, tpot_s: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "gpus": gpus,
        "rate": rate,
        "ttft": _in_ms(ttft_s),
        "tpot": _in_ms(tpot_s),
    }


def limits(run: Run) -> dict[str, float]:
    """Return the first position of the sliders in milliseconds: the study's own p99 limits, else the largest p99 of all
    points.
    """
    simulations = points(run)
    first = {m: max((p[m] for p in simulations), default=0.0) for m in ("ttft", "tpot")}
    for line in run.summary.slo:
        if line.metric in first and line.statistic == "p99" and line.request_class is None:
            first[line.metric] = line.limit_s * 1e3
    return first


def details(run: Run) -> dict[str, dict[str, Any]]:
    """Return the details of a candidate that is clicked, by its name: settings, results, the command that starts it,
    and quantiles of its latencies in milliseconds at evenly spaced levels, if the run contains them.
    """
    s, names = run.summary, {point["name"] for point in points(run)}
    quantiles = {r.candidate: (r.ttft_quantiles_s, r.tpot_quantiles_s) for r in s.runners_up or ()}
    if s.quantiles is not None and not s.saturated:
        quantiles[info.chosen_name(run)] = (s.quantiles.ttft_s, s.quantiles.tpot_s)
    chosen = info.chosen_row(run)
    by_candidate = {}
    for c in run.candidates:
        if c.candidate not in names:
            continue
        settings = [(knob, str(value)) for knob in info.KNOBS if (value := getattr(c, knob)) not in (None, "")]
        ttft, tpot = (tuple(1e3 * x for x in values) for values in quantiles.get(c.candidate, ((), ())))
        by_candidate[c.candidate] = {
            "settings": settings,
            "status": c.status.replace("_", " "),
            "why": info.reason_in_words(c, chosen),
            "launch": s.launch if c.status == "chosen" else c.launch,
            "mean": {m: _in_ms(getattr(c, f"{m}_mean_s")) for m in ("ttft", "tpot")},
            "quantiles": {"ttft": ttft, "tpot": tpot},
        }
    return by_candidate


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def common(run: Run) -> str:
    """Return in words what all plans of the ranking have."""
    return shared([point["name"] for point in points(run)])


def document(run: Run) -> str:
    """Return points, limits, details, and the plans in words as JSON that cannot end the script element that contains
    it.
    """
    simulated = points(run)
    words = differing(list(dict.fromkeys(point["name"] for point in simulated)))
    data = {"points": simulated, "limits": limits(run), "details": details(run), "words": words}
    return json.dumps(data, sort_keys=True, allow_nan=False).replace("<", "\\u003c")
