"""Random worlds against vLLM's own scheduler, step by step: prefix caching, priorities, asynchronous scheduling, a
threshold for long prompts, a watermark, admission by the first chunk; no drafts (those have logs of their own).

    VLLM_PYTHON=.venv-vllm/bin/python python -m pytest -m slow tests/engine/test_vllm_worlds.py

VLLM_WORLDS says how many, 2,000 unless given: six minutes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from simtune.validation.replay import step_log
from simtune.validation.replay.scheduler_replay import replay

PYTHON = os.environ.get("VLLM_PYTHON", "")
WORLDS = int(os.environ.get("VLLM_WORLDS", "2000"))
DRIVER = Path(__file__).with_name("vllm_worlds.py")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no interpreter with vLLM")]


def test_every_step_of_random_worlds_is_the_one_that_vllm_takes(tmp_path: Path) -> None:
    subprocess.run([PYTHON, DRIVER, tmp_path, "0", str(WORLDS)], check=True, cwd=tmp_path)
    logs = [step_log.read(tmp_path / f"{number}.jsonl") for number in range(WORLDS)]
    parted = {log.header.log: found.parting for log in logs if (found := replay(log)).parting is not None}
    assert parted == {}
    assert sum(bool(step.preempt) for log in logs for step in log.steps) > WORLDS, "most worlds run short of blocks"
