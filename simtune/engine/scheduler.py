"""What a batching policy is to whoever drives it, be it simulated or real: `Scheduler`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypedDict

from simtune.engine.batch import Tally
from simtune.engine.kv import KvBlocks
from simtune.engine.request import Request
from simtune.engine.step import Progress, Step
from simtune.engine.waiting import LateArrivals, WaitingQueue

Feature = Literal[
    "async_scheduling",
    "long_prefills",
    "prefix_caching",
    "reserve_full_isl",
    "safety_margin",
    "speculation",
    "swap",
    "watermark",
]
"""What a plan may ask of a policy that offers it."""
SETTINGS_OF: dict[Feature, frozenset[str]] = {
    "async_scheduling": frozenset({"async_scheduling"}),
    "long_prefills": frozenset({"long_prefill_token_threshold"}),
    "prefix_caching": frozenset({"prefix_caching", "hash_block_tokens"}),
    "reserve_full_isl": frozenset({"scheduler_reserve_full_isl"}),
    "safety_margin": frozenset({"safety_margin"}),
    "speculation": frozenset({"speculation"}),
    "swap": frozenset({"preemption"}),
    "watermark": frozenset({"watermark_blocks"}),
}
"""The settings by which a policy that offers a feature is told of it."""
Hint = Literal["deadline", "predicted_tokens"]
"""Fields of a request that are filled for policies that read them."""


class Settings(TypedDict, total=False):
    """The settings every policy has; see `Scheduler`."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool
    watermark_blocks: int


class Scheduler(ABC):
    """A batching policy with its waiting queue, its resident requests and its KV blocks.

    A driver calls it in this order, again and again:

    1. Between steps, any of these, any number of times: `add` for a request that arrives; `expect`, and later
       `receive`, for one whose prompt is computed elsewhere; `release` for one whose blocks were to stay. `add` may
       also be called while a step runs.
    2. `schedule` says what to run next and takes the blocks for it, or None when nothing can run.
    3. `complete(n)`, when that step has run n times over, says who got a first token and who is finished.

    A request waits from `add` on, is admitted to a seat and to blocks by a step, computes its prompt in one chunk or
    several, and decodes until it is finished; a preempted one loses its blocks and waits again. One with `hold` keeps
    its blocks when it is finished, until `release`. `withdraw` takes back those that wait; `abandon` takes back
    everybody, at any time, and leaves the scheduler as new.

    A step says how often it may be `repeat`ed before the policy could decide otherwise: while nobody finishes, nobody
    can be admitted and the KV blocks suffice, the next steps are this one with every context one token longer. A real
    executor runs it once and asks again; the simulator takes all repetitions in one jump, but one at a time if the
    policy `would_notice` an arrival meanwhile. There is one scheduler for both.

    A policy sees prompts, delivered tokens and free blocks, never `Request.output_tokens`. It implements what is
    abstract here; `ListScheduler` and `BatchScheduler` have done most of that. What a plan may ask of it is stated on
    its class. The constructor takes every setting below by name, those of the features it offers (`SETTINGS_OF`), and
    options of its own.
    """

    offers: ClassVar[frozenset[Feature]] = frozenset({"watermark"})
    cuts_prompts: ClassVar[Literal["always", "if asked", "never"]] = "if asked"
    """Whether prompts are spread over steps: if `chunked_prefill` asks for it, or whatever it says."""
    reads: ClassVar[frozenset[Hint]] = frozenset()
    takes_over: ClassVar[bool] = True
    """Whether it serves a decode pool: whether `expect` ever takes a request whose prompt is computed elsewhere."""
    first_come: ClassVar[bool] = False
    """Whether first tokens come in the order in which requests were added, those of one step at once, and nobody new is
    admitted while somebody preempted waits; unless a `long_prefill_token_threshold` lets short prompts overtake. Not
    inherited: a policy derived from another one may have another order."""
    recomputes: bool = True
    """True if a request may lose its blocks and compute all its tokens again, in one step without chunked prefill."""

    @classmethod
    def recomputes_with(cls, options: Mapping[str, Any]) -> bool:
        """Return `recomputes` of a scheduler with these options of its own."""
        return cls.recomputes

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.first_come = vars(cls).get("first_come", False)

    tells_longest = True
    """Whether steps say how long their longest context is; may be switched off by who does not ask."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        chunked_prefill: bool = True,
        watermark_blocks: int = 0,
    ) -> None:
        """`watermark_blocks` must stay free when a request is admitted beside others.

        Raises ValueError for settings with which an admitted request could wait for ever.
        """
        self.kv = KvBlocks(num_blocks, block_size)
        if self.kv.blocks_for(max_model_len) > num_blocks:
            raise ValueError(
                f"one request of max_model_len ({max_model_len}) needs {self.kv.blocks_for(max_model_len)} KV blocks "
                f"of {block_size} tokens; there are {num_blocks}"
            )
        rule = f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least"
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"{rule} max_num_seqs ({max_num_seqs})")
        if not chunked_prefill and self.recomputes and max_num_batched_tokens < max_model_len:
            raise ValueError(f"without chunked prefill {rule} max_model_len ({max_model_len})")
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.longest_answer = max_model_len  # tokens that are reserved for an answer, if the policy reserves any
        self.chunked_prefill = chunked_prefill
        self.watermark_blocks = watermark_blocks
        self.async_scheduling = False
        """Whether a step is scheduled before the engine knows what came of the one before."""
        self.drafting = False
        """Whether requests that decode may compute more than one token in a step: their drafts."""
        self.waiting: WaitingQueue = deque()
        self._late = LateArrivals()
        self._reserved: dict[Request, None] = {}  # expected, and received but not yet in the batch
        self._received: list[Request] = []
        self._held: dict[Request, None] = {}
        self._under_way: Step | None = None

    @classmethod
    def settings(cls) -> frozenset[str]:
        """Names of what the constructor is given by a plan, whatever options it may have besides."""
        return frozenset(Settings.__annotations__).union(*(SETTINGS_OF[feature] for feature in cls.offers))

    # --- requests come and go ---------------------------------------------------------------------------------

    def add(self, request: Request) -> bool:
        """Queue a request; False when it is refused, see `outgrows`."""
        if self.outgrows(request):
            return False
        self._queue(request)
        return True

    def _queue(self, request: Request) -> None:
        """Let a request wait, where the policy's order puts it."""
        self.waiting.append(request)

    def add_late(self, request: Request, repetition: int) -> bool:
        """Queue a request that comes during this repetition (from 1) of the step under way, or at the instant when a
        step ends; False when it is refused.

        An engine that schedules asynchronously has dispatched the next step when the one under way began: the request
        is seen by the one that follows it.
        """
        if not self.async_scheduling:
            return self.add(request)
        if self.outgrows(request):
            return False
        self._late.append((repetition, request))
        return True

    def outgrows(self, request: Request) -> bool:
        """True if a request could become longer than max_model_len, or no step has room for its prompt."""
        whole = not (self.chunked_prefill or self.recomputes)
        most = min(self.max_model_len, request.prompt_tokens + self.longest_answer) if whole else self.max_model_len
        beyond = request.prompt_tokens + request.output_tokens > most
        return beyond or (whole and request.known_tokens > self.max_num_batched_tokens)

    def expect(self, request: Request) -> bool:
        """Reserve a seat, and blocks for all known tokens, for a request whose KV cache is computed elsewhere.

        False, and nothing is changed, when there is no room now. To be called between steps. The request cannot be
        preempted until it is received; `release` gives it up.
        """
        assert self._under_way is None, "a step is under way"
        needed = self.kv.blocks_for(request.known_tokens)
        if self.num_running >= self.max_num_seqs or needed > self.room:
            return False
        self.kv.take(needed)
        self._reserved[request] = None
        return True

    def receive(self, request: Request) -> None:
        """Let an expected request, whose KV cache has come, decode from the next step on.

        The step computes its newest known token: of one that has emitted nothing the last of its prompt, which samples
        the first token again.
        """
        assert request in self._reserved, "it was not expected"
        self._received.append(request)

    def release(self, request: Request) -> None:
        """Give back the blocks of a request that is finished and held, or that was expected and will not come."""
        if request in self._reserved:
            del self._reserved[request]
            self.kv.give(self.kv.blocks_for(request.known_tokens))
            if request in self._received:
                self._received.remove(request)
        else:
            del self._held[request]
            self.kv.release(request)

    def abort(self, request: Request) -> bool:
        """Let a request leave that nobody waits for any more, wherever it is; what it delivered stays delivered. False,
        and nothing is changed, where it is not here. To be called between steps."""
        assert self._under_way is None, "a step is under way"
        if self._late.take_out(request):
            return True
        if request not in self.waiting:
            return self._expel(request)
        remaining = [other for other in self.waiting if other is not request]
        self.waiting.clear()
        for other in remaining:
            self.waiting.append(other)
        return True

    def withdraw(self) -> list[Request]:
        """Take back all waiting requests, in order of the queue. The residents go on."""
        self._late.move_all(self._queue)
        requests = list(self.waiting)
        self.waiting.clear()
        for request in requests:
            request.computed = request.shared = 0  # what was swapped out is lost
        return requests

    def abandon(self) -> list[Request]:
        """The instance is lost, perhaps in the middle of a step; the scheduler is as new.

        Returns every request whose KV cache is lost or was still to come, in this order: those that decode and those
        in prefill, in order of admission; expected ones; finished ones that were held; waiting ones. Nothing of them
        is computed, and what they emitted in completed steps was delivered.
        """
        self._late.move_all(self._queue)
        lost = [*self._lose_residents(), *self._reserved, *self._held, *self.waiting]
        self.kv.clear()
        for queue in (self._reserved, self._received, self._held, self.waiting):
            queue.clear()
        self._under_way = None
        for request in lost:
            request.computed = request.reserved_tokens = request.shared = 0
            request.runs = None
        return lost

    # --- what is here -----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Requests that hold a seat: residents, and those that are expected."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a seat, those that the engine does not see yet among them."""
        return len(self.waiting) + len(self._late)

    @property
    def unsettled(self) -> bool:
        """Whether seats or blocks will come free with the step under way, though nobody finishes in it."""
        return False

    @property
    def tally(self) -> Tally:
        """What verifications of drafts came to so far."""
        return Tally()

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or holds a seat."""
        return bool(self.waiting or self._late) or self.num_running > 0

    @property
    def room(self) -> int:
        """Blocks that a newcomer may need."""
        return self.kv.free - (self.watermark_blocks if self.num_running else 0)

    # --- steps ------------------------------------------------------------------------------------------------

    @abstractmethod
    def schedule(self) -> Step | None:
        """The next step, its blocks taken; None when nothing can run: no request is here, or all of them wait for
        others to `release` blocks or to be received. `complete` must follow."""

    @abstractmethod
    def complete(self, repetitions: int = 1) -> Progress:
        """The step given last has run `repetitions` times, at most its `repeat`."""

    @abstractmethod
    def would_notice(self) -> bool:
        """Whether one more waiting request could change the schedule before the present step's repetitions are over."""

    def emitted(self, request: Request) -> int:
        """Output tokens that a request which is here has delivered so far."""
        return request.emitted

    @abstractmethod
    def composition(self) -> dict[Request, int]:
        """Tokens of each request in the step given last, in the engine's order. Costs O(residents)."""

    def _begin(self) -> None:
        """To be called first by `schedule`: requests received since then join the batch."""
        assert self._under_way is None, "the step given last was not completed"
        if self._received:
            for request in self._received:
                del self._reserved[request]
                request.computed = request.known_tokens - 1
                self.kv.give(self.kv.blocks_for(request.known_tokens) - self.kv.blocks_for(request.computed))
                self._enter(request)
            self._received.clear()

    @abstractmethod
    def _enter(self, request: Request) -> None:
        """A request with its prompt computed elsewhere, and blocks for it, becomes a resident."""

    @abstractmethod
    def _expel(self, request: Request) -> bool:
        """Take a resident out and give back its blocks; False where it is none."""

    @abstractmethod
    def _lose_residents(self) -> list[Request]:
        """Take out all that decode or are in prefill, in order of admission; their blocks are cleared afterwards."""

    def _finish(self, request: Request, finished: list[Request]) -> None:
        """A request that is no resident any more is complete: its blocks are free, unless it is held."""
        finished.append(request)
        self._free_request(request)

    def _free_request(self, request: Request, named_tokens: int | None = None) -> None:
        """Give back the blocks of a request that is complete, unless it is held; see `KvBlocks.release`."""
        if request.hold:
            self._held[request] = None
        else:
            self.kv.release(request, named_tokens)
