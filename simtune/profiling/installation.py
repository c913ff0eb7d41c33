"""Diagnosis of the installation on this machine, and of the uses that it allows."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Literal, NamedTuple

from simtune import __version__
from simtune.errors import SimtuneError
from simtune.specs.catalog import load_engine, load_hardware, names

DiagnosisState = Literal["ok", "absent", "problem"]
GIB = 2**30
LITTLE_DISK_BYTES = 2 * GIB
OPTIONAL = {
    "torch": "simtune profile",
    "pyarrow": "tables in Parquet",
    "pandas": "to_pandas() of results",
    "transformers": "replaying its schedules",
    "vllm": "running a plan here",
}


class Diagnosis(NamedTuple):
    """Result of one check. `problem` needs attention; `absent` only limits the available functions."""

    state: DiagnosisState
    what: str
    says: str


def diagnoses() -> list[Diagnosis]:
    """Return all results, the most basic first."""
    return [
        Diagnosis("ok", "simtune", f"{__version__} on Python {platform.python_version()}, {platform.platform()}"),
        _platform(sys.platform),
        Diagnosis("ok", "processors", f"{os.cpu_count()} cores for searches and --uncertainty"),
        *(_package(name, use) for name, use in OPTIONAL.items()),
        *_cards(),
        _presets(),
        _profiles(),
        *_folders(),
        _disk(Path.cwd()),
    ]


WITHOUT = {
    "darwin": "but that orphans of a killed search end by themselves",
    "win32": "but starting engines (validate takes the URL of one in its place) and --clock cpu",
}
"""Parts that are absent on a system, by `sys.platform`; Linux has all."""


def _platform(system: str) -> Diagnosis:
    names = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}
    if system not in names:
        return Diagnosis("problem", "platform", f"{system} is not tested; Linux, macOS and Windows are")
    return Diagnosis("ok", "platform", f"{names[system]}: everything works{', ' if system in WITHOUT else ''}"
                     f"{WITHOUT.get(system, '')}")  # fmt: skip


def _package(name: str, use: str) -> Diagnosis:
    if util.find_spec(name) is None:
        return Diagnosis("absent", name, f"not installed; needed for {use}")
    try:
        return Diagnosis("ok", name, f"{metadata.version(name)}, for {use}")
    except metadata.PackageNotFoundError:
        return Diagnosis("problem", name, "can be imported but is not an installed package; reinstall it")


def devices() -> list[str]:
    """Return the names of the NVIDIA cards that the driver lists; none without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return [line.strip() for line in completed.stdout.splitlines() if line.strip()] if completed.returncode == 0 else []


def _cards() -> list[Diagnosis]:
    cards = devices()
    if not cards:
        return [Diagnosis("absent", "GPU", "no NVIDIA driver answers; simulating and searching need none")]
    counts = [f"{cards.count(card)} x {card}" for card in dict.fromkeys(cards)]
    return [Diagnosis("ok", "GPU", ", ".join(counts))]


def _presets() -> Diagnosis:
    presets = names("engine")
    if util.find_spec("vllm") is None:
        return Diagnosis("ok", "engine presets", ", ".join(presets))
    installed = ".".join(metadata.version("vllm").split(".")[:2])
    matching = [name for name in presets if load_engine(name).release.endswith(installed)]
    if matching:
        return Diagnosis("ok", "engine presets", f"{matching[0]} is that of the vLLM installed here")
    return Diagnosis(
        "problem", "engine presets", f"none is of vLLM {installed}, which is installed; nearest settings hold"
    )


def _profiles() -> Diagnosis:
    """Read every profile. If none is found, the package's data were not installed."""
    profiles = names("hardware")
    try:
        for name in profiles:
            # Arrays are read when they are first needed.
            len(load_hardware(name).arrays)
    except SimtuneError as error:
        return Diagnosis("problem", "hardware profiles", str(error))
    if not profiles:
        return Diagnosis("problem", "hardware profiles", "none can be read; install simtune again")
    return Diagnosis("ok", "hardware profiles", f"{len(profiles)} can be read")


def _folders() -> list[Diagnosis]:
    folders = [Path(p) for p in os.environ.get("SIMTUNE_PATH", "").split(os.pathsep) if p]
    return [
        Diagnosis("ok", "SIMTUNE_PATH", str(folder))
        if folder.is_dir()
        else Diagnosis("problem", "SIMTUNE_PATH", f"{folder} is not a folder; create it or remove it from SIMTUNE_PATH")
        for folder in folders
    ]


def _disk(folder: Path) -> Diagnosis:
    free = shutil.disk_usage(folder).free
    state: DiagnosisState = "ok" if free >= LITTLE_DISK_BYTES else "problem"
    return Diagnosis(state, "disk", f"{free / GIB:.1f} GiB free in {folder}")
