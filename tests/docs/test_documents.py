"""What documents say is held against the code: examples run, names exist, links and files are there."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import click
import pytest

from simtune.cli import VERBS, cli
from tests.docs import reading
from tests.docs.reading import DOCS, ROOT

DOCUMENTS = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
FILE = re.compile(r"^(?:simtune|tuner|tests|benchmarks|docs|examples|models|hwprofiles|workloads)/[\w./*-]*$")
WITH_EXAMPLES = [path for path in DOCUMENTS if ">>>" in reading.text(path)]
RUN_ELSEWHERE = "adding.md"  # its commands are run by tests/docs/test_adding_document.py

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    found = reading.links(reading.text(document))
    missing = [link for link in found if not (document.parent / link).exists()]
    assert [link for link in missing if (document.parent / link) != DOCS / "settings.md"] == [], (
        "the site makes that one"
    )


@each_document
def test_files_in_backticks_exist(document: Path) -> None:
    names = [name for name in reading.quoted(reading.text(document)) if FILE.match(name)]
    assert [name for name in names if not list(ROOT.glob(name.rstrip("/")))] == []


@each_document
def test_modules_in_backticks_exist(document: Path) -> None:
    """`simtune.costs.ticks` is a module, and `simtune.costs.ticks.to_ticks` something in one."""
    known = reading.module_names()
    for name in reading.quoted(reading.text(document)):
        if re.fullmatch(r"simtune(\.\w+)+", name):
            module, _, member = name.rpartition(".")
            assert name in known or (module in known and member in reading.defined()), name


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.name != RUN_ELSEWHERE], ids=lambda path: path.name
)
def test_commands_are_understood(document: Path) -> None:
    """Lines of shell blocks are parsed in full: every option exists."""
    lines = [line for block in reading.blocks(reading.text(document), "sh") for line in block.splitlines()]
    for line in lines:
        if line.startswith("simtune "):
            verb, *arguments = shlex.split(line, comments=True)[1:]
            assert verb in VERBS, line
            command = cli.get_command(click.Context(cli), verb)
            assert command is not None
            assert command.make_context(verb, arguments).params


@each_document
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", reading.text(ROOT / "Makefile"), re.MULTILINE))
    named = re.findall(r"`make ([a-z-]+)", reading.text(document))
    lines = [line for block in reading.blocks(reading.text(document), "sh") for line in block.splitlines()]
    named += [line.split()[1] for line in lines if line.startswith("make ")]
    assert set(named) <= targets


@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=lambda path: path.name)
def test_examples_come_to_what_they_say(document: Path) -> None:
    blocks = [block for block in reading.blocks(reading.text(document), "python") if ">>>" in block]
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, document.name, str(document), 0)
    said: list[str] = []
    failed, tried = doctest.DocTestRunner().run(test, out=said.append)
    assert tried
    assert not failed, "".join(said)


def test_every_document_is_named_where_newcomers_look() -> None:
    named = {(ROOT / link).resolve() for link in reading.links(reading.text(ROOT / "README.md"))}
    assert {path for path in DOCUMENTS if path.name != "README.md"} <= named
