"""Keeps files of the present version, with commands that read them, for the versions to come.

    python -m tests.upgrades.keep

The version that is being made is kept anew whenever one of its formats changes; those of a version that was released
never change again. A later version reads each of them, or refuses it with what to do (`test_upgrades.py`).
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from simtune import __version__
from tests.fuzz import campaign, corpus

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("kept")
COMMANDS = "commands.json"
PAGES = (".html", "stdout", "stderr")
"""Endings of what no verb reads."""

_FRONT = "front.yaml"
_KILLED = (
    "import os, sys; from simtune.cli import main; from simtune.specs.row_journal import RowJournal as rows\n"
    "add = rows.add; rows.add = lambda *row: (add(*row), os._exit(0)); main(sys.argv[1:])"
)
"""A command that is killed when it has written its first row."""


def commands() -> list[tuple[str, ...]]:
    """One command for each verb and file of the corpus, and those that read what whole runs wrote."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for case in corpus.cases():
        found.setdefault((case.command[0], case.file), case.command)
    return [
        *dict.fromkeys(found.values()),
        ("certify", "front", "--study", _FRONT, "--json"),
        ("explain", "certified"),
        ("optimize", "study.yaml", "--jobs", "1", "--json", "--out", "unfinished", "--resume"),
    ]  # fmt: skip


def _run(at: campaign.Desk, command: tuple[str, ...]) -> int:
    code: int = at.ask(command)["code"]
    return code


def fill(at: campaign.Desk, folder: Path) -> None:
    """Add whole runs to the corpus: of a search, of a front, and of a search that was killed."""
    text = (folder / "study.yaml").read_text()
    (folder / _FRONT).write_text(text + "objective: pareto\n")
    shutil.rmtree(folder / "certified")
    for study, out in (("study.yaml", "certified"), (_FRONT, "front")):
        assert _run(at, ("optimize", study, "--out", out, "--jobs", "1", "--json")) == 0, (
            folder / "stderr"
        ).read_text()
    shutil.copytree(folder / "certified", folder / "run", dirs_exist_ok=True)
    killed = ["optimize", "study.yaml", "--out", "unfinished", "--jobs", "1"]
    subprocess.run(
        [sys.executable, "-c", _KILLED, *killed], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
    )
    assert (folder / "unfinished" / "journal.jsonl").is_file()


def archive(folder: Path, answers: list[tuple[tuple[str, ...], int]]) -> bytes:
    """Return all files of a folder but pages, and the commands with their exit codes, the same bytes every time."""
    (folder / COMMANDS).write_text(json.dumps(answers, indent=0))
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:xz", preset=9) as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.name.endswith(PAGES):
                entry = tarfile.TarInfo(str(path.relative_to(folder)))
                entry.size = path.stat().st_size
                with path.open("rb") as file:
                    tar.addfile(entry, file)
    return raw.getvalue()


def main() -> None:
    """Keep the present version."""
    with campaign.desk() as at, tempfile.TemporaryDirectory() as spare:
        folder = Path(at.folder)
        fill(at, folder)
        clean = Path(spare) / "clean"
        shutil.copytree(folder, clean)
        answers = []
        for command in commands():
            answers.append((command, _run(at, command)))
            print(answers[-1][1], " ".join(command), file=sys.stderr)
            shutil.rmtree(folder)
            shutil.copytree(clean, folder)
        KEPT.mkdir(exist_ok=True)
        (KEPT / f"{__version__}.tar.xz").write_bytes(archive(folder, answers))


if __name__ == "__main__":
    main()
