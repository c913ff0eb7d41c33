"""simtune report: draw a run's page again."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
def report(run: Path) -> None:
    """Draw report.html of a RUN directory again from its other files."""
    from simtune.errors import UsageError
    from simtune.report.page import render

    html = render(run)
    target, draft = run / "report.html", run / ".report.html.tmp"
    try:
        draft.write_text(html, encoding="utf-8")
        os.replace(draft, target)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written ({error.strerror})") from None
    click.echo(f"report: {target}")
