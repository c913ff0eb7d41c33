"""What each router does, by hand; what it does not know yet; and who gets nothing while down."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import Request, VllmFcfs
from simtune.sim.core import EngineCore
from simtune.sim.router import (
    ROUTERS,
    ByLength,
    LeastOutstanding,
    LeastTokens,
    PowerOfTwo,
    PrefixAware,
    RoundRobin,
    Router,
    SessionAffinity,
)
from simtune.sim.world import World
from simtune.testing import RouterSuite
from simtune.testing.clusters import stream_of

GO_BY_LOAD = {"round_robin", "least_outstanding", "least_tokens", "by_length", "prefix_aware"}

for kind, router in ROUTERS.items():
    facts = {"router": router, "first_of_equals": kind in GO_BY_LOAD, "__module__": __name__}
    globals()[f"Test_{kind}"] = type(f"Test_{kind}", (RouterSuite,), facts)


class TestWeighted(RouterSuite):
    router = RoundRobin
    options = {"weights": {"pool0": 0.5, "pool1": 3.0}}  # noqa: RUF012


class TestByLength(RouterSuite):
    router = ByLength
    options = {"longest": {"pool0": 3, "pool1": 20}}  # noqa: RUF012


class TestStale(RouterSuite):
    router = LeastTokens
    options = {"stale_s": 1e-9}  # noqa: RUF012


def cores(count: int) -> list[EngineCore]:
    found = [
        EngineCore(
            VllmFcfs(num_blocks=9, block_size=1, max_num_seqs=9, max_num_batched_tokens=9, max_model_len=9),
            LinearCosts(1.0),
        )
        for _ in range(count)
    ]
    for number, core in enumerate(found):
        core.number = number
    return found


def ask(number: int, prompt_tokens: int = 1, blocks: tuple[Hashable, ...] = ()) -> Request:
    return Request(number, prompt_tokens, 1, blocks=blocks)


def chosen(router: Router, requests: Iterable[Request], now: int = 0) -> list[int | None]:
    found = [router.choose(request, now) for request in requests]
    return [None if core is None else core.number for core in found]


def test_round_robin_passes_over_those_that_are_down() -> None:
    up = cores(3)
    router = RoundRobin(up)
    assert chosen(router, map(ask, range(4))) == [0, 1, 2, 0]
    up[1].up = False
    assert chosen(router, map(ask, range(3))) == [2, 0, 2]
    up[1].up = True
    assert chosen(router, map(ask, range(3))) == [0, 1, 2]
    for core in up:
        core.up = False
    assert chosen(router, [ask(0)]) == [None]


def in_pools(names: str) -> list[EngineCore]:
    """Cores, one for each letter, of the pool of that name."""
    found = cores(len(names))
    for core, pool in zip(found, names, strict=True):
        core.pool = pool
    return found


def test_prompts_go_to_the_pools_for_their_length() -> None:
    """Short ones to s up to 10 tokens, others to m up to 100, the rest to the two of l in turn."""
    up = in_pools("lsml")
    router = ByLength(up, longest={"s": 10, "m": 100})
    lengths = [10, 11, 100, 101, 5000, 1, 200]
    assert chosen(router, [ask(i, n) for i, n in enumerate(lengths)]) == [1, 2, 2, 0, 3, 1, 0]
    up[1].up = False
    assert chosen(router, [ask(9, 5)]) == [2], "the next longer"
    up[2].up = False
    assert chosen(router, [ask(10, 5)]) == [0], "of those the one with fewer tokens"
    up[0].up = up[3].up = False
    up[1].up = True
    assert chosen(router, [ask(11, 5000)]) == [1], "rather there than nowhere"
    up[1].up = False
    assert chosen(router, [ask(12)]) == [None]


def test_a_prompt_beyond_all_limits_goes_where_the_limit_is_highest() -> None:
    router = ByLength(in_pools("sm"), longest={"s": 10, "m": 100})
    assert chosen(router, [ask(0, 1000), ask(1, 5)]) == [1, 0]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8)), min_size=1, max_size=30), st.integers(0, 8), st.booleans()
)
def test_pools_that_share_no_lengths_are_two_worlds(load: list[tuple[int, int]], limit: int, single: bool) -> None:
    """Each request ends when it would if the others had never come, to the tick."""
    arrival, lengths = np.cumsum([gap for gap, _ in load]).astype(float), np.array([n for _, n in load])
    both = in_pools("sl")
    router = ByLength(both, longest={"s": limit})
    together = World(both, stream_of(arrival, lengths, [3] * len(load)), router=router, single_steps=single).run()
    for of_side in (lengths <= limit, lengths > limit):
        if of_side.any():
            its = stream_of(arrival[of_side], lengths[of_side], [3] * int(of_side.sum()))
            alone = World(cores(1), its, single_steps=single).run()
            assert together.finish[of_side].tolist() == alone.finish.tolist()


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(50, 100))
def test_a_length_that_divides_nothing_leaves_the_fewest_tokens(lengths: list[int], limit: int) -> None:
    asked = [ask(i, n) for i, n in enumerate(lengths)]
    plain = chosen(LeastTokens(in_pools("aab")), asked)
    assert chosen(ByLength(in_pools("aab")), asked) == plain
    assert chosen(ByLength(in_pools("aab"), longest={"a": limit, "b": limit}), asked) == plain


def test_weights_are_interleaved_smoothly() -> None:
    up = cores(3)
    for core, pool in zip(up, "abc", strict=True):
        core.pool = pool
    router = RoundRobin(up, weights={"a": 5.0})
    # Every turn all gain their weight and the chosen one pays 7: (5 1 1) (3 2 2) (1 3 3) (6 -3 4) (4 -2 5) (9 -1 -1)..
    assert chosen(router, map(ask, range(7))) == [0, 0, 1, 0, 2, 0, 0]
    up[0].up = False
    numbers = [number for number in chosen(router, map(ask, range(4))) if number is not None]
    assert sorted(numbers) == [1, 1, 2, 2], "the others share alike"


def test_fewest_under_way_ties_to_the_first() -> None:
    up = cores(3)
    router = LeastOutstanding(up)
    requests = [ask(i, prompt_tokens=10**i) for i in range(5)]
    assert chosen(router, requests[:4]) == [0, 1, 2, 0]
    router.over(requests[1], up[1], now=5)
    assert chosen(router, requests[4:], now=5) == [1]
    up[1].up = False
    assert chosen(router, [ask(5), ask(6)]) == [2, 0]


def test_fewest_tokens_under_way() -> None:
    up = cores(2)
    router = LeastTokens(up)
    requests = [ask(0, 100), ask(1, 30), ask(2, 30), ask(3, 30), ask(4, 50), ask(5, 1)]
    # 0 | 0, then 100 | 0, 30, 60, 90, 140
    assert chosen(router, requests) == [0, 1, 1, 1, 1, 0]
    router.over(requests[4], up[1], now=0)
    assert chosen(router, [ask(6, 1)]) == [1]


def test_a_router_with_stale_news_sends_a_burst_to_one_core() -> None:
    up = cores(2)
    router = LeastOutstanding(up, stale_s=10 / TICKS_PER_SECOND)
    first = [ask(i) for i in range(3)]
    assert chosen(router, first, now=0) == [0, 0, 0]
    assert chosen(router, [ask(3)], now=9) == [0]
    assert chosen(router, [ask(4), ask(5)], now=10) == [1, 1]  # it knows of the first three, not of the fourth
    for request in first:
        router.over(request, up[0], now=11)
    assert chosen(router, [ask(6)], now=20) == [1]  # 4 at 0 and 2 at 1 are known now, the ends are not
    assert chosen(router, [ask(7)], now=21) == [0]  # 1 and 2


def test_of_two_drawn_the_one_with_less() -> None:
    up = cores(8)
    router = PowerOfTwo(up, seed=4)
    blind = PowerOfTwo(up, stale_s=1.0, seed=4)  # it never hears of any load: the first of the two drawn
    counts, blind_counts = [0] * 8, [0] * 8
    for i in range(4000):
        (at,) = chosen(router, [ask(i)])
        (other,) = chosen(blind, [ask(i)])
        assert at is not None
        assert other is not None
        assert counts[at] <= min(counts[at], counts[other]), "of the two, never the fuller"
        counts[at] += 1
        blind_counts[other] += 1
    assert max(counts) - min(counts) <= 4, "two choices keep the fullest within log log n of the others"
    # Of two distinct ones of eight the lower number is i with probability (7 - i) / 28.
    for i, count in enumerate(blind_counts):
        assert abs(count - 4000 * (7 - i) / 28) < 4 * (4000 * 0.25 * 0.75) ** 0.5
    for core in up[1:]:
        core.up = False
    assert chosen(router, [ask(4001)]) == [0]
    up[0].up = False
    assert chosen(router, [ask(4002)]) == [None]


def test_the_two_that_are_drawn_are_never_the_same() -> None:
    """So the fullest is never taken, and of two cores always the other one."""
    for count in (2, 3, 8):
        up = cores(count)
        router = PowerOfTwo(up, seed=4)
        router.load[1] = 10**6
        assert 1 not in chosen(router, map(ask, range(500)))


def test_sessions_stay_and_only_those_of_a_failed_core_move() -> None:
    up = cores(4)
    sessions = [i % 400 for i in range(1200)]
    router = SessionAffinity(up, session=sessions)
    before = chosen(router, map(ask, range(400)))
    assert chosen(router, map(ask, range(400, 800))) == before
    share = [before.count(i) for i in range(4)]
    assert min(share) > 70, "a quarter of 400 each, more or less"
    up[2].up = False
    after = chosen(router, map(ask, range(800, 1200)))
    assert [b for a, b in zip(before, after, strict=True) if a != 2] == [a for a in before if a != 2]
    moved = [b for a, b in zip(before, after, strict=True) if a == 2]
    assert {0, 1, 3} == set(moved), "its sessions are spread over all others"
    for core in up:
        core.up = False
    assert chosen(router, [ask(0)]) == [None]


# --- prefixes ---------------------------------------------------------------------------------------------


def test_a_prompt_goes_where_its_beginning_is_unless_too_much_waits_there() -> None:
    up = cores(2)
    router = PrefixAware(up, block_tokens=10, memory_tokens=1000)
    long = ask(0, 30, ("a", "b", "c"))
    assert chosen(router, [long]) == [0]
    router.over(long, up[0], now=1)
    assert chosen(router, [ask(1, 30, ("a", "b", "x"))], now=1) == [0]  # 20 cached, 0 under way
    # 30 under way at 0: with 40 cached there is more to gain, with 20 there is not.
    assert chosen(router, [ask(2, 40, ("a", "b", "y", "z"))], now=1) == [1]
    router = PrefixAware(up, block_tokens=10, memory_tokens=1000, load_weight=0.5)
    chosen(router, [ask(0, 30, ("a", "b", "c"))])
    assert chosen(router, [ask(1, 40, ("a", "b", "y", "z"))]) == [0]  # 0.5 * 30 - 20 < 0


def test_what_a_failed_core_had_cached_is_gone() -> None:
    up = cores(2)
    router = PrefixAware(up, block_tokens=10, memory_tokens=1000)
    first = ask(0, 20, ("a", "b"))
    assert chosen(router, [ask(9, 1), first]) == [0, 1]
    up[1].up = False
    router.over(first, up[1], now=1)
    up[1].up = True
    assert chosen(router, [ask(1, 20, ("a", "b"))], now=2) == [1]  # lighter
    up[1].up = False
    assert chosen(router, [ask(2, 20, ("a", "b"))], now=2) == [0]


def test_stale_news_of_prefixes() -> None:
    up = cores(2)
    router = PrefixAware(up, block_tokens=10, memory_tokens=1000, load_weight=0.1, stale_s=10 / TICKS_PER_SECOND)
    assert chosen(router, [ask(0, 20, ("a",))], now=0) == [0]
    assert chosen(router, [ask(1, 20, ("b",))], now=0) == [0]  # nothing is known, the first of equals
    assert chosen(router, [ask(2, 500, ("c",))], now=10) == [1]  # 40 tokens at 0
    assert chosen(router, [ask(3, 20, ("b",))], now=11) == [0]


class PlainPrefixAware:
    """The same by looking everywhere: cost of every core from scratch, blocks of two generations in plain sets."""

    def __init__(self, up: Sequence[EngineCore], block_tokens: int, memory_blocks: int, load_weight: float) -> None:
        self.cores, self.block_tokens, self.load_weight = up, block_tokens, load_weight
        self.most = memory_blocks * len(up)
        self.young: set[tuple[int, Hashable]] = set()
        self.old: set[tuple[int, Hashable]] = set()
        self.remembered = 0
        self.load = [0] * len(up)

    def choose(self, request: Request) -> int | None:
        costs = []
        for i, core in enumerate(self.cores):
            known = [(i, b) in self.young or (i, b) in self.old for b in request.blocks]
            cached = known.index(False) if False in known else len(known)
            if core.up:
                costs.append((self.load_weight * self.load[i] - cached * self.block_tokens, i))
        if not costs:
            return None
        _, at = min(costs)
        self.young |= {(at, block) for block in request.blocks}
        self.remembered += len(request.blocks)
        if self.remembered >= self.most:
            self.old, self.young, self.remembered = self.young, set(), 0
        self.load[at] += request.prompt_tokens
        return at

    def over(self, request: Request, at: int) -> None:
        self.load[at] -= request.prompt_tokens
        if not self.cores[at].up:
            self.young = {(i, block) for i, block in self.young if i != at}
            self.old = {(i, block) for i, block in self.old if i != at}


happenings = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "over", "fail", "back"]),
        st.integers(0, 4),
        st.lists(st.integers(0, 2), max_size=5),
        st.integers(1, 60),
    ),
    max_size=60,
)


@given(happenings, st.integers(1, 5), st.sampled_from([1, 3, 50]), st.sampled_from([0.01, 0.3, 1.0]))
def test_prefix_aware_equals_looking_everywhere(
    story: list[tuple[str, int, list[int], int]], count: int, memory_blocks: int, load_weight: float
) -> None:
    up = cores(count)
    router = PrefixAware(up, block_tokens=10, memory_tokens=10 * memory_blocks, load_weight=load_weight)
    plain = PlainPrefixAware(up, 10, memory_blocks, load_weight)
    there: list[tuple[Request, int]] = []
    for number, (what, which, path, tokens) in enumerate(story):
        if what == "ask":
            blocks = tuple(tuple(path[: i + 1]) for i in range(len(path)))
            request = ask(number, tokens + 10 * len(path), blocks)
            (at,) = chosen(router, [request])
            assert at == plain.choose(request)
            if at is not None:
                there.append((request, at))
        elif what == "over" and there:
            request, at = there.pop(which % len(there))
            router.over(request, up[at], now=0)
            plain.over(request, at)
        elif what == "fail":
            core = up[which % count]
            core.up = False
            for request, at in [x for x in there if x[1] == core.number]:
                router.over(request, core, now=0)
                plain.over(request, at)
            there = [x for x in there if x[1] != core.number]
        elif what == "back":
            up[which % count].up = True
