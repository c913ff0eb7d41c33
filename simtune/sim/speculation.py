"""AcceptanceSampler: how many drafts the target keeps, drawn so that every plan has the same.

A uniform number belongs to every (seed, request, round), whatever the plan, by hashing the three. A round of a chain
with survival S_1 >= S_2 >= ... keeps as many drafts as there are S_d above it; a tree is taken at its depths, S_d
being the weights of its nodes at depth d added up. So of two chains the longer never keeps fewer, and of two trees the
one that is likelier to get to each depth. Requests that have an acceptance of their own are given it by the quantile
of theirs.

Where the drafter drafts on while the target verifies (PEARL, DSI), what a round verifies depends on those before: each
still has its own number, which says how many of the drafts are right, and a request's rounds are gone through from the
first. They go on as if no round was cut short by the token budget, and as if a preempted request's drafts were kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.engine import DraftingTerms, Request
from simtune.errors import Infeasible
from simtune.sim.requests import RequestStream
from simtune.specs.acceptance import Acceptance, BetaMixture, Revealed
from simtune.specs.drafts import Shape, shape_of, survival
from simtune.specs.model import Model
from simtune.specs.plan import Pool
from simtune.specs.speculation import (
    BlockDrafter,
    ByBatch,
    Chain,
    DraftModel,
    DynamicTree,
    Eagle,
    Medusa,
    Scheme,
    Speculation,
    StaticTree,
    Threshold,
    TokenBudget,
)

Bits = NDArray[np.uint64]
Counts = NDArray[np.integer]

_ROUNDS = 1 << 16  # drawn at once, about, of as many requests as will need so many
_GROUPS = 256  # kept; they are drawn alike whenever they are needed again
_LAID_OUT = 16  # groups whose rounds are kept as a batch wants them
_EQUAL = 1e-12


class _Drawn(NamedTuple):
    """Rounds of some requests, one request after the other."""

    starts: list[int]
    """Where each request begins, and where the last one ends."""
    accepted: Counts
    stops: Counts
    """Drafts made before the drafter stops."""
    tokens: Ints
    """Of all rounds up to each, those of the requests before included."""


class _LaidOut(NamedTuple):
    """Rounds of the same requests as a batch lays them out, from a request's first to the one that ends its answer."""

    rows: Ints
    begins: list[int]
    ends: list[int]
    final: list[int]
    """Tokens computed after the last round of each request."""


@dataclass(frozen=True)
class Drafting:
    """What a pool's speculation names, loaded."""

    acceptance: Acceptance
    model: Model | None = None
    """Of a draft model."""


def uniform(seed: int, requests: Ints, rounds: Ints, purpose: int = 0) -> Array:
    """Numbers in [0, 1) of pairs of request and round: the same ones for the same seed and purpose, always."""
    return (_bits(seed, requests, rounds, purpose) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _bits(seed: int, requests: Ints, rounds: Ints, purpose: int = 0, counts: Ints | int = 1) -> Bits:
    """64 well-mixed bits of each pair of request and round; so many of the rounds are of each of the requests."""
    key = np.uint64((seed * 0x9E3779B97F4A7C15 + purpose * 0xD1342543DE82EF95) & 0xFFFFFFFFFFFFFFFF)
    bits = (rounds + 1).astype(np.uint64)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits += np.repeat(_mixed(requests.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + key), counts)
    return _mixed(bits)


def _mixed(x: Bits) -> Bits:
    """The finaliser of SplitMix64, in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


class AcceptanceSampler:
    """Accepted drafts of every request and round of a stream under one scheme: `DraftingTerms.accepted`."""

    def __init__(self, scheme: Scheme, acceptance: Acceptance, stream: RequestStream, seed: int) -> None:
        """Raises Infeasible where the scheme drafts what the acceptance does not know."""
        self._seed, self._scheme, self._shape = seed, scheme, shape_of(scheme)
        self._class_of = stream.class_index
        self._rates = [acceptance.rates_for(name) for name in stream.class_names]
        try:
            self._survival = [survival(scheme, rates) for rates in self._rates]
        except ValueError as error:
            raise Infeasible(f"acceptance {acceptance.name}: {error}; draft less, or measure more") from None
        self._own = self._own_acceptance(len(stream))
        self._prompt, self._output = stream.prompt_tokens, stream.output_tokens
        many = _ROUNDS * len(self._output) // max(1, int(self._output.sum()))
        self._size = max(1, min(1024, many))  # requests drawn at once
        self._groups: dict[int, _Drawn] = {}
        self._laid_out: dict[int, _LaidOut] = {}

    def __call__(self, request: Request, number: int, drafts: int) -> int:
        """How many of so many drafts are accepted in verification `number` of a request."""
        return min(int(self.accepted(request, number, 1)[0]), drafts)

    def tokens_after(self, request: Request, first: int, count: int, drafts: int, tokens: int) -> Ints:
        """After each of `count` verifications of so many drafts, and of others that are drawn already, how many tokens
        there are, if `tokens` before.
        """
        drawn, at, end = self._of(request.id, first, count)
        if drafts < self._shape.levels:
            kept = np.minimum(drawn.accepted[at:end], drafts)
            return kept.cumsum(dtype=np.int64) + np.arange(tokens + 1, tokens + 1 + end - at)
        if at:
            tokens -= int(drawn.tokens[at - 1])
        return drawn.tokens[at:end] + tokens

    def laid_out(self, request: Request, lay_out: Callable[[Ints, Ints, list[int]], Ints]) -> tuple[Ints, int] | None:
        """All rounds of a request whose prompt is computed, of all drafts each, as `lay_out` wants them, and the tokens
        that are computed then; None where more would have to be drawn.

        `lay_out` is asked for many requests at once: of (tokens computed before each round, prompt tokens of each
        request, where each begins).
        """
        number, row = divmod(request.id, self._size)
        group = self._laid_out.get(number)
        if group is None:
            if len(self._laid_out) >= _LAID_OUT:
                del self._laid_out[next(iter(self._laid_out))]
            group = self._laid_out[number] = self._lay_out(number, lay_out)
        begin, end = group.begins[row], group.ends[row]
        return (group.rows[:, begin:end], group.final[row]) if end <= group.begins[row + 1] else None

    def _lay_out(self, number: int, lay_out: Callable[[Ints, Ints, list[int]], Ints]) -> _LaidOut:
        drawn, _, _ = self._of(number * self._size, 0, 0)
        begins = np.array(drawn.starts)
        mine = slice(number * self._size, number * self._size + len(begins) - 1)
        prompt, output = self._prompt[mine], self._output[mine]
        before = np.concatenate([[0], drawn.tokens])
        passed = before[begins[:-1]]
        ends = drawn.tokens.searchsorted(passed + output - 1) + 1  # its prompt's own step delivers one
        final = prompt + before[np.minimum(ends, len(drawn.tokens))] - passed
        before = before[:-1] + np.repeat(prompt - passed, np.diff(begins))
        rows = lay_out(before, prompt, drawn.starts)
        return _LaidOut(rows, drawn.starts, ends.tolist(), final.tolist())

    def accepted(self, request: Request, first: int, count: int) -> Counts:
        """How many drafts would be accepted in each of `count` verifications if all were made."""
        drawn, at, _ = self._of(request.id, first, count)
        return drawn.accepted[at : at + count]

    def stops(self, request: Request, first: int, count: int) -> Counts:
        """After how many drafts the drafter stops, its confidence being the acceptance itself."""
        drawn, at, _ = self._of(request.id, first, count)
        return drawn.stops[at : at + count]

    @property
    def varies(self) -> bool:
        """Whether a drafter that stops by itself may do so elsewhere in every round."""
        return isinstance(self._scheme, Threshold) and any(isinstance(rates, Revealed) for rates in self._rates)

    def length(self, request: Request) -> int:
        """After how many drafts the drafter stops in all rounds of a request, where they do not differ."""
        return self._lengths[request.id]

    @cached_property
    def _lengths(self) -> list[int]:
        assert isinstance(self._scheme, Threshold)
        at_least = self._columns(np.arange(len(self._output)))
        lengths: list[int] = (at_least >= 1 - self._scheme.stop_at - _EQUAL).sum(axis=1).tolist()
        return lengths

    def shares(self, requests: Sequence[Request]) -> list[int]:
        """A budget of drafts shared out to where they are likeliest to be kept; of equals to the shortest drafts, then
        to those who came first.
        """
        assert isinstance(self._scheme, TokenBudget)
        if not requests:
            return []
        at_least = self._columns(np.array([request.id for request in requests]))
        best = np.argsort(-at_least.T.ravel(), kind="stable")[: self._scheme.tokens]
        counts: list[int] = np.bincount(best % len(requests), minlength=len(requests)).tolist()
        return counts

    def _of(self, request: int, first: int, count: int) -> tuple[_Drawn, int, int]:
        """Some drawn rounds, and from where to where they are a request's from `first` on, at least `count`."""
        number, row = divmod(request, self._size)
        group = self._groups.get(number)
        if group is None:
            if len(self._groups) >= _GROUPS:
                del self._groups[next(iter(self._groups))]
            requests = np.arange(number * self._size, min((number + 1) * self._size, len(self._output)))
            group = self._groups[number] = self._draw(requests, 0, self._about(requests))
        at, end = group.starts[row] + first, group.starts[row + 1]
        if at + count <= end:
            return group, at, end
        start = 0 if self._shape.overlapped else first
        end = first - start + count
        return self._draw(np.array([request]), start, np.array([end])), first - start, end

    def _about(self, requests: Ints) -> Ints:
        """Rounds that requests may need, all but a few of them; more are drawn where that was not enough."""
        shortest = self._shape.levels
        if isinstance(self._scheme, ByBatch):
            shortest = min(r.tokens for r in self._scheme.ranges if r.tokens)
        elif isinstance(self._scheme, TokenBudget | Threshold):
            shortest = 1
        output, columns = self._output[requests], self._columns(requests)
        if self._shape.overlapped:  # a token after every round, or after as many as there are replicas
            per_token = 1 + (self._shape.replicas - 1) * (1 - columns[:, 0])
            return np.ceil(output * per_token).astype(np.int64)
        columns = columns[:, :shortest]
        kept, squared = columns.sum(axis=1), columns @ np.arange(1.0, 2 * columns.shape[1], 2)
        rounds = output / (1 + kept)
        more = 4 * np.sqrt(rounds * (squared - kept**2)) / (1 + kept)  # standard deviations
        about: Ints = np.minimum(output, (rounds + more).astype(np.int64) + 3)
        return about

    def _draw(self, requests: Ints, first: int, counts: Ints) -> _Drawn:
        """The rounds of some requests from `first` on."""
        ends = counts.cumsum()
        of_each = np.repeat(requests, counts)
        rounds = np.arange(first, first + len(of_each)) - np.repeat(ends - counts, counts)
        bits, columns = _bits(self._seed, requests, rounds, counts=counts), self._columns(requests)
        limits = np.minimum(columns * 2.0**64, 2.0**64 - 2048).astype(np.uint64)
        alike = bool((limits == limits[0]).all())
        accepted: Counts = np.zeros(len(bits), dtype=np.uint8)
        for limit in limits.T:
            accepted += bits < (limit[0] if alike else np.repeat(limit, counts))
        stops = np.zeros_like(accepted) if self.varies else accepted
        for index, rates in enumerate(self._rates):
            if not isinstance(rates, Revealed) and not self.varies:
                continue
            mine = self._class_of[of_each] == index
            if isinstance(rates, Revealed) and not self._shape.tree:
                accepted[mine], made = self._revealed(rates, of_each[mine], rounds[mine], bits[mine])
            else:
                assert isinstance(self._scheme, Threshold)
                made = np.repeat((columns >= 1 - self._scheme.stop_at - _EQUAL).sum(axis=1), counts)[mine]
            if self.varies:
                stops[mine] = made
        if self.varies:
            np.minimum(accepted, stops, out=accepted)
        if self._shape.overlapped:
            accepted, stops = _overlapped(accepted, [0, *ends.tolist()], self._shape.levels, self._shape.replicas)
        tokens = accepted.cumsum(dtype=np.int64)
        tokens += np.arange(1, len(tokens) + 1)
        return _Drawn([0, *ends.tolist()], accepted, stops, tokens)

    def _revealed(self, rates: Revealed, requests: Ints, rounds: Ints, bits: Bits) -> tuple[Counts, Counts]:
        """Every draft token has an acceptance of its own, drawn too."""
        sampler = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        alive = np.ones_like(sampler)
        accepted, made = np.zeros(sampler.shape, dtype=np.uint8), np.zeros(sampler.shape, dtype=np.uint8)
        rate, bounds = np.array(rates.rate), np.cumsum(rates.share)[:-1]
        keep = 1 - self._scheme.stop_at if isinstance(self._scheme, Threshold) else 0.0
        for level in range(1, self._shape.levels + 1):
            alive = alive * rate[bounds.searchsorted(uniform(self._seed, requests, rounds, level), "right")]
            accepted += sampler < alive
            made += alive >= keep - _EQUAL
        return accepted, made

    def _columns(self, requests: Ints) -> Array:
        """P(at least d drafts are kept) for each of some requests, d = 1 ... levels."""
        classes = self._class_of[requests]
        columns = np.array(self._survival)[classes]
        for index, rates in enumerate(self._rates):
            if isinstance(rates, BetaMixture):
                mine = classes == index
                own = self._own[requests[mine]]
                columns[mine] = own[:, None] ** np.arange(1, self._shape.levels + 1)
        return columns

    def _own_acceptance(self, n: int) -> Array:
        """Of requests whose class has a distribution of them."""
        own = np.zeros(n)
        for index, rates in enumerate(self._rates):
            if isinstance(rates, BetaMixture):
                from scipy.special import betaincinv

                mine = np.flatnonzero(self._class_of == index)
                own[mine] = betaincinv(rates.a, rates.b, uniform(self._seed, mine, np.zeros_like(mine), -1))
        return own


def _overlapped(right: Counts, starts: Sequence[int], window: int, replicas: int) -> tuple[Counts, Counts]:
    """(drafts kept, drafts computed) in rounds of DSI, of requests that begin at `starts`, given how many of the drafts
    are right in each round. PEARL is DSI with one replica.

    Of m drafts to verify the target computes all but the last, and its own next token comes on top where that is not
    the last draft itself: min(right + 1, m) tokens. With no drafts yet it computes one token and looks whether the
    first draft made meanwhile is the same. Before that verdict come replicas - 1 rounds without any, here and in
    `simtune.engine` rounds of -1 drafts: not even the token that is certain is verified, and none delivered.
    """
    states: dict[int, list[Any]] = {pending: [] for pending in (0, window - 1, window)}
    anew = states[0]
    for _ in range(replicas - 1):
        anew = [anew] * (window + 1) + [-1]
    for pending, state in states.items():  # the state after so many drafts are right, then how many are computed
        after, needed = (window, pending) if pending else (window - 1 or window, 1)
        state += [states[after] if drafts >= needed else anew for drafts in range(window + 1)]
        state.append(max(pending - 1, 0))
    sampler, found = right.tolist(), []
    for begin, end in pairwise(starts):
        before = accumulate(sampler[begin:end], getitem, initial=anew)
        found += [state[-1] for state in islice(before, end - begin)]
    computed = np.array(found, dtype=np.int64)
    return np.minimum(right, computed), computed


def drafting_terms(spec: Speculation, sampler: AcceptanceSampler) -> DraftingTerms:
    """What a scheduler has to know of a pool's speculation, as vLLM 0.32 has it."""
    shape, drafter, scheme = shape_of(spec.scheme), spec.drafter, spec.scheme
    ahead = shape.levels * shape.replicas if shape.overlapped else shape.drafts
    ahead += isinstance(drafter, BlockDrafter) and drafter.method == "dflash"  # its block begins with the certain token
    return DraftingTerms(
        max_drafts=max(int(shape.overlapped), shape.drafts),  # none would mean that nothing is drafted
        accepted=sampler,
        tokens_after=sampler.tokens_after,
        laid_out=sampler.laid_out,
        drafts=scheme.tokens_for if isinstance(scheme, ByBatch) else None,
        lookahead=ahead if isinstance(drafter, DraftModel | Eagle | BlockDrafter) else 0,
        extra_slots=extra_slots(spec),
        depth=shape.levels if shape.tree or shape.overlapped else None,
        stops=sampler.stops if sampler.varies or shape.overlapped else None,
        lengths=sampler.length if isinstance(scheme, Threshold) and not sampler.varies else None,
        shares=sampler.shares if isinstance(scheme, TokenBudget) else None,
        drops_last_hit=isinstance(drafter, Eagle | BlockDrafter),
    )


def extra_slots(spec: Speculation) -> int:
    """What each request takes of the token budget for what the drafter alone computes, as in vLLM."""
    if isinstance(spec.drafter, BlockDrafter):
        return shape_of(spec.scheme).drafts - (spec.drafter.method == "dspark")
    return int(isinstance(spec.drafter, DraftModel))


def counts_ahead(scheme: Scheme) -> bool:
    """Whether a step can be scheduled before its drafts are made: how many there are is known then, and an engine has
    the scheme. Else scheduling is synchronous, whatever the host's work costs."""
    return isinstance(scheme, Chain | ByBatch | StaticTree | DynamicTree)


def check_drafting(pool: Pool, drafting: Drafting, max_model_len: int) -> Shape:
    """Raises Infeasible where the engine of a pool that speculates could not draft like this."""
    spec, budget = pool.speculation, pool.batching.max_num_batched_tokens
    assert spec is not None
    shape = shape_of(spec.scheme)
    if isinstance(spec.drafter, Medusa) and shape.levels > spec.drafter.heads:
        raise Infeasible(f"{spec.drafter.heads} Medusa heads cannot draft {shape.levels} tokens deep; draft less deep")
    needed = 1 + shape.drafts + extra_slots(spec)
    if needed > budget:
        what = "tree" if shape.tree else "chain"
        raise Infeasible(
            f"one sequence with a {what} of {shape.drafts} drafts takes {needed} tokens of a step, and "
            f"max_num_batched_tokens is {budget}; draft less, or raise it"
        )
    if shape.replicas > 1:
        needed = pool.batching.max_num_seqs * (shape.levels + extra_slots(spec))
        if needed > budget:
            raise Infeasible(
                f"replicas verify a window of every sequence at a time, {needed} tokens with max_num_seqs "
                f"{pool.batching.max_num_seqs}, and max_num_batched_tokens is {budget}; raise it, or lower "
                "max_num_seqs or the scheme's tokens"
            )
        if pool.role != "mixed":
            raise Infeasible(
                f"pool {pool.name}: every replica of the target needs the prompt's keys and values, and a link brings "
                "them to one; make the role mixed, take one replica, or draft a chain"
            )
    if drafting.model is not None and drafting.model.max_position < max_model_len:
        raise Infeasible(
            f"draft model {drafting.model.name} takes {drafting.model.max_position} tokens, less than max_model_len "
            f"({max_model_len}); lower that, or take another draft model"
        )
    return shape
