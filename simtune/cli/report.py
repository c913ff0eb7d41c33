"""simtune report: draw a run's page again, put several side by side, or list a folder of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from simtune.cli.output import force_option, json_option, print_json, print_table
from simtune.errors import UsageError

if TYPE_CHECKING:
    from simtune.report.compare import NamedRun


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="The page of several runs, or the index.")
@force_option
@json_option
def report(runs: tuple[Path, ...], out: Path | None, force: bool, as_json: bool) -> None:
    """Draw report.html of a RUN directory again; with several RUNs, one page that puts them side by side (--out).

    A folder of runs gets an index.html of them all.
    """
    from simtune.runs.reading import read_run, runs_in

    _check(out, force)
    first = runs[0]
    if len(runs) > 1 or (out is not None and not runs_in(first)):
        _compare(_named(runs), out, as_json)
    elif inside := runs_in(first):
        from simtune.report.index import render as render_index

        _write(out or first / "index.html", render_index(first.resolve().name, _named(inside)))
    else:
        from simtune.report.page import render

        _write(first / "report.html", render(read_run(first)))


def _named(folders: tuple[Path, ...]) -> list[NamedRun]:
    from simtune.report.compare import NamedRun, distinct
    from simtune.runs.reading import read_run

    names = distinct([folder.resolve().name for folder in folders])
    return [NamedRun(name, read_run(folder)) for name, folder in zip(names, folders, strict=True)]


def _compare(runs: list[NamedRun], out: Path | None, as_json: bool) -> None:
    from simtune.report.compare import document, numbers, plan_differences, render

    if as_json:
        print_json(document(runs))
    else:
        names = [each.name for each in runs]
        print_table("what differs", ("setting", *names), [(key, *values) for key, values in plan_differences(runs)])
        rows = [
            (f"{row.what}, {row.unit}".rstrip(", "), *(" ".join(filter(None, cell)) for cell in row.cells))
            for row in numbers(runs)
        ]
        print_table(f"numbers (differences from {names[0]})", ("number", *names), rows)
    if out is not None:
        _write(out, render(runs), words_apart=as_json)


def _check(out: Path | None, force: bool) -> None:
    if out is not None and out.exists() and not force:
        raise UsageError(f"{out}: exists; give --force to replace it, or name another file")


def _write(file: Path, page: str, words_apart: bool = False) -> None:
    from simtune.runs.files import write_file

    write_file(file, page)
    click.echo(f"report: {file}", err=words_apart)
