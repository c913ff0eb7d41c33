"""simtune schema: JSON schemas for editors, and for whoever reads the files of a run."""

from __future__ import annotations

import click

from simtune.cli.output import print_json

SPECS = ("model", "hardware", "device", "workload", "acceptance", "engine", "launch", "plan", "study", "systems")
WRITTEN = ("summary", "candidates", "requests", "manifest", "certificate", "front")


@click.command()
@click.argument("kind", type=click.Choice([*SPECS, *WRITTEN]))
def schema(kind: str) -> None:
    """Print the JSON schema of a KIND of spec, or of a file of a run, for editors and other programs.

    Of candidates.csv and requests.csv it is that of a row: each column with type, unit and meaning, in the order of
    `required`.
    """
    from pydantic import BaseModel

    from simtune.runs.schema import CandidateRow, Manifest, RequestRow, Summary
    from simtune.specs.catalog import KINDS
    from simtune.tuner.certificate.front_certificate import FrontCertificate
    from simtune.tuner.certificate.search_certificate import Certificate

    kinds: dict[str, type[BaseModel]] = {
        **KINDS,
        "summary": Summary,
        "candidates": CandidateRow,
        "requests": RequestRow,
        "manifest": Manifest,
        "certificate": Certificate,
        "front": FrontCertificate,
    }
    print_json(kinds[kind].model_json_schema())
