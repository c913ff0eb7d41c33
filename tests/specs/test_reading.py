"""The one door through which files come in: nothing that is no file, too large, a bomb, or no strict text gets by."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import socket
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.errors import SimtuneError, SpecError, UsageError
from simtune.specs import input_files, room, yamlfile
from simtune.specs.input_files import (
    JsonError,
    csv_table,
    json_lines,
    parse_json,
    read_arrays,
    read_bytes,
    read_packed_text,
)

MEGABYTE = 1 << 20


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files may have a megabyte."""
    monkeypatch.setenv(input_files.ENVIRONMENT, str(MEGABYTE))


# --- files ------------------------------------------------------------------------------------------------


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.getcwd()
        os.chdir(tmp_path)  # the name of a socket must be short
        try:
            listening.bind("socket")
        finally:
            os.chdir(here)
        for path, kind in (
            (tmp_path / "pipe", "a pipe"),
            (tmp_path / "socket", "a socket"),
            (Path("/dev/zero"), "a device"),
            (tmp_path, "a folder"),
        ):
            with pytest.raises(UsageError, match=f"{path}: is {kind}, a (regular )?file was expected"):
                read_bytes(path)


def test_a_name_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(UsageError, match="is no name of a file"):
        read_bytes(Path("a\0b"))
    with pytest.raises(UsageError, match="cannot be read"):
        read_bytes(Path("x" * 300))


def test_a_file_is_as_large_as_is_said(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"x" * MEGABYTE)
    assert len(read_bytes(path)) == MEGABYTE
    path.write_bytes(b"x" * (MEGABYTE + 1))
    with pytest.raises(UsageError, match=r"t\.csv: is larger than 1\.0 MiB; cut it, or set SIMTUNE_MAX_FILE_BYTES"):
        read_bytes(path)
    for wrong in ("many", "-1", "", "1e6", "9" * 40):
        monkeypatch.setenv(input_files.ENVIRONMENT, wrong)
        with pytest.raises(UsageError, match=r"SIMTUNE_MAX_FILE_BYTES=.*: must be a number of bytes"):
            read_bytes(path)


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path, small: None) -> None:
    path = tmp_path / "bomb.csv.gz"
    path.write_bytes(gzip.compress(b"0" * (50 * MEGABYTE)))
    assert path.stat().st_size < MEGABYTE / 10
    with pytest.raises(SpecError, match=r"bomb\.csv\.gz: is larger than 1\.0 MiB when unpacked; cut it"):
        read_packed_text(path)
    path.write_bytes(gzip.compress(b"0" * (MEGABYTE // 2)) * 3)
    with pytest.raises(SpecError, match="is larger than"):
        read_packed_text(path)
    path.write_bytes(gzip.compress(b"ab") + gzip.compress(b"cd") + b"\0" * 8)
    assert read_packed_text(path) == "abcd"


def test_text_that_is_not_utf_8_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("\ufeffa\nb\nc".encode() + b"\xff")
    with pytest.raises(SpecError, match=r"t\.csv:3: not a UTF-8 text file"):
        read_packed_text(path)
    path.write_bytes("\ufeffa".encode())
    assert read_packed_text(path) == "a"


# --- YAML -------------------------------------------------------------------------------------------------


def test_aliases_are_counted() -> None:
    levels = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(SpecError, match=r"f\.yaml:5:\d+: its aliases stand for more than 100,000 values"):
        yamlfile.parse("\n".join(levels), "f.yaml")
    with pytest.raises(SpecError, match=r"f\.yaml:1:\d+: an alias contains itself"):
        yamlfile.parse("a: &a [1, *a]", "f.yaml")
    deep = ["a0: &a0 " + "[" * 100 + "]" * 100, *(f"a{i}: &a{i} {'[' * 90}*a{i - 1}{']' * 90}" for i in range(1, 50))]
    with pytest.raises(SpecError, match="nested deeper than 200 levels"):
        yamlfile.parse("\n".join(deep), "f.yaml")
    assert yamlfile.parse("a: &a {x: 1}\nb: [*a, *a]", "f.yaml").data["b"] == [{"x": 1}, {"x": 1}]


@pytest.mark.parametrize("text", ["!!timestamp 2023-01-01", "!!set {a}", "!!binary YQ==", "!!omap [a: 1]", "!x y"])
def test_a_tag_makes_nothing(text: str) -> None:
    with pytest.raises(SpecError, match=r"f\.yaml:1:4: not valid YAML: could not determine a constructor"):
        yamlfile.parse(f"a: {text}", "f.yaml")


@pytest.mark.parametrize("text", ["1" * 30, "-" + "9" * 19, "0x" + "f" * 100_000, "0o" + "7" * 500])
def test_a_whole_number_has_64_bits(text: str) -> None:
    with pytest.raises(SpecError, match=r"f\.yaml:1:4: not valid YAML: .*larger than any number of 64 bits"):
        yamlfile.parse(f"a: {text}", "f.yaml")


# --- JSON -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": NaN}', "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("[1e999]", "1e999 is larger than any number of 64 bits"),
        ("[" + "9" * 30 + "]", "larger than any number of 64 bits"),
        ("[" + "9" * 9999 + "]", r"\(9,999 characters\) is larger"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' stands there twice"),
        ("[" * 201 + "]" * 201, "nested deeper than 200 levels"),
        ("[" * 99_999, "nested deeper than 200 levels"),
        ('{"a":' * 99_999, "nested deeper than 200 levels"),
        ("", "Expecting value"),
    ],
)
def test_json_is_strict(text: str, words: str) -> None:
    with pytest.raises(JsonError, match=words):
        parse_json(text)


def test_json_that_is_right_is_read() -> None:
    values: tuple[Any, ...] = ([[]] * 300, {"a": -(2**63) + 1, "b": [1.5, None, "x", {}]}, "[" * 300)
    for value in values:
        assert parse_json(json.dumps(value)) == value


def test_json_lines_are_objects_and_keep_their_numbers() -> None:
    assert list(json_lines('{"a": 1}\n\n{"b": 2}\r\n', "f")) == [(1, {"a": 1}), (3, {"b": 2})]
    with pytest.raises(SpecError, match=r"f:3: an object was expected"):
        list(json_lines('{"a": 1}\n\n[2]', "f"))
    with pytest.raises(SpecError, match=r"f:2:2: not valid JSON"):
        list(json_lines('{"a": 1}\n{]', "f"))


# --- CSV --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1," + "x" * 200_000, r"f:2: not valid CSV: field larger than field limit"),
        ("a,b,a\n1,2,3\n", r"f:1: a: 2 columns have this name"),
        ("a,b\n1,2\n\n1\n", r"f:4: has 1 values, the header names 2"),
        ('a\n"x', r"f:2: not valid CSV: unexpected end of data"),
    ],
)
def test_a_table_is_whole(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        csv_table(text, "f")


def test_a_table_that_is_too_large_for_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "memory", lambda: (1e9, 100 * 2.0**20))
    with pytest.raises(UsageError, match=r"f: its 2,000,000 cells need about 122\.1 MiB of memory, and 100\.0 MiB are"):
        csv_table("1,2\n" * 1_000_000, "f")


# --- arrays -----------------------------------------------------------------------------------------------


def _npz(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in members.items():
            archive.writestr(f"{name}.npy", raw)
    return file.getvalue()


def _npy(array: object) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(array), allow_pickle=True)
    return file.getvalue()


def test_arrays_are_read_as_they_were_saved() -> None:
    file = io.BytesIO()
    np.savez(file, a=np.arange(6.0).reshape(2, 3), b=np.zeros(0))
    found = read_arrays(Path("x.npz"), file.getvalue())
    assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["b"].shape == (0,)


def test_arrays_that_are_none_are_refused(small: None) -> None:
    claims_more = _npy(np.zeros(3)).replace(b"(3,)", b"(9,)")
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as archive:
        archive.writestr("a.npy", _npy(np.zeros(3)))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("a.npy", _npy(np.zeros(3)))
    for raw, words in (
        (_npz(a=_npy(np.array([{}, []], dtype=object))), "Python objects, which are never unpickled"),
        (_npz(a=pickle.dumps([1])), "cannot be read as an array file"),
        (_npz(a=claims_more), r"says it is of shape \(9,\), and holds 24 bytes"),
        (_npz(a=_npy(np.zeros(MEGABYTE))), "is larger than 1.0 MiB"),
        (b"PK\x03\x04" + b"\0" * 50, "cannot be read as an array file"),
        (b"", "cannot be read as an array file"),
        (
            _npz(a=_npy(np.zeros(3)).replace(b"NUMPY\x01", b"NUMPY\x02")),
            "is of another version of numpy's format than 1.0",
        ),
        (twice.getvalue(), "it holds two arrays of one name"),
    ):
        with pytest.raises(SpecError, match=f"^x.npz: .*{words}"):
            read_arrays(Path("x.npz"), raw)


@given(st.data())
def test_damaged_arrays_are_refused_or_read(data: st.DataObject) -> None:
    raw = bytearray(_npz(a=_npy(np.arange(5.0)), b=_npy(np.ones((2, 2)))))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_arrays(Path("x.npz"), bytes(raw))
    except SimtuneError as error:
        said = str(error)
    else:
        said = "x.npz: "
    assert said.startswith("x.npz: ")


# --- memory -----------------------------------------------------------------------------------------------


def test_what_needs_more_memory_than_there_is_says_how_much() -> None:
    with pytest.raises(
        UsageError, match=r"^all of it need about 1\.0 EiB of memory, and [\d.]+ [GT]iB are free; do less$"
    ):
        room.need(2.0**60, "all of it", "do less")
    room.need(1000, "little", "nothing")
    assert [room.in_words(x) for x in (5, 1536, 450e12, 2.0**95)] == ["5 bytes", "1.5 KiB", "409.3 TiB", "32,768.0 YiB"]
