"""Two processes, containers and hosts on one folder: one writes, the other is told who does."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simtune.errors import UsageError
from simtune.runs.files import claim, write, write_file
from simtune.specs import folder_lock
from simtune.specs.folder_lock import LEASE_S, lock, release, renew

HOLDER = """
import sys
from pathlib import Path
from simtune.specs import folder_lock
folder_lock.socket.gethostname = lambda: "the-other"
{more}
folder_lock.lock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _unlocked() -> Iterator[None]:
    yield
    release()


def holder(out: Path, more: str = "") -> "subprocess.Popen[str]":
    code = HOLDER.format(more=more)
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "locked\n"
    return other


def stored(out: Path, machine: str, age_s: float = 0.0) -> Path:
    """The lock file of a process that does not exist here."""
    file = out.with_name(f".{out.name}.lock")
    file.write_text(json.dumps({"host": "far", "process": 7, "machine": machine, "key": "0"}))
    os.utime(file, (time.time() - age_s, time.time() - age_s))
    return file


def test_another_container_is_named_and_its_end_frees_the_folder(tmp_path: Path) -> None:
    """It has a host name of its own; the lock goes with the process, killed or not."""
    out = tmp_path / "run"
    other = holder(out)
    try:
        with pytest.raises(
            UsageError, match=rf"run: another simtune is writing it \(process {other.pid} on host the-o"
        ):
            claim(out, force=False)
    finally:
        other.kill()
        other.communicate()
    begun = time.monotonic()
    claim(out, force=False)
    assert time.monotonic() - begun < LEASE_S / 10


def test_no_file_is_left_of_a_lock_that_was_released(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "run"
    lock(out)
    assert (tmp_path / "a" / "b" / ".run.lock").is_file()
    release()
    assert not list(tmp_path.iterdir())
    other = holder(out)
    other.communicate("\n")
    assert not list(tmp_path.iterdir())


def test_a_lease_of_another_host_holds_until_it_is_old(tmp_path: Path) -> None:
    """Where the system's lock does not reach another host, as it does not here."""
    out = tmp_path / "run"
    file = stored(out, "another machine", age_s=LEASE_S - 120)
    with pytest.raises(UsageError, match=rf"process 7 on host far\); wait for it.*remove {file} or wait 2 minutes"):
        lock(out)
    assert json.loads(file.read_text())["host"] == "far"
    stored(out, "another machine", age_s=LEASE_S + 5)
    lock(out)
    assert json.loads(file.read_text())["process"] == os.getpid()


def test_a_killed_process_of_this_machine_holds_nothing(tmp_path: Path) -> None:
    stored(tmp_path / "run", folder_lock._machine())
    lock(tmp_path / "run")


def test_who_was_taken_over_stops_before_it_writes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    write(out, {"plan.yaml": "mine"})
    lock(out)
    renew(out / "journal.jsonl")
    write_file(out / "page.html", "mine")
    stored(out, "another machine")
    taken = "run: process 7 on host far took it over, since this process wrote nothing"
    with pytest.raises(UsageError, match=taken):
        write(out, {"plan.yaml": "late"})
    with pytest.raises(UsageError, match=taken):
        write_file(out / "page.html", "late")
    assert {path.name: path.read_text() for path in out.iterdir()} == {"plan.yaml": "mine", "page.html": "mine"}
    release()
    assert (tmp_path / ".run.lock").is_file(), "the other's file stays"


def test_a_lease_is_renewed_by_what_is_written(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    lock(out)
    file = tmp_path / ".run.lock"
    os.utime(file, (0, 0))
    write_file(out / "row", "1")
    assert time.time() - file.stat().st_mtime < LEASE_S / 10


@pytest.mark.parametrize("waits", [0, 1])
def test_without_locks_of_the_system_the_lease_alone_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: int
) -> None:
    """Two hosts in the same moment, or one after the other: one of them gets the folder."""
    alone = "folder_lock._exclusive = lambda descriptor: None; folder_lock._machine = lambda: 'far'"
    monkeypatch.setattr(folder_lock, "_exclusive", lambda descriptor: None)
    out = tmp_path / "run"
    if waits:
        other = holder(out, alone)
        with pytest.raises(UsageError, match="on host the-other"):
            lock(out)
        other.communicate("\n")
        lock(out)
        return
    # The other writes after this one has, and before it looks again.
    monkeypatch.setattr(time, "sleep", lambda _: stored(out, "far"))
    with pytest.raises(UsageError, match="process 7 on host far"):
        lock(out)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"run: cannot be written .*; name a folder you may write to"):
        lock(tmp_path / "file" / "run")


def test_a_full_disk_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of a lock's text held the folder for 15 minutes."""
    write_all = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, text: write_all(descriptor, text[:9]))
        with pytest.raises(UsageError, match=r"run: cannot be written \(No space left on device"):
            lock(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    lock(tmp_path / "run")
    release()
