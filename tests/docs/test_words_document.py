"""docs/words.md: every word has one row and stands in the code; words that were replaced do not come back."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest

from tests.docs import reading
from tests.docs.reading import DOCS, ROOT

DOCUMENT = reading.text(DOCS / "words.md")
WORDS = [row for table in reading.tables(DOCUMENT) for row in table if "word" in row]
RENAMED = [row for table in reading.tables(DOCUMENT) for row in table if "was" in row]

REPLACED = (
    *("lane", "gang", "wire", "luck", "in_vain", "handoff", "stranded", "stir", "recall", "draft_level", "uneven"),
    *("told", "others", "mine", "found", "again"),
)
"""Words that are no class, function, field, parameter or variable, nor a part of its name. Prose may use them."""

KEPT = {
    "uneven_s": "a key of profiles",
    "found_by": "a key of transfer.yaml",
    "wire": "the verb, of the parts of a world",
}
"""Names in which such a word says something else, or that files have."""


@cache
def names() -> list[tuple[str, str]]:
    """Return (file, name) of everything in the package that has a name."""
    return [
        (str(path.relative_to(ROOT)), name)
        for path in reading.sources()
        for name in sorted(reading.names(reading.parsed(path)) - set(KEPT))
    ]


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


@pytest.mark.parametrize("word", REPLACED)
def test_a_replaced_word_is_no_name(word: str) -> None:
    parts = re.compile(rf"(^|_){word}s?($|_)", re.IGNORECASE)
    assert [(file, name) for file, name in names() if parts.search(name)] == []
