"""simtune sweep: one simulation for each point of a grid."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simtune.cli.options import (
    as_option,
    hardware_option,
    jobs_option,
    json_option,
    model_option,
    out_option,
    plan_option,
    quiet_option,
    requests_option,
    seed_option,
    set_option,
    workload_option,
)
from simtune.cli.output import print_json, print_table, progress
from simtune.errors import SimtuneError, UsageError

if TYPE_CHECKING:
    from simtune.runs.grid_sweep import Point, Row


@click.command()
@click.option(
    "--over",
    "texts",
    multiple=True,
    required=True,
    metavar="FIELD=VALUES",
    help="Field to sweep and its values; repeatable.",
)
@click.option("--zip", "zipped", is_flag=True, help="Take the values of all fields side by side, not all combinations.")
@model_option
@hardware_option
@workload_option
@plan_option
@click.option("--rate", help="Mean requests per second.")
@requests_option.but(help="Requests to simulate.", type=str)
@seed_option.but(default="0", show_default=True, type=str)
@set_option
@jobs_option
@out_option.but(help="Folder for sweep.csv and sweep.html; a sweep that it contains is continued.")
@click.option("--parquet", is_flag=True, help="Also write sweep.parquet.")
@quiet_option
@json_option
@as_option()
def sweep(  # noqa: PLR0913 - one for each option
    texts: tuple[str, ...],
    zipped: bool,
    model: str | None,
    hardware: str | None,
    workload: str | None,
    plan: str | None,
    rate: str | None,
    requests: str | None,
    seed: str,
    settings: tuple[str, ...],
    jobs: int | None,
    out: Path | None,
    parquet: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Simulate every point of a grid: --over rate=2:10:2 --over hardware=h100-sxm,l40s.

    FIELD is model, hardware, workload, plan, rate, requests, seed, or a field of one of the first four, such as
    plan.pools.0.batching.max_num_seqs or workload.arrivals.cv. A sweep that was stopped goes on in the same folder.
    """
    from simtune.report.sweep_page import table
    from simtune.runs.grid_sweep import Base, Point, axis, points
    from simtune.runs.parquet import require
    from simtune.runs.sweep_files import write_sweep

    if parquet and out is None:
        raise UsageError("--parquet needs a folder: --out runs/NAME")
    if parquet:
        require("--parquet")
    axes = [axis(text) for text in texts]
    base = Base(model, hardware, workload, plan, rate, requests, seed)
    todo = [Point(base, values, settings) for values in points(axes, zipped)]
    rows = _simulated(todo, out, jobs, quiet)
    keys = [a.key for a in axes]
    if out is not None:
        from simtune.report.sweep_page import render

        write_sweep(out, rows, render(out.name, keys, rows), parquet)
        click.echo(f"report: {out / 'sweep.html'}", err=True)
    if as_json:
        print_json(rows)
    else:
        header, cells = table(keys, rows)
        print_table(f"{len(rows)} points", header, cells)


def _simulated(todo: Sequence[Point], out: Path | None, jobs: int | None, quiet: bool) -> list[Row]:
    """Return the rows of all points, those of an earlier sweep in the folder without simulating them again. If no point
    can be simulated, raise the first one's error, and leave no new folder."""
    from simtune.runs.files import hold
    from simtune.runs.grid_sweep import sweep as run
    from simtune.specs.row_journal import RowJournal

    is_new = out is not None and not out.exists()
    if out is not None:
        hold(out)
    rows: list[Row] = []
    try:
        with progress("points", quiet) as update:
            for number, row in run(todo, RowJournal(out / "points.jsonl") if out else None, jobs=jobs):
                rows.append(row)
                update(number + 1, len(todo), "")
        if all(row["error"] for row in rows):
            raise UsageError(rows[0]["error"])
    except (SimtuneError, OSError):
        if out is not None and is_new and all(row["error"] for row in rows):
            shutil.rmtree(out, ignore_errors=True)
        raise
    return rows
