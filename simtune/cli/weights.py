"""simtune weights: random weights that engines load, and pairs whose acceptance is chosen."""

from __future__ import annotations

from pathlib import Path

import click

from simtune.cli.numbers import RealRange
from simtune.cli.options import as_option, force_option, out_option, seed_option, set_option
from simtune.cli.output import split_settings
from simtune.errors import UsageError


@click.command()
@click.argument("model", metavar="MODEL")
@out_option.but(required=True, help="Folder to write.")
@click.option(
    "--rigged", "draft", default=None, metavar="DRAFT", help="Also write a draft model; the outputs of both are known."
)
@click.option("--acceptance", type=RealRange(most=1), default=None, help="Share of the drafts that is accepted.")
@seed_option
@set_option
@force_option.but(help="Replace weights that the folder contains.")
@as_option()
def weights(
    model: str,
    out: Path,
    draft: str | None,
    acceptance: float | None,
    seed: int | None,
    settings: tuple[str, ...],
    force: bool,
) -> None:
    """Write random weights of MODEL's shape to --out, as vLLM and transformers load them.

    Shapes are changed by --set, e.g. --set model.layers.0.count=2 or --set draft.vocab_size=1024. With --rigged a
    target and a draft model are written whose greedy answers are known: the target accepts --acceptance of the drafts.
    """
    from simtune.specs import catalog
    from simtune.validation.servers.random_weights import rigged_pair, write_weights

    by_spec = split_settings(settings, ("model", "draft"))
    target = catalog.load_model(model, by_spec["model"])
    if (draft is None) != (acceptance is None):
        raise UsageError("--rigged DRAFT and --acceptance SHARE belong together")
    if draft is None or acceptance is None:
        write_weights(target, out, seed=seed or 0, force=force)
        click.echo(f"wrote {out}: {target.parameters:,} random parameters of {target.name}")
        return
    share = rigged_pair(
        target, catalog.load_model(draft, by_spec["draft"]), out, acceptance, seed=seed or 0, force=force
    )
    click.echo(f"wrote {out / 'target'} and {out / 'draft'}: {share:.4f} of the drafts are accepted")
