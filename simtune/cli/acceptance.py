"""simtune acceptance: how often drafts are kept, from what engines log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from simtune.cli.numbers import WholeRange
from simtune.cli.options import force_option, json_option, out_option
from simtune.cli.output import print_json, print_table
from simtune.cli.paths import PATH
from simtune.errors import UsageError
from simtune.runs.files import write_file

if TYPE_CHECKING:
    from simtune.specs.acceptance import Rates


@click.command()
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="FILE...")
@out_option.but(required=True, help="Acceptance spec to write.")
@click.option(
    "--draft-tokens", type=WholeRange(1, 1024), help="Draft tokens of each round, if the file does not contain them."
)
@click.option("--model", help="The model to use of a table with several.")
@json_option
@force_option.but(help="Replace a file that exists.")
def acceptance(
    files: tuple[Path, ...], out: Path, draft_tokens: int | None, model: str | None, as_json: bool, force: bool
) -> None:
    """Estimate how often drafts are kept, with standard errors, and write it as an acceptance spec.

    FILE is what an engine or its benchmark wrote; what it is, is found in it: Prometheus text or log lines of vLLM (two
    Prometheus FILEs are before and after a run), results of `vllm bench serve`, responses of vLLM with per-request
    metrics as JSON lines, SGLang's accept_length, AIPerf's histogram; or CSV with head_index,top_k,accuracy or
    depth,rank,taken,reached or accepted,drafted.
    """
    from simtune.specs.acceptance import Acceptance
    from simtune.specs.base import spec_name
    from simtune.workload.acceptance_logs import read_acceptance

    if out.exists() and not force:
        raise UsageError(f"{out}: exists already; give --force to replace it")
    reading = read_acceptance(files, draft_tokens, model)
    name = spec_name(out.name.split(".")[0], "acceptance")
    spec = Acceptance(name=name, origin="measured", source=reading.source, target=model, rates=reading.rates)
    write_file(out, spec.to_yaml())
    for notice in spec.notices():
        click.echo(f"note: {notice}", err=True)
    if as_json:
        print_json({"written": str(out), "acceptance": spec.to_data()})
    else:
        print_table(reading.source, *_rows(reading.rates))
        click.echo(f"wrote {out}", err=True)


def _rows(rates: Rates) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    if rates.kind == "per_position":
        errors = rates.standard_error or (None,) * len(rates.conditional)
        columns = ("position", "kept if all before were", "standard error")
        return columns, [
            (str(j), f"{a:.4f}", "-" if e is None else f"{e:.4f}")
            for j, (a, e) in enumerate(zip(rates.conditional, errors, strict=True), start=1)
        ]
    if rates.kind == "per_rank":
        widest = max(len(row) for row in rates.probability)
        return ("depth", *(f"rank {r}" for r in range(1, widest + 1))), [
            (str(d), *(f"{p:.4f}" for p in row), *("-",) * (widest - len(row)))
            for d, row in enumerate(rates.probability, start=1)
        ]
    if rates.kind == "beta":
        errors = rates.standard_error or (None, None)
        return ("Beta over requests", "value", "standard error"), [
            (name, f"{value:.4f}", "-" if error is None else f"{error:.4f}")
            for name, value, error in zip(("a", "b"), (rates.a, rates.b), errors, strict=True)
        ]
    return ("acceptance", "share"), [(f"{a:.4f}", f"{s:.4f}") for a, s in zip(rates.rate, rates.share, strict=True)]
