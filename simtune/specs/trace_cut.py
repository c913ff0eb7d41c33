"""Parts of a trace, with notes on what was kept: hours of the day, the busiest window, a number of requests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints, Mask
from simtune.errors import UsageError
from simtune.specs.input_files import shortened
from simtune.specs.trace_media import TraceItem, renamed
from simtune.specs.trace_turns import TraceTurns, joined
from simtune.specs.traces import LONGEST_TRACE_S, Trace
from simtune.specs.workload import Workload

DAY_S = 86_400.0
_LARGEST_FACTOR = 1e9
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": DAY_S}


def duration_s(text: str, option: str) -> float:
    """Return `90s`, `30m`, `1.5h`, `2d` or plain seconds as seconds. Raises UsageError, which names the `option`."""
    matched = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip())
    if matched is None or (matched[2] or "s") not in _UNITS_S or not float(matched[1]) > 0:
        raise UsageError(f"{option} {shortened(text)!r}: write a time as 90s, 30m, 1.5h or 2d")
    seconds = float(matched[1]) * _UNITS_S[matched[2] or "s"]
    if seconds > LONGEST_TRACE_S:
        raise UsageError(f"{option} {shortened(text)!r}: must be at most {LONGEST_TRACE_S / DAY_S:,.0f} days")
    return seconds


@dataclass(frozen=True, slots=True)
class Cut:
    """Part that is taken of a trace, as a user writes it; a field that is None cuts nothing."""

    begin: str | None = None
    end: str | None = None
    utc_offset: str = "+00:00"
    peak: str | None = None
    scale: str | None = None

    def of(self, trace: Trace) -> Trace:
        """Return the part of the trace, with a note on each cut. Raises UsageError if it cannot be cut so."""
        if self.begin is not None or self.end is not None:
            trace = between(trace, self.begin, self.end, offset_s(self.utc_offset))
        if self.peak is not None:
            trace = busiest(trace, duration_s(self.peak, "--peak"))
        return trace if self.scale is None else scaled(trace, _factor(self.scale))


def _factor(text: str) -> float:
    """`2x` or `0.5`. Raises UsageError."""
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = -1.0
    if not 1 / _LARGEST_FACTOR <= factor <= _LARGEST_FACTOR:
        raise UsageError(
            f"--scale {shortened(text)!r}: write a factor of the rate as 2x or 0.5x, at most {_LARGEST_FACTOR:.0e}x"
        )
    return factor


def in_words(seconds: float) -> str:
    """`45 s`, `30 min`, `2.5 h`, `7 days`."""
    for least, unit_s, unit in ((2 * DAY_S, DAY_S, "days"), (7200.0, 3600.0, "h"), (120.0, 60.0, "min")):
        if seconds >= least:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds:.3g} s"


def offset_s(text: str) -> float:
    """`+02:00` as seconds ahead of UTC. Raises UsageError."""
    matched = re.fullmatch(r"([+-])(\d\d):?(\d\d)", text)
    if matched is None:
        raise UsageError(f"--utc-offset {shortened(text)!r}: write an offset from UTC as +02:00")
    return (1 if matched[1] == "+" else -1) * (3600.0 * int(matched[2]) + 60.0 * int(matched[3]))


def of_rows(trace: Trace, kept: Mask, arrival_s: Array | None, note: str) -> Trace:
    """The requests for which `kept` is true, with new times since the first, and a note. Raises UsageError if none."""
    if not kept.any():
        raise UsageError(f"{trace.file}: nothing is left: {note}")
    times = None if arrival_s is None else arrival_s[kept]
    began_s = trace.began_s
    if began_s is not None and trace.arrival_s is not None:
        began_s += float(trace.arrival_s[kept][0])
    return replace(
        trace,
        arrival_s=None if times is None else times - times[0],
        prompt_tokens=trace.prompt_tokens[kept],
        output_tokens=trace.output_tokens[kept],
        hash_ids=None if trace.hash_ids is None else tuple(compress(trace.hash_ids, kept.tolist())),
        session=None if trace.session is None else np.unique(trace.session[kept], return_inverse=True)[1],
        turns=None if trace.turns is None else trace.turns.kept(kept),
        adapter=None if trace.adapter is None else trace.adapter[kept],
        media=None if trace.media is None else tuple(compress(trace.media, kept.tolist())),
        num_images=None if trace.num_images is None else trace.num_images[kept],
        began_s=began_s,
        notes=(*trace.notes, f"{note}: {int(kept.sum()):,} of {len(trace):,} requests"),
    )


def _timed(trace: Trace, what: str) -> Array:
    if trace.arrival_s is None:
        raise UsageError(f"{trace.file}: has no arrival times, so {what} cannot be cut out of it")
    return trace.arrival_s


def busiest(trace: Trace, window_s: float) -> Trace:
    """Return the window of this length in which most requests arrive; the first of equal ones."""
    arrival_s = _timed(trace, "the busiest window")
    counts = np.searchsorted(arrival_s, arrival_s + window_s, side="right") - np.arange(len(arrival_s))
    begin_s = float(arrival_s[int(np.argmax(counts))])
    rows = (arrival_s >= begin_s) & (arrival_s <= begin_s + window_s)
    note = f"the busiest {in_words(window_s)}, {_when(trace, begin_s)}, at {_rate(rows.sum(), window_s)}"
    mean = "" if trace.rate_rps is None else f" ({trace.rate_rps:.3g} requests/s over all)"
    return of_rows(trace, rows, arrival_s, note + mean)


def between(trace: Trace, begin: str | None, end: str | None, utc_offset_s: float = 0.0) -> Trace:
    """Return the requests from `09:00` to `18:00` of every day, joined without the hours between; or from `30m` to `2h`
    after the first request. Raises UsageError if the trace does not contain the time of day.
    """
    arrival_s = _timed(trace, "a part of the day")
    clocks = [text is not None and ":" in text for text in (begin, end)]
    if any(clocks):
        return _daily(trace, arrival_s, begin or "00:00", end or "24:00", utc_offset_s)
    begin_s = 0.0 if begin is None else duration_s(begin, "--from")
    end_s = float(arrival_s[-1]) if end is None else duration_s(end, "--to")
    if not begin_s < end_s:
        raise UsageError(f"{begin} to {end}: the end must come after the beginning")
    rows = (arrival_s >= begin_s) & (arrival_s <= end_s)
    note = f"from {in_words(begin_s) if begin_s else 'the start'} to {in_words(end_s)} after the first request"
    return of_rows(trace, rows, arrival_s, note)


def _daily(trace: Trace, arrival_s: Array, begin: str, end: str, utc_offset_s: float) -> Trace:
    if trace.began_s is None:
        raise UsageError(
            f"{trace.file}: does not tell the time of day; write --from and --to as times after the first request (30m)"
        )
    first, last = _of_day_s(begin), _of_day_s(end)
    if not first < last:
        raise UsageError(f"{begin} to {end}: the end must come after the beginning, on one day")
    clock = arrival_s + (trace.began_s + utc_offset_s)
    day, at = np.divmod(clock, DAY_S)
    rows: Mask = (at >= first) & (at < last)
    joined = (day - day[0]) * (last - first) + (at - first)
    note = f"{begin} to {end} of {len(np.unique(day[rows]))} days"
    return of_rows(trace, rows, joined, note)


def _of_day_s(clock: str) -> float:
    matched = re.fullmatch(r"([01]?\d|2[0-4]):([0-5]\d)", clock)
    if matched is None:
        raise UsageError(f"{clock}: write a time of day as 09:00")
    return 3600.0 * int(matched[1]) + 60.0 * int(matched[2])


def merged(traces: Sequence[Trace]) -> Trace:
    """Return several traces as one, by the time of day if all contain it, else each from its own start.

    Sessions, prefixes, adapters and names of media stay those of their own file. Raises UsageError if some have times
    or prefixes and others have not.
    """
    if len(traces) == 1:
        return traces[0]
    files = " ".join(trace.file for trace in traces)
    clock = _starts(traces)
    arrival_s = _times_of_all(traces, clock or [0.0] * len(traces), files)
    order = np.arange(sum(map(len, traces))) if arrival_s is None else np.argsort(arrival_s, kind="stable")
    hash_ids, session = _prefixes_of_all(traces, files), _sessions_of_all(traces)
    waiting, adapter = _turns_of_all(traces, files), _adapters_of_all(traces, order)
    return Trace(
        file=files,
        sha256=hashlib.sha256("".join(trace.sha256 for trace in traces).encode()).hexdigest(),
        arrival_s=_from_the_first(arrival_s, order),
        prompt_tokens=np.concatenate([trace.prompt_tokens for trace in traces])[order],
        output_tokens=np.concatenate([trace.output_tokens for trace in traces])[order],
        hash_ids=None if hash_ids is None else tuple(hash_ids[i] for i in order.tolist()),
        block_tokens=traces[0].block_tokens,
        session=None if session is None else session[order],
        turns=None if waiting is None else joined(waiting, order),
        adapter=adapter,
        media=_media_of_all(traces, order),
        num_images=_image_counts_of_all(traces, order),
        began_s=min(clock) if clock else None,
        notes=tuple(f"{trace.file}: {note}" for trace in traces for note in trace.notes),
    )


def _adapters_of_all(traces: Sequence[Trace], order: Ints) -> Ints | None:
    """Return the adapters of all traces in an order, each file with numbers of its own; None if none names any."""
    if all(trace.adapter is None for trace in traces):
        return None
    columns, first = [], 0
    for trace in traces:
        of_file = np.full(len(trace), -1, dtype=np.int64) if trace.adapter is None else trace.adapter
        columns.append(np.where(of_file < 0, of_file, of_file + first))
        first += int(of_file.max()) + 1
    return np.concatenate(columns)[order]


def _media_of_all(traces: Sequence[Trace], order: Ints) -> tuple[tuple[TraceItem, ...], ...] | None:
    """Return the media of all traces in an order, each file with names of its own; None if none has any."""
    if all(trace.media is None for trace in traces):
        return None
    rows: list[tuple[TraceItem, ...]] = []
    for number, trace in enumerate(traces):
        rows += [()] * len(trace) if trace.media is None else renamed(trace.media, f"{number}:")
    return tuple(rows[i] for i in order.tolist())


def _image_counts_of_all(traces: Sequence[Trace], order: Ints) -> Ints | None:
    """Return the numbers of images of all traces in an order, 0 for those that state none; None if none states any."""
    if all(trace.num_images is None for trace in traces):
        return None
    counts = [np.zeros(len(t), dtype=np.int64) if t.num_images is None else t.num_images for t in traces]
    return np.concatenate(counts)[order]


def _from_the_first(arrival_s: Array | None, order: Ints) -> Array | None:
    """Return times in an order, from the first on; None without times."""
    return None if arrival_s is None else arrival_s[order] - arrival_s[order[0]]


def _starts(traces: Sequence[Trace]) -> list[float] | None:
    """Return the time of day at which each trace begins; None if one does not contain it."""
    starts = [trace.began_s for trace in traces if trace.began_s is not None]
    return starts if len(starts) == len(traces) else None


def _times_of_all(traces: Sequence[Trace], clock: Sequence[float], files: str) -> Array | None:
    times = [t.arrival_s + at for t, at in zip(traces, clock, strict=True) if t.arrival_s is not None]
    if 0 < len(times) < len(traces):
        raise UsageError(f"{files}: only some have arrival times; read them in separate commands")
    return np.concatenate(times) if times else None


def _prefixes_of_all(traces: Sequence[Trace], files: str) -> list[tuple[int, ...]] | None:
    rows = [trace.hash_ids for trace in traces if trace.hash_ids is not None]
    if not rows:
        return None
    if len(rows) < len(traces) or len({trace.block_tokens for trace in traces}) > 1:
        raise UsageError(
            f"{files}: only some say what prompts share, or in other blocks; read them in separate commands"
        )
    return _apart(rows)


def _turns_of_all(traces: Sequence[Trace], files: str) -> list[TraceTurns] | None:
    turns = [trace.turns for trace in traces if trace.turns is not None]
    if 0 < len(turns) < len(traces):
        raise UsageError(f"{files}: only some have turns that follow answers; read them in separate commands")
    return turns or None


def _sessions_of_all(traces: Sequence[Trace]) -> Ints | None:
    sessions = [[(int(x),) for x in trace.session] for trace in traces if trace.session is not None]
    return np.array([x for (x,) in _apart(sessions)]) if len(sessions) == len(traces) else None


def _apart(files: Sequence[Sequence[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Return the rows of names of several files, renamed so that no name is in two files."""
    rows: list[tuple[int, ...]] = []
    above = 0
    for file in files:
        rows += [tuple(x + above for x in row) for row in file]
        above = 1 + max((max(row, default=0) for row in rows), default=0)
    return rows


def scaled(trace: Trace, factor: float) -> Trace:
    """The same pattern with `factor` times the rate."""
    arrival_s = _timed(trace, "another rate")
    everything: NDArray[np.bool_] = np.ones(len(trace), dtype=np.bool_)
    return of_rows(trace, everything, arrival_s / factor, f"rate x {factor:g}")


def replayed_part(workload: Workload, trace: Trace, requests: int) -> str | None:
    """State which requests of a trace a load replays: its first ones, or all of them more than once; None if it replays
    each of them once."""
    arrivals, arrival_s = trace.num_arrivals, trace.arrivals_s
    unit = "requests" if trace.turns is None else "sessions"
    if requests == arrivals or workload.arrivals.kind != "trace":
        return None
    if requests > arrivals:
        return f"the {arrivals:,} {unit} of {trace.file}, repeated to {requests:,}"
    part = f"only the first {requests:,} of {arrivals:,} {unit} of {trace.file}"
    if arrival_s is None or trace.rate_rps is None or requests < 2:
        return part
    span_s, whole_s = float(arrival_s[requests - 1]), float(arrival_s[-1])
    rate = (requests - 1) / span_s if span_s > 0 else float("inf")
    rates = f"{rate:.3g} {unit}/s where all have {trace.rate_rps:.3g}"
    remedy = "simtune workload --peak takes the busiest window"
    return f"{part}: {in_words(span_s)} of {in_words(whole_s)}, {rates}; {remedy}"


def _rate(count: int, window_s: float) -> str:
    return f"{count / window_s:.3g} requests/s"


def _when(trace: Trace, begin_s: float) -> str:
    if trace.began_s is None:
        return f"{in_words(begin_s)} after the first request"
    return f"from {str(np.datetime64(int(trace.began_s + begin_s), 's')).replace('T', ' ')} UTC"
