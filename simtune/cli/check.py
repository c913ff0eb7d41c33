"""simtune check: are these files right?"""

from __future__ import annotations

import click

from simtune.cli.output import json_option, print_json


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@json_option
def check(files: tuple[str, ...], as_json: bool) -> int:
    """Check spec and trace FILEs: every problem of every file, with line and remedy. Exits with 2 if there is one."""
    problems = {file: lines for file in files if (lines := _problems(file))}
    if as_json:
        print_json({"ok": not problems, "problems": problems})
    else:
        for file in files:
            for line in problems.get(file, [f"{file}: ok"]):
                click.echo(line, err=file in problems)
    return 2 if problems else 0


def _problems(file: str) -> list[str]:
    """What is wrong with a file, a line each."""
    from simtune.errors import SimtuneError
    from simtune.sim import parts
    from simtune.specs import catalog
    from simtune.specs.hardware import Hardware

    try:
        spec = catalog.load(file if "/" in file else f"./{file}", parts.problems)
        if isinstance(spec, Hardware):
            len(spec.arrays)  # they are read where they are first needed
    except SimtuneError as error:
        return str(error).splitlines()
    return []
