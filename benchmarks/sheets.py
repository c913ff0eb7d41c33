"""Contact sheets of pages, small enough for the repository: docs/screens, drawn by `make screens`.

A sheet is one picture of one kind of page: on a desk and on a phone, light and dark, side by side at their full size,
the top of what is long. Pictures have few colours. docs/screens/README.md says what each shows; both change with the
pages only.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.browser import Browser
from benchmarks.picture import DOCS, SIGNATURE, chunk

FOLDER = DOCS / "screens"
MOST_BYTES = 2_500_000
"""Of all sheets together."""
CUT = 1100
"""Height of a sheet in pixels; pages that are longer are cut."""
GUTTER = 24
BETWEEN = (128, 128, 128)
"""The colour around and below pages."""
COLOURS = 16
READ = """(async () => {
  const image = new Image(); image.src = "data:image/png;base64,%s"; await image.decode();
  const drawn = new OffscreenCanvas(image.width, image.height).getContext("2d"); drawn.drawImage(image, 0, 0);
  const raw = drawn.getImageData(0, 0, image.width, image.height).data;
  const packed = new Blob([raw]).stream().pipeThrough(new CompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(packed).arrayBuffer());
  let text = ""; for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
  return [image.height, image.width, btoa(text)];
})()"""  # noqa: E501

Pixels = NDArray[np.uint8]
"""Rows, columns, red, green and blue."""


class Sheet(NamedTuple):
    """A picture of a kind of page, and how much of it that is."""

    name: str
    words: str
    """What the page is of."""
    heights: tuple[int, ...]
    """Of the whole page in each view, in pixels."""

    def row(self) -> str:
        """Of the table in docs/screens/README.md."""
        shown = f"the first {CUT:,} px of {max(self.heights):,}" if max(self.heights) > CUT else "the whole page"
        return f"| [{self.name}]({self.name}.png) | {self.words} | {shown} |"


def pixels(browser: Browser, png: bytes) -> Pixels:
    """What a picture shows, by the browser's own reading of it."""
    height, width, packed = browser.said(READ % base64.b64encode(png).decode())
    flat = np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=np.uint8)
    return flat.reshape(height, width, 4)[:, :, :3]


def side_by_side(views: Sequence[Pixels]) -> Pixels:
    """Pictures in a row from the top, down to the cut or the end of the longest."""
    shown = [view[:CUT] for view in views]
    height = max(len(view) for view in shown)
    width = sum(view.shape[1] for view in shown) + GUTTER * (len(shown) - 1)
    sheet = np.full((height, width, 3), BETWEEN, dtype=np.uint8)
    left = 0
    for view in shown:
        sheet[: len(view), left : left + view.shape[1]] = view
        left += view.shape[1] + GUTTER
    return sheet


def reduced(sheet: Pixels, most: int = COLOURS) -> tuple[Pixels, Pixels]:
    """(palette, number of the colour of each pixel) of the nearest picture with so few colours: boxes of colours are
    cut at their median until there are enough (Heckbert, SIGGRAPH 1982), each cut where most is lost."""
    packed = sheet.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], dtype=np.uint32)
    known, inverse, counts = np.unique(packed, return_inverse=True, return_counts=True)
    colours = np.stack([known >> 16, known >> 8 & 255, known & 255], axis=1).astype(np.float64)
    weights = np.sqrt(counts)  # small letters count beside wide grounds
    boxes = [np.arange(len(known))]
    while len(boxes) < most:
        spread = [np.ptp(colours[box], axis=0).max() * weights[box].sum() for box in boxes]
        worst = int(np.argmax(spread))
        box = boxes[worst]
        if len(box) < 2 or not spread[worst]:
            break
        axis = int(np.argmax(np.ptp(colours[box], axis=0)))
        order = box[np.argsort(colours[box, axis], kind="stable")]
        below = np.cumsum(weights[order])
        middle = int(np.clip(np.searchsorted(below, below[-1] / 2), 1, len(order) - 1))
        boxes[worst : worst + 1] = [order[:middle], order[middle:]]
    commonest = [colours[box[np.argmax(counts[box])]] for box in boxes]
    palette = np.array(commonest)
    nearest = np.array([np.argmin(((palette - colour) ** 2).sum(axis=1)) for colour in colours], dtype=np.uint8)
    return palette.astype(np.uint8), nearest[inverse].reshape(sheet.shape[:2])


def encoded(palette: Pixels, indices: Pixels) -> bytes:
    """A PNG with a palette (ISO/IEC 15948), eight bits per pixel, rows as they are."""
    height, width = indices.shape
    rows = np.hstack([np.zeros((height, 1), dtype=np.uint8), indices])
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = (
        (b"IHDR", header),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    return SIGNATURE + b"".join(chunk(kind, data) for kind, data in parts)


def draw(browser: Browser, name: str, words: str, views: Sequence[Sequence[bytes]], folder: Path = FOLDER) -> Sheet:
    """Write the sheet of a page, of whose views the pictures are given, each from the top down."""
    drawn = [[pixels(browser, part) for part in view] for view in views]
    heights = tuple(sum(len(part) for part in view) for view in drawn)
    sheet = side_by_side([view[0] for view in drawn])
    (folder / f"{name}.png").write_bytes(encoded(*reduced(sheet)))
    return Sheet(name, words, heights)


def clear(folder: Path = FOLDER) -> None:
    """Take away what was drawn before."""
    folder.mkdir(exist_ok=True)
    for old in (*folder.glob("*.png"), *folder.glob("*.md")):
        old.unlink()


def list_all(sheets: Sequence[Sheet], folder: Path = FOLDER) -> list[str]:
    """Write the list of what was drawn; what is wrong where it has become too much for the repository."""
    (folder / "README.md").write_text(index(sheets), "utf-8")
    if (size := sum(file.stat().st_size for file in folder.glob("*.png"))) > MOST_BYTES:
        return [f"{folder}: {size:,} bytes of pictures, more than {MOST_BYTES:,}; cut them shorter"]
    return []


def index(sheets: Sequence[Sheet]) -> str:
    """docs/screens/README.md."""
    rows = "\n".join(sheet.row() for sheet in sheets)
    return f"""# Pages as people see them

Written by `make screens`. Each picture is one kind of page at the width of a desk (1400 px) light and dark, then of a
phone (420 px) light and dark, pixel for pixel, in {COLOURS} colours. The same command fails on what is cut, overlaps or
is too faint in any of these views or on paper. Hostile names are as long as names can be, hold markup, or run from
right to left.

| picture | page | shown |
|---|---|---|
{rows}
"""
