"""What the parser of `transformers serve` makes of a command line: run by an interpreter that has it,
`read_by_transformers.py WORDS...`. Written to stdout, in its last line, are the values by name. Nothing of simtune is
imported here.
"""

from __future__ import annotations

import json
import sys

import typer
from transformers.cli.serve import Serve


def main() -> None:
    """Read the words."""
    parser = typer.Typer()
    parser.command()(Serve)
    values = typer.main.get_command(parser).make_context("serve", sys.argv[1:]).params
    sys.stdout.write(
        f"\n{json.dumps({name: value for name, value in values.items() if isinstance(value, str | int)})}\n"
    )


if __name__ == "__main__":
    main()
