"""Rows that are done stay, whatever happens to the one that is being written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from simtune.errors import SimtuneError
from simtune.runs.files import claim, hold, write
from simtune.specs.folder_lock import release
from simtune.specs.row_journal import RowJournal

FULL = """
import resource, sys
from pathlib import Path
from simtune.errors import SimtuneError
from simtune.specs.folder_lock import release
from simtune.specs.row_journal import RowJournal

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
journal = RowJournal(Path(sys.argv[1]))
try:
    for number in range(100):
        journal.add(str(number), {"x": number})
except SimtuneError as error:
    sys.exit(str(error))
"""


def test_rows_are_read_again(tmp_path: Path) -> None:
    journal = RowJournal(tmp_path / "a" / "rows.jsonl")
    assert journal.read() == {}
    journal.add("one", {"x": 1})
    journal.add("two", [2])
    assert RowJournal(journal.file).read() == {"one": {"x": 1}, "two": [2]}


@pytest.mark.parametrize("torn", [b'{"key": "two", "ro', b"\xff\xfe", b"[1, 2", b"[" * 5000])
def test_a_line_that_was_cut_short_takes_no_other_along(tmp_path: Path, torn: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    RowJournal(file).add("one", {"x": 1})
    file.write_bytes(file.read_bytes() + torn)
    later = RowJournal(file)
    assert later.read() == {"one": {"x": 1}}
    later.add("three", {"x": 3})
    assert RowJournal(file).read() == {"one": {"x": 1}, "three": {"x": 3}}


@pytest.mark.parametrize("line", ['"x": NaN', '"x": 2', '"y": 1', '"x": 1}, "row": {"x": 3'])
def test_a_line_that_was_changed_is_none(tmp_path: Path, line: str) -> None:
    file = tmp_path / "rows.jsonl"
    RowJournal(file).add("one", {"x": 1})
    file.write_text(file.read_text().replace('"x": 1', line))
    assert line in file.read_text()
    assert RowJournal(file).read() == {}


@pytest.mark.skipif(sys.platform != "linux", reason="a limit stands for a full disk")
def test_a_full_disk_is_named_and_what_was_written_stays(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL, str(file)], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{file}: cannot be written (" in done.stderr
    assert done.stderr.count("\n") == 1
    rows = RowJournal(file).read()
    assert len(rows) > 10
    RowJournal(file).add("more", {})
    assert RowJournal(file).read() == rows | {"more": {}}


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    with pytest.raises(SimtuneError, match="is a folder, a file was expected"):
        RowJournal(tmp_path).read()


# --- folders that work goes on in ---------------------------------------------------------------------------


def test_a_folder_is_held_until_its_process_ends(tmp_path: Path) -> None:
    out = tmp_path / "sw"
    code = "import sys, time; from pathlib import Path; from simtune.runs.files import hold\n" \
        "hold(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"  # fmt: skip
    other = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(SimtuneError, match="sw: another simtune is writing it"):
            hold(out)
    finally:
        other.kill()
        other.communicate()
    hold(out)
    assert out.is_dir()
    assert not list(out.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(SimtuneError, match="is a file; name a folder"):
        hold(tmp_path / "file")


def test_what_a_killed_process_left_beside_a_run_is_cleared(tmp_path: Path) -> None:
    out = tmp_path / "run"
    write(out, {"manifest.json": "{}", "plan.yaml": "old"})
    (tmp_path / ".run.part-abcdefgh").mkdir()
    aside = tmp_path / ".run.part-12345678"
    aside.mkdir()
    out.rename(aside / ".earlier")  # killed just before the new one took its name
    theirs = tmp_path / ".run.part-of-mine"
    theirs.mkdir()
    with pytest.raises(SimtuneError, match="holds an earlier run"):
        claim(out, force=False)
    assert (out / "plan.yaml").read_text() == "old"
    release()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".run.part-of-mine", "run"]


@pytest.mark.skipif(sys.platform != "linux", reason="without a lock nobody knows whose it is")
def test_what_a_killed_process_left_in_a_folder_is_cleared(tmp_path: Path) -> None:
    """But for what another process is writing there."""
    out = tmp_path / "all"
    code = (
        "import sys; from pathlib import Path; from simtune.runs.files import write_file\n"
        "import os, signal; out = Path(sys.argv[1])\n"
        "Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_file(out / 'round-1' / sys.argv[2], 'half')"
    )
    for name in ("sweep.html", ".hidden"):
        assert subprocess.run([sys.executable, "-c", code, str(out), name]).returncode == -9
    (out / ".theirs.part-of-mine").touch()
    assert len(list((out / "round-1").iterdir())) == 2
    code = (
        "import sys; from pathlib import Path; from simtune.runs.files import claim, whole\n"
        "out = Path(sys.argv[1]) / 'run'; claim(out, False)\n"
        "with whole(out): print('writing', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "writing\n"
        hold(out)
        other.communicate()
    finally:
        other.kill()
    release()
    assert other.returncode == 0
    assert sorted(p.name for p in out.iterdir()) == [".theirs.part-of-mine", "round-1", "run"]
    assert not list((out / "round-1").iterdir())


def test_a_file_one_may_not_write_to_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(SimtuneError) as caught:
        RowJournal(tmp_path / "rows.jsonl").add("one", {})
    assert "rows.jsonl: cannot be written (Permission denied)" in str(caught.value)
    assert str(caught.value).endswith("name a file you may write to")
