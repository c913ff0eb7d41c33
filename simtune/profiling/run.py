"""Run that measures a plan round by round, fits after each, and ends with a hardware profile.

Time is divided so that the budget includes the last fit: rounds of rising density first, then repeated visits to every
point, suspicious ones first, until the time is up or the target is met. A point counts as suspicious if its samples
spread by more than 5 %, if it is more than four of its standard deviations off the fit, or if a sentinel measured
after it had moved by more than 3 %. Of several visits the lower median counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from simtune.costs.tables.own import MeasuredPoint
from simtune.profiling.checks import Check, check_steps, errors_by_operator, validate
from simtune.profiling.doubts import doubtful
from simtune.profiling.fitting import fit, predictors
from simtune.profiling.measurement_journal import FILE, Journal, task_of
from simtune.profiling.measurement_plan import Limits, MeasurementPlan, MeasurementTask, plan
from simtune.profiling.run_summary import summarise
from simtune.profiling.timing import Measured, now
from simtune.specs.hardware import Facts, Hardware
from simtune.specs.model import Model

SENTINEL_EVERY = 40

_SHORTEST_RESERVE_S = 4.0
# the last fit also predicts held-back rows, which takes this factor longer than a refit
_RESERVE_FITS = 3.0
_CALLS_PER_BUDGET = 300
_DENSE_BUDGET_S = 300.0


class Rig(Protocol):
    """Device on which points are measured."""

    @property
    def warning(self) -> str | None:
        """Warning about a present disturbance of the device; None if undisturbed."""

    @property
    def copies(self) -> tuple[str, ...]:
        """Directions of copies that the device has."""

    def describe(self) -> dict[str, Any]:
        """Return the fields of the header: device, driver, torch, processors, memory_bytes, devices, timer."""

    def prepare(self, chosen: Mapping[str, str] | None = None) -> dict[str, str]:
        """Choose kernels, or use those chosen earlier; return them."""

    def limits(self, call_s: float, scale: float) -> Limits:
        """Return the capacity for calls of at most `call_s` seconds; `scale` is passed on to the density of points."""

    def measure(self, task: MeasurementTask) -> Measured:
        """Measure a point. Raises MemoryError if the shape does not fit, SimtuneError if the device is lost."""

    def condition(self) -> dict[str, float]:
        """Return clock, power and temperature, as far as they can be read."""


class OperatorProgress(NamedTuple):
    """Progress of one operator: points measured and planned, median error on its validation points."""

    operator: str
    done: int
    planned: int
    error: float | None


class LiveStatus(NamedTuple):
    """Content of the live table."""

    phase: str
    rows: list[OperatorProgress]
    left_s: float


@dataclass(frozen=True)
class Profiled:
    """Results of a run."""

    facts: Facts
    hardware: Hardware
    points: Sequence[MeasuredPoint]
    checks: list[Check]
    """Checks at validation points inside the measured box."""
    steps: list[Check]
    """Checks of whole steps, against the sum of their operators."""
    summary: dict[str, Any]


def profile(  # noqa: PLR0913 - one for each option
    rig: Rig,
    models: Sequence[Model],
    out: Path,
    *,
    budget_s: float,
    tps: Sequence[int] = (1,),
    target: float | None = None,
    seed: int = 0,
    started: float | None = None,
    clock: Callable[[], float] = now,
    progress: Callable[[LiveStatus], None] = lambda status: None,
    note: Callable[[str], None] = lambda words: None,
) -> Profiled:
    """Measure and fit; continue where an earlier run of the same command in this folder stopped.

    `started` is when the budget began, by `clock`; `progress` is called after every point, `note` with each line for
    the user. Raises UsageError if the folder has measurements of another device or plan; SimtuneError if the device is
    lost or the disk full. All finished measurements are then in the folder.
    """
    started = clock() if started is None else started
    journal, chosen = _open(rig, models, tps, out, budget_s, seed, note)
    with journal:
        for words in (rig.warning, *chosen.notes):
            if words:
                note(words)
        run = _ProfileRun(rig, journal, chosen, budget_s, target, started, clock, progress)
        run.measure()
        progress(run.status("fitting"))
        facts, hardware, checks = fit(journal, out.name)
        steps = check_steps(journal.points, models, hardware)
        summary = summarise(journal, chosen, checks, steps, spent_s=run.elapsed(), resumed=run.resumed)
    return Profiled(facts, hardware, journal.points, checks, steps, summary)


def _open(
    rig: Rig,
    models: Sequence[Model],
    tps: Sequence[int],
    out: Path,
    budget_s: float,
    seed: int,
    note: Callable[[str], None],
) -> tuple[Journal, MeasurementPlan]:
    """Return the journal in this folder and its plan; new ones if there is no journal."""
    path = out / FILE
    header = {**rig.describe(), "models": [m.to_data() for m in models], "tp": list(tps), "seed": seed}
    if path.exists():
        journal, repaired = Journal.resume(path)
        if repaired:
            note(repaired)
        journal.must_be(**{key: header.get(key) for key in ("device", "torch", "driver", "models", "tp", "seed")})
        rig.prepare(journal.header.further["kernels"])
        limits = Limits(**journal.header.further["limits"])
        chosen = plan(models, tps, limits, rig.copies, seed)
        journal.must_be(plan=chosen.hash)
        note(f"{path}: going on after {len(journal.points)} points")
        return journal, chosen
    kernels = rig.prepare()
    limits = rig.limits(
        min(2.0, max(0.02, budget_s / _CALLS_PER_BUDGET)), min(4.0, max(1.0, budget_s / _DENSE_BUDGET_S))
    )
    chosen = plan(models, tps, limits, rig.copies, seed)
    header |= {"kernels": dict(kernels), "limits": asdict(limits), "plan": chosen.hash}
    return Journal.create(path, header), chosen


@dataclass
class _ProfileRun:
    """Loop over a plan."""

    rig: Rig
    journal: Journal
    plan: MeasurementPlan
    budget_s: float
    target: float | None
    started: float
    clock: Callable[[], float]
    progress: Callable[[LiveStatus], None]
    errors: dict[str, float] = field(default_factory=dict)
    refit_s: float = 0.0
    resumed: int = 0
    fitted: int = 0
    visits: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        counted = [p for p in self.journal.points if p.role != "sentinel"]
        self.visits = Counter(task_of(p).key for p in counted)
        self.resumed = self.fitted = len(self.journal.points)
        # The time of earlier measurements counts against the budget; that of earlier fits does not.
        self.started -= sum(p.number("cost_s") for p in self.journal.points)
        self.planned = Counter(t.operator for t in self.plan.tasks)

    def elapsed(self) -> float:
        return self.clock() - self.started

    def left_s(self) -> float:
        """Seconds left for measuring."""
        return self.budget_s - self.elapsed() - max(_SHORTEST_RESERVE_S, _RESERVE_FITS * self.refit_s)

    def measure(self) -> None:
        """Measure all rounds, then all points repeatedly, while there is time and the target is not met."""
        for at, tasks in enumerate(self.plan.rounds, start=1):
            if not self._pass(tasks, 1, f"round {at} of {len(self.plan.rounds)}") or self._met():
                return
        kernel_tasks = [t for t in self.plan.tasks if t.kind != "step"]
        visit = 2
        while True:
            if not self._pass(self._doubtful_first(kernel_tasks, visit), visit, f"visit {visit}") or self._met():
                return
            visit += 1

    def _pass(self, tasks: Sequence[MeasurementTask], visit: int, phase: str) -> bool:
        """Measure tasks with fewer than `visit` visits; False if the time is up."""
        for task in tasks:
            if self.visits[task.key] >= visit:
                continue
            if self.left_s() <= 0:
                return False
            self._sentinels()
            self._point(task)
            self.visits[task.key] += 1
            self.progress(self.status(phase))
        return self.left_s() > 0

    def _point(self, task: MeasurementTask) -> None:
        start = self.clock()
        try:
            result = {key: value for key, value in asdict(self.rig.measure(task)).items() if value is not None}
        except MemoryError:
            result = {"failed": "out of memory"}
        if task.role == "sentinel":
            result |= self.rig.condition()
        now = self.clock()
        self.journal.record(task, **result, at_s=round(now - self.started, 3), cost_s=round(now - start, 4))

    def _sentinels(self) -> None:
        points = sum(self.visits.values())
        have = sum(p.role == "sentinel" for p in self.journal.points)
        due = (points // SENTINEL_EVERY + 1) * len(self.plan.sentinels)
        for at in range(have, due):
            self._point(self.plan.sentinels[at % len(self.plan.sentinels)])

    def _met(self) -> bool:
        """Fit new points; True if every checked operator is within the target."""
        if len(self.journal.points) == self.fitted:
            return False
        start, self.fitted = self.clock(), len(self.journal.points)
        self.progress(self.status("fitting"))
        checks = validate(self.journal, predictors(self.journal))
        self.errors = {key: errors.median for key, errors in errors_by_operator(checks).items()}
        self.refit_s = self.clock() - start
        checked = {t.operator for t in self.plan.tasks if t.role == "validation"}
        return self.target is not None and all(self.errors.get(key, np.inf) <= self.target for key in checked)

    def _doubtful_first(self, tasks: Sequence[MeasurementTask], visit: int) -> list[MeasurementTask]:
        """Return tasks in another order for each visit; it depends on first visits only, so that a resumed run repeats
        it."""
        order = np.random.default_rng(visit).permutation(len(tasks)).tolist()
        doubted = doubtful(self.journal)
        return sorted((tasks[at] for at in order), key=lambda t: t.key not in doubted)

    def status(self, phase: str) -> LiveStatus:
        finished: Counter[str] = Counter()
        for point in self.journal.points:
            if point.role != "sentinel":
                finished[point.operator] += 1
        rows = [
            OperatorProgress(key, finished[key], count, self.errors.get(key))
            for key, count in sorted(self.planned.items())
        ]
        return LiveStatus(phase, rows, max(0.0, self.budget_s - self.elapsed()))
