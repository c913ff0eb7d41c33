"""transformers' continuous batching, as plainly as possible: every block by its number, every text by its words.

The oracle for `simtune.engine.transformers_scheduler`, with which it shares no code.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(eq=False)
class PlainRequest:
    id: int
    prompt: int
    output: int
    names: tuple[Hashable, ...] = ()  # of its leading blocks
    computed: int = 0
    emitted: int = 0
    table: list[int] = field(default_factory=list)
    complete: int = 0  # how many of these are complete
    status: str = "pending"

    @property
    def known(self) -> int:
        return self.prompt + self.emitted

    def name(self, block: int) -> Hashable:
        return self.names[block] if block < len(self.names) else ("own", self.id, block)


@dataclass
class PlainStep:
    scheduled: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    reset: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    free: int = 0


class PlainTransformers:
    def __init__(
        self, blocks: int, block_size: int, seqs: int, budget: int, *, first: bool, margin: float, sharing: bool
    ) -> None:
        self.total, self.block_size, self.seqs, self.budget = blocks, block_size, seqs, budget
        self.prefill_first, self.margin, self.sharing = first, margin, sharing
        self.blank = list(range(blocks))
        self.idle: list[int] = []
        self.users = [0] * blocks
        self.text: dict[int, Hashable] = {}  # what a complete block contains
        self.active: list[PlainRequest] = []
        self.waiting: list[PlainRequest] = []
        self.closed = False

    @property
    def free(self) -> int:
        return len(self.blank) + len(self.idle)

    def add(self, request: PlainRequest) -> None:
        self.waiting.append(request)

    def _holding(self, text: Hashable) -> int | None:
        return next((block for block, known in self.text.items() if known == text), None)

    def _hold(self, block: int) -> None:
        self.users[block] += 1
        if self.users[block] == 1:
            self.idle.remove(block)

    def _give_back(self, request: PlainRequest) -> None:
        for block in request.table:
            self.users[block] -= 1
            if self.users[block] == 0:
                (self.idle if block in self.text else self.blank).append(block)
        request.table, request.complete = [], 0

    def _take(self, request: PlainRequest, tokens: int) -> bool:
        needed = -(-(request.computed + tokens) // self.block_size) - len(request.table)
        if needed > self.free:
            return False
        while len(self.blank) < needed:
            block = self.idle.pop()
            del self.text[block]
            self.blank.append(block)
        for _ in range(needed):
            block = self.blank.pop(0)
            self.users[block] = 1
            request.table.append(block)
        return True

    def _match(self, request: PlainRequest) -> None:
        for number in range((request.known - 1) // self.block_size):
            block = self._holding(request.name(number))
            if block is None:
                break
            self._hold(block)
            request.table.append(block)
        request.complete = len(request.table)
        request.computed = request.complete * self.block_size
        if request.table:
            request.status = "prefill"
            self.waiting.remove(request)
            self.active.append(request)

    def _complete(self, request: PlainRequest) -> None:
        while request.complete < request.computed // self.block_size:
            text, own = request.name(request.complete), request.table[request.complete]
            other = self._holding(text)
            if other is None:
                self.text[own] = text
            else:
                self._hold(other)
                request.table[request.complete] = other
                self.users[own] = 0
                self.blank.append(own)
            request.complete += 1

    def _choose(self, step: PlainStep) -> list[tuple[PlainRequest, int]]:
        step.scheduled, step.read, starved = {}, {}, []
        decoding = [r for r in self.active if r.status == "decode"]
        under_way = [r for r in self.active if r.status == "prefill"]
        candidates = under_way + decoding if self.prefill_first else decoding + under_way
        if not self.closed:
            candidates += self.waiting
        left, readable = self.budget, self.total * self.block_size
        roomy = self.free / self.total >= self.margin
        for request in candidates:
            if not roomy and step.scheduled and request.status != "decode":
                break
            if self.sharing and request.status == "pending":
                self._match(request)
            if request.computed > readable:
                continue
            tokens = 1 if request.status == "decode" else min(request.known - request.computed, left)
            if not self._take(request, tokens):
                if request in self.active:
                    starved.append((request, tokens))
                continue
            if request in self.waiting:
                self.waiting.remove(request)
                self.active.append(request)
                request.status = "prefill"
            step.scheduled[request.id] = tokens
            step.read[request.id] = request.computed
            left -= tokens
            readable -= request.computed
            if left == 0 or readable <= 0 or len(step.scheduled) == self.seqs:
                break
        return starved

    def _reset(self, starved: list[tuple[PlainRequest, int]]) -> list[PlainRequest]:
        reset: list[PlainRequest] = []
        order = list(self.active)
        free = self.free
        while starved and len(self.active) > 1:
            needed = sum(-(-(r.computed + n) // self.block_size) - len(r.table) for r, n in starved)
            if needed <= free:
                break
            victim, _ = starved.pop()
            free += sum(self.users[block] == 1 for block in victim.table)
            self.active.remove(victim)
            victim.status = "pending"
            victim.computed = 0
            self.closed = True
            reset.append(victim)
        reset.sort(key=order.index)
        self.waiting += reset
        return reset

    def step(self) -> PlainStep:
        step = PlainStep()
        starved = self._choose(step)
        while not step.scheduled:
            reset = self._reset(starved)
            if not reset:
                raise RuntimeError("nothing can run")
            step.reset += [r.id for r in reset]
            for request in reset:
                self._give_back(request)
            starved = self._choose(step)
        after = self._reset(starved)
        step.reset += [r.id for r in after]
        step.free = self.free
        by_id = {request.id: request for request in self.active}
        for number, tokens in step.scheduled.items():
            request = by_id[number]
            request.computed += tokens
            if self.sharing:
                self._complete(request)
            if request.computed == request.known:
                request.status = "decode"
                request.emitted += 1
                if request.emitted == request.output:
                    step.finished.append(number)
                    self.active.remove(request)
                    self._give_back(request)
        for request in after:
            self._give_back(request)
        if step.finished:
            self.closed = False
        return step
