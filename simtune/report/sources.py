"""Reads what a page of several runs is made of: runs, validations and lists of published systems, in any mix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simtune.errors import UsageError
from simtune.report.beside import NamedFindings, NamedValidation
from simtune.report.compare import Compared, NamedRun, distinct
from simtune.reproduce import Findings
from simtune.reproduce.findings import FINDINGS_SCHEMA
from simtune.runs.reading import read_record, read_run
from simtune.runs.sweep_files import is_sweep
from simtune.validation.judge import VALIDATION_SCHEMA, Validation

VALIDATION = "validation.json"


def read_all(paths: Sequence[Path]) -> Compared:
    """Of folders that `simulate`, `optimize` or `validate` wrote, and files that `reproduce --json` did.

    Raises UsageError for a path that is none of them, SpecError for a file that is damaged.
    """
    runs: list[NamedRun] = []
    validations: list[NamedValidation] = []
    findings: list[NamedFindings] = []
    for name, path in zip(distinct([path.resolve().name for path in paths]), paths, strict=True):
        if is_sweep(path):
            raise UsageError(f"{path}: is a sweep, of many runs; simtune report {path} alone draws its page")
        if path.is_file():
            findings.append(NamedFindings(name, read_record(path, Findings, FINDINGS_SCHEMA)))
        elif (path / VALIDATION).is_file() and not (path / "summary.json").is_file():
            validations.append(NamedValidation(name, read_record(path / VALIDATION, Validation, VALIDATION_SCHEMA)))
        else:
            runs.append(NamedRun(name, read_run(path)))
    return Compared(tuple(runs), tuple(validations), tuple(findings))
