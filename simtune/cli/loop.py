"""simtune loop: profile an engine, find its best plan, run it, compare, refit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simtune.cli.numbers import TRIALS, RealRange, WholeRange
from simtune.cli.options import json_option, out_option, requests_option, vllm_python_option
from simtune.cli.output import milliseconds, print_json, print_table, write_run
from simtune.cli.paths import TEXT
from simtune.errors import UsageError

if TYPE_CHECKING:
    from simtune.tuner.trial import Tuned
    from simtune.validation.closed_loop import LoopRound

COLUMNS = ("metric", "predicted ms", "measured ms", "error %", "repeat noise %", "")


@click.command()
@click.argument("study_file", metavar="STUDY", type=TEXT)
@out_option.but(required=True, help="Folder of all stages; a loop that it contains is continued.")
@click.option("--engine", type=click.Choice(["torch", "vllm"]), default="torch", show_default=True)
@vllm_python_option
@click.option(
    "--budget",
    type=RealRange(least=1, most=1e7),
    default=120.0,
    show_default=True,
    help="Time for the profile, in seconds.",
)
@click.option("--tolerance", type=RealRange(most=1), default=0.1, show_default=True, help="Largest error of each mean.")
@click.option("--rounds", type=TRIALS, default=3, show_default=True, help="Most rounds.")
@requests_option.but(type=WholeRange(4, 10**6), default=60, show_default=True, help="Requests of each replay.")
@click.option(
    "--clock", type=click.Choice(["cpu", "wall"]), default="cpu", show_default=True, help="Clock of the replays."
)
@json_option
def loop(  # noqa: PLR0913 - one for each option
    study_file: str,
    out: Path,
    engine: str,
    vllm_python: str | None,
    budget: float,
    tolerance: float,
    rounds: int,
    requests: int,
    clock: str,
    as_json: bool,
) -> int:
    """Close the loop for a STUDY: profile the engine, optimize, start it with the plan's settings, replay the load, and
    compare; if the error exceeds the tolerance, fit again with the replay's steps.

    Give the same command again to go on after an interruption, in the stage it was in. Exit code 4: outside tolerance
    after the last round.
    """
    from simtune.api import load_question
    from simtune.runs.contents import of_study
    from simtune.specs.references import moved
    from simtune.validation.closed_loop import LoopSettings, TuningLoop
    from simtune.validation.servers.driven_engines import driver

    if (engine == "vllm") != (vllm_python is not None):
        raise UsageError("--engine vllm needs --vllm-python, the interpreter that has it (`make vllm`); no other does")
    question = load_question(study_file)
    options = {} if vllm_python is None else {"python": vllm_python}

    def write(tuned: Tuned, folder: Path) -> None:
        inputs = (question.study, question.model, *question.hardware, question.workload)
        write_run(
            folder,
            of_study(tuned, jobs=1, places=moved(Path(study_file).parent, folder)),
            inputs,
            question.trace,
            question.study.seed,
        )

    settings = LoopSettings(budget_s=budget, tolerance=tolerance, rounds=rounds, requests=requests, clock=_clock(clock))
    closed = TuningLoop(
        question,
        out,
        lambda size, reference_s: driver(engine, question.model, size, reference_s=reference_s, **options),
        settings=settings,
        write_run=write,
        note=lambda words: click.echo(words, err=True),
    )
    try:
        finished_rounds = closed.run()
    except KeyboardInterrupt:
        click.echo(f"interrupted; the same command goes on from where it was, in {out}", err=True)
        return 130
    within = all(v.within(tolerance) for v in finished_rounds[-1].verdicts)
    if as_json:
        print_json({"within": within, "rounds": [_data(r) for r in finished_rounds]})
    else:
        for number, r in enumerate(finished_rounds, 1):
            _print(number, r, tolerance)
    return 0 if within else 4


def _clock(name: str) -> Any:
    return name


def _data(r: LoopRound) -> dict[str, Any]:
    return {**r._asdict(), "verdicts": [v._asdict() | {"error": v.error} for v in r.verdicts]}


def _print(number: int, r: LoopRound, tolerance: float) -> None:
    rows = [
        (
            v.metric.upper(),
            milliseconds(v.predicted_s),
            milliseconds(v.measured_s),
            f"{100 * v.error:+.1f}",
            f"{100 * v.noise:.1f}",
            "within" if v.within(tolerance) else "OUTSIDE",
        )
        for v in r.verdicts
    ]
    print_table(f"round {number}: {r.plan} at {r.rate_rps:.3g} requests/s, means", COLUMNS, rows)
