"""simtune simulate: one plan, one load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simtune.cli.names import ENGINE
from simtune.cli.numbers import RATE, WORLDS, WholeRange
from simtune.cli.options import (
    as_option,
    force_option,
    hardware_option,
    jobs_option,
    json_option,
    like_option,
    model_option,
    out_option,
    plan_option,
    quiet_option,
    requests_option,
    seed_option,
    set_option,
    workload_option,
)
from simtune.cli.output import (
    milliseconds,
    note_basis,
    note_cut,
    note_estimates,
    note_idle,
    note_launch,
    number,
    print_basis,
    print_json,
    print_table,
    progress,
    split_settings,
    write_run,
)
from simtune.cli.paths import FILE
from simtune.errors import UsageError

if TYPE_CHECKING:
    from simtune.api import Experiment
    from simtune.results.result import Result
    from simtune.results.summary import CostBasis, Distribution, SimulationSummary, Uncertainty
    from simtune.runs.price import Price
    from simtune.sim.deployment import Deployment
    from simtune.sim.streamed import StreamedResult
    from simtune.sim.watch import Watch
    from simtune.specs.plan import Plan


@click.command()
@model_option
@hardware_option
@workload_option.but(required=True)
@plan_option.but("plan_file")
@click.option(
    "--engine",
    type=ENGINE,
    default=None,
    help="Preset whose settings apply without a plan: `simtune list engines`.",
)
@like_option
@click.option(
    "--costs",
    "costs_file",
    type=FILE,
    default=None,
    metavar="FILE",
    help="Measured whole steps, a table (.csv, .parquet) or a log (.jsonl), in place of the operators.",
)
@click.option(
    "--rate",
    type=RATE,
    default=None,
    help="Exact mean of requests per second, instead of the workload's own.",
)
@requests_option
@click.option(
    "--uncertainty",
    "worlds",
    type=WholeRange(20, WORLDS),
    default=None,
    metavar="N",
    help="Also simulate N worlds in which operator times are off, and print 90 % intervals.",
)
@jobs_option.but(help="Processes for --uncertainty; one per core.")
@click.option(
    "--timeline",
    type=FILE,
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
    type=FILE,
    default=None,
    metavar="FILE",
    help="Write a table of all requests: .csv, .jsonl or .parquet.",
)
@click.option(
    "--stream",
    "streamed",
    is_flag=True,
    help="Keep no finished request: memory does not grow, percentiles are within 0.1 %.",
)
@click.option(
    "--leave-out",
    multiple=True,
    type=click.Choice(["requests", "trace", "swimlanes"]),
    help="Leave this file out of --out; for a load of a week such files are hundreds of megabytes.",
)
@seed_option
@set_option
@out_option
@force_option
@quiet_option
@json_option
@as_option()
def simulate(  # noqa: PLR0913 - one for each option
    model: str | None,
    hardware: str | None,
    workload: str,
    plan_file: str | None,
    engine: str | None,
    like: str | None,
    costs_file: Path | None,
    rate: float | None,
    requests: int | None,
    worlds: int | None,
    jobs: int | None,
    timeline: Path | None,
    window: str | None,
    per_request: Path | None,
    streamed: bool,
    leave_out: tuple[str, ...],
    seed: int | None,
    settings: tuple[str, ...],
    out: Path | None,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Simulate one plan under one load and print what its users would see.

    Exits with 3 when the system is saturated: requests pile up faster than they are served.
    """
    from simtune.api import load_specs, set_up, stream
    from simtune.runs.price import price
    from simtune.sim.run_basis import cost_basis

    by_spec = split_settings(settings, ("model", "hardware", "workload", "plan"))
    targets = _Targets(out, timeline, _window(window, timeline), per_request, leave_out)
    targets.check(force)
    if streamed:
        targets.need_no_columns(worlds)
    specs = load_specs(model, hardware, workload, plan_file, by_spec, engine, like)
    note_launch(like, specs.workload, specs.trace)
    if streamed:
        with _watched(quiet) as watch:
            answer = stream(specs, costs=costs_file, rate_rps=rate, requests=requests, seed=seed or 0, watch=watch)
        return _say(*answer, as_json)
    experiment = set_up(specs, costs=costs_file, rate_rps=rate, requests=requests, seed=seed or 0)
    with _watched(quiet) as watch:
        result = experiment.run(record=out is not None or timeline is not None, watch=watch)
    note_cut(experiment.workload, experiment.trace, len(experiment.stream))
    note_estimates(experiment.deployment)
    note_idle(experiment.deployment)
    # Only the JSON document has log errors, which take a third of the start.
    basis = cost_basis(experiment.deployment, result, errors=as_json)
    note_basis(basis)
    uncertainty = None if worlds is None else _drawn(experiment, result, worlds, jobs, quiet)
    targets.write(experiment, result, uncertainty)
    if as_json:
        _print_json(experiment.deployment.plan, result.summary(), basis, uncertainty)
    else:
        _print(
            experiment.deployment.plan,
            result.summary(),
            uncertainty,
            price(experiment.deployment, result.summary()),
        )
        print_basis(basis)
        if out is not None:
            click.echo(f"report: {out / 'report.html'}")
    return 3 if result.saturated else 0


PATIENCE_S = 3.0
"""A simulation that is over sooner draws no bar."""


@contextmanager
def _watched(quiet: bool) -> Iterator[Watch]:
    """Yield a function that shows the progress of a simulation."""
    from simtune.specs.trace_cut import in_words

    with progress("requests", quiet, PATIENCE_S) as update:
        yield lambda done, total, now_s: update(done, total, f"{in_words(now_s)} simulated")


def _drawn(experiment: Experiment, result: Result, worlds: int, jobs: int | None, quiet: bool) -> Uncertainty:
    """Simulate the same requests in `worlds` redrawn worlds."""
    from simtune.sim.uncertainty import uncertainty

    with progress("worlds", quiet, PATIENCE_S) as update:
        return uncertainty(
            experiment.deployment, result.stream, count=worlds, seed=experiment.seed, jobs=jobs,
            each=lambda done: update(done, worlds, ""),
        )  # fmt: skip


@dataclass(frozen=True)
class _Targets:
    """Files to write."""

    out: Path | None
    timeline: Path | None
    window_s: tuple[float, float] | None
    per_request: Path | None
    leave_out: tuple[str, ...] = ()

    def check(self, force: bool) -> None:
        """Before any work: raises UsageError for what cannot be written."""
        from simtune.runs.files import claim

        if self.out is not None:
            claim(self.out, force)
        elif self.leave_out:
            raise UsageError("--leave-out says what --out FOLDER lacks; give both")
        for option, file in (("--timeline", self.timeline), ("--per-request", self.per_request)):
            if file is not None and file == self.out:
                raise UsageError(f"{file}: is given to --out, which is a folder, and to {option}; name another file")
            if file is not None and file.exists() and not force:
                raise UsageError(f"{file}: exists; give --force to replace it, or name another file")
        if self.per_request is not None:
            from simtune.runs.request_columns import check_format

            check_format(str(self.per_request))

    def need_no_columns(self, worlds: int | None) -> None:
        """Raise UsageError for options that need more than --stream keeps."""
        options = {"--out": self.out, "--timeline": self.timeline, "--per-request": self.per_request,
                 "--uncertainty": worlds}  # fmt: skip
        set_options = [name for name, value in options.items() if value is not None]
        if set_options:
            raise UsageError(f"--stream keeps no requests, which {' and '.join(set_options)} would need; leave one out")

    def write(self, experiment: Experiment, result: Result, drawn: Uncertainty | None) -> None:
        """Write the files, each completely or not at all."""
        from simtune.runs.files import write_file

        if self.out is not None:
            # Imported only to write a run: the schema of its files takes a quarter of the time of a start.
            from simtune.runs.contents import PLAN, WRITTEN, of_simulation
            from simtune.runs.engine_files import plan_file

            deployment, seed = experiment.deployment, experiment.seed
            inputs = (deployment.model, *deployment.profiles.values(), experiment.workload, deployment.plan)
            name, load, trace = deployment.plan.name, experiment.workload, experiment.trace
            contents = of_simulation(deployment, result, name, seed, drawn, load, trace, self.leave_out)
            contents.files[PLAN] = plan_file(experiment.plan, WRITTEN, self.out)
            write_run(self.out, contents, inputs, experiment.trace, seed)
        if self.timeline is not None:
            from simtune.runs.timeline import trace_file

            write_file(self.timeline, trace_file(result, self.window_s))
        if self.per_request is not None:
            from simtune.runs.request_columns import requests_file

            write_file(self.per_request, requests_file(self.per_request.name, result))


def _say(deployment: Deployment, result: StreamedResult, as_json: bool) -> int:
    """Print a streamed simulation; return the exit code."""
    from simtune.runs.price import price
    from simtune.sim.run_basis import cost_basis

    note_estimates(deployment)
    note_idle(deployment)
    summary, basis = result.summary(), cost_basis(deployment, result, errors=as_json)
    note_basis(basis)
    if as_json:
        _print_json(deployment.plan, summary, basis, None)
    else:
        _print(deployment.plan, summary, None, price(deployment, summary))
        print_basis(basis)
    return 3 if result.saturated else 0


def _window(text: str | None, timeline: Path | None) -> tuple[float, float] | None:
    """`10..20` or `10s..20s`; None for all of the timeline. Raises UsageError."""
    if text is None:
        return None
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


def _print_json(plan: Plan, summary: SimulationSummary, basis: CostBasis | None, drawn: Uncertainty | None) -> None:
    """The summary as far as it is the simulation's, and the plan."""
    from simtune.runs.files import SUMMARY_SCHEMA

    document = {"schema": SUMMARY_SCHEMA, "plan": plan.to_data(), **summary.to_data()}
    document["cost_basis"] = None if basis is None else basis.to_data()
    if drawn is not None:
        document["uncertainty"] = drawn.to_data()
    print_json(document)


STATISTICS = ("mean", "p50", "p90", "p99", "max")


def _print(plan: Plan, summary: SimulationSummary, drawn: Uncertainty | None, price: Price | None) -> None:
    # Latencies of a growing queue show only how long the simulation was.
    if not summary.saturated:
        _print_latencies(plan, summary, drawn)
        _print_first_token(summary)
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
        value = getattr(summary, key)
        text = number(value) if isinstance(value, float) else value
        click.echo(f"{key.replace('_', ' '):30} {text}{_between(drawn.of(key) if drawn else None)}")
    if price is not None:
        million = number(price.per_million_output_tokens_usd)
        click.echo(f"{'price':30} {number(price.per_hour_usd)} USD an hour, {million} USD per million output tokens")
    _print_scaling(summary, price)
    if summary.power_w is not None:
        energy = f"{number(summary.joules_per_token)}{_between(drawn.of('joules_per_token') if drawn else None)}"
        click.echo(f"{'power':30} {number(summary.power_w)} W, {energy} J per output token")
    _print_end(summary)
    if summary.unserved:
        click.echo("NOT SERVED: requests were left when no instance was up any more")
    elif summary.saturated:
        click.echo("SATURATED: requests pile up faster than they are served; latencies grow without bound")
    elif summary.steadiness == "too short to tell":
        long = "" if summary.lifetimes is None else f" ({number(summary.lifetimes)} lifetimes)"
        click.echo(
            f"TOO SHORT TO TELL whether the plan keeps up with this load: {summary.requests:,} requests{long}; "
            "ask for more with --requests"
        )
    if summary.too_few_for:
        click.echo(
            f"TOO FEW REQUESTS for {', '.join(summary.too_few_for)}: {summary.completed:,} ended, and ten must lie "
            "beyond a percentile (p99 needs 1,000); ask for more with --requests"
        )


def _print_scaling(summary: SimulationSummary, price: Price | None) -> None:
    """Print the instances of autoscaled pools, changes of ranks, the work of encoders, and the price of the GPUs."""
    for pool in summary.autoscaling:
        click.echo(f"{'autoscaling of pool ' + pool.pool:30} {pool.sentence}")
    for change in summary.rank_changes:
        click.echo(f"{'ranks of pool ' + change.pool:30} {change.sentence}")
    for work in summary.encoders:
        click.echo(f"{'encoder of pool ' + work.pool:30} {work.sentence}")
    if price is not None and price.run_usd is not None:
        most = f"{number(price.run_usd_of_most)} with all of them throughout"
        click.echo(f"{'price of the run':30} {number(price.run_usd)} USD, of {most}")


def _print_end(summary: SimulationSummary) -> None:
    """Print how many requests were rejected, how long the client held requests back, or the makespan of a load without
    a rate."""
    if summary.rejections is not None:
        by_class = ", ".join(f"{row.request_class} {row.requests:,}" for row in summary.rejections.classes)
        share = f"{summary.rejections.share:.2%} of the requests, as a queue was full"
        click.echo(f"{'rejected':30} {summary.rejections.requests:,} ({share}{'; ' + by_class if by_class else ''})")
    back = summary.held_back
    if back is None and summary.steadiness is None and not summary.unserved:
        click.echo(f"{'makespan':30} {number(summary.duration_s)} s")
    if back is not None:
        waits = f"{back.share:.1%} of the requests, {number(back.mean_s)} s on average, p99 {number(back.p99_s)} s"
        limit = f"more than {back.max_in_flight:,} under way; such a load cannot saturate"
        click.echo(f"{'held back':30} {waits} ({limit})")


def _print_first_token(summary: SimulationSummary) -> None:
    """Print the mean parts of the TTFT, of all requests and of the slowest hundredth."""
    for group in summary.first_token_parts:
        parts = [f"{name} {number(1e3 * seconds)}" for name, seconds in group.parts.items() if seconds]
        if group.slowest in (1.0, 0.01):
            click.echo(f"{'TTFT of ' + group.group:30} {', '.join(parts)} ms")


def _print_latencies(plan: Plan, summary: SimulationSummary, drawn: Uncertainty | None) -> None:
    from simtune.specs.plan_words import of_plan

    rows = []
    for metric, latencies in summary.metrics.items():
        if drawn is None:
            spread = [_noise(latencies, s) for s in STATISTICS]
        else:
            spread = [_between(drawn.of("metrics", metric, s), 1e3) for s in STATISTICS]
        cells = (milliseconds(getattr(latencies, s)) + more for s, more in zip(STATISTICS, spread, strict=True))
        rows.append((metric.upper().replace("_", " "), *cells))
    meaning = "± 95 %: noise of this run" if drawn is None else "in brackets: 90 % of redrawn worlds"
    print_table(f"{plan.name}: {of_plan(plan).words()}; latencies in ms ({meaning})", ("metric", *STATISTICS), rows)


def _noise(latencies: Distribution, statistic: str) -> str:
    """Return ` ± x` by batch means, or nothing if the run is too short."""
    interval = (latencies.ci95 or {}).get(statistic)
    return "" if interval is None else f" ± {number((interval[1] - interval[0]) / 2 * 1e3)}"


def _between(bounds: tuple[float | None, float | None] | None, scale: float = 1.0) -> str:
    """Return ` (low-high)`, or nothing if no worlds were drawn."""
    if bounds is None:
        return ""
    low, high = ("unbounded" if x is None else number(x * scale) for x in bounds)
    return f" ({low}-{high})"
