"""simtune optimize: search, choose, emit, report."""

from __future__ import annotations

from pathlib import Path

import click

from simtune.cli.output import (
    command_line,
    force_option,
    json_option,
    milliseconds,
    note_estimates,
    number,
    print_json,
    print_table,
    progress,
    quiet_option,
    seed_option,
    set_option,
)


@click.command()
@click.argument("study_file", metavar="STUDY")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Run directory to write.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=None,
    help="Processes; one per core by default. The answer does not depend on it.",
)
@click.option("--dry-run", is_flag=True, help="Only say how many candidates there are.")
@seed_option
@set_option
@force_option
@quiet_option
@json_option
def optimize(
    study_file: str,
    out: Path | None,
    jobs: int | None,
    dry_run: bool,
    seed: int | None,
    settings: tuple[str, ...],
    force: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Find the best schedule for a STUDY, and write the plan, engine configs and a report to --out."""
    from simtune import rundir
    from simtune.api import load_question
    from simtune.emit import speculation
    from simtune.specs.speculation import Chain
    from simtune.tuner.search import optimize as search
    from simtune.tuner.space import members, shapes

    if seed is not None:
        settings = (*settings, f"seed={seed}")
    question = load_question(study_file, settings)
    study = question.study
    for draft in question.drafts:
        # What vLLM cannot be told is refused before the search, not after it.
        speculation.vllm(draft.speculation(draft.choice.scheme or Chain(tokens=1)), draft.drafting.model)
    space = shapes(study)
    if dry_run:
        count = sum(len(members(study, shape)) for shape in space)
        if as_json:
            print_json({"study": study.name, "candidates": count, "shapes": len(space)})
        else:
            click.echo(f"{study.name}: {count} candidates in {len(space)} shapes (tp x pp x instances)")
        return 0
    if out is None:
        raise click.UsageError("name the run directory to write: --out runs/NAME")
    rundir.claim(out, force)
    with progress("shapes", quiet) as update:
        tuned = search(
            question,
            jobs=jobs,
            progress=lambda done, total, best: update(done, total, best.candidate.name if best else ""),
        )
    note_estimates(tuned.deployment)
    inputs = (study, question.model, question.hardware, question.workload)
    files = rundir.of_study(tuned, jobs=jobs)
    rundir.write(
        out,
        rundir.complete(files, rundir.manifest(command_line(), inputs, question.trace, study.seed)),
    )
    summary = tuned.result.summary()
    if as_json:
        del summary["quantiles"]
        print_json(
            {
                "schema": rundir.SUMMARY_SCHEMA,
                "plan": tuned.deployment.plan.to_data(),
                "objective": {"name": study.objective, "value": tuned.value},
                "interrupted": tuned.interrupted,
                "out": str(out),
                **summary,
            }
        )
    else:
        rows = [
            (
                row.candidate.name,
                str(row.candidate.shape.num_gpus),
                number(row.rate_rps),
                number(row.rate_rps / row.candidate.shape.num_gpus if row.rate_rps else None),
                milliseconds(row.statistic("ttft", "p99")),
                milliseconds(row.statistic("tpot", "p99")),
                number(row.number("output_tokens_per_s_per_gpu")),
                row.reason,
            )
            for row in [tuned.chosen, *tuned.runners_up(4)]
        ]
        columns = (
            "plan",
            "GPUs",
            "requests/s",
            "per GPU",
            "TTFT p99 ms",
            "TPOT p99 ms",
            "tokens/s/GPU",
            "why",
        )
        print_table(f"{study.name}: chosen plan first ({study.objective})", columns, rows)
        counts = {
            s: sum(r.status == s for r in tuned.rows) for s in ("feasible", "infeasible", "pruned", "does_not_fit")
        }
        click.echo(
            f"{len(tuned.rows)} candidates: 1 chosen, {counts['feasible']} met the SLO at a lower value, "
            f"{counts['infeasible']} missed it, {counts['pruned']} could not win, {counts['does_not_fit']} do not fit; "
            f"{sum(r.simulations for r in tuned.rows)} simulations"
        )
        click.echo(
            f"plan:   {out / 'plan.yaml'}\nengine: {out / 'engine' / 'launch.sh'}\nreport: {out / 'report.html'}"
        )
    if tuned.interrupted:
        click.echo("interrupted: this is the best of what was searched", err=True)
        return 130
    return 0
