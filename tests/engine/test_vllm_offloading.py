"""Host memory below the prefix cache against vLLM's own scheduler, offloading connector and manager of host blocks.

Each step must be the same, and the tokens that requests begin to load from host memory. Some logs of random worlds are
in `offloading`; more are made here where VLLM_PYTHON names an interpreter with vLLM (see test_vllm_worlds.py, also for
release 0.33). The worker, which needs a GPU, is not vLLM's: it moves nothing, and reports transfers in its own time.

    VLLM_PYTHON=.venv-vllm/bin/python python -m pytest -m slow tests/engine/test_vllm_offloading.py
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.engine.host_blocks import HostBlocks
from simtune.validation.replay import step_log
from simtune.validation.replay.scheduler_replay import replay
from tests.engine.test_vllm_worlds import PYTHON, WORLDS, logs_of

DRIVER = Path(__file__).with_name("vllm_offloading_worlds.py")
LOGS = sorted(Path(__file__).with_name("offloading").glob("*.gz"))


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name.split(".")[0])
def test_every_step_and_load_is_the_one_that_vllm_took(path: Path) -> None:
    log = step_log.read(path)
    assert replay(log).parting is None
    assert sum(bool(step.load) for step in log.steps) >= 5


@pytest.mark.parametrize("path", LOGS[:3], ids=lambda path: path.name.split(".")[0])
def test_other_host_memory_takes_other_steps(path: Path) -> None:
    """A log is followed only by memory of its size: the comparison sees loads."""
    log = step_log.read(path)
    header = log.header.model_copy(update={"options": log.header.options | {"host_blocks": 1}})
    parting = replay(step_log.StepLog(log.file, header, log.requests, log.steps)).parting
    assert parting is not None
    assert "loading" in parting.different


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.parametrize("release", ["0.32", "0.33"])
def test_every_step_of_random_worlds_is_the_one_that_vllm_takes(release: str, tmp_path: Path) -> None:
    logs = logs_of(DRIVER, release, tmp_path)
    assert {log.header.log: parting for log in logs if (parting := replay(log).parting) is not None} == {}
    assert sum(len(step.load) for log in logs for step in log.steps) > WORLDS


class PlainBlocks:
    """Host memory as a list of blocks in order of eviction, each with its rank and its transfers."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: dict[Hashable, list[Any]] = {}

    def write(self, ranks: dict[Hashable, Any]) -> list[Hashable] | None:
        new = [name for name in ranks if name not in self.blocks]
        idle = sorted((rank, name) for name, (rank, loads) in self.blocks.items() if not loads and name not in ranks)
        excess = max(0, len(self.blocks) + len(new) - self.capacity)
        if excess > len(idle):
            return None
        for _, name in idle[:excess]:
            del self.blocks[name]
        self.blocks |= {name: [ranks[name], -1] for name in new}
        return new


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), unique=True, max_size=4))))
def test_the_block_with_the_lowest_rank_that_no_transfer_uses_is_evicted(
    capacity: int, calls: list[tuple[int, list[int]]]
) -> None:
    host, plain, number = HostBlocks(capacity), PlainBlocks(capacity), 0
    for call, names in calls:
        present = [name for name in names if host.readable(name)]
        if call == 0:
            number += 1
            ranks: dict[Hashable, Any] = {name: (host.next_rank(), -place) for place, name in enumerate(names)}
            new = host.write(ranks)
            assert new == plain.write(ranks)
            if new and number % 3:
                host.written(new)
                plain.blocks |= {name: [ranks[name], 0] for name in new}
        elif call == 1:
            host.pin(present)
            for name in present:
                plain.blocks[name][1] += 1
        elif call == 2:
            loading = [name for name in present if plain.blocks[name][1]]
            host.unpin(loading)
            for name in loading:
                plain.blocks[name][1] -= 1
        else:
            rank = host.next_rank()
            host.use(names)
            for place, name in enumerate(reversed(names), 1):
                if name in plain.blocks:
                    plain.blocks[name][0] = (rank + place, 0)
        states = {name: None if name not in plain.blocks else plain.blocks[name][1] >= 0 for name in range(10)}
        assert states == {name: host.readable(name) for name in range(10)}
