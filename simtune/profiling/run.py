"""A run: measures a plan round by round, fits after each, and ends with a hardware profile.

Time is shared out so that the budget holds with the last fit in it: rounds of rising density first, then every point
again, suspicious ones first, until the time is up or the target is met. A point counts as suspicious when its samples
spread by more than 5 %, when it is more than four of its standard deviations off the fit, or when a sentinel measured
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
_RESERVE_FITS = 3.0  # the last fit also predicts held-back rows, which takes so many times as long as a refit
_CALLS_PER_BUDGET = 300
_DENSE_BUDGET_S = 300.0


class Rig(Protocol):
    """A device that points are measured on."""

    @property
    def warning(self) -> str | None:
        """What disturbs it now."""

    @property
    def copies(self) -> tuple[str, ...]:
        """Ways of copying it has."""

    def describe(self) -> dict[str, Any]:
        """For the header: device, driver, torch, processors, memory_bytes, devices, timer."""

    def prepare(self, chosen: Mapping[str, str] | None = None) -> dict[str, str]:
        """Choose kernels, or take those chosen earlier."""

    def limits(self, call_s: float, scale: float) -> Limits:
        """What it can take in calls of `call_s` seconds at most, `scale` going into the density of points."""

    def measure(self, task: MeasurementTask) -> Measured:
        """Raises MemoryError where the shape does not fit, SimtuneError where the device is gone."""

    def condition(self) -> dict[str, float]:
        """Clock, power, temperature, as far as they can be read."""


class OperatorProgress(NamedTuple):
    """How far one operator is: points measured and planned, median error on its validation points."""

    operator: str
    done: int
    planned: int
    error: float | None


class LiveStatus(NamedTuple):
    """What a live table shows."""

    phase: str
    rows: list[OperatorProgress]
    left_s: float


@dataclass(frozen=True)
class Profiled:
    """What a run found."""

    facts: Facts
    hardware: Hardware
    points: Sequence[MeasuredPoint]
    checks: list[Check]
    """Validation points inside the measured box."""
    steps: list[Check]
    """Whole steps, against the sum of their operators."""
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
    """Measure and fit; goes on where an earlier run of the same command in this folder stopped.

    `started` is when the budget began, by `clock`; `progress` is called after every point, `note` with each line for
    the user. Raises UsageError when the folder holds measurements of another
    device or plan; SimtuneError when the device is lost or the disk full. What was measured is then in the folder.
    """
    started = clock() if started is None else started
    journal, chosen = _open(rig, models, tps, out, budget_s, seed, note)
    with journal:
        for words in (rig.warning, *chosen.notes):
            if words:
                note(words)
        run = _Run(rig, journal, chosen, budget_s, target, started, clock, progress)
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
    """The journal in this folder and the plan it follows; a new one of each where there is none."""
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
class _Run:
    """The loop over a plan."""

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
        # What earlier runs measured is paid for; what they fitted is not counted.
        self.started -= sum(p.number("cost_s") for p in self.journal.points)
        self.planned = Counter(t.operator for t in self.plan.tasks)

    def elapsed(self) -> float:
        return self.clock() - self.started

    def left_s(self) -> float:
        """For measuring."""
        return self.budget_s - self.elapsed() - max(_SHORTEST_RESERVE_S, _RESERVE_FITS * self.refit_s)

    def measure(self) -> None:
        """All rounds, and all again, as long as there is time and the target is not met."""
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
        """Measure those that were visited less often; False when the time is up."""
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
        """Refit what is new, and whether every checked operator is within the target."""
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
        """In another order on each visit; it depends on first visits only, so that a resumed run finds the same."""
        order = np.random.default_rng(visit).permutation(len(tasks)).tolist()
        doubted = doubtful(self.journal)
        return sorted((tasks[at] for at in order), key=lambda t: t.key not in doubted)

    def status(self, phase: str) -> LiveStatus:
        done: Counter[str] = Counter()
        for point in self.journal.points:
            if point.role != "sentinel":
                done[point.operator] += 1
        rows = [
            OperatorProgress(key, done[key], count, self.errors.get(key)) for key, count in sorted(self.planned.items())
        ]
        return LiveStatus(phase, rows, max(0.0, self.budget_s - self.elapsed()))
