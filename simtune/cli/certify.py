"""simtune certify: check a search's proof without trusting it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simtune.cli.options import json_option
from simtune.cli.output import print_json
from simtune.cli.paths import PATH

if TYPE_CHECKING:
    from simtune.tuner.certificate.front_certificate import FrontAudit
    from simtune.tuner.certificate.search_certificate import Audit
    from simtune.tuner.question import Question

PLAN = "plan.yaml"
OUTSIDE = 4
"""Exit code if something does not hold."""


@click.command()
@click.argument("run", metavar="RUN", type=PATH)
@click.option("--study", "study_file", default=None, help="The study, if it is not where the search read it.")
@json_option
def certify(run: Path, study_file: str | None, as_json: bool) -> int:
    """Check the certificate of a RUN of `optimize`: enumerate the space again, and compute every bound, the chosen
    plan's simulation and every simulation that ruled a plan out; the run's plan.yaml has to be the chosen plan. Exits
    with 4 if anything does not hold.

    The study is read from the path in the run's command, relative to the present folder, unless --study names another.
    """
    from simtune.runs.files import FRONT
    from simtune.runs.run_reader import read_certificate, read_front
    from simtune.specs.catalog import load_plan
    from simtune.tuner.certificate.front_certificate import FrontAudit
    from simtune.tuner.certificate.search_certificate import Audit

    if (run / FRONT).is_file():
        return _certify_front(FrontAudit(read_front(run / FRONT), question_of(run, study_file)), as_json)
    certificate = read_certificate(run / "certificate.json")
    plan = load_plan(str(run / PLAN)) if (run / PLAN).is_file() else None
    audit = Audit(certificate, question_of(run, study_file), plan, study_of(run, study_file)[0].parent)
    holds = audit.run()
    if as_json:
        print_json(
            {
                "holds": holds,
                "problems": audit.problems,
                "bounds": audit.bounds,
                "simulations": audit.simulations,
                "allocations": audit.allocations,
                "plans": len(certificate.plans),
                "incumbent": certificate.incumbent.to_data(),
                "bound": certificate.bound,
                "gap": certificate.gap,
                "gap_on_draw": certificate.gap_on_draw,
            }
        )
    else:
        _print(audit, holds)
    return 0 if holds else OUTSIDE


def _certify_front(audit: FrontAudit, as_json: bool) -> int:
    """Check a front, and print what is certified."""
    holds, front = audit.run(), audit.certificate
    facts = {"problems": audit.problems, "bounds": audit.bounds, "simulations": audit.simulations}
    if as_json:
        points = [point.to_data() for point in front.points]
        print_json({"holds": holds, **facts, "plans": len(front.plans), "points": points})
        return 0 if holds else OUTSIDE
    click.echo(
        f"{front.study}: {len(front.plans)} plans at {front.settled} loads, {audit.bounds} ruled out by bounds and "
        f"{audit.simulations} simulations computed anew"
    )
    for problem in audit.problems:
        click.echo(problem, err=True)
    if not holds:
        click.echo("the front does not hold", err=True)
        return OUTSIDE
    click.echo(
        f"At these loads no plan of this space has more tokens/s/user than the {len(front.points)} points of the front "
        "under this cost model; between them nothing is certified"
    )
    return 0


def question_of(run: Path, study_file: str | None) -> Question:
    """Return the question of a search, from the command that its run directory contains. Raises UsageError."""
    from simtune.api import load_question

    study, settings = study_of(run, study_file)
    return load_question(study, settings)


def study_of(run: Path, study_file: str | None) -> tuple[Path, Sequence[str]]:
    """Return the study of a search, and the settings of the command that its run directory contains. Raises
    UsageError."""
    from simtune.cli.optimize import optimize
    from simtune.errors import UsageError
    from simtune.runs.run_reader import read_manifest

    command = read_manifest(run / "manifest.json").command
    if command[1:2] != ("optimize",):
        raise UsageError(f"{run}: was not made by simtune optimize, so there is no search to check")
    params = optimize.make_context("optimize", list(command[2:])).params
    settings = params["settings"] if params["seed"] is None else (*params["settings"], f"seed={params['seed']}")
    study = Path(study_file or params["study_file"])
    if not study.exists():
        raise UsageError(f"{study}: no such file; the run in {run} was made from it: name it with --study")
    return study, settings


def _print(audit: Audit, holds: bool) -> None:
    certificate = audit.certificate
    click.echo(
        f"{certificate.study}: {len(certificate.plans)} plans enumerated, {audit.bounds} bounds and "
        f"{audit.simulations} simulations computed anew"
        + (f", {audit.allocations} bounds of allocations checked" if audit.allocations else "")
    )
    for problem in audit.problems:
        click.echo(problem, err=True)
    if not holds:
        click.echo("the certificate does not hold", err=True)
        return
    from simtune.specs.plan_words import in_words
    from simtune.tuner.doubt.same_draw import gap_in_words

    incumbent = certificate.incumbent
    gap = gap_in_words(certificate.gap, certificate.gap_on_draw)
    click.echo(f"{in_words(incumbent.plan)}: {incumbent.value:.4g} {certificate.unit}; {gap}")
