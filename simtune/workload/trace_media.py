"""Media of requests that a trace names, as those of a load: sized by the model, named by their file.

A trace is repeated end to end if more requests are asked for; the items of each round are unlike those of the others,
as the texts are. An item of a session's turn is in the context of its later turns, where it is the same item.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

import numpy as np

from simtune.arrays import Ints
from simtune.errors import UsageError
from simtune.specs.tower import MEDIA_KINDS, MediaKind, MediaShape
from simtune.specs.towers import NO_TOWERS, Towers
from simtune.specs.trace_media import TraceItem
from simtune.specs.traces import Trace
from simtune.specs.video import Clip
from simtune.specs.workload import Workload
from simtune.workload.media import ItemCounts, RequestMedia, check_sees, with_sound_within
from simtune.workload.sampling import Span


def replays_rows(workload: Workload, trace: Trace | None) -> bool:
    """Return True if each request of a load is a row of a trace, with all that the row states."""
    return trace is not None and not workload.classes and workload.prompt.kind == "trace"


def media_kinds(workload: Workload, trace: Trace | None) -> tuple[MediaKind, ...]:
    """Return the kinds of media in the requests of a load, its own or those of the trace that it replays."""
    kinds: set[MediaKind] = {media.kind for media in workload.media}
    if workload.videos is not None and workload.videos.sound:
        kinds.add("audio")
    if trace is not None and trace.media is not None and replays_rows(workload, trace):
        kinds |= _kinds_of(trace)
    return tuple(kind for kind in MEDIA_KINDS if kind in kinds)


@lru_cache(maxsize=4)
def _kinds_of(trace: Trace) -> frozenset[MediaKind]:
    kinds: set[MediaKind] = {item.kind for items in trace.media or () for item in items}
    sounding = any(item.sound for items in trace.media or () for item in items)
    return frozenset(kinds | {"audio"} if sounding else kinds)


def image_counts(workload: Workload, trace: Trace | None, span: Span) -> ItemCounts | None:
    """Return the numbers of images of a range of requests, if the load replays a trace that states them."""
    if trace is None or trace.num_images is None or not replays_rows(workload, trace):
        return None
    return ItemCounts(trace.num_images[span.numbers % len(trace)], max(1, int(trace.num_images.max())))


def check_media(towers: Towers, workload: Workload, trace: Trace | None, model: str) -> None:
    """Raise UsageError if the model has no encoder for media of a load, its own or those of the trace that it replays,
    or no turns for the sound of the trace's videos."""
    turns = None if towers.vision is None or towers.vision.video is None else towers.vision.video.sound
    if trace is not None and replays_rows(workload, trace) and (turns is None or towers.audio is None):
        sounding = next((i for i, items in enumerate(trace.media or ()) if any(item.sound for item in items)), None)
        if sounding is not None:
            raise UsageError(
                f"{trace.file}: videos.sound of request {sounding + 1} needs a model that reads the sound of videos "
                f"between their frames (vision.video.sound and audio of the model spec: Omni models), and {model} does "
                "not; list the sound under audio, or remove sound"
            )
    check_sees(towers, workload, model, media_kinds(workload, trace))


def within_text(trace: Trace) -> bool:
    """Return True if an item of a trace stands behind some text of its request."""
    return any(item.at for items in trace.media or () for item in items)


def repeats_items(trace: Trace) -> bool:
    """Return True if a trace has the same item more than once."""
    return bool(_of_round(trace, NO_TOWERS).repeated.any())


def replayed_media(trace: Trace, towers: Towers, numbers: Ints) -> RequestMedia:
    """Return the items of requests by their numbers in the endlessly repeated trace; sized if the model's encoders are
    given.

    Raises UsageError for a video or recording that is too short for a token of the prompt.
    """
    media = _of_round(trace, towers)
    round_, row = np.divmod(numbers, len(trace))
    chosen = media.rows(row)
    return replace(chosen, name=chosen.name + np.repeat(round_, chosen.per_request) * max(1, len(media)))


@lru_cache(maxsize=4)
def _of_round(trace: Trace, towers: Towers) -> RequestMedia:
    """Return the items of all requests of a trace, each once."""
    assert trace.media is not None
    per_request = [list(_with_sound(items)) for items in trace.media]
    items = list(chain.from_iterable(per_request))
    numbers: dict[tuple[MediaKind, bool, str], int] = {}
    names = [
        i if item.name is None else numbers.setdefault((item.kind, item.sound, item.name), i)
        for i, item in enumerate(items)
    ]
    times = Counter(names)
    begin = np.concatenate([[0], np.cumsum([len(row) for row in per_request])])
    sized = all(towers.of(kind) is not None for kind in {item.kind for item in items})
    shapes = [tuple(_shape(trace, towers, item)) for item in items] if sized else [(0, 0, 0, 0)] * len(items)
    shape = np.array(shapes, dtype=np.int64).reshape(-1, 4)
    before = np.cumsum(shape[:, 3]) - shape[:, 3]
    owner = np.repeat(np.arange(len(per_request)), np.diff(begin))
    text_before = np.array([item.at for item in items], dtype=np.int64)
    media = RequestMedia(
        begin=begin,
        kind=np.array([MEDIA_KINDS.index(item.kind) for item in items], dtype=np.int64),
        name=np.array(names, dtype=np.int64),
        repeated=np.array([times[name] > 1 for name in names], dtype=bool),
        size=np.array([item[2:5] for item in items], dtype=np.float64).reshape(-1, 3),
        start=before - before[begin[owner]] + text_before if len(items) else before,
        shape=shape,
        sized=sized,
    )
    return _in_turns(media, items, towers)


def _with_sound(items: Iterable[TraceItem]) -> Iterator[TraceItem]:
    """Yield the items of a request, behind each video whose sound is read a recording with `sound` set."""
    for item in items:
        yield item._replace(sound=False)
        if item.sound:
            yield TraceItem("audio", item.name, seconds=item.seconds, fps=item.fps, at=item.at, sound=True)


def _in_turns(media: RequestMedia, items: Sequence[TraceItem], towers: Towers) -> RequestMedia:
    """Return items of which the sound of videos stands between their frames, if the model has it so."""
    video = None if towers.vision is None else towers.vision.video
    if towers.vision is None or video is None or video.sound is None or not any(item.sound for item in items):
        return media
    group_s = [video.group_s(item.fps, towers.vision.frames) if item.sound else 0.0 for item in items]
    return with_sound_within(replace(media, group_s=np.array(group_s), turns=video.sound))


def _shape(trace: Trace, towers: Towers, item: TraceItem) -> MediaShape:
    try:
        if item.kind == "audio":
            assert towers.audio is not None
            return towers.audio.shape(item.seconds)
        assert towers.vision is not None
        if item.kind == "image":
            return towers.vision.shape(item.width, item.height)
        clip = Clip(item.width, item.height, item.seconds, item.frame_rate, item.fps, item.frames)
        return towers.vision.clip_shape(clip)
    except ValueError as error:
        raise UsageError(f"{trace.file}: {error}") from None
