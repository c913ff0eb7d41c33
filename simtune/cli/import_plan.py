"""simtune import: a plan from what starts real servers."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from simtune.cli.names import ACCEPTANCE, ENGINE
from simtune.cli.options import force_option, hardware_option, json_option, model_option, out_option, set_option
from simtune.cli.output import print_json
from simtune.errors import UsageError

MOST_BYTES = 4 << 20
"""Most bytes on stdin: launch scripts have some thousand."""


@click.command("import")
@click.argument("words", nargs=-1, required=True, metavar="FILE|-|-- COMMAND...")
@model_option.but(help="Model of the plan; what the servers load if not given.")
@hardware_option.but(help="Profile of the card: no launch line states it.")
@click.option("--engine", type=ENGINE, help="Preset of the release, e.g. vllm@0.21; from an image's tag if not given.")
@click.option("--acceptance", type=ACCEPTANCE, help="How often drafts are kept, if the servers draft.")
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="Set a variable of the script.")
@click.option(
    "--role", "roles", multiple=True, metavar="POOL=ROLE", help="Make a pool prefill or decode, if no option does."
)
@click.option("--entry", metavar="NAME[:N]", help="Entry of an InferenceX config, and its point.")
@click.option("--name", help="Name of the plan.")
@click.option("--lenient", is_flag=True, help="Go on without options that cannot be simulated; name them.")
@set_option.but(help="Override a field of the plan, e.g. pools.0.instances=4.")
@out_option.but(help="File to write, instead of stdout.")
@force_option.but(help="Replace the file in --out.")
@json_option.but(help="Print plan and notes as one JSON document.")
def import_plan(  # noqa: PLR0913 - one for each option
    words: tuple[str, ...],
    model: str | None,
    hardware: str | None,
    engine: str | None,
    acceptance: str | None,
    variables: tuple[str, ...],
    roles: tuple[str, ...],
    entry: str | None,
    name: str | None,
    lenient: bool,
    settings: tuple[str, ...],
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Print the plan of what starts servers: a script, a compose file, a Kubernetes manifest, an InferenceX config or a
    settings file (FILE, or - for stdin), or a command line behind --.

    Nothing is run. Options that change nothing in a simulation, and unknown ones, are listed on stderr and at the top
    of the plan. What a launch line leaves open is as the engine's preset has it.
    """
    from simtune.emit.importing import ImportRequest
    from simtune.emit.importing import import_plan as imported_from
    from simtune.runs.files import write_file

    if out is not None and out.exists() and not force:
        raise UsageError(f"{out}: exists already; give --force to replace it")
    text, file, folder = _text(words)
    imported = imported_from(
        ImportRequest(
            hardware=hardware,
            text=text,
            words=words if text is None else (),
            file=file,
            folder=folder,
            model=model,
            engine=engine,
            acceptance=acceptance,
            entry=entry,
            name=name,
            variables=_pairs(variables, "--env", "NAME=VALUE"),
            roles=_pairs(roles, "--role", "POOL=prefill or POOL=decode"),
            settings=settings,
            lenient=lenient,
        )
    )
    for note in imported.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        print_json({"plan": imported.data, "notes": list(imported.notes)})
    elif out is None:
        click.echo(imported.text, nl=False)
    else:
        write_file(out, imported.text)
        click.echo(
            f"wrote {out}; next: simtune simulate --plan {shlex.quote(str(out))} --workload chat --rate 1", err=True
        )


def _text(words: tuple[str, ...]) -> tuple[str | None, str, Path | None]:
    """Return text, name and folder of what is imported; no text for a command line."""
    from simtune.specs.input_files import decoded, read_text

    if len(words) > 1:
        return None, "command line", None
    if words[0] != "-":
        return read_text(Path(words[0])), words[0], Path(words[0]).parent
    raw = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise UsageError(f"stdin: is longer than {MOST_BYTES:,} bytes; cut it to what starts the servers")
    return decoded(Path("stdin"), raw), "stdin", None


def _pairs(texts: tuple[str, ...], option: str, shape: str) -> Mapping[str, str]:
    """Return NAME=VALUE texts as a mapping. Raises UsageError for another text."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"{option} {text}: must be {shape}")
        pairs[key] = value
    return pairs
