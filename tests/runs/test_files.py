"""Files are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simtune.errors import UsageError
from simtune.runs.files import claim, write, write_file


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_file_is_written_with_its_folders_and_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "x.csv"
    write_file(target, "one\n")
    write_file(target, b"two\n")
    assert target.read_bytes() == b"two\n"
    assert names(tmp_path) == ["a", "a/b", "a/b/x.csv"]
    assert target.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("step", ["write", "chmod", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_nothing_is_left_of_a_file_that_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    target = tmp_path / "x.csv"
    target.write_text("earlier")

    def broken(*_: Any) -> None:
        raise error

    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            super().write(content[:3])  # part of it is on the disk when it goes wrong
            raise error

    if step == "write":
        monkeypatch.setattr(Path, "open", lambda path, mode: Full(path, mode))
    else:
        monkeypatch.setattr(Path, step, broken)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UsageError
    with pytest.raises(expected):
        write_file(target, "later, and longer")
    monkeypatch.undo()
    assert names(tmp_path) == ["x.csv"]
    assert target.read_text() == "earlier"


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/x\.csv: cannot be written \(File exists\)"):
        write_file(tmp_path / "file" / "x.csv", "")


def test_a_run_replaces_an_earlier_one_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path / "run", {"plan.yaml": "a", "engine/launch.sh": "b"})
    write(tmp_path / "run", {"plan.yaml": b"c"})
    assert names(tmp_path) == ["run", "run/plan.yaml"]


def test_a_run_that_another_process_is_writing_is_refused(tmp_path: Path) -> None:
    """Until that process ends, however it ends."""
    code = (
        "import sys, time; from pathlib import Path; from simtune.runs.files import claim\n"
        "claim(Path(sys.argv[1]), False); print('claimed', flush=True); time.sleep(60)"
    )
    out = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(UsageError, match="run: another simtune is writing it"):
            claim(out, force=True)
    finally:
        other.kill()
        other.communicate()
    claim(out, force=False)
    claim(out, force=False)


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    target = tmp_path / "pipe"
    os.mkfifo(target)
    with pytest.raises(UsageError, match="is no regular file and would be lost; name another file"):
        write_file(target, "x")
    assert target.is_fifo()
