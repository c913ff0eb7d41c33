"""simtune simulate: one plan, one load."""

from __future__ import annotations

from pathlib import Path

import click

from simtune.cli.output import (
    force_option,
    json_option,
    milliseconds,
    number,
    out_option,
    print_json,
    print_table,
    seed_option,
    set_option,
    split_settings,
)


@click.command()
@click.option("--model", required=True, help="Name, spec, or Hugging Face config.json.")
@click.option("--hardware", required=True, help="Name of a profile, or its folder.")
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
    help="Requests per second, instead of the workload's own.",
)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=None,
    help="Requests to simulate, instead of the workload's own number.",
)
@seed_option
@set_option
@out_option
@force_option
@json_option
def simulate(
    model: str,
    hardware: str,
    workload: str,
    plan_file: str | None,
    rate: float | None,
    requests: int | None,
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
    from simtune.api import run

    by_spec = split_settings(settings, ("model", "hardware", "workload", "plan"))
    if out is not None:
        rundir.claim(out, force)
    ran = run(
        model,
        hardware,
        workload,
        plan_file,
        rate_rps=rate,
        requests=requests,
        seed=seed or 0,
        settings=by_spec,
        record=out is not None,
    )
    deployment, result = ran.deployment, ran.result
    if out is not None:
        files = rundir.of_simulation(deployment, result, deployment.plan.name, seed or 0)
        inputs = (ran.deployment.model, ran.deployment.hardware, ran.workload, deployment.plan)
        rundir.write(out, rundir.complete(files, rundir.manifest(rundir.command_line(), inputs, ran.trace, seed or 0)))
    summary = result.summary()
    if as_json:
        del summary["quantiles"]
        print_json({"schema": rundir.SUMMARY_SCHEMA, "plan": deployment.plan.to_data(), **summary})
    else:
        _print(deployment.plan.name, summary, out)
    return 3 if result.saturated else 0


def _print(name: str, summary: dict[str, object], out: Path | None) -> None:
    metrics = summary["metrics"]
    assert isinstance(metrics, dict)
    statistics = ("mean", "p50", "p90", "p99", "max")
    rows = [(metric.upper(), *(milliseconds(block.get(s)) for s in statistics)) for metric, block in metrics.items()]
    print_table(f"{name}: latencies in ms", ("metric", *statistics), rows)
    for key in (
        "requests",
        "refused",
        "preemptions",
        "offered_rate_rps",
        "request_throughput_rps",
        "output_tokens_per_s_per_gpu",
        "num_gpus",
    ):
        value = summary[key]
        click.echo(f"{key.replace('_', ' '):30} {number(value) if isinstance(value, float) else value}")
    if summary["saturated"]:
        click.echo("SATURATED: requests pile up faster than they are served; latencies grow without bound")
    if out is not None:
        click.echo(f"report: {out / 'report.html'}")
