"""simtune report: draw a run's page again, put several side by side, or list a folder of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simtune.cli.options import force_option, json_option, out_option
from simtune.cli.output import print_json, print_table
from simtune.cli.paths import PATH
from simtune.errors import UsageError

if TYPE_CHECKING:
    from simtune.report.compare import Compared


PAGES_OF_THEIR_OWN = (
    "`simtune validate` and `simtune reproduce --html` draw the pages of what they made; put it beside others, or in a "
    "page of its own with --out FILE"
)


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=PATH)
@out_option.but(metavar="FILE", help="The page of several runs, or the index.")
@force_option
@json_option
def report(runs: tuple[Path, ...], out: Path | None, force: bool, as_json: bool) -> None:
    """Draw report.html of a RUN directory again; with several RUNs, one page that puts them side by side (--out).

    A RUN is the folder of `simulate`, `optimize` or `validate`, or the file of `reproduce --json`. Folders of `sweep`
    get their own pages again. A folder of any of these gets an index.html of them all.
    """
    from simtune.report.sources import VALIDATION, contents_of, pages, read_all
    from simtune.runs.run_reader import read_run
    from simtune.runs.sweep_files import is_sweep, read_sweep, sweeps_in

    _check(out, force)
    first = runs[0]
    inside, sweeps = contents_of(first), sweeps_in(first)
    if all(map(is_sweep, runs)):
        _sweeps(runs, out, as_json)
    elif len(runs) > 1 or (out is not None and not (inside or sweeps)):
        _compare(read_all(runs), out, as_json)
    elif inside or sweeps:
        from simtune.report.index import render as render_index

        page = render_index(first.resolve().name, read_all(inside), [*map(read_sweep, sweeps)], pages(inside))
        _write_alone(out or first / "index.html", page, as_json)
    elif first.is_file() or ((first / VALIDATION).is_file() and not (first / "summary.json").is_file()):
        raise UsageError(f"{first}: {PAGES_OF_THEIR_OWN}")
    else:
        from simtune.report.page import render

        _write_alone(first / "report.html", render(read_run(first)), as_json)


def _sweeps(folders: Sequence[Path], out: Path | None, as_json: bool) -> None:
    """Draw the page of each anew, or one at `out`. Raises UsageError for several with one `out`."""
    from simtune.report.sweep_page import render
    from simtune.runs.sweep_files import PAGE, read_sweep

    if out is not None and len(folders) > 1:
        raise UsageError("--out is one file, and every sweep has a page of its own; leave it out, or name one sweep")
    tables = [read_sweep(folder) for folder in folders]
    if as_json:
        print_json({table.name: table.rows for table in tables})
    for folder, table in zip(folders, tables, strict=True):
        _write(out or folder / PAGE, render(*table), words_apart=as_json)


def _compare(compared: Compared, out: Path | None, as_json: bool) -> None:
    from simtune.report.compare import document, load_warning, numbers, plan_differences, render
    from simtune.report.side_by_side import errors, gains

    if as_json:
        print_json(document(compared))
    else:
        names = [entry.name for entry in compared.runs]
        if names:
            differ = [(key, *values) for key, values in plan_differences(compared.runs)]
            print_table("what differs", ("setting", *names), differ)
            rows = [
                (f"{row.what}, {row.unit}".rstrip(", "), *(" ".join(filter(None, cell)) for cell in row.cells))
                for row in numbers(compared.runs)
            ]
            print_table(f"numbers (differences from {names[0]})", ("number", *names), rows)
        for title, columns, table in (
            ("predicted over measured", compared.validations, errors(compared.validations)),
            ("published systems: simulated gain", compared.findings, gains(compared.findings)),
        ):
            if columns:
                cells = [(row.what, *(cell for cell, _ in row.cells)) for row in table]
                print_table(title, ("of", *(entry.name for entry in columns)), cells)
    warning = load_warning(compared.runs)
    if warning is not None:
        click.echo(f"warning: {warning}", err=True)
    if out is not None:
        _write(out, render(compared), words_apart=as_json)


def _check(out: Path | None, force: bool) -> None:
    if out is not None and out.exists() and not force:
        raise UsageError(f"{out}: exists; give --force to replace it, or name another file")


def _write_alone(file: Path, page: str, as_json: bool) -> None:
    """Write a page that no table comes with."""
    _write(file, page, words_apart=as_json)
    if as_json:
        print_json({"report": str(file)})


def _write(file: Path, page: str, words_apart: bool = False) -> None:
    from simtune.runs.files import write_file

    write_file(file, page)
    click.echo(f"report: {file}", err=words_apart)
