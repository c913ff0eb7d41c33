"""Random worlds against vLLM's own scheduler, step by step: prefix caching, priorities, asynchronous scheduling, a
threshold for long prompts, fixed or adaptive, an interval of steps with prompts, fewer active sequences than seats, a
watermark, admission by the first chunk; no drafts (those have logs of their own).

    VLLM_PYTHON=.venv-vllm/bin/python python -m pytest -m slow tests/engine/test_vllm_worlds.py

Release 0.32 is the one installed for VLLM_PYTHON; 0.33 is the wheel for GPUs that `make releases` unpacks (RELEASES may
name another folder). Its scheduler is plain Python and runs as it is, with torch and the other packages of 0.32's
environment; nothing of it is replaced. VLLM_WORLDS says how many, 2,000 unless given: six minutes a release.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from simtune.validation.replay import step_log
from simtune.validation.replay.scheduler_replay import replay

PYTHON = os.environ.get("VLLM_PYTHON", "")
RELEASES = Path(os.environ.get("RELEASES", Path(PYTHON).parents[1] / "releases" if PYTHON else ""))
WORLDS = int(os.environ.get("VLLM_WORLDS", "2000"))
DRIVER = Path(__file__).with_name("vllm_worlds.py")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no interpreter with vLLM")]


def logs_of(driver: Path, release: str, folder: Path) -> list[step_log.StepLog]:
    """Let vLLM's scheduler of a release run a driver's random worlds; return their logs."""
    environment = dict(os.environ)
    if release != "0.32":
        unpacked = RELEASES / f"vllm-{release}"
        if not unpacked.is_dir():
            pytest.skip(f"{unpacked} is not there; make releases unpacks it")
        environment["PYTHONPATH"] = str(unpacked)
    subprocess.run([PYTHON, driver, folder, "0", str(WORLDS)], check=True, cwd=folder, env=environment)
    logs = [step_log.read(folder / f"{number}.jsonl") for number in range(WORLDS)]
    assert {log.header.package.rpartition(".")[0] for log in logs} == {f"vllm {release}"}
    return logs


@pytest.mark.parametrize("release", ["0.32", "0.33"])
def test_every_step_of_random_worlds_is_the_one_that_vllm_takes(release: str, tmp_path: Path) -> None:
    logs = logs_of(DRIVER, release, tmp_path)
    parted = {log.header.log: found.parting for log in logs if (found := replay(log)).parting is not None}
    assert parted == {}
    assert sum(bool(step.preempt) for log in logs for step in log.steps) > WORLDS, "most worlds run short of blocks"
