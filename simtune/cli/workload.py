"""simtune workload: what a trace is, parts of it, and a spec in its place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simtune.cli.output import force_option, json_option, print_json, print_table
from simtune.errors import UsageError

if TYPE_CHECKING:
    from simtune.sim.load import LoadFacts
    from simtune.sim.load_fit import FittedLoad


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--from", "begin", metavar="TIME", help="Only from this time of day on (09:00), or so long after the start."
)
@click.option("--to", "end", metavar="TIME", help="Only until this time of day (18:00), or so long after the start.")
@click.option(
    "--utc-offset", default="+00:00", show_default=True, help="Of the clock that --from and --to are told by."
)
@click.option("--peak", metavar="TIME", help="Only the busiest window of this length: 30m.")
@click.option("--scale", metavar="FACTOR", help="As many times the rate: 2x.")
@click.option(
    "--zero-output",
    type=click.Choice(["refuse", "drop", "one"]),
    default="refuse",
    show_default=True,
    help="What becomes of requests of no output token.",
)
@click.option(
    "--characters-per-token",
    type=click.FloatRange(min=0, min_open=True),
    default=4.0,
    show_default=True,
    help="Where a file holds texts and no token counts.",
)
@click.option("--part", type=click.IntRange(min=1), help="Which of several runs in one file.")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), help="Requests per second of lengths without times."
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="A spec (.yaml), or the trace (.csv, .jsonl)."
)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write one page with figures.")
@force_option
@json_option
def workload(  # noqa: PLR0913 - one for each option
    files: tuple[Path, ...],
    begin: str | None,
    end: str | None,
    utc_offset: str,
    peak: str | None,
    scale: str | None,
    zero_output: str,
    characters_per_token: float,
    part: int | None,
    rate: float | None,
    out: Path | None,
    html: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Say what the requests in trace FILEs are, cut or scale them, and fit a spec to them.

    What vllm bench serve, aiperf, guidellm, genai-perf, ShareGPT, gateways, Azure and Mooncake write is read as it is.
    """
    from simtune.report.load import render
    from simtune.sim.load import load_facts
    from simtune.sim.load_fit import fit_workload
    from simtune.specs.trace_cut import Cut, merged
    from simtune.specs.trace_formats import LogReading
    from simtune.specs.trace_write import trace_text
    from simtune.specs.traces import read_trace

    _check(out, html, force)
    cut = Cut(begin, end, utc_offset, peak, scale)
    reading = LogReading(zero_output, characters_per_token, part)  # type: ignore[arg-type]  # click has looked
    trace = cut.of(merged([read_trace(file, reading) for file in files]))
    name = files[0].name.split(".")[0]
    facts = load_facts(trace)
    spec = out is not None and out.suffix == ".yaml"
    fitted = fit_workload(trace, name, rate) if spec or rate is not None or trace.rate_rps is not None else None
    lost = fitted.lost if fitted is not None else ()
    for note in (*trace.notes, *(f"not in a spec: {what}" for what in lost)):
        click.echo(f"note: {note}", err=True)
    if as_json:
        print_json({"files": [str(file) for file in files], "notes": list(trace.notes), **_document(facts, fitted)})
    else:
        _print(name, facts, fitted)
    if html is not None:
        _write(html, render(name, facts, trace.notes, fitted))
    if out is not None:
        text = (
            fitted.workload.to_yaml("Fitted by simtune workload.") if spec and fitted else trace_text(trace, out.name)
        )
        _write(out, text)


def _document(facts: LoadFacts, fitted: FittedLoad | None) -> dict[str, Any]:
    spec = None if fitted is None else fitted.workload.to_data()
    agreement = [] if fitted is None else [a._asdict() for a in fitted.agreements]
    return {**facts.to_data(), "spec": spec, "agreement": agreement}


def _print(name: str, facts: LoadFacts, fitted: FittedLoad | None) -> None:
    from simtune.report.load import agreement_rows, load_rows

    print_table(name, ("load", ""), load_rows(facts))
    if fitted is not None:
        title = f"as a spec: {fitted.workload.arrivals.kind} arrivals"
        print_table(title, ("number", "recorded", "drawn"), agreement_rows(fitted))


def _check(out: Path | None, html: Path | None, force: bool) -> None:
    """Before any work: raises UsageError for what cannot be written."""
    from simtune.specs.trace_write import SUFFIXES

    if out is not None and out.suffix not in (".yaml", *SUFFIXES):
        raise UsageError(f"{out}: end the name in .yaml for a spec, in .csv or .jsonl for the requests")
    for file in (out, html):
        if file is not None and file.exists() and not force:
            raise UsageError(f"{file}: exists; give --force to replace it, or name another file")


def _write(file: Path, text: str) -> None:
    from simtune.runs.files import write_file

    write_file(file, text)
    click.echo(f"wrote {file}", err=True)
