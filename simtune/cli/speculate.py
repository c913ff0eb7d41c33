"""simtune speculate: how to draft at every batch size and context, without a study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simtune.cli.names import ACCEPTANCE
from simtune.cli.numbers import GPUS
from simtune.cli.options import as_option, force_option, hardware_option, html_option, json_option, model_option
from simtune.cli.output import number, print_json, print_table
from simtune.errors import UsageError
from simtune.runs.files import write_file

if TYPE_CHECKING:
    from simtune.runs.schema import DraftSchedule
    from simtune.specs.drafters import Drafter

CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)


@click.command()
@model_option.but(required=True, help="Target: a built-in name, a spec, or a Hugging Face config.json.")
@hardware_option.but(required=True, help="A hardware profile, by name or file.")
@click.option(
    "--drafter",
    "drafter_text",
    required=True,
    help="A kind or method (eagle3, mtp, suffix), or a block as in a study: '{kind: medusa, heads: 4}'.",
)
@click.option("--acceptance", type=ACCEPTANCE, required=True, help="Acceptance of the drafts: a spec, by name or file.")
@click.option("--tp", type=GPUS, default=1, show_default=True, help="GPUs of one instance.")
@html_option.but(help="Write one page with maps and the tree.")
@json_option
@force_option.but(help="Replace FILE.")
@as_option()
def speculate(
    model: str,
    hardware: str,
    drafter_text: str,
    acceptance: str,
    tp: int,
    html: Path | None,
    as_json: bool,
    force: bool,
) -> None:
    """Choose how to draft for every batch size and context, and print the settings of engines for it.

    All chains and trees are tried in every cell by the cost model; nothing is simulated. Cells count alike in the gain
    over all of them.
    """
    from simtune.api import load_draft
    from simtune.runs.engine_files import MAX_NODES, speculation_facts
    from simtune.runs.schema import DraftSchedule
    from simtune.sim.deployment import vllm_batching
    from simtune.specs.catalog import load_hardware, load_model
    from simtune.specs.pool import Parallelism, Pool
    from simtune.specs.speculation import DrafterChoice
    from simtune.tuner.drafting import DraftContexts, schedule

    if html is not None and html.exists() and not force:
        raise UsageError(f"{html}: exists already; give --force to replace it")
    target, profile = load_model(model), load_hardware(hardware)
    draft = load_draft(DrafterChoice(drafter=_drafter(drafter_text), acceptance=acceptance), target)
    pool = Pool(hardware=profile.name, instances=1, parallelism=Parallelism(tp=tp), batching=vllm_batching(profile))
    contexts = DraftContexts.even([c for c in CONTEXTS if c <= target.max_position] or [target.max_position])
    best = schedule(draft, target, profile, pool, contexts, MAX_NODES)
    for notice in draft.drafting.acceptance.notices():
        click.echo(f"note: {notice}", err=True)
    draft_schedule = DraftSchedule.model_validate(speculation_facts(draft, best))
    if html is not None:
        from simtune.report.speculation_page import render

        write_file(html, render(draft_schedule, target.name, profile.device.name))
        click.echo(f"wrote {html}", err=True)
    if as_json:
        print_json(draft_schedule.to_data())
    else:
        _print(draft_schedule, f"{target.name} on {profile.device.name}, tp {tp}")


def _drafter(text: str) -> Drafter:
    """Parse a drafter as in a study, or by its kind or method only. Raises SpecError."""
    from typing import ClassVar

    from simtune.specs import yamlfile
    from simtune.specs.base import Spec
    from simtune.specs.drafters import AnyDrafter

    class Asked(Spec):
        KIND: ClassVar[str] = "drafter"
        drafter: AnyDrafter

    data = yamlfile.parse(text, "--drafter").data
    if isinstance(data, str):
        data = {"kind": "eagle", "method": data} if data in ("eagle", "eagle3", "mtp") else {"kind": data}
    fields = {"schema": Asked.schema_id(), "name": "asked", "drafter": data}
    return Asked.from_document(yamlfile.Document("--drafter", fields, None)).drafter


def _print(shown: DraftSchedule, title: str) -> None:
    rows = [
        (f"{batch:,}", *(f"{cell.short} ×{cell.gain:.2f}" if cell.occurs else "-" for cell in cells))
        for batch, cells in zip(shown.batches, shown.cells, strict=True)
    ]
    columns = ("batch", *(f"{context:,} tokens" for context in shown.contexts))
    print_table(f"{shown.drafter} for {title}: best draft and gain, by batch and context", columns, rows)
    click.echo("a number: chain of this many draft tokens; T: tree of this many; ≤: stops itself before; off: no "
               "drafts; -: more tokens than the KV cache holds")  # fmt: skip
    fixed = shown.fixed
    click.echo(f"gain, all cells alike: {number(shown.gain)}; best single setting, {fixed.scheme}: "
               f"{number(fixed.gain)}")  # fmt: skip
    for engine in shown.engines:
        click.echo(f"{engine.engine}: {engine.scheme}, gain {number(engine.gain)}, {engine.loss:.1%} of it lost")
        click.echo("  " + (json.dumps(engine.settings) if engine.settings is not None else engine.why))
