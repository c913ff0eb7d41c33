"""Facts needed to repeat a run: versions, command, hashes of all inputs as they were understood."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from simtune import __version__
from simtune.runs.schema import MANIFEST_SCHEMA, Manifest, TraceFile
from simtune.specs.base import Spec
from simtune.specs.input_hashes import numbered, spec_sha256
from simtune.specs.traces import Trace

PACKAGES = ("click", "jinja2", "numpy", "plotly", "pydantic", "pyyaml", "rich", "scipy")


def manifest(command: Sequence[str], inputs: Sequence[Spec], trace: Trace | None, seed: int) -> Manifest:
    """Return the manifest of a run that has just been made: the time of day is now."""
    return Manifest(
        schema_id=MANIFEST_SCHEMA,
        simtune=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: metadata.version(name) for name in PACKAGES},
        command=tuple(command),
        seed=seed,
        inputs=numbered((f"{spec.KIND}:{spec.name}", spec_sha256(spec)) for spec in inputs),
        trace=TraceFile(file=Path(trace.file).name, sha256=trace.sha256) if trace else None,
        written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
