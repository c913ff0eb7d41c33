"""simtune list: what can be used by name."""

from __future__ import annotations

from collections.abc import Sequence

import click

from simtune.cli.options import json_option
from simtune.cli.output import print_json, print_table

SPECS = ("model", "hardware", "workload", "acceptance", "engine", "launch")
PARTS = ("policy", "router", "emitter")


class KindOf(click.Choice[str]):
    """A kind, in the singular or the plural."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The singular."""
        plurals = {_plural(kind): kind for kind in self.choices}
        return super().convert(plurals.get(value, value), param, ctx)


def _plural(kind: str) -> str:
    if kind.endswith("y"):
        return kind.removesuffix("y") + "ies"
    return kind + ("es" if kind.endswith("ch") else "s")


@click.command("list")
@click.argument("kind", required=False, type=KindOf([*SPECS, *PARTS]))
@json_option
def list_(kind: str | None, as_json: bool) -> None:
    """List models, hardware profiles, workloads, acceptance, engine presets, launch facts, policies, routers and the
    engines that can be written for (emitters), by name; all, or of one KIND (models or model). `list models` says how
    large each is."""
    from simtune.emit import ENGINE
    from simtune.sim.plan_parts import POLICY, ROUTER
    from simtune.specs import catalog

    parts = {"policy": POLICY.names, "router": ROUTER.names, "emitter": ENGINE.names}
    kinds = [kind] if kind else [*SPECS, *PARTS]
    listed = {k: parts[k]() if k in parts else catalog.names(k) for k in kinds}
    if as_json:
        print_json(listed)
        return
    if kind == "model":
        _list_models(listed[kind])
        return
    for k, names in listed.items():
        click.echo(f"{k}:")
        for name in names:
            click.echo(f"  {name}")


def _list_models(names: Sequence[str]) -> None:
    from simtune.report.models import facts
    from simtune.specs.catalog import load_model

    rows = [(name, *(how_much for _, how_much in facts(load_model(name)))) for name in names]
    print_table("models", ("name", "parameters", "layers", "KV cache", "formats"), rows)


list = list_
