"""The collection: every system has its entry, every file is right, and what is wrong is told with its place."""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path

import pytest

from simtune.errors import SpecError, UsageError
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.systems import PRIMITIVES, Systems, merged, unfolded
from simtune.validation.published import collection, select
from simtune.validation.published.collection import Entry, entries, folder, read

NAMES = [
    name
    for file in sorted(folder().glob("*.yaml"))
    for name in re.findall(r"^ *- name: (\S+)\n +title:", file.read_text(encoding="utf-8"), re.MULTILINE)
]
"""Read off the text: parsing the collection takes a second, in every process that collects tests."""


@cache
def systems() -> dict[str, Entry]:
    return {entry.system.name: entry for entry in entries(collection())}


MINIMAL = """schema: simtune/systems@1
name: mine
title: Mine
setup: {model: llama-3.2-1b, hardware: h100-sxm, pool: {max_model_len: 2048}}
systems:
- name: one
  title: One
  source: nowhere
  claim: {says: twice as fast, gain: 2, band: [1.5, 2.5]}
  measure: {kind: step}
  base: {step: {decodes: 1, context: 100}}
  variant: {step: {decodes: 2, context: 100}}
"""


def test_there_are_191_systems_in_files_of_their_names() -> None:
    assert len(systems()) == 191
    assert [*systems()] == NAMES
    assert len({entry.system.title for entry in systems().values()}) == 191
    assert all(entry.system.source for entry in systems().values())


def names_in(titles: set[str]) -> set[str]:
    """The single names of titles, some of which list several behind a colon."""
    return {name for title in titles for name in title.rpartition(": ")[2].split(", ")}


def test_every_row_of_the_table_has_its_entry(data_dir: Path) -> None:
    """Some of what a row lists has an entry of its own; one system is in no row."""
    with (data_dir / "systems" / "systems.csv").open(encoding="utf-8") as file:
        rows = {row["system"] for row in csv.DictReader(file)}
    titles = {entry.system.title for entry in systems().values()}
    assert names_in(titles) - names_in(rows) == {"Parallel Nonlinear Equation Solving"}
    assert names_in(rows) <= names_in(titles)


@pytest.mark.parametrize("name", NAMES)
def test_what_an_entry_names_is_there(name: str) -> None:
    family, system = systems()[name]
    for side in family.sides(system).values():
        for one in unfolded(side):
            assert family.own_model(one["model"]) or load_model(one["model"])
            named = [one.get("hardware"), *(pool.get("hardware") for pool in one.get("pools", ()))]
            assert any(named)
            assert all(load_hardware(name) for name in named if name)
    if system.claim is not None and system.claim.gain is not None and system.claim.band is not None:
        low, high = system.claim.band
        assert low <= system.claim.gain <= high, "a band holds what is claimed"


def test_primitives_that_nothing_needs_are_not_kept() -> None:
    """Nor is an entry without a reason: the spec asks for one of three."""
    needed = {name for entry in systems().values() for name in entry.system.needs}
    assert needed == set(PRIMITIVES)
    assert all(
        entry.system.needs or entry.system.not_a_schedule or entry.system.variant for entry in systems().values()
    )


def test_systems_are_chosen_by_name_by_family_and_by_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINIMAL)
    names = [entry.system.name for entry in select(["pearl", "not-serving", str(tmp_path / "mine.yaml"), "pearl"])]
    assert names[0] == "pearl"
    assert names[-1] == "one"
    assert len(names) == 2 + len(select(["not-serving"])), "each once"


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(UsageError, match="no published system or family is called 'sarati', did you mean sarathi"):
        select(["sarati"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "gain: 2, band: [1.5, 2.5]",
            "gain: 2, band: [2.5, 1.5]",
            ":9:41: systems.0.claim.band: the lower bound 2.5 exceeds the upper bound 1.5",
        ),
        ("gain: 2, band: [1.5, 2.5]", "gain: 2", ":6:3: systems.0: a variant is run to be held against a claim"),
        ("gain: 2,", "gain: 2, value: 3,", ":9:41: systems.0.claim.value: give a gain or a value, not both"),
        (
            "  base:",
            "  needs: [hierarchys]\n  base:",
            ":11:3: systems.0.needs: unknown primitive 'hierarchys', did you mean hierarchy",
        ),
        ("  base:", "  needs: [hierarchy]\n  base:", ":6:3: systems.0: give a variant that is run, or what it needs"),
        (
            "  base:",
            "  chosen: all\n  needs: [hierarchy]\n  base:",
            ":6:3: systems.0: give a variant that is run, or what it needs",
        ),
        (
            MINIMAL[MINIMAL.index("  measure") :],
            "  chosen: all\n  needs: [hierarchy]\n",
            ":10:3: systems.0.chosen: nothing is run, so nothing was chosen",
        ),
        (
            "  base:",
            "  inputs: [{what: x, source: published}]\n  base:",
            ":11:12: systems.0.inputs.0: published: say where",
        ),
        (
            "  base:",
            "  inputs: [{what: x, source: assumed}]\n  base:",
            ":11:12: systems.0.inputs.0: the ends of what it could be",
        ),
        (
            "  base:",
            "  inputs: [{what: x, source: derived, where: y, otherwise: [{}]}]\n  base:",
            "systems.0.inputs.0.otherwise: the ends of what it could be",
        ),
        (
            "  base:",
            "  inputs: [{what: x, source: derived, where: y, covers: [step.context, step.decode]}]\n  base:",
            ":11:72: systems.0.inputs.0.covers.1: no setting of one is called 'step.decode', did you mean step.decodes",
        ),
        (
            "  base:",
            "  inputs: [{what: x, source: derived, where: y, covers: [zzzz]}]\n  base:",
            "its settings are hardware, model, pool.max_model_len, step.context, step.decodes. Correct the path or",
        ),
        (
            "  base:",
            "  inputs: [{what: x, source: assumed, covers: [model], otherwise: [{}]}]\n  base:",
            "systems.0.inputs.0.covers: assumed inputs are no source of a setting; leave out covers, which `otherwise`",
        ),
        (
            "  base:",
            "  inputs: [{what: x, source: second-hand, where: y, covers: [model]}]\n  base:",
            "systems.0.inputs.0.covers: second-hand inputs are no source of a setting; leave out covers",
        ),
        ("gain: 2,", "gain: 2, formula: padded_tokens,", ":9:41: systems.0.claim.formula: a formula takes the place"),
        ("{kind: step}", "{kind: stepp}", ":10:3: systems.0.measure: unknown kind 'stepp': one of"),
        ("max_model_len: 2048", "max_length: 2048", ":4:57: setup.pool.max_length: unknown key"),
        ("{decodes: 2,", "{decode: 2,", ":12:20: systems.0.variant.step.decode: unknown key, did you mean decodes"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MINIMAL
    (tmp_path / "mine.yaml").write_text(MINIMAL.replace(old, new, 1))
    with pytest.raises(SpecError) as caught:
        read(tmp_path / "mine.yaml")
    assert message in str(caught.value)


def test_a_setting_of_an_entry_is_found_wrong_where_it_stands(tmp_path: Path) -> None:
    wrong = MINIMAL.replace("variant: {step", "variant: {pool: {research: {kv_policy: {kept: 2}}}, step")
    (tmp_path / "mine.yaml").write_text(wrong)
    with pytest.raises(
        SpecError, match=r"mine.yaml:12:43: systems.0.variant.pool.research.kv_policy.kept: must be less"
    ):
        read(tmp_path / "mine.yaml")


def test_a_setting_of_what_could_be_otherwise_is_found_wrong_where_it_stands(tmp_path: Path) -> None:
    wrong = MINIMAL.replace(
        "  base:",
        "  inputs: [{what: x, source: assumed, otherwise: [{base: {pool: {research: {kv_policy: {kept: 2}}}}}]}]\n"
        "  base:",
    )
    (tmp_path / "mine.yaml").write_text(wrong)
    at = r"mine.yaml:11:89: systems.0.inputs.0.otherwise.0.base.pool.research.kv_policy.kept: must be less"
    with pytest.raises(SpecError, match=at):
        read(tmp_path / "mine.yaml")


def test_one_name_stands_for_one_system() -> None:
    family = Systems.from_text(MINIMAL)
    with pytest.raises(SpecError, match=r"other.yaml: one: one is also defined in mine.yaml"):
        list(entries([family, family.model_copy(update={"name": "other"})]))
    with pytest.raises(SpecError, match="two systems are called one"):
        Systems.from_text(MINIMAL + MINIMAL[MINIMAL.index("- name") :])


def test_settings_are_merged_key_by_key_but_kinds_replace_one_another() -> None:
    under = {"arrivals": {"kind": "poisson", "rate_rps": 2}, "prompt": 5, "pool": {"a": 1, "b": [1, 2]}}
    over = {"arrivals": {"kind": "closed_loop", "users": 1}, "pool": {"b": [3]}, "prompt": None}
    assert merged(under, over) == {"arrivals": {"kind": "closed_loop", "users": 1}, "pool": {"a": 1, "b": [3]}}
