"""Two numbers from an engine's own log: measured step time = scale x predicted + offset.

A profile describes kernels; an engine adds what no kernel table shows, and another release may be faster or slower by
a common factor. One scale and one offset for steps with prompt tokens, and one of each for steps without, repair most
of that: they depend on different kernels. The offset replaces the host too, whose time in the profile no longer counts.

| log | known by | a step |
|---|---|---|
| simtune's own, JSON lines | first line: schema simtune/steps@1, model, tp, device | one line: decodes, context_tokens, chunks [[past, new], ...], seconds; draft_tokens in a log for `--costs` |
| simtune's own, CSV | columns num_decodes, context_tokens, prefill_tokens, seconds | one row; prefill_chunks, prefill_past, model, tp, device where given |
| steplog/1, JSON lines | first line: format steplog/1 | one line with `sched` and `cpu` |
| Splitwise, CSV | columns prompt_size, batch_size, prompt_time, token_time (ms) | a row is a prefill and a decode step |

Any of them may be gzipped.
"""  # noqa: E501  # a table's rows cannot be broken

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from simtune.arrays import Array
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.tables.common import MS, Columns, designation, read_csv
from simtune.errors import Problem, SpecError
from simtune.specs.hardware import Calibration, Correction, Hardware
from simtune.specs.input_files import json_lines, read_packed_text
from simtune.specs.model import Model
from simtune.specs.pool import Pool
from simtune.specs.schema_versions import schema_problem

Kind = Literal["decode", "prefill"]

SCHEMA = "simtune/steps@1"
FEWEST = 8
"""Steps of one kind that a correction needs: its two numbers are tested on halves."""
LARGEST_SCALE = 10.0
"""A larger scale, or one below its inverse, means that the log is of another device or model."""
LARGEST_ERROR = 0.5
"""If the median step is farther off after the correction, two numbers do not describe the log."""

_DIGITS = 6
_MOST_TOKENS = 1e12
_SHORTEST_S, _LONGEST_S = 1e-7, 1e4
# columns and keys by which a log states its origin
_IDENTITY = ("model", "tp", "device")
_COUNTS = ("decodes", "context_tokens", "draft_tokens")
_CSV = ("num_decodes", "context_tokens", "prefill_tokens", "seconds")
_SPLITWISE = ("prompt_size", "batch_size", "token_size", "prompt_time", "token_time")


class TimedStep(NamedTuple):
    """A step that an engine ran, and its seconds."""

    batch: StepWork
    seconds: float

    @property
    def kind(self) -> Kind:
        """Return the correction that the step counts for: `prefill` with any prompt tokens, else `decode`."""
        return "prefill" if self.batch.chunks else "decode"


@dataclass
class Log:
    """Steps of one model on one device, and the number of lines passed over, by reason."""

    steps: list[TimedStep] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


class _Subject(NamedTuple):
    """Model, tp and device that the log must be of."""

    model: Model
    tp: int
    device: str


def read_log(path: Path, model: Model, hardware: Hardware, tp: int) -> Log:
    """Return the steps of a log, in any of the formats above.

    Raises SpecError if it cannot be read, or states another model, tp or device.
    """
    subject = _Subject(model, tp, hardware.device.name)
    if path.name.removesuffix(".gz").endswith(".csv"):
        columns = read_csv(path)
        if set(_SPLITWISE) <= set(columns.names):
            return _splitwise(columns, subject)
        columns.require(*_CSV)
        return _csv(columns, subject)
    number, header, lines = _opened(path)
    if header.get("format") == "steplog/1":
        return _steplog(path, header, lines, subject)
    _check_schema(path, number, header)
    _check(path, subject, {name: str(header[name]) for name in _IDENTITY if name in header})
    log = Log()
    for line, data in lines:
        step = _own(path, line, data)
        if step.batch.draft_tokens:
            log.left_out["verifies drafts"] += 1
        else:
            log.steps.append(step)
    return log


def read_steps(path: Path) -> Log:
    """Return the steps of one of simtune's own logs, JSON lines, of any model. Raises SpecError for another format."""
    number, header, lines = _opened(path)
    _check_schema(path, number, header)
    return Log([_own(path, line, data) for line, data in lines])


def write_steps(steps: Iterable[TimedStep], **identity: str) -> str:
    """Return the text of such a log; `identity` states its model, tp and device."""
    lines: list[dict[str, Any]] = [{"schema": SCHEMA, **identity}]
    for work, seconds in steps:
        chunks = {"chunks": [list(chunk) for chunk in work.chunks]} if work.chunks else {}
        decodes = {"decodes": work.num_decodes, "context_tokens": work.context_tokens} if work.num_decodes else {}
        drafts = {"draft_tokens": work.draft_tokens} if work.draft_tokens else {}
        lines.append({**decodes, **drafts, **chunks, "seconds": seconds})
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


def _opened(path: Path) -> tuple[int, dict[str, Any], Iterator[tuple[int, dict[str, Any]]]]:
    """Return number and content of the first line of a log, and the lines after it."""
    lines = json_lines(read_packed_text(path), str(path))
    number, header = next(lines, (1, {}))
    return number, header, lines


def _check_schema(path: Path, number: int, header: Mapping[str, Any]) -> None:
    if header.get("schema") != SCHEMA:
        message = schema_problem(header.get("schema"), SCHEMA, "record the steps again")
        if message.startswith("must be"):
            message += "; a log of `format: steplog/1` is read too"
        raise SpecError(Problem(str(path), message, "schema", number))


def _check(path: Path, subject: _Subject, identity: Mapping[str, str]) -> None:
    """Raise SpecError if a log states another identity than the subject's."""
    expected = {"model": subject.model.name, "tp": str(subject.tp), "device": subject.device}
    alike: dict[str, Callable[[str], str]] = {"model": _plain, "tp": str, "device": designation}
    problems = [
        Problem(str(path), f"the log is of {value}, not of {expected[name]}", name)
        for name, value in identity.items()
        if alike[name](value) != alike[name](expected[name])
    ]
    if problems:
        raise SpecError(problems)


def _plain(name: str) -> str:
    """Return a model's name as letters and digits: llama318b for `meta-llama/Llama-3.1-8B`."""
    return re.sub(r"[^a-z0-9]", "", name.rsplit("/", 1)[-1].lower())


def _own(path: Path, number: int, data: dict[str, Any]) -> TimedStep:
    try:
        counts = tuple(data.pop(name, 0) for name in _COUNTS)
        seconds, pairs = data.pop("seconds", 0), data.pop("chunks", ())
        chunks = tuple((past, new) for past, new in pairs)
        good = not data and _is_step(counts, chunks) and 0 < seconds < float("inf")
    except (TypeError, ValueError):
        good = False
    if not good:
        message = (
            "is not a step: give decodes, context_tokens and draft_tokens as counts, chunks as [past, new] tokens, at "
            "least one of decodes and chunks, drafts only with decodes, positive seconds, and no other keys"
        )
        raise SpecError(Problem(str(path), message, "", number))
    decodes, context, drafts = counts
    work = StepWork(decodes, context, chunks, decodes + len(chunks), draft_tokens=drafts)
    return _timed(work, float(seconds), path, number)


def _is_step(counts: tuple[Any, ...], chunks: tuple[tuple[Any, Any], ...]) -> bool:
    """Return whether the counts and chunks are those of a step. Raises TypeError if one cannot be compared to a
    number."""
    decodes, _, drafts = counts
    integers = {type(n) for n in (*counts, *(n for pair in chunks for n in pair))} <= {int}
    lengths = all(past >= 0 and new > 0 for past, new in chunks)
    return integers and lengths and min(counts) >= 0 and (decodes > 0 or (len(chunks) > 0 and drafts == 0))


def _csv(columns: Columns, subject: _Subject) -> Log:
    """Read rows; the chunks of one row are taken as equal, each after the same past."""
    _check(columns.path, subject, _identity(columns))
    count = len(columns)
    columns_or_defaults = {
        name: columns.numbers(name) if name in columns.names else np.full(count, default)
        for name, default in (*((name, 0.0) for name in _CSV), ("prefill_chunks", 1.0), ("prefill_past", 0.0))
    }
    log = Log()
    for at, row in enumerate(zip(*columns_or_defaults.values(), strict=True)):
        if not np.isfinite(row).all() or min(row) < 0:
            log.left_out["a value is missing or negative"] += 1
            continue
        decodes, context, prefill, seconds, pieces, past = row
        if seconds == 0 or not decodes + prefill:
            log.left_out["no time or no tokens"] += 1
            continue
        if max(row) > _MOST_TOKENS or pieces > prefill + 1:
            message = f"is not a step: no number may exceed {_MOST_TOKENS:g}, nor prefill_chunks prefill_tokens"
            raise SpecError(Problem(str(columns.path), message, "", columns.line(at)))
        chunks = _equal_chunks(int(prefill), max(1, int(pieces)), int(past))
        batch = StepWork(int(decodes), int(context), chunks, int(decodes) + len(chunks))
        log.steps.append(_timed(batch, float(seconds), columns.path, columns.line(at)))
    return log


def _timed(batch: StepWork, seconds: float, path: Path, line: int) -> TimedStep:
    """Return the step. Raises SpecError for a step that no engine runs."""
    counts = (batch.num_decodes, batch.context_tokens, batch.draft_tokens)
    largest = max(*counts, *(n for chunk in batch.chunks for n in chunk), 0)
    if largest > _MOST_TOKENS:
        raise SpecError(Problem(str(path), f"is not a step: a count of {largest:,} exceeds {_MOST_TOKENS:g}", "", line))
    if batch.context_tokens < batch.num_decodes or bool(batch.context_tokens) > bool(batch.num_decodes):
        message = f"cannot be {batch.context_tokens:,} for {batch.num_decodes:,} decodes: each has a token at least"
        raise SpecError(Problem(str(path), message, "context_tokens", line))
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        message = f"is not the time of a step: {seconds:g} s; must be between {_SHORTEST_S:g} and {_LONGEST_S:g} s"
        raise SpecError(Problem(str(path), message, "seconds", line))
    return TimedStep(batch, seconds)


def _identity(columns: Columns) -> dict[str, str]:
    """Return the identity in the columns. Raises SpecError if a column has several values."""
    identity = {}
    for name in _IDENTITY:
        if name in columns.names and len(columns):
            value = columns.only(name)
            if value is None:
                raise SpecError(Problem(str(columns.path), "has several values; split the log, one for each", name))
            identity[name] = value
    return identity


def _equal_chunks(tokens: int, count: int, past: int) -> tuple[tuple[int, int], ...]:
    """Return (past, new) of `count` chunks that share the tokens; those that would get none are left out."""
    share, more = divmod(tokens, count)
    sizes = [share + (i < more) for i in range(count)]
    return tuple((past, size) for size in sizes if size)


def _splitwise(columns: Columns, subject: _Subject) -> Log:
    """Read rows of the subject's model, device and tp. Token times are of decodes half-way through their output."""
    columns.require("model", "hardware", "tensor_parallel")
    of_subject = (
        np.array([_plain(name) == _plain(subject.model.name) for name in columns.text("model")], dtype=np.bool_)
        & np.array([designation(name) == designation(subject.device) for name in columns.text("hardware")])
        & (columns.numbers("tensor_parallel") == subject.tp)
    )
    if not of_subject.any():
        names = (columns.text("model"), columns.text("hardware"), columns.text("tensor_parallel"))
        available = ", ".join(
            sorted({f"{model} on {device} at tp {tp}" for model, device, tp in zip(*names, strict=True)})
        )
        subject_words = f"{subject.model.name} on {subject.device} at tp {subject.tp}"
        raise SpecError(Problem(str(columns.path), f"has no row of {subject_words}; its rows are of {available}"))
    log = Log()
    log.left_out["of another model, device or tp"] = int((~of_subject).sum())
    for row in np.stack([columns.numbers(name) for name in _SPLITWISE], axis=-1)[of_subject]:
        if not (row > 0).all():
            log.left_out["a value is missing or not positive"] += 1
            continue
        (prompt, batch, tokens), (prompt_s, token_s) = row[:3].astype(int).tolist(), (row[3:] * MS).tolist()
        log.steps.append(TimedStep(StepWork(0, 0, ((0, prompt),) * batch, batch), prompt_s))
        log.steps.append(TimedStep(StepWork(batch, batch * (prompt + tokens // 2), (), batch), token_s))
    return log


class _RequestState:
    """Progress of one request in a step log."""

    def __init__(self, prompt_tokens: int) -> None:
        self.known, self.computed, self.prompt_tokens = prompt_tokens, 0, prompt_tokens


def _steplog(path: Path, header: dict[str, Any], lines: Iterable[tuple[int, dict[str, Any]]], subject: _Subject) -> Log:
    """Read a steplog/1: every step's batch follows from the lines before it; see the README of the format."""
    shape, model = header.get("model") or {}, subject.model
    sizes = (shape.get("layers"), shape.get("hidden"), shape.get("vocab"))
    if sizes != (model.num_layers, model.hidden_size, model.vocab_size):
        message = "is of a model with {} layers, hidden size {} and vocabulary {}, not of ".format(*sizes)
        raise SpecError(Problem(str(path), message + model.name, "model", 1))
    if header.get("draft_model"):
        raise SpecError(Problem(str(path), "has draft tokens, which a correction cannot use", "draft_model", 1))
    _check(path, subject, {"tp": "1"})
    requests: dict[str, _RequestState] = {}
    log = Log()
    for number, data in lines:
        try:
            if "req" in data:
                requests[data["req"]] = _RequestState(_count(data["prompt_len"]))
            if "sched" not in data:
                continue
            for name in (*data.get("preempt", ()), *data.get("reset_before", ())):
                requests[name].computed = 0
            for name, computed in data.get("admit", {}).items():
                requests[name].computed = _count(computed)
            batch = _scheduled([(requests[name], _count(tokens)) for name, tokens in data["sched"].items()])
            for name in data.get("reset_after", ()):
                requests[name].computed = 0
            cpu = data.get("cpu")
            seconds = sum(cpu) if isinstance(cpu, list) else cpu
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise SpecError(Problem(str(path), f"is not a line of a steplog/1: {error!r}", "", number)) from None
        if seconds:
            log.steps.append(_timed(batch, float(seconds), path, number))
        else:
            log.left_out["no time"] += 1
    return log


def _count(value: Any) -> int:
    """Return a count of tokens. Raises TypeError for anything else."""
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count of tokens")
    return value


def _scheduled(work: Sequence[tuple[_RequestState, int]]) -> StepWork:
    """Return the batch in which each request gets its number of tokens, and advance the requests."""
    decodes = context = samples = 0
    chunks = []
    for request, tokens in work:
        if tokens == 1 and request.computed == request.known - 1 and request.known > request.prompt_tokens:
            decodes += 1
            context += request.known
        else:
            chunks.append((request.computed, tokens))
        request.computed += tokens
        if request.computed == request.known:
            request.known += 1
            samples += 1
    return StepWork(decodes, context, tuple(chunks), max(1, samples))


def calibrate(model: Model, hardware: Hardware, pool: Pool, log: Log, source: Path) -> Calibration:
    """Return scale and offset for the kinds of steps of which the log has at least FEWEST.

    Raises SpecError if there is none, or a correction is so large that the log must be of another model or device.
    """
    plain = StepModel(model, hardware.model_copy(update={"calibration": None}), pool)
    corrections: dict[str, Correction] = {}
    counts = Counter(step.kind for step in log.steps)
    for kind, count in sorted(counts.items()):
        if count >= FEWEST:
            steps = [step for step in log.steps if step.kind == kind]
            predicted_s = np.array([plain.gpu_s(step.batch) for step in steps])
            corrections[kind] = _correction(source, kind, predicted_s, np.array([step.seconds for step in steps]))
    if not corrections:
        available = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"
        raise SpecError(
            Problem(str(source), f"at least {FEWEST} decode or prefill steps are needed; the log has {available}")
        )
    return Calibration(
        model=model.name, tp=pool.parallelism.tp, pp=pool.parallelism.pp, source=source.name, **corrections
    )


def _check_usable(source: Path, kind: str, scale: float, median_after: float) -> None:
    """Raise SpecError for a correction that is too large, or leaves too large an error, to be used."""
    if not 1 / LARGEST_SCALE <= scale <= LARGEST_SCALE:
        message = f"{kind} steps would be scaled by {scale:.3g}: " + (
            "this is a log of another device or model than the profile is used for, or its times are in another unit"
            if scale > 1
            else "its steps take the same whatever is in them, so that nothing follows for larger ones, or its times "
            "are in another unit; give a log with batches of many sizes"
        )
        raise SpecError(Problem(str(source), message))
    if median_after > LARGEST_ERROR:
        message = (
            f"{kind} steps would still be {median_after:.0%} off at the median: a scale and an offset do "
            "not describe this log"
        )
        raise SpecError(Problem(str(source), message))


def _correction(source: Path, kind: str, predicted_s: Array, measured_s: Array) -> Correction:
    """Return the correction fitted on all steps; its errors are those of fits on either half, tested on the other.

    Raises SpecError as `_check_usable` does.
    """
    halves = np.array_split(np.random.default_rng(0).permutation(len(predicted_s)), 2)
    errors = []
    for fitted, held_back in (halves, halves[::-1]):
        scale, offset_s = two_numbers(predicted_s[fitted], measured_s[fitted])
        errors.append(np.abs((scale * predicted_s[held_back] + offset_s) / measured_s[held_back] - 1))
    before, after = np.abs(predicted_s / measured_s - 1), np.concatenate(errors)
    scale, offset_s = two_numbers(predicted_s, measured_s)
    _check_usable(source, kind, scale, float(np.median(after)))
    return Correction(
        scale=_short(scale),
        offset_s=_short(offset_s),
        steps=len(predicted_s),
        median_before=round(float(np.median(before)), 4),
        p90_before=round(float(np.quantile(before, 0.9)), 4),
        median_after=round(float(np.median(after)), 4),
        p90_after=round(float(np.quantile(after, 0.9)), 4),
    )


def two_numbers(predicted_s: Array, measured_s: Array) -> tuple[float, float]:
    """Fit scale, offset_s >= 0 by a soft-L1 loss of the log ratio, from three starts."""
    from scipy.optimize import least_squares

    log_measured = np.log(measured_s)

    def off(theta: Array) -> Array:
        log_ratio: Array = np.log(np.exp(theta[0]) * predicted_s + np.exp(theta[1])) - log_measured
        return log_ratio

    start = np.log(np.median(measured_s / predicted_s))
    fits = [
        least_squares(off, [start, np.log(share * measured_s.min())], loss="soft_l1", f_scale=0.05)
        for share in (1e-3, 0.1, 0.9)
    ]
    scale, offset_s = np.exp(min(fits, key=lambda fit: float(fit.cost)).x)
    return float(scale), float(offset_s)


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def words(calibration: Calibration) -> str:
    """Return the calibration as one sentence for reports."""
    parts = [
        f"{kind} steps x {c.scale:.3g} + {1e3 * c.offset_s:.3g} ms (median error {c.median_before:.1%} before, "
        f"{c.median_after:.1%} after, {c.steps:,} steps)"
        for kind, c in (("decode", calibration.decode), ("prefill", calibration.prefill))
        if c is not None
    ]
    return f"{', '.join(parts)}; from {calibration.source}: {calibration.model} at tp {calibration.tp}" + (
        f" pp {calibration.pp}" if calibration.pp > 1 else ""
    )
