"""simtune schema: JSON schemas for editors."""

from __future__ import annotations

import click

from simtune.cli.output import print_json


@click.command()
@click.argument("kind", type=click.Choice(["model", "hardware", "workload", "acceptance", "plan", "study"]))
def schema(kind: str) -> None:
    """Print the JSON schema of a KIND of spec, for editors and other programs."""
    from simtune.specs.catalog import KINDS

    found = KINDS[kind]
    document = found.model_json_schema()
    document["properties"] = {"schema": {"const": found.schema_id()}, **document["properties"]}
    document["required"] = ["schema", *document["required"]]
    print_json(document)
