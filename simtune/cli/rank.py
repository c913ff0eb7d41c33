"""simtune rank: published techniques on a load of the user's own, sorted by the gain of each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from simtune.cli.numbers import LIMIT
from simtune.cli.options import (
    force_option,
    hardware_option,
    html_option,
    jobs_option,
    json_option,
    model_option,
    quiet_option,
    requests_option,
    workload_option,
)
from simtune.cli.output import number, print_json, print_table
from simtune.cli.reproduce import claim_page, journal_option, own_gains_of, own_load

if TYPE_CHECKING:
    from simtune.validation.published import OwnGain

MOST_REQUESTS = 400
"""Most requests of a run, unless --requests is given."""


@click.command()
@model_option.but(required=True)
@hardware_option.but(required=True)
@workload_option.but(required=True)
@click.option("--ttft", type=LIMIT, default=None, help="Limit of 99 % of the TTFTs, in seconds: rank by highest rate.")
@click.option("--tpot", type=LIMIT, default=None, help="Limit of 99 % of the TPOTs, in seconds: rank by highest rate.")
@requests_option.but(default=MOST_REQUESTS, show_default=True, help="Most requests of a run.")
@html_option
@jobs_option.but(help="Processes, one family in each; one per core by default.")
@journal_option
@json_option
@force_option
@quiet_option
def rank(  # noqa: PLR0913 - one for each option
    model: str,
    hardware: str,
    workload: str,
    ttft: float | None,
    tpot: float | None,
    requests: int,
    html: Path | None,
    jobs: int | None,
    journal: Path | None,
    as_json: bool,
    force: bool,
    quiet: bool,
) -> int:
    """Rank published techniques by the gain of each on your model, hardware and load.

    Base and variant of every entry that can be run there, as in `simtune reproduce NAME --model --hardware --workload`:
    gain with its interval, parts that the technique needs, and the engines that can be given it.
    """
    from dataclasses import replace

    from simtune.runs.files import write_file
    from simtune.validation.published import OwnGains, ranked, select

    claim_page(html, force)
    load = own_load(model, hardware, workload, ttft, tpot)
    assert load is not None, "all three options are required"
    load, entries = replace(load, most_requests=requests), select(())
    document = OwnGains.of(ranked(own_gains_of(entries, load, jobs, journal, quiet)), load)
    if html is not None:
        from simtune.report.own_gains_page import render_ranking

        write_file(html, render_ranking(document, load))
        click.echo(f"wrote {html}", err=True)
    if as_json:
        print_json(document.to_data())
    else:
        _print(document.gains, f"Published techniques on {model}, {hardware}, {load.workload.name}: {load.metric()}")
    return 0


def _print(gains: tuple[OwnGain, ...], title: str) -> None:
    """Print the ranking, then the systems that are left out, counted by their reasons."""
    from simtune.validation.published import interval_in_words, left_out_in_words

    columns = ("technique", "gain", "from, to", "GPUs", "engines", "needs", "pays")
    rows = [
        (
            gain.title,
            number(gain.gain),
            interval_in_words(gain),
            f"{gain.base_gpus} → {gain.gpus}" if gain.gpus != gain.base_gpus else str(gain.gpus),
            ", ".join(gain.engines) or "none yet",
            "; ".join(gain.needs) or "-",
            "; ".join(gain.pays[: -1 if gain.by_prompt_tokens else None]),
        )
        for gain in gains
        if gain.gain is not None
    ]
    print_table(title, columns, rows)
    notes: dict[str, list[str]] = {}
    for gain in gains:
        if gain.gain is not None and gain.reason is not None:
            notes.setdefault(gain.reason, []).append(gain.title)
    for reason, titles in notes.items():
        click.echo(f"{reason}: {', '.join(titles)}")
    click.echo(left_out_in_words(gains))
