"""Images, videos and recordings of the requests of a trace: columns `images`, `videos` and `audio`.

JSON lines have lists of objects, `"images": [{"width": 1280, "height": 720, "name": "logo"}]`; cells of CSV have items
with spaces between them, `1280x720#logo 800x600`, videos as `640x360@12.5` (seconds) and recordings as `12.5`. Items
of the same kind and name are the same one. Azure's multimodal trace has numbers of images only (`NumImages`).

Items of a request are all those of its prompt, as `prompt_tokens` counts all of its text. Where turns state only what
they add (Mooncake's keys with `session_id` and `delay`), a turn adds items as well, which later turns read again.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from simtune.arrays import Ints
from simtune.specs.media import MOST_ITEMS, MOST_SECONDS
from simtune.specs.tower import MediaKind
from simtune.specs.vision import MOST_PIXELS

MEDIA_COLUMNS: dict[str, MediaKind] = {"images": "image", "videos": "video", "audio": "audio"}
"""Kinds of media by the names of their columns, in order of their places in a prompt."""
IMAGE_COUNTS = ("num_images", "numimages")
"""Names of a column with the number of images of each request, whatever their case."""
FRAME_RATE = 30.0
"""Frames per second of the files of videos, unless given."""


class TraceItem(NamedTuple):
    """An image, video or recording of a request of a trace; sides in pixels, 0 if its kind has none."""

    kind: MediaKind
    name: str | None = None
    """Items of one kind with equal names are the same one; None: unlike every other."""
    width: int = 0
    height: int = 0
    seconds: float = 0.0
    frame_rate: float = FRAME_RATE
    fps: float | None = None
    """Frames per second that are sampled; those of the model's processor unless given."""
    frames: int | None = None
    """Frames that the client sends in place of a file."""
    at: int = 0
    """Tokens of the prompt's text before it."""
    sound: bool = False
    """True if the sound of a video is read too, as a recording of its length (`use_audio_in_video`)."""


class Faults(Protocol):
    """Collector of the problems of a file."""

    def add(self, message: str, line: int | None, key: str = "") -> None:
        """Add a problem."""


_ITEMS: dict[MediaKind, str] = {"image": "an image", "video": "a video", "audio": "a recording"}
_REQUIRED: dict[MediaKind, tuple[str, ...]] = {
    "image": ("width", "height"),
    "video": ("width", "height", "seconds"),
    "audio": ("seconds",),
}
_OPTIONAL: dict[MediaKind, tuple[str, ...]] = {
    "image": ("name", "at"),
    "video": ("name", "frame_rate", "fps", "frames", "at", "sound"),
    "audio": ("name", "at"),
}
_WHOLE = {"width": MOST_PIXELS, "height": MOST_PIXELS, "frames": 100_000}
"""Largest values of keys with whole numbers from 1 on."""
_ABOVE_0 = {"seconds": MOST_SECONDS, "frame_rate": 1000, "fps": 1000}
"""Largest values of keys with numbers above 0."""

_CELLS: dict[MediaKind, tuple[re.Pattern[str], str]] = {
    "image": (re.compile(r"(?P<width>\d+)x(?P<height>\d+)(#(?P<name>\S+))?"), "1280x720 or 1280x720#name"),
    "video": (
        re.compile(r"(?P<width>\d+)x(?P<height>\d+)@(?P<seconds>\d+(\.\d+)?)(#(?P<name>\S+))?"),
        "640x360@12.5 (seconds) or 640x360@12.5#name",
    ),
    "audio": (re.compile(r"(?P<seconds>\d+(\.\d+)?)(#(?P<name>\S+))?"), "12.5 (seconds) or 12.5#name"),
}


def read_media(
    values: Mapping[str, Sequence[Any]], lines: Sequence[int], faults: Faults
) -> tuple[tuple[TraceItem, ...], ...] | None:
    """Return the items of each request by the text before them, of equal ones images first, then videos, then
    recordings; None without such columns.

    `values` are the columns of a trace by name, `lines` the line of each request. Problems are added to `faults`, each
    with its line and its key.
    """
    columns = [column for column in MEDIA_COLUMNS if column in values]
    if not columns:
        return None
    rows = zip(lines, *(values[column] for column in columns), strict=True)
    return tuple(
        _in_order(
            item for column, cell in zip(columns, cells, strict=True) for item in _items(column, cell, line, faults)
        )
        for line, *cells in rows
    )


def _in_order(items: Iterable[TraceItem]) -> tuple[TraceItem, ...]:
    """Return items by the text before them; of equal ones in the order given."""
    return tuple(sorted(items, key=lambda item: item.at))


def check_places(
    media: Sequence[Sequence[TraceItem]], text_tokens: Sequence[int], lines: Sequence[int], faults: Faults
) -> None:
    """Add a problem to `faults` for each item that stands behind the text of its request, of which there are
    `text_tokens`."""
    columns = {kind: column for column, kind in MEDIA_COLUMNS.items()}
    for items, tokens, line in zip(media, text_tokens, lines, strict=True):
        for item in items:
            if item.at > tokens:
                message = f"at ({item.at:,}) exceeds the {tokens:,} tokens of text; lower it"
                faults.add(message, line, columns[item.kind])


def in_contexts(
    media: Sequence[Sequence[TraceItem]], text_before: Sequence[int], lines: Sequence[int], first: Ints
) -> tuple[tuple[TraceItem, ...], ...]:
    """Return all items in the prompt of each turn, given those that each turn adds.

    `text_before` are the tokens of text before what each turn adds, and `first` the rows at which sessions begin, and
    at the end the number of all. An item without a name that later turns read again is given one by its line.
    """
    names = {item.name for items in media for item in items}
    rows: list[tuple[TraceItem, ...]] = []
    for begin, end in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        context: tuple[TraceItem, ...] = ()
        for row in range(begin, end):
            for number, item in enumerate(media[row]):
                name = item.name
                if name is None and row + 1 < end:
                    name = _free_name(f"line {lines[row]}, {number}", names)
                context += (item._replace(name=name, at=text_before[row] + item.at),)
            rows.append(context)
    return tuple(rows)


def _free_name(name: str, names: set[str | None]) -> str:
    """Return a name that no item has, and add it to `names`."""
    while name in names:
        name += "'"
    names.add(name)
    return name


def _items(column: str, cell: Any, line: int, faults: Faults) -> Iterator[TraceItem]:
    """Yield the items of one request and kind; problems are added to `faults`."""
    kind = MEDIA_COLUMNS[column]
    if cell is None:
        return
    entries = _of_cell(kind, cell) if isinstance(cell, str) else cell
    if not isinstance(entries, list):
        faults.add(f"must be a list of objects with {' and '.join(_REQUIRED[kind])}, not {_short(cell)}", line, column)
        return
    if len(entries) > MOST_ITEMS:
        faults.add(f"must have at most {MOST_ITEMS:,} items, not {len(entries):,}", line, column)
        return
    for number, entry in enumerate(entries):
        key = f"{column}[{number}]"
        if not isinstance(entry, dict):
            form = f"; write {_CELLS[kind][1]}" if isinstance(cell, str) else ""
            required = " and ".join(_REQUIRED[kind])
            faults.add(f"must have {required}, not {_short(entry)}{form}", line, key)
            continue
        wrong = list(_problems(kind, entry))
        for name, message in wrong:
            faults.add(message, line, f"{key}.{name}")
        if not wrong:
            yield TraceItem(kind, **{name: value for name, value in entry.items() if value is not None})


def _of_cell(kind: MediaKind, cell: str) -> list[Any]:
    """Return the items of a cell of CSV as objects; a text that is none stays as it is."""
    form, _ = _CELLS[kind]
    entries: list[Any] = []
    for text in cell.split():
        matched = form.fullmatch(text)
        if matched is None:
            entries.append(text)
            continue
        groups = {name: value for name, value in matched.groupdict().items() if value is not None}
        numbers = {name: float(x) if name == "seconds" else int(x) for name, x in groups.items() if name != "name"}
        entries.append({**numbers, **({"name": groups["name"]} if "name" in groups else {})})
    return entries


def _problems(kind: MediaKind, entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield key and message of each problem of an item."""
    required, possible = _REQUIRED[kind], (*_REQUIRED[kind], *_OPTIONAL[kind])
    for key in required:
        if entry.get(key) is None:
            yield key, f"is missing; {_ITEMS[kind]} has {', '.join(required)}"
    for key, value in entry.items():
        if key not in possible:
            yield key, f"unknown key of {_ITEMS[kind]}; its keys are {', '.join(possible)}"
        elif value is not None and (message := _wrong_value(key, value)):
            yield key, message
    if entry.get("fps") is not None and entry.get("frames") is not None:
        yield "fps", "frames that clients send are not sampled again; remove fps, or frames"


def _wrong_value(key: str, value: Any) -> str:
    """Return the problem of a value; empty without one."""
    if key == "name":
        return "" if isinstance(value, str) and value else f"must be a text, not {_short(value)}"
    if key == "sound":
        return "" if isinstance(value, bool) else f"must be true or false, not {_short(value)}"
    if key in _WHOLE:
        if type(value) is int and 1 <= value <= _WHOLE[key]:
            return ""
        return f"must be a whole number from 1 to {_WHOLE[key]:,}, not {_short(value)}"
    if key == "at":
        return "" if type(value) is int and value >= 0 else f"must be tokens of text from 0, not {_short(value)}"
    if type(value) in (int, float) and 0 < value <= _ABOVE_0[key]:
        return ""
    return f"must be above 0 and at most {_ABOVE_0[key]:,}, not {_short(value)}"


def _short(value: Any) -> str:
    return reprlib.repr(value)


def media_note(media: Sequence[Sequence[TraceItem]]) -> str:
    """Return a note on the media of a trace: how many items, in how many requests."""
    numbers = {
        column: sum(item.kind == kind for items in media for item in items) for column, kind in MEDIA_COLUMNS.items()
    }
    words = ", ".join(f"{count:,} {column}" for column, count in numbers.items() if count)
    return f"{words or 'no items'} in {sum(map(bool, media)):,} of {len(media):,} requests"


def media_entries(media: Sequence[Sequence[TraceItem]]) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the columns of a trace in JSON lines, as `read_media` reads them; kinds without items have none."""
    columns: dict[str, list[list[dict[str, Any]]]] = {}
    for column, kind in MEDIA_COLUMNS.items():
        rows = [[_entry(item) for item in items if item.kind == kind] for items in media]
        if any(rows):
            columns[column] = rows
    return columns


def _entry(item: TraceItem) -> dict[str, Any]:
    keys = (*_REQUIRED[item.kind], *_OPTIONAL[item.kind])
    entry = {key: value for key, value in item._asdict().items() if key in keys and value is not None}
    defaults = {"frame_rate": FRAME_RATE, "at": 0, "sound": False}
    return {key: value for key, value in entry.items() if key not in defaults or value != defaults[key]}


def media_cells(media: Sequence[Sequence[TraceItem]]) -> dict[str, list[str]] | None:
    """Return the columns of a trace in CSV, as `read_media` reads them; None if cells cannot hold all of it: names with
    spaces, items within the text, how videos are sampled, and their sound."""
    columns: dict[str, list[str]] = {}
    for column, rows in media_entries(media).items():
        if any(len(entry.get("name", "x").split()) != 1 for row in rows for entry in row):
            return None
        if any({"frame_rate", "fps", "frames", "at", "sound"} & set(entry) for row in rows for entry in row):
            return None
        columns[column] = [" ".join(map(_cell, row)) for row in rows]
    return columns


def _cell(entry: Mapping[str, Any]) -> str:
    size = f"{entry['width']}x{entry['height']}" if "width" in entry else ""
    seconds = repr(float(entry["seconds"])) if "seconds" in entry else ""
    return ("@" if size and seconds else "").join((size, seconds)) + (f"#{entry['name']}" if "name" in entry else "")


def renamed(media: Sequence[Sequence[TraceItem]], prefix: str) -> list[tuple[TraceItem, ...]]:
    """Return items whose names begin with `prefix`, so that files do not share any."""
    return [
        tuple(item if item.name is None else item._replace(name=f"{prefix}{item.name}") for item in items)
        for items in media
    ]
