"""Shared parts of all verbs: options, tables, JSON, progress."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simtune.cli.pace import Bar, Pace

if TYPE_CHECKING:
    from simtune.results.summary import CostBasis
    from simtune.runs.contents import Contents
    from simtune.sim.deployment import Deployment
    from simtune.specs.base import Spec
    from simtune.specs.hardware import Hardware
    from simtune.specs.pool import Role
    from simtune.specs.traces import Trace
    from simtune.specs.workload import Workload


def command_line() -> list[str]:
    """The command as it can be typed again."""
    return ["simtune", *sys.argv[1:]]


def write_run(out: Path, contents: Contents, inputs: Sequence[Spec], trace: Trace | None, seed: int) -> None:
    """Write a run directory with its report, and print on stderr why it has no engine settings, if so. Raises
    UsageError.
    """
    from simtune.report.page import render
    from simtune.runs.engine_files import NO_ENGINE
    from simtune.runs.files import write
    from simtune.runs.manifest import manifest

    write(out, contents.complete(render(contents.run), manifest(command_line(), inputs, trace, seed)))
    why = contents.files.get(NO_ENGINE)
    for line in why.splitlines() if isinstance(why, str) else ():
        click.echo(f"note: {line}", err=True)


def write_profile(folder: Path, hardware: Hardware, comment: str) -> Path:
    """Write a hardware profile with its arrays; return its path. Raises UsageError."""
    from simtune.runs.files import write_file
    from simtune.specs.hardware import ARRAYS
    from simtune.specs.yamlfile import dump_json

    target = folder / "profile.yaml"
    # The profile comes last: where it is, its arrays are.
    arrays = hardware.arrays.to_bytes()
    write_file(folder / ARRAYS, arrays)
    bound = hardware.model_copy(update={"arrays_sha256": hashlib.sha256(arrays).hexdigest()})
    write_file(target, dump_json(bound.to_data(), comment))
    return target


def print_json(document: Any) -> None:
    """Print a JSON document on stdout; never NaN."""
    click.echo(json.dumps(document, indent=2, sort_keys=True, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; the first column left-aligned, the others right-aligned."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)


def plan_cells(names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the cells of plans by code name, and the lines to print below their table.

    A cell is what only some of the plans have, in words, above the code name.
    """
    from simtune.specs.plan_words import differing, shared

    words, common = differing(names), shared(names)
    cells = {name: name if text == name else f"{text}\n{name}" for name, text in words.items()}
    return cells, [f"all of them: {common}"] * bool(common)


def split_settings(settings: Sequence[str], allowed: Sequence[str]) -> dict[str, list[str]]:
    """Return the settings by spec name: `workload.arrivals.rate_rps=8` without its first word. Raises
    click.BadParameter for another first word.
    """
    by_spec: dict[str, list[str]] = {name: [] for name in allowed}
    for setting in settings:
        spec, dot, field = setting.partition(".")
        if spec not in by_spec or not dot:
            raise click.BadParameter(
                f"{setting}: begin with one of {', '.join(a + '.' for a in allowed)}", param_hint="--set"
            )
        by_spec[spec].append(field)
    return by_spec


def settings_of(settings: Sequence[str], references: Sequence[str]) -> dict[str, list[str]]:
    """Return the settings for each spec by its reference: `model.dtype=bf16` is for those that are models.

    Raises click.BadParameter for a setting of a kind that none of the references is, UsageError or SpecError for a
    reference that is no spec.
    """
    from simtune.specs import catalog

    if not settings:
        return {reference: [] for reference in references}
    kinds = {reference: catalog.kind_of(reference) for reference in references}
    by_kind = split_settings(settings, sorted(set(kinds.values())))
    return {reference: by_kind[kind] for reference, kind in kinds.items()}


@contextmanager
def progress(total_of: str, quiet: bool, patience_s: float = 0.0) -> Iterator[Callable[[int, int, str], None]]:
    """Yields update(done, total, words): a bar on a terminal from `patience_s` on, elsewhere a line now and then, with
    `simtune --log-json` a JSON line a second; all on stderr, and nothing when `quiet`."""
    from rich.console import Console

    console, context = Console(stderr=True), click.get_current_context(silent=True)
    as_json = context is not None and bool(context.find_root().params.get("log_json"))
    if quiet:
        yield lambda done, total, words: None
    elif as_json or not console.is_terminal:
        yield Pace(total_of, as_json)
    else:
        with closing(Bar(total_of, console, patience_s)) as bar:
            yield bar


def milliseconds(seconds: float | None) -> str:
    """Return milliseconds for a table cell; a dash for None."""
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with `digits` significant digits below a thousand, whole above; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def note_cut(workload: Workload, trace: Trace | None, requests: int) -> None:
    """Note on stderr which part of a trace is replayed, or that it is repeated."""
    from simtune.specs.trace_cut import replayed_part

    note = None if trace is None else replayed_part(workload, trace, requests)
    if note is not None:
        click.echo(f"note: {note}", err=True)


def note_estimates(deployment: Deployment) -> None:
    """Print on stderr what was assumed of the model, and which operators the result depends on without a table.

    Sampling has none on any device, norms that an engine compiles have none either, and both are small: the report says
    so, here it would only be noise.
    """
    from simtune.specs.plan_words import chosen_releases

    for note in (*deployment.model.notes, *chosen_releases(deployment.plan)):
        click.echo(f"note: {note}", err=True)
    estimated = [key for key in deployment.estimated if not key.startswith(("sampling", "elementwise.norm"))]
    if estimated:
        click.echo(f"note: estimated from the data sheet, not fitted: {', '.join(estimated)}", err=True)


_DRAFTING = {"always": "servers had drafts for this load", "both": "servers were run with drafts and without"}


def note_launch(like: str | None, workload: Workload, trace: Trace | None) -> None:
    """On stderr, what the launch facts of --like set for a load, and what they could not."""
    if like is None:
        return
    from simtune.specs.catalog import load_launch
    from simtune.specs.launch import LoadShape

    launch = load_launch(like)
    load = LoadShape.of(workload, trace)
    roles: tuple[Role, ...] = ("prefill", "decode") if launch.disaggregated else ("mixed",)
    by_users: dict[str, None] = {}
    for role in roles:
        settings, unknown = launch.settings(load, role)
        by_users |= dict.fromkeys(unknown)
        pools = f", {role} pools" if launch.disaggregated else ""
        click.echo(
            f"note: like {launch.name} ({launch.model} on {launch.hardware}{pools}): {_in_words(settings)}", err=True
        )
    if (drafting := launch.drafting(load)) in ("always", "both"):
        click.echo(f"note: {launch.name}: {_DRAFTING[drafting]}; a plan that drafts says so itself", err=True)
    if by_users:
        click.echo(
            f"note: the load has no number of users (arrivals: closed_loop), so these are the engine's own: "
            f"{'; '.join(by_users)}",
            err=True,
        )


def _in_words(settings: Mapping[str, Any], above: str = "") -> str:
    """`batching.max_num_seqs 64, stream_interval 20`."""
    return ", ".join(
        _in_words(value, f"{above}{key}.") if isinstance(value, Mapping) else f"{above}{key} {value}"
        for key, value in settings.items()
    )


def note_idle(deployment: Deployment) -> None:
    """Print on stderr which settings of the plan change nothing."""
    from simtune.sim.idle import idle_settings

    for note in idle_settings(deployment):
        click.echo(f"note: {note}", err=True)


def print_basis(basis: CostBasis | None) -> None:
    """Print a line on stdout: the shares of the step time by their basis; nothing if the user's own costs are used."""
    from simtune.costs.predict import Basis

    if basis is not None:
        shares = [(getattr(basis, kind.name.lower()), kind.words) for kind in Basis]
        click.echo(f"{'step time':30} {', '.join(f'{share:.1%} {words}' for share, words in shares if share >= 5e-4)}")


def note_basis(basis: CostBasis | None) -> None:
    """Print on stderr if more than a tenth of the step time rests on no measurement."""
    from simtune.sim.run_basis import note

    text = None if basis is None else note(basis)
    if text is not None:
        click.echo(f"note: {text}", err=True)
