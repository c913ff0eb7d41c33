"""A checkout without links (git on Windows, most archives) gives the same results, to the byte."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIMULATE = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", "chat", "--requests", "50")


def simulate(checkout: Path, out: Path) -> dict[str, bytes]:
    """Return the files of a run with the package of a checkout, the manifest with its time of day left out."""
    done = subprocess.run(
        [sys.executable, "-m", "simtune", "simulate", *SIMULATE, "--out", str(out)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    return {name: content for name, content in files.items() if name != "manifest.json"}


def test_a_checkout_without_links_simulates_the_same(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "simtune", checkout / "simtune", ignore=shutil.ignore_patterns("__pycache__"))
    # What git writes in place of a link when core.symlinks is false.
    (checkout / "tuner").write_text("simtune/tuner")
    (checkout / "hwprofiles").write_text("simtune/hwprofiles")
    expected = simulate(ROOT, tmp_path / "expected")
    assert {"plan.yaml", "summary.json", "requests.csv"} <= set(expected)
    assert simulate(checkout, tmp_path / "found") == expected
