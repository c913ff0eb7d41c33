"""`simtune rank`: the table, the page and the journal."""

from __future__ import annotations

import json

import pytest

import simtune.validation.published
from simtune.validation.published import Entry
from simtune.validation.published.collection import read
from tests.cli.conftest import Desk, call
from tests.reproduce.test_own_load import FILE, LOAD


def test_rank_prints_sorted_gains_writes_a_page_and_continues_from_a_journal(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.write("mine.yaml", FILE)
    family = read(desk.folder / "mine.yaml")
    entries = [Entry(family, system) for system in family.systems]
    monkeypatch.setattr(simtune.validation.published, "select", lambda names: entries)
    desk.write("load.yaml", json.dumps(LOAD.to_data()))
    where = ("rank", "--model", "llama-3.2-1b", "--hardware", "l40s", "--workload", "load.yaml", "--jobs", 1, "-q")
    first = call(*where, "--journal", "kept.jsonl", "--html", "rank.html")
    assert first.code == 0, first.err
    words = " ".join(first.out.split())
    assert words.index("More seats") < words.index("A slower host")
    assert "Left out: 3 systems" in words
    assert "More seats" in (desk.folder / "rank.html").read_text()
    monkeypatch.setattr(simtune.validation.published, "own_gains", lambda entries, own, jobs: iter(()))
    again = call(*where, "--journal", "kept.jsonl", "--json")
    assert [g["system"] for g in again.json["gains"]][:2] == ["seats", "slower-host"]
    assert again.json["gains"][0]["low"] <= again.json["gains"][0]["gain"] <= again.json["gains"][0]["high"]
