"""CSV tables whose rows are records: exact floats, true and false, an empty cell for None."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from simtune.errors import Problem, SpecError
from simtune.specs.base import Record
from simtune.specs.input_files import csv_rows, read_text

R = TypeVar("R", bound=Record)


def columns(row: type[Record]) -> tuple[str, ...]:
    """The header of a table of such rows."""
    return tuple(field.alias or name for name, field in row.model_fields.items())


def to_csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return the text of a table; None is an empty cell."""
    return plain_csv(header, ([str(x).lower() if isinstance(x, bool) else x for x in row] for row in rows))


def plain_csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return the text of a table without booleans: half the time of `to_csv`, which looks at every cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def read_csv(path: Path, row: type[R]) -> tuple[R, ...]:
    """Return the rows of a table; columns that `row` does not have are ignored.

    Raises SpecError with line, column and rule of every cell that is wrong.
    """
    lists, lines = csv_rows(read_text(path), str(path))
    header = lists[0] if lists else []
    known_columns = columns(row)
    absent = [name for name in known_columns if name not in header and name not in row.MAY_LACK]
    if absent:
        raise SpecError(Problem(str(path), f"lacks the columns {', '.join(absent)}", "", 1))
    rows: list[R] = []
    problems: list[Problem] = []
    for cells, line in zip(lists[1:], lines[1:], strict=True):
        if len(cells) != len(header):
            problems.append(Problem(str(path), f"{len(cells)} cells under a header of {len(header)}", "", line))
            continue
        by_column = dict(zip(header, cells, strict=True))
        try:
            rows.append(_parsed(row, by_column))
        except ValidationError as error:
            for item in error.errors():
                key = str(item["loc"][0])
                problems.append(
                    Problem(str(path), f"must be {_rule(row, key, item)}, not {by_column[key]!r}", key, line)
                )
    if problems:
        raise SpecError(problems)
    return tuple(rows)


def _parsed(row: type[R], cells: dict[str, str]) -> R:
    """Return a row from its cells; an empty cell is None if the field may be None."""
    values: dict[str, str | None] = {}
    for name, field in row.model_fields.items():
        key = field.alias or name
        values[key] = cells.get(key) or (None if type(None) in get_args(field.annotation) else "")
    return row.model_validate(values, strict=False)


def _rule(row: type[Record], key: str, error: ErrorDetails) -> str:
    """Return the rule for a cell of a column, in words."""
    if error["type"] == "greater_than_equal":
        return f"{error['ctx']['ge']:g} or more"
    if error["type"] == "less_than_equal":
        return f"{error['ctx']['le']:g} or less"
    field = next(field for name, field in row.model_fields.items() if key == (field.alias or name))
    return _kind(field.annotation)


def _kind(annotation: Any) -> str:
    """A type in words."""
    if type(None) in get_args(annotation):
        (present,) = (kind for kind in get_args(annotation) if kind is not type(None))
        return "true, false or empty" if present is bool else f"{_kind(present)} or empty"
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(get_args(annotation))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}[annotation]
