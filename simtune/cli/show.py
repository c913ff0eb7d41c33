"""simtune show: a spec, and what follows from it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simtune.cli.names import ANY
from simtune.cli.options import as_option, force_option, html_option, json_option, set_option
from simtune.cli.output import print_json, print_table, settings_of
from simtune.errors import UsageError
from simtune.runs.files import write_file

if TYPE_CHECKING:
    from simtune.specs.hardware import Hardware, Operator
    from simtune.specs.model import Model


@click.command()
@click.argument("reference", metavar="NAME_OR_FILE", type=ANY)
@set_option
@json_option
@html_option.but(help="For a hardware profile: write one page with plots of its fits.")
@force_option.but(help="Replace FILE.")
@as_option("reference")
def show(reference: str, settings: tuple[str, ...], as_json: bool, html: Path | None, force: bool) -> None:
    """Print a spec by built-in name or file; of a model, also its parameters and KV bytes; of a hardware profile, how
    far off its operators are."""
    from simtune.specs import catalog
    from simtune.specs.hardware import Hardware
    from simtune.specs.model import Model

    spec = catalog.load(reference, settings=settings_of(settings, [reference])[reference])
    if html is not None:
        from simtune.costs.other_engines import for_engine
        from simtune.report.hardware_page import render

        if not isinstance(spec, Hardware):
            raise UsageError(f"--html: {reference} is no hardware profile")
        if html.exists() and not force:
            raise UsageError(f"{html}: exists already; give --force to replace it")
        write_file(html, render(for_engine(spec)))
        click.echo(f"wrote {html}", err=True)
    if as_json:
        print_json(spec.to_data())
    elif isinstance(spec, Hardware):
        _show_hardware(spec)
    else:
        model_facts = _of_model(spec) if isinstance(spec, Model) else []
        click.echo(spec.to_yaml("\n".join(f"{fact}: {how_much}" for fact, how_much in model_facts)), nl=False)


def _of_model(model: Model) -> list[tuple[str, str]]:
    """(what, how much), and what it fits on."""
    from simtune.report.models import facts, fits_on, weights

    notes = [("note", note) for note in model.notes]
    cards = [(f"fits on {card}", how) for card, how in fits_on(model)]
    return [*notes, *facts(model), ("weights", weights(model)), *cards]


def _show_hardware(hardware: Hardware) -> None:
    from simtune.costs.operators import OPERATORS
    from simtune.costs.other_engines import for_engine
    from simtune.costs.predict import Z90, typical_log_sd
    from simtune.report.hardware_page import facts

    click.echo(f"{hardware.name}: {hardware.device.name}")
    hardware = for_engine(hardware)
    for key, value in facts(hardware):
        click.echo(f"  {key}: {value}")
    rows = []
    for key, operator in hardware.operators.items():
        base = operator.base
        coverage = operator.interval.coverage if operator.interval is not None else None
        rows.append(
            (
                key,
                f"{base.flops_per_s / 1e12:.1f}" if OPERATORS[operator.kind].computes else "-",
                f"{base.bytes_per_s / 1e12:.2f}",
                f"{base.overhead_s * 1e6:.2f}",
                f"{base.block_s * 1e6:.3f}",
                f"{base.overlap_p:.2f}",
                f"× or ÷ {math.exp(Z90 * typical_log_sd(operator)):.2f}",
                "-" if coverage is None else f"{coverage:.0%}",
                _errors(operator),
                operator.origin,
            )
        )
    columns = (
        "operator",
        "TFLOP/s",
        "TB/s",
        "overhead us",
        "block us",
        "p",
        "90 % interval",
        "covers",
        "held back: median/p90",
        "provenance",
    )
    print_table("fitted operators", columns, rows)
    errors = [
        (f"{key}, {h.split}", *(f"{100 * x:.1f}" for x in (h.median, h.p90, h.max)))
        for key, operator in hardware.operators.items()
        for h in operator.hold_out
    ]
    if errors:
        print_table("errors on rows held back, %", ("operator, rows held back", "median", "p90", "max"), errors)
    for source in dict.fromkeys(
        f"{o.provenance.source} ({o.provenance.licence or 'own'})" for o in hardware.operators.values()
    ):
        click.echo(f"source: {source}")
    for key, operator in hardware.operators.items():
        if operator.provenance.note:
            click.echo(f"{key}: {operator.provenance.note}")


def _errors(operator: Operator) -> str:
    if not operator.hold_out:
        return "-"
    first = operator.hold_out[0]
    return f"{first.median:.1%}/{first.p90:.1%}"
