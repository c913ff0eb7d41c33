"""Queues of servers that come and go, simulated apart from the house: the oracle of autoscaled pools.

Each server serves one request at a time, in order, from a queue of its own; a request goes to the server with the
fewest requests, of equals the first. Times are whole numbers. Nothing of `simtune.sim` is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NEVER = 1 << 62


class Rule(NamedTuple):
    kind: str  # rate, thresholds or target
    watch: str = "under_way"
    capacity: float = 1.0  # requests in an interval, or the load that is aimed at
    up: float = 0.0
    down: float = 0.0
    tolerance: float = 0.0


@dataclass
class Server:
    queue: list[int] = field(default_factory=list)
    serving: int | None = None
    ends: int = NEVER
    state: str = "free"  # free, starting, up, draining
    ready: int = NEVER

    @property
    def load(self) -> int:
        return len(self.queue) + (self.serving is not None)


class ScaledQueues:
    def __init__(self, rule: Rule, every: int, startup: int, window: int, begin: int, least: int, most: int) -> None:
        self.rule, self.every, self.startup, self.window = rule, every, startup, window
        self.least, self.most = least, most
        self.servers = [Server(state="up" if i < begin else "free") for i in range(most)]
        self.order = list(range(begin))
        self.log: list[tuple[int, int, int]] = [(0, begin, begin)]
        self.asked: list[tuple[int, int]] = []
        self.new = 0

    def run(self, arrivals: list[int], service: list[int]) -> list[int]:
        """Return the ticks at which requests are over."""
        self.service, self.over = service, [0] * len(arrivals)
        look, coming = self.every, 0
        while coming < len(arrivals) or any(server.load for server in self.servers):
            now = min(
                look,
                arrivals[coming] if coming < len(arrivals) else NEVER,
                *(server.ends for server in self.servers),
                *(server.ready for server in self.servers),
            )
            for server in self.servers:
                if server.ends == now:
                    assert server.serving is not None
                    self.over[server.serving] = now
                    server.serving, server.ends = None, NEVER
            for server in self.servers:
                if server.ready == now:
                    server.ready, server.state = NEVER, "up"
                    self.note(now)
            if look == now:
                self.look(now)
                look += self.every
            while coming < len(arrivals) and arrivals[coming] == now:
                self.new += 1
                self.send(coming)
                coming += 1
            for server in self.servers:
                if server.serving is None and server.queue:
                    server.serving = server.queue.pop(0)
                    server.ends = now + service[server.serving]
                if server.state == "draining" and not server.load:
                    server.state = "free"
                    self.note(now)
        return self.over

    def send(self, request: int) -> None:
        up = [server for server in self.servers if server.state == "up"]
        min(up, key=lambda server: server.load).queue.append(request)

    def note(self, now: int) -> None:
        if self.log[-1][0] == now:
            self.log.pop()
        states = [server.state for server in self.servers]
        counts = states.count("up"), len(states) - states.count("free")
        if not self.log or self.log[-1][1:] != counts:
            self.log.append((now, *counts))

    def wanted(self) -> int:
        rule, present = self.rule, len(self.order)
        up = [self.servers[i] for i in self.order if self.servers[i].state == "up"]
        loads = [len(server.queue) if rule.watch == "waiting" else server.load for server in up]
        if rule.kind == "rate":
            return math.ceil(round(self.new / rule.capacity, 9))
        if rule.kind == "target":
            share = sum(loads) / rule.capacity
            return present if round(abs(share / present - 1), 9) <= rule.tolerance else math.ceil(round(share, 9))
        if any(server.state in ("starting", "draining") for server in self.servers):
            return present
        if max(loads) >= rule.up:
            return present + 1
        return present - 1 if max(loads) <= rule.down else present

    def look(self, now: int) -> None:
        wanted = max(self.least, min(self.most, self.wanted()))
        self.new = 0
        self.asked = [(at, number) for at, number in [*self.asked, (now, wanted)] if at >= now - self.window]
        down_to = max(number for _, number in self.asked)
        moved: list[int] = []
        while len(self.order) < wanted and any(server.state == "free" for server in self.servers):
            at = next(i for i, server in enumerate(self.servers) if server.state == "free")
            self.order.append(at)
            self.servers[at].state, self.servers[at].ready = "starting", now + self.startup
        while len(self.order) > max(wanted, min(down_to, len(self.order))):
            server = self.servers[self.order.pop()]
            if server.state == "starting":
                server.state, server.ready = "free", NEVER
                continue
            server.state = "draining"
            moved += server.queue
            server.queue = []
        for request in moved:
            self.send(request)
        self.note(now)


def scaling_of(rule: Rule, every_s: float, **limits: Any) -> dict[str, Any]:
    """Return the same controller as a plan states it."""
    stated: dict[str, Any] = {"kind": rule.kind}
    if rule.kind == "rate":
        stated["requests_per_s"] = rule.capacity / every_s
    else:
        stated["watch"] = rule.watch
    if rule.kind == "target":
        stated |= {"load": rule.capacity, "tolerance": rule.tolerance}
    if rule.kind == "thresholds":
        stated |= {"up": rule.up, "down": rule.down}
    return {"rule": stated, "every_s": every_s, **limits}
