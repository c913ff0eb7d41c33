"""Workload spec: when requests arrive, how long they are, and what each class of them expects."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from simtune.specs.adapters import Adapters
from simtune.specs.base import (
    LONGEST_S,
    BlockSize,
    Count,
    ErrorAt,
    Name,
    NonNegative,
    Part,
    Positive,
    Rate,
    Seats,
    Seconds,
    Seq,
    Share,
    Spec,
    Tokens,
    check_quantiles,
)
from simtune.specs.graph import Branches, check_graph
from simtune.specs.media import LoadAudio, LoadImages, LoadMedia, LoadVideos

# --- arrivals ---------------------------------------------------------------------------------------------


MaxInFlight = Annotated[
    Seats | None,
    Field(
        description="most requests that the client has under way at once; a request beyond them is held back, and sent "
        "the moment one finishes. Latencies count from when it was sent. No limit unless given",
    ),
]


class Poisson(Part):
    """Memoryless arrivals at a mean rate."""

    kind: Literal["poisson"] = "poisson"
    rate_rps: Rate
    max_in_flight: MaxInFlight = None


class Gamma(Part):
    """Gamma-distributed gaps: `cv` is the coefficient of variation, 1 is Poisson, above 1 is bursty."""

    kind: Literal["gamma"] = "gamma"
    rate_rps: Rate
    cv: Annotated[Positive, Field(ge=1e-3, le=1e3)]
    max_in_flight: MaxInFlight = None


class FixedInterval(Part):
    """A request every 1 / rate_rps seconds."""

    kind: Literal["fixed"] = "fixed"
    rate_rps: Rate
    max_in_flight: MaxInFlight = None


class Segment(Part):
    """Poisson arrivals at one rate for a while; a rate of zero is a pause."""

    for_s: Annotated[Positive, Field(le=LONGEST_S)]
    rate_rps: Annotated[NonNegative, Field(le=1e9)]


class Piecewise(Part):
    """Poisson arrivals whose rate changes with time; the segments follow one another and begin again at the end."""

    kind: Literal["piecewise"] = "piecewise"
    segments: Annotated[Seq[Segment], Field(min_length=1, strict=False)]
    max_in_flight: MaxInFlight = None

    @field_validator("segments")
    @classmethod
    def _some_arrive(cls, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        if not any(segment.rate_rps > 0 for segment in segments):
            raise ValueError("at least one segment must have a rate above zero")
        return segments


class ClosedLoop(Part):
    """`users` clients; each waits for its answer, thinks for think_s, and asks again."""

    kind: Literal["closed_loop"] = "closed_loop"
    users: Seats
    think_s: Seconds = 0.0


class TraceArrivals(Part):
    """Arrival times of the trace named in `trace`, replayed; rate_rps compresses or stretches them evenly."""

    kind: Literal["trace"] = "trace"
    rate_rps: Rate | None = None
    max_in_flight: MaxInFlight = None


Arrivals = Annotated[
    Poisson | Gamma | FixedInterval | Piecewise | ClosedLoop | TraceArrivals, Field(discriminator="kind")
]

# --- lengths ----------------------------------------------------------------------------------------------

MAX_TOKENS = 10**9
"""Most tokens of one request, as in `Tokens`."""
Level = Annotated[float, Field(ge=0, le=1)]
Quantile = Annotated[float, Field(ge=1, le=MAX_TOKENS)]


class FixedLength(Part):
    """Every request has the same number of tokens."""

    kind: Literal["fixed"] = "fixed"
    tokens: Tokens


class Lognormal(Part):
    """Lognormal lengths with the given mean and shape sigma, rounded up and clipped to [1, max_tokens]."""

    kind: Literal["lognormal"] = "lognormal"
    mean_tokens: Annotated[Positive, Field(le=MAX_TOKENS)]
    sigma: Annotated[Positive, Field(le=20)]
    max_tokens: Tokens


class Quantiles(Part):
    """Empirical lengths: `tokens[i]` is the quantile at `levels[i]`, linear in between.

    levels run from 0 to 1 and rise strictly; tokens do not fall.
    """

    kind: Literal["quantiles"] = "quantiles"
    levels: Annotated[Seq[Level], Field(min_length=2, strict=False)]
    tokens: Annotated[Seq[Quantile], Field(min_length=2, strict=False)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        check_quantiles(self.levels, self.tokens, "tokens")
        return self


class TraceLengths(Part):
    """Lengths of the trace named in `trace`, in its order, repeated if more requests are needed."""

    kind: Literal["trace"] = "trace"


Lengths = Annotated[FixedLength | Lognormal | Quantiles | TraceLengths, Field(discriminator="kind")]
DrawnLengths = Annotated[FixedLength | Lognormal | Quantiles, Field(discriminator="kind")]
"""Lengths that need no trace."""

# --- service level objectives -----------------------------------------------------------------------------

SloMetric = Literal["ttft", "tpot", "e2el", "family", "family_active"]
FAMILY_METRICS: tuple[SloMetric, ...] = ("family", "family_active")
"""Metrics with a value for each family of requests."""
Statistic = Annotated[str, Field(pattern=r"^(mean|p(50|[5-9][0-9]|99\.[0-9]+))$")]


class Slo(Part):
    """Limits in seconds by statistic, e.g. ttft_s: {p99: 1.0}. An empty objective is always met."""

    ttft_s: dict[Statistic, Positive] = Field(default_factory=dict)
    tpot_s: dict[Statistic, Positive] = Field(default_factory=dict)
    e2el_s: dict[Statistic, Positive] = Field(default_factory=dict)
    family_s: dict[Statistic, Positive] = Field(
        default_factory=dict,
        description="of a request graph or of sessions: from the arrival of a family until its last node or turn is "
        "over, pauses included",
    )
    family_active_s: dict[Statistic, Positive] | None = Field(
        None,
        description="of a request graph or of sessions: the part of it in which at least one request is under way, so "
        "without pauses",
    )
    confidence: Annotated[float, Field(ge=0.5, le=0.99)] | None = Field(
        None,
        description="for a study: share of the worlds, in which operators are off by as much as their profile states, "
        "that must keep these limits; a plan is judged as predicted unless given",
    )

    attainment: Annotated[float, Field(ge=0.5, lt=1.0)] | None = Field(
        None,
        description="for a study: share of the requests that must be within all of these limits at once; a percentile "
        "limits one latency alone",
    )

    @model_validator(mode="after")
    def _attains_limits(self) -> Self:
        if self.attainment is not None and not any(statistic != "mean" for _, statistic, _ in self.limits()):
            limit = f"ttft_s: {{p{100 * self.attainment:g}: 1.0}}"
            raise ErrorAt(f"attainment needs a limit on a percentile; set one, such as {limit}", "attainment")
        return self

    def limits(self) -> list[tuple[SloMetric, str, float]]:
        """(metric, statistic, limit in seconds), e.g. ("ttft", "p99", 1.0)."""
        return [
            (metric, statistic, limit)
            for metric in get_args(SloMetric)
            for statistic, limit in (getattr(self, metric + "_s") or {}).items()
        ]


class RequestClass(Part):
    """A share of the requests with its own lengths, objective and priority (smaller is sooner)."""

    name: Name
    share: Positive = 1.0
    priority: int = 0
    prompt: Lengths | None = None
    output: Lengths | None = None
    adapters: Adapters | None = Field(
        None, description="LoRA adapters of the class, shared with no other class; those of the workload unless given"
    )
    slo: Slo | None = None

    @field_validator("slo")
    @classmethod
    def _judged_together(cls, slo: Slo | None) -> Slo | None:
        for key in ("confidence", "attainment"):
            if slo is not None and getattr(slo, key) is not None:
                raise ErrorAt(f"{key} is of all classes together; set it in the slo of the study", key)
        return slo


class SharedPrefix(Part):
    """Prompts that begin alike: each request belongs to one of `groups`, drawn evenly, and the first `tokens` tokens
    of its prompt (as far as it is that long) are the group's own. A group is also a session, for routing.
    """

    groups: Tokens
    tokens: Tokens
    block_tokens: BlockSize = Field(
        16, description="tokens of a block, in which sharing is counted: a multiple of KV blocks, or a divisor of them"
    )


class LognormalSpread(Part):
    """Lognormal values with the given mean and shape sigma, at most `max`."""

    kind: Literal["lognormal"] = "lognormal"
    mean: Annotated[Positive, Field(le=LONGEST_S)]
    sigma: Annotated[Positive, Field(le=20)]
    max: Annotated[Positive, Field(le=LONGEST_S)]


class QuantileSpread(Part):
    """Empirical values: `values[i]` is the quantile at `levels[i]`, linear in between; see `quantiles` of lengths."""

    kind: Literal["quantiles"] = "quantiles"
    levels: Annotated[Seq[Level], Field(min_length=2, strict=False)]
    values: Annotated[Seq[Seconds], Field(min_length=2, strict=False)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        check_quantiles(self.levels, self.values, "values")
        return self


Spread = Annotated[LognormalSpread | QuantileSpread, Field(discriminator="kind")]
TurnCount = Annotated[int, Field(ge=1, le=10**5)] | Spread
"""Turns of a session: a fixed number, or a distribution, rounded to whole turns of at least one."""
Pause = Seconds | Spread
"""A pause in seconds: fixed, or a distribution."""


class SubAgents(Part):
    """Sub-agents: after some turns, sessions of their own that run at once; the next turn waits for all of them and
    reads their last answers."""

    share: Share = Field(description="probability that a turn, unless it is the last one, is followed by sub-agents")
    count: Branches = Field(1, description="sub-agents that run at once")
    turns: TurnCount
    pause_s: Pause = 0.0
    inherits: bool = Field(False, description="true if their prompts continue the text of the session")
    first_prompt: DrawnLengths | None = Field(None, description="tokens of a first prompt; `prompt` unless given")
    prompt: DrawnLengths | None = Field(None, description="tokens that a turn adds; those of the workload unless given")
    output: DrawnLengths | None = None


class Sessions(Part):
    """Conversations: each request is a turn of one, and its prompt begins with all prompts and answers before it.

    A turn is sent when the answer before it is over, `pause_s` later: the time in which a tool runs or a person reads.
    Arrivals are then those of sessions, and a closed loop has as many sessions at a time as users.

    With `follow: arrivals`, which `concurrent` implies, every arrival is a turn instead. `concurrent` conversations
    take turns in order of arrival, whether the turn before is answered or not; after its last turn a new one follows.
    """

    follow: Literal["answers", "arrivals"] = Field("answers", description="what a turn follows")
    turns: TurnCount = Field(description="turns of each conversation")
    pause_s: Pause = Field(0.0, description="seconds from an answer to the next turn")
    first_prompt: DrawnLengths | None = Field(
        None, description="tokens of the first prompt, such as instructions and a task; `prompt` unless given"
    )
    subagents: SubAgents | None = None
    concurrent: Tokens | None = Field(None, description="conversations that take turns; only with follow: arrivals")
    block_tokens: BlockSize = Field(
        16, description="tokens of a block, in which what turns share is counted; see shared_prefix"
    )

    @model_validator(mode="before")
    @classmethod
    def _before_turns_waited(cls, data: Any) -> Any:
        """Read `concurrent` without `follow` as it was before turns could follow answers."""
        if isinstance(data, dict) and "concurrent" in data and "follow" not in data:
            return {**data, "follow": "arrivals"}
        return data

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        if self.follow == "answers":
            if self.concurrent is not None:
                raise ErrorAt(
                    "turns follow answers, so arrivals are those of sessions; add follow: arrivals for turns that come "
                    "in order of arrival, or use a closed loop of as many users",
                    "concurrent",
                )
            return self
        if self.concurrent is None:
            raise ErrorAt("follow: arrivals needs the number of conversations that take turns: concurrent", "follow")
        if not isinstance(self.turns, int):
            raise ErrorAt("must be a number with follow: arrivals", "turns")
        for name in ("pause_s", "first_prompt", "subagents"):
            if getattr(self, name):
                raise ErrorAt("needs turns that follow answers; remove follow: arrivals and concurrent", name)
        return self


class GraphNode(Part):
    """Requests of a family that are sent together, as soon as all those of the nodes in `after` are over."""

    name: Name
    count: Branches = Field(1, description="requests of the node: samples of one prompt, or one to each inherited text")
    after: Annotated[Seq[Name], Field(strict=False)] = Field((), description="nodes that must be over; none: arrives")
    delay_s: Seconds = Field(
        0.0, description="seconds from then until the requests are sent, as for a tool that is called"
    )
    from_s: Seconds = Field(0.0, description="least seconds after the family's arrival, as for a part that comes late")
    first: Count | None = Field(None, description="answers that end the node, the others are aborted; all unless given")
    prompt: DrawnLengths | None = Field(None, description="tokens of its own; those of the workload unless given")
    output: DrawnLengths | None = None
    inherits: Name | None = Field(
        None,
        description="node from whose text its prompt continues: from its one request, or each from that of the same "
        "number",
    )
    reads: Annotated[Seq[Name], Field(strict=False)] = Field(
        (), description="nodes all of whose outputs are also in its prompt"
    )


class Workload(Spec):
    """Arrivals x lengths x classes. `requests` is the number that is simulated unless the caller sets another."""

    KIND: ClassVar[str] = "workload"
    source: str | None = Field(None, description="source of the numbers, with licence")
    requests: Tokens = 8000
    batch: bool = Field(
        False,
        description="a finite load: judged by when all of it is done, not as a sustained rate, and not made longer",
    )
    arrivals: Arrivals
    prompt: Lengths
    output: Lengths
    max_tokens: Tokens | None = Field(
        None,
        description="output tokens that each client allows (max_tokens of its request), for which SGLang and "
        "TensorRT-LLM keep room; its own output length unless given, as benchmark clients ask for, and never less",
    )
    trace: str | None = Field(None, description="trace file, relative to this file; needed by `kind: trace`")
    classes: Annotated[Seq[RequestClass], Field(strict=False)] = ()
    shared_prefix: SharedPrefix | None = Field(
        None, description="shared prefixes, only without a trace that contains them"
    )
    images: LoadImages | None = Field(
        None, description="images in prompts, whose tokens come on top of those of `prompt`; none unless given"
    )
    videos: LoadVideos | None = Field(
        None, description="videos in prompts, behind the images, whose tokens come on top as well; none unless given"
    )
    audio: LoadAudio | None = Field(
        None,
        description="recordings in prompts, behind the videos, whose tokens come on top as well; none unless given",
    )
    sessions: Sessions | None = Field(
        None,
        description="conversations, only without a trace that contains them; `prompt` is then what a turn adds to the "
        "conversation, and groups and classes are drawn for each; `requests` is the number of sessions if turns follow "
        "answers",
    )
    adapters: Adapters | None = Field(
        None,
        description="LoRA adapters for which requests ask, only without a trace that names them; the requests of a "
        "session or family ask for the same one. The base model alone unless given",
    )
    warm_up: Count | None = Field(
        None,
        description="arrivals (requests, families or sessions) at the beginning that are simulated, but left out of "
        "latencies, throughput and SLO",
    )

    graph: Annotated[Seq[GraphNode], Field(strict=False)] | None = Field(
        None, description="every arrival is a family of requests: nodes that fork and join"
    )

    @field_validator("graph")
    @classmethod
    def _acyclic(cls, graph: tuple[GraphNode, ...] | None) -> tuple[GraphNode, ...] | None:
        check_graph(graph or ())
        return graph

    def slos(self, slo: Slo) -> list[Slo]:
        """Return the SLO of each class if classes have their own, and `slo` where they have none."""
        if all(request_class.slo is None for request_class in self.classes):
            return [slo]
        return [slo if request_class.slo is None else request_class.slo for request_class in self.classes]

    @property
    def sends_families(self) -> bool:
        """True if every arrival is a family of requests that follow one another: of a graph, or a session."""
        return bool(self.graph) or (self.sessions is not None and self.sessions.follow == "answers")

    @property
    def max_in_flight(self) -> int | None:
        """Most requests that the client of an open load has under way at once; None without a limit."""
        return None if isinstance(self.arrivals, ClosedLoop) else self.arrivals.max_in_flight

    @property
    def waits_for_answers(self) -> bool:
        """True if requests are sent only when earlier ones are answered: in a closed loop, and with `max_in_flight`.
        Such a load cannot saturate a deployment."""
        return isinstance(self.arrivals, ClosedLoop) or self.max_in_flight is not None

    @model_validator(mode="after")
    def _warms_up_what_goes_on(self) -> Self:
        if self.batch and self.warm_up:
            raise ErrorAt("a batch is judged as a whole; remove warm_up, or batch", "warm_up")
        return self

    @model_validator(mode="after")
    def _sends_requests_one_by_one(self) -> Self:
        if self.sends_families and self.max_in_flight is not None:
            raise ErrorAt(
                "limits single requests, and those of a graph or a session are sent when those before are over; remove "
                "max_in_flight, or use a closed loop of families",
                "arrivals",
                "max_in_flight",
            )
        return self

    @model_validator(mode="after")
    def _graph_says_it_all(self) -> Self:
        for name in ("classes", "shared_prefix", "sessions", "trace"):
            if self.graph and getattr(self, name):
                raise ErrorAt("a request graph has its own lengths, classes and texts; leave this out", name)
        return self

    @property
    def media(self) -> list[LoadMedia]:
        """Media of its requests, in the order in which a prompt has them."""
        kinds: list[LoadMedia | None] = [self.images, self.videos, self.audio]
        return [media for media in kinds if media is not None]

    @property
    def media_keys(self) -> str:
        """Keys of the media of its requests, in words."""
        return " and ".join(key for key in ("images", "videos", "audio") if getattr(self, key) is not None)

    @model_validator(mode="after")
    def _shows_media_once(self) -> Self:
        for key in ("images", "videos", "audio"):
            media = getattr(self, key)
            if media is None:
                continue
            are, need = ("is that", "needs") if key == "audio" else ("are those", "need")
            if self.graph:
                raise ErrorAt(f"{key} {are} of single requests and of sessions; remove {key}, or graph", key)
            if self.sessions is not None and self.sessions.follow == "arrivals":
                raise ErrorAt(f"{key} {need} turns that follow answers; remove {key}, or follow and concurrent", key)
            if media.block_tokens != self.media[0].block_tokens:
                raise ErrorAt(
                    "blocks are of one size in all media; give each the same block_tokens", key, "block_tokens"
                )
        return self

    @field_validator("classes")
    @classmethod
    def _distinct(cls, classes: tuple[RequestClass, ...]) -> tuple[RequestClass, ...]:
        names = [c.name for c in classes]
        if len(set(names)) < len(names):
            raise ValueError(f"class names must differ: {', '.join(names)}")
        return classes

    @model_validator(mode="after")
    def _one_size_of_blocks(self) -> Self:
        prefix, sessions = self.shared_prefix, self.sessions
        if prefix is not None and sessions is not None and prefix.block_tokens != sessions.block_tokens:
            raise ErrorAt(
                f"must be that of shared_prefix ({prefix.block_tokens}), not {sessions.block_tokens}",
                "sessions",
                "block_tokens",
            )
        return self

    @model_validator(mode="after")
    def _trace_named(self) -> Self:
        lengths = [x for c in self.classes for x in (c.prompt, c.output) if x is not None]
        uses = (self.arrivals, self.prompt, self.output, *lengths)
        if self.trace is None and any(x.kind == "trace" for x in uses):
            raise ValueError("kind: trace is used, so `trace` must name the file")
        return self
