"""simtune show: a spec, and what follows from it."""

from __future__ import annotations

import click

from simtune.cli.output import json_option, print_json, print_table


@click.command()
@click.argument("reference", metavar="NAME_OR_FILE")
@json_option
def show(reference: str, as_json: bool) -> None:
    """Print a spec by built-in name or file; of a hardware profile, also how far off its operators are."""
    from simtune.specs import catalog
    from simtune.specs.hardware import Hardware

    spec = catalog.load(reference)
    if as_json:
        print_json(spec.to_data())
    elif isinstance(spec, Hardware):
        _show_hardware(spec)
    else:
        click.echo(spec.to_yaml(), nl=False)


def _show_hardware(hardware: object) -> None:
    from simtune.specs.hardware import Hardware

    assert isinstance(hardware, Hardware)
    device = hardware.device
    click.echo(f"{hardware.name}: {device.name}, kernels of {hardware.engine}")
    click.echo(
        f"data sheet: {device.memory_bytes / 2**30:.1f} GiB visible, {device.memory_bytes_per_s / 1e12:.2f} TB/s, "
        + ", ".join(f"{dtype} {rate / 1e12:.0f} TFLOP/s" for dtype, rate in device.flops_per_s.items())
        + f" ({device.source})"
    )
    rows = []
    for key, operator in hardware.operators.items():
        base = operator.base
        rows.append(
            (
                key,
                f"{base.flops_per_s / 1e12:.1f}",
                f"{base.bytes_per_s / 1e12:.2f}",
                f"{base.overhead_s * 1e6:.2f}",
                f"{base.block_s * 1e6:.3f}",
                f"{base.overlap_p:.2f}",
                " ".join(f"{h.split} {h.median:.1%}/{h.p90:.1%}" for h in operator.hold_out),
                operator.provenance.kind,
            )
        )
    columns = (
        "operator",
        "TFLOP/s",
        "TB/s",
        "overhead us",
        "block us",
        "p",
        "hold-out error median/p90",
        "provenance",
    )
    print_table("fitted operators", columns, rows)
    for source in sorted({f"{o.provenance.source} ({o.provenance.licence})" for o in hardware.operators.values()}):
        click.echo(f"source: {source}")
    host = hardware.host
    click.echo(
        f"host: {host.step_s * 1e3:.2f} ms per step + {host.per_sequence_s * 1e6:.1f} us per sequence, "
        f"{host.provenance.kind} ({host.provenance.source})"
    )
