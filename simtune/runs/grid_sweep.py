"""Simulations of all points of a grid over fields of plan, workload or hardware, in parallel and resumably."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from simtune import __version__
from simtune.api import load_specs, set_up
from simtune.errors import Infeasible, Problem, SpecError, UsageError
from simtune.results.summary import Metric
from simtune.runs.price import price
from simtune.sim.parallel import executor, ordered_map
from simtune.specs.input_files import read_bytes, shortened
from simtune.specs.row_journal import RowJournal

SPECS = ("model", "hardware", "workload", "plan")
NUMBERS = ("rate", "requests", "seed")
MOST_POINTS = 100_000
LATENCIES: tuple[Metric, ...] = ("ttft", "tpot", "e2el")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Axis:
    """A field and the values that it takes."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Base:
    """Settings of a simulation, unless an axis sets them."""

    model: str | None = None
    hardware: str | None = None
    workload: str | None = None
    plan: str | None = None
    rate: str | None = None
    requests: str | None = None
    seed: str = "0"


def axis(text: str) -> Axis:
    """`hardware=h100-sxm,l40s`, `rate=2:10:2` (ends included) or `plan.pools.0.parallelism.tp=1,2,4`.

    Raises UsageError for a field that no specification has, and for values that are no list or range.
    """
    key, equals, values = text.partition("=")
    first = key.partition(".")[0]
    if not equals or not values or first not in (*SPECS, *NUMBERS):
        raise UsageError(
            f"--over {text}: write FIELD=VALUE,VALUE or FIELD=FROM:TO:STEP, where FIELD begins with one of "
            f"{', '.join((*SPECS, *NUMBERS))}"
        )
    return Axis(key, _range(text, values) if values.count(":") == 2 else tuple(values.split(",")))


def _range(text: str, values: str) -> tuple[str, ...]:
    try:
        begin, end, step = map(float, values.split(":"))
    except ValueError:
        raise UsageError(f"--over {text}: FROM:TO:STEP must be numbers") from None
    if not step > 0 or end < begin:
        raise UsageError(f"--over {text}: STEP must be above zero, and TO not below FROM")
    steps = (end - begin) / step + 1e-9
    if not steps < MOST_POINTS:
        raise UsageError(f"--over {text}: has more than {MOST_POINTS:,} values; take a larger STEP")
    count = int(steps) + 1
    return tuple(f"{begin + i * step:.12g}" for i in range(count))


def points(axes: Sequence[Axis], zipped: bool) -> list[dict[str, str]]:
    """Return all combinations of values, the last axis fastest, or with `zipped` the values side by side. Raises
    UsageError.
    """
    if not axes:
        raise UsageError("name at least one field to sweep: --over rate=2:10:2")
    keys = [a.key for a in axes]
    if len(set(keys)) < len(keys):
        raise UsageError(f"--over names a field twice: {', '.join(keys)}")
    if zipped and len({len(a.values) for a in axes}) > 1:
        raise UsageError("--zip takes lists of one length: " + ", ".join(f"{a.key} has {len(a.values)}" for a in axes))
    rows = zip(*(a.values for a in axes), strict=True) if zipped else itertools.product(*(a.values for a in axes))
    grid = [dict(zip(keys, row, strict=True)) for row in itertools.islice(rows, MOST_POINTS + 1)]
    if len(grid) > MOST_POINTS:
        raise UsageError(f"the grid has more than {MOST_POINTS:,} points; sweep fewer values")
    return grid


def _files_of(reference: str) -> list[Path]:
    """Return the files that a reference is made of: those of a folder; a file, and those that it names."""
    files: list[Path] = []
    queue = [Path(reference)] if "/" in reference or Path(reference).is_file() else []
    while queue:
        path = queue.pop()
        if path.is_dir():
            queue += sorted(file for file in path.iterdir() if file.is_file())
        elif path.is_file() and path not in files:
            files.append(path)
            if path.suffix in (".yaml", ".yml"):
                names = _NAMED.findall(read_bytes(path).decode("utf-8", "replace"))
                queue += [path.parent / name for name in names]
    return files


_NAMED = re.compile(r"\.{1,2}/[^\s,}\]\"']+|[\w-]+\.(?:csv|jsonl|json|parquet|yaml)\b")
"""Names of files, as files write them."""


@dataclass(frozen=True, slots=True)
class Point:
    """A simulation to do. Raises UsageError if no workload is named."""

    base: Base
    values: Mapping[str, str]
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.base.workload is None and "workload" not in self.values:
            raise UsageError("name a --workload")
        self._read_numbers()

    def _read_numbers(self) -> dict[str, Any]:
        """Rate, requests and seed. Raises UsageError for what is no such number."""
        inputs = {**asdict(self.base), **self.values}
        kinds: dict[str, Callable[[str], Any]] = {"rate": float, "requests": int, "seed": int}
        return {key: _number(key, inputs[key], kind) for key, kind in kinds.items()}

    @property
    def name(self) -> str:
        """Return a name that depends on the values, the settings and the contents of files, also of those that files
        name: the key under which a finished simulation is found again.
        """
        inputs = {**asdict(self.base), **self.values}
        files = [hashlib.sha256(read_bytes(file)).hexdigest() for x in inputs.values() if x for file in _files_of(x)]
        question = json.dumps([__version__, inputs, self.settings, files], sort_keys=True)
        return hashlib.sha256(question.encode()).hexdigest()[:16]

    def run(self) -> Row:
        """Simulate the point: its values and the results; `error` if the plan cannot be deployed. Raises SpecError for
        a misspelt field.
        """
        try:
            return {**self.values, **self._numbers(), "error": None}
        except (Infeasible, UsageError) as error:
            return {**self.values, "error": self._as_asked(str(error))}
        except SpecError as error:
            raise SpecError([self._of_its_option(problem) for problem in error.problems]) from None

    @property
    def _fields(self) -> dict[str, str]:
        """Fields of specs that the point sets: the whole key by the key within the spec, which messages name."""
        return {key.partition(".")[2]: key for key in self.values if "." in key}

    def _as_asked(self, message: str) -> str:
        """A message about a setting, by the option that it came from."""
        for field, key in self._fields.items():
            message = message.replace(f"--set {field}=", f"--over {key}=")
        return message

    def _of_its_option(self, problem: Problem) -> Problem:
        """A problem of a field that is swept is one of `--over`."""
        for field, key in self._fields.items():
            if problem.file == "--set" and f"{problem.key}.".startswith(f"{field}."):
                return replace(problem, file="--over", key=key + problem.key[len(field) :])
        return problem

    def _numbers(self) -> Row:
        inputs = asdict(self.base) | {key: value for key, value in self.values.items() if "." not in key}
        fields = [*self.settings, *(f"{key}={value}" for key, value in self.values.items() if "." in key)]
        settings: dict[str, list[str]] = {spec: [] for spec in SPECS}
        for field in fields:
            spec, _, inner = field.partition(".")
            if spec not in settings:
                raise UsageError(f"--set {shortened(field)}: begin with {', '.join(SPECS)}, as in plan.router.kind=...")
            settings[spec].append(inner)
        specs = load_specs(inputs["model"], inputs["hardware"], inputs["workload"], inputs["plan"], settings)
        numbers = self._read_numbers()
        experiment = set_up(specs, rate_rps=numbers["rate"], requests=numbers["requests"], seed=numbers["seed"] or 0)
        result = experiment.run()
        summary = result.summary()
        cost = price(experiment.deployment, summary)
        row: Row = {
            "saturated": summary.saturated,
            "num_gpus": summary.num_gpus,
            "requests": summary.requests,
            "offered_rate_rps": summary.offered_rate_rps,
            "request_throughput_rps": summary.request_throughput_rps,
            "goodput_rps": summary.goodput_rps,
            "slo_attainment": summary.slo_attainment,
            "output_tokens_per_s_per_gpu": summary.output_tokens_per_s_per_gpu,
            "output_tokens_per_s_per_user": summary.output_tokens_per_s_per_user,
        }
        for metric in LATENCIES:
            latencies = summary.metrics[metric]
            for statistic in ("mean", "p50", "p99"):
                # Latencies of a growing queue show only how long the simulation was.
                row[f"{metric}_{statistic}_s"] = None if summary.saturated else getattr(latencies, statistic)
        row["preemptions"] = summary.preemptions
        row["usd_per_hour"] = cost.per_hour_usd if cost else None
        row["usd_per_million_output_tokens"] = cost.per_million_output_tokens_usd if cost else None
        return row


def _number(what: str, text: str | None, kind: Callable[[str], Any]) -> Any:
    try:
        value = None if text is None else kind(text)
    except ValueError:
        word = "number" if kind is float else "whole number"
        raise UsageError(f"{what} {shortened(text)!r}: must be a {word}") from None
    if value is None:
        return None
    if value < 0 or (value == 0 and what != "seed"):
        raise UsageError(f"{what} {text}: must be above zero")
    if not value <= MOST[what]:
        raise UsageError(f"{what} {shortened(text)}: must be at most {MOST[what]:,}")
    return value


MOST: dict[str, int] = {"rate": 10**9, "requests": 10**9, "seed": 2**63 - 1}
"""Largest values of what is swept, as options and files bound it."""


def sweep(
    todo: Sequence[Point], journal: RowJournal | None = None, *, jobs: int | None = None
) -> Iterator[tuple[int, Row]]:
    """(number, row) of every point in order, those of the journal without simulating them again."""
    finished_rows = {} if journal is None else journal.read()
    remaining = [point for point in todo if point.name not in finished_rows]
    with executor(jobs, max(1, len(remaining))) as pool:
        fresh = ordered_map(pool, Point.run, remaining)
        for number, point in enumerate(todo):
            row = finished_rows.get(point.name)
            if row is None:
                # Results come in the order of `remaining`, so the next one belongs to this point.
                row = next(fresh)
                if journal is not None:
                    journal.add(point.name, row)
            yield number, row
