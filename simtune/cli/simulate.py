"""simtune simulate: one plan, one load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from simtune.cli.output import (
    command_line,
    force_option,
    json_option,
    milliseconds,
    note_estimates,
    number,
    out_option,
    print_json,
    print_table,
    seed_option,
    set_option,
    split_settings,
)
from simtune.errors import UsageError


@click.command()
@click.option("--model", default=None, help="Name, spec, or Hugging Face config.json; the plan's own if not given.")
@click.option("--hardware", default=None, help="Name of a profile, or its folder; the plan's own if not given.")
@click.option("--workload", required=True, help="Name, spec, or a trace file as it was published.")
@click.option(
    "--plan",
    "plan_file",
    default=None,
    help="plan.yaml; without it one instance on the fewest GPUs that fit.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    help="Mean requests per second, exactly, instead of the workload's own.",
)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=None,
    help="Requests to simulate, instead of the workload's own number.",
)
@click.option(
    "--uncertainty",
    "worlds",
    type=click.IntRange(min=20),
    default=None,
    metavar="N",
    help="Also simulate N worlds in which operator times are off, and give 90 % intervals.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=None, help="Processes for --uncertainty; one per core.")
@click.option(
    "--timeline",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    metavar="FILE",
    help="Write the steps for ui.perfetto.dev (FILE.json.gz).",
)
@click.option(
    "--window",
    default=None,
    metavar="FROM..TO",
    help="Only steps between these simulated seconds in --timeline: 10..20.",
)
@click.option(
    "--per-request",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    metavar="FILE",
    help="Write a table of all requests: .csv, .jsonl or .parquet.",
)
@seed_option
@set_option
@out_option
@force_option
@json_option
def simulate(
    model: str | None,
    hardware: str | None,
    workload: str,
    plan_file: str | None,
    rate: float | None,
    requests: int | None,
    worlds: int | None,
    jobs: int | None,
    timeline: Path | None,
    window: str | None,
    per_request: Path | None,
    seed: int | None,
    settings: tuple[str, ...],
    out: Path | None,
    force: bool,
    as_json: bool,
) -> int:
    """Simulate one plan under one load and print what its users would see.

    Exits with 3 when the system is saturated: requests pile up faster than they are served.
    """
    from simtune import rundir
    from simtune.api import load_specs, set_up

    by_spec = split_settings(settings, ("model", "hardware", "workload", "plan"))
    if out is not None:
        rundir.claim(out, force)
    window_s = None if window is None else _window(window, timeline)
    for file in (timeline, per_request):
        if file is not None and file.exists() and not force:
            raise UsageError(f"{file}: exists; give --force to replace it, or name another file")
    if per_request is not None and per_request.suffix not in (".csv", ".jsonl", ".parquet"):
        raise UsageError(f"{per_request}: end the name in .csv, .jsonl or .parquet")
    specs = load_specs(model, hardware, workload, plan_file, by_spec)
    experiment = set_up(specs, rate_rps=rate, requests=requests, seed=seed or 0)
    deployment = experiment.deployment
    result = experiment.run(record=out is not None or timeline is not None)
    note_estimates(deployment)
    drawn = None
    if worlds is not None:
        from simtune.sim.uncertainty import uncertainty

        drawn = uncertainty(deployment, result.stream, count=worlds, seed=seed or 0, jobs=jobs)
    if out is not None:
        files = rundir.of_simulation(deployment, result, deployment.plan.name, seed or 0, drawn)
        inputs = (specs.model, deployment.hardware, specs.workload, deployment.plan)
        rundir.write(out, rundir.complete(files, rundir.manifest(command_line(), inputs, specs.trace, seed or 0)))
    if timeline is not None:
        rundir.write_file(timeline, rundir.timeline_file(result, window_s))
    if per_request is not None:
        rundir.write_file(per_request, rundir.requests_file(per_request.name, result))
    summary = result.summary()
    if as_json:
        del summary["quantiles"]
        if drawn is not None:
            summary["uncertainty"] = drawn.to_data()
        print_json({"schema": rundir.SUMMARY_SCHEMA, "plan": deployment.plan.to_data(), **summary})
    else:
        _print(deployment.plan.name, summary, drawn.intervals if drawn else {}, out)
    return 3 if result.saturated else 0


def _window(text: str, timeline: Path | None) -> tuple[float, float]:
    """`10..20` or `10s..20s`."""
    if timeline is None:
        raise UsageError("--window chooses what --timeline FILE shows; give both")
    begin, dots, end = text.partition("..")
    try:
        window = float(begin.removesuffix("s")), float(end.removesuffix("s"))
    except ValueError:
        dots = ""
    if not dots or not 0 <= window[0] < window[1]:
        raise UsageError(f"--window {text}: write it as FROM..TO in simulated seconds, for example 10..20")
    return window


def _print(name: str, summary: dict[str, Any], intervals: dict[str, Any], out: Path | None) -> None:
    statistics = ("mean", "p50", "p90", "p99", "max")
    rows = []
    for metric, block in summary["metrics"].items():
        bounds = intervals.get("metrics", {}).get(metric, {})
        spread = (_between(bounds.get(s), 1e3) if intervals else _noise(block, s) for s in statistics)
        cells = (milliseconds(block.get(s)) + more for s, more in zip(statistics, spread, strict=True))
        rows.append((metric.upper(), *cells))
    what = "in brackets: 90 % of redrawn worlds" if intervals else "± 95 %: noise of this run"
    print_table(f"{name}: latencies in ms ({what})", ("metric", *statistics), rows)
    for key in (
        "requests",
        "refused",
        "unserved",
        "preemptions",
        "offered_rate_rps",
        "request_throughput_rps",
        "output_tokens_per_s_per_gpu",
        "num_gpus",
    ):
        value = summary[key]
        shown = number(value) if isinstance(value, float) else value
        click.echo(f"{key.replace('_', ' '):30} {shown}{_between(intervals.get(key))}")
    if summary["unserved"]:
        click.echo("NOT SERVED: requests were left when no instance was up any more")
    elif summary["saturated"]:
        click.echo("SATURATED: requests pile up faster than they are served; latencies grow without bound")
    if out is not None:
        click.echo(f"report: {out / 'report.html'}")


def _noise(block: dict[str, Any], statistic: str) -> str:
    """` ± x` by batch means, or nothing where the run is too short."""
    interval = block.get("ci95", {}).get(statistic)
    return "" if interval is None else f" ± {number((interval[1] - interval[0]) / 2 * 1e3)}"


def _between(bounds: list[float | None] | None, scale: float = 1.0) -> str:
    """` (low-high)`, or nothing where no worlds were drawn."""
    if bounds is None:
        return ""
    low, high = ("unbounded" if x is None else number(x * scale) for x in bounds)
    return f" ({low}-{high})"
