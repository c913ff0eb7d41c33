"""Request traces: when each request arrived, with how many tokens.

Formats of files are recognised by their content, plain or gzip-compressed:

* CSV with a wall clock: `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure LLM inference traces);
* JSON lines: `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids` (Mooncake);
* CSV with a header that names its columns as in `COLUMNS`, with commas, semicolons, tabs or bars between them; times
  are numbers or a clock (`simtune.specs.trace_formats.clocks`); without an arrival column it is lengths only;
* the same with `session_id` and `delay` (`simtune.specs.trace_formats.mooncake_sessions`);
* what load generators and gateways write, conversations, and runs of agents: `simtune.specs.trace_formats`.

Columns may also be named by hand (`LogReading.columns`). Further columns are ignored, with a note. A trace with
anything wrong in it is refused with all its problems, the first MAX_SHOWN of them in full.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.errors import Problem, SpecError
from simtune.specs.input_files import (
    JsonError,
    csv_rows,
    decoded,
    delimiter_of,
    numbered_lines,
    parse_json,
    read_bytes,
    unpacked,
)
from simtune.specs.media import MOST_ITEMS
from simtune.specs.scrapes import is_scrape
from simtune.specs.text_blocks import TextBlocks
from simtune.specs.trace_formats import (
    AS_IT_IS,
    SHARED_BLOCK_TOKENS,
    LogReading,
    LogRequests,
    TraceFormat,
    binary_title,
    cached_note,
    clocks,
    recognised,
    stranger,
)
from simtune.specs.trace_formats.clocks import EARLIEST_S
from simtune.specs.trace_formats.log_rows import first_value, look_up
from simtune.specs.trace_formats.mooncake_sessions import has_delays, read_sessions
from simtune.specs.trace_formats.session_rows import SessionLog, turns_of
from simtune.specs.trace_media import (
    IMAGE_COUNTS,
    MEDIA_COLUMNS,
    TraceItem,
    check_places,
    in_contexts,
    media_note,
    read_media,
)
from simtune.specs.trace_turns import TraceTurns
from simtune.specs.workload import MAX_TOKENS

MAX_SHOWN = 20
MOONCAKE_BLOCK_TOKENS = 512
MAX_HASH_ID = 2**62
LONGEST_TRACE_S = 36_500 * 86_400.0
COLUMNS = {
    "arrival": ("arrival_s", "arrival_time_s", "arrived_at", "arrival_ms", "arrival_time_ms", "arrival_ns",
                "arrival_time_ns", "timestamp"),
    "prompt": ("prompt_tokens", "input_tokens", "context_tokens", "contexttokens", "num_prefill_tokens",
               "input_length", "input_toks"),
    "output": ("output_tokens", "generated_tokens", "generatedtokens", "completion_tokens",
               "num_decode_tokens", "output_length", "output_toks"),
}  # fmt: skip
"""Names of the columns, whatever their case; the first name of each is simtune's own."""

ADAPTER = "adapter"
"""Name of the column of LoRA adapters."""
NUM_IMAGES = "num_images"
"""Field of the number of images of each request."""

_CACHED = ("cached_tokens", "num_cached_tokens", "prompt_cached_tokens")
"""Names of a column of prompt tokens that were found in a prefix cache."""

_WALL_CLOCK = re.compile(r"(19|20)\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?")
"""Form of most times: such columns are parsed as a whole, others one value at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of arrival. arrival_s counts from the first request; None in a lengths-only trace.

    hash_ids names the prompt's blocks of block_tokens each: equal leading ids are a shared prefix.
    """

    file: str
    sha256: str
    arrival_s: Array | None
    prompt_tokens: Ints
    output_tokens: Ints
    hash_ids: Sequence[tuple[int, ...]] | None = None
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    session: Ints | None = None
    """Conversation of which each request is a turn, numbered by first turn; None if the file has none."""
    turns: TraceTurns | None = None
    """Turns that wait for the answers before them; then requests are in order of sessions, and arrival_s is that of
    the session. None if every request has a time of its own."""
    adapter: Ints | None = None
    """LoRA adapter of each request, numbered by first request, -1 for the base model; None if the file names none."""
    media: tuple[tuple[TraceItem, ...], ...] | None = None
    """Images, videos and recordings in each prompt, those of earlier turns in its context included; prompt_tokens does
    not count them. None if the file has none."""
    num_images: Ints | None = None
    """Number of images of each request, if the file states no more of them; their sizes are those of a workload."""
    began_s: float | None = None
    """Time of day of the first request, in seconds since 1970 UTC; None if the file has none."""
    notes: tuple[str, ...] = ()
    """Notes on what was left out or estimated, and what kind of file it was."""
    ignored: tuple[str, ...] = ()
    """Columns that were not read."""

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def arrivals_s(self) -> Array | None:
        """Times of arrivals: of sessions if turns wait for answers, else of requests; None in a lengths-only trace."""
        if self.arrival_s is None or self.turns is None:
            return self.arrival_s
        return self.arrival_s[self.turns.first[:-1]]

    @property
    def num_arrivals(self) -> int:
        """Number of sessions if turns wait for answers, else of requests."""
        return len(self) if self.turns is None else len(self.turns.first) - 1

    @property
    def rate_rps(self) -> float | None:
        """Arrivals per second: one over the mean gap. None without arrival times or if all arrive at the same time."""
        if self.arrival_s is None or not self.arrival_s[-1] > 0:
            return None
        return (self.num_arrivals - 1) / float(self.arrival_s[-1])


def read_trace(path: Path, reading: LogReading = AS_IT_IS) -> Trace:
    """Read a trace file. Raises SpecError with the problems, UsageError if it cannot be read."""
    raw = read_bytes(path)
    problems = _Faults(str(path))
    binary = binary_title(raw)
    if binary is not None:
        problems.stop(binary, None)
    text = decoded(path, unpacked(path, raw))
    start = text.lstrip()[:1]
    if is_scrape(text):
        problems.stop(
            "looks like a scrape of a server's metrics, which counts requests and holds none; make a load of it: "
            "simtune workload FILE... --out load.yaml", 1,
        )  # fmt: skip
    if start == "":
        problems.stop("the file is empty; a trace has one request per line", None)
    recognition = None if reading.columns else recognised(text)
    wrong = None if recognition is not None else stranger(text)
    if wrong is not None:
        problems.stop(wrong, None)
    if recognition is None and start == "[":
        problems.stop("a JSON list was found; write one JSON object per line (JSON lines)", 1)
    if recognition is not None:
        table = _formatted_table(*recognition, reading, problems)
    else:
        table = (_json_table if start == "{" else _csv_table)(text, problems, dict(reading.columns))
    if reading.zero_output != "refuse":
        table = _without_zeros(table, reading, problems)
    return _trace(path, raw, table, problems)


def _trace(path: Path, raw: bytes, table: _TraceTable, problems: _Faults) -> Trace:
    arrival_s, began_s = _arrival_s(table, problems)
    prompt = _lengths(table, "prompt", problems)
    output = _lengths(table, "output", problems)
    hash_ids = (
        table.values.get("hash_ids")
        if table.per_s
        else _hash_ids(table, prompt + (output if "after" in table.values else 0), problems)
    )
    problems.raise_if_any()
    prompt_tokens, output_tokens = prompt.astype(np.int64), output.astype(np.int64)
    session = _numbered(table.values["session"]) if "session" in table.values else None
    turns = table.turns
    if turns is None and "after" in table.values:
        turns = turns_of(table.values, table.lines, problems)
    adapter, media, num_images = (
        _adapters(table, problems),
        _media(table, prompt, problems),
        _image_counts(table, problems),
    )
    for column in (arrival_s, prompt_tokens, output_tokens, session, adapter, num_images):
        if column is not None:
            column.flags.writeable = False
    return Trace(
        file=str(path),
        sha256=hashlib.sha256(raw).hexdigest(),
        arrival_s=arrival_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        hash_ids=hash_ids if hash_ids is None or isinstance(hash_ids, TextBlocks) else tuple(hash_ids),
        block_tokens=table.block_tokens,
        session=session,
        turns=turns,
        adapter=adapter,
        media=media,
        num_images=num_images,
        began_s=began_s,
        notes=(*table.notes, *([] if media is None else [media_note(media)]), *_counts_note(num_images)),
        ignored=table.ignored,
    )


def _numbered(values: Sequence[Any]) -> Ints:
    """Whole numbers in place of names, in order of appearance."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


def _adapters(table: _TraceTable, problems: _Faults) -> Ints | None:
    """Return the numbers of the adapters that a column names; an empty cell or null is the base model."""
    if ADAPTER not in table.values:
        return None
    for value, line in zip(table.values[ADAPTER], table.lines, strict=True):
        if value is not None and not isinstance(value, (str, int)):
            problems.add(f"must be the name of an adapter or null, not {reprlib.repr(value)}", line, ADAPTER)
    problems.raise_if_any()
    return adapter_numbers(table.values[ADAPTER])


def adapter_numbers(names: Sequence[Any]) -> Ints:
    """Return whole numbers in place of names of adapters, in order of appearance; -1 for None and empty names."""
    numbers: dict[Any, int] = {}
    column = [-1 if name is None or name == "" else numbers.setdefault(name, len(numbers)) for name in names]
    return np.array(column, dtype=np.int64)


def _media(table: _TraceTable, prompt: Array, problems: _Faults) -> tuple[tuple[TraceItem, ...], ...] | None:
    """Return the media in the prompt of each request, whose text has `prompt` tokens."""
    media = read_media(table.values, table.lines, problems)
    problems.raise_if_any()
    if media is None:
        return None
    before = [0] * len(table.lines) if table.text_before is None else table.text_before
    check_places(media, (prompt.astype(np.int64) - before).tolist(), table.lines, problems)
    problems.raise_if_any()
    if table.turns is None or table.text_before is None:
        return media
    return in_contexts(media, before, table.lines, table.turns.first)


def _counts_note(num_images: Ints | None) -> list[str]:
    if num_images is None:
        return []
    number, requests = f"{int(num_images.sum()):,}", f"{int((num_images > 0).sum()):,} of {len(num_images):,}"
    return [
        f"{number} images in {requests} requests, without their sizes: a workload with this trace and with images: "
        "{sizes: ...} has them, others leave them out"
    ]


def _image_counts(table: _TraceTable, problems: _Faults) -> Ints | None:
    """Return the number of images of each request; None if the file does not state it alone."""
    if NUM_IMAGES not in table.values:
        return None
    counts = _numbers(table, NUM_IMAGES, problems)
    for i in np.flatnonzero((counts < 0) | (counts > MOST_ITEMS) | (counts != np.floor(counts))).tolist():
        value = f"{counts[i]:.17g}"
        message = f"must be a whole number of images from 0 to {MOST_ITEMS:,}, not {value}"
        problems.add(message, table.lines[i], table.names[NUM_IMAGES])
    problems.raise_if_any()
    return counts.astype(np.int64)


# --- reading ----------------------------------------------------------------------------------------------


class _Faults:
    """Collects what is wrong with one file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []

    def __len__(self) -> int:
        return len(self.problems)

    def add(self, message: str, line: int | None, key: str = "") -> None:
        self.problems.append(Problem(self.file, message, key, line))

    def stop(self, message: str, line: int | None, key: str = "") -> None:
        """Add a problem after which nothing else in the file can be judged."""
        self.add(message, line, key)
        self.raise_if_any()

    def raise_if_any(self) -> None:
        if not self.problems:
            return
        problems = sorted(self.problems, key=lambda p: p.line or 0)
        if len(problems) > MAX_SHOWN:
            more = Problem(self.file, f"... and {len(problems) - MAX_SHOWN} more")
            problems = [*problems[:MAX_SHOWN], more]
        raise SpecError(problems)


@dataclass(slots=True)
class _TraceTable:
    """The columns that were found: what each is called in the file, its values, and the line of each row."""

    names: dict[str, str]
    values: Mapping[str, Sequence[Any]]
    lines: Sequence[int]
    is_json: bool
    per_s: float | None = None
    """Arrival units in a second, for a format that defines them; else the column's name does."""
    notes: Sequence[str] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    ignored: tuple[str, ...] = ()
    unit: str | None = None
    """Unit of arrivals if the column was named by hand: s, ms or ns."""
    turns: TraceTurns | None = None
    text_before: Sequence[int] | None = None
    """Tokens of text before what each turn adds, if turns add media."""


def _formatted_table(
    form: TraceFormat, objects: list[Any], lines: list[int], reading: LogReading, problems: _Faults
) -> _TraceTable:
    """Return the requests of a known format in order of arrival: load generators write them as they end."""
    log: LogRequests = form.read(objects, lines, reading, problems)
    if not log.lines:
        problems.stop("no request is left", lines[0])
    return _log_table(log, f"read as {form.title}")


def _log_table(log: LogRequests, *notes: str) -> _TraceTable:
    """Return the requests of a log in order of arrival; those of sessions are in order of sessions already."""
    values, at, notes = log.values, log.lines, (*notes, *log.notes)
    if isinstance(log, SessionLog):
        table = _TraceTable(log.names, values, at, True, log.per_s, notes, log.block_tokens)
        return replace(table, turns=log.turns, text_before=log.text_before)
    times = values.get("arrival")
    if times is not None and all(isinstance(t, (int, float)) for t in times):
        order = sorted(range(len(times)), key=times.__getitem__)
        values = {field: [column[i] for i in order] for field, column in values.items()}
        at = [at[i] for i in order]
    return _TraceTable(log.names, values, at, True, log.per_s, notes, SHARED_BLOCK_TOKENS)


def _without_zeros(table: _TraceTable, reading: LogReading, problems: _Faults) -> _TraceTable:
    """Return the table without requests of no output token, or with one token for each."""
    column = table.values["output"]
    zero = [_is_zero(value) for value in column]
    count = sum(zero)
    if not count:
        return table
    if reading.zero_output == "one":
        ones: Sequence[Any] = [
            ("1" if isinstance(x, str) else 1) if z else x for x, z in zip(column, zero, strict=True)
        ]
        notes = [*table.notes, f"{count:,} requests of no output token are given one"]
        return replace(table, values={**table.values, "output": ones}, notes=notes)
    if table.turns is not None:
        problems.stop(
            "generates nothing, and other turns wait for it; give it a token: simtune workload --zero-output one",
            table.lines[zero.index(True)],
            table.names["output"],
        )
    nonzero = [not z for z in zero]
    values = {field: list(compress(values, nonzero)) for field, values in table.values.items()}
    notes = [*table.notes, f"{count:,} requests of no output token left out"]
    return replace(table, values=values, lines=list(compress(table.lines, nonzero)), notes=notes)


def _is_zero(value: Any) -> bool:
    return (isinstance(value, str) and _is_number(value) and float(value) == 0) or value == 0


def _csv_table(text: str, problems: _Faults, asked: Mapping[str, str]) -> _TraceTable:
    delimiter = delimiter_of(text)
    rows, lines = csv_rows(text, problems.file, delimiter)
    header = [cell.strip() for cell in rows[0]]
    names = _named_columns(header, asked, problems, lines[0])
    if len(rows) == 1:
        problems.stop("the trace is empty: a header and no request", lines[0])
    if set(map(len, rows)) != {len(header)}:
        complete = _rows_as_long_as_the_header(rows, lines, problems)
        rows, lines = [rows[i] for i in complete], [lines[i] for i in complete]
        if len(rows) == 1:
            problems.raise_if_any()
    names |= {name: name for name in (ADAPTER, *MEDIA_COLUMNS) if name in header} | _counts_column(header)
    columns = dict(zip(header, zip(*rows[1:], strict=True), strict=True))
    values: dict[str, Sequence[str]] = {field: columns[name] for field, name in names.items()}
    # Spreadsheets that separate cells by semicolons write decimal commas.
    if delimiter == ";":
        values = {field: _with_points(values[field], name, lines[1:], problems) for field, name in names.items()}
    table = _TraceTable(names, values, lines[1:], is_json=False, ignored=_ignored(header, names))
    cached = next((column for name, column in columns.items() if name.lower() in _CACHED), ())
    return replace(table, notes=[*_unread(table), *cached_note(cached, values["prompt"])], unit=_unit(names, asked))


def _counts_column(columns: Iterable[str]) -> dict[str, str]:
    """Return the column with the number of images, if there is one and no column with the images themselves."""
    counts = [name for name in columns if name.lower() in IMAGE_COUNTS]
    return {NUM_IMAGES: counts[0]} if counts and "images" not in columns else {}


_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
_THOUSANDS = re.compile(r"\d{1,3}(\.\d{3})+")


def _with_points(values: Sequence[str], name: str, lines: Sequence[int], problems: _Faults) -> Sequence[str]:
    """Return cells of a spreadsheet with decimal commas, with points in their place. What may be meant as thousands is
    reported."""
    for value, line in zip(values, lines, strict=True):
        if _THOUSANDS.fullmatch(value.strip()):
            problems.stop(
                f"{value} may be {value.replace('.', '')} or a fraction; write numbers without points", line, name
            )
    return [value.replace(",", ".") if _DECIMAL_COMMA.fullmatch(value.strip()) else value for value in values]


def _unread(table: _TraceTable) -> list[str]:
    """A note if no column gives arrivals and some column may, for it is not read."""
    if "arrival" in table.names or not table.ignored:
        return []
    return [f"no column gives arrivals, so it is lengths only; not read: {', '.join(table.ignored)}. {_ARRIVALS}"]


def _rows_as_long_as_the_header(rows: Sequence[Sequence[str]], lines: Sequence[int], problems: _Faults) -> list[int]:
    """Numbers of the rows with a value for each column; all others are reported."""
    width = len(rows[0])
    for row, line in zip(rows, lines, strict=True):
        if len(row) != width:
            cut = "; the file seems to be cut off" if line == lines[-1] and len(row) < width else ""
            problems.add(f"has {len(row)} columns, the header has {width}{cut}", line)
    return [i for i, row in enumerate(rows) if len(row) == width]


def _json_table(text: str, problems: _Faults, asked: Mapping[str, str]) -> _TraceTable:
    rows, lines = _json_rows(text, problems)
    if not rows:
        problems.raise_if_any()
    if not asked and has_delays(rows):
        return _log_table(read_sessions(rows, lines, problems))
    rows = _with_dotted(rows, asked)
    names = _named_columns(list(rows[0]), asked, problems, lines[0])
    names |= _optional(rows) | _counts_column(list(rows[0]))
    rows, lines = _complete_rows(rows, lines, names, problems)
    values = {field: [row[name] for row in rows] for field, name in names.items()}
    # a line without such a key has no items
    media = {name: name for name in MEDIA_COLUMNS if any(name in row for row in rows)}
    values |= {name: [row.get(name) for row in rows] for name in media}
    names |= media
    ignored = _ignored(chain.from_iterable(rows), names)
    block_tokens = _block_tokens(rows[0], lines[0], problems)
    table = _TraceTable(names, values, lines, is_json=True, block_tokens=block_tokens, ignored=ignored)
    cached = [] if "hash_ids" in names else [first_value(row, _CACHED) for row in rows]
    return replace(table, notes=[*_unread(table), *cached_note(cached, values["prompt"])], unit=_unit(names, asked))


def _complete_rows(
    rows: list[dict[str, Any]], lines: list[int], names: Mapping[str, str], problems: _Faults
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the rows that have every named column, and their lines; a missing value is reported."""
    complete = []
    for i, row in enumerate(rows):
        absent = [name for name in names.values() if name not in row]
        for name in absent:
            problems.add("is missing here", lines[i], name)
        if not absent:
            complete.append(i)
    if not complete:
        problems.raise_if_any()
    return [rows[i] for i in complete], [lines[i] for i in complete]


def _with_dotted(rows: list[dict[str, Any]], asked: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows with the values at the dotted keys that were named by hand, such as usage.prompt_tokens."""
    dotted = [name for name in asked.values() if "." in name and name not in rows[0]]
    return [row | {name: look_up(row, name) for name in dotted} for row in rows] if dotted else rows


def _optional(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Columns that a trace has or has not, which must then be in all of its lines."""
    return {
        name: name for name in ("hash_ids", "session", "after", "pause_s", ADAPTER) if any(name in row for row in rows)
    }


def _block_tokens(row: Mapping[str, Any], line: int, problems: _Faults) -> int:
    """Return the tokens of a block by the first line of a trace that simtune wrote."""
    tokens = row.get("block_tokens", MOONCAKE_BLOCK_TOKENS)
    if type(tokens) is not int or tokens < 1:
        problems.stop(f"must be a whole number of tokens, not {tokens!r}", line, "block_tokens")
    return int(tokens)


def _json_rows(text: str, problems: _Faults) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects of all lines that are not empty, and their lines; what is no object is reported."""
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    texts = list(numbered_lines(text))
    last = texts[-1][0]
    for number, line in texts:
        try:
            row = parse_json(line)
        except JsonError as error:
            cut = "; the file seems to be cut off" if number == last else ""
            problems.add(f"not valid JSON: {error}{cut}", number)
            continue
        if isinstance(row, dict):
            rows.append(row)
            lines.append(number)
        else:
            problems.add("must be a JSON object with one request", number)
    return rows, lines


def _unit(names: Mapping[str, str], asked: Mapping[str, str]) -> str | None:
    """The unit of arrivals that were named by hand, as in `arrival_ms=ts`."""
    key = next((key for key, name in asked.items() if name == names.get("arrival")), "")
    return key.partition("_")[2] or None


def _named_by_hand(asked: Mapping[str, str], header: Sequence[str], problems: _Faults, line: int) -> dict[str, str]:
    """Field -> column name, of those that were named by hand. Stops if there is none of that name."""
    for name in asked.values():
        if name not in header:
            close = difflib.get_close_matches(name, header, n=1)
            hint = f", did you mean {close[0]}?" if close else ""
            problems.stop(f"--columns: no column has this name{hint}; found: {', '.join(header)}", line, name)
    return {key.partition("_")[0]: name for key, name in asked.items()}


def _named_columns(header: Sequence[str], asked: Mapping[str, str], problems: _Faults, line: int) -> dict[str, str]:
    """Return field -> column name as written. Stops if a length column is missing or a name occurs twice."""
    if all(_is_number(cell) for cell in header):
        problems.stop(f"the first line must name the columns, for example {_EXAMPLE_HEADER}", line)
    names = _named_by_hand(asked, header, problems, line)
    unnamed = [cell for cell in header if cell not in names.values()]
    before = len(problems)
    for field in (field for field in COLUMNS if field not in names):
        columns = _columns_of(field, unnamed)
        if len(columns) > 1:
            problems.add(f"{' and '.join(columns)} both give the {field}; keep one of them", line, columns[1])
        if columns:
            names[field] = columns[0]
        else:
            _report_missing(field, header, problems, line)
    if len(problems) > before:
        if "arrival" not in names and not any("did you mean" in problem.message for problem in problems.problems):
            problems.add(f"no column gives arrivals either. {_ARRIVALS}", line)
        problems.raise_if_any()
    return names


def _columns_of(field: str, header: Sequence[str]) -> list[str]:
    """The columns with a name of the field; for arrivals without any, the one whose name is most surely a clock's."""
    columns = [cell for cell in header if cell.lower() in COLUMNS[field]]
    return columns or (_clock_columns(header) if field == "arrival" else [])


def _clock_columns(header: Sequence[str]) -> list[str]:
    """Return the column whose name is most surely that of a time, if any."""
    time_names = [name.lower() for name in clocks.NAMES]
    columns = sorted(
        (cell for cell in header if cell.lower() in time_names), key=lambda cell: time_names.index(cell.lower())
    )
    return columns[:1]


def _ignored(columns: Iterable[str], names: Mapping[str, str]) -> tuple[str, ...]:
    """Columns that are none of those found."""
    return tuple(name for name in dict.fromkeys(columns) if name not in names.values())


def _report_missing(field: str, header: Sequence[str], problems: _Faults, line: int) -> None:
    """Report a column that may be the field, misspelt; else that the field is missing. Arrivals may be."""
    aliases = COLUMNS[field]
    for cell in header:
        if any(cell.lower() in names for names in COLUMNS.values()):
            continue
        close = difflib.get_close_matches(cell.lower(), aliases, n=1, cutoff=0.75)
        if close:
            problems.add(f"unknown column, did you mean {close[0]}?", line, cell)
            return
    if field != "arrival":
        remedy = f"it may also be called {', '.join(aliases[1:])}; another name: {_BY_HAND}"
        problems.add(f"this column is missing; found: {', '.join(header)}; {remedy}", line, aliases[0])


_EXAMPLE_HEADER = "arrival_s,prompt_tokens,output_tokens"
_BY_HAND = "simtune workload FILE --columns arrival=NAME,prompt=NAME,output=NAME"
_ARRIVALS = (
    f"Arrivals may be called {', '.join(COLUMNS['arrival'])} or {', '.join(clocks.NAMES[1:])}, and be numbers or times "
    f"such as {clocks.FORMS}; another name: {_BY_HAND}"
)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _numbers(table: _TraceTable, field: str, problems: _Faults) -> Array:
    """Return the column as floats; what is no finite number is reported and becomes NaN."""
    values, name = table.values[field], table.names[field]
    expected_types: tuple[type, ...] = (int, float) if table.is_json else (str,)
    # A whole column is converted at once; cells are only tried one by one if that fails, to report their lines.
    if set(map(type, values)).issubset(expected_types):
        try:
            numbers = np.array(list(map(float, values)))
            if np.isfinite(numbers).all():
                return numbers
        except (ValueError, OverflowError):
            pass
    numbers = np.full(len(values), np.nan)
    for i, value in enumerate(values):
        try:
            if type(value) not in expected_types:
                raise ValueError
            numbers[i] = float(value)
            if not np.isfinite(numbers[i]):
                raise ValueError
        except (ValueError, OverflowError):
            numbers[i] = np.nan
            cell = "an empty cell" if value == "" else reprlib.repr(value)
            problems.add(f"must be a finite number, not {cell}", table.lines[i], name)
    return numbers


def _lengths(table: _TraceTable, field: str, problems: _Faults) -> Array:
    numbers = _numbers(table, field, problems)
    remedy = {
        "prompt": "drop requests without a prompt",
        "output": "drop requests that generated nothing, or give the first token its 1: simtune workload --zero-output",
    }[field]
    wrong = (numbers < 1) | (numbers > MAX_TOKENS) | (numbers != np.floor(numbers)) & ~np.isnan(numbers)
    for i in np.flatnonzero(wrong).tolist():
        value = f"{numbers[i]:.17g}"
        if numbers[i] != np.floor(numbers[i]):
            message = f"must be a whole number of tokens, not {value}"
        elif numbers[i] < 1:
            message = f"must be at least 1 token, not {value}; {remedy}"
        else:
            message = f"must be at most {MAX_TOKENS} tokens, not {value}"
        problems.add(message, table.lines[i], table.names[field])
    return numbers


def _arrival_s(table: _TraceTable, problems: _Faults) -> tuple[Array | None, float | None]:
    """Return seconds since the first request, and that request's seconds since 1970 if the file has the time of day."""
    if "arrival" not in table.names:
        return None, None
    name, began_s = table.names["arrival"].lower(), None
    if table.per_s is not None:
        times, per_s = _numbers(table, "arrival", problems), table.per_s
        began_s = float(times[0]) / per_s if times[0] / per_s > EARLIEST_S else None
        exact = began_s is not None and not np.isnan(times).any()
        # Nanoseconds since 1970 exceed the 53 bits of a float's mantissa, so the first one is subtracted in integers.
        if exact and all(type(value) is int for value in table.values["arrival"]):
            first = table.values["arrival"][0]
            times = np.array([value - first for value in table.values["arrival"]], dtype=np.float64)
    elif clocks.are_texts(table.values["arrival"]):
        (times, began_s), per_s = _wall_clock_ns(table, problems), 1e9
    else:
        times = _numbers(table, "arrival", problems)
        per_s, began_s = _since(table, name, times, problems)
    good = np.flatnonzero(~np.isnan(times))
    for k in np.flatnonzero(np.diff(times[good]) < 0).tolist():
        previous_row, row = good[k], good[k + 1]
        values = table.values["arrival"]
        earlier = f"{values[row]} is earlier than {values[previous_row]} of line {table.lines[previous_row]}"
        problems.add(f"{earlier}; sort the rows by time", table.lines[row], table.names["arrival"])
    with np.errstate(over="ignore"):
        since_first: Array = (times - times[0]) / per_s
    late = np.flatnonzero(since_first > LONGEST_TRACE_S)
    if len(late):
        longest = f"{LONGEST_TRACE_S / 86_400:,.0f} days"
        problems.add(f"is more than {longest} after the first request", table.lines[late[0]], table.names["arrival"])
    return since_first, began_s


_PER_S = {"s": 1.0, "ms": 1e3, "ns": 1e9}


def _since(table: _TraceTable, name: str, times: Array, problems: _Faults) -> tuple[float, float | None]:
    """Return how many of the units of arrivals make a second, and the first one's seconds since 1970 if they count from
    there. Stops if neither the name nor the size of the numbers shows the unit.
    """
    if table.unit is not None:
        return _PER_S[table.unit], None
    if name in COLUMNS["arrival"] and (name != "timestamp" or table.is_json):
        return 1e3 if name.endswith("_ms") or name == "timestamp" else 1e9 if name.endswith("_ns") else 1.0, None
    good = times[~np.isnan(times)]
    if not len(good):
        return 1.0, None
    units = {clocks.per_second(float(edge)) for edge in (good.min(), good.max())}
    per_s = units.pop()
    if units or per_s is None:
        message = (
            f"must be a time such as {clocks.FORMS}, not {table.values['arrival'][0]}; numbers since the start of a "
            f"log are in a column called arrival_s, arrival_ms or arrival_ns, or named so: --columns arrival_s={name}"
        )
        problems.stop(message, table.lines[0], table.names["arrival"])
    assert per_s is not None
    return per_s, float(good[0]) / per_s


def _wall_clock_ns(table: _TraceTable, problems: _Faults) -> tuple[Array, float | None]:
    """Return nanoseconds since the first good time (exact in a float for 100 days), NaN if reported; and that time."""
    texts = [str(text).strip() for text in table.values["arrival"]]
    times = np.full(len(texts), np.datetime64("NaT", "ns"))
    try:
        if not all(map(_WALL_CLOCK.fullmatch, texts)):
            raise ValueError
        times = np.array([text[: _zone(text)] for text in texts], dtype="datetime64[ns]")
        times -= _ahead(texts)
    except ValueError:
        for i, text in enumerate(texts):
            try:
                at = clocks.text_ns(text)
                if at is None:
                    raise ValueError
                times[i] = at[0] - np.timedelta64(at[1], "m")
            except ValueError:
                if len(problems) > MAX_SHOWN:
                    # A log of a million lines in an unknown form needs no further reports.
                    break
                problems.add(
                    f"must be a time such as {clocks.FORMS}, not {text!r}", table.lines[i], table.names["arrival"]
                )
    good_times = times[~np.isnat(times)]
    if not len(good_times):
        return np.full(len(texts), np.nan), None
    since: Array = (times - good_times[0]) / np.timedelta64(1, "ns")
    return since, float(good_times[0].astype(np.int64)) / 1e9


def _zone(text: str) -> int | None:
    """Return the position at which the offset from UTC begins in a time; None if there is none."""
    return next((i for i in range(19, len(text)) if text[i] in "Z+-"), None)


def _ahead(texts: Sequence[str]) -> NDArray[np.timedelta64]:
    """Return how far the clocks of these times are ahead of UTC."""
    zones = [text[_zone(text) or len(text) :].removeprefix("Z") for text in texts]
    minutes = [0 if not z else (-1 if z[0] == "-" else 1) * (60 * int(z[1:3]) + int(z[4:6])) for z in zones]
    return np.array(minutes, dtype="timedelta64[m]").astype("timedelta64[ns]")


def _hash_ids(table: _TraceTable, tokens: Array, problems: _Faults) -> tuple[tuple[int, ...], ...] | None:
    if "hash_ids" not in table.values:
        return None
    rows: list[tuple[int, ...]] = []
    blocks = np.ceil(tokens / table.block_tokens).tolist()
    for ids, most, line in zip(table.values["hash_ids"], blocks, table.lines, strict=True):
        if not isinstance(ids, list) or not _all_integers(ids) or not min(ids, default=0) >= 0:
            problems.add("must be a list of whole numbers of at least 0", line, "hash_ids")
        elif max(ids, default=0) > MAX_HASH_ID:
            problems.add(f"must be at most {MAX_HASH_ID}, not {max(ids)}", line, "hash_ids")
        elif len(ids) > most:
            message = f"has {len(ids)} ids, the prompt {most:.0f} blocks of {table.block_tokens} tokens"
            problems.add(message, line, "hash_ids")
        else:
            rows.append(tuple(ids))
    return tuple(rows)


def _all_integers(values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= {int}
