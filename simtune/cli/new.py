"""simtune new: a study, from five answers."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from simtune.cli.names import HARDWARE, MODEL, WORKLOAD
from simtune.cli.output import force_option
from simtune.errors import UsageError


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default="study.yaml")
@click.option("--model", type=MODEL, help="Name, spec, or Hugging Face config.json.")
@click.option("--hardware", type=HARDWARE, help="Name of a profile; found by nvidia-smi where there is a known card.")
@click.option("--devices", type=click.IntRange(min=1), help="How many of them.")
@click.option("--workload", type=WORKLOAD, help="Name, spec, or a log as a tool wrote it.")
@click.option("--ttft", type=click.FloatRange(min=0, min_open=True), help="p99 limit of the time to first token, ms.")
@click.option(
    "--tpot", type=click.FloatRange(min=0, min_open=True), help="p99 limit of the time per token after it, ms."
)
@click.option("--objective", default="goodput_per_gpu", show_default=True, help="What to look for.")
@force_option
def new(  # noqa: PLR0913 - one for each option
    file: Path,
    model: str | None,
    hardware: str | None,
    devices: int | None,
    workload: str | None,
    ttft: float | None,
    tpot: float | None,
    objective: str,
    force: bool,
) -> None:
    """Write a study to FILE. What no option says is asked on a terminal, and takes its default elsewhere."""
    from simtune.profiling.installation import devices as cards
    from simtune.runs.files import write_file
    from simtune.specs.catalog import load_study
    from simtune.specs.new_study import OBJECTIVES, Answers, profile_of, study_text

    if file.exists() and not force:
        raise UsageError(f"{file}: exists; give --force to replace it, or name another file")
    if objective not in OBJECTIVES:
        raise UsageError(f"--objective {objective}: must be one of {', '.join(OBJECTIVES)}")
    here = cards()
    answers = Answers(
        model=model or _ask("Model (name, or a config.json)", "llama-3.1-8b"),
        hardware=hardware or _ask("Card", (profile_of(here[0]) if here else None) or "h100-sxm"),
        devices=devices or int(_ask("How many of them", str(len(here) or 8))),
        workload=workload or _ask("Load (name, or a log)", "chat"),
        ttft_p99_s=(ttft or float(_ask("p99 TTFT limit, ms", "1000"))) / 1e3,
        tpot_p99_s=(tpot or float(_ask("p99 TPOT limit, ms", "50"))) / 1e3,
        objective=objective,
        name=file.stem,
    )
    text = study_text(answers, file.parent)
    write_file(file, text)
    load_study(str(file))
    click.echo(f"wrote {file}; next: simtune optimize {file} --out runs/{file.stem}", err=True)


def _ask(question: str, default: str) -> str:
    """The answer typed, or the default where nobody can answer."""
    return str(click.prompt(question, default=default, err=True)) if sys.stdin.isatty() else default
