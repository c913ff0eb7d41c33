"""Whatever moment a verb is killed at, the same command goes on, comes to the same, and leaves nothing else.

SIMTUNE_KILLS=50 python -m pytest -m slow tests/kills
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.kills.verbs import VERBS, prepare

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("SIMTUNE_KILLS", "8"))
SEED = 19

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

Ask = Callable[[str, Path, float | None], dict[str, Any]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    environment = {key: text for key, text in os.environ.items() if not key.startswith("SIMTUNE_")}
    path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kills.forked"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**environment, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip

    def ask(verb: str, folder: Path, kill_s: float | None = None) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"verb": verb, "folder": str(folder), "kill_s": kill_s}) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer

    try:
        yield ask
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait()
        process.stdout.close()


def _desk(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    prepare(folder)
    return folder


def kill_often(verb: str, kills: int, ask: Ask, tmp_path: Path) -> int:
    """Kill a verb at so many random moments, each time in a folder of its own; how many fell before its end."""
    whole = _desk(tmp_path, "whole")
    first = ask(verb, whole, None)
    assert first["code"] == 0, (whole / "stderr").read_text()
    wanted = VERBS[verb].left(whole / "out")
    random, hit = Random(f"{SEED} {verb}"), 0
    for number in range(kills):
        folder = _desk(tmp_path, str(number))
        killed = ask(verb, folder, random.random() * first["seconds"])
        hit += killed["code"] == -9
        assert killed["orphans"] == 0, "workers go on without their parent"
        kept = {path: path.read_bytes() for path in (folder / "out").glob(VERBS[verb].kept)}
        again = ask(verb, folder, None)
        assert again["code"] == 0, (folder / "stderr").read_text()
        assert VERBS[verb].left(folder / "out") == wanted
        assert {path: path.read_bytes() for path in kept} == kept, "finished work was done again"
    return hit


@pytest.mark.parametrize("verb", ["sweep", "reproduce"])
def test_a_killed_verb_goes_on(verb: str, ask: Ask, tmp_path: Path) -> None:
    kill_often(verb, 2, ask, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_goes_on_whenever_it_is_killed(verb: str, ask: Ask, tmp_path: Path) -> None:
    hit = kill_often(verb, KILLS, ask, tmp_path)
    print(f"\n{verb}: {KILLS} kills, {hit} of them before its end, all came to the same")
    assert hit > 0
