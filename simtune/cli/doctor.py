"""simtune doctor: is this installation whole?"""

from __future__ import annotations

import click

from simtune.cli.options import json_option
from simtune.cli.output import print_json


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Look at packages, GPU, presets, profiles and disk of this machine. Exits with 1 if something is wrong."""
    from simtune.profiling.installation import diagnoses

    findings = diagnoses()
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            click.echo(f"{finding.state:8} {finding.what:18} {finding.says}")
    return 1 if any(finding.state == "problem" for finding in findings) else 0
