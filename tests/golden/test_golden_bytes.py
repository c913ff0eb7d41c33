"""Twelve fixed runs whose files must come out as they always did, to the byte.

They go over all policies, prefill and decode apart, failures and switches, pipelines, data-parallel attention,
asynchronous and synchronous scheduling, swapping, prefix caching, and every scheme and drafter. A change that means to
change no number must leave `hashes.json` alone; one that does change numbers writes it anew with

    python -m tests.golden.test_golden_bytes

and says in its message why. Sums of matrix products differ in the last bit between processors, which `_arithmetic`
tells without simtune. Times are whole ticks, so most often the bytes are the same all the same; where they are not on a
processor of other arithmetic, the test is skipped.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.linalg import cho_factor, cho_solve

HERE = Path(__file__).resolve().parent
HASHES = HERE / "hashes.json"
FILES = ("plan.yaml", "summary.json", "requests.csv", "trace.json.gz")
PLANS = sorted((HERE / "plans").glob("*.yaml"))
QUICK = ("vllm-fcfs", "prefill-decode", "data-parallel")
"""Runs of the quick tier."""


def _arithmetic() -> str:
    """A hash of what this processor makes of matrix products, exponentials and a Cholesky solution."""
    x = np.sin(np.arange(1.0, 401.0)).reshape(40, 10)
    kernel = np.exp(-0.5 * ((x[:, None] - x[None]) ** 2).sum(axis=-1))
    solution = cho_solve(cho_factor(kernel + np.eye(40) * 1e-3), x[:, 0])
    return _hash((x @ x.T).tobytes() + kernel.tobytes() + solution.tobytes() + np.log(kernel).tobytes())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _hashes_of(plan: Path, out: Path) -> dict[str, str]:
    """Run a plan as a user would; the hash of every file, of the timeline as it is unpacked."""
    from simtune.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--plan", str(plan), "--workload", str(HERE / "workload.yaml"), "--out", str(out)])
    assert ended.value.code in (0, 3), f"{plan.stem}: exit code {ended.value.code}"
    found = {}
    for name in FILES:
        content = (out / name).read_bytes()
        found[name] = _hash(gzip.decompress(content) if name.endswith(".gz") else content)
    return found


def test_there_are_twelve_runs_and_every_one_has_its_hashes() -> None:
    stored = json.loads(HASHES.read_text())
    assert len(PLANS) == 12
    assert sorted(stored["runs"]) == sorted(plan.stem for plan in PLANS)


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, id=plan.stem, marks=[pytest.mark.quick] * (plan.stem in QUICK)) for plan in PLANS]
)
def test_a_fixed_run_leaves_the_same_bytes(plan: Path, tmp_path: Path) -> None:
    stored = json.loads(HASHES.read_text())
    found = _hashes_of(plan, tmp_path / "run")
    if found != stored["runs"][plan.stem] and _arithmetic() != stored["arithmetic"]:
        pytest.skip("this processor's matrix products differ in the last bit from those the hashes were made with")
    assert found == stored["runs"][plan.stem]


@pytest.mark.slow
def test_a_processor_without_its_widest_registers_leaves_the_same_bytes() -> None:
    flags = {
        "OPENBLAS_CORETYPE": "Haswell",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F",
    }
    command = [sys.executable, "-m", "tests.golden.test_golden_bytes", "--print"]
    runs = []
    for more in ({}, flags):
        told = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, check=True)
        runs.append(json.loads(told.stdout.splitlines()[-1]))
    assert runs[0]["runs"] == runs[1]["runs"]
    if runs[0]["arithmetic"] == runs[1]["arithmetic"]:
        pytest.skip("this processor reckons the same with and without them")


def _anew() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        runs = {plan.stem: _hashes_of(plan, Path(folder) / plan.stem) for plan in PLANS}
    return {"arithmetic": _arithmetic(), "runs": runs}


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(json.dumps(_anew()) + "\n")
    else:
        HASHES.write_text(json.dumps(_anew(), indent=1) + "\n")
