"""Files that are JSON after their comments: the same values as by the parser of YAML, and the same places."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.errors import SpecError
from simtune.specs import yamlfile

PRINTABLE = [chr(code) for code in range(0x2100) if chr(code).isprintable()]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(PRINTABLE, max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(PRINTABLE, max_size=6), inner, max_size=4),
    max_leaves=30,
)  # fmt: skip


@given(st.dictionaries(st.text(PRINTABLE, max_size=6), JSON, max_size=5), st.booleans())
def test_json_is_what_it_is_as_yaml(data: dict[str, Any], wide: bool) -> None:
    text = yamlfile.dump_json(data, "a comment\nof two lines") if wide else json.dumps(data)
    document = yamlfile.parse(text, "a.json")
    assert repr(document.data) == repr(data)
    if document.json_text is not None:
        assert repr(yamlfile._parsed(text, "a.json").data) == repr(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "a": 2}', "f:2:2: a: this key already stands at line 1; keep one of the two"),
        ('{"a": NaN}', None),
        ('{"a": "\\ud800"}', "f:1:"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", "nested deeper than 200 levels"),
        ('{"a": 99999999999999999999}', "larger than any number of 64 bits"),
    ],
)
def test_json_that_is_not_strict_is_read_as_yaml(text: str, message: str | None) -> None:
    if message is None:
        assert yamlfile.parse(text, "f").data == {"a": "NaN"}
        return
    with pytest.raises(SpecError, match=re.escape(message)):
        yamlfile.parse(text, "f")


def test_a_problem_in_json_has_its_place() -> None:
    document = yamlfile.parse('# a comment\n{\n  "a": {"b": [1,\n    2]}\n}', "f")
    assert document.json_text is not None
    assert document.position(("a", "b", 1)) == (4, 5)
    assert document.position(("a", "c")) == (3, 3)


def test_a_long_list_fills_its_lines() -> None:
    text = yamlfile.dump_json({"x": [1e-05 * n for n in range(60)], "y": [{"z": "a-b " * 60}, 1], "e": [], "f": {}})
    assert max(len(line) for line in text.splitlines() if "a-b" not in line) <= 110
    assert yamlfile.parse(text, "f").data["x"] == [1e-05 * n for n in range(60)]
