"""docs/adding.md: every example is run as it stands.

A block with a file name is written under it; a file of the package is importable as if it stood there. Python without a
name is run, shell lines are commands, and each line of a text block is found in what the command before it said.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simtune import cli
from simtune.costs import operators
from simtune.emit import ENGINES
from simtune.specs import hf
from tests.docs import reading
from tests.docs.reading import DOCS, ROOT

DOCUMENT = reading.text(DOCS / "adding.md")
SECTIONS = re.findall(r"^## (.+)$", DOCUMENT, re.MULTILINE)
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```", re.DOTALL | re.MULTILINE)
REGISTRIES: tuple[dict[Any, Any], ...] = (cli.VERBS, hf.ARCHITECTURES, operators.OPERATORS, ENGINES)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where files of an example are written; what an example registers or imports is forgotten after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    kept, loaded = [dict(registry) for registry in REGISTRIES], set(sys.modules)
    yield tmp_path
    for registry, before in zip(REGISTRIES, kept, strict=True):
        registry.clear()
        registry.update(before)
    for name in set(sys.modules) - loaded:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def write(name: str, content: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, and its folder into the path of the package that it is said to stand in."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    if name.startswith("simtune/"):
        package = importlib.import_module(".".join(Path(name).parent.parts))
        if str(path.parent) not in package.__path__:
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(path.parent)])


def command(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says on stdout. Fails where it does."""
    program, *arguments = shlex.split(line, comments=True)
    capsys.readouterr()
    if program == "simtune":
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        out, errors = capsys.readouterr()
        assert end.value.code == 0, f"{line}\n{errors}"
    elif program == "pytest":
        path = os.pathsep.join((str(ROOT), str(Path.cwd())))
        whole = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *arguments]
        done = subprocess.run(
            whole, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}"
        out = done.stdout
    else:
        assert program == "python", f"{line}: only simtune, pytest and python are run"
        runpy.run_path(arguments[0], run_name="__main__")
        out, _ = capsys.readouterr()
    return out


@pytest.mark.parametrize("heading", SECTIONS)
def test_an_example_runs(
    heading: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    out, ran = "", 0
    for language, name, content in BLOCK.findall(reading.section(DOCUMENT, heading)):
        if name:
            write(name, content, folder, monkeypatch)
        elif language == "python":
            exec(compile(content, "docs/adding.md", "exec"), names)
        elif language == "sh":
            for line in content.splitlines():
                out += command(line, capsys)
                ran += 1
        else:
            assert language == "text", f"nobody runs a block of {language}"
            assert [line for line in content.splitlines() if line not in out] == []
    assert ran


@pytest.mark.parametrize("name", ["own_policy.py", "own_router.py", "own_cost_model.py"])
def test_an_example_is_the_one_that_is_shipped(name: str) -> None:
    (written,) = (content for _, file, content in BLOCK.findall(DOCUMENT) if file == name)
    assert written == (ROOT / "examples" / name).read_text()


def test_every_kind_of_the_table_has_its_section() -> None:
    (table,) = (table for table in reading.tables(DOCUMENT) if "add" in table[0])
    assert [row["add"].split()[0] for row in table] == [heading.split()[0].lower() for heading in SECTIONS]
    for row in table:
        cells = row["files in the package"] + row["from outside, without touching it"]
        for name in reading.quoted(cells):
            assert name in reading.defined() or (ROOT / name).exists() or ":" in name, name
