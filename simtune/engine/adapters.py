"""Slots of LoRA adapters: which waiting requests may be admitted, and which adapters a step has to load.

The rule is that of vLLM (0.33: `Scheduler.schedule` in vllm/v1/core/sched/scheduler.py, `LRUCacheWorkerLoRAManager` in
vllm/lora/worker_manager.py). The adapters of all requests that run may not exceed the slots. A waiting request whose
adapter would exceed them is skipped: those behind it may be admitted, and it stays where it is in the queue. Adapters
stay in their slots until another one needs the slot of the least recently used; the same holds for the copies in host
memory. SGLang (0.5.23: `can_schedule_lora_req` in srt/managers/scheduler.py, `prepare_lora_batch` in
srt/lora/mem_pool.py) has the same rule, and the base model takes one of the slots while requests without an adapter
run.

vLLM goes through the adapters of a step in the order of a hash, and may evict one that the same step needs. Here the
adapters of a step are used in order of their numbers, and none of them is evicted for another.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from simtune.engine.request import NO_ADAPTER, Request
from simtune.engine.reservations import Reservations
from simtune.engine.waiting import WaitingQueue


class AdapterTally(NamedTuple):
    """Adapters that the steps of an engine core needed."""

    requests: int = 0
    """Admissions of requests with an adapter."""
    hits: int = 0
    """Number of them that found their adapter in a slot."""
    from_host: int = 0
    """Loads of an adapter from host memory."""
    from_storage: int = 0
    """Loads of an adapter that was not in host memory."""
    waited: int = 0
    """Ticks for which steps waited for loads."""
    products: int = 0
    """Ticks of the products of adapters, those that hide behind the host among them."""


class AdapterSlots:
    """Adapters in the slots of an engine core and in its host memory, the least recently used first."""

    __slots__ = ("_host", "_latest", "_resident", "counts_base", "host_slots", "slots", "tally")

    def __init__(self, slots: int, host_slots: int | None = None, *, counts_base: bool = False) -> None:
        """Make empty slots. `host_slots` adapters are kept in host memory, at least as many as slots; None: all are,
        from the beginning. With `counts_base` the base model needs a slot too while requests without an adapter run.

        Raises ValueError for fewer host slots than slots, or no slot."""
        if slots < 1 or (host_slots is not None and host_slots < slots):
            raise ValueError(f"slots ({slots}) must be at least 1, and host_slots ({host_slots}) at least as many")
        self.slots, self.host_slots, self.counts_base = slots, host_slots, counts_base
        self.tally = AdapterTally()
        self.clear()

    def clear(self) -> None:
        """Lose all adapters, with the instance."""
        self._resident: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()
        self._latest: frozenset[int] = frozenset()

    def use(self, adapters: frozenset[int], admitted: Iterable[Request] = ()) -> tuple[int, int]:
        """Load the adapters of a step, at most `slots`; return the numbers of loads from host memory and from storage.
        `admitted` are the requests that it admits."""
        absent = self._absent(adapters)
        from_host, from_storage = self._take_in(adapters, absent)
        requests = [request.adapter for request in admitted if request.adapter != NO_ADAPTER]
        # Of several newcomers with an adapter that is absent the first one loads it.
        hits = len(requests) - len(set(absent).intersection(requests))
        tally = self.tally
        self.tally = tally._replace(
            requests=tally.requests + len(requests),
            hits=tally.hits + hits,
            from_host=tally.from_host + from_host,
            from_storage=tally.from_storage + from_storage,
        )
        return from_host, from_storage

    def note_wait(self, ticks: int) -> None:
        """Add the ticks for which a step waits for its loads."""
        self.tally = self.tally._replace(waited=self.tally.waited + ticks)

    def note_products(self, ticks: int) -> None:
        """Add the ticks of the products of steps."""
        self.tally = self.tally._replace(products=self.tally.products + ticks)

    def places(self, residents: Iterable[Request]) -> AdapterPlaces:
        """Return the slots as an admission finds them, while `residents` run."""
        allowed = {request.adapter for request in residents}
        if not self.counts_base:
            allowed.discard(NO_ADAPTER)
        free_slots = self.slots - len(allowed)
        if not self.counts_base:
            allowed.add(NO_ADAPTER)
        return AdapterPlaces(allowed, free_slots)

    def _absent(self, adapters: frozenset[int]) -> Collection[int]:
        """Return those of the adapters that have no slot."""
        if adapters == self._latest:
            return ()
        return {adapter for adapter in adapters if adapter not in self._resident}

    def _take_in(self, adapters: frozenset[int], absent: Collection[int]) -> tuple[int, int]:
        """Make the adapters those used last; return the numbers of loads from host memory and from storage."""
        if adapters == self._latest:
            return 0, 0
        resident, host = self._resident, self._host
        assert len(adapters) <= self.slots, f"{len(adapters)} adapters in a step, {self.slots} slots"
        # The base model has nothing to load.
        loads = [adapter for adapter in absent if adapter != NO_ADAPTER]
        from_storage = 0 if self.host_slots is None else sum(adapter not in host for adapter in loads)
        _use_last(resident, sorted(adapters))
        _use_last(host, sorted(adapters - {NO_ADAPTER}))
        while len(resident) > self.slots:
            # The base model goes last, as in SGLang.
            del resident[next((x for x in resident if x != NO_ADAPTER and x not in adapters), NO_ADAPTER)]
        while self.host_slots is not None and len(host) > self.host_slots:
            host.popitem(last=False)
        self._latest = adapters
        return len(loads) - from_storage, from_storage


class SharedSlots(AdapterSlots):
    """Slots of an engine core that shares those of its instance with others: the virtual engines of a pipeline.

    vLLM has one scheduler for all batches in a pipeline: the adapters of all requests that run may not exceed the
    slots (0.33; up to 0.32 those of each batch). No adapter of a request that runs is evicted; of the others the one
    goes first whose last request ended first.
    """

    __slots__ = ("_running",)

    def __init__(
        self,
        running: Callable[[], Iterable[Request]],
        slots: int,
        host_slots: int | None = None,
        beside: SharedSlots | None = None,
    ) -> None:
        """Make empty slots, or share those of a core `beside` this one. `running` returns the requests of the core that
        run, and those that have a seat and will."""
        super().__init__(slots, host_slots)
        self._running: list[Callable[[], Iterable[Request]]] = [] if beside is None else beside._running
        self._running.append(running)
        if beside is not None:
            self._resident, self._host = beside._resident, beside._host

    def clear(self) -> None:
        """See `AdapterSlots.clear`; the cores of an instance fail together."""
        if hasattr(self, "_resident"):
            self._resident.clear()
            self._host.clear()
            self._latest = frozenset()
        else:
            super().clear()

    def places(self, residents: Iterable[Request]) -> AdapterPlaces:
        """Return the slots as an admission finds them, while the requests of all cores run."""
        return super().places(request for of_core in self._running for request in of_core())

    def free(self, adapters: Iterable[int]) -> None:
        """Let adapters be the first to go after those freed before: no request that runs asks for them any more."""
        for place in (self._resident, self._host):
            _use_last(place, [adapter for adapter in sorted(adapters) if adapter in place])

    def _absent(self, adapters: frozenset[int]) -> Collection[int]:
        return {adapter for adapter in adapters if adapter not in self._resident}

    def _take_in(self, adapters: frozenset[int], absent: Collection[int]) -> tuple[int, int]:
        resident, host = self._resident, self._host
        from_storage = 0 if self.host_slots is None else sum(adapter not in host for adapter in absent)
        _use_last(resident, sorted(absent))
        _use_last(host, sorted(absent))
        for place, size in ((resident, self.slots), (host, self.host_slots)):
            if size is not None and len(place) > size:
                in_use = adapters.union(request.adapter for of_core in self._running for request in of_core())
                idle = [adapter for adapter in place if adapter not in in_use]
                for adapter in idle[: len(place) - size]:
                    del place[adapter]
                assert len(place) <= size, f"{len(place)} adapters of requests that run, {size} slots"
        return len(absent) - from_storage, from_storage


def _use_last(place: OrderedDict[int, None], adapters: Iterable[int]) -> None:
    """Make these adapters the ones used last in a place, in their order."""
    for adapter in adapters:
        place[adapter] = None
        place.move_to_end(adapter)


class AdapterPlaces:
    """Slots as requests are admitted to a step."""

    __slots__ = ("allowed", "left")

    def __init__(self, allowed: set[int], left: int) -> None:
        self.allowed, self.left = allowed, left
        """Adapters that have a slot, or need none; and the number of slots without one."""

    def admit(self, request: Request) -> bool:
        """True if the adapter of a waiting request has a slot, needs none, or finds one."""
        return self.left > 0 or request.adapter in self.allowed

    def note(self, request: Request) -> None:
        """Let an admitted request have its slot."""
        if request.adapter not in self.allowed:
            self.allowed.add(request.adapter)
            self.left -= 1


class SlotHolder:
    """Base of schedulers, as far as LoRA adapters of their requests go."""

    adapters: AdapterSlots | None = None
    """Slots of LoRA adapters; only policies that offer "lora" read them."""
    residents: Iterable[Request] = ()
    """Requests that run, in schedulers that list them."""
    _reserved: Reservations

    def adapter_places(self) -> AdapterPlaces | None:
        """Return the slots of LoRA adapters as an admission finds them; None if there are none. Expected requests have
        theirs."""
        return None if self.adapters is None else self.adapters.places(self.seated())

    def seated(self) -> Iterable[Request]:
        """Return the requests that run in the engine's view, and those that are expected."""
        return chain(self._admitted(), self._reserved)

    def take_joined(self) -> Sequence[Request]:
        """Return the requests that have joined since the last call: their prompts were computed elsewhere."""
        return self._reserved.take_joined()

    def _admitted(self) -> Iterable[Request]:
        """Return the requests that run in the engine's view, whose adapters have slots."""
        return self.residents


class AdmissibleQueue:
    """Waiting requests without those that find no slot, for one admission; `restore` puts these back in front."""

    def __init__(self, queue: WaitingQueue, places: AdapterPlaces) -> None:
        self._queue, self._places = queue, places
        self._skipped: deque[Request] = deque()

    def __bool__(self) -> bool:
        queue, allowed = self._queue, self._places.allowed
        if not self._places.left:
            # Inlined for speed: in a queue that waits for slots most requests are passed over in each step.
            skip = self._skipped.append
            while queue and queue[0].adapter not in allowed:
                skip(queue.popleft())
        return bool(queue)

    def __getitem__(self, index: int) -> Request:
        """Return the first request that finds a slot; `index` is 0, and the queue was found not to be empty."""
        return self._queue[index]

    def popleft(self) -> Request:
        """Remove and return the first request that finds a slot: it is admitted."""
        request = self._queue.popleft()
        self._places.note(request)
        return request

    def restore(self) -> WaitingQueue:
        """Return the queue, with the skipped requests at its head again."""
        if isinstance(self._queue, deque):
            self._queue.extendleft(reversed(self._skipped))
            self._skipped.clear()
        while self._skipped:
            self._queue.appendleft(self._skipped.pop())
        return self._queue
