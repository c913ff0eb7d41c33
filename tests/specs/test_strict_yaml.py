"""What is written is what is read: the traps of YAML 1.1 do not snap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simtune.errors import SpecError, UsageError
from simtune.specs import yamlfile
from simtune.specs.input_files import read_text


def read(text: str) -> object:
    return yamlfile.parse(text, "f.yaml").data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e9", 1e9),
        ("1E-3", 1e-3),
        ("+2.5e+1", 25.0),
        (".5", 0.5),
        ("12", 12),
        ("0x1F", 31),
        ("0o17", 15),
        ("017", 17),
        ("NO", "NO"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("12:30:00", "12:30:00"),
        ("2023-11-16", "2023-11-16"),
        ("1_000", "1_000"),
        ("~", None),
        (".inf", float("inf")),
    ],
)
def test_a_scalar_is_what_it_looks_like(text: str, value: object) -> None:
    found = read(f"x: {text}")
    assert found == {"x": value}
    assert type(found["x"]) is type(value)


def test_a_repeated_key_is_an_error_that_names_both_lines() -> None:
    with pytest.raises(SpecError) as error:
        read("a:\n  b: 1\n  c: 2\n  b: 3\n")
    assert str(error.value) == "f.yaml:4:3: a.b: this key already stands at line 2; keep one of the two"


def test_json_is_read_by_the_same_door_and_repeated_keys_are_found_there_too() -> None:
    assert read('{"a": [1, 2.5, null, "x"]}') == {"a": [1, 2.5, None, "x"]}
    with pytest.raises(SpecError, match=r"f\.yaml:1:10: a: this key already stands at line 1"):
        read('{"a": 1, "a": 2}')


@pytest.mark.parametrize("text", ["a:\n\tb: 1\n", "a: [1, 2\n", "a: b: c\n", "a: 'x\n", "%", "a: &x 1\nb: *y\n"])
def test_broken_yaml_is_one_error_with_its_place(text: str) -> None:
    with pytest.raises(SpecError, match=r"^f\.yaml:\d+:\d+: not valid YAML: "):
        read(text)


def test_control_characters_and_tags_are_errors_not_objects() -> None:
    with pytest.raises(SpecError, match="not valid YAML"):
        read("a: \x00\n")
    with pytest.raises(SpecError, match="not valid YAML"):
        read("a: !!python/object/apply:os.getcwd []\n")


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("name: caf\u00e9\n".encode("latin-1"))
    with pytest.raises(SpecError, match=r"latin\.yaml:1: not a UTF-8 text file \(.* at byte 9\); save it as UTF-8"):
        read_text(latin)
    with pytest.raises(UsageError, match=r"none\.yaml: no such file"):
        read_text(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="is a folder"):
        read_text(tmp_path)


def test_a_position_is_that_of_the_deepest_known_part() -> None:
    document = yamlfile.parse("a:\n  - x: 1\n  - y: 2\n", "f.yaml")
    assert document.position(["a", 1, "y"]) == (3, 5)
    assert document.position(["a", 1, "missing"]) == (3, 5)
    assert document.position(["a"]) == (1, 1)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), PLAIN, max_size=4))
def test_what_is_dumped_reads_back_exactly(data: dict[str, object]) -> None:
    again = read(yamlfile.dump(data))
    assert again == data
    assert repr(again) == repr(data)  # 1 and 1.0, true and 1 are told apart


@pytest.mark.parametrize("text", ["[" * 100_000, "- " * 50_000 + "1", "{a: " * 300 + "1" + "}" * 300])
def test_nesting_without_end_is_refused_before_it_fills_the_stack(text: str) -> None:
    with pytest.raises(SpecError, match=r"f.yaml:1:\d+: not valid YAML: nested deeper than 200 levels"):
        read(text)


@pytest.mark.parametrize("text", ["[" * 2000 + "]" * 2000, "a:\n  " + "[" * 300 + "]" * 300])
def test_nesting_is_reported_alike_whatever_the_parser_says_of_it(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML 6.0.4 limits nesting itself; earlier releases leave it to their caller."""

    def refuses(self: Any) -> None:
        raise yaml.scanner.ScannerError("while increasing flow level", None, "exceeded maximum nesting depth", None)

    with pytest.raises(SpecError, match="nested deeper than 200 levels") as by_us:
        read(text)
    monkeypatch.setattr(yamlfile._Loader, "get_single_node", refuses)
    with pytest.raises(SpecError) as by_parser:
        read(text)
    assert str(by_parser.value) == str(by_us.value)


def test_nesting_as_deep_as_files_go_is_read() -> None:
    assert read("[" * 150 + "1" + "]" * 150)
