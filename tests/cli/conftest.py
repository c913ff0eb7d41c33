"""A desk to work at: a folder of its own with a small study, where the command line is typed and looked at."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from simtune.cli import INTERNAL, main

ROOT = Path(__file__).resolve().parents[2]

STUDY = """\
schema: simtune/study@1
name: tiny
model: llama-3.1-8b
hardware: {profile: h100-sxm, devices: 2}
workload: chat
slo:
  ttft_s: {p99: 1.0}
  tpot_s: {p99: 0.030}
search:
  tp: [1, 2]
  pp: [1]
  max_num_seqs: [64, 128]
  max_num_batched_tokens: [2048]
  requests: 60
  confirm: {draws: 0}
"""


@dataclass(frozen=True)
class Said:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout, which must be one JSON document and nothing else."""
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def call(*args: object) -> Said:
    """`simtune args` in this process; an error that nobody foresaw is a failure."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as exit_:
        main([str(arg) for arg in args])
    assert isinstance(exit_.value.code, int)
    assert INTERNAL not in err.getvalue(), err.getvalue()
    return Said(exit_.value.code, out.getvalue(), err.getvalue())


def start(*args: object, **env: str) -> subprocess.Popen[str]:
    """`simtune args` as a process of its own; warnings are errors there too."""
    kept = ("SIMTUNE_ALLOW_CODE",)  # of the fixture `own_code_allowed`
    clean = {key: value for key, value in os.environ.items() if key in kept or not key.startswith("SIMTUNE_")}
    path = os.pathsep.join(filter(None, (str(ROOT), clean.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "simtune", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**clean, "PYTHONPATH": path, **env},
    )


def typed(*args: object, **env: str) -> Said:
    """`simtune args` as a process of its own, to its end."""
    process = start(*args, **env)
    out, err = process.communicate(timeout=120)
    return Said(process.returncode, out, err)


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too; a folder without files counts as one. Python compiles modules that a
    study names into __pycache__, which does not count."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"<folder>"
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts and (path.is_file() or (path.is_dir() and not any(path.iterdir())))
    }


class Desk:
    """The current folder of one test, holding study.yaml."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("study.yaml", STUDY)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def study(self, old: str, new: str) -> None:
        """Put other words into the study."""
        assert old in STUDY
        self.write("study.yaml", STUDY.replace(old, new))

    def optimize(self, *more: object) -> Said:
        return call("optimize", "study.yaml", "--out", "run", "--jobs", 1, *more)

    def simulate(self, *more: object, workload: str = "chat") -> Said:
        base = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", workload, "--requests", 200)
        return call("simulate", *base, *more)

    def refused(self, command: Callable[..., Said], *args: object, code: int = 2, **named: str) -> str:
        """The one message of a command that is refused: nothing on stdout, nothing written."""
        before = bytes_of(self.folder)
        said = command(*args, **named)
        assert (said.code, said.out) == (code, ""), said
        assert bytes_of(self.folder) == before, "nothing may be left behind"
        assert "Traceback" not in said.err
        usage, _, message = said.err.lstrip("\n").rpartition("\n\n")  # click says how the verb is used first
        assert not usage or usage.startswith("Usage: ")
        assert message.count("\n") == 1, f"one line was expected: {message}"
        return message.rstrip()


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in os.environ:
        if key.startswith("SIMTUNE_"):
            monkeypatch.delenv(key)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """The current folder, with temporary files under it too: what is forgotten there is seen."""
    folder = tmp_path / "desk"
    (folder / "tmp").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    return Desk(folder)


@pytest.fixture(name="typed", scope="session")
def typed_() -> Callable[..., Said]:
    return typed


@pytest.fixture(name="start", scope="session")
def start_() -> Callable[..., subprocess.Popen[str]]:
    return start


@pytest.fixture(autouse=True, scope="session")
def _interrupts_are_heard() -> Iterator[None]:
    """A shell lets what runs in its background ignore interrupts, and whatever that starts would do the same."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(name="call", scope="session")
def call_() -> Callable[..., Said]:
    return call


@pytest.fixture(name="bytes_of", scope="session")
def bytes_of_() -> Callable[[Path], dict[str, bytes]]:
    return bytes_of


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the small study. To be looked at, not changed."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "study.yaml").write_text(STUDY)
    said = call("optimize", folder / "study.yaml", "--out", folder / "run", "--jobs", 1)
    assert said.code == 0, said
    return folder / "run"
