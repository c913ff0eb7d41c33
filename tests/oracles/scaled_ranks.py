"""Ranks that step together and come and go with their load, simulated apart from the house.

The time of a step depends on the number of ranks alone. In each step every request that has a seat gets a token; a
request goes to the rank with the fewest requests, of equals the first. Times are whole numbers. At one instant steps
end first, then ranks change, then the controller looks, then requests arrive. Nothing of `simtune.sim` is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.sim.scaled_queues import Rule

NEVER = 1 << 62


@dataclass
class Rank:
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    up: bool = False
    held: bool = False

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)


class ScaledRanks:
    def __init__(
        self,
        rule: Rule,
        every: int,
        startup: int,
        window: int,
        pause: int,
        *,
        step: Sequence[int],
        first: int,
        least: int,
        seats: int,
    ) -> None:
        self.rule, self.every, self.startup, self.window, self.pause = rule, every, startup, window, pause
        self.step, self.least, self.seats = step, least, seats
        self.ranks = [Rank(up=i < first, held=i < first) for i in range(len(step))]
        self.present = self.grouped = first
        self.draining: list[Rank] = []
        self.changes: list[tuple[int, str]] = []
        self.blocked, self.ends = 0, NEVER
        self.log: list[tuple[int, int, int]] = [(0, first, first)]
        self.asked: list[tuple[int, int]] = []
        self.new = 0

    def run(self, arrivals: list[int], outputs: list[int]) -> list[int]:
        """Return the ticks at which requests are over."""
        self.missing, self.over = list(outputs), [0] * len(arrivals)
        look, coming = self.every, 0
        while coming < len(arrivals) or any(rank.load for rank in self.ranks):
            arrival = arrivals[coming] if coming < len(arrivals) else NEVER
            now = min(look, arrival, self.ends, *(tick for tick, _ in self.changes))
            if self.ends == now:
                self.end(now)
            self.change(now)
            if look == now:
                self.look(now)
                self.change(now)
                look += self.every
            while coming < len(arrivals) and arrivals[coming] == now:
                self.new += 1
                self.send(coming)
                coming += 1
            if self.ends == NEVER and now >= self.blocked:
                self.begin(now)
                self.change(now)
        return self.over

    def send(self, request: int) -> None:
        min((rank for rank in self.ranks if rank.up), key=lambda rank: rank.load).waiting.append(request)

    def begin(self, now: int) -> None:
        for rank in self.ranks:
            while rank.waiting and len(rank.running) < self.seats:
                rank.running.append(rank.waiting.pop(0))
        if any(rank.running for rank in self.ranks):
            self.ends = now + self.step[self.grouped - 1]
        self.see_drained(now)

    def end(self, now: int) -> None:
        self.ends = NEVER
        for rank in self.ranks:
            for request in rank.running:
                self.missing[request] -= 1
                if not self.missing[request]:
                    self.over[request] = now
            rank.running = [request for request in rank.running if self.missing[request]]

    def see_drained(self, now: int) -> None:
        if self.draining and not any(rank.load for rank in self.draining):
            self.draining = []
            self.changes.append((now, "regroup"))

    def change(self, now: int) -> None:
        while (due := [change for change in self.changes if change[0] == now]) != []:
            self.changes.remove(due[0])
            if due[0][1] == "regroup":
                self.grouped, self.blocked = self.present, now + self.pause
                if self.ends != NEVER:
                    self.ends = self.blocked + self.step[self.grouped - 1]
                self.changes.append((self.blocked, "go on"))
                continue
            for number, rank in enumerate(self.ranks):
                rank.up = rank.held = number < self.present
            self.note(now)

    def note(self, now: int) -> None:
        if self.log[-1][0] == now:
            self.log.pop()
        counts = sum(rank.up for rank in self.ranks), sum(rank.held for rank in self.ranks)
        if not self.log or self.log[-1][1:] != counts:
            self.log.append((now, *counts))

    @property
    def changing(self) -> bool:
        return bool(self.draining or self.changes)

    def wanted(self) -> int:
        rule, present = self.rule, self.present
        loads = [len(rank.waiting) if rule.watch == "waiting" else rank.load for rank in self.ranks if rank.up]
        if rule.kind == "rate":
            return math.ceil(round(self.new / rule.capacity, 9))
        if rule.kind == "target":
            share = sum(loads) / rule.capacity
            return present if round(abs(share / present - 1), 9) <= rule.tolerance else math.ceil(round(share, 9))
        if self.changing:
            return present
        if max(loads) >= rule.up:
            return present + 1
        return present - 1 if max(loads) <= rule.down else present

    def look(self, now: int) -> None:
        wanted = max(self.least, min(len(self.ranks), self.wanted()))
        self.new = 0
        self.asked = [(at, number) for at, number in [*self.asked, (now, wanted)] if at >= now - self.window]
        if self.changing:
            return
        if wanted > self.present:
            for rank in self.ranks[self.present : wanted]:
                rank.held = True
            self.present = wanted
            self.changes.append((now + self.startup, "regroup"))
        elif (fewer := max(number for _, number in self.asked)) < self.present:
            self.draining = self.ranks[fewer : self.present][::-1]
            self.present = fewer
            for rank in self.draining:
                rank.up = False
            for rank in self.draining:
                queue, rank.waiting = rank.waiting, []
                for request in queue:
                    self.send(request)
            self.see_drained(now)
        self.note(now)
