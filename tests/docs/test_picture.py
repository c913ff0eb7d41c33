"""The picture in README.md is of the report that the quickstart writes today."""

from __future__ import annotations

import struct
import zlib

import pytest

from benchmarks.picture import PICTURE, SIGNATURE, STUDY, chunks, inputs_hash, mark, marked
from simtune.api import load_question
from simtune.tuner.certificate import inputs_of


def test_the_picture_was_drawn_from_the_inputs_of_today() -> None:
    expected = inputs_hash(inputs_of(load_question(str(STUDY), ())))
    assert mark(PICTURE.read_bytes()) == expected, "docs/report.png is of other inputs; draw it again: make picture"


def test_the_picture_is_small() -> None:
    assert PICTURE.stat().st_size < 400_000


def test_a_mark_leaves_the_picture_as_it_is() -> None:
    bare = SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", b"13 bytes long"), (b"IDAT", b"rows"), (b"IEND", b""))
    )
    assert mark(bare) is None
    once = marked(bare, "abc")
    assert mark(once) == "abc"
    assert [chunk for chunk in chunks(once) if chunk[0] != b"tEXt"] == [*chunks(bare)]
    with pytest.raises(ValueError, match="not a PNG"):
        mark(b"GIF89a")
