"""Files of step times: a table (`StepTable`), or a log (`EngineSteps`)."""

from __future__ import annotations

from pathlib import Path

from simtune.costs.engine_steps import EngineSteps, read_engine_costs
from simtune.costs.step_table import StepTable


def read_costs(path: Path) -> StepTable | EngineSteps:
    """Read a log if the file ends in .jsonl or .jsonl.gz, else a table.

    Raises SpecError for a bad file, UsageError if there is none.
    """
    if path.exists() and path.name.removesuffix(".gz").endswith(".jsonl"):
        return read_engine_costs(path)
    return StepTable.read(path)
