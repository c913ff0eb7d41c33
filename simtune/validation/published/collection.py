"""The collection of published systems: its families, and the selection of systems by name."""

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
"""File of the results of the whole collection when it was last run."""


class Entry(NamedTuple):
    """A published system, and the file that contains it."""

    family: Systems
    system: PublishedSystem


def folder() -> Path:
    """Return the folder of the collection."""
    return Path(str(resources.files("simtune") / "systems"))


def read(path: Path) -> Systems:
    """Read a family from its file. Raises SpecError for all that is wrong in it, its plans and workloads included."""
    return Systems.from_document(yamlfile.parse(read_text(path), str(path)), problems)


def collection() -> list[Systems]:
    """Return all families, by name."""
    return [read(path) for path in sorted(folder().glob("*.yaml"))]


def select(asked: Sequence[str]) -> list[Entry]:
    """Return systems by their names, those of their families, or files of the user; all if no name is given.

    Raises UsageError for a name that nothing has, SpecError for what is wrong in a file.
    """
    if not asked:
        return list(entries(collection()))
    all_entries = list(entries(collection())) if any(not _is_file(name) for name in asked) else []
    chosen: dict[tuple[str, str], Entry] = {}
    for name in asked:
        asked_for = list(entries([read(Path(name))])) if _is_file(name) else _named(name, all_entries)
        chosen |= {(entry.family.name, entry.system.name): entry for entry in asked_for}
    return list(chosen.values())


def entries(families: Sequence[Systems]) -> Iterator[Entry]:
    """Yield all systems of some families. Raises SpecError if two families have a system of the same name."""
    family_names: dict[str, str] = {}
    for family in families:
        for system in family.systems:
            if system.name in family_names:
                raise _twice(system.name, family_names[system.name], family.name)
            family_names[system.name] = family.name
            yield Entry(family, system)


def _twice(name: str, first: str, second: str) -> SpecError:
    return SpecError(Problem(f"{second}.yaml", f"{name} is also defined in {first}.yaml; rename one of them", name))


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name


def _named(name: str, known: Sequence[Entry]) -> list[Entry]:
    matching = [entry for entry in known if name in (entry.family.name, entry.system.name)]
    if matching:
        return matching
    names = [entry.system.name for entry in known] + list({entry.family.name for entry in known})
    raise UsageError(
        f"no published system or family is called {name!r}{suggest(name, names) or '.'} `simtune reproduce --list` "
        "shows all; a file of your own is given by its path, for example ./mine.yaml"
    )
