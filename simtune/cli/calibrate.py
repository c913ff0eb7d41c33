"""simtune calibrate: two numbers from an engine's own log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from simtune.cli.numbers import GPUS
from simtune.cli.options import as_option, force_option, json_option, model_option, out_option, plan_option
from simtune.cli.output import print_json, print_table, write_profile
from simtune.cli.paths import PATH, TEXT
from simtune.errors import UsageError

if TYPE_CHECKING:
    from simtune.specs.hardware import Calibration, Hardware
    from simtune.specs.model import Model
    from simtune.specs.pool import Pool

COMMENT = """Fitted by `simtune fit`, corrected by `simtune calibrate`; do either again rather than edit this file.
Only fitted numbers are stored here. The tables they come from, and their licences, are named under each
operator."""


@click.command()
@click.argument("profile", metavar="DIR", type=TEXT)
@click.option(
    "--measured",
    required=True,
    type=PATH,
    help="Steps of an engine: simtune's own CSV or JSON lines, steplog/1, or Splitwise's CSV.",
)
@model_option.but(help="Model that the engine ran; the plan's own if not given.")
@click.option("--tp", type=GPUS, default=None, help="Ranks that it ran on; the plan's, or 1.")
@plan_option.but("plan_file", help="plan.yaml of the engine's run, if model and tp do not define it.")
@out_option.but(help="Folder for the corrected profile.")
@json_option
@force_option.but(help="Replace a profile that exists; without --out the one in DIR.")
@as_option()
def calibrate(
    profile: str,
    measured: Path,
    model: str | None,
    tp: int | None,
    plan_file: str | None,
    out: Path | None,
    as_json: bool,
    force: bool,
) -> None:
    """Correct the step times of hardware profile DIR by a scale and an offset, from an engine's own log.

    Steps with prompt tokens and steps without are corrected apart, each where the log has eight or more. The errors
    printed are those of either half of the steps corrected by the other half. If the plan schedules synchronously,
    the host time beside the kernels is printed as well: `host` of a plan or of an engine preset, in place of the
    correction.
    """
    from simtune.costs.calibration import calibrate as corrected_by
    from simtune.costs.calibration import read_log
    from simtune.costs.host_fit import fit_host_times
    from simtune.specs import catalog

    folder = _folder(profile, out, force)
    hardware = catalog.load_hardware(profile)
    ran, pool = _deployed(hardware, model, tp, plan_file)
    log = read_log(measured, ran, hardware, pool.parallelism.tp)
    for why, lines in log.left_out.items():
        click.echo(f"{measured.name}: {lines:,} lines left out: {why}", err=True)
    correction = corrected_by(ran, hardware, pool, log, measured)
    target = write_profile(folder, hardware.model_copy(update={"calibration": correction}), COMMENT)
    host = fit_host_times(ran, hardware, pool, log)
    if as_json:
        document = {"written": str(target), "calibration": correction.model_dump(mode="json", exclude_none=True)}
        if host is not None:
            document["host"] = host.model_dump(mode="json", exclude_none=True)
        print_json(document)
    else:
        _print(f"{hardware.name}: measured = scale x predicted + offset, {ran.name}", correction)
        if host is not None:
            fields = host.model_dump(mode="json", exclude_none=True)
            settings = ", ".join(f"{name}: {value}" for name, value in fields.items())
            click.echo(f"in place of the correction, for a plan or an engine preset: host: {{{settings}}}")
        click.echo(f"wrote {target}")


def _folder(profile: str, out: Path | None, force: bool) -> Path:
    """Return the folder for the corrected profile. Raises UsageError if it has a profile that may not be replaced."""
    if out is None and not (force and Path(profile).is_dir()):
        raise UsageError("give --out FOLDER for the corrected profile, or --force to replace the one in folder DIR")
    folder = out or Path(profile)
    target = folder / "profile.yaml"
    if target.exists() and not force:
        raise UsageError(f"{target}: there is a profile already; give --force to replace it")
    return folder


def _deployed(hardware: Hardware, model: str | None, tp: int | None, plan_file: str | None) -> tuple[Model, Pool]:
    """Return the model and the pool that ran when the log was written: those of the plan, or a model on `tp` ranks with
    an engine's usual batching.
    """
    from simtune.specs import catalog
    from simtune.specs.pool import Batching, Parallelism, Pool

    if plan_file is not None:
        plan = catalog.load_plan(plan_file)
        if len(plan.pools) > 1:
            raise UsageError(f"{plan_file}: has {len(plan.pools)} pools; a log is of one")
        (pool,), model = plan.pools, model or plan.model
    else:
        batching = Batching(max_num_seqs=256, max_num_batched_tokens=8192)
        pool = Pool(hardware=hardware.name, instances=1, batching=batching)
    if model is None:
        raise UsageError("name the model the engine ran (--model), or its plan (--plan)")
    if tp is not None:
        pool = pool.model_copy(update={"parallelism": Parallelism(tp=tp)})
    return catalog.load_model(model), pool


def _print(title: str, correction: Calibration) -> None:
    from simtune.costs.calibration import FEWEST

    kinds = (("decode", correction.decode), ("prefill", correction.prefill))
    rows = [
        (
            kind,
            f"{c.steps:,}",
            f"{c.scale:.3f}",
            f"{1e3 * c.offset_s:.3f}",
            *(f"{100 * x:.1f}" for x in (c.median_before, c.p90_before, c.median_after, c.p90_after)),
        )
        for kind, c in kinds
        if c is not None
    ]
    columns = ("steps", "number", "scale", "offset ms", "median % before", "p90 % before", "median % after", "p90 %")
    print_table(title, columns, rows)
    for kind, c in kinds:
        if c is None:
            click.echo(f"{kind} steps are not corrected: fewer than {FEWEST} in the log", err=True)
