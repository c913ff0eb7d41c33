"""Files that say what steps take: a table of them (`StepTable`), or a log (`EngineSteps`)."""

from __future__ import annotations

from pathlib import Path

from simtune.costs.engine_steps import EngineSteps, read_engine_costs
from simtune.costs.step_table import StepTable


def read_costs(path: Path) -> StepTable | EngineSteps:
    """A log where the file ends in .jsonl or .jsonl.gz, else a table. Raises SpecError, or UsageError where there is
    no such file."""
    if path.exists() and path.name.removesuffix(".gz").endswith(".jsonl"):
        return read_engine_costs(path)
    return StepTable.read(path)
