"""Reads what documents say, and what the code is made of, so that tests can compare the two."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

Row = dict[str, str]


def text(path: Path) -> str:
    """A file, as it is."""
    return path.read_text(encoding="utf-8")


def section(document: str, heading: str) -> str:
    """What stands under a heading, its own subsections included. Fails where there is no such heading."""
    found = re.search(rf"^(#+) {re.escape(heading)}\n", document, re.MULTILINE)
    assert found is not None, f"there is no heading {heading!r}"
    rest = document[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", _without_code(rest), re.MULTILINE)
    return rest if end is None else rest[: end.start()]


def _without_code(document: str) -> str:
    """The same length, with fenced blocks blanked: their comments look like headings."""
    return re.sub(r"^```.*?^```", lambda block: " " * len(block[0]), document, flags=re.DOTALL | re.MULTILINE)


def tables(document: str) -> list[list[Row]]:
    """Every table of a document: its rows by column name."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", document, re.MULTILINE):
        header, _, *rows = [_cells(line) for line in block.splitlines()]
        for row in rows:
            assert len(row) == len(header), row
        found.append([dict(zip(header, row, strict=True)) for row in rows])
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def quoted(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def blocks(document: str, language: str) -> list[str]:
    """Fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document, re.DOTALL | re.MULTILINE)


def links(document: str) -> list[str]:
    """Where links within the repository lead, without anchors."""
    found = re.findall(r"\]\(([^)\s]+)\)", _without_code(document))
    return [link.partition("#")[0] for link in found if "://" not in link and not link.startswith("#")]


def sources() -> Iterator[Path]:
    """Yield the files of all modules of the package."""
    yield from sorted((ROOT / "simtune").rglob("*.py"))


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name, parsed."""
    found = {}
    for file in sources():
        found[".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = parsed(file)
    return found


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(text(path), str(path))


def names(module: ast.Module) -> set[str]:
    """Whatever a module gives a name: classes, functions, fields, parameters, variables."""
    return set().union(*map(_names_of, ast.walk(module)))


@cache
def defined() -> frozenset[str]:
    """Names of all classes, functions, methods, fields, parameters and constants, and `Class.member` of members."""
    everything: set[str] = set()
    for module in modules().values():
        everything |= names(module)
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                everything |= {f"{node.name}.{member}" for member in members(node)}
    return frozenset(everything)


def members(node: ast.ClassDef) -> set[str]:
    """What a class defines: methods, fields, and attributes that its methods set."""
    found: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            found.add(child.attr)
        elif not isinstance(child, ast.arg):
            found |= _names_of(child)
    return found


def _names_of(node: ast.AST) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    if isinstance(node, ast.arg):
        return {node.arg}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return {node.attr}
    return set()


@cache
def module_names() -> frozenset[str]:
    """Return the names under which modules can be imported (`simtune.costs.ticks`), without parsing the files."""
    parts = (file.relative_to(ROOT).with_suffix("").parts for file in sources())
    return frozenset(".".join(part).removesuffix(".__init__") for part in parts)
