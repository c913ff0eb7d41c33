"""simtune fit: a hardware profile from tables others measured, or from another profile and a data sheet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from simtune.cli.names import HARDWARE
from simtune.cli.options import force_option, json_option, out_option, quiet_option
from simtune.cli.output import print_json, print_table, progress, write_profile
from simtune.cli.paths import PATH
from simtune.errors import UsageError

if TYPE_CHECKING:
    from simtune.specs.hardware import Hardware

COMMENT = """Fitted by `simtune fit`; edit the facts and fit again rather than this file.
Only fitted numbers are stored here. The tables they come from, and their licences, are named under each
operator."""


@click.command()
@click.argument("sources", nargs=-1, type=PATH, metavar="[SOURCE]...")
@click.option(
    "--facts",
    required=True,
    type=PATH,
    help="YAML file with the facts of the device that tables lack (schema simtune/device@1).",
)
@out_option.but(required=True, help="Folder to write profile.yaml and arrays.npz into; created if absent.")
@click.option(
    "--transfer-from",
    "source_profile",
    type=HARDWARE,
    metavar="PROFILE",
    help="Instead of tables: scale the fit of this measured profile by the ratio of the data sheets.",
)
@click.option(
    "--engine",
    metavar="vllm|trtllm|sglang",
    help="Engine whose kernels to fit, if the tables are of several engines; NCCL's belong to all.",
)
@click.option("--allow-device", is_flag=True, help="Use tables measured on another device than the facts name.")
@click.option("--allow-launches", is_flag=True, help="Use tables that time launches by a host rather than kernels.")
@click.option(
    "--sister", metavar="PROFILE", help="Refuse tables that are unlike those of this profile of a sister card."
)
@click.option(
    "--repair",
    is_flag=True,
    help="Take message sizes as bytes where they cannot be elements; leave out rows of a window that was ignored, and "
    "products out of order.",
)
@json_option
@force_option.but(help="Replace a profile that exists.")
@quiet_option
def fit(  # noqa: PLR0913 - one for each option
    sources: tuple[Path, ...],
    facts: Path,
    out: Path,
    source_profile: str | None,
    engine: str | None,
    allow_device: bool,
    allow_launches: bool,
    sister: str | None,
    repair: bool,
    as_json: bool,
    force: bool,
    quiet: bool,
) -> None:
    """Fit a hardware profile from published tables of operator times.

    A SOURCE is a table or a folder of tables, as CSV, Parquet or measurements.jsonl (plain or gzipped): of
    AIConfigurator, Vidur, LLMServingSim or simtune itself. Of two sources that have an operator the first one given
    provides it. Each fit is tested on rows it did not see; the errors printed are those.
    """
    from simtune.costs.device_transfer import transfer
    from simtune.costs.hardware_profile import build, usable
    from simtune.costs.tables import read_tables
    from simtune.specs import catalog
    from simtune.specs.hardware import Facts

    if bool(sources) == bool(source_profile):
        raise click.UsageError("give tables to fit (SOURCE...), or a profile to transfer from (--transfer-from)")
    target = out / "profile.yaml"
    if target.exists() and not force:
        raise UsageError(f"{target}: there is a profile already; give --force to replace it")
    device_facts = Facts.from_file(facts)
    if source_profile:
        hardware = transfer(catalog.load_hardware(source_profile), device_facts)
    else:
        tables = read_tables(sources, engine)
        beside = None if sister is None else catalog.load_hardware(sister)
        tables = usable(tables, device_facts, repair=repair, allow_launches=allow_launches, sister=beside)
        for note in tables.notes:
            click.echo(note, err=True)
        with progress("fitting", quiet) as update:
            hardware = build(tables, device_facts, allow_device=allow_device, repair=repair, progress=update)
    write_profile(out, hardware, COMMENT)
    if as_json:
        print_json({"written": str(target), "profile": hardware.to_data()})
    else:
        _show(hardware, target)


def _show(hardware: Hardware, target: Path) -> None:
    rows = []
    for key, operator in hardware.operators.items():
        for at, errors in enumerate(operator.hold_out):
            rows.append(
                (
                    "" if at else key,
                    errors.split,
                    f"{errors.train_points:,}",
                    f"{errors.test_points:,}",
                    *(f"{100 * e:.1f}" for e in (errors.median, errors.p90, errors.max)),
                    "-" if errors.coverage is None else f"{100 * errors.coverage:.0f}",
                )
            )
    columns = ("operator", "rows held back", "train", "test", "median %", "p90 %", "max %", "in 90 % interval %")
    print_table(f"{hardware.name}: errors on rows the fit did not see", columns, rows)
    print_table(
        "rows of the tables",
        ("operator", "what became of them"),
        [(key, operator.provenance.note or "") for key, operator in hardware.operators.items()],
    )
    host = hardware.host
    click.echo(f"host: {1e3 * host.step_s:.2f} ms per step + {1e6 * host.per_sequence_s:.1f} us per sequence")
    click.echo(f"wrote {target}")
