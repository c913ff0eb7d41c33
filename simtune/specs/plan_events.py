"""Events of a plan: instances start, fail and change pools; ranks of an instance fail, leave and join."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from simtune.specs.base import ErrorAt, GpuCount, Part, Seconds
from simtune.specs.pool import Pool


class _PlanEvent(Part):
    at_s: Seconds = Field(description="seconds after the earliest possible arrival")
    pool: str
    instance: Annotated[int, Field(ge=0, lt=100_000)] = Field(description="number of the instance in the pool, from 0")


class Start(_PlanEvent):
    """The instance is not there before at_s, and takes delay_s to come up."""

    kind: Literal["start"] = "start"
    delay_s: Seconds = 0.0

    @property
    def over_s(self) -> float:
        """When the instance is up."""
        return self.at_s + self.delay_s


class Failure(_PlanEvent):
    """The instance is lost with everything in it; its requests are sent again. It is back after recover_s, or never."""

    kind: Literal["failure"] = "failure"
    recover_s: Annotated[Seconds, Field(gt=0)] | None = None

    @property
    def over_s(self) -> float:
        """When the instance is back, if ever."""
        return math.inf if self.recover_s is None else self.at_s + self.recover_s


class Switch(_PlanEvent):
    """The instance takes no new requests, finishes what it has, and joins pool `to` after delay_s."""

    kind: Literal["switch"] = "switch"
    to: str
    delay_s: Seconds = 0.0

    @property
    def over_s(self) -> float:
        """Never: it is an instance of the other pool then, which no event can name."""
        return math.inf


_PAUSE = Field(
    None,
    description="seconds in which no rank of the instance computes, while experts are placed anew; unless given, those "
    "in which a rank receives the experts that it does not have over the link between ranks",
)


class RankFailure(_PlanEvent):
    """A data-parallel rank of the instance is lost with its requests, which are sent again. With `elastic_experts` the
    other ranks go on after a pause, without it the whole instance fails. The rank is back after recover_s, or never."""

    kind: Literal["rank_failure"] = "rank_failure"
    rank: Annotated[int, Field(ge=0, lt=100_000)] = Field(
        description="number of the data-parallel rank in the instance, from 0: all its tp GPUs"
    )
    pause_s: Seconds | None = _PAUSE
    recover_s: Annotated[Seconds, Field(gt=0)] | None = Field(
        None, description="seconds until the rank is back, after another pause; never unless given"
    )

    @property
    def over_s(self) -> float:
        """When the rank is back, if ever."""
        return math.inf if self.recover_s is None else self.at_s + self.recover_s


class Scale(_PlanEvent):
    """The instance goes on with `ranks` data-parallel ranks, after a pause: the first ones of its `attention_dp`.
    Requests of ranks that leave are sent again."""

    kind: Literal["scale"] = "scale"
    ranks: GpuCount = Field(description="data-parallel ranks from then on, at most attention_dp")
    pause_s: Seconds | None = _PAUSE


Event = Annotated[Start | Failure | Switch | RankFailure | Scale, Field(discriminator="kind")]


class RankChange(NamedTuple):
    """Change of the ranks that an instance runs on."""

    at_s: float
    pool: str
    instance: int
    leaving: tuple[int, ...]
    """Numbers of the ranks that go at once."""
    joining: tuple[int, ...]
    """Numbers of the ranks that are there after the pause."""
    ranks: int
    """Number of ranks from then on."""
    pause_s: float | None
    """Seconds of the pause; None if it follows from the bytes of the experts."""


def changes_ranks(event: Event, pool: Pool) -> bool:
    """True if an event changes the ranks of an instance that goes on."""
    return isinstance(event, (RankFailure, Scale)) and bool(pool.parallelism.elastic_experts)


def rank_changes(events: Sequence[Event], pool: Pool) -> list[RankChange]:
    """Return the changes of ranks in a pool's instances in order of time; of one instant, ranks that leave first."""
    changes: list[RankChange] = []
    most = pool.parallelism.attention_dp
    ranks: dict[int, int] = defaultdict(lambda: most)
    for turn in sorted(_turns(events, pool), key=lambda turn: (turn.at_s, bool(turn.joining))):
        before, change = ranks[turn.instance], turn
        if turn.ranks:
            leaving, joining = range(turn.ranks, before), range(before, turn.ranks)
            change = turn._replace(leaving=tuple(leaving), joining=tuple(joining))
        after = before + len(change.joining) - len(change.leaving)
        ranks[turn.instance] = after
        changes.append(change._replace(ranks=after))
    return changes


def _turns(events: Sequence[Event], pool: Pool) -> Iterator[RankChange]:
    """Yield the changes of a pool's ranks in the order of the events. The number of ranks is 0 for those that name the
    ranks that leave and join."""
    for event in events:
        if event.pool != pool.name or not changes_ranks(event, pool):
            continue
        of_instance = event.at_s, event.pool, event.instance
        if isinstance(event, Scale):
            yield RankChange(*of_instance, (), (), event.ranks, event.pause_s)
        elif isinstance(event, RankFailure):
            yield RankChange(*of_instance, (event.rank,), (), 0, event.pause_s)
            if event.recover_s is not None:
                yield RankChange(event.over_s, *of_instance[1:], (), (event.rank,), 0, event.pause_s)


# --- what a plan may state ----------------------------------------------------------------------------------


def check_events(events: Sequence[Event], pools: Mapping[str, Pool]) -> None:
    """Raise ErrorAt if an event names an instance or a rank that is not there, or comes while an earlier one of its
    instance or rank is not over. `pools` are by name, and those that events name are there."""
    for i, event in enumerate(events):
        size = pools[event.pool].instances
        if event.instance >= size:
            raise ErrorAt(
                f"pool {event.pool} has {size} instances, numbered from 0; there is no {event.instance}",
                "events",
                i,
                "instance",
            )
        if isinstance(event, Switch) and event.to == event.pool:
            raise ErrorAt(f"the switch leads from pool {event.pool} to itself", "events", i, "to")
        if isinstance(event, (RankFailure, Scale)):
            _check_ranks(i, event, pools[event.pool])
    _check_order(events, pools)
    _check_some_rank_stays(events, pools)


def _check_ranks(i: int, event: RankFailure | Scale, pool: Pool) -> None:
    """Raise ErrorAt if a pool has no such ranks, or an event states what has no effect."""
    parallelism = pool.parallelism
    if parallelism.attention_dp == 1:
        raise ErrorAt(
            f"the instances of pool {pool.name} have no data-parallel ranks; write a failure of the instance, or raise "
            "parallelism.attention_dp",
            "events",
            i,
            "kind",
        )
    if isinstance(event, Scale):
        if not parallelism.elastic_experts:
            raise ErrorAt(
                f"the number of ranks is fixed; set parallelism.elastic_experts of pool {pool.name}, or remove the "
                "event",
                "events",
                i,
                "kind",
            )
        if event.ranks > parallelism.attention_dp:
            raise ErrorAt(
                f"an instance of pool {pool.name} has at most {parallelism.attention_dp} ranks; lower it, or raise "
                "parallelism.attention_dp",
                "events",
                i,
                "ranks",
            )
        return
    if event.rank >= parallelism.attention_dp:
        raise ErrorAt(
            f"an instance of pool {pool.name} has {parallelism.attention_dp} ranks, numbered from 0; there is no "
            f"{event.rank}",
            "events",
            i,
            "rank",
        )
    if event.pause_s is not None and not parallelism.elastic_experts:
        raise ErrorAt(
            "has no effect if the whole instance fails with the rank; remove it, or set parallelism.elastic_experts of "
            f"pool {pool.name}",
            "events",
            i,
            "pause_s",
        )


class _Timeline:
    """Ends of the events of one instance that were listed so far."""

    def __init__(self) -> None:
        self.any = False
        self.instance_s = 0.0
        """When the events of the whole instance are over."""
        self.ranks_s: dict[int, float] = {}
        """When each rank that failed is back."""
        self.latest_s = 0.0
        """When the latest event of a rank was."""
        self.kinds: set[str] = set()
        """Kinds of the events that changed ranks."""

    def free_s(self, event: Event, *, of_ranks: bool) -> float:
        """Return the time from which on an event may come."""
        if isinstance(event, RankFailure) and of_ranks:
            return max(self.instance_s, self.latest_s, self.ranks_s.get(event.rank, 0.0))
        return max(self.instance_s, self.latest_s)

    def add(self, event: Event, *, of_ranks: bool) -> None:
        """Note an event."""
        self.any = True
        if not of_ranks:
            assert not isinstance(event, Scale)
            self.instance_s = event.over_s
            return
        self.latest_s = event.at_s
        self.kinds.add(event.kind)
        if isinstance(event, RankFailure):
            self.ranks_s[event.rank] = event.over_s


def _check_order(events: Sequence[Event], pools: Mapping[str, Pool]) -> None:
    timelines: dict[tuple[str, int], _Timeline] = defaultdict(_Timeline)
    for i, event in enumerate(events):
        timeline, of_ranks = timelines[event.pool, event.instance], changes_ranks(event, pools[event.pool])
        free_s = timeline.free_s(event, of_ranks=of_ranks)
        of_rank = f"rank {event.rank} of " if isinstance(event, RankFailure) else ""
        if event.at_s < free_s or (isinstance(event, Start) and timeline.any):
            position = (
                "before an earlier event of that instance is over" if free_s < math.inf else "after its last event"
            )
            raise ErrorAt(
                f"the {event.kind} of {of_rank}instance {event.instance} of pool {event.pool} at {event.at_s:g} s "
                f"comes {position}; list them in order, a start first; a failed instance comes back by recover_s",
                "events",
                i,
                "at_s",
            )
        if timeline.kinds and not of_ranks:
            raise ErrorAt(
                f"ranks of instance {event.instance} of pool {event.pool} change before, and an event of the whole "
                "instance can only come first; remove it, or the events of ranks",
                "events",
                i,
                "kind",
            )
        timeline.add(event, of_ranks=of_ranks)
        if len(timeline.kinds) > 1:
            raise ErrorAt(
                f"instance {event.instance} of pool {event.pool} is scaled, and ranks of it fail; no engine does both: "
                "keep one kind of these events for an instance",
                "events",
                i,
                "kind",
            )


def _check_some_rank_stays(events: Sequence[Event], pools: Mapping[str, Pool]) -> None:
    for pool in pools.values():
        for change in rank_changes(events, pool):
            if change.ranks < 1:
                i = next(
                    i for i, event in enumerate(events)
                    if isinstance(event, RankFailure) and (event.at_s, event.rank) == (change.at_s, change.leaving[0])
                )  # fmt: skip
                raise ErrorAt(
                    f"the last rank of instance {change.instance} of pool {change.pool} fails; let another one come "
                    "back before (recover_s), or write a failure of the instance",
                    "events",
                    i,
                    "rank",
                )
