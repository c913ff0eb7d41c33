"""simtune measure: the runs on a real system that tell the leading plans of a search apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from simtune.cli.numbers import RealRange
from simtune.cli.options import force_option, json_option, out_option
from simtune.cli.output import command_line, milliseconds, number, plan_cells, print_json, print_table
from simtune.cli.paths import PATH
from simtune.errors import UsageError

if TYPE_CHECKING:
    from simtune.sim.deployment import Deployment
    from simtune.tuner.question import Question
    from simtune.validation.measured_answer import MeasuredAnswer
    from simtune.validation.next_measurement import NextMeasurement


@click.command()
@click.argument("run", metavar="RUN", type=PATH)
@click.option("--study", "study_file", default=None, help="The study, if it is not where the search read it.")
@out_option.but(help="Folder to write; RUN-measure unless given.")
@click.option(
    "--noise",
    type=RealRange(above=0, most=1.0),
    default=0.03,
    show_default=True,
    help="Standard deviation of a measured mean from run to run, and of a plan by itself, as a share.",
)
@force_option
@json_option
def measure(run: Path, study_file: str | None, out: Path | None, noise: float, force: bool, as_json: bool) -> int:
    """Write the few runs on a real system that tell the leading plans of a RUN of `optimize` apart: commands of `vllm
    bench serve`, aiperf and guidellm, launch settings, predicted latencies, and how sure the choice is after each.

    `simtune validate RUN --from FILE` reads the results. RUN is not changed.
    """
    from simtune.cli.certify import question_of, study_of
    from simtune.runs.files import MANIFEST, claim, write
    from simtune.runs.manifest import manifest
    from simtune.runs.run_reader import read_run
    from simtune.specs.references import moved
    from simtune.validation.next_measurement import MEASURE, next_measurement

    folder = out or beside(run)
    finished, question = read_run(run), question_of(run, study_file)
    claim(folder, force)
    places = moved(study_of(run, study_file)[0].parent, folder)
    measured = next_measurement(question, finished, noise, study_file, places)
    inputs = (*question.models, *question.hardware, question.workload, question.study)
    facts = manifest(command_line(), inputs, question.trace, question.study.seed)
    write(folder, {**measured.files, MEASURE: _json(measured.record), MANIFEST: _json(facts)})
    if as_json:
        print_json(measured.record.to_data())
    else:
        _print(measured.record, folder)
    return 0


def beside(run: Path) -> Path:
    """Return the folder beside a run for what is measured of it."""
    return run.absolute().with_name(f"{run.absolute().name}-measure")


def _json(record: object) -> str:
    import json

    from simtune.specs.base import Record

    assert isinstance(record, Record)
    return json.dumps(record.to_data(), indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def _print(record: NextMeasurement, folder: Path) -> None:
    cells, notes = plan_cells([plan.name for plan in record.plans])
    rows = [
        (cells[plan.name], number(plan.value), _interval(plan.values), f"{plan.gpus} x {plan.parts}")
        for plan in record.plans
    ]
    print_table(f"{record.study}: leading plans ({record.unit})", ("plan", "value", "90 % interval", "GPUs"), rows)
    runs = [
        (
            f"{index} {run.load}\n{run.words}",
            cells[run.plan].rpartition("\n")[2],
            *(f"{milliseconds(mean.low_s)} to {milliseconds(mean.high_s)}" for mean in run.predicted),
            f"{run.right_after:.0%}",
        )
        for index, run in enumerate(record.runs, 1)
    ]
    print_table("runs to make", ("load", "plan", "mean TTFT ms", "mean TPOT ms", "sure then"), runs)
    for line in (*notes, *record.lines()):
        click.echo(line)
    click.echo(f"commands: {folder / 'measure.sh'}")
    click.echo(f"then:     simtune validate RUN --from {folder / 'results'}/FILE")


def _interval(ends: tuple[float | None, ...]) -> str:
    low, high = ("unbounded" if end is None else number(end) for end in ends)
    return f"{low} to {high}"


def tighten(run: Path, files: tuple[Path, ...], out: Path | None, as_json: bool) -> int:
    """Read measured runs, and print and store the answer of a search after them. Return 4 if a run contradicts it.

    Raises UsageError if `simtune measure` did not prepare this run, or the run was made again since.
    """
    from simtune.cli.certify import question_of
    from simtune.runs.files import write_file
    from simtune.runs.run_reader import read_certificate, read_record
    from simtune.validation.measured_answer import ANSWER, measured_answer, plan_of
    from simtune.validation.next_measurement import MEASURE, MEASURE_SCHEMA, NextMeasurement

    folder = out or beside(run)
    if not (folder / MEASURE).is_file():
        raise UsageError(f"{folder}: holds no {MEASURE}; run `simtune measure {run}` first")
    record = read_record(folder / MEASURE, NextMeasurement, MEASURE_SCHEMA)
    if record.digest != read_certificate(run / "certificate.json").digest:
        raise UsageError(f"{folder / MEASURE}: is of another search than {run}; run `simtune measure {run} --force`")
    # Before any deployment is made: a file that names no plan is refused at once.
    names = {plan_of(record, path).name for path in files}
    answer = measured_answer(record, _servers(question_of(run, record.study_file), names), files)
    write_file(folder / ANSWER, _json(answer))
    if as_json:
        print_json(answer.to_data())
    else:
        _print_answer(answer, folder / ANSWER)
    return 4 if answer.contradicted else 0


def _servers(question: Question, names: set[str]) -> dict[str, Deployment]:
    """Return the measured parts of plans, by name."""
    from simtune.tuner.doubt.leaders import one_server
    from simtune.tuner.space.expressible import space_for

    candidates = space_for(question).candidates
    length = question.length_limit(candidates)
    return {
        candidate.name: one_server(question.deploy(candidate, length), question.stream(candidate))
        for candidate in candidates
        if candidate.name in names
    }


def _print_answer(answer: MeasuredAnswer, path: Path) -> None:
    cells, notes = plan_cells([plan.name for plan in answer.plans])
    means = [
        (
            f"{Path(run.file).name}, {mean.predicted.metric.upper()}",
            milliseconds(mean.predicted.middle_s),
            f"{milliseconds(mean.predicted.low_s)} to {milliseconds(mean.predicted.high_s)}",
            milliseconds(mean.measured_s),
            mean.verdict,
        )
        for run in answer.runs
        for mean in run.means
    ]
    print_table("means in ms", ("run", "predicted", "90 % interval", "measured", "verdict"), means)
    rows = [
        (cells[p.name], _interval(p.before), _interval(p.after), f"{p.best_before:.0%}", f"{p.best_after:.0%}")
        for p in answer.plans
    ]
    columns = ("plan", "before", "after", "best before", "best after")
    print_table(f"{answer.study}: leading plans ({answer.unit}), 90 % intervals", columns, rows)
    for line in (*notes, *answer.lines()):
        click.echo(line)
    click.echo(f"answer: {path}")
