"""Data-parallel ranks that step together, some of which leave and join: step by step, request by request.

Nothing here is shared with the simulator but the costs of single steps. Requests are first come, first served; there
are seats and blocks for all. At one instant steps end first, then ranks change, then requests arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Batch(NamedTuple):
    """What a rank computes in a step."""

    decodes: int
    context_tokens: int
    chunks: tuple[tuple[int, int], ...]
    """(tokens before, tokens) of each part of a prompt."""
    samples: int


class Change(NamedTuple):
    """Ranks leave at a tick; those that join are there at the end of the pause."""

    tick: int
    leaving: Sequence[int]
    joining: Sequence[int]
    ranks: int
    until: int


@dataclass(eq=False)
class Asked:
    """A request on a rank."""

    number: int
    prompt: int
    output: int
    emitted: int = 0
    computed: int = 0
    decodes: bool = False

    @property
    def missing(self) -> int:
        return self.prompt + self.emitted - self.computed


@dataclass(eq=False)
class Rank:
    up: bool = True
    running: list[Asked] = field(default_factory=list)
    waiting: list[Asked] = field(default_factory=list)
    step: list[tuple[Asked, int]] = field(default_factory=list)

    def plan(self, budget: int) -> None:
        """Give tokens to running requests, then to waiting ones."""
        self.step = []
        for request in [*self.running, *self.waiting]:
            tokens = min(request.missing, budget)
            if not tokens:
                break
            if request in self.waiting:
                self.waiting.remove(request)
                self.running.append(request)
            self.step.append((request, tokens))
            budget -= tokens

    def batch(self) -> Batch:
        decoding = [request for request, _ in self.step if request.decodes]
        chunks = [(request.computed, n) for request, n in self.step if not request.decodes]
        complete = sum(not request.decodes and request.missing == n for request, n in self.step)
        context = sum(request.computed + 1 for request in decoding)
        return Batch(len(decoding), context, tuple(chunks), len(decoding) + complete)

    def lose(self) -> list[Asked]:
        """Forget everything, and return the requests in the order in which they are sent again."""
        lost = sorted(self.running, key=lambda request: not request.decodes) + self.waiting
        self.running, self.waiting, self.step = [], [], []
        return [Asked(request.number, request.prompt, request.output, request.emitted) for request in lost]


@dataclass
class Group:
    """One instance under a load."""

    prompts: Sequence[int]
    outputs: Sequence[int]
    budget: int
    ticks_of: Callable[[int, list[Batch]], int]
    """Ticks of a step by the number of ranks and the batches of those that have any."""
    ranks: list[Rank]
    present: int = field(init=False)
    turn: int = 0
    end: int | None = None
    until: int = 0
    first_token: dict[int, int] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    resent: dict[int, int] = field(default_factory=dict)
    parked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.present = len(self.ranks)

    def run(self, arrivals: Sequence[int], changes: Sequence[Change]) -> None:
        turns: list[tuple[int, int, int, Change | None]] = []
        for i, change in enumerate(changes):
            turns += [(change.tick, 1, 2 * i, change), (change.until, 1, 2 * i + 1, change)]
        turns += [(tick, 2, i, None) for i, tick in enumerate(arrivals)]
        turns.sort(key=lambda turn: turn[:3])
        while turns or self.end is not None:
            now = min([turn[0] for turn in turns[:1]] + [end for end in (self.end,) if end is not None])
            if self.end == now:
                self.complete(now)
            while turns and turns[0][0] == now:
                _, _, place, turn = turns.pop(0)
                if turn is None:
                    self.route(Asked(place, self.prompts[place], self.outputs[place]))
                elif place % 2:
                    self.join(turn)
                else:
                    self.change(turn)
            if self.end is None and now >= self.until:
                self.begin(now)

    def begin(self, now: int) -> None:
        for rank in self.ranks:
            rank.plan(self.budget)
        batches = [rank.batch() for rank in self.ranks if rank.step]
        if batches:
            self.end = now + self.ticks_of(self.present, batches)

    def complete(self, now: int) -> None:
        self.end = None
        for rank in self.ranks:
            for request, tokens in rank.step:
                request.computed += tokens
                if request.missing:
                    continue
                request.decodes = True
                request.emitted += 1
                self.first_token.setdefault(request.number, now)
                if request.emitted == request.output:
                    self.finish[request.number] = now
                    rank.running.remove(request)
            rank.step = []

    def change(self, change: Change) -> None:
        lost: list[Asked] = []
        for number in change.leaving:
            self.ranks[number].up = False
        for number in change.leaving:
            lost += self.ranks[number].lose()
        self.until, self.present = max(self.until, change.until), change.ranks
        batches = [rank.batch() for rank in self.ranks if rank.step]
        self.end = self.until + self.ticks_of(self.present, batches) if batches else None
        for request in lost:
            self.resent[request.number] = self.resent.get(request.number, 0) + 1
            self.route(request)

    def join(self, change: Change) -> None:
        for number in change.joining:
            self.ranks[number].up = True
        parked, self.parked = self.parked, []
        for request in parked:
            self.route(request)

    def route(self, request: Asked) -> None:
        for _ in self.ranks:
            rank = self.ranks[self.turn]
            self.turn = (self.turn + 1) % len(self.ranks)
            if rank.up:
                rank.waiting.append(request)
                return
        self.parked.append(request)
