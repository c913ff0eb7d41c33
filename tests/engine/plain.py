"""vLLM V1's first-come-first-served scheduler, written as plainly as possible: one loop per step, one per request.

This is the oracle that `simtune.engine` is compared with. It shares no code with it, keeps every request's state
explicitly, and is checked itself against logs of the real engine (tests/engine/test_steplogs.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class PlainRequest:
    id: int
    prompt: int
    output: int
    computed: int = 0  # tokens whose KV is in the cache
    emitted: int = 0  # output tokens delivered
    blocks: int = 0
    preemptions: int = 0
    decoding: bool = False  # its prompt is in the cache and its last token is the one to compute next

    @property
    def known(self) -> int:
        return self.prompt + self.emitted


@dataclass
class PlainStep:
    scheduled: dict[int, int] = field(default_factory=dict)  # request id -> tokens, in the order chosen
    past: dict[int, int] = field(default_factory=dict)  # request id -> tokens computed before
    decodes: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)  # requests whose first token came out
    finished: list[int] = field(default_factory=list)
    free: int = 0
    running: int = 0
    waiting: int = 0


class PlainEngine:
    def __init__(self, blocks: int, block_size: int, max_num_seqs: int, budget: int, chunked: bool = True) -> None:
        self.free, self.block_size = blocks, block_size
        self.max_num_seqs, self.budget, self.chunked = max_num_seqs, budget, chunked
        self.waiting: deque[PlainRequest] = deque()
        self.running: list[PlainRequest] = []

    def add(self, request: PlainRequest) -> None:
        self.waiting.append(request)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def step(self) -> PlainStep:
        step, left = PlainStep(), self.budget
        i = 0
        while i < len(self.running) and left > 0:
            request = self.running[i]
            tokens = min(request.known - request.computed, left)
            more = self._blocks(request.computed + tokens) - request.blocks
            while more > self.free:
                victim = self.running.pop()
                self.free += victim.blocks
                victim.blocks = victim.computed = 0
                victim.preemptions += 1
                victim.decoding = False
                self.waiting.appendleft(victim)
                step.preempted.append(victim.id)
                if victim is request:
                    break
            if request.blocks == 0:  # preempted itself
                break
            self._schedule(step, request, tokens, more)
            left -= tokens
            i += 1
        if not step.preempted:
            while self.waiting and left > 0 and len(self.running) < self.max_num_seqs:
                request = self.waiting[0]
                if not self.chunked and request.known > left:
                    break
                if self._blocks(request.known) > self.free:
                    break
                self.waiting.popleft()
                self.running.append(request)
                tokens = min(request.known, left)
                self._schedule(step, request, tokens, self._blocks(tokens))
                left -= tokens
        step.free, step.running, step.waiting = self.free, len(self.running), len(self.waiting)
        for request in list(self.running):
            if request.id in step.scheduled:
                request.computed += step.scheduled[request.id]
                if request.computed == request.known:
                    request.emitted += 1
                    request.decoding = True
                    if request.emitted == 1:
                        step.first.append(request.id)
                    if request.emitted == request.output:
                        step.finished.append(request.id)
                        self.running.remove(request)
                        self.free += request.blocks
        return step

    def _schedule(self, step: PlainStep, request: PlainRequest, tokens: int, more: int) -> None:
        self.free -= more
        request.blocks += more
        step.scheduled[request.id] = tokens
        step.past[request.id] = request.computed
        if request.decoding:
            step.decodes.append(request.id)
