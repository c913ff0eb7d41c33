"""The pictures in README.md are of the pages that its commands write today."""

from __future__ import annotations

import struct
import zlib

import pytest

from benchmarks.picture import DOCS, PICTURES, SIGNATURE, Picture, chunks, inputs_hash, mark, marked


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_was_drawn_from_the_inputs_of_today(picture: Picture) -> None:
    file = DOCS / f"{picture.name}.png"
    assert mark(file.read_bytes()) == inputs_hash(picture.inputs()), f"{file} is of other inputs; make picture"
    assert file.stat().st_size < 400_000
    assert f"(docs/{file.name})" in (DOCS.parent / "README.md").read_text("utf-8")


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
