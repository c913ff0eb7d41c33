"""docs/architecture.md: its floors are those of the import law, in an order that goes one way, and its names exist."""

from __future__ import annotations

from tests.docs import reading
from tests.docs.reading import DOCS
from tests.package.test_import_law import LAW

DOCUMENT = reading.text(DOCS / "architecture.md")
TABLES = reading.tables(DOCUMENT)
FLOORS = {row["floor"]: row for table in TABLES for row in table if "floor" in row}


def below(floor: str) -> set[str]:
    """What the table says a floor stands on; `x and below` is x and all that x stands on."""
    names: set[str] = set()
    for part in FLOORS[floor]["stands on"].removesuffix(" and below").split(","):
        if name := part.strip():
            names.add(name)
    if "and below" in FLOORS[floor]["stands on"]:
        names |= {further for name in names for further in below(name)}
    return names


def test_the_floors_are_those_of_the_law() -> None:
    assert set(FLOORS) == set(LAW)


def test_each_stands_on_what_the_law_allows() -> None:
    for floor, allowed in LAW.items():
        if FLOORS[floor]["stands on"] == "everything":
            assert allowed >= set(LAW) - {floor, "testing"}
        else:
            assert below(floor) == allowed, floor


def test_floors_are_listed_from_the_ground_up() -> None:
    seen: set[str] = set()
    for floor in FLOORS:
        assert LAW[floor] <= seen, floor
        seen.add(floor)


def test_state_is_where_the_document_says() -> None:
    rows = [row for table in TABLES for row in table if "state" in row]
    assert rows
    for row in rows:
        for name in reading.quoted(row["where"]) + reading.quoted(row["who changes it"]):
            assert name in reading.defined(), name


def test_questions_lead_to_modules() -> None:
    rows = [row for table in TABLES for row in table if "question" in row]
    assert rows
    assert [name for row in rows for name in reading.quoted(row["module"]) if name not in reading.module_names()] == []


def test_steps_of_a_request_name_what_exists() -> None:
    names = reading.quoted(reading.section(DOCUMENT, "One request"))
    names = [name for name in names if name not in reading.module_names() and not name.startswith("simtune")]
    assert len(names) > 12
    floors = set(LAW) | {"simulate", "optimize"}
    assert [name for name in names if name not in reading.defined() | floors] == []
