"""A verb that is killed or interrupted at any moment, or finds the disk full, goes on by the same command, comes to the
same, and leaves nothing else.

SIMTUNE_KILLS=50 python -m pytest -m slow tests/kills
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.kills.verbs import VERBS, prepare

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("SIMTUNE_KILLS", "8"))
SEED = 19

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

Ask = Callable[..., dict[str, Any]]
WholeRun = Callable[[str], tuple[float, Path]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    environment = {key: text for key, text in os.environ.items() if not key.startswith("SIMTUNE_")}
    path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kills.forked"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**environment, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip

    def ask(
        verb: str,
        folder: Path,
        after_s: float | None = None,
        how: int = signal.SIGKILL,
        most_bytes: int | None = None,
    ) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        job = {"verb": verb, "folder": str(folder), "after_s": after_s, "signal": how, "most_bytes": most_bytes}
        process.stdin.write(json.dumps(job) + "\n")
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


@pytest.fixture(scope="module")
def whole_run(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """A run of each verb that nothing stops: its seconds and what it wrote. Each is made once."""

    @cache
    def run(verb: str) -> tuple[float, Path]:
        folder = _desk(tmp_path_factory.mktemp("whole"), verb)
        ended = ask(verb, folder)
        assert ended["code"] == 0, (folder / "stderr").read_text()
        return ended["seconds"], folder / "out"

    return run


def _desk(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    prepare(folder)
    return folder


def kill_often(verb: str, kills: int, ask: Ask, whole_run: WholeRun, tmp_path: Path, how: int = signal.SIGKILL) -> int:
    """Kill or interrupt a verb at so many random moments, each time in a folder of its own; how many fell before its
    end."""
    seconds, out = whole_run(verb)
    wanted = VERBS[verb].left(out)
    random, hit = Random(f"{SEED} {verb}"), 0
    for number in range(kills):
        folder = _desk(tmp_path, str(number))
        killed = ask(verb, folder, random.random() * seconds, how)
        said = (folder / "stderr").read_text()
        assert killed["code"] in (0, -9 if how == signal.SIGKILL else 130), said
        hit += killed["code"] != 0
        assert killed["orphans"] == 0, "workers go on without their parent"
        if how == signal.SIGINT:
            assert "Exception ignored" in said or "Traceback" not in said, said
            assert not list(folder.rglob(".*")), "left half-written"
        kept = {path: path.read_bytes() for path in (folder / "out").glob(VERBS[verb].kept)}
        again = ask(verb, folder)
        assert again["code"] == 0, (folder / "stderr").read_text()
        assert VERBS[verb].left(folder / "out") == wanted
        assert {path: path.read_bytes() for path in kept} == kept, "finished work was done again"
    return hit


def fill_often(verb: str, times: int, ask: Ask, whole_run: WholeRun, tmp_path: Path) -> int:
    """Let the disk be full at so many random bytes of a verb's files, each time in a folder of its own; how often it
    ended for that."""
    _, out = whole_run(verb)
    wanted = VERBS[verb].left(out)
    sizes = sorted({file.stat().st_size for file in out.rglob("*") if file.is_file()})
    random, hit = Random(f"{SEED} {verb} disk"), 0
    for number in range(times):
        folder = _desk(tmp_path, str(number))
        ended = ask(verb, folder, most_bytes=random.randrange(random.choice(sizes) or 1))
        said = (folder / "stderr").read_text()
        assert ended["code"] in (0, 1, 2), said
        assert "Traceback" not in said, said
        assert ended["orphans"] == 0
        hit += ended["code"] != 0
        assert not [path for path in folder.rglob(".*") if path.suffix != ".lock"], "left half-written"
        again = ask(verb, folder)
        assert again["code"] == 0, (folder / "stderr").read_text()
        assert VERBS[verb].left(folder / "out") == wanted
    return hit


@pytest.mark.parametrize("verb", ["sweep", "reproduce"])
def test_a_verb_goes_on_after_the_disk_was_full(verb: str, ask: Ask, whole_run: WholeRun, tmp_path: Path) -> None:
    assert fill_often(verb, 2, ask, whole_run, tmp_path) > 0


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_goes_on_at_whatever_byte_the_disk_was_full(
    verb: str, ask: Ask, whole_run: WholeRun, tmp_path: Path
) -> None:
    hit = fill_often(verb, KILLS, ask, whole_run, tmp_path)
    print(f"\n{verb}: the disk was full at {KILLS} bytes, {hit} ended it, all came to the same")
    assert hit > 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill", "interrupt"])
@pytest.mark.parametrize("verb", ["sweep", "reproduce"])
def test_a_killed_verb_goes_on(verb: str, how: int, ask: Ask, whole_run: WholeRun, tmp_path: Path) -> None:
    kill_often(verb, 2, ask, whole_run, tmp_path, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill", "interrupt"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_goes_on_whenever_it_is_killed(
    verb: str, how: int, ask: Ask, whole_run: WholeRun, tmp_path: Path
) -> None:
    hit = kill_often(verb, KILLS, ask, whole_run, tmp_path, how)
    print(f"\n{verb}: {KILLS} {'kills' if how == signal.SIGKILL else 'interrupts'}, {hit} of them before its end, "
          "all came to the same")  # fmt: skip
    assert hit > 0
