"""Prefill and decode instances on shares of one device, as simpy processes: what two pools that share GPUs come to."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

Process = Generator[simpy.Event, Any, None]


@dataclass
class Asked:
    """One request: what it asks for, and when it was served."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    first_token_s: float = -1.0
    finish_s: float = -1.0
    computed: int = 0
    emitted: int = 1


@dataclass
class Share:
    """What an instance holds of the device while it steps, in hundredths."""

    processors: int
    bandwidth: int


@dataclass
class SplitDevice:
    """One prompt after the other on one share; on the other all that have their KV cache decode together.

    A step takes its share of both resources from the device, and waits where another has it: nobody ever does as long
    as the shares come to no more than the device.
    """

    requests: Sequence[Asked]
    shares: tuple[Share, Share]
    prefill_s: Callable[[int], float]
    """Seconds of a prompt of so many tokens, on its share."""
    decode_s: Callable[[int, int], float]
    """Seconds of a step of so many sequences that read so many tokens, on its share."""
    transfer_s: Callable[[int], float]
    """Seconds in which the KV cache of so many tokens goes from one to the other, whatever else is sent."""
    env: simpy.Environment = field(default_factory=simpy.Environment)
    waited_s: float = 0.0
    busy_s: tuple[float, float] = (0.0, 0.0)
    overlapped_s: float = 0.0
    """Of steps that began or ended while the other instance was in one."""

    def run(self) -> None:
        """Serve all requests."""
        self._processors, self._bandwidth = (simpy.Container(self.env, 100, 100) for _ in range(2))
        self._prompts, self._coming, self._here = (simpy.Store(self.env) for _ in range(3))
        self._changed = self.env.event()
        self.env.process(self._arrivals())
        self.env.process(self._prefilling())
        self.env.process(self._decoding())
        self.env.run()

    def _arrivals(self) -> Process:
        for request in self.requests:
            yield self.env.timeout(request.arrival_s - self.env.now)
            self._prompts.put(request)

    def _step(self, which: int, seconds: float) -> Process:
        share, asked_s = self.shares[which], self.env.now
        yield self._processors.get(share.processors)
        yield self._bandwidth.get(share.bandwidth)
        self.waited_s += self.env.now - asked_s
        alone = self._processors.level + share.processors == 100
        yield self.env.timeout(seconds)
        if not alone or self._processors.level + share.processors < 100:
            self.overlapped_s += seconds
        yield self._processors.put(share.processors)
        yield self._bandwidth.put(share.bandwidth)
        busy = list(self.busy_s)
        busy[which] += seconds
        self.busy_s = (busy[0], busy[1])

    def _prefilling(self) -> Process:
        for _ in self.requests:
            request = yield self._prompts.get()
            yield from self._step(0, self.prefill_s(request.prompt_tokens))
            request.first_token_s = self.env.now
            request.computed = request.prompt_tokens
            self._coming.put(request)
            self._notify()

    def _decoding(self) -> Process:
        """Between two steps those join whose KV cache is here, and those that wait have theirs sent."""
        members: list[Asked] = []
        left = len(self.requests)
        while left:
            members += self._here.items
            self._here.items.clear()
            for request in self._coming.items:
                self.env.process(self._sending(request))
            self._coming.items.clear()
            if not members:
                yield self._changed
                continue
            context = sum(member.computed + 1 for member in members)
            yield from self._step(1, self.decode_s(len(members), context))
            for member in members:
                member.computed += 1
                member.emitted += 1
                if member.emitted == member.output_tokens:
                    member.finish_s = self.env.now
                    left -= 1
            members = [member for member in members if member.finish_s < 0]

    def _sending(self, request: Asked) -> Process:
        yield self.env.timeout(self.transfer_s(request.prompt_tokens))
        self._here.put(request)
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, self.env.event()
        changed.succeed()
