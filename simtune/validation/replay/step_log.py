"""Step logs of real engines, format `steplog/1`: the requests of every step, with their numbers of tokens.

JSON lines, plain or gzip-compressed: a header, then one line per request in order of arrival, then one line per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simtune.errors import Problem, SpecError
from simtune.specs.base import Count, Whole
from simtune.specs.input_files import JsonError, parse_json, read_packed_text, shortened

FORMAT = "steplog/1"
MAX_SHOWN = 10
"""Number of problems of one file that are reported in full."""

Ids = tuple[str, ...]
TokensByRequest = dict[str, Annotated[int, Field(ge=0)]]


class _LogLine(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class StepLogHeader(_LogLine):
    """Engine and settings. Further keys (device, model, workload ...) are for people and are not read."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    format: Literal["steplog/1"]
    log: str
    engine: Literal["vllm", "transformers-cb"]
    package: str
    options: dict[str, Any]
    n_requests: Count
    n_steps: Count


class LoggedRequest(_LogLine):
    """A request. `at_step`: it was added just before that step was scheduled. Requests of one `group` share their first
    `prefix_len` tokens and no others."""

    req: str
    order: Whole
    at_step: Whole
    prompt_len: Count
    output_len: Count
    priority: int = 0
    group: int | str | None = None
    prefix_len: Whole = 0


class LoggedStep(_LogLine):
    """A step as the engine chose it. `free`, `running` and `waiting` are those right after scheduling."""

    step: Whole
    sched: TokensByRequest
    admit: TokensByRequest = {}
    preempt: Ids = ()
    reset_before: Ids = ()
    reset_after: Ids = ()
    starved: Ids = ()
    draft: TokensByRequest = {}
    accept: TokensByRequest = {}
    emit: TokensByRequest = {}
    finish: Ids = ()
    loaded: tuple[Ids, ...] = ((),)
    """Requests whose blocks came from host memory before each call of `schedule` since the step before; all calls but
    the last scheduled nothing."""
    load: TokensByRequest = {}
    """Tokens that requests have begun to load from host memory since the step before."""
    free: Whole = 0
    running: Whole = 0
    waiting: Whole = 0
    kv_read: Whole = 0
    fast: bool = False
    cpu: float | tuple[float, ...] = 0.0


@dataclass(frozen=True)
class StepLog:
    """A log as read, in the order of the file."""

    file: str
    header: StepLogHeader
    requests: list[LoggedRequest]
    steps: list[LoggedStep]


AnyLine = TypeVar("AnyLine", bound=_LogLine)


def describe(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yield key and message of everything that is wrong."""
    words = {"missing": "is required and missing", "extra_forbidden": "unknown key"}
    for item in error.errors(include_url=False):
        rule = f"{item['msg'].replace('Input should', 'must')}, not {shortened(repr(item['input']))}"
        yield ".".join(str(part) for part in item["loc"]), words.get(item["type"], rule)


def read(path: Path) -> StepLog:
    """Read a log. Raise UsageError if there is no such file, SpecError with line numbers for anything wrong in it."""
    lines = read_packed_text(path).splitlines()
    if not lines:
        raise SpecError(Problem(str(path), "is empty; a step log begins with a header line"))
    reader = _StepLogReader(str(path))
    header = reader.header(lines[0])
    for number, text in enumerate(lines[1:], 2):
        data = reader.parse(number, text)
        if data is not None and "step" in data:
            reader.step(number, data)
        elif data is not None:
            reader.request(number, data)
    reader.finish(header, len(lines))
    return StepLog(str(path), header, reader.requests, reader.steps)


class _StepLogReader:
    """Collects requests, steps, and problems."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.requests: list[LoggedRequest] = []
        self.steps: list[LoggedStep] = []
        self.problems: list[Problem] = []
        # Step before which each request was added.
        self.arrives: dict[str, int] = {}

    def problem(self, line: int, message: str, key: str = "") -> None:
        self.problems.append(Problem(self.file, message, key, line))

    def raise_problems(self) -> None:
        if len(self.problems) > MAX_SHOWN:
            num_hidden = len(self.problems) - MAX_SHOWN
            self.problems[MAX_SHOWN:] = [Problem(self.file, f"and {num_hidden} more like these")]
        if self.problems:
            raise SpecError(self.problems)

    def parse(self, number: int, text: str) -> dict[str, Any] | None:
        try:
            data = parse_json(text)
        except JsonError as error:
            self.problem(number, f"not JSON ({error}); the file may be cut off")
            return None
        if not isinstance(data, dict):
            self.problem(number, "must be a JSON object")
            return None
        return data

    def line(self, kind: type[AnyLine], number: int, data: dict[str, Any]) -> AnyLine | None:
        try:
            return kind.model_validate(data)
        except ValidationError as error:
            for key, message in describe(error):
                self.problem(number, message, key)
            return None

    def header(self, text: str) -> StepLogHeader:
        data = self.parse(1, text)
        if data is not None and data.get("format") != FORMAT:
            log_format = data.get("format")
            hint = "; is this a step log?" if log_format is None else f", not {log_format}"
            self.problem(1, f"must be {FORMAT}{hint}", "format")
            self.raise_problems()
        header = self.line(StepLogHeader, 1, data) if data is not None else None
        self.raise_problems()
        assert header is not None
        return header

    def request(self, number: int, data: dict[str, Any]) -> None:
        request = self.line(LoggedRequest, number, data)
        if request is None:
            return
        if self.steps:
            self.problem(number, "comes after a step; requests come first", "req")
        if request.req in self.arrives:
            self.problem(number, f"request {request.req!r} is there twice", "req")
        if self.requests and request.at_step < self.requests[-1].at_step:
            self.problem(number, "arrives before the request above it; list them in order of arrival", "at_step")
        self.arrives[request.req] = request.at_step
        self.requests.append(request)

    def step(self, number: int, data: dict[str, Any]) -> None:
        step = self.line(LoggedStep, number, data)
        if step is None:
            return
        if self.steps and step.step <= self.steps[-1].step:
            self.problem(number, f"step {step.step} comes after step {self.steps[-1].step}", "step")
        self.check_names(number, step)
        self.steps.append(step)

    def finish(self, header: StepLogHeader, last_line: int) -> None:
        """Compare the counts with those in the header, and raise all problems at once."""
        promised = ((self.requests, header.n_requests, "requests"), (self.steps, header.n_steps, "steps"))
        for lines, count, label in () if self.problems else promised:
            if len(lines) != count:
                message = f"the file ends after {len(lines)} of {count} {label}; it is cut off"
                self.problem(last_line, message, f"n_{label}")
        self.raise_problems()

    def check_names(self, number: int, step: LoggedStep) -> None:
        for key in ("sched", "admit", "preempt", "reset_before", "reset_after", "starved", "finish", "draft", "accept"):
            for name in getattr(step, key):
                if self.arrives.get(name, step.step + 1) > step.step:
                    self.problem(number, f"request {name!r} has not arrived by step {step.step}", key)
