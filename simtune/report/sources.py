"""Reads what a page of several runs is made of: runs, validations and lists of published systems, in any mix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simtune.errors import UsageError
from simtune.report.compare import Compared, NamedRun, distinct
from simtune.report.side_by_side import NamedFindings, NamedValidation
from simtune.runs.run_reader import read_record, read_run
from simtune.runs.sweep_files import is_sweep
from simtune.specs.input_files import max_bytes
from simtune.validation.judge.comparison import VALIDATION_SCHEMA, Validation
from simtune.validation.published import Findings
from simtune.validation.published.findings import FINDINGS_SCHEMA

VALIDATION = "validation.json"
RUN = "summary.json"


def contents_of(folder: Path) -> tuple[Path, ...]:
    """Return the paths that `read_all` reads in a folder that it cannot read itself, by name: run directories,
    validations, and the files of `reproduce --json`.
    """
    if not folder.is_dir() or (folder / RUN).is_file() or (folder / VALIDATION).is_file():
        return ()
    return tuple(path for path in sorted(folder.iterdir()) if _is_one(path))


def _is_one(path: Path) -> bool:
    if path.suffix == ".json" and path.is_file():
        return path.stat().st_size <= max_bytes() and FINDINGS_SCHEMA.encode() in path.read_bytes()
    return (path / RUN).is_file() or ((path / VALIDATION).is_file() and not is_sweep(path))


def pages(paths: Sequence[Path]) -> dict[str, str]:
    """Return the page of each path by its name, as a path from the folder that contains it; a file of findings is its
    own page unless an HTML file of its name is beside it.
    """
    links = {}
    for path in paths:
        if path.is_file():
            page = path.with_suffix(".html")
            links[path.name] = page.name if page.is_file() else path.name
        else:
            links[path.name] = f"{path.name}/{'report' if (path / RUN).is_file() else 'validation'}.html"
    return links


def read_all(paths: Sequence[Path]) -> Compared:
    """Read folders that `simulate`, `optimize` or `validate` wrote, and files that `reproduce --json` wrote.

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
        elif (path / VALIDATION).is_file() and not (path / RUN).is_file():
            validations.append(NamedValidation(name, read_record(path / VALIDATION, Validation, VALIDATION_SCHEMA)))
        else:
            runs.append(NamedRun(name, read_run(path)))
    return Compared(tuple(runs), tuple(validations), tuple(findings))
