"""Selection of suspicious points, which are measured again first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simtune.costs.fit import fit_base
from simtune.costs.hardware_profile import data_sheet
from simtune.costs.operators import OPERATORS, Setting
from simtune.costs.predict import base_seconds
from simtune.costs.residual import fit_process
from simtune.costs.tables.own import MeasuredPoint
from simtune.profiling.fitting import facts_of, tables_of
from simtune.profiling.measurement_journal import Journal, task_of
from simtune.profiling.measurement_plan import MeasurementTask

MOVED = 0.03
"""Relative move of a sentinel off its median that makes the points before it suspicious."""

SUSPICIOUS_SDS = 4.0
FEWEST = 8
"""Least number of points of an operator among which one can be recognised as off."""


def doubtful(journal: Journal) -> set[str]:
    """Return the keys of the points whose first visit is suspicious."""
    first: dict[str, MeasuredPoint] = {}
    for point in journal.points:
        if point.role != "sentinel":
            first.setdefault(task_of(point).key, point)
    noisy = {key for key, point in first.items() if point.noisy}
    return _before_moved_sentinels(journal) | noisy | _off_the_fit(journal, list(first.values()))


def _before_moved_sentinels(journal: Journal) -> set[str]:
    """Return keys of the points first visited between a sentinel that had moved and the sentinel before it."""
    usual = _usual_s(journal)
    doubted: set[str] = set()
    visited: set[str] = set()
    since: list[str] = []  # first visits since the last sentinel
    for point in journal.points:
        key = task_of(point).key
        if point.role == "sentinel":
            moved = abs((point.seconds or 0.0) / usual[key] - 1)
            # a move within the sentinel's own spread is noise
            if moved > MOVED and moved * usual[key] > 3 * (point.mad or 0.0):
                doubted |= set(since)
            since = []
        elif key not in visited:
            visited.add(key)
            since.append(key)
    return doubted


def _usual_s(journal: Journal) -> dict[str, float]:
    """Return median seconds of each sentinel, by key."""
    times: dict[str, list[float]] = {}
    for point in journal.points:
        if point.role == "sentinel" and point.seconds:
            times.setdefault(task_of(point).key, []).append(point.seconds)
    return {key: float(np.median(seconds)) for key, seconds in times.items()}


def _off_the_fit(journal: Journal, points: Sequence[MeasuredPoint]) -> set[str]:
    """Return keys of points that are far from the prediction by all other points of their operator."""
    keys: set[str] = set()
    facts = facts_of(journal, "measured")
    for table in tables_of(journal, points).operators.values():
        sheet = data_sheet(table, facts)
        setting = Setting.of(sheet.processors, table.dtype, table.kv_dtype, sheet.chip)
        base = fit_base(table, sheet.processors, sheet.flops_per_s, sheet.bytes_per_s, sheet.chip)
        form = OPERATORS[table.kind]
        expected = base_seconds(form.terms(table.shape, setting), **base.model_dump())
        process = fit_process(form.features(table.shape, setting), np.log(table.seconds / expected))
        if process is not None and len(table) >= FEWEST:
            off, sd = process.left_out()
            for row in np.flatnonzero(np.abs(off) > SUSPICIOUS_SDS * sd):
                shape = {name: float(column[row]) for name, column in table.shape.items()}
                keys.add(MeasurementTask(table.kind, table.dtype, shape, table.kv_dtype, table.variant).key)
    return keys
