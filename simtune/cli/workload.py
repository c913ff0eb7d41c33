"""simtune workload: what a trace is, parts of it, and a spec in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simtune.cli.numbers import RATE, RealRange, WholeRange
from simtune.cli.options import force_option, html_option, json_option, out_option
from simtune.cli.output import milliseconds, print_json, print_table
from simtune.cli.paths import PATH
from simtune.errors import UsageError

if TYPE_CHECKING:
    from simtune.specs.scrapes import Scrape
    from simtune.specs.traces import Trace
    from simtune.workload.load import LoadFacts
    from simtune.workload.load_fit import FittedLoad


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=PATH)
@click.option(
    "--from", "begin", metavar="TIME", help="Begin at this time of day (09:00), or this long after the start."
)
@click.option("--to", "end", metavar="TIME", help="End at this time of day (18:00), or this long after the start.")
@click.option(
    "--utc-offset", default="+00:00", show_default=True, help="Offset of the clock in which --from and --to are given."
)
@click.option("--peak", metavar="TIME", help="Take only the busiest window of this length: 30m.")
@click.option("--scale", metavar="FACTOR", help="Multiply the rate by this factor: 2x.")
@click.option(
    "--zero-output",
    type=click.Choice(["refuse", "drop", "one"]),
    default="refuse",
    show_default=True,
    help="Treatment of requests without output tokens.",
)
@click.option(
    "--characters-per-token",
    type=RealRange(above=0, most=1e6),
    default=4.0,
    show_default=True,
    help="Characters of a token, for files that contain texts and no token counts.",
)
@click.option(
    "--columns",
    metavar="FIELD=NAME,...",
    help="Names of the columns in the file: arrival=ts,prompt=tokens_in,output=tokens_out. arrival_s, "
    "arrival_ms and arrival_ns are numbers since some start.",
)
@click.option("--part", type=WholeRange(1, 10**6), help="Number of the run in a file with several.")
@click.option("--rate", type=RATE, help="Requests per second of lengths without times.")
@click.option("--span", metavar="TIME", help="Time from the first to the last scrape, or until the only one: 30m.")
@out_option.but(metavar="FILE", help="File to write: a spec (.yaml), or the trace (.csv, .jsonl).")
@html_option
@force_option.but(help="Replace FILE.")
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
    columns: str | None,
    part: int | None,
    rate: float | None,
    span: str | None,
    out: Path | None,
    html: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Describe the requests in trace FILEs, cut or scale them, and fit a spec to them.

    Files of vllm bench serve, aiperf, guidellm, genai-perf, ShareGPT, gateways, Azure and Mooncake are read unchanged.
    Scrapes of vLLM's /metrics, one or several of a server, become a spec: rates between them, lengths by histograms. So
    do ServeGen's tables of rates and of lengths, named together.
    """
    from simtune.report.load_page import render
    from simtune.specs.base import spec_name
    from simtune.specs.scrapes import is_scrape_file, read_scrape
    from simtune.specs.trace_cut import Cut, merged
    from simtune.specs.trace_formats import LogReading
    from simtune.specs.traces import read_trace
    from simtune.workload.load import load_facts
    from simtune.workload.load_fit import fit_workload
    from simtune.workload.servegen_fit import is_servegen_file

    _check(out, html, force)
    cut_options = {"--from": begin, "--to": end, "--peak": peak, "--scale": scale, "--part": part, "--html": html}
    if any(map(is_scrape_file, files)):
        _need_no_requests(files, cut_options, out)
        _scraped([read_scrape(file) for file in files], span, rate, out, as_json)
        return
    if any(map(is_servegen_file, files)):
        _need_tables(files, {**cut_options, "--rate": rate, "--span": span}, out)
        _servegen(files, out, as_json)
        return
    if span is not None:
        raise UsageError("--span goes with scrapes of a server's metrics, and these files are traces")
    cut = Cut(begin, end, utc_offset, peak, scale)
    column_names = _columns(columns)
    reading = LogReading(zero_output, characters_per_token, part, column_names)  # type: ignore[arg-type]  # click has looked
    trace = cut.of(merged([read_trace(file, reading) for file in files]))
    name = files[0].name.split(".")[0]
    facts = load_facts(trace)
    spec = out is not None and out.suffix == ".yaml"
    fitted = (
        fit_workload(trace, spec_name(name, "trace"), rate)
        if spec or rate is not None or trace.rate_rps is not None
        else None
    )
    _note(trace, fitted)
    if as_json:
        print_json({"files": [str(file) for file in files], "notes": list(trace.notes), **_document(facts, fitted)})
    else:
        _print(name, facts, fitted)
    if html is not None:
        _write(html, render(name, facts, trace.notes, fitted))
    if out is not None:
        _write(out, _text(trace, fitted, out.name))


_FIELDS = ("arrival", "arrival_s", "arrival_ms", "arrival_ns", "prompt", "output")


def _columns(text: str | None) -> tuple[tuple[str, str], ...]:
    """Return `arrival=ts,prompt=tokens_in` as pairs. Raises UsageError for anything else."""
    pairs = [] if text is None else [part.partition("=") for part in text.split(",")]
    for field, equals, name in pairs:
        if field.strip() not in _FIELDS or not equals or not name.strip():
            raise UsageError(
                f"--columns {text}: write FIELD=NAME,... with fields {', '.join(_FIELDS)}, for example "
                "arrival=ts,prompt=tokens_in,output=tokens_out"
            )
    stripped = tuple((field.strip(), name.strip()) for field, _, name in pairs)
    fields = [field.partition("_")[0] for field, _ in stripped]
    if len(set(fields)) < len(fields):
        raise UsageError(f"--columns {text}: names a field twice; keep one")
    return stripped


FITTED = "Fitted by simtune workload."


def _text(trace: Trace, fitted: FittedLoad | None, name: str) -> str:
    """Return the text of a file of this name: the spec, or the trace."""
    from simtune.specs.trace_write import trace_text

    return fitted.workload.to_yaml(FITTED) if fitted is not None and name.endswith(".yaml") else trace_text(trace, name)


def _note(trace: Trace, fitted: FittedLoad | None) -> None:
    """Print what was left out of the trace, and what a spec does not contain."""
    lost = fitted.lost if fitted is not None else ()
    ignored = [f"columns not read: {', '.join(trace.ignored)}"] if trace.ignored and trace.rate_rps is not None else []
    for note in (*trace.notes, *ignored, *(f"not in a spec: {feature}" for feature in lost)):
        click.echo(f"note: {note}", err=True)


def _document(facts: LoadFacts, fitted: FittedLoad | None) -> dict[str, Any]:
    spec = None if fitted is None else fitted.workload.to_data()
    agreement = [] if fitted is None else [a._asdict() for a in fitted.agreements]
    fit = {} if fitted is None else {"arrivals_off": dict(fitted.arrivals), "fit": fitted.fit}
    return {**facts.to_data(), "spec": spec, "agreement": agreement, **fit}


def _print(name: str, facts: LoadFacts, fitted: FittedLoad | None) -> None:
    from simtune.report.load_page import agreement_rows, load_rows

    print_table(name, ("load", ""), load_rows(facts))
    if fitted is not None:
        fit = "" if fitted.fit is None else f", a {fitted.fit} fit"
        title = f"as a spec: {fitted.workload.arrivals.kind} arrivals{fit}"
        print_table(title, ("number", "recorded", "drawn"), agreement_rows(fitted))


def _need_no_requests(files: Sequence[Path], asked: Mapping[str, object], out: Path | None) -> None:
    """Raise UsageError for options that need more than scrapes contain."""
    from simtune.specs.scrapes import is_scrape_file

    if traces := [str(file) for file in files if not is_scrape_file(file)]:
        raise UsageError(f"{traces[0]}: is no scrape, and others of these files are; read them in separate commands")
    if set_options := [name for name, value in asked.items() if value is not None]:
        raise UsageError(f"a scrape counts requests and holds none, which {' and '.join(set_options)} would need")
    if out is not None and out.suffix != ".yaml":
        raise UsageError(f"{out}: a scrape becomes a spec; end the name in .yaml")


def _scraped(scrapes: Sequence[Scrape], span: str | None, rate: float | None, out: Path | None, as_json: bool) -> None:
    """Describe the load behind a server's metrics, and write the spec."""
    from simtune.report.info import number
    from simtune.specs.base import spec_name
    from simtune.specs.trace_cut import duration_s
    from simtune.workload.scrape_fit import STATISTICS, fit_scrapes

    name = Path(scrapes[0].file).name.split(".")[0]
    load = fit_scrapes(
        scrapes, spec_name(name, "scrape"), span_s=None if span is None else duration_s(span, "--span"), rate_rps=rate
    )
    for note in load.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        latencies = {metric: dict(zip((s for s, _ in STATISTICS), of, strict=True)) for metric, of in load.latencies}
        agreement = [a._asdict() for a in load.agreements]
        document = {"files": [s.file for s in scrapes], "notes": list(load.notes), "latencies_s": latencies}
        print_json({**document, "spec": load.workload.to_data(), "agreement": agreement})
    else:
        title = f"{name}: {load.workload.arrivals.kind} arrivals"
        rows = [(a.what, number(a.recorded), number(a.drawn)) for a in load.agreements]
        print_table(title, ("number", "scraped", "drawn"), rows)
        cells = [(metric, *(milliseconds(x) for x in of)) for metric, of in load.latencies]
        print_table("what users saw, in ms", ("metric", *(s for s, _ in STATISTICS)), cells)
    if out is not None:
        _write(out, load.workload.to_yaml(FITTED))


def _need_tables(files: Sequence[Path], asked: Mapping[str, object], out: Path | None) -> None:
    """Raise UsageError for options that need more than tables of rates and lengths contain."""
    from simtune.workload.servegen_fit import is_servegen_file

    if strangers := [str(file) for file in files if not is_servegen_file(file)]:
        raise UsageError(
            f"{strangers[0]}: is no table of ServeGen, and others of these files are; read them in separate commands"
        )
    if set_options := [name for name, value in asked.items() if value is not None]:
        raise UsageError(f"tables of ServeGen hold no requests, which {' and '.join(set_options)} would need")
    if out is not None and out.suffix != ".yaml":
        raise UsageError(f"{out}: tables of ServeGen become a spec; end the name in .yaml")


def _servegen(files: Sequence[Path], out: Path | None, as_json: bool) -> None:
    """Describe the load behind tables of ServeGen, and write the spec."""
    from simtune.report.info import number
    from simtune.specs.base import spec_name
    from simtune.workload.servegen_fit import fit_servegen

    load = fit_servegen(files, spec_name(files[0].name.split(".")[0], "servegen"))
    for note in load.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        agreement = [a._asdict() for a in load.agreements]
        document = {"files": [str(file) for file in files], "notes": list(load.notes)}
        print_json({**document, "spec": load.workload.to_data(), "agreement": agreement})
    else:
        rows = [(a.what, number(a.recorded), number(a.drawn)) for a in load.agreements]
        print_table(f"{load.workload.name}: piecewise arrivals", ("number", "tables", "drawn"), rows)
    if out is not None:
        _write(out, load.workload.to_yaml(FITTED))


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
