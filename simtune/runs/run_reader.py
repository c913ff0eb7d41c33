"""Reads a run directory: `summary.json`, `candidates.csv` and `certificate.json` if a search wrote them, and
`swimlanes.json.gz` if steps were kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from simtune.errors import Problem, SpecError, UsageError
from simtune.runs.files import SUMMARY_SCHEMA
from simtune.runs.schema import COURSE, MANIFEST_SCHEMA, CandidateRow, CourseRow, Manifest, Run, Summary
from simtune.runs.swimlanes import SWIMLANES, SWIMLANES_SCHEMA, Swimlanes
from simtune.runs.tables import read_csv
from simtune.specs import yamlfile
from simtune.specs.base import Record, problems_of
from simtune.specs.input_files import json_document, read_packed_text
from simtune.specs.schema_versions import REDO, schema_problem
from simtune.tuner.certificate.front_certificate import FRONT_SCHEMA, FrontCertificate
from simtune.tuner.certificate.search_certificate import CERTIFICATE_SCHEMA, Certificate

T = TypeVar("T", bound=Record)


def read_run(run: Path) -> Run:
    """Raise UsageError when `run` is no run directory, SpecError when one of its files is damaged or newer than this
    release."""
    if not run.is_dir():
        raise UsageError(f"{run}: no such folder; name the run directory that --out wrote")
    if not (run / "summary.json").is_file():
        raise UsageError(f"{run}: holds no summary.json, so it is not a run directory of simtune")
    summary, table, swimlanes = read_summary(run / "summary.json"), run / "candidates.csv", run / SWIMLANES
    certificate, course = run / "certificate.json", run / COURSE
    return Run(
        summary,
        read_csv(table, CandidateRow) if table.exists() else (),
        read_record(swimlanes, Swimlanes, SWIMLANES_SCHEMA) if swimlanes.exists() else None,
        read_certificate(certificate) if certificate.exists() else None,
        read_csv(course, CourseRow) if course.exists() else (),
    )


def read_summary(path: Path) -> Summary:
    """Raise UsageError when the file cannot be read, SpecError when it is damaged or of another version."""
    return read_record(path, Summary, SUMMARY_SCHEMA, "simtune/summary@1")


def read_certificate(path: Path) -> Certificate:
    """The same of a certificate."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file; name a run directory that simtune optimize wrote")
    return read_record(path, Certificate, CERTIFICATE_SCHEMA)


def read_front(path: Path) -> FrontCertificate:
    """The same of a front."""
    return read_record(path, FrontCertificate, FRONT_SCHEMA)


def read_manifest(path: Path) -> Manifest:
    """The same of a manifest."""
    return read_record(path, Manifest, MANIFEST_SCHEMA)


def read_record(path: Path, kind: type[T], schema: str, *earlier: str) -> T:
    """Read a file that simtune wrote, JSON plain or gzipped; `kind` reads `earlier` versions, too. Raise UsageError if
    it cannot be read, SpecError if it is damaged or of another version."""
    text = read_packed_text(path)
    data = json_document(text, str(path))
    if not isinstance(data, dict):
        word = schema.removeprefix("simtune/").partition("@")[0]
        raise SpecError(Problem(str(path), f"a {word} was expected, which is a mapping", "", 1, 1))
    if data.get("schema") not in (schema, *earlier):
        place = yamlfile.parse(text, str(path)).position(["schema"])
        raise SpecError(Problem(str(path), schema_problem(data.get("schema"), schema, REDO), "schema", *place))
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        # This parser knows the lines, and is too slow to be the everyday reader.
        problems = problems_of(kind, error, yamlfile.parse(text, str(path)))
        raise SpecError(sorted(problems, key=lambda p: (p.line or 0, p.column or 0))) from None
