"""Files of earlier versions are read, or refused with what to do.

`kept` holds an archive of each version (`python -m tests.upgrades.keep`): specs, logs, profiles and whole runs, and
commands that read them with the exit codes that they had.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from simtune.errors import SpecError, UsageError
from simtune.specs import catalog
from simtune.specs.schema_versions import REDO, schema_problem
from tests.cli.conftest import call
from tests.upgrades.keep import COMMANDS, KEPT

VERSIONS = sorted(path.name.removesuffix(".tar.xz") for path in KEPT.iterdir())

REFUSED: dict[tuple[str, str], str] = {}
"""By version and file, the message with which this version refuses it."""

READERS = ("check", "show", "explain", "report", "certify", "calibrate", "acceptance")
"""Verbs that read files and simulate nothing."""


@pytest.fixture(params=VERSIONS)
def kept(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    with tarfile.open(KEPT / f"{request.param}.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return str(request.param)


def answer_all(version: str, verbs: tuple[str, ...] | None) -> int:
    """Give all commands of the verbs; return how many there were."""
    commands = [(words, code) for words, code in json.loads(Path(COMMANDS).read_text())]
    wanted = [(words, code) for words, code in commands if verbs is None or words[0] in verbs]
    for words, code in wanted:
        said = call(*words)
        refusals = [REFUSED[version, word] for word in words if (version, word) in REFUSED]
        assert said.code == (2 if refusals else code), (words, said)
        assert all(refusal in said.err for refusal in refusals), (words, said)
        for out in ("out", "out.yaml"):
            if Path(out).exists():
                Path(out).rename(f"before-{len(list(Path().iterdir()))}")
    return len(wanted)


def test_files_of_every_version_are_read_or_refused(kept: str) -> None:
    assert answer_all(kept, READERS) > 40


@pytest.mark.slow
def test_files_of_every_version_can_be_gone_on_with(kept: str) -> None:
    assert answer_all(kept, None) > 80


def test_this_version_is_kept() -> None:
    from simtune import __version__

    assert __version__ in VERSIONS, "python -m tests.upgrades.keep"


@pytest.mark.parametrize("kind", list(catalog.KINDS))
def test_a_spec_of_another_version_is_refused_with_a_remedy(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    for number, age in ((2, "newer"), (0, "older")):
        file.write_text(f"schema: simtune/{catalog.KINDS[kind].KIND}@{number}\nname: x\n")
        with pytest.raises((SpecError, UsageError), match=rf"@{number}, of an? {age} simtune; .*write @1, and mend"):
            catalog.kind_of(str(file))


def test_the_older_and_the_newer_are_told_apart() -> None:
    assert schema_problem("simtune/x@9", "simtune/x@10", REDO).startswith("is simtune/x@9, of an older simtune")
    assert "upgrade simtune" in schema_problem("simtune/x@11", "simtune/x@10", REDO)
    assert schema_problem("simtune/y@9", "simtune/x@10", REDO) == "must be simtune/x@10, found 'simtune/y@9'"
    assert schema_problem(None, "simtune/x@10", REDO) == "must be simtune/x@10"
