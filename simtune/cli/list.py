"""simtune list: what is built in."""

from __future__ import annotations

import click

from simtune.cli.output import json_option, print_json


@click.command("list")
@click.argument("kind", required=False, type=click.Choice(["model", "hardware", "workload", "acceptance"]))
@json_option
def list_(kind: str | None, as_json: bool) -> None:
    """List models, hardware profiles, workloads and acceptance that can be used by name; all, or of one KIND."""
    from simtune.specs import catalog

    listed = {k: catalog.names(k) for k in ([kind] if kind else catalog.FOLDERS)}
    if as_json:
        print_json(listed)
        return
    for k, names in listed.items():
        click.echo(f"{k}:")
        for name in names:
            click.echo(f"  {name}")


list = list_
