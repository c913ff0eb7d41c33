"""The collection: which families of systems there are, and which of them are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from simtune.errors import Problem, SpecError, UsageError, suggest
from simtune.specs import yamlfile
from simtune.specs.input_files import read_text
from simtune.specs.systems import PublishedSystem, Systems, problems

STORED = "results.json"
"""What the whole collection came to when it was last run."""


class Entry(NamedTuple):
    """One system, and the file it stands in."""

    family: Systems
    system: PublishedSystem


def folder() -> Path:
    """Where the collection stands."""
    return Path(str(resources.files("simtune") / "systems"))


def read(path: Path) -> Systems:
    """A family from its file. Raises SpecError for all that is wrong in it, its plans and workloads included."""
    return Systems.from_document(yamlfile.parse(read_text(path), str(path)), problems)


def collection() -> list[Systems]:
    """All families, by name."""
    return [read(path) for path in sorted(folder().glob("*.yaml"))]


def select(asked: Sequence[str]) -> list[Entry]:
    """Systems by their names, those of their families, or files of one's own; all where nothing is asked for.

    Raises UsageError for a name that nothing has, SpecError for what is wrong in a file.
    """
    if not asked:
        return list(entries(collection()))
    known = list(entries(collection())) if any(not _is_file(name) for name in asked) else []
    chosen: dict[tuple[str, str], Entry] = {}
    for name in asked:
        asked_for = list(entries([read(Path(name))])) if _is_file(name) else _named(name, known)
        chosen |= {(entry.family.name, entry.system.name): entry for entry in asked_for}
    return list(chosen.values())


def entries(families: Sequence[Systems]) -> Iterator[Entry]:
    """All systems of some families. Raises SpecError where two families have one of the same name."""
    seen: dict[str, str] = {}
    for family in families:
        for system in family.systems:
            if system.name in seen:
                raise _twice(system.name, seen[system.name], family.name)
            seen[system.name] = family.name
            yield Entry(family, system)


def _twice(name: str, first: str, second: str) -> SpecError:
    return SpecError(Problem(f"{second}.yaml", f"{name} stands in {first}.yaml as well; give one another name", name))


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name


def _named(name: str, known: Sequence[Entry]) -> list[Entry]:
    named = [entry for entry in known if name in (entry.family.name, entry.system.name)]
    if named:
        return named
    names = [entry.system.name for entry in known] + list({entry.family.name for entry in known})
    raise UsageError(
        f"no published system or family is called {name!r}{suggest(name, names) or '.'} `simtune reproduce --list` "
        "shows all; a file of your own is given by its path, for example ./mine.yaml"
    )
