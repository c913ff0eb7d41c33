"""simtune check: are these files right?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from simtune.cli.options import json_option, set_option
from simtune.cli.output import print_json, settings_of
from simtune.cli.paths import TEXT


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=TEXT)
@set_option
@json_option
def check(files: tuple[str, ...], settings: tuple[str, ...], as_json: bool) -> int:
    """Check spec and trace FILEs: every problem of every file, with line and remedy, or what was understood of it. A
    plan is deployed as `simulate` would. Exits with 2 if there is a problem."""
    from simtune.errors import SimtuneError

    understood: dict[str, str] = {}
    problems: dict[str, list[str]] = {}
    paths = {file: file if "/" in file else f"./{file}" for file in files}
    settings_by_file = settings_of(settings, [*paths.values()])
    for file, path in paths.items():
        try:
            understood[file] = _understood(path, settings_by_file[path])
        except SimtuneError as error:
            problems[file] = str(error).splitlines()
    if as_json:
        print_json({"ok": not problems, "problems": problems, "understood": understood})
        return 2 if problems else 0
    for file in dict.fromkeys(files):
        for line in problems.get(file, [f"{file}: ok: {understood.get(file)}"]):
            click.echo(line, err=file in problems)
    return 2 if problems else 0


def _understood(path: str, settings: Sequence[str]) -> str:
    """Return what was understood of a file, in words. Raises SimtuneError with all that is wrong."""
    from simtune.api import try_out
    from simtune.report.spec_in_one_line import understood
    from simtune.sim import plan_parts
    from simtune.specs import catalog
    from simtune.specs.plan import Plan

    spec, trace = catalog.load_with_trace(path, plan_parts.problems, settings)
    words = understood(spec, trace)
    untried_because = try_out(spec, Path(path).parent) if isinstance(spec, Plan) else ""
    return f"{words}; not tried on its hardware: {untried_because}" if untried_because else words
