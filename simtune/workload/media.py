"""Media of a load: which items a request has, their sizes, their tokens in its prompt, and what prompts share by them.

Item j of one kind of request i takes the uniform number i * most + j of each purpose, so it depends on the seed and on
both numbers alone. Items of the repeated set have sizes of their own, drawn by their number in the set.

Names of blocks. Items stand behind the prefix that prompts share, and before the rest of the text. A block is named by
the prefix before it and by all items up to its last token, as engines hash it, so a prompt finds the blocks of an
earlier one as far as prefix and items are the same. Behind the first new item nothing is shared, and no name is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.errors import UsageError
from simtune.specs.media import ImageSize, LoadAudio, LoadImages, LoadMedia, LoadVideos, SideQuantiles
from simtune.specs.tower import MEDIA_KINDS, MediaKind, MediaShape
from simtune.specs.towers import Towers
from simtune.specs.video import SoundTurns
from simtune.specs.workload import Workload
from simtune.workload.sampling import MEDIA, ItemStreams, Span, drawn

_NAMED = 1 << 62
"""Names of blocks with items are at least this; those of prefixes are smaller."""
MOST_SIZES = 1 << 16
"""Sizes of items of one load whose shapes are kept."""
_KIND = 1 << 56
"""Distance of the names of items of different kinds; those of images begin at 0, those of the sound of videos behind
all kinds."""


class PromptItem(NamedTuple):
    """An item of a prompt."""

    start: int
    """Tokens of the prompt before it."""
    name: int
    """Identity: equal names, equal items."""
    shape: MediaShape
    kind: MediaKind
    tokens: int
    """Tokens of the prompt from its first to its last one, those of another item between them included."""
    runs: tuple[tuple[int, int], ...] = ()
    """First and last + 1 of its tokens with embeddings, counted from its start; () if no other item's lie between."""


class ItemCounts(NamedTuple):
    """Items of one kind that requests are stated to have."""

    per_request: Ints
    most: int
    """Most items of one request of the whole load, by which draws are numbered."""


class VideoTurns(NamedTuple):
    """Turns of a video and its sound."""

    sound: SoundTurns
    group_s: float
    """Seconds of one group of frames."""

    def of(self, video: PromptItem, sound: PromptItem) -> tuple[PromptItem, PromptItem]:
        """Return a video and its sound with the tokens that they take together, and which of them are whose.

        Markers of both stand around all turns: half of them before."""
        beside = video.shape.tokens + sound.shape.tokens - video.shape.vectors - sound.shape.vectors
        runs = _runs(self, video.shape.sequences, video.shape.vectors, sound.shape.vectors, beside - beside // 2)
        tokens = video.shape.tokens + sound.shape.tokens
        return video._replace(tokens=tokens, runs=runs[0]), sound._replace(tokens=tokens, runs=runs[1])


Runs = tuple[tuple[int, int], ...]


@lru_cache(maxsize=1 << 14)
def _runs(turns: VideoTurns, groups: int, vectors: int, sound: int, at: int) -> tuple[Runs, Runs]:
    """Return the runs of tokens of a video and of its sound, the first of which is `at`."""
    runs: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for turn in turns.sound.turns(groups, vectors // groups, sound, turns.group_s):
        for run, tokens in zip(runs, turn, strict=True):
            if tokens:
                run.append((at, at + tokens))
                at += tokens
    return tuple(runs[0]), tuple(runs[1])


@dataclass(frozen=True, slots=True, eq=False)
class RequestMedia:
    """Media of requests, one array item each, in order of requests and of their prompts.

    Without the facts of a model only sizes and names are known, and `sized` is false.
    """

    begin: Ints
    """Number of the first item of each request, and at the end the number of all."""
    kind: Ints
    """Kind of each item: its place in `MEDIA_KINDS`."""
    name: Ints
    """Identity of each item."""
    repeated: NDArray[np.bool_]
    """True for items of a set, which may come again."""
    size: Array
    """Width and height in pixels, and seconds, of each item; 0 if its kind has none."""
    start: Ints
    """Tokens of the prompt before each item; 0 unless sized."""
    shape: Ints
    """Columns of `MediaShape`: sequences, patches, vectors and tokens of each item; zeros unless sized."""
    sized: bool = False
    group_s: Array | None = None
    """Seconds of one group of frames, by which turns are counted, for the sound of a video whose tokens stand between
    those of the video, the item before it; 0 for all other items. None if there is no such sound."""
    turns: SoundTurns | None = None
    """Turns of the videos and their sound; None if sound stands behind them."""

    def __len__(self) -> int:
        return len(self.name)

    def of(self, request: int) -> list[PromptItem]:
        """Return the items of a request."""
        rows = slice(int(self.begin[request]), int(self.begin[request + 1]))
        columns = (column[rows].tolist() for column in (self.start, self.name, self.shape, self.kind))
        items = [
            PromptItem(start, name, MediaShape(*shape), MEDIA_KINDS[kind], shape[3])
            for start, name, shape, kind in zip(*columns, strict=True)
        ]
        if self.group_s is not None and self.turns is not None:
            group_s = self.group_s[rows]
            for at in np.flatnonzero(group_s).tolist():
                items[at - 1 : at + 1] = VideoTurns(self.turns, float(group_s[at])).of(*items[at - 1 : at + 1])
        return items

    @property
    def per_request(self) -> Ints:
        """Number of items of each request."""
        counts: Ints = np.diff(self.begin)
        return counts

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """Kinds of which there is any item."""
        return tuple(MEDIA_KINDS[kind] for kind in np.unique(self.kind))

    def most(self, kind: MediaKind) -> int:
        """Return the most items of one kind in one request."""
        of_kind = np.concatenate([[0], np.cumsum(self.kind == MEDIA_KINDS.index(kind))])
        return int((of_kind[self.begin[1:]] - of_kind[self.begin[:-1]]).max(initial=0))

    def rows(self, requests: Ints) -> RequestMedia:
        """Return the items of some requests, in the order of these."""
        counts = self.per_request[requests]
        begin = np.concatenate([[0], np.cumsum(counts)])
        return self.items_at(begin, np.repeat(self.begin[requests] - begin[:-1], counts) + np.arange(begin[-1]))

    def items_at(self, begin: Ints, at: Ints) -> RequestMedia:
        """Return the items numbered `at`; those of request i are from `begin[i]` to `begin[i + 1]` of these."""
        return replace(
            self, begin=begin, kind=self.kind[at], name=self.name[at], repeated=self.repeated[at], size=self.size[at],
            start=self.start[at], shape=self.shape[at], group_s=None if self.group_s is None else self.group_s[at],
        )  # fmt: skip

    def largest_requests(self) -> RequestMedia:
        """Return the items of the requests that need most of an engine: with the most items of each kind, and with the
        largest item."""
        if not len(self):
            return self.rows(np.zeros(1, dtype=np.int64))
        owner = np.repeat(np.arange(len(self.per_request)), self.per_request)
        most = [int(np.bincount(owner[self.kind == kind]).argmax()) for kind in np.unique(self.kind)]
        return self.rows(np.array([*most, owner[self.shape[:, 2].argmax()]]))

    @classmethod
    def joined(cls, parts: Sequence[RequestMedia]) -> RequestMedia:
        """Return the items of the requests of several parts, one part after another."""
        columns = ("kind", "name", "repeated", "size", "start", "shape")
        counts = np.concatenate([part.per_request for part in parts])
        together: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in columns}
        sized, turns = all(part.sized for part in parts), next((part.turns for part in parts if part.turns), None)
        return cls(
            np.concatenate([[0], np.cumsum(counts)]), **together, sized=sized, group_s=_group_s(parts), turns=turns
        )

    def kept(self, seen: NDArray[np.bool_]) -> RequestMedia:
        """Return the items of the requests for which `seen` is true."""
        return self.rows(np.flatnonzero(seen))

    def added_tokens(self) -> Ints:
        """Return the tokens that items add to the prompt of each request."""
        sums = np.concatenate([[0], np.cumsum(self.shape[:, 3])])
        added: Ints = sums[self.begin[1:]] - sums[self.begin[:-1]]
        return added


_REMEDIES: dict[MediaKind, tuple[str, str]] = {
    "image": ("images", "states no vision encoder; add vision to the model spec"),
    "video": ("videos", "states no vision encoder that reads them; add vision.video to the model spec"),
    "audio": ("audio", "states no audio encoder; add audio to the model spec"),
}
"""Key of a load, and the cause and remedy if a model does not read its items, by kind."""


def check_sees(towers: Towers, workload: Workload, model: str, kinds: Sequence[MediaKind]) -> None:
    """Raise UsageError if a load has items of `kinds`, and the model has no encoder for one of them."""
    for kind in kinds:
        if towers.of(kind) is None:
            key, why = _REMEDIES[kind]
            if kind == "audio" and workload.audio is None and workload.videos is not None and workload.videos.sound:
                key = "videos.sound"
            raise UsageError(
                f"workload {workload.name} has {key}, and model {model} {why}, use a config.json of a family that is "
                f"read (docs/inputs.md), or remove {key}"
            )


def draw_media(
    loads: Sequence[LoadMedia], towers: Towers, seed: int, span: Span, image_counts: ItemCounts | None = None
) -> RequestMedia:
    """Return the items of a range of requests; sized if the facts of a model are given, except for `start`, which
    counts from the first item of each request. `image_counts` are the images of each request, in place of those that
    would be drawn.

    Raises ValueError for a video or recording that is too short for a token of the prompt.
    """
    counts = {"image": image_counts}
    of_loads: list[RequestMedia] = []
    for load in loads:
        drawn_items = _draw(load, towers, seed, span, counts.get(load.kind))
        if isinstance(load, LoadVideos) and load.sound:
            drawn_items = _with_sound(drawn_items, load, towers)
        of_loads.append(drawn_items)
    media = _together(of_loads)
    before = np.cumsum(media.shape[:, 3]) - media.shape[:, 3]
    first = np.repeat(media.begin[:-1], media.per_request)
    start = before - before[first] if len(before) else before
    return with_sound_within(replace(media, start=start))


def with_sound_within(media: RequestMedia) -> RequestMedia:
    """Return items of which each sound that stands between the frames of a video begins where the video does."""
    if media.group_s is None:
        return media
    start, sound = media.start.copy(), np.flatnonzero(media.group_s)
    start[sound] = start[sound - 1]
    return replace(media, start=start)


def _together(of_kinds: Sequence[RequestMedia]) -> RequestMedia:
    """Return the items of several kinds as those of the same requests, the first kind first in each."""
    if len(of_kinds) == 1:
        return of_kinds[0]
    owner = np.concatenate([np.repeat(np.arange(len(m.per_request)), m.per_request) for m in of_kinds])
    columns = ("kind", "name", "repeated", "size", "start", "shape")
    joined: dict[str, Any] = {name: np.concatenate([getattr(media, name) for media in of_kinds]) for name in columns}
    begin = np.sum([media.begin for media in of_kinds], axis=0)
    together = RequestMedia(begin, **joined, sized=all(media.sized for media in of_kinds))
    turns = next((media.turns for media in of_kinds if media.turns), None)
    together = replace(together, group_s=_group_s(of_kinds), turns=turns)
    return together.items_at(begin, np.argsort(owner, kind="stable"))


def _group_s(parts: Sequence[RequestMedia]) -> Array | None:
    """Return `RequestMedia.group_s` of the items of several parts."""
    if all(part.group_s is None for part in parts):
        return None
    return np.concatenate([np.zeros(len(p)) if p.group_s is None else p.group_s for p in parts])


def _with_sound(videos: RequestMedia, load: LoadVideos, towers: Towers) -> RequestMedia:
    """Return videos, each with its sound behind it or, if the model has turns, between its frames."""
    parts = [videos, _sound_of(videos, towers)]
    columns = ("kind", "name", "repeated", "size", "start", "shape")
    joined: dict[str, Any] = {name: np.concatenate([getattr(media, name) for media in parts]) for name in columns}
    together = RequestMedia(2 * videos.begin, **joined, sized=all(media.sized for media in parts))
    together = together.items_at(together.begin, np.arange(2 * len(videos)).reshape(2, -1).T.reshape(-1))
    vision = towers.vision
    if vision is None or vision.video is None or vision.video.sound is None:
        return together
    seconds = vision.video.group_s(load.fps, vision.frames)
    group_s = np.where(np.arange(len(together)) % 2 == 1, seconds, 0.0)
    return replace(together, group_s=group_s, turns=vision.video.sound)


def _sound_of(videos: RequestMedia, towers: Towers) -> RequestMedia:
    """Return the sound of videos: a recording for each, which is the same one where the video is."""
    seconds, audio = videos.size[:, 2], towers.audio
    shape = np.zeros((len(videos), 4), dtype=np.int64)
    if audio is not None and len(videos):
        lengths, of_length = np.unique(seconds, return_inverse=True)
        try:
            shape = np.array([audio.shape(length) for length in lengths.tolist()], dtype=np.int64)[of_length]
        except ValueError as error:
            raise ValueError(f"videos.seconds: {error}") from None
    return replace(
        videos,
        kind=np.full(len(videos), MEDIA_KINDS.index("audio"), dtype=np.int64),
        name=videos.name + (len(MEDIA_KINDS) - MEDIA_KINDS.index("video")) * _KIND,
        size=videos.size * np.array([0.0, 0.0, 1.0]),
        shape=shape,
        sized=audio is not None,
    )


def _per_request(load: LoadMedia, seed: int, span: Span) -> Ints:
    """Return the number of items of each request, drawn."""
    streams, counts = MEDIA[load.kind], np.array(load.per_request, dtype=np.int64)
    pick = np.minimum((drawn(seed, streams.number, span) * len(counts)).astype(np.int64), len(counts) - 1)
    per_request: Ints = np.where(drawn(seed, streams.share, span) < load.share, counts[pick], 0)
    return per_request


def _draw(load: LoadMedia, towers: Towers, seed: int, span: Span, counts: ItemCounts | None) -> RequestMedia:
    """Return the items of one kind; `counts` are those of each request unless they are drawn."""
    streams = MEDIA[load.kind]
    per_request = _per_request(load, seed, span) if counts is None else counts.per_request
    most = load.most if counts is None else counts.most
    slots = Span(span.first * most, span.end * most)
    present = (np.arange(most) < per_request[:, None]).reshape(-1)
    name, size = _names(load, seed, slots), _sizes(load, seed, slots, streams.new)
    repeated = np.zeros(len(name), dtype=bool)
    if load.repeats is not None:
        of_set = _sizes(load, seed, Span(0, load.repeats.number), streams.of_set)
        repeated = name < load.repeats.number
        size[repeated] = of_set[name[repeated]]
    size, tower = size[present], towers.of(load.kind)
    shape = np.zeros((len(size), 4), dtype=np.int64)
    if tower is not None and len(size):
        shape = _shapes(load, towers, size)
    number = MEDIA_KINDS.index(load.kind)
    return RequestMedia(
        begin=np.concatenate([[0], np.cumsum(per_request)]),
        kind=np.full(len(size), number, dtype=np.int64),
        name=name[present] + number * _KIND,
        repeated=repeated[present],
        size=size,
        start=np.zeros(len(size), dtype=np.int64),
        shape=shape,
        sized=tower is not None,
    )


def _shapes(load: LoadMedia, towers: Towers, size: Array) -> Ints:
    """Return the sizes of items as rows of `MediaShape`. Raises ValueError for an item that makes no token."""
    shapes = _shapes_of_sizes(load, towers)
    rows = []
    for row in map(tuple, size.tolist()):
        if row not in shapes:
            if len(shapes) >= MOST_SIZES:
                shapes.clear()
            shapes[row] = _shape(load, towers, *row)
        rows.append(shapes[row])
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=4 * len(rows)).reshape(-1, 4)


@lru_cache(maxsize=8)
def _shapes_of_sizes(load: LoadMedia, towers: Towers) -> dict[tuple[float, ...], MediaShape]:
    """Shapes of the items of a load by their sizes, for all of its draws: a search draws the same requests often."""
    return {}


def _shape(load: LoadMedia, towers: Towers, width: float, height: float, seconds: float) -> MediaShape:
    """Raise ValueError for an item that makes no token."""
    try:
        match load:
            case LoadVideos():
                assert towers.vision is not None
                return towers.vision.clip_shape(load.clip(int(width), int(height), seconds))
            case LoadAudio():
                assert towers.audio is not None
                return towers.audio.shape(seconds)
            case _:
                assert towers.vision is not None
                return towers.vision.shape(int(width), int(height))
    except ValueError as error:
        key = _REMEDIES[load.kind][0]
        raise ValueError(f"{key}.seconds: {error}") from None


def _names(load: LoadMedia, seed: int, slots: Span) -> Ints:
    """Return the identity of the item in each slot of a request: its number in the repeated set, or one of its own."""
    numbers = slots.numbers.astype(np.int64)
    repeats, streams = load.repeats, MEDIA[load.kind]
    if repeats is None:
        return numbers
    weights = np.arange(1, repeats.number + 1, dtype=np.float64) ** -repeats.skew
    upper = np.cumsum(weights)
    chosen = np.searchsorted(upper, drawn(seed, streams.in_set, slots) * upper[-1], side="right")
    in_set = drawn(seed, streams.repeats, slots) < repeats.share
    names: Ints = np.where(in_set, np.minimum(chosen, repeats.number - 1), repeats.number + numbers)
    return names


def _sizes(load: LoadMedia, seed: int, slots: Span, streams: ItemStreams) -> Array:
    """Return widths, heights and seconds of items."""
    size = np.zeros((slots.end - slots.first, 3))
    if isinstance(load, (LoadImages, LoadVideos)):
        size[:, 0], size[:, 1] = _sides(load.sizes, seed, slots, streams)
    if isinstance(load, (LoadAudio, LoadVideos)):
        # to the millisecond, as containers state it
        seconds = np.interp(drawn(seed, streams.seconds, slots), load.seconds.levels, load.seconds.seconds)
        size[:, 2] = np.maximum(np.round(seconds, 3), 0.001)
    return size


def _sides(sizes: Sequence[ImageSize], seed: int, slots: Span, streams: ItemStreams) -> tuple[Ints, Ints]:
    """Return widths and heights in pixels."""
    upper = np.cumsum([size.share for size in sizes])
    chosen = np.searchsorted(upper, drawn(seed, streams.size, slots) * upper[-1], side="right")
    chosen = np.minimum(chosen, len(sizes) - 1)
    at, rows = drawn(seed, streams.width, slots), np.arange(len(chosen))
    width = np.stack([_side(size.width, at) for size in sizes])[chosen, rows]
    at = drawn(seed, streams.height, slots)
    height = np.stack([_side(size.height, at) for size in sizes])[chosen, rows]
    return width, height


def _side(side: SideQuantiles, levels: Array) -> Ints:
    return np.rint(np.interp(levels, side.levels, side.pixels)).astype(np.int64)


# --- in prompts -------------------------------------------------------------------------------------------


def placed(media: RequestMedia, prefixes: Sequence[Sequence[int]] | None, block_tokens: int) -> RequestMedia:
    """Return the items behind the blocks of the prefix that each request shares."""
    if prefixes is None:
        return media
    before = np.array([len(prefix) for prefix in prefixes], dtype=np.int64) * block_tokens
    return replace(media, start=media.start + np.repeat(before, media.per_request))


def named_blocks(
    media: RequestMedia, prefixes: Sequence[tuple[int, ...]] | None, block_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Return the names of the blocks of each prompt: those of its prefix, and those up to its first new item."""
    rows = []
    known_names: dict[str, tuple[int, ...]] = {}
    for number in range(len(media.begin) - 1):
        prefix = () if prefixes is None else prefixes[number]
        repeated = media.repeated[media.begin[number] : media.begin[number + 1]].tolist()
        row = prefix
        if repeated and repeated[0]:
            row += _names_of(media.of(number), repeated, prefix, block_tokens, known_names)
        rows.append(row)
    return tuple(rows)


def _names_of(
    items: Sequence[PromptItem],
    repeated: Sequence[bool],
    prefix: Sequence[int],
    block_tokens: int,
    known_names: dict[str, tuple[int, ...]],
) -> tuple[int, ...]:
    """Return the names of the blocks up to the first new item. `known_names` are those of the blocks that end in one
    item, by what is before them: many prompts begin alike, and a video has hundreds of blocks."""
    names: list[int] = []
    before = f"{prefix[-1] if prefix else -1}"
    block = len(prefix)
    for item, of_set in zip(items, repeated, strict=True):
        if not of_set:
            break
        before += f",{item.name}"
        end = max(block, (item.start + item.tokens) // block_tokens)
        if before not in known_names:
            known_names[before] = tuple(_block_name(before, number) for number in range(block, end))
        names += known_names[before]
        block = end
    return tuple(names)


def _block_name(before: str, number: int) -> int:
    digest = blake2b(f"{before}:{number}".encode(), digest_size=7).digest()
    return _NAMED | int.from_bytes(digest, "big")
