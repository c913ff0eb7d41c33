"""constraints.txt holds one release, with hashes, of everything that pyproject.toml names."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement

from tests.docs.reading import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCKED = {
    name: (version, len(re.findall(r"--hash=sha256:[0-9a-f]{64}", rest)))
    for name, version, rest in re.findall(
        r"^([\w.-]+)==([^\s;]+)(.*?)(?=^[\w.-]+==|\Z)",
        (ROOT / "constraints.txt").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
}


def test_every_dependency_is_held_within_its_bounds() -> None:
    needed = map(Requirement, [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]])
    outside = [
        str(requirement)
        for requirement in needed
        if not requirement.specifier.contains(LOCKED[requirement.name.lower()][0], prereleases=True)
    ]
    assert outside == [], "make constraints"


def test_every_release_has_hashes() -> None:
    assert len(LOCKED) > 30
    assert [name for name, (_, hashes) in LOCKED.items() if not hashes] == []
