"""docs/words.md: every word has one row and stands in the code; words that were replaced do not come back."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.docs import reading
from tests.docs.reading import DOCS

DOCUMENT = reading.text(DOCS / "words.md")
WORDS = [row for table in reading.tables(DOCUMENT) for row in table if "word" in row]
RENAMED = [row for table in reading.tables(DOCUMENT) for row in table if "was" in row]

NEVER = ("lane", "gang", "wire", "luck", "in vain", "handoff", "stranded", "told", "stir")
"""Nowhere in the package, comments and docstrings included."""

NO_NAMES = ("lane", "gang", "luck", "told", "stir", "others", "mine", "found", "levels", "uneven", "in_vain", "again")
"""No class, function, field, parameter or variable."""

KEPT = {"uneven_s"}
"""Keys of files whose words are those of an earlier time."""


def test_each_word_has_one_meaning() -> None:
    counts = Counter(word.strip() for row in WORDS for word in row["word"].split(","))
    assert [word for word, count in counts.items() if count > 1] == []
    assert len(counts) > 90
    assert all(row["meaning"] for row in WORDS)


@pytest.mark.parametrize("row", WORDS, ids=lambda row: row["word"])
def test_a_word_stands_in_the_code(row: dict[str, str]) -> None:
    known = reading.defined() | {"summary.json", "itl"}
    assert reading.quoted(row["code"])
    assert [name for name in reading.quoted(row["code"]) if name not in known] == []


def test_what_replaced_a_word_has_a_row() -> None:
    words = {word.strip() for row in WORDS for word in row["word"].split(",")}
    nouns = {row["is"] for row in RENAMED} & words
    assert {"engine core", "DP group", "KV connector", "acceptance sampler", "discarded", "draft depth"} <= nouns


@pytest.mark.parametrize("word", NEVER)
def test_a_replaced_word_is_gone(word: str) -> None:
    pattern = re.compile(rf"(?<![a-z]){word}s?(?![a-z])", re.IGNORECASE)
    assert [str(path) for path in reading.sources() if pattern.search(reading.text(path))] == []


@pytest.mark.parametrize("word", NO_NAMES)
def test_a_replaced_word_is_no_name(word: str) -> None:
    parts = re.compile(rf"(^|_){word}s?($|_)", re.IGNORECASE)
    names = {name.rpartition(".")[2] for name in reading.defined()} - KEPT
    assert sorted(name for name in names if parts.search(name)) == []
