"""Reads a run directory: `summary.json`, and `candidates.csv` where a search wrote one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from simtune.errors import Problem, SpecError, UsageError
from simtune.runs.schema import SUMMARY_SCHEMA, CandidateRow, Run, Summary
from simtune.runs.tables import read_csv
from simtune.specs import yamlfile
from simtune.specs.base import problems_of
from simtune.specs.reading import json_document, read_text


def read_run(run: Path) -> Run:
    """Raises UsageError when `run` is no run directory, SpecError when one of its files is damaged or newer than this
    release."""
    if not run.is_dir():
        raise UsageError(f"{run}: no such folder; name the run directory that --out wrote")
    if not (run / "summary.json").is_file():
        raise UsageError(f"{run}: holds no summary.json, so it is not a run directory of simtune")
    summary, table = read_summary(run / "summary.json"), run / "candidates.csv"
    return Run(summary, read_csv(table, CandidateRow) if table.exists() else ())


def runs_in(folder: Path) -> tuple[Path, ...]:
    """The run directories in a folder that is none itself, by name."""
    if not folder.is_dir() or (folder / "summary.json").is_file():
        return ()
    return tuple(sorted(below for below in folder.iterdir() if (below / "summary.json").is_file()))


def read_summary(path: Path) -> Summary:
    """Raises UsageError when the file cannot be read, SpecError when it is damaged or of another version."""
    text = read_text(path)
    data = json_document(text, str(path))
    if not isinstance(data, dict):
        raise SpecError(Problem(str(path), "a summary was expected, which is a mapping", "", 1, 1))
    if data.get("schema") != SUMMARY_SCHEMA:
        place = yamlfile.parse(text, str(path)).position(["schema"])
        raise SpecError(Problem(str(path), _other_version(data.get("schema"), SUMMARY_SCHEMA), "schema", *place))
    try:
        return Summary.model_validate(data)
    except ValidationError as error:
        # This parser knows the lines, and is too slow to be the everyday reader.
        problems = problems_of(Summary, error, yamlfile.parse(text, str(path)))
        raise SpecError(sorted(problems, key=lambda p: (p.line or 0, p.column or 0))) from None


def _other_version(schema: Any, wanted: str) -> str:
    """What is wrong with a file's `schema`, and what to do about it."""
    kind, _, version = wanted.rpartition("@")
    number = re.fullmatch(re.escape(kind) + r"@(\d+)", str(schema))
    if number is None:
        return f"must be {wanted}" + ("" if schema is None else f", found {schema!r}")
    if int(number[1]) > int(version):
        return (
            f"is {schema}, of a newer simtune; this one reads {wanted}: upgrade it, or do the run again with this one"
        )
    return f"is {schema}, of an older simtune; this one reads {wanted}: do the run again"
