"""The requests of a workload, drawn so that plans are compared on the same ones.

Each purpose (arrivals, prompt lengths, output lengths, classes) has its own random stream, keyed by the seed,
and request i takes exactly the i-th uniform of each, turned into a value by the inverse of its distribution.
So a request's gap, lengths and class depend on the seed and on i alone: asking for more requests appends to
the stream, and another rate scales the same arrival pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from math import gcd
from operator import eq
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.errors import UsageError
from simtune.specs import room
from simtune.specs.base import LARGEST_RATE_RPS, LONGEST_S
from simtune.specs.text_blocks import TextBlocks
from simtune.specs.towers import NO_TOWERS, Towers
from simtune.specs.traces import MOONCAKE_BLOCK_TOKENS, Trace
from simtune.specs.workload import (
    Arrivals,
    ClosedLoop,
    FixedInterval,
    Gamma,
    GraphNode,
    Lengths,
    Piecewise,
    Poisson,
    RequestClass,
    Sessions,
    Slo,
    TraceArrivals,
    TraceLengths,
    Workload,
)
from simtune.workload.adapters import AdapterBlocks, Asking, adapters_of
from simtune.workload.graphs import BLOCK_TOKENS, Families, FamilyGraph, GraphFamilies, compiled
from simtune.workload.media import ItemCounts, RequestMedia, draw_media, named_blocks, placed
from simtune.workload.media_blocks import MediaBlocks
from simtune.workload.sampling import (
    ARRIVALS,
    CLASS,
    GROUP,
    OUTPUT,
    PREDICTION,
    PROMPT,
    Span,
    drawn,
    needed_trace,
    normal_quantiles,
    sampled_lengths,
    uniforms,
)
from simtune.workload.session_draws import (
    KINDS,
    layout_of,
    lengths_by_kind,
    repeated_turns,
    session_prompts,
    turns_of,
)
from simtune.workload.session_media import in_contexts, text_before_items
from simtune.workload.sessions import SessionTurns
from simtune.workload.trace_media import (
    image_counts,
    media_kinds,
    repeats_items,
    replayed_media,
    replays_rows,
    within_text,
)

_REQUEST_BYTES = 450.0
"""Bytes of a request in a simulation and in its result."""
_FEWER = "ask for fewer: --requests, or search.requests of a study"
MEDIA_BLOCK_TOKENS = 16
"""Tokens of a block in which what prompts share by the items of a trace is counted."""
_NAME_BYTES = 40.0
"""Bytes of a named block of a prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestStream:
    """Requests in order of arrival, one array item each.

    arrival_s is None in a closed loop: there `users` clients each wait for their answer, think for think_s
    and send the next request of the stream. With due_s they also wait until it is due, so at most `users` requests
    are under way: the client of a rate that is capped. class_index points into class_names and slos. hash_ids, when the
    prompt lengths come from a trace that has them, names each prompt's blocks of block_tokens; () if
    nothing is shared.
    """

    arrival_s: Array | None
    prompt_tokens: Ints
    output_tokens: Ints
    class_index: Ints
    priority: Ints
    class_names: tuple[str, ...]
    slos: tuple[Slo | None, ...]
    hash_ids: Sequence[tuple[int, ...]] | None = None
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    users: int | None = None
    think_s: float = 0.0
    due_s: Array | None = None
    """Times at which a client that holds requests back would send them; None if it holds none back."""
    session: Ints | None = None
    """Conversation of each request; None if the workload has none."""
    graph: FamilyGraph | None = None
    """Graph by which requests follow one another: each `graph.size` of them are a family, which arrives as one."""
    turns: SessionTurns | None = None
    """Sessions whose turns follow answers: their requests are turns, session by session."""
    warm_up: int = 0
    """Requests at the beginning that statistics leave out."""
    batch: bool = False
    """True if the requests are a finite load, and no part of a load that continues."""
    max_tokens: int | None = None
    """Output tokens that each client allows; None: the output tokens of the request itself."""
    adapter: Ints | None = None
    """LoRA adapter of each request, -1 for the base model; None if no request asks for one."""
    of_load: Ints | None = None
    """Numbers of these requests within a load, from 0; None if they are the whole load."""
    media: RequestMedia | None = None
    """Images, videos and recordings in the prompts, whose tokens `prompt_tokens` counts if they are sized; None in a
    load without any."""

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def numbers(self) -> Ints:
        """Number of each request within its load, from 0."""
        return np.arange(len(self)) if self.of_load is None else self.of_load

    @property
    def needed(self) -> NDArray[np.bool_]:
        """True for each request that is answered to the end; the others may be aborted when their node is over."""
        return np.ones(len(self), dtype=bool) if self.families is None else self.families.needed

    @property
    def families(self) -> Families | None:
        """Families of the requests, of a graph or of sessions; None if every request arrives by itself."""
        if self.graph is None:
            return self.turns
        return GraphFamilies(self.graph, len(self) // self.graph.size)

    @property
    def arrivals(self) -> int:
        """Number of arrivals: of families if there are some, else of requests."""
        return len(self) if self.families is None else len(self.families)

    @property
    def arrivals_s(self) -> Array | None:
        """Times of arrivals: of families if there are some, else of requests; None in a closed loop."""
        if self.arrival_s is None or self.families is None:
            return self.arrival_s
        return self.arrival_s[self.families.begin[:-1]]

    @property
    def warm_up_arrivals(self) -> int:
        """Arrivals at the beginning that statistics leave out."""
        if self.families is None:
            return self.warm_up
        return int(np.searchsorted(self.families.begin, self.warm_up))

    @property
    def offered_rate_rps(self) -> float | None:
        """Mean arrival rate, of families if there are some; None for a closed loop, for a client that holds requests
        back, and for a single instant."""
        return None if self.arrival_s is None else self.target_rate_rps

    @property
    def target_rate_rps(self) -> float | None:
        """Mean rate at which the client sends, or would send if it held nothing back; None for users without a rate."""
        times_s = self.arrival_s if self.due_s is None else self.due_s
        if times_s is None or len(self) < 2:
            return None
        span = float(times_s[-1] - times_s[0])
        return (self.arrivals - 1) / span if span > 0 else None

    def at_rate(self, rate_rps: float) -> RequestStream:
        """Return the same requests in the same pattern, stretched so that their mean rate is exactly rate_rps.

        Raises UsageError for a stream that has no rate: a closed loop, or requests that all come at once.
        """
        if not 0 < rate_rps <= LARGEST_RATE_RPS:
            raise UsageError(
                f"the request rate must be above 0 and at most {LARGEST_RATE_RPS:.0e} requests/s, not {rate_rps}"
            )
        times_s = self.arrival_s if self.due_s is None else self.due_s
        if times_s is None:
            raise UsageError("a closed loop has no request rate to change; change arrivals.users instead")
        if self.target_rate_rps is None:
            raise UsageError(
                "requests that all come at once have no rate to change; ask for more: --requests, or "
                "search.requests of a study"
            )
        stretched = _soon_enough(times_s * (self.target_rate_rps / rate_rps), f"rate {rate_rps:g}")
        return replace(self, arrival_s=stretched) if self.due_s is None else replace(self, due_s=stretched)

    def share_of(self, count: int, instances: int) -> RequestStream:
        """Return the requests that the first `count` of `instances` instances receive under round robin."""
        return self.kept(np.arange(len(self)) % instances < count)

    def kept(self, seen: NDArray[np.bool_]) -> RequestStream:
        """Return the requests for which `seen` is true, at their own times; families must be kept whole."""
        return replace(
            self,
            arrival_s=None if self.arrival_s is None else self.arrival_s[seen],
            due_s=None if self.due_s is None else self.due_s[seen],
            prompt_tokens=self.prompt_tokens[seen],
            output_tokens=self.output_tokens[seen],
            class_index=self.class_index[seen],
            priority=self.priority[seen],
            hash_ids=self._blocks_of(seen),
            session=None if self.session is None else self.session[seen],
            turns=None if self.turns is None else self.turns.kept(seen),
            adapter=None if self.adapter is None else self.adapter[seen],
            warm_up=int(seen[: self.warm_up].sum()),
            of_load=self.numbers[seen],
            media=None if self.media is None else self.media.kept(seen),
        )

    def _blocks_of(self, seen: NDArray[np.bool_]) -> Sequence[tuple[int, ...]] | None:
        if self.hash_ids is None:
            return None
        if isinstance(self.hash_ids, RepeatedBlocks | TextBlocks | AdapterBlocks | MediaBlocks):
            return self.hash_ids.kept(seen)
        return tuple(compress(self.hash_ids, seen.tolist()))

    def predicted_tokens(self, sigma: float, seed: int) -> Ints:
        """Return output lengths as a predictor would guess them: off by a lognormal factor of median 1 and shape
        sigma."""
        factor = np.exp(sigma * normal_quantiles(uniforms(seed, PREDICTION, len(self))))
        return np.maximum(1, np.rint(self.output_tokens * factor)).astype(np.int64)


def build_stream(
    workload: Workload, trace: Trace | None, *, requests: int, seed: int, towers: Towers = NO_TOWERS
) -> RequestStream:
    """Return the first `requests` requests of a workload, at its own rate; `RequestStream.at_rate` gives them another.

    For a workload with a request graph, `requests` is the number of families, and for sessions whose turns follow
    answers that of sessions.

    A trace is repeated end to end if `requests` exceeds its length; a repeat shares no prefix
    with the round before. `towers` are the encoders of the model that reads media; without them prompts count text.
    Raises UsageError if the workload needs a trace that is not given or has no arrival times.
    """
    if requests < 1:
        raise UsageError(f"at least one request is needed, not {requests}")
    if seed < 0:
        raise UsageError(f"the seed must not be negative: {seed}")
    room.need(requests * _REQUEST_BYTES, f"{requests:,} requests", _FEWER)

    if workload.graph:
        stream = _families(workload, workload.graph, requests, seed)
    elif workload.sends_families or (trace is not None and trace.turns is not None):
        stream = _sessions(workload, trace, requests, seed, towers)
    else:
        stream = draw(workload, trace, Span(0, requests), seed, towers)
    return stream if workload.warm_up is None else _warmed_up(stream, workload.warm_up, workload.name)


def _warmed_up(stream: RequestStream, arrivals: int, load: str) -> RequestStream:
    """Mark the requests of the warm-up. Raise UsageError if none is left."""
    if arrivals >= stream.arrivals:
        raise UsageError(
            f"workload {load}: warm_up leaves out {arrivals:,} arrivals of {stream.arrivals:,}; lower it, or ask for "
            "more: --requests, or search.requests of a study"
        )
    return replace(stream, warm_up=arrivals if stream.families is None else int(stream.families.begin[arrivals]))


def draw(workload: Workload, trace: Trace | None, span: Span, seed: int, towers: Towers = NO_TOWERS) -> RequestStream:
    """Draw a range of the requests of a workload, the same whatever is drawn before them; `first` is a multiple of
    four.

    Only the first requests of a workload with `sessions` can be drawn. Raises UsageError as `build_stream` does.
    """
    classes = workload.classes or (RequestClass(name="default"),)
    class_index = _classes(classes, seed, span)
    prompts = [c.prompt or workload.prompt for c in classes]
    outputs = [c.output or workload.output for c in classes]
    arrivals = workload.arrivals
    prompt_tokens = sampled_lengths(prompts, class_index, drawn(seed, PROMPT, span), trace, "prompt", span)
    output_tokens = sampled_lengths(outputs, class_index, drawn(seed, OUTPUT, span), trace, "output", span)
    in_trace = _hash_ids(prompts, class_index, trace, span)
    if workload.sessions is None:
        shared = _shared(workload, in_trace, trace, prompt_tokens, seed, span)
    else:
        added, prompt_tokens = prompt_tokens, _conversations(workload.sessions, prompt_tokens, output_tokens)
        shared = _shared_by_turns(workload, workload.sessions, in_trace, added, prompt_tokens + output_tokens, seed)
    users, think_s = _users(arrivals)
    times_s = _soon_enough(_arrival_s(arrivals, trace, seed, span), f"workload {workload.name}")
    capped = workload.max_in_flight is not None
    stream = RequestStream(
        arrival_s=None if capped else times_s,
        due_s=times_s if capped else None,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        class_index=class_index,
        priority=np.array([c.priority for c in classes], dtype=np.int64)[class_index],
        class_names=tuple(c.name for c in classes),
        slos=tuple(c.slo for c in classes),
        hash_ids=shared.hash_ids,
        block_tokens=shared.block_tokens,
        session=shared.session,
        users=users,
        think_s=think_s,
        batch=workload.batch,
        max_tokens=workload.max_tokens,
    )
    media = _media_of(workload, trace, in_trace, towers, (seed, span))
    if media is not None:
        stream = _with_media(stream, workload, trace, media)
    return _with_adapters(stream, workload, trace, span, seed)


def _media_of(
    workload: Workload, trace: Trace | None, in_trace: RepeatedBlocks | None, towers: Towers, drawn_by: tuple[int, Span]
) -> RequestMedia | None:
    """Return the media of a range of requests, drawn or those of the trace that is replayed; None for text alone. Raise
    UsageError if both state them, if a trace names what prompts share, or if an item is too short for a token."""
    kinds, (seed, span) = media_kinds(workload, trace), drawn_by
    if trace is not None and trace.media is not None and replays_rows(workload, trace) and kinds:
        if workload.media:
            raise UsageError(f"{workload.trace}: the trace names media already; remove {workload.media_keys}")
        return replayed_media(trace, towers, span.numbers)
    if not workload.media:
        return None
    if in_trace is not None:
        raise UsageError(f"{workload.trace}: the trace names shared blocks already; remove {workload.media_keys}")
    return _drawn_media(workload, towers, seed, span, image_counts(workload, trace, span))


def _drawn_media(
    workload: Workload, towers: Towers, seed: int, span: Span, counts: ItemCounts | None = None
) -> RequestMedia:
    """Return the media that a spec draws for a range of requests. Raise UsageError for an item that is too short for a
    token."""
    try:
        return draw_media(workload.media, towers, seed, span, counts)
    except ValueError as error:
        raise UsageError(f"workload {workload.name}: {error}") from None


def _with_media(stream: RequestStream, workload: Workload, trace: Trace | None, media: RequestMedia) -> RequestStream:
    """Return requests with their media, whose tokens stand behind the prefix that prompts share, or where a trace has
    them."""
    if not workload.media:
        return _with_replayed_media(stream, workload, needed_trace(trace), media)
    if not media.sized:
        return replace(stream, media=media)
    prefix, loads = workload.shared_prefix, workload.media
    size = prefix.block_tokens if prefix is not None else loads[0].block_tokens
    media = placed(media, stream.hash_ids, size)
    prompt_tokens = stream.prompt_tokens + media.added_tokens()
    stream = replace(stream, media=media, prompt_tokens=prompt_tokens)
    # by the load, not by these requests: all parts of it name blocks, or none does
    if all(load.repeats is None for load in loads):
        return stream
    _room_for_names(workload, prompt_tokens // size)
    return replace(stream, hash_ids=named_blocks(media, stream.hash_ids, size), block_tokens=size)


def _with_replayed_media(stream: RequestStream, workload: Workload, trace: Trace, media: RequestMedia) -> RequestStream:
    """Return requests with the media of a trace. Raise UsageError for a load that puts text of its own before them."""
    if workload.sessions is not None:
        raise UsageError(f"{trace.file}: the trace names media, which are of its own requests; remove sessions")
    if workload.shared_prefix is not None and within_text(trace):
        raise UsageError(f"{trace.file}: the trace names media within its text; remove shared_prefix")
    if media.sized and workload.shared_prefix is not None:
        media = placed(media, stream.hash_ids, stream.block_tokens)
    return _named_with_media(stream, media, MEDIA_BLOCK_TOKENS, repeats_items(trace))


def _named_with_media(
    stream: RequestStream, media: RequestMedia, block_tokens: int, repeats: bool = True
) -> RequestStream:
    """Return requests with media at their places in the prompts. Blocks, of `block_tokens` or fewer, are named by text
    and items, unless no text has names and no item `repeats`."""
    if not media.sized:
        return replace(stream, media=media)
    stream = replace(stream, media=media, prompt_tokens=stream.prompt_tokens + media.added_tokens())
    if stream.hash_ids is None and not repeats:
        return stream
    size = block_tokens if stream.hash_ids is None else gcd(stream.block_tokens, block_tokens)
    blocks = MediaBlocks(stream.hash_ids, stream.block_tokens, media, size)
    return replace(stream, hash_ids=blocks, block_tokens=size)


def _classes(classes: Sequence[RequestClass], seed: int, span: Span) -> Ints:
    if len(classes) == 1:
        return np.zeros(span.end - span.first, dtype=np.int64)
    upper = np.cumsum([c.share for c in classes])
    uniforms = drawn(seed, CLASS, span) * upper[-1]
    index: Ints = np.minimum(np.searchsorted(upper, uniforms, side="right"), len(classes) - 1)
    return index


def _with_adapters(
    stream: RequestStream, workload: Workload, trace: Trace | None, span: Span, seed: int
) -> RequestStream:
    """Return the requests of a range with their adapters, and with names of blocks that depend on them."""
    replayed = stream.turns is not None and trace is not None and trace.turns is not None
    asked_for = adapters_of(Asking(stream.class_index, stream.session, replayed), workload, trace, span, seed)
    if asked_for is None:
        return stream
    adapter, count = asked_for
    blocks = None if stream.hash_ids is None else AdapterBlocks(stream.hash_ids, adapter, count)
    return replace(stream, adapter=adapter, hash_ids=blocks)


# --- arrivals ---------------------------------------------------------------------------------------------


def _arrival_s(arrivals: Arrivals, trace: Trace | None, seed: int, span: Span) -> Array | None:
    """Return arrival times: those at rate 1, divided by the rate, so another rate is the same pattern, stretched."""
    if isinstance(arrivals, ClosedLoop):
        return None
    if isinstance(arrivals, TraceArrivals):
        return _trace_arrival_s(arrivals, needed_trace(trace), span)
    unit = unit_arrivals(arrivals, seed, span)
    return _piecewise(arrivals, unit) if isinstance(arrivals, Piecewise) else unit / arrivals.rate_rps


def unit_arrivals(arrivals: Poisson | Gamma | FixedInterval | Piecewise, seed: int, span: Span) -> Array:
    """Return the arrival times of a range of requests, at rate 1."""
    if isinstance(arrivals, FixedInterval):
        return span.numbers.astype(np.float64)
    gaps: Array
    if isinstance(arrivals, Gamma):
        from scipy.special import gammaincinv

        gaps = np.asarray(gammaincinv(arrivals.cv**-2, drawn(seed, ARRIVALS, span)) * arrivals.cv**2, np.float64)
    else:
        gaps = -np.log1p(-drawn(seed, ARRIVALS, span))
    gaps[0] += span.unit
    return np.cumsum(gaps)


def _users(arrivals: Arrivals) -> tuple[int | None, float]:
    """Return the most requests under way and the think time in seconds; (None, 0.0) if answers are not awaited."""
    if isinstance(arrivals, ClosedLoop):
        return arrivals.users, arrivals.think_s
    return arrivals.max_in_flight, 0.0


def _soon_enough(arrival_s: Array | None, of: str) -> Array | None:
    """Return the arrival times. Raise UsageError if requests arrive later than can be simulated; `of` names their
    source."""
    if arrival_s is not None and not arrival_s[-1] <= LONGEST_S:
        raise UsageError(
            f"{of}: the last of {len(arrival_s):,} requests comes after {arrival_s[-1] / 86400:,.3g} days, and at most "
            f"{LONGEST_S / 86400:.0f} can be simulated; ask for fewer requests, or a higher rate_rps"
        )
    return arrival_s


def _piecewise(arrivals: Piecewise, unit: Array) -> Array:
    """Return arrivals of a rate-1 process, moved to the times at which the integral of the rates reaches them."""
    lengths = np.array([segment.for_s for segment in arrivals.segments])
    rates = np.array([segment.rate_rps for segment in arrivals.segments])
    expected = np.concatenate([[0.0], np.cumsum(lengths * rates)])
    begin = np.concatenate([[0.0], np.cumsum(lengths)])
    cycle, remainder = np.divmod(unit, expected[-1])
    # This never finds a segment of rate zero, because such a segment adds nothing to `expected`.
    at = np.searchsorted(expected, remainder, side="right") - 1
    times: Array = cycle * begin[-1] + begin[at] + (remainder - expected[at]) / rates[at]
    return times


def _trace_arrival_s(arrivals: TraceArrivals, trace: Trace, span: Span) -> Array:
    arrival_s = trace.arrivals_s
    if arrival_s is None:
        unread = f" (columns not read: {', '.join(trace.ignored)})" if trace.ignored else ""
        raise UsageError(f"{trace.file}: has no arrival times{unread}; use arrivals of another kind with its lengths")
    rate_rps = arrivals.rate_rps
    if span.end <= len(arrival_s) and rate_rps is None:
        return arrival_s[span.first : span.end]
    if trace.rate_rps is None:
        raise UsageError(f"{trace.file}: all requests come at once, so it can be neither stretched nor repeated")
    # A trace is repeated end to end: each round begins one mean gap after the last arrival of the round before.
    round_, row = np.divmod(span.numbers, len(arrival_s))
    times: Array = arrival_s[row] + round_ * (len(arrival_s) / trace.rate_rps)
    return times if rate_rps is None else times * (trace.rate_rps / rate_rps)


# --- families -----------------------------------------------------------------------------------------------


def _families(workload: Workload, asked_for: Sequence[GraphNode], families: int, seed: int) -> RequestStream:
    """Draw families of a workload with a graph, each node a class of requests. Samples of one node share their prompt;
    output lengths are drawn for every request."""
    graph = compiled(asked_for)
    nodes = {node.name: node for node in asked_for}
    requests = families * graph.size
    room.need(requests * _REQUEST_BYTES, f"{requests:,} requests", _FEWER)
    class_index = np.tile(graph.node_of, families)
    output = sampled_lengths(
        [nodes[name].output or workload.output for name in graph.names],
        class_index,
        uniforms(seed, OUTPUT, requests),
        None,
        "output",
        Span(0, requests),
    ).reshape(families, graph.size)
    # All requests of a node use the number of its first one, so that samples have equally long prompts.
    alike = uniforms(seed, PROMPT, requests).reshape(families, graph.size)[:, np.array(graph.begin)[graph.node_of]]
    prompt_lengths = [nodes[name].prompt or workload.prompt for name in graph.names]
    prompts = graph.prompts(
        sampled_lengths(prompt_lengths, class_index, alike.reshape(-1), None, "prompt", Span(0, requests)).reshape(
            output.shape
        ),
        output,
    )
    _room_for_names(workload, (prompts + output) // BLOCK_TOKENS)
    users, think_s = _users(workload.arrivals)
    arrival_s = _soon_enough(_arrival_s(workload.arrivals, None, seed, Span(0, families)), f"workload {workload.name}")
    stream = RequestStream(
        arrival_s=None if arrival_s is None else np.repeat(arrival_s, graph.size),
        prompt_tokens=prompts.reshape(-1),
        output_tokens=output.reshape(-1),
        class_index=class_index,
        priority=np.zeros(requests, dtype=np.int64),
        class_names=graph.names,
        slos=(None,) * len(graph.names),
        hash_ids=graph.blocks(prompts, output),
        block_tokens=BLOCK_TOKENS,
        session=np.repeat(np.arange(families), graph.size),
        users=users,
        think_s=think_s,
        batch=workload.batch,
        max_tokens=workload.max_tokens,
        graph=graph,
    )
    return _with_adapters(stream, workload, None, Span(0, requests), seed)


# --- sessions ---------------------------------------------------------------------------------------------


def _sessions(workload: Workload, trace: Trace | None, count: int, seed: int, towers: Towers) -> RequestStream:
    """Draw or replay sessions whose turns follow answers."""
    if trace is not None and trace.turns is not None:
        stream = _replayed_sessions(workload, trace, count, towers)
    else:
        stream = _drawn_sessions(workload, trace, count, seed, towers)
    assert stream.turns is not None
    users, think_s = _users(workload.arrivals)
    arrival_s = _soon_enough(_arrival_s(workload.arrivals, trace, seed, Span(0, count)), f"workload {workload.name}")
    sizes = stream.turns.sizes
    stream = replace(
        stream,
        arrival_s=None if arrival_s is None else np.repeat(arrival_s, sizes),
        session=np.repeat(np.arange(count), sizes),
        users=users,
        think_s=think_s,
        batch=workload.batch,
        max_tokens=workload.max_tokens,
    )
    return _with_adapters(stream, workload, trace, Span(0, len(stream)), seed)


def _drawn_sessions(workload: Workload, trace: Trace | None, count: int, seed: int, towers: Towers) -> RequestStream:
    sessions = workload.sessions
    assert sessions is not None
    if trace is not None and trace.hash_ids is not None and workload.prompt.kind == "trace":
        raise UsageError(f"{workload.trace}: the trace names shared blocks already; remove sessions")
    if trace is not None and trace.media is not None and replays_rows(workload, trace):
        raise UsageError(f"{trace.file}: the trace names media, which are of its own requests; remove sessions")
    layout = layout_of(sessions, count, seed)
    requests = len(layout.after)
    room.need(requests * _REQUEST_BYTES, f"{requests:,} turns", _FEWER)
    turns = turns_of(sessions, layout, seed)
    classes = workload.classes or (RequestClass(name="default"),)
    class_index = np.repeat(_classes(classes, seed, Span(0, count)), turns.sizes)
    of_kind = class_index * KINDS + np.array(layout.kind)
    span = Span(0, requests)
    added, output = (
        sampled_lengths(
            lengths_by_kind(workload, sessions, side), of_kind, uniforms(seed, purpose, requests), trace, side, span
        )
        for side, purpose in (("prompt", PROMPT), ("output", OUTPUT))
    )
    prompt_tokens, hash_ids = session_prompts(workload, sessions, layout, added, output, seed)
    stream = RequestStream(
        arrival_s=None,
        prompt_tokens=prompt_tokens,
        output_tokens=output,
        class_index=class_index,
        priority=np.array([c.priority for c in classes], dtype=np.int64)[class_index],
        class_names=tuple(c.name for c in classes),
        slos=tuple(c.slo for c in classes),
        hash_ids=hash_ids,
        block_tokens=sessions.block_tokens,
        turns=turns,
    )
    if not workload.media:
        return stream
    before = text_before_items(layout, prompt_tokens, added, workload.shared_prefix)
    of_turns = _drawn_media(workload, towers, seed, span, image_counts(workload, trace, span))
    media = in_contexts(of_turns, layout.continues, before)
    return _named_with_media(stream, media, workload.media[0].block_tokens)


def _replayed_sessions(workload: Workload, trace: Trace, count: int, towers: Towers) -> RequestStream:
    """Replay sessions of a trace as they are; each repeat has texts and media of its own."""
    assert trace.turns is not None
    if (
        workload.classes
        or workload.shared_prefix
        or workload.sessions
        or workload.max_in_flight
        or not (workload.prompt.kind == workload.output.kind == "trace")
    ):
        raise UsageError(
            f"{trace.file}: the turns of its sessions follow answers, so they are replayed as they are: set prompt and "
            "output to kind: trace, without classes, shared_prefix, sessions and max_in_flight"
        )
    turns, numbers = repeated_turns(trace.turns, count)
    room.need(len(numbers) * _REQUEST_BYTES, f"{len(numbers):,} turns", _FEWER)
    row = numbers % len(trace)
    zeros = np.zeros(len(row), dtype=np.int64)
    stream = RequestStream(
        arrival_s=None,
        prompt_tokens=trace.prompt_tokens[row],
        output_tokens=trace.output_tokens[row],
        class_index=zeros,
        priority=zeros,
        class_names=("default",),
        slos=(None,),
        hash_ids=None if trace.hash_ids is None else RepeatedBlocks(trace.hash_ids, numbers),
        block_tokens=trace.block_tokens,
        turns=turns,
    )
    if not media_kinds(workload, trace):
        return stream
    if workload.media:
        raise UsageError(f"{trace.file}: its sessions are replayed as they are; remove {workload.media_keys}")
    return _with_replayed_media(stream, workload, trace, replayed_media(trace, towers, numbers))


# --- shared text ------------------------------------------------------------------------------------------


class RepeatedBlocks(Sequence[tuple[int, ...]]):
    """Names of prompt blocks of a trace that is repeated: made on access, because a million prompts have many.

    Names of one round are all below `apart`, so that no round shares anything with another.
    """

    def __init__(self, rows: Sequence[tuple[int, ...]], requests: Ints) -> None:
        """Repeat `rows`: `requests[i]` is the number of the request in the endlessly repeated trace; -1 if nothing is
        shared."""
        self._rows = rows
        self._requests = requests
        self._apart = _above(rows)

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, at: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, at: slice) -> RepeatedBlocks: ...
    def __getitem__(self, at: int | slice) -> tuple[int, ...] | RepeatedBlocks:
        if isinstance(at, slice):
            return RepeatedBlocks(self._rows, self._requests[at])
        request = int(self._requests[at])
        if request < 0:
            return ()
        round_, row = divmod(request, len(self._rows))
        shift = round_ * self._apart
        return tuple([x + shift for x in self._rows[row]]) if shift else self._rows[row]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def kept(self, which: NDArray[np.bool_]) -> RepeatedBlocks:
        """Return the blocks of the requests for which `which` is true."""
        return RepeatedBlocks(self._rows, self._requests[which])


def _hash_ids(prompts: Sequence[Lengths], class_index: Ints, trace: Trace | None, span: Span) -> RepeatedBlocks | None:
    if trace is None or trace.hash_ids is None:
        return None
    from_trace = np.array([isinstance(p, TraceLengths) for p in prompts])
    if not from_trace.any():
        return None
    return RepeatedBlocks(trace.hash_ids, np.where(from_trace[class_index], span.numbers, -1))


def _above(rows: Sequence[tuple[int, ...]]) -> int:
    """Return a number above all names."""
    return rows.end if isinstance(rows, TextBlocks) else 1 + max((max(row, default=0) for row in rows), default=0)


class _Shared(NamedTuple):
    """Blocks that prompts share, and conversations."""

    hash_ids: Sequence[tuple[int, ...]] | None
    block_tokens: int
    session: Ints | None = None


def _shared(
    workload: Workload,
    in_trace: RepeatedBlocks | None,
    trace: Trace | None,
    prompt_tokens: Ints,
    seed: int,
    span: Span,
) -> _Shared:
    """Return the blocks of a trace, or the leading blocks that each request shares with the group drawn for it.

    Raises UsageError if the workload has both.
    """
    prefix = workload.shared_prefix
    if prefix is None:
        block_tokens = trace.block_tokens if trace else MOONCAKE_BLOCK_TOKENS
        return _Shared(in_trace, block_tokens, _trace_session(workload, trace, span))
    if in_trace is not None:
        raise UsageError(f"{workload.trace}: the trace names shared blocks already; remove shared_prefix")
    session = (drawn(seed, GROUP, span) * prefix.groups).astype(np.int64)
    most = prefix.tokens // prefix.block_tokens
    blocks = np.minimum(most, prompt_tokens // prefix.block_tokens)
    _room_for_names(workload, blocks)
    hash_ids = tuple(
        tuple(range(group * most, group * most + n)) for group, n in zip(session.tolist(), blocks.tolist(), strict=True)
    )
    return _Shared(hash_ids, prefix.block_tokens, session)


def _trace_session(workload: Workload, trace: Trace | None, span: Span) -> Ints | None:
    """Return the conversations of a trace that is replayed unchanged; each repeat has conversations of its own."""
    as_it_is = not workload.classes and workload.prompt.kind == workload.output.kind == "trace"
    if trace is None or trace.session is None or not as_it_is:
        return None
    round_, row = np.divmod(span.numbers, len(trace))
    session: Ints = trace.session[row] + round_ * (int(trace.session.max()) + 1)
    return session


def _in_turn(sessions: Sessions) -> tuple[int, int]:
    """Return the conversations that take turns in order of arrival, and the turns of each."""
    assert sessions.concurrent is not None
    assert isinstance(sessions.turns, int)
    return sessions.concurrent, sessions.turns


def _conversations(sessions: Sessions, added: Ints, output_tokens: Ints) -> Ints:
    """Return the prompt tokens of every request: all turns before it, and `added`, the tokens that its turn adds."""
    prompts = added.copy()
    before, turns = _in_turn(sessions)
    for start in range(before, len(added), before):
        if start // before % turns:
            turn, last = slice(start, start + before), slice(start - before, min(start, len(added) - before))
            prompts[turn] += prompts[last] + output_tokens[last]
    return prompts


def _shared_by_turns(
    workload: Workload,
    sessions: Sessions,
    in_trace: RepeatedBlocks | None,
    added: Ints,
    known_tokens: Ints,
    seed: int,
) -> _Shared:
    """Return the blocks that each request shares with its conversation, its own answer included, and with its group.

    Raises UsageError if a trace names shared blocks too.
    """
    if in_trace is not None:
        raise UsageError(f"{workload.trace}: the trace names shared blocks already; remove sessions")
    number = np.arange(len(added))
    concurrent, num_turns = _in_turn(sessions)
    # The request with which its conversation began.
    first = number - number // concurrent % num_turns * concurrent
    size, prefix = sessions.block_tokens, workload.shared_prefix
    groups, most = (1, 0) if prefix is None else (prefix.groups, prefix.tokens // size)
    group = (uniforms(seed, GROUP, len(added)) * groups).astype(np.int64)[first]
    of_group = np.minimum(most, added[first] // size)
    most_own = max(int(known_tokens.max()) // size, 1)  # names kept for each conversation
    _room_for_names(workload, known_tokens // size)
    # Names of the prefixes of groups come first, then `most_own` names for each conversation.
    hash_ids = tuple(
        (
            *range(of * most, of * most + min(shared, blocks)),
            *range(groups * most + begun * most_own + shared, groups * most + begun * most_own + blocks),
        )
        for of, shared, begun, blocks in zip(
            group.tolist(), of_group.tolist(), first.tolist(), (known_tokens // size).tolist(), strict=True
        )
    )
    return _Shared(hash_ids, size, first)


def _room_for_names(workload: Workload, blocks: Ints) -> None:
    """Raise UsageError if names for all blocks of all prompts do not fit into memory."""
    count = float(blocks.sum(dtype=np.float64))
    subject = f"workload {workload.name}: names of {count:,.0f} blocks that prompts share"
    room.need(count * _NAME_BYTES, subject, "ask for fewer requests or shorter prompts, or raise block_tokens")
