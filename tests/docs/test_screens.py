"""The sheets of pages in docs/screens are of all kinds that are drawn, and small."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages import PAGES
from benchmarks.screens import name_of
from benchmarks.sheets import FOLDER, MOST_BYTES


def test_there_is_a_sheet_of_every_kind_of_page() -> None:
    assert {file.stem for file in FOLDER.glob("*.png")} == {name_of(Path("runs") / page) for page in PAGES}
    assert sum(file.stat().st_size for file in FOLDER.glob("*.png")) <= MOST_BYTES
    listed = (FOLDER / "README.md").read_text("utf-8")
    assert all(f"]({file.name})" in listed for file in FOLDER.glob("*.png"))
