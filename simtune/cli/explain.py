"""simtune explain: a plan in words."""

from __future__ import annotations

from pathlib import Path

import click

from simtune.cli.options import json_option
from simtune.cli.output import print_json
from simtune.cli.paths import TEXT


@click.command()
@click.argument("plan", metavar="PLAN", type=TEXT)
@json_option
def explain(plan: str, as_json: bool) -> None:
    """Explain a PLAN and each of its settings for its model and hardware.

    For the run directory of a search, also show what one step of each setting would change.
    """
    from simtune.api import deploy_plan
    from simtune.report.neighbours import neighbours
    from simtune.report.plan_in_words import explain as in_words
    from simtune.runs.run_reader import read_run

    folder = Path(plan)
    is_run = (folder / "summary.json").is_file()
    words = in_words(deploy_plan(str(folder / "plan.yaml") if is_run else plan))
    steps = neighbours(read_run(folder)) if is_run else []
    if as_json:
        document = {"plan": {part: list(sentences) for part, sentences in words}}
        print_json({**document, "steps": [step._asdict() for step in steps]})
        return
    for part, sentences in words:
        click.echo(part)
        for sentence in sentences:
            click.echo(f"  {sentence}")
    if steps:
        click.echo("one step of each setting")
        for step in steps:
            click.echo(f"  {step.knob} {step.value} in place of {step.chosen}: {step.effect}")
