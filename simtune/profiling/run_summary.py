"""Summary of a run: its progress, the errors of its profile, and the steadiness of the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from simtune.costs.tables.own import MeasuredPoint
from simtune.profiling.checks import Check, errors_by_operator
from simtune.profiling.fitting import short
from simtune.profiling.measurement_journal import Journal, task_of
from simtune.profiling.measurement_plan import MeasurementPlan

THROTTLED = 0.9
"""Share of the clock at the start below which the device is throttled."""


def summarise(
    journal: Journal,
    plan: MeasurementPlan,
    checks: Sequence[Check],
    steps: Sequence[Check],
    *,
    spent_s: float,
    resumed: int,
) -> dict[str, Any]:
    """Return the content of summary.json; `resumed` is the number of points from earlier runs."""
    points = [p for p in journal.points if p.role != "sentinel"]
    timed = [(p, p.seconds) for p in points if p.seconds]
    return {
        "device": journal.header.device,
        "torch": journal.header.torch,
        "models": [m["name"] for m in journal.header.further["models"]],
        "plan": plan.hash,
        "spent_s": round(spent_s, 1),
        "points": len(points),
        "resumed_after_points": resumed,
        "visited_again": len(points) - len({task_of(p).key for p in points}),
        "failed": sum(p.failed is not None for p in points),
        "timers": dict(Counter(p.timer for p in points if p.timer)),
        "clean_share": journal.header.further.get("clean"),
        "spread_p90": round(float(np.quantile([(p.mad or 0) / seconds for p, seconds in timed], 0.9)), 4),
        "sentinels": _drift(journal.points, plan),
        "throttled": _throttled(journal.points),
        "launch_s": _launch_s(timed),
        "validation": {key: errors._asdict() for key, errors in errors_by_operator(checks).items()},
        "steps": {key: errors._asdict() for key, errors in errors_by_operator(steps).items()},
        "notes": list(plan.notes),
    }


def _launch_s(timed: Sequence[tuple[MeasuredPoint, float]]) -> float | None:
    """Return the median time that launching a kernel separately adds to its time in a captured graph."""
    launches = [p.number("eager") - seconds for p, seconds in timed if p.number("eager")]
    return short(float(np.median(launches))) if launches else None


def _drift(points: Sequence[MeasuredPoint], plan: MeasurementPlan) -> dict[str, dict[str, float]]:
    """Return by operator: how often its sentinel was measured, and the 10th and 90th percentile over the median."""
    drift: dict[str, dict[str, float]] = {}
    for sentinel in plan.sentinels:
        times = [p.seconds for p in points if p.seconds and task_of(p).key == sentinel.key]
        if times:
            low, high = np.quantile(times, (0.1, 0.9)) / np.median(times)
            drift[sentinel.operator] = {"times": len(times), "p10": round(float(low), 4), "p90": round(float(high), 4)}
    return drift


def _throttled(points: Sequence[MeasuredPoint]) -> bool:
    clocks = [clock for p in points if (clock := p.number("clock_mhz"))]
    return bool(clocks) and min(clocks) < THROTTLED * clocks[0]
