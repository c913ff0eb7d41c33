"""simtune report: draw a run's page again."""

from __future__ import annotations

from pathlib import Path

import click

from simtune.runs.files import write_file


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
def report(run: Path) -> None:
    """Draw report.html of a RUN directory again from its other files."""
    from simtune.report.page import render
    from simtune.runs.reading import read_run

    target = run / "report.html"
    write_file(target, render(read_run(run)))
    click.echo(f"report: {target}")
