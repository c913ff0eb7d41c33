"""vLLM of 2023, TensorRT-LLM and SGLang, as plainly as possible: oracles for `simtune.engine.policies`.

Each is written from the description of the engine's rule, with lists and loops only, and shares no code with simtune.
Memory is counted in blocks per request; nothing is remembered that can be counted anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(eq=False)
class One:
    id: int
    prompt: int
    output: int
    computed: int = 0
    emitted: int = 0
    blocks: int = 0
    decoding: bool = False

    @property
    def known(self) -> int:
        return self.prompt + self.emitted


class PlainEngine(ABC):
    def __init__(self, blocks: int, block_size: int, seqs: int, budget: int, longest: int) -> None:
        self.total, self.size, self.seqs, self.budget, self.longest = blocks, block_size, seqs, budget, longest
        self.waiting: list[One] = []
        self.running: list[One] = []
        self.preempted: list[int] = []

    @property
    def free(self) -> int:
        return self.total - sum(one.blocks for one in self.running)

    def need(self, tokens: int) -> int:
        return (tokens + self.size - 1) // self.size

    def grow(self, one: One, tokens: int) -> None:
        one.blocks = max(one.blocks, self.need(tokens))

    def short(self, decoding: list[One]) -> bool:
        return sum(max(0, self.need(one.computed + 1) - one.blocks) for one in decoding) > self.free

    def drop(self, one: One) -> None:
        self.running.remove(one)
        one.computed, one.blocks, one.decoding = 0, 0, False
        self.preempted.append(one.id)

    @abstractmethod
    def choose(self) -> dict[One, int]: ...

    def step(self) -> tuple[dict[int, int], list[int], list[int]]:
        """(tokens of each request, those preempted, those finished)."""
        self.preempted = []
        chosen = self.choose()
        finished = []
        for one, tokens in chosen.items():
            one.computed += tokens
            if one.decoding or one.computed == one.known:
                one.decoding = True
                one.emitted += 1
                if one.emitted == one.output:
                    finished.append(one.id)
                    self.running.remove(one)
        return {one.id: tokens for one, tokens in chosen.items()}, self.preempted, finished


class PlainV0(PlainEngine):
    def __init__(self, *args: int, swap: bool = False, watermark: int = 0) -> None:
        super().__init__(*args)
        self.swap, self.watermark = swap, watermark
        self.swapped: list[One] = []

    def floor(self) -> int:
        return self.watermark if self.running else 0

    def choose(self) -> dict[One, int]:
        prompts: dict[One, int] = {}
        while not self.swapped and self.waiting and len(self.running) < self.seqs:
            one = self.waiting[0]
            longest = max([*prompts.values(), one.known])
            if (len(prompts) + 1) * longest > self.budget or self.free - self.need(one.known) < self.floor():
                break
            self.waiting.pop(0)
            self.grow(one, one.known)
            self.running.append(one)
            prompts[one] = one.known
        if prompts:
            return prompts
        decodes: dict[One, int] = {}
        asking = sorted(self.running, key=lambda one: one.id)
        while asking:
            one = asking.pop(0)
            while self.free < 1 and asking:
                self.put_out(asking.pop())
            if self.free < 1 and (decodes or self.need(one.computed + 1) > one.blocks):
                self.put_out(one)
                break
            self.grow(one, one.computed + 1)
            decodes[one] = 1
        while self.swapped and not self.preempted and len(self.running) < self.seqs:
            one = self.swapped[0]
            held = self.need(one.computed)
            if (held + 1 if self.running else self.need(one.computed + 1)) > self.free - self.floor():
                break
            self.swapped.pop(0)
            self.grow(one, one.computed + 1)
            self.running.append(one)
            one.decoding = True
            decodes[one] = 1
        return decodes

    def put_out(self, one: One) -> None:
        computed = one.computed
        self.drop(one)
        if self.swap:
            one.computed = computed
            self.swapped = sorted([*self.swapped, one], key=lambda other: other.id)
        else:
            self.waiting.insert(0, one)


class PlainTensorRt(PlainEngine):
    def __init__(self, *args: int, evicts: bool, in_turn: bool, chunked: bool, most: int) -> None:
        super().__init__(*args)
        self.evicts, self.in_turn, self.chunked, self.most = evicts, in_turn, chunked, most

    def claim(self, one: One) -> int:
        return one.known if self.evicts else min(max(one.prompt + self.most, one.known), self.longest)

    def choose(self) -> dict[One, int]:
        while self.short([one for one in self.running if one.decoding]):
            last = self.running[-1]
            self.drop(last)
            self.waiting.insert(0, last)
        chosen = {}
        for one in self.running:
            if one.decoding:
                self.grow(one, one.computed + 1)
                chosen[one] = 1
        contexts = [one for one in self.running if not one.decoding]
        if not self.preempted:
            free, seats = self.free, self.seqs - len(self.running)
            for one in self.waiting:
                free -= self.need(self.claim(one))
                if free < 0 or not seats:
                    break
                seats -= 1
                contexts.append(one)
        chunks = self.chunks(contexts, self.budget - len(chosen))
        for one in contexts:
            if chunks[one]:
                chosen[one] = chunks[one]
                if one in self.waiting:
                    self.waiting.remove(one)
                    self.running.append(one)
                    self.grow(one, self.claim(one))
        return chosen

    def chunks(self, contexts: list[One], capacity: int) -> dict[One, int]:
        unit, sizes = min(self.size, self.budget), dict.fromkeys(contexts, 0)
        if not self.chunked:
            for one in contexts:
                if sum(sizes.values()) + one.known > capacity:
                    break
                sizes[one] = one.known
        elif not self.in_turn:
            for one in contexts:
                left = capacity - sum(sizes.values())
                rest = one.known - one.computed
                sizes[one] = rest if rest <= left else left - left % unit
        else:
            before = -1
            while before != sum(sizes.values()):
                before = sum(sizes.values())
                for one in contexts:
                    more = min(unit, one.known - one.computed - sizes[one])
                    if sum(sizes.values()) + more <= capacity:
                        sizes[one] += more
        return sizes


class PlainSglang(PlainEngine):
    def __init__(self, *args: int, chunked: bool, most: int, conservative: float) -> None:
        super().__init__(*args)
        self.chunked, self.most = chunked, most
        self.start = min(0.7 * conservative, 1.0)
        self.least = self.start * 0.14
        self.ratio, self.full = self.start, False

    def may(self, one: One) -> int:
        return min(self.most, self.longest - one.prompt)

    def left(self, one: One) -> int:
        return min(max(self.may(one) - one.emitted, 0), 4096)

    def choose(self) -> dict[One, int]:
        return self.prefill() or self.decode()

    def prefill(self) -> dict[One, int]:
        chosen = {}
        budget = self.budget
        for one in self.running:
            if not one.decoding:
                chosen[one] = min(one.known - one.computed, budget)
                budget -= chosen[one]
        while self.waiting and budget and not self.full:
            one = self.waiting[0]
            spare: float = self.free * self.size
            spare -= sum(self.left(r) * (self.ratio if r.decoding else 1) for r in self.running)
            fits = not self.running or one.known + self.left(one) < spare - 1e-9
            if len(self.running) >= self.seqs or self.need(one.known) > self.free or not fits:
                self.full = True
                break
            page = min(self.size, self.budget)
            tokens = one.known if one.known <= budget else budget - budget % page if self.chunked else 0
            if not tokens:
                break
            budget = budget - tokens if tokens == one.known else 0
            self.waiting.pop(0)
            self.running.append(one)
            self.grow(one, one.known)
            chosen[one] = tokens
        return chosen

    def decode(self) -> dict[One, int]:
        if self.short(self.running):
            order = sorted(self.running, key=lambda one: (one.emitted, -one.prompt), reverse=True)
            while len(order) > 1 and (not self.preempted or self.free * self.size < 20 * len(order)):
                victim = order.pop()
                self.drop(victim)
                self.waiting.append(victim)
            self.ratio = min(1.0, sum(one.emitted + 20 for one in order) / sum(self.may(one) for one in order))
            self.full = False
        else:
            self.ratio = max(self.ratio - (self.start - self.least) / 600, self.least)
        for one in self.running:
            self.grow(one, one.computed + 1)
        return dict.fromkeys(self.running, 1)

    def step(self) -> tuple[dict[int, int], list[int], list[int]]:
        scheduled, preempted, finished = super().step()
        if finished:
            self.full = False
        if not (self.running or self.waiting):
            self.ratio, self.full = self.start, False
        return scheduled, preempted, finished
