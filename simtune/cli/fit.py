"""simtune fit: a hardware profile from tables others measured."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import click

from simtune.errors import UsageError
from simtune.specs.hardware import Hardware

COMMENT = """Fitted by `simtune fit`; edit the facts and fit again rather than this file.
Only fitted numbers are stored here. The tables they come from, and their licences, are named under each
operator."""


@click.command()
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="SOURCE...")
@click.option(
    "--facts",
    required=True,
    type=click.Path(path_type=Path),
    help="YAML file with the facts of the device that tables do not tell (schema simtune/device@1).",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder to write profile.yaml into; made if absent.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@click.option("--force", is_flag=True, help="Replace a profile that is already there.")
def fit(sources: tuple[Path, ...], facts: Path, out: Path, as_json: bool, force: bool) -> None:
    """Fit a hardware profile from published tables of operator times.

    A SOURCE is a table or a folder of tables: AIConfigurator (GEMM, attention, MoE, custom all-reduce) and
    Vidur (mlp.csv, cpu_overheads.csv), plain or gzipped. Each fit is tested on rows it did not see; the
    errors printed are those.
    """
    from simtune.costs.profile import Facts, build
    from simtune.costs.tables import read_tables

    target = out / "profile.yaml"
    if target.exists() and not force:
        raise UsageError(f"{target}: there is a profile already; give --force to replace it")
    known = Facts.from_file(facts)
    tables = read_tables(sources)
    for note in tables.notes:
        click.echo(note, err=True)
    hardware = build(tables, known)
    _write(target, hardware.to_yaml(COMMENT))
    if as_json:
        click.echo(json.dumps({"written": str(target), "profile": hardware.to_data()}, allow_nan=False, indent=2))
    else:
        _show(hardware, target)


def _write(target: Path, text: str) -> None:
    """Whole or not at all: write beside the target, then rename."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise UsageError(f"{target}: cannot be written ({error.strerror})") from None


def _show(hardware: Hardware, target: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{hardware.name}: errors on rows the fit did not see")
    table.add_column("operator")
    table.add_column("points", justify="right")
    table.add_column("split")
    for name in ("train", "test", "median %", "p90 %", "max %"):
        table.add_column(name, justify="right")
    for key, operator in hardware.operators.items():
        for row, errors in enumerate(operator.hold_out):
            table.add_row(
                "" if row else key,
                "" if row else f"{operator.provenance.points:,}",
                errors.split,
                f"{errors.train_points:,}",
                f"{errors.test_points:,}",
                *(f"{100 * e:.1f}" for e in (errors.median, errors.p90, errors.max)),
            )
    console = Console()
    console.print(table)
    host = hardware.host
    console.print(f"host: {1e3 * host.step_s:.2f} ms per step + {1e6 * host.per_sequence_s:.1f} us per sequence")
    console.print(f"wrote {target}", soft_wrap=True)
