"""simtune new: a study, from six answers."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from simtune.cli.names import ENGINE
from simtune.cli.numbers import GPUS, LONGEST_S, RealRange
from simtune.cli.options import as_option, force_option, hardware_option, model_option, workload_option
from simtune.cli.paths import PATH
from simtune.errors import SimtuneError, UsageError

POSITIVE = RealRange(above=0, most=1e3 * LONGEST_S)


@click.command()
@click.argument("file", type=PATH, default="study.yaml")
@model_option.but(help="Name, spec, Hugging Face config.json, or id of a model in its cache.")
@hardware_option.but(
    help="Name of a profile; by default that of this machine's card if nvidia-smi reports a known one."
)
@click.option("--devices", type=GPUS, help="Number of devices.")
@click.option("--engine", type=ENGINE, help="Preset of the engine's release (`vllm --version`); vllm-0.24 by default.")
@workload_option
@click.option("--ttft", type=POSITIVE, help="p99 limit of the time to first token, ms.")
@click.option("--tpot", type=POSITIVE, help="p99 limit of the time per token after it, ms.")
@click.option("--objective", help="What to optimize, e.g. gpus: the number of GPUs needed; goodput_per_gpu by default.")
@click.option(
    "--confidence",
    type=RealRange(least=0.5, most=0.99),
    help="Share of worlds, in which the profile is off, that must keep the limits; as predicted if not given.",
)
@force_option.but(help="Replace a study that exists.")
@as_option()
def new(  # noqa: PLR0913 - one for each option
    file: Path,
    model: str | None,
    hardware: str | None,
    devices: int | None,
    engine: str | None,
    workload: str | None,
    ttft: float | None,
    tpot: float | None,
    objective: str | None,
    confidence: float | None,
    force: bool,
) -> None:
    """Write a study to FILE. Values without an option are asked for on a terminal, else defaults."""
    from simtune.profiling.installation import devices as cards
    from simtune.runs.files import write_file
    from simtune.specs import yamlfile
    from simtune.specs.base import spec_name
    from simtune.specs.catalog import load_engine, load_hardware, load_model, load_workload
    from simtune.specs.new_study import Answers, profile_of, study_text
    from simtune.specs.preset import DEFAULT_ENGINE
    from simtune.specs.study import Study

    _check(file, force, objective)
    local_cards = cards()
    local_profile = profile_of(local_cards[0]) if local_cards else None
    _note_stranger(local_cards if local_profile is None and hardware is None else [])
    served = model or _ask("Model (name, id on Hugging Face, or a config.json)", "llama-3.1-8b", _loaded(load_model))
    card = hardware or _ask("Card", local_profile or "h100-sxm", _loaded(load_hardware))
    count = local_cards.count(local_cards[0]) if local_cards and card == local_profile else 8
    answers = Answers(
        model=served,
        hardware=card,
        devices=devices or _ask("How many of them", count, GPUS),
        engine=engine or _ask("Engine and release (`vllm --version`)", DEFAULT_ENGINE, _loaded(load_engine)),
        workload=workload or _ask("Load (name, or a log)", "chat", _loaded(load_workload)),
        ttft_p99_s=(ttft or _ask("p99 TTFT limit, ms", 1000.0, POSITIVE)) / 1e3,
        tpot_p99_s=(tpot or _ask("p99 TPOT limit, ms", 50.0, POSITIVE)) / 1e3,
        objective=objective or _ask(_OBJECTIVE, "goodput_per_gpu", _objective),
        name=spec_name(file.stem, "study"),
        confidence=confidence,
    )
    text = study_text(answers, file.parent)
    Study.from_document(yamlfile.parse(text, str(file)))
    write_file(file, text)
    click.echo(f"wrote {file}; next: simtune optimize {shlex.quote(str(file))} --out runs/{answers.name}", err=True)


_OBJECTIVE = "Look for the highest rate (goodput_per_gpu), or for how many GPUs the load needs (gpus)"


def _check(file: Path, force: bool, objective: str | None) -> None:
    """Raise UsageError before any question if the file exists or the objective does not."""
    if file.exists() and not force:
        raise UsageError(f"{file}: exists; give --force to replace it, or name another file")
    if objective is not None:
        try:
            _objective(objective)
        except click.UsageError as error:
            raise UsageError(f"--objective {error.message}") from None


def _objective(text: str) -> str:
    """Return an objective as it is. Raises click.UsageError for an unknown one."""
    from simtune.specs.new_study import OBJECTIVES

    if text not in OBJECTIVES:
        raise click.UsageError(f"{text}: must be one of {', '.join(OBJECTIVES)}")
    return text


def _note_stranger(cards: list[str]) -> None:
    """Print on stderr which card of this machine has no profile."""
    if cards:
        click.echo(
            f"note: no profile is of {cards[0]}, which is in this machine; `simtune profile` makes one", err=True
        )


def _ask(question: str, default: Any, kind: click.FloatRange | click.IntRange | Callable[[str], str]) -> Any:
    """Ask on a terminal until the answer is valid; return the default if there is no terminal."""
    if not sys.stdin.isatty():
        return default
    if isinstance(kind, (click.FloatRange, click.IntRange)):
        return click.prompt(question, default=default, type=kind, err=True)
    return click.prompt(question, default=default, value_proc=kind, err=True)


def _loaded(load: Callable[[str], object]) -> Callable[[str], str]:
    """Takes an answer that leads to a spec."""

    def checked(reference: str) -> str:
        try:
            load(reference)
        except SimtuneError as error:
            raise click.UsageError(str(error)) from None
        return reference

    return checked
