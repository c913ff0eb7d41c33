"""Worker processes end with the one that began them, and one that is killed does not take the answer along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from simtune.sim import parallel
from simtune.sim.parallel import executor, ordered_map

SCRIPT = """
import os, sys, time
from simtune.sim.parallel import executor

def wait(_):
    os.write(1, b"%d\\n" % os.getpid())  # in one piece: print may write the number and the end of its line apart
    time.sleep(60)

if __name__ == "__main__":
    with executor(2, 2) as pool:
        list(pool.map(wait, range(2)))
"""


def square_or_die(task: tuple[int, int]) -> int:
    number, parent = task
    if number == 3 and os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_what_a_killed_worker_had_is_done_all_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    with executor(2, 8) as pool:
        assert pool is not None
        assert [*ordered_map(pool, square_or_die, [(n, os.getpid()) for n in range(8)])] == [n * n for n in range(8)]
    assert "a worker process was killed" in capfd.readouterr().err


ENTER = parallel._enter_worker


def interrupted_while_starting(parent: int) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    ENTER(parent)


def test_an_interrupt_while_workers_start_reaches_none_of_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parallel, "_enter_worker", interrupted_while_starting)
    with executor(2, 2) as pool:
        assert pool is not None
        assert [*pool.map(abs, [-1, -2])] == [1, 2]
    assert capfd.readouterr().err == ""
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells processes of their parent's end")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(alive(worker) for worker in workers)
    parent.send_signal(how)
    parent.wait(10)
    parent.stdout.close()
    until = time.monotonic() + 10
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < until, "workers go on without their parent"
        time.sleep(0.01)
