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

from simtune.costs.fit import fit_base, fit_predictor
from simtune.costs.iteration import Batch, StepModel
from simtune.costs.operators import OPERATORS, Setting
from simtune.costs.predict import Z90, Predictor, base_seconds
from simtune.costs.profile import Facts, build, data_sheet
from simtune.costs.residual import features, fit_process
from simtune.costs.tables import Tables, own
from simtune.costs.tables.common import merge
from simtune.costs.tables.own import MeasuredPoint
from simtune.costs.tables.screen import screen
from simtune.errors import UsageError
from simtune.profiling.journal import FILE, Journal, task_of
from simtune.profiling.plan import Limits, MeasurementPlan, MeasurementTask, plan, work
from simtune.profiling.timing import Measured, now
from simtune.specs.hardware import Device, Hardware, HoldOut, Link
from simtune.specs.model import Model
from simtune.specs.plan import Batching, Pool

SENTINEL_EVERY = 40
MOVED = 0.03
"""A sentinel so far off its median casts doubt on the points before it."""

SUSPICIOUS_SDS = 4.0
FEWEST = 8
"""Points of an operator among which one can be told to be off."""

THROTTLED = 0.9
"""Of the clock at the start: below it the device is throttled."""

VALIDATION = "points measured for checking"
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

    def limits(self, call_s: float, scale: float) -> Limits: ...

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


class Check(NamedTuple):
    """A time that no fit saw, and what the profile says of it."""

    operator: str
    shape: dict[str, float]
    measured_s: float
    predicted_s: float
    inside: bool
    covered: bool

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


class Errors(NamedTuple):
    """|predicted / measured - 1| of some checks."""

    points: int
    median: float
    p90: float
    max: float
    covered: float

    @classmethod
    def of(cls, checks: Sequence[Check]) -> Errors:
        error = np.abs([c.error for c in checks])
        covered = float(np.mean([c.covered for c in checks]))
        return cls(len(checks), float(np.median(error)), float(np.quantile(error, 0.9)), float(error.max()), covered)


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


def profile(
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
    say: Callable[[str], None] = lambda words: None,
) -> Profiled:
    """Measure and fit; goes on where an earlier run of the same command in this folder stopped.

    `started` is when the budget began, by `clock`. Raises UsageError when the folder holds measurements of another
    device or plan; SimtuneError when the device is lost or the disk full. What was measured is then in the folder.
    """
    started = clock() if started is None else started
    journal, chosen = _open(rig, models, tps, out, budget_s, seed, say)
    with journal:
        for words in (rig.warning, *chosen.notes):
            if words:
                say(words)
        run = _Run(rig, journal, chosen, budget_s, target, started, clock, progress)
        run.measure()
        progress(run.status("fitting"))
        facts, hardware, checks = fit(journal, out.name)
        steps = check_steps(journal.points, models, hardware)
        summary = _summary(journal, chosen, checks, steps, run)
    return Profiled(facts, hardware, journal.points, checks, steps, summary)


def _open(
    rig: Rig,
    models: Sequence[Model],
    tps: Sequence[int],
    out: Path,
    budget_s: float,
    seed: int,
    say: Callable[[str], None],
) -> tuple[Journal, MeasurementPlan]:
    path = out / FILE
    told = {**rig.describe(), "models": [m.to_data() for m in models], "tp": list(tps), "seed": seed}
    if path.exists():
        journal, repaired = Journal.resume(path)
        if repaired:
            say(repaired)
        journal.must_be(**{key: told.get(key) for key in ("device", "torch", "driver", "models", "tp", "seed")})
        extra = journal.header.model_extra or {}
        rig.prepare(extra["kernels"])
        limits = Limits(**extra["limits"])
        chosen = plan(models, tps, limits, rig.copies, seed)
        journal.must_be(plan=chosen.hash)
        say(f"{path}: going on after {len(journal.points)} points")
        return journal, chosen
    kernels = rig.prepare()
    limits = rig.limits(
        min(2.0, max(0.02, budget_s / _CALLS_PER_BUDGET)), min(4.0, max(1.0, budget_s / _DENSE_BUDGET_S))
    )
    chosen = plan(models, tps, limits, rig.copies, seed)
    told |= {"kernels": dict(kernels), "limits": asdict(limits), "plan": chosen.hash}
    return Journal.create(path, told), chosen


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
        self.started -= sum(_extra(p, "cost_s") for p in self.journal.points)
        self.planned = Counter(t.operator for t in self.plan.tasks)
        self.clocks = [c for p in self.journal.points if (c := _extra(p, "clock_mhz"))]

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
        again = [t for t in self.plan.tasks if t.kind != "step"]
        visit = 2
        while self.left_s() > 0:
            if not self._pass(self._doubtful_first(again, visit), visit, f"visit {visit}") or self._met():
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
            told = {key: value for key, value in asdict(self.rig.measure(task)).items() if value is not None}
        except MemoryError:
            told = {"failed": "out of memory"}
        if task.role == "sentinel":
            told |= self.rig.condition()
        now = self.clock()
        self.journal.record(task, **told, at_s=round(now - self.started, 3), cost_s=round(now - start, 4))

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
        self.errors = {key: Errors.of(found).median for key, found in _by_operator(checks).items()}
        self.refit_s = self.clock() - start
        wanted = {t.operator for t in self.plan.tasks if t.role == "validation"}
        return self.target is not None and all(self.errors.get(key, np.inf) <= self.target for key in wanted)

    def _doubtful_first(self, tasks: Sequence[MeasurementTask], visit: int) -> list[MeasurementTask]:
        """In another order on each visit; it depends on first visits only, so that a resumed run finds the same."""
        order = np.random.default_rng(visit).permutation(len(tasks)).tolist()
        doubted = doubtful(self.journal)
        return sorted((tasks[at] for at in order), key=lambda t: t.key not in doubted)

    def status(self, phase: str) -> LiveStatus:
        done: Counter[str] = Counter()
        for point in self.journal.points:
            if point.role != "sentinel":
                done[task_of(point).operator] += 1
        rows = [
            OperatorProgress(key, done[key], count, self.errors.get(key)) for key, count in sorted(self.planned.items())
        ]
        return LiveStatus(phase, rows, max(0.0, self.budget_s - self.elapsed()))


def _extra(point: MeasuredPoint, key: str) -> float:
    return float((point.model_extra or {}).get(key, 0.0))


# --- judging points ---------------------------------------------------------------------------------------


def doubtful(journal: Journal) -> set[str]:
    """Keys of the points whose first visit is suspicious."""
    first: dict[str, MeasuredPoint] = {}
    window: list[str] = []
    sentinels = [p for p in journal.points if p.role == "sentinel" and p.seconds]
    usual = {
        key: float(np.median([p.seconds for p in sentinels if task_of(p).key == key]))
        for key in {task_of(p).key for p in sentinels}
    }
    found: set[str] = set()
    for point in journal.points:
        key = task_of(point).key
        if point.role == "sentinel":
            moved = abs((point.seconds or 0.0) / usual[key] - 1)
            if moved > MOVED and moved * usual[key] > 3 * (point.mad or 0.0):
                found |= set(window)
            window = []
        elif key not in first:
            first[key] = point
            window.append(key)
    found |= {key for key, point in first.items() if point.noisy}
    return found | _off_the_fit(journal, list(first.values()))


def _off_the_fit(journal: Journal, points: Sequence[MeasuredPoint]) -> set[str]:
    """Keys of points that are far from where all other points of their operator put them."""
    found: set[str] = set()
    facts = facts_of(journal, "measured")
    for table in _tables(journal, points).operators.values():
        sheet = data_sheet(table, facts)
        setting = Setting.of(sheet.processors, table.dtype, table.kv_dtype)
        base = fit_base(table, sheet.processors, sheet.flops_per_s, sheet.bytes_per_s)
        expected = base_seconds(OPERATORS[table.kind].terms(table.shape, setting), **base.model_dump())
        process = fit_process(features(table.kind, table.shape, setting), np.log(table.seconds / expected))
        if process is not None and len(table) >= FEWEST:
            off, sd = process.left_out()
            for row in np.flatnonzero(np.abs(off) > SUSPICIOUS_SDS * sd):
                shape = {name: float(column[row]) for name, column in table.shape.items()}
                found.add(MeasurementTask(table.kind, table.dtype, shape, table.kv_dtype, table.variant).key)
    return found


def predictors(journal: Journal) -> dict[str, Predictor]:
    """Quick fits of all operators measured so far."""
    tables = _tables(journal)
    facts = facts_of(journal, "measured")
    found = {}
    for key, table in tables.operators.items():
        sheet = data_sheet(table, facts)
        found[key] = fit_predictor(screen(table, sheet), sheet.processors, sheet.flops_per_s, sheet.bytes_per_s)
    return found


def _tables(journal: Journal, points: Sequence[MeasuredPoint] | None = None) -> Tables:
    read = own.tables(journal.header, journal.points if points is None else points, FILE)
    kept = {table.key: merge([table]) for table in read.tables if len(table)}
    return Tables(dict(sorted(kept.items())), read.hosts[0] if read.hosts else None)


def validate(journal: Journal, judges: Mapping[str, Predictor]) -> list[Check]:
    """Validation points inside the box of the fit."""
    visits: dict[str, list[MeasuredPoint]] = {}
    for point in journal.points:
        if point.role == "validation" and point.seconds:
            visits.setdefault(task_of(point).key, []).append(point)
    checks = []
    for points in visits.values():
        point = sorted(points, key=lambda p: p.seconds or 0.0)[(len(points) - 1) // 2]
        judge = judges.get(task_of(point).operator)
        if judge is not None and point.seconds:
            predicted = float(judge.seconds(**point.shape))
            covered = abs(np.log(point.seconds / predicted)) <= Z90 * float(judge.log_sd(**point.shape))
            inside = bool(judge.inside(**point.shape))
            checks.append(
                Check(task_of(point).operator, dict(point.shape), point.seconds, predicted, inside, bool(covered))
            )
    return [check for check in checks if check.inside]


def _by_operator(checks: Sequence[Check]) -> dict[str, list[Check]]:
    found: dict[str, list[Check]] = {}
    for check in checks:
        found.setdefault(check.operator, []).append(check)
    return dict(sorted(found.items()))


# --- the profile ------------------------------------------------------------------------------------------


def fit(journal: Journal, name: str) -> tuple[Facts, Hardware, list[Check]]:
    """Facts and profile of all points, and the checks. Raises UsageError when there are too few points."""
    tables = _tables(journal)
    if not any(table.kind == "gemm" for table in tables.operators.values()):
        raise UsageError(f"{journal.path}: too few points for a profile; give a larger --budget")
    facts = facts_of(journal, name)
    hardware = build(tables, facts)
    judges = {
        key: Predictor(operator, hardware.device.processors, hardware.arrays)
        for key, operator in hardware.operators.items()
    }
    checks = validate(journal, judges)
    operators = dict(hardware.operators)
    for key, found in _by_operator(checks).items():
        errors = Errors.of(found)
        held = HoldOut(
            split=VALIDATION,
            train_points=operators[key].provenance.points or 1,
            test_points=errors.points,
            **{name: round(getattr(errors, name), 4) for name in ("median", "p90", "max")},
            coverage=round(errors.covered, 4),
        )
        operators[key] = operators[key].model_copy(update={"hold_out": (held, *operators[key].hold_out)})
    return facts, hardware.model_copy(update={"operators": operators}).with_arrays(hardware.arrays), checks


def facts_of(journal: Journal, name: str) -> Facts:
    """What is known of the device: the rates are the best that were found, since nobody gave a data sheet."""
    header, extra = journal.header, journal.header.model_extra or {}
    limits = Limits(**extra["limits"])
    computing = {kind for kind, operator in OPERATORS.items() if operator.computes}
    flops = {point.dtype: limits.flops_per_s for point in journal.points if point.kind in computing}
    moved = limits.bytes_per_s
    links: dict[str, Link] = {}
    for point in journal.points:
        if not point.seconds:
            continue
        task = task_of(point)
        done, through = work(task)
        if point.kind == "gemm":
            flops[point.dtype] = max(flops[point.dtype], done / point.seconds)
        if point.kind == "copy":
            if point.variant == "in_memory":
                moved = max(moved, through / point.seconds) if point.shape["bytes"] >= 1 << 26 else moved
            else:
                _faster(links, "host", point.shape["bytes"], point.seconds)
        if point.kind in ("send_recv", "all_reduce"):
            _faster(links, "intra_node", through, point.seconds)
    return Facts(
        name=name,
        engine=f"torch {header.torch}",
        device=Device(
            name=header.device,
            vendor=header.device.split()[0],
            memory_bytes=extra["memory_bytes"],
            memory_bytes_per_s=_short(moved),
            architecture=extra.get("architecture"),
            processors=extra["processors"],
            flops_per_s={dtype: _short(rate) for dtype, rate in sorted(flops.items())},
            devices_per_node=max(extra["devices"], *extra["tp"]),
            source="fastest matrix product and copy that simtune measured on it, not a data sheet",
        ),
        links=links,
        host_note="what a plain torch loop does between two steps; a serving engine does more",
    )


def _faster(links: dict[str, Link], name: str, size: float, seconds: float) -> None:
    known = links.get(name)
    rate = max(size / seconds, known.bytes_per_s if known else 0.0)
    latency = min(seconds, known.latency_s if known else seconds)
    links[name] = Link(bytes_per_s=_short(rate), latency_s=_short(latency), source="fastest and shortest measured")


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def check_steps(points: Sequence[MeasuredPoint], models: Sequence[Model], hardware: Hardware) -> list[Check]:
    """Measured whole steps against the sum of their operators, to which nothing of them was fitted."""
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
        batch = Batch(s["decodes"], s["decodes"] * s["context"], chunks, s["samples"])
        predicted = sum(built[key].breakdown(batch).values())
        checks.append(Check(point.variant, dict(point.shape), point.seconds, predicted, True, True))
    return checks


def _summary(
    journal: Journal, chosen: MeasurementPlan, checks: Sequence[Check], steps: Sequence[Check], run: _Run
) -> dict[str, Any]:
    points = [p for p in journal.points if p.role != "sentinel"]
    drift = {}
    for sentinel in chosen.sentinels:
        times = [p.seconds for p in journal.points if p.seconds and task_of(p).key == sentinel.key]
        if times:
            low, high = np.quantile(times, (0.1, 0.9)) / np.median(times)
            drift[sentinel.operator] = {"times": len(times), "p10": round(float(low), 4), "p90": round(float(high), 4)}
    clocks = [c for p in journal.points if (c := _extra(p, "clock_mhz"))]
    launch = [(_extra(p, "eager") - p.seconds) for p in points if p.seconds and _extra(p, "eager")]
    return {
        "device": journal.header.device,
        "torch": journal.header.torch,
        "models": [m["name"] for m in (journal.header.model_extra or {})["models"]],
        "plan": chosen.hash,
        "spent_s": round(run.elapsed(), 1),
        "points": len(points),
        "resumed_after_points": run.resumed,
        "visited_again": len(points) - len({task_of(p).key for p in points}),
        "failed": sum(p.failed is not None for p in points),
        "timers": dict(Counter(p.timer for p in points if p.timer)),
        "clean_share": (journal.header.model_extra or {}).get("clean"),
        "spread_p90": round(float(np.quantile([(p.mad or 0) / p.seconds for p in points if p.seconds], 0.9)), 4),
        "sentinels": drift,
        "throttled": bool(clocks) and min(clocks) < THROTTLED * clocks[0],
        "launch_s": _short(float(np.median(launch))) if launch else None,
        "validation": {key: Errors.of(found)._asdict() for key, found in _by_operator(checks).items()},
        "steps": {key: Errors.of(found)._asdict() for key, found in _by_operator(steps).items()},
        "notes": list(chosen.notes),
    }


def errors_by_operator(checks: Sequence[Check]) -> dict[str, Errors]:
    """Of validation points by operator, or of whole steps by model."""
    return {key: Errors.of(found) for key, found in _by_operator(checks).items()}
