"""Random worlds with drafts against vLLM's own scheduler, step by step: draft models, EAGLE, MTP, DFlash, DSpark and
n-grams; 1 to 5 drafts, or lengths by batch size; up to the longest context; with both model runners, and all that
test_vllm_worlds.py has besides.

    VLLM_PYTHON=.venv-vllm/bin/python python -m pytest -m slow tests/engine/test_vllm_draft_worlds.py

Some logs of these worlds are in `draft_worlds`. For both releases see test_vllm_worlds.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simtune.validation.replay import scheduler_replay, step_log
from simtune.validation.replay.scheduler_replay import replay
from tests.engine.test_vllm_worlds import PYTHON, WORLDS, logs_of

DRIVER = Path(__file__).with_name("vllm_draft_worlds.py")
LOGS = sorted(Path(__file__).with_name("draft_worlds").glob("*.gz"))


def of_release(release: str) -> list[Any]:
    return [pytest.param(path, id=path.name.split(".")[0]) for path in LOGS if path.name.startswith(release)]


@pytest.mark.parametrize("path", of_release("vllm"))
def test_every_step_is_the_one_that_vllm_took(path: Path) -> None:
    log = step_log.read(path)
    assert replay(log).parting is None
    assert sum(sum(step.accept.values()) for step in log.steps) >= 20


SAME_RULES = ("vllm33_308", "vllm33_502")
"""A draft model with asynchronous scheduling; no prefix cache."""


@pytest.mark.parametrize("path", [param for param in of_release("vllm33") if param.id not in SAME_RULES])
def test_the_rules_of_the_release_before_take_other_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees which blocks are found, and how many requests run."""
    rules_of = scheduler_replay._rules_of_release
    monkeypatch.setattr(scheduler_replay, "_rules_of_release", lambda log: {**rules_of(log), "draft_rules": None})
    log = step_log.read(path)
    if log.header.options["spec"]["method"] in ("dflash", "dspark"):
        log.header.options["max_num_active_seqs"] = None
    parting = replay(log).parting
    assert parting is not None
    assert "admitted" in parting.different


@pytest.mark.parametrize("path", of_release("vllm")[:3])
def test_fewer_accepted_drafts_take_other_steps(path: Path) -> None:
    log = step_log.read(path)
    for step in log.steps:
        for name in step.accept:
            step.accept[name] = 0
    assert replay(log).parting is not None


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.parametrize("release", ["0.32", "0.33"])
def test_every_step_of_random_worlds_is_the_one_that_vllm_takes(release: str, tmp_path: Path) -> None:
    logs = logs_of(DRIVER, release, tmp_path)
    assert {log.header.log: parting for log in logs if (parting := replay(log).parting) is not None} == {}
    steps = [step for log in logs for step in log.steps]
    assert sum(len(step.preempt) for step in steps) > WORLDS, "most worlds run short of blocks"
    assert sum(sum(step.accept.values()) for step in steps) > 100 * WORLDS
    # Not every resident of a busy engine has its drafts verified: the budget ends before, or the longest context.
    assert sum(len(step.sched) < step.running for step in steps) > WORLDS
