"""Errors of a profile on times that none of its fits saw: validation points, and whole steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.predict import Z90, Predictor
from simtune.costs.tables.own import MeasuredPoint
from simtune.profiling.measurement_journal import Journal, task_of
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.pool import Batching, Pool


class Check(NamedTuple):
    """Time that no fit saw, and its prediction."""

    operator: str
    """Operator key in the profile, or for a whole step the name of the model."""
    shape: dict[str, float]
    measured_s: float
    predicted_s: float
    covered: bool
    """True if the measured time lies inside the 90 % interval."""

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1


class Errors(NamedTuple):
    """|predicted / measured - 1| of several checks."""

    points: int
    median: float
    p90: float
    max: float
    covered: float

    @classmethod
    def of(cls, checks: Sequence[Check]) -> Errors:
        """Return the errors of one or more checks."""
        error = np.abs([c.error for c in checks])
        covered = float(np.mean([c.covered for c in checks]))
        return cls(len(checks), float(np.median(error)), float(np.quantile(error, 0.9)), float(error.max()), covered)


def errors_by_operator(checks: Sequence[Check]) -> dict[str, Errors]:
    """Return errors of validation points by operator, or of whole steps by model, in alphabetical order."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        groups.setdefault(check.operator, []).append(check)
    return {key: Errors.of(group) for key, group in sorted(groups.items())}


def validate(journal: Journal, judges: Mapping[str, Predictor]) -> list[Check]:
    """Return checks at the validation points inside the box of the fit; of several visits the lower median counts."""
    visits: dict[str, list[MeasuredPoint]] = {}
    for point in journal.points:
        if point.role == "validation" and point.seconds:
            visits.setdefault(task_of(point).key, []).append(point)
    checks = []
    for points in visits.values():
        point = sorted(points, key=lambda p: p.seconds or 0.0)[(len(points) - 1) // 2]
        judge = judges.get(point.operator)
        if judge is not None and point.seconds and bool(judge.inside(**point.shape)):
            predicted_s = float(judge.seconds(**point.shape))
            covered = abs(np.log(point.seconds / predicted_s)) <= Z90 * float(judge.log_sd(**point.shape))
            checks.append(Check(point.operator, dict(point.shape), point.seconds, predicted_s, bool(covered)))
    return checks


def check_steps(points: Sequence[MeasuredPoint], models: Sequence[Model], hardware: Hardware) -> list[Check]:
    """Return checks of whole steps against the sum of their operators; no fit saw a step."""
    by_name = {model.name: model for model in models}
    pool = Pool(
        hardware=hardware.name,
        instances=1,
        batching=Batching(max_num_seqs=1024, max_num_batched_tokens=1 << 20),
        cuda_graphs=False,
    )
    built: dict[tuple[str, int], StepModel] = {}
    checks = []
    for point in points:
        if point.kind != "step" or not point.seconds or point.variant not in by_name:
            continue
        s = {name: round(value) for name, value in point.shape.items()}
        key = (point.variant, s["layers"])
        if key not in built:
            model = by_name[point.variant]
            group = model.layers[0].model_copy(update={"count": s["layers"]})
            built[key] = StepModel(model.model_copy(update={"layers": (group,)}), hardware, pool)
        chunks = ((s["past"], s["tokens"]),) if s["tokens"] else ()
        batch = StepWork(s["decodes"], s["decodes"] * s["context"], chunks, s["samples"])
        predicted_s = sum(built[key].breakdown(batch).values())
        checks.append(Check(point.variant, dict(point.shape), point.seconds, predicted_s, True))
    return checks
