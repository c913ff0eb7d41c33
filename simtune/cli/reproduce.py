"""simtune reproduce: published systems, claimed beside simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from simtune.cli.names import PUBLISHED
from simtune.cli.numbers import LIMIT
from simtune.cli.options import (
    force_option,
    hardware_option,
    html_option,
    jobs_option,
    json_option,
    model_option,
    quiet_option,
    workload_option,
)
from simtune.cli.output import number, print_json, print_table, progress
from simtune.cli.paths import FILE
from simtune.errors import UsageError

if TYPE_CHECKING:
    from simtune.specs.base import Record
    from simtune.validation.published import Entry, Finding, OwnGain, OwnLoad

R = TypeVar("R", bound="Record")

journal_option = click.option(
    "--journal",
    type=FILE,
    metavar="FILE",
    help="Write findings to FILE as they are made; the same command continues from there.",
)


@click.command()
@click.argument("systems", nargs=-1, type=PUBLISHED, metavar="[FAMILY|SYSTEM|FILE]...")
@hardware_option.but(help="Run all systems on this profile instead; the results are not judged.")
@html_option
@jobs_option.but(help="Processes, one family in each; one per core by default.")
@journal_option
@model_option.but(help="Run both sides on this model, with --workload.")
@workload_option.but(
    help="Run both sides under this load, with --model and --hardware: gain, its interval, and where it pays."
)
@click.option("--ttft", type=LIMIT, default=None, help="With --workload: limit of 99 % of the TTFTs, in seconds.")
@click.option("--tpot", type=LIMIT, default=None, help="With --workload: limit of 99 % of the TPOTs, in seconds.")
@click.option("--list", "only_list", is_flag=True, help="List the systems and run nothing.")
@json_option
@force_option
@quiet_option
def reproduce(  # noqa: PLR0913 - one for each option
    systems: tuple[str, ...],
    hardware: str | None,
    html: Path | None,
    jobs: int | None,
    journal: Path | None,
    model: str | None,
    workload: str | None,
    ttft: float | None,
    tpot: float | None,
    only_list: bool,
    as_json: bool,
    force: bool,
    quiet: bool,
) -> int:
    """Simulate published systems beside what they were compared with, and compare the gain with the claim.

    Without arguments all of them: minutes. A family, a system or a file of your own runs alone. One that cannot be run
    is reported with the reason, beside the others; exit code 2 if that is so on its own hardware. With --model,
    --hardware and --workload both sides run there, and nothing is judged.
    """
    from dataclasses import replace

    from simtune.runs.files import write_file
    from simtune.specs.catalog import load_hardware
    from simtune.validation.published import Findings, headline, select

    claim_page(html, force)
    entries = select(systems)
    if only_list:
        _list(entries, as_json)
        return 0
    user_load = own_load(model, hardware, workload, ttft, tpot)
    if user_load is not None:
        return _on_own(entries, replace(user_load, detailed=html is not None), jobs, journal, html, quiet, as_json)
    if hardware is not None:
        load_hardware(hardware)  # a wrong name is an error of the command, and no finding of every system
    findings: list[Finding] = []
    with progress("systems", quiet) as update:
        for finding in _run(entries, hardware, jobs, journal):
            findings.append(finding)
            update(len(findings), len(entries), f"{finding.title}: {finding.status}")
    document = Findings.of(findings, hardware)
    if html is not None:
        from simtune.report.published_page import render

        write_file(html, render(document, entries))
        click.echo(f"wrote {html}", err=True)
    failed = [finding for finding in findings if finding.status == "failed"]
    for finding in failed:
        click.echo(f"{finding.family}: {finding.system}: cannot be run: {finding.reason}", err=True)
    if as_json:
        print_json(document.to_data())
    else:
        _print(findings)
        if hardware is None:
            click.echo(headline(findings))
    return 2 if failed and hardware is None else 0


def own_load(
    model: str | None, hardware: str | None, workload: str | None, ttft: float | None, tpot: float | None
) -> OwnLoad | None:
    """Return the load of the user; None if none is named. Raises an error if a part of it is missing or no such part
    exists: it would be the reason of every system otherwise."""
    from simtune.specs.catalog import load_hardware, load_model, load_workload
    from simtune.validation.published import OwnLoad

    if model is None and workload is None and ttft is None and tpot is None:
        return None
    if model is None or hardware is None or workload is None:
        raise UsageError(
            "a load of your own needs --model, --hardware and --workload; name all three, or only --hardware"
        )
    load_model(model)
    load_hardware(hardware)
    requests, trace = load_workload(workload)
    return OwnLoad(model, hardware, requests, trace, ttft, tpot)


def _on_own(
    entries: list[Entry],
    own: OwnLoad,
    jobs: int | None,
    journal: Path | None,
    html: Path | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Run systems on a load of the user's own, and print the gain of each."""
    from simtune.runs.files import write_file
    from simtune.validation.published import OwnGains

    gains = own_gains_of(entries, own, jobs, journal, quiet)
    document = OwnGains.of(gains, own)
    if html is not None:
        from simtune.report.own_gains_page import render_systems

        write_file(html, render_systems(document, own))
        click.echo(f"wrote {html}", err=True)
    if as_json:
        print_json(document.to_data())
    else:
        _print_gains(gains, own)
    return 0


def _print_gains(gains: Sequence[OwnGain], own: OwnLoad) -> None:
    from simtune.validation.published import interval_in_words

    rows = [
        (
            g.title,
            number(g.base),
            number(g.variant),
            number(g.gain),
            interval_in_words(g),
        )
        for g in gains
    ]
    columns = ("system", f"base, {own.metric()}", "variant", "gain", "over assumed inputs")
    print_table(f"On {own.model}, {own.hardware}, {own.workload.name}", columns, rows)
    for gain in gains:
        for line in (*(f"pays {where}" for where in gain.pays), *([gain.reason] if gain.reason else [])):
            click.echo(f"{gain.title}: {line}")


def claim_page(html: Path | None, force: bool) -> None:
    """Keep others from writing the page, if there is to be one. Raises UsageError if it exists."""
    from simtune.runs.files import alone

    if html is None:
        return
    if html.exists() and not force:
        raise UsageError(f"{html}: exists already; give --force to replace it")
    alone(html)


def _run(entries: list[Entry], hardware: str | None, jobs: int | None, journal: Path | None) -> Iterator[Finding]:
    """Yield findings as they are made; those of a family are read from the journal if it has them."""
    from simtune.specs.catalog import load_hardware
    from simtune.validation.published import Finding
    from simtune.validation.published import reproduce as run

    question = None if hardware is None or journal is None else load_hardware(hardware).to_data()
    work = partial(run, hardware=hardware, jobs=jobs)
    return _journaled(entries, work, Finding, question, journal)


def own_gains_of(
    entries: list[Entry], own: OwnLoad, jobs: int | None, journal: Path | None, quiet: bool
) -> list[OwnGain]:
    """Return gains on the user's load, with progress; those of a family are read from the journal if it has them."""
    from simtune.specs.catalog import load_hardware, load_model
    from simtune.validation.published import OwnGain, own_gains

    question = None
    if journal is not None:
        trace = None if own.trace is None else own.trace.sha256
        specs = [load_model(own.model), load_hardware(own.hardware), own.workload]
        limits = [own.ttft_s, own.tpot_s, own.requests, own.detailed, trace]
        question = [*(spec.to_data() for spec in specs), *limits]
    gains: list[OwnGain] = []
    with progress("systems", quiet) as update:
        for gain in _journaled(entries, partial(own_gains, own=own, jobs=jobs), OwnGain, question, journal):
            gains.append(gain)
            update(len(gains), len(entries), gain.title)
    return gains


def _journaled(
    entries: list[Entry],
    work: Callable[[list[Entry]], Iterator[R]],
    row: type[R],
    question: object,
    journal: Path | None,
) -> Iterator[R]:
    """Yield the results of entries as they are made; families whose key, a hash of all inputs, is in the journal are
    read from it.
    """
    from itertools import groupby, islice

    from simtune.specs.folder_lock import lock
    from simtune.specs.row_journal import RowJournal

    if journal is None:
        yield from work(entries)
        return
    lock(journal)
    store = RowJournal(journal)
    stored = store.read()
    families = [list(group) for _, group in groupby(entries, key=lambda entry: entry.family.name)]
    keys = [_key(family, question) for family in families]
    remaining = [entry for key, family in zip(keys, families, strict=True) if key not in stored for entry in family]
    fresh = work(remaining)
    for key, family in zip(keys, families, strict=True):
        if key in stored:
            yield from (row.model_validate(stored_row) for stored_row in stored[key])
            continue
        results = list(islice(fresh, len(family)))
        store.add(key, [result.model_dump(mode="json") for result in results])
        yield from results


def _key(family: list[Entry], question: object) -> str:
    """Return a hash of all that the results of some systems of a family depend on."""
    import hashlib
    import json

    from simtune import __version__

    systems = [entry.system.name for entry in family]
    inputs = json.dumps([__version__, family[0].family.to_data(), systems, question], sort_keys=True, default=str)
    return hashlib.sha256(inputs.encode()).hexdigest()[:32]


def _list(entries: list[Entry], as_json: bool) -> None:
    columns = ("family", "system", "title", "claim")
    rows = [
        (e.family.name, e.system.name, e.system.title, e.system.claim.says if e.system.claim else "-") for e in entries
    ]
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table("Published systems", columns, rows)


def _print(findings: list[Finding]) -> None:
    rows = [
        (
            finding.title,
            finding.status,
            number(finding.claimed),
            "-" if finding.band is None else f"{number(finding.band[0])} to {number(finding.band[1])}",
            number(finding.simulated),
            finding.metric or "-",
        )
        for finding in findings
    ]
    print_table("Published systems: gains over what they were compared with", COLUMNS, rows)
    for finding in findings:
        if finding.reason and len(findings) <= MOST_REASONS:
            click.echo(f"{finding.title}: {finding.reason}")
        if len(findings) <= MOST_REASONS:
            _print_inputs(finding)
        if len(findings) <= MOST_REASONS:
            _print_evidence(finding)
        if len(findings) <= MOST_REASONS and finding.chosen:
            click.echo(f"  chosen knowing the claim: {finding.chosen}")


def _print_evidence(finding: Finding) -> None:
    """Print settings without a source, gains on other cards and with more requests at a time, and the setting that the
    gain restates.
    """
    if finding.uncovered:
        click.echo(f"  settings without a source: {', '.join(finding.uncovered)}")
    if finding.cards:
        click.echo(f"  cards: {', '.join(f'{card.hardware} {number(card.gain)}' for card in finding.cards)}")
    if finding.batches:
        gains = [f"{batch.requests} at a time {number(batch.gain)}" for batch in finding.batches]
        click.echo(f"  one request at a time {number(finding.simulated)}, {', '.join(gains)}")
    if finding.restates:
        click.echo(f"  the gain is a setting of the variant: {finding.restates}")


def _print_inputs(finding: Finding) -> None:
    """Print the inputs of a finding, with the sources, and what is not modelled."""
    for item in finding.inputs:
        where = f" ({item.where})" if item.where else ""
        ends = f"; otherwise {', '.join(number(gain) for gain in item.gains)}" if item.gains else ""
        click.echo(f"  {item.source}: {item.what}{where}{ends}")
    if finding.not_modelled:
        click.echo(f"  not modelled: {', '.join(finding.not_modelled)}")


COLUMNS = ("system", "status", "claimed", "band", "simulated", "of")
MOST_REASONS = 30
"""Number of systems above which the reasons are given in --json and --html only."""
