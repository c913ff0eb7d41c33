"""Suite of the invariants that every router must keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

from hypothesis import given
from hypothesis import strategies as st

from simtune.sim.core import EngineCore
from simtune.sim.router import Need, Router
from simtune.testing.clusters import SESSIONS, check, clusters
from simtune.testing.policies import few, many
from simtune.testing.sealed import Sealed

BLOCK_TOKENS = 4


@dataclass(eq=False)
class Core:
    """Fields that a router may read."""

    number: int
    instance: int
    pool: str
    up: bool = True


def cores(count: int, pools: int = 1) -> list[EngineCore]:
    """Return cores that are up, dealt to `pools` pools."""
    dealt = [Core(number, number // pools, f"pool{number % pools}") for number in range(count)]
    return cast("list[EngineCore]", dealt)


@dataclass(frozen=True)
class RouterEvent:
    """Event of a story; `which` picks a core or a request in progress, as far as there is one."""

    what: Literal["ask", "over", "fail", "back"]
    which: int
    tokens: int
    blocks: tuple[int, ...]
    later: int
    """Ticks since the previous event."""


events = st.lists(
    st.builds(
        RouterEvent,
        st.sampled_from(["ask", "ask", "ask", "over", "fail", "back"]),
        st.integers(0, 10),
        st.integers(1, 60),
        st.lists(st.integers(0, 2), max_size=5).map(
            lambda path: tuple(hash(tuple(path[: i + 1])) for i in range(len(path)))
        ),
        st.sampled_from([0, 0, 1, 1 << 30]),
    ),
    max_size=60,
)


@dataclass
class _RouterReplay:
    """Router under a story, and its answers."""

    router: Router
    cores: Sequence[EngineCore]
    there: list[tuple[Sealed, EngineCore]] = field(default_factory=list)
    """Requests in progress."""
    answers: list[int | None] = field(default_factory=list)

    def ask(self, number: int, event: RouterEvent, now: int) -> None:
        request = Sealed(number, event.tokens + BLOCK_TOKENS * len(event.blocks), 1, blocks=event.blocks)
        choice = self.router.choose(request, now)
        if choice is None:
            assert not any(core.up for core in self.cores), "choose() returned None although cores are up"
            self.answers.append(None)
            return
        assert any(choice is core for core in self.cores), f"{choice!r} is none of its cores"
        assert choice.up, f"core {choice.number} is down"
        self.answers.append(choice.number)
        self.there.append((request, choice))

    def over(self, which: int, now: int) -> None:
        if self.there:
            self.router.over(*self.there.pop(which % len(self.there)), now)

    def fail(self, core: EngineCore, now: int) -> None:
        core.up = False
        for request, chosen in self.there:
            if chosen is core:
                self.router.over(request, core, now)
        self.there = [(request, chosen) for request, chosen in self.there if chosen is not core]


class RouterSuite:
    """Derive from it and set `router`; the suite trusts what the class of the router states (`needs`)."""

    router: ClassVar[type[Router]]
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the constructor besides the cores and the inputs in `needs`."""
    first_of_equals: ClassVar[bool] = True
    """True if the first of equal cores is chosen; False for a router that draws, or depends on more than load."""

    def make(self, up: Sequence[EngineCore]) -> Router:
        """Make a router of these cores."""
        inputs: dict[Need, object] = {
            "seed": 3,
            "session": [i % SESSIONS for i in range(200)],
            "block_tokens": BLOCK_TOKENS,
        }
        return self.router(up, **{need: inputs[need] for need in self.router.needs}, **self.options)

    def choices(self, story: Sequence[RouterEvent], count: int) -> list[int | None]:
        """Return the number of the core that each request goes to; None if all are down."""
        up, now = cores(count, 2), 0
        replay = _RouterReplay(self.make(up), up)
        for number, event in enumerate(story):
            now += event.later
            if event.what == "ask":
                replay.ask(number, event, now)
            elif event.what == "over":
                replay.over(event.which, now)
            elif event.what == "fail":
                replay.fail(up[event.which % count], now)
            else:
                up[event.which % count].up = True
        return replay.answers

    @given(events, st.integers(1, 6))
    @many
    def test_only_cores_that_are_up_are_chosen_and_always_the_same(self, story: list[RouterEvent], count: int) -> None:
        """Check stories of requests that arrive and finish, and cores that fail and return; repeated stories are
        equal."""
        assert self.choices(story, count) == self.choices(story, count), "a repeated story has other choices"

    @given(st.data())
    @few
    def test_in_clusters_under_the_clock_nothing_is_lost_and_jumps_equal_single_steps(
        self, data: st.DataObject
    ) -> None:
        """Check also before prefill and decode pools, with instances that come, fail and switch."""
        cluster = data.draw(clusters(apart=data.draw(st.booleans()), failing=data.draw(st.booleans())))
        check(replace(cluster, router=self.router, router_options=self.options, cores=[]))

    @given(st.integers(1, 6), st.sets(st.integers(0, 5)))
    @many
    def test_ties(self, count: int, down: set[int]) -> None:
        """Check that the first of equal cores is chosen."""
        up = cores(count)
        for number in down & set(range(count)):
            up[number].up = False
        choice = self.make(up).choose(Sealed(0, 7, 1), 0)
        best = next((core for core in up if core.up), None)
        assert (choice is None) == (best is None)
        assert choice is best or not self.first_of_equals, (
            "not the first of equal cores is chosen; set first_of_equals = False if that is intended"
        )
