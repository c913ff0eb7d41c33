"""simtune optimize: search, choose, emit, report."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simtune.cli.numbers import WORLDS, Duration, RealRange, WholeRange
from simtune.cli.options import (
    force_option,
    jobs_option,
    json_option,
    like_option,
    out_option,
    quiet_option,
    seed_option,
    set_option,
)
from simtune.cli.output import (
    milliseconds,
    note_basis,
    note_cut,
    note_estimates,
    note_launch,
    number,
    plan_cells,
    print_basis,
    print_json,
    print_table,
    progress,
    write_run,
)
from simtune.cli.pace import Deadline, seconds_of
from simtune.cli.paths import TEXT
from simtune.errors import UsageError, plural

if TYPE_CHECKING:
    from simtune.errors import Infeasible
    from simtune.runs.schema import Summary
    from simtune.sim.parallel import Jobs
    from simtune.tuner.doubt.confidence import Confidence
    from simtune.tuner.plan_cache import PlanCache
    from simtune.tuner.question import Question
    from simtune.tuner.search.climb import SimulationFinding
    from simtune.tuner.search.course import SearchCourse
    from simtune.tuner.search.front_points import Ladder
    from simtune.tuner.search.search_journal import SearchJournal
    from simtune.tuner.space.candidates import Candidate
    from simtune.tuner.trial import Trial, Tuned


def _refusal_as_json(verb: Callable[..., int]) -> Callable[..., int]:
    """Print a study that no plan meets as a JSON document if --json is set; the error, and the exit code, stay."""

    @wraps(verb)
    def wrapped(study_file: str, as_json: bool, **options: Any) -> int:
        from simtune.errors import Infeasible

        try:
            return verb(study_file=study_file, as_json=as_json, **options)
        except Infeasible as error:
            if as_json:
                print_json({"study_file": study_file, "plan": None, "reason": str(error), "nearest": _nearest(error)})
            raise

    return wrapped


def _nearest(error: Infeasible) -> dict[str, Any] | None:
    """Return the plan that came nearest to the SLO; None if the space has no plan."""
    from simtune.specs.plan_words import in_words
    from simtune.tuner.search.reasons import NoPlan

    if not isinstance(error, NoPlan):
        return None
    row = error.nearest
    return {
        "plan": row.candidate.name,
        "words": in_words(row.candidate.name),
        "status": row.status,
        "reason": row.reason,
        "num_gpus": row.candidate.num_gpus,
        "rate_rps": row.rate_rps,
        "rate_bound_rps": row.rate_bound_rps,
        "summary": None if row.summary is None else row.summary.to_data(),
    }


@click.command()
@click.argument("study_file", metavar="STUDY", type=TEXT)
@out_option
@jobs_option.but(help="Processes; one per core by default. The result does not depend on it.")
@click.option(
    "--cluster",
    metavar="ADDRESS|local:N",
    default=None,
    help="Work on a Dask cluster, or on N Dask workers here, in place of --jobs processes. The result is the same.",
)
@click.option("--cluster-fallback", is_flag=True, help="Continue without the cluster if it does not answer.")
@click.option(
    "--worlds",
    type=WholeRange(2, WORLDS),
    default=None,
    help="Simulate this many worlds in which operators are off; report how often the plan beats its rivals, and what "
    "to measure.",
)
@click.option(
    "--robust",
    type=RealRange(above=0, most=1, below=True),
    default=None,
    metavar="Q",
    help="Choose the plan that is best at this quantile of the worlds, e.g. 0.1; as predicted by default.",
)
@click.option("--resume", is_flag=True, help="Continue a search that was killed or interrupted.")
@click.option(
    "--budget",
    type=Duration(1),
    default=None,
    metavar="TIME",
    help="Time of the search, e.g. 60s or 10m; the best plan by then is confirmed and certified, its gap stated.",
)
@like_option
@click.option("--dry-run", is_flag=True, help="Only print the number of candidates.")
@seed_option
@set_option
@force_option
@quiet_option
@json_option
@_refusal_as_json
def optimize(  # noqa: PLR0913 - one for each option
    study_file: str,
    out: Path | None,
    jobs: int | None,
    cluster: str | None,
    cluster_fallback: bool,
    worlds: int | None,
    robust: float | None,
    resume: bool,
    budget: float | None,
    like: str | None,
    dry_run: bool,
    seed: int | None,
    settings: tuple[str, ...],
    force: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Find the best schedule for a STUDY, and write the plan, engine configs and a report to --out."""
    from simtune.api import load_question
    from simtune.runs.contents import of_study
    from simtune.runs.files import JOURNAL, claim
    from simtune.specs.references import moved
    from simtune.tuner.doubt.robust import of_chosen
    from simtune.tuner.search.front import answer as search

    if seed is not None:
        settings = (*settings, f"seed={seed}")
    question = load_question(study_file, settings, like=like)
    note_launch(like, question.workload, question.trace)
    # Drafts that no engine setting can express are refused now: writing the plan would refuse them after the search.
    _check_drafts(question)
    _check_worlds(question, worlds, robust)
    if dry_run:
        _print_size(question, as_json)
        return 0
    if out is None:
        raise click.UsageError("name the run directory to write: --out runs/NAME")
    with _workers(cluster, cluster_fallback, jobs) as workers:
        # Before the search, so that its result is not lost to a folder that cannot be written.
        claim(out, force, resume)
        note_cut(question.workload, question.trace, question.requests)
        journal = _journal(question, out / JOURNAL, resume, quiet)
        deadline = None if budget is None else Deadline(budget)
        try:
            with progress("plans", quiet) as update:
                tuned = search(
                    question,
                    jobs=workers,
                    progress=lambda now: update(now.done, now.total, _course(now)),
                    ledger=journal,
                    time_is_up=deadline,
                    begins=None if quiet else partial(_print_outlook, question, workers, budget is not None),
                )
            tuned, sure = _sure(tuned, worlds, robust, workers, quiet)
            chosen_uncertainty = None if sure is None else of_chosen(tuned, worlds=sure.worlds, jobs=workers)
            with progress("windows of the day", quiet, PATIENCE_S) as update:
                contents = of_study(
                    tuned,
                    jobs=workers,
                    confidence=sure,
                    uncertainty=chosen_uncertainty,
                    progress=update,
                    places=moved(Path(study_file).parent, out),
                )
            if tuned.interrupted and journal.path.exists():
                contents.files[JOURNAL] = journal.path.read_bytes()
            note_estimates(tuned.deployment)
            note_basis(contents.run.summary.cost_basis)
            inputs = (question.study, *question.models, *question.hardware, question.workload)
            write_run(out, contents, inputs, question.trace, question.study.seed)
        # Ctrl-C included: the journal keeps the finished simulations for --resume.
        except BaseException as error:
            _leave(journal, error, out, resume)
            raise
    if as_json:
        _print_json(tuned, contents.run.summary, out)
    else:
        _print(tuned, contents.run.summary, out)
        for line in () if contents.run.summary.day is None else contents.run.summary.day.lines():
            click.echo(line)
        print_basis(contents.run.summary.cost_basis)
    return _ended(tuned, deadline)


def _ended(tuned: Tuned, deadline: Deadline | None) -> int:
    """Return the exit code of a search, and print why it ended early, if it did."""
    if not tuned.interrupted:
        return 0
    if deadline is not None and deadline.passed:
        budget = f"the budget of {deadline.seconds:g} s was up"
        click.echo(f"{budget}: this is the best plan by then; --resume goes on", err=True)
        return 0
    click.echo("interrupted: this is the best of what was searched", err=True)
    return 130


def _print_outlook(
    question: Question, workers: Jobs, timed: bool, candidates: Sequence[Candidate], plan_cache: PlanCache
) -> None:
    """Print on stderr how many plans there are, roughly how long they take, and what would shorten it.

    On a terminal, of a search that is `timed`, and of any long one.
    """
    from simtune.tuner.search.outlook import Outlook

    processes = workers if isinstance(workers, int) else os.cpu_count() or 1
    outlook = Outlook.of(question, candidates, plan_cache, seconds_of)
    if timed or sys.stderr.isatty() or outlook.seconds(processes)[0] > LONG_S:
        for line in outlook.lines(question, processes):
            click.echo(f"plans: {line}", err=True)


@contextmanager
def _workers(where: str | None, fallback: bool, jobs: int | None) -> Iterator[Jobs]:
    """Yield the cluster at `where` if it is set, else the number of processes. Raises UsageError if the cluster does
    not answer, unless `fallback`.
    """
    from simtune.sim.parallel import connected

    with ExitStack() as ends:
        workers: Jobs = jobs
        if where is not None:
            try:
                workers = ends.enter_context(connected(where))
            except UsageError as error:
                if not fallback:
                    raise
                click.echo(f"note: {str(error).partition(';')[0]}; going on without it", err=True)
        yield workers


LONG_S = 10.0
"""Seconds; a search that takes longer says so beforehand, wherever its messages go."""
PATIENCE_S = 3.0
"""Seconds; work that ends sooner shows no bar."""


def _sure(
    tuned: Tuned, worlds: int | None, level: float | None, jobs: Jobs, quiet: bool
) -> tuple[Tuned, Confidence | None]:
    """Return the search with its choice judged in redrawn worlds, and chosen again if the best at a quantile is wanted.

    The cost of that is printed before it starts.
    """
    from simtune.tuner.doubt.robust import WORLDS as USUAL
    from simtune.tuner.doubt.robust import of_search, robust

    if tuned.interrupted or (worlds is None and level is None):
        return tuned, None
    count = worlds or USUAL
    if not quiet:
        _say_price(tuned, count)
    with progress("plans in worlds", quiet, PATIENCE_S) as update:
        sure = of_search(tuned, worlds=count, jobs=jobs, progress=update)
    if level is not None and (chosen := robust(tuned, sure, level)) is not tuned:
        with progress("plans in worlds, of the new choice", quiet, PATIENCE_S) as update:
            return chosen, of_search(chosen, worlds=count, jobs=jobs, progress=update)
    return tuned, sure


def _say_price(tuned: Tuned, worlds: int) -> None:
    """Print on stderr how much work the worlds are, by the time that one simulation takes here."""
    from simtune.tuner.doubt.robust import contenders, simulate_chosen

    each_s = seconds_of(lambda: simulate_chosen(tuned))
    plans = len(contenders(tuned))
    work = "a search for its highest rate, of several simulations" if tuned.question.searches_rate else "a simulation"
    click.echo(
        f"worlds: {plural(plans, 'plan')} in {plural(worlds, 'world')} are {plans * worlds:,} times {work}; one "
        f"takes {each_s:.2g} s here: at least {plans * worlds * each_s:,.0f} s of processor time",
        err=True,
    )


def _journal(question: Question, path: Path, resume: bool, quiet: bool) -> SearchJournal[SimulationFinding]:
    """Return the journal of simulations; if an earlier search is resumed, its journal, whose length is printed."""
    from simtune.tuner.certificate.search_certificate import inputs_hash
    from simtune.tuner.search.climb import SimulationFinding
    from simtune.tuner.search.search_journal import SearchJournal

    journal = (SearchJournal if resume and path.exists() else SearchJournal.begin)(
        path, inputs_hash(question), SimulationFinding
    )
    if resume and not quiet:
        click.echo(f"resumes with {plural(len(journal), 'simulation')} of {path}", err=True)
    return journal


def _leave(journal: SearchJournal[SimulationFinding], error: BaseException, out: Path, resume: bool) -> None:
    """Keep the journal of a search that ended early and print so, unless it is empty or the error is the result of the
    search.
    """
    from simtune.errors import Infeasible, SpecError

    if not resume and (not len(journal) or isinstance(error, (Infeasible, SpecError))):
        journal.discard()
    elif len(journal):
        count = plural(len(journal), "simulation")
        click.echo(f"{count} are kept: --resume goes on with them, in {out}", err=True)


def _check_worlds(question: Question, worlds: int | None, robust: float | None) -> None:
    if question.study.objective == "pareto" and (worlds is not None or robust is not None):
        raise UsageError(
            f"{question.study.name}: --worlds and --robust judge one plan against others, and objective pareto asks "
            "for many; name another objective, or leave them out"
        )


def _check_drafts(question: Question) -> None:
    """Raise UsageError before the search, not after it, for drafts that the engine cannot be given."""
    from simtune.emit import engine_for
    from simtune.specs.preset import NO_ENGINE
    from simtune.specs.schemes import Chain
    from simtune.specs.study import StudyBatching

    study = question.study
    emitter = engine_for((study.batching or StudyBatching()).policy)
    if emitter is None or study.engine == NO_ENGINE or study.single_engine != study.engine:
        return
    emitter = emitter.of(study.single_engine)
    # Drafts of variants may be for no engine: the run then states so in place of settings.
    for draft in question.drafts[: len(study.speculation)]:
        emitter.speculation(draft.speculation(draft.choice.scheme or Chain(tokens=1)), draft.drafting.model)


def _course(now: SearchCourse) -> str:
    """Return the state of a search in a line: the best plan, and how much better another could be."""
    from simtune.specs.plan_words import in_words

    if now.best is None or now.value is None:
        return f"no plan yet, {now.simulations} simulations"
    plan = in_words(now.best.candidate.name)
    if now.bound is None:
        return f"{plan}: {now.value:.4g}, {now.simulations} simulations"
    gap = abs(now.bound - now.value) / now.value
    return f"{plan}: {now.value:.4g}, bound {now.bound:.4g} (gap {gap:.1%}), {now.simulations} simulations"


def _print_size(question: Question, as_json: bool) -> None:
    from simtune.tuner.space.census import census

    counted = census(question)
    if as_json:
        print_json({"study": question.study.name, **counted.to_data()})
        return
    plans = f"{counted.plans:,} candidates in {counted.shapes:,} shapes"
    click.echo(f"{question.study.name}: {plans} (how GPUs are cut into pools of instances)")
    for reason, count in counted.left_out.items():
        click.echo(f"  {count:,} left out: {reason}")


def _print_json(tuned: Tuned, summary: Summary, out: Path) -> None:
    """The summary as far as it is the simulation's, the plan, and what it was chosen for."""
    from simtune.runs.engine_files import searched_data
    from simtune.runs.files import SUMMARY_SCHEMA

    basis, sure, uncertainty = summary.cost_basis, summary.confidence, summary.uncertainty
    stated = summary.slo_probability
    print_json(
        {
            "schema": SUMMARY_SCHEMA,
            "plan": searched_data(tuned.deployment.plan)[0],
            "objective": {
                "name": tuned.question.study.objective,
                "value": tuned.value,
                "bound": tuned.bound,
                "gap": tuned.gap,
                **({} if tuned.gap_on_draw is None else {"gap_on_draw": tuned.gap_on_draw}),
                **({} if tuned.confirmed is None else {"draws": list(tuned.confirmed.values)}),
            },
            **({} if tuned.ladder is None else {"front": [point.to_data() for point in tuned.ladder.points]}),
            "interrupted": tuned.interrupted,
            "out": str(out),
            "cost_basis": None if basis is None else basis.to_data(),
            **({} if sure is None else {"confidence": sure.to_data()}),
            **({} if uncertainty is None else {"uncertainty": uncertainty.to_data()}),
            **({} if stated is None else {"slo_probability": stated.to_data()}),
            **({} if summary.price is None else {"price": summary.price.to_data()}),
            **({} if not summary.families else {"families": [family.to_data() for family in summary.families]}),
            **tuned.result.summary().to_data(),
        }
    )


COLUMNS = ("plan", "GPUs", "requests/s", "per GPU", "TTFT p99 ms", "TPOT p99 ms", "tokens/s/GPU", "why")


def _print(tuned: Tuned, summary: Summary, out: Path) -> None:
    from simtune.report.certainty import certainty
    from simtune.report.verdict import families_in_words, price_in_words
    from simtune.tuner.doubt.same_draw import gap_in_words

    study, sure, statement = tuned.question.study, summary.confidence, certainty(summary)
    best = [tuned.chosen, *tuned.runners_up(4)]
    plans, alike = plan_cells([row.candidate.name for row in best])
    rows = [_cells(row, plans, tuned.chosen.candidate.name) for row in best]
    print_table(f"{study.name}: chosen plan first ({study.objective})", COLUMNS, rows)
    for line in (*alike, *filter(None, (families_in_words(summary), price_in_words(summary)))):
        click.echo(line)
    counts = Counter(row.status for row in tuned.rows)
    click.echo(
        f"{len(tuned.rows)} candidates: 1 chosen, {counts['feasible']} met the SLO at a lower value, "
        f"{counts['infeasible']} missed it, {counts['pruned']} could not win, {counts['does_not_fit']} do not fit; "
        f"{sum(row.simulations for row in tuned.rows)} simulations"
    )
    _print_left_out(tuned)
    _print_variants(summary)
    _print_confirmed(tuned)
    if tuned.ladder is None:
        click.echo(gap_in_words(tuned.gap, tuned.gap_on_draw))
        if unseen := Counter(row.allocation for row in tuned.rows if row.allocation):
            click.echo(
                f"{unseen.total():,} of the plans were ruled out unseen, in {len(unseen)} classes of which no "
                "allocation of GPUs to instances is better"
            )
    else:
        _print_front(tuned.ladder)
    for line in (*(() if statement is None else (statement,)), *(() if sure is None else sure.lines())):
        click.echo(line)
    launch = out / "engine" / "launch.sh"
    engine = f"engine: {launch}\n" if launch.exists() else ""
    click.echo(f"plan:   {out / 'plan.yaml'}\n{engine}report: {out / 'report.html'}")


def _print_confirmed(tuned: Tuned) -> None:
    """Print the fresh draws on which the chosen plan was confirmed, if there were any."""
    if tuned.confirmed is None:
        return
    draws, requests, lifetimes, values = tuned.confirmed
    lasting = "" if lifetimes is None else f", {number(lifetimes)} lifetimes or more"
    trace = tuned.question.trace
    repeated = (
        "" if trace is None or requests <= trace.num_arrivals else f" (a trace of {trace.num_arrivals:,}, repeated)"
    )
    between = ""
    if values and min(values) < max(values):
        name, unit = tuned.question.objective.name, tuned.question.objective.unit
        between = f": {name} {number(min(values))} to {number(max(values))} {unit}"
    click.echo(
        f"confirmed on {draws} fresh draw{'s' * (draws > 1)} of {requests:,} requests{repeated}{lasting}{between}"
    )


def _print_variants(summary: Summary) -> None:
    """Print what each variant reached, and what none of its plans exceeds."""
    if not summary.variants or summary.objective is None:
        return
    first = summary.variants[0].reached
    rows = []
    for variant in summary.variants:
        gain = None if not first or variant.reached is None else variant.reached / first
        ratio = "" if gain is None else f"{gain:.2f} x"
        name = variant.variant.replace("-and-", " and ") or "as it is"
        scores = () if all(v.score is None for v in summary.variants) else (number(variant.score),)
        rows.append((name, number(variant.reached), ratio, number(variant.at_most), *scores))
    columns = ("variant", f"reached, {summary.objective.unit}", "of the first", "at most", *["score"] * len(scores))
    print_table("best plan of each variant", columns, rows)
    refused: dict[str, list[str]] = {}
    for variant, (name, *_) in zip(summary.variants, rows, strict=True):
        if variant.reason:
            refused.setdefault(variant.reason, []).append(name)
    for reason, names in refused.items():
        click.echo(f"none of {', '.join(names)}: {reason}")
    click.echo("values are those of the search's own draw, but for the chosen plan")


def _print_left_out(tuned: Tuned) -> None:
    for profile, (unused, devices) in tuned.idle().items():
        click.echo(f"{unused} of the {devices} {profile} of the study stay idle under this plan")
    for reason, count in tuned.left_out.items():
        click.echo(f"{count:,} more left out before the search: {reason}")


FRONT_COLUMNS = (
    "point of the front",
    "GPUs",
    "requests/s",
    "tokens/s/user",
    "tokens/s/GPU",
    "delivered",
    "TPOT p99 ms",
)


def _print_front(ladder: Ladder) -> None:
    plans, alike = plan_cells([point.candidate for point in ladder.points])
    rows = [
        (
            plans[point.candidate],
            str(point.num_gpus),
            number(point.rate_rps),
            number(point.output_tokens_per_s_per_user),
            number(point.output_tokens_per_s_per_gpu),
            number(point.delivered_tokens_per_s_per_gpu),
            milliseconds(point.tpot_p99_s),
        )
        for point in ladder.points
    ]
    print_table(f"front, simulated at {ladder.settled} loads", FRONT_COLUMNS, rows)
    for line in alike:
        click.echo(line)


def _cells(row: Trial, plans: Mapping[str, str], chosen: str) -> tuple[str, ...]:
    """Return the cells of a candidate, in the order of COLUMNS; `plans` are the cells of plans by code name."""
    from simtune.specs.plan_words import sentence_in_words

    num_gpus = row.candidate.num_gpus
    return (
        plans[row.candidate.name],
        str(num_gpus),
        number(row.rate_rps),
        number(row.rate_rps / num_gpus if row.rate_rps else None),
        milliseconds(row.statistic("ttft", "p99")),
        milliseconds(row.statistic("tpot", "p99")),
        number(row.summary.output_tokens_per_s_per_gpu if row.summary else None),
        sentence_in_words(row.reason, row.candidate.name, chosen),
    )
