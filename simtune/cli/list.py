"""simtune list: what can be used by name."""

from __future__ import annotations

import click

from simtune.cli.output import json_option, print_json

SPECS = ("model", "hardware", "workload", "acceptance")
PARTS = ("policy", "router", "engine")


@click.command("list")
@click.argument("kind", required=False, type=click.Choice([*SPECS, *PARTS]))
@json_option
def list_(kind: str | None, as_json: bool) -> None:
    """List models, hardware profiles, workloads, acceptance, policies, routers and engines that can be used or
    written for by name; all, or of one KIND."""
    from simtune.emit import ENGINE
    from simtune.sim.parts import POLICY, ROUTER
    from simtune.specs import catalog

    parts = {"policy": POLICY.names, "router": ROUTER.names, "engine": ENGINE.names}
    kinds = [kind] if kind else [*SPECS, *PARTS]
    listed = {k: parts[k]() if k in parts else catalog.names(k) for k in kinds}
    if as_json:
        print_json(listed)
        return
    for k, names in listed.items():
        click.echo(f"{k}:")
        for name in names:
            click.echo(f"  {name}")


list = list_
