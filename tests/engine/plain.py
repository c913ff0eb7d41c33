"""vLLM V1's schedulers, written as plainly as possible: one loop per step, one per request, every block by its number.

This is the oracle that `simtune.engine` is compared with. It shares no code with it, keeps every request's state
explicitly, and is checked itself against logs of the real engine (tests/engine/test_steplogs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field


@dataclass(eq=False)
class PlainRequest:
    id: int
    prompt: int
    output: int
    priority: int = 0
    names: tuple[Hashable, ...] = ()  # of its leading blocks
    computed: int = 0  # tokens whose KV is in the cache
    emitted: int = 0  # output tokens delivered
    table: list[int] = field(default_factory=list)  # the blocks it holds, in order
    preemptions: int = 0
    decoding: bool = False  # its prompt is in the cache and its last token is the one to compute next
    ended: bool = False  # complete, but the engine does not know it yet
    discarded: bool = False  # the same, and it is computed once more
    drafts: int = 0
    padding: int = 0  # drafts of its first step that nobody made
    ahead: int = 0  # drafts rejected in the step before, which the engine does not know yet
    unheard: int = 0  # tokens delivered by that step
    rounds: int = 0

    @property
    def known(self) -> int:
        return self.prompt + self.emitted

    def name(self, block: int) -> Hashable:
        return self.names[block] if block < len(self.names) else ("private", self.id, block)


@dataclass
class PlainStep:
    scheduled: dict[int, int] = field(default_factory=dict)  # request id -> tokens, in the order chosen
    past: dict[int, int] = field(default_factory=dict)  # request id -> tokens computed before
    decodes: list[int] = field(default_factory=list)
    admitted: dict[int, int] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)  # requests whose first token came out
    finished: list[int] = field(default_factory=list)
    free: int = 0
    running: int = 0
    waiting: int = 0


class PlainEngine:
    def __init__(
        self,
        blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        chunked: bool = True,
        *,
        max_model_len: int = 1 << 30,
        priority: bool = False,
        caching: bool = False,
        asynchronous: bool = False,
        swap: bool = False,
        watermark: int = 0,
        drafts: int = 0,
        accepted: Callable[[int, int, int], int] = lambda request, number, drafts: 0,
        lookahead: int = 0,
        extra_slots: int = 0,
        drops_last_hit: bool = False,
        hashes_next: bool = False,
        names_verified: bool = False,
        by_batch: Callable[[int], int] | None = None,
        threshold: int = 0,
        reserve_full_isl: bool = True,
        interval: int = 1,
        aligned: bool = False,
        self_preemption_ends: bool = True,
        adaptive: bool = False,
    ) -> None:
        self.block_size, self.max_num_seqs, self.budget, self.chunked = block_size, max_num_seqs, budget, chunked
        self.max_model_len, self.watermark = max_model_len, watermark
        self.priority, self.caching, self.asynchronous, self.swap = priority, caching, asynchronous, swap
        self.drafts, self.accepted, self.lookahead, self.extra = drafts, accepted, lookahead, extra_slots
        self.drops_last_hit, self.by_batch = drops_last_hit, by_batch
        self.hashes_next, self.names_verified = hashes_next, names_verified
        self.threshold, self.reserve_full_isl = threshold, reserve_full_isl
        self.interval, self.adaptive, self.steps, self.bound = interval, adaptive, 0, False
        self.aligned, self.last_prompt, self.self_preemption_ends = aligned, -interval, self_preemption_ends
        self.waiting: list[PlainRequest] = []
        self.running: list[PlainRequest] = []
        self.queue = list(range(blocks))  # free blocks, the next one to take first
        self.users = [0] * blocks
        self.content: dict[int, Hashable] = {}  # block -> what can be found in it
        self.just_ended: list[PlainRequest] = []
        self.short = self.rested = False
        self.stale = 0  # preempted, though they had ended

    @property
    def free(self) -> int:
        return len(self.queue)

    def add(self, request: PlainRequest) -> None:
        self.waiting.append(request)
        self._sort()

    def _sort(self) -> None:
        if self.priority:
            self.waiting.sort(key=lambda r: (r.priority, r.id))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _more(self, request: PlainRequest, computed: int, tokens: int) -> int:
        reach = min(computed + tokens + self.lookahead, self.max_model_len)
        return max(0, self._blocks(reach) - len(request.table))

    def _take(self, request: PlainRequest, blocks: int) -> None:
        for _ in range(blocks):
            block = self.queue.pop(0)
            self.content.pop(block, None)
            self.users[block] = 1
            request.table.append(block)

    def _free(self, request: PlainRequest) -> None:
        for block in reversed(request.table):
            self.users[block] -= 1
            if self.users[block] == 0:
                if block in self.content:
                    self.queue.append(block)
                else:
                    self.queue.insert(0, block)
        request.table = []

    def _content(self, request: PlainRequest, block: int) -> Hashable:
        return (request.name(block), request.name(block + 1)) if self.hashes_next else request.name(block)

    def _store(self, request: PlainRequest, tokens: int) -> None:
        if self.caching:
            if self.hashes_next:  # the token after a block must be known to the engine
                tokens = min(tokens, request.known - request.unheard - 1)
            for i in range(tokens // self.block_size):
                self.content.setdefault(request.table[i], self._content(request, i))

    def _found(self, request: PlainRequest) -> list[int]:
        found: list[int] = []
        if self.caching:
            for i in range((request.known - 1) // self.block_size):
                block = next((b for b, name in self.content.items() if name == self._content(request, i)), None)
                if block is None:
                    break
                found.append(block)
        return found[:-1] if self.drops_last_hit else found

    def step(self) -> PlainStep:
        """The next step with something in it; where nothing runs, the engine comes straight back."""
        preempted: list[int] = []
        while True:
            step = self._step()
            preempted += step.preempted
            step.preempted = preempted
            if step.scheduled:
                return step
            if not (step.preempted or self.just_ended or self.short or self.rested):
                raise RuntimeError("nothing can run")
            self._part()

    def _step(self) -> PlainStep:
        step, left = PlainStep(), self.budget
        everybody = len(self.running) + len(self.waiting) + self.stale
        threshold = self.threshold if everybody > 1 else 0
        if threshold and self.adaptive:
            threshold = max(threshold, self.budget // everybody)
        due = self.steps % self.interval == 0 if self.aligned else self.steps + 1 - self.last_prompt >= self.interval
        defers = not due and not self.bound and any(request.decoding for request in self.running)
        self.short = self.rested = prefills = False
        i = 0
        while i < len(self.running) and left > self.extra:
            request = self.running[i]
            if (request.ended and not request.discarded) or (defers and not request.decoding):
                i += 1
                continue
            wanted = 1 + request.drafts if request.decoding else request.known - request.computed
            if 0 < threshold < wanted:
                wanted = threshold
            tokens = min(wanted, left - self.extra)
            if request.decoding:
                tokens = min(tokens, self.max_model_len - 1 - request.computed - request.ahead)
            else:
                tokens = self._granted(request, request.computed, tokens)
            if tokens <= 0:
                self.rested = True
                i += 1
                continue
            more = self._more(request, request.computed + request.ahead, tokens)
            while more > self.free:
                self.short = True
                victim = max(self.running, key=lambda r: (r.priority, r.id)) if self.priority else self.running[-1]
                if self.running.index(victim) < i:
                    i -= 1
                self.running.remove(victim)
                self._gone(victim)
                if victim.id in step.scheduled:
                    left += step.scheduled.pop(victim.id) + self.extra
                    if victim.id in step.decodes:
                        step.decodes.remove(victim.id)
                self._free(victim)
                if victim.ended:
                    self.just_ended.remove(victim)
                    self.stale += 1
                    step.preempted.append(victim.id)
                    if victim is request:
                        break
                    continue
                if not self.swap:
                    victim.computed = 0
                victim.preemptions += 1
                victim.decoding, victim.drafts, victim.ahead, victim.unheard = False, 0, 0, 0
                self.waiting.insert(0, victim)
                self._sort()
                step.preempted.append(victim.id)
                if victim is request:
                    break
            if request not in self.running:
                if self.self_preemption_ends:
                    break
                continue
            self._take(request, more)
            self._schedule(step, request, tokens)
            prefills = prefills or not request.decoding
            left -= tokens + self.extra
            i += 1
        residents = len(step.scheduled)
        admits_prompt = False
        if not self.short:
            while self.waiting and left > self.extra and len(self.running) < self.max_num_seqs:
                request = self.waiting[0]
                found = self._found(request)
                past = len(found) * self.block_size if found else request.computed
                if defers and past < request.known - 1:
                    break
                request.padding = 0
                tokens = request.known - past
                if 0 < threshold < tokens:
                    tokens = threshold
                fits = past + self.drafts + 2 <= self.max_model_len and 1 + self.drafts + self.extra <= self.budget
                if tokens == 1 and fits and self.by_batch is None and not prefills and (past or residents):
                    request.padding = self.drafts
                    tokens += self.drafts
                if tokens > left - self.extra and (request.padding or not self.chunked):
                    break
                tokens = self._granted(request, past, min(tokens, left - self.extra))
                if tokens <= 0:
                    break
                needed = self._more(request, past, tokens)
                if self.reserve_full_isl:
                    needed = max(needed, self._blocks(request.known))
                free = self.free - sum(self.users[block] == 0 for block in found)
                if needed - len(found) > free - (self.watermark if self.running else 0):
                    break
                self.waiting.pop(0)
                self.running.append(request)
                for block in found:
                    if self.users[block] == 0:
                        self.queue.remove(block)
                    self.users[block] += 1
                request.table = found
                request.computed = past
                self._take(request, self._more(request, past, tokens))
                self._schedule(step, request, tokens)
                step.admitted[request.id] = past
                admits_prompt = admits_prompt or past < request.known - 1
                left -= tokens + self.extra
            if not defers:
                self.bound = bool(self.waiting)
        if step.scheduled and (prefills or admits_prompt):
            self.last_prompt = self.steps + 1
        step.free, step.running, step.waiting = self.free, len(self.running), len(self.waiting) + self.stale
        for request in self.running:
            if request.id not in step.scheduled:
                request.ahead = request.unheard = 0
        if step.scheduled:
            self.steps += 1
            self._part()
            self._run(step)
        return step

    def _run(self, step: PlainStep) -> None:
        for request in list(self.running):
            if request.id not in step.scheduled:
                continue
            tokens = step.scheduled[request.id]
            request.ahead, request.discarded, request.unheard = 0, False, 0
            before = request.emitted
            if not request.decoding:
                self._passed(request, request.computed + tokens)
                request.computed += tokens - request.padding
                if request.computed < request.known:
                    continue
                request.ahead = request.padding if self.asynchronous else 0
                request.padding = 0
                request.emitted += 1
                request.decoding = True
                if request.emitted == 1:
                    step.first.append(request.id)
            else:
                accepted = 0
                if tokens > 1:
                    accepted = self.accepted(request.id, request.rounds, tokens - 1)
                    request.rounds += 1
                request.ahead = tokens - 1 - accepted if self.asynchronous else 0
                request.discarded = self.asynchronous and request.output - request.emitted > 1
                request.computed += 1 + accepted
                request.emitted = min(request.emitted + 1 + accepted, request.output)
            request.drafts = self.drafts if self.by_batch is None else self.by_batch(len(step.scheduled))
            if self.asynchronous:
                request.unheard = request.emitted - before
            if request.emitted == request.output:
                step.finished.append(request.id)
                request.ended = True
                self.just_ended.append(request)
        if not self.asynchronous:
            self._part()

    def _part(self) -> None:
        if self.asynchronous or self.names_verified:
            for request in self.running:
                request.unheard = 0
                if request.decoding:
                    self._store(request, request.known - 1)
        for request in self.just_ended:
            self._gone(request)
            self.running.remove(request)
            self._free(request)
        self.just_ended = []
        self.stale = 0

    def _granted(self, request: PlainRequest, past: int, tokens: int) -> int:
        """Tokens that images leave of those after `past`; all where there are no images."""
        return tokens

    def _committed(self, request: PlainRequest) -> None:
        """The request gets what was granted last."""

    def _passed(self, request: PlainRequest, computed: int) -> None:
        """So much of a prompt is computed."""

    def _gone(self, request: PlainRequest) -> None:
        """The request has left."""

    def _schedule(self, step: PlainStep, request: PlainRequest, tokens: int) -> None:
        if not request.decoding:
            self._committed(request)
        step.scheduled[request.id] = tokens
        step.past[request.id] = request.computed
        if request.decoding:
            step.decodes.append(request.id)
            self._store(request, min(request.computed + request.ahead + tokens, request.known - request.unheard))
        else:
            self._store(request, request.computed + tokens - request.padding)
