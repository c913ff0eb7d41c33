"""AcceptanceSampler: number of drafts that the target accepts, drawn identically for every plan.

A uniform number belongs to every (seed, request, round), whatever the plan, by hashing the three. A round of a chain
with survival S_1 >= S_2 >= ... keeps as many drafts as there are S_d above it; a tree is taken at its depths, S_d
being the weights of its nodes at depth d added up. So of two chains the longer never keeps fewer, and of two trees the
one that is likelier to get to each depth. Requests that have an acceptance of their own are given it by the quantile
of theirs.

If the drafter continues while the target verifies (PEARL, DSI), the drafts that a round verifies depend on the rounds
before. Each round still has its own number, which determines how many of the drafts are right, and the rounds of a
request are computed from the first. They continue as if no round was cut short by the token budget, and as if a
preempted request's drafts were kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from simtune.arrays import Ints
from simtune.engine import Request
from simtune.sim.drafting.drawn_rounds import Counts, DrawnRounds, RoundDrawer
from simtune.sim.drafting.survival import Survival
from simtune.specs.acceptance import Acceptance
from simtune.specs.schemes import Scheme
from simtune.workload.requests import RequestStream

_ROUNDS = 1 << 16  # rounds drawn at once, about; sets the requests of a group
_GROUPS = 256  # groups that are kept; a group drawn again is identical
_LAID_OUT = 16  # groups whose laid-out rounds are kept


class _LaidOutDrafts(NamedTuple):
    """Rounds of a group of requests as a batch lays them out, each request's from its first to its last."""

    rows: Ints
    begins: list[int]
    ends: list[int]
    final: list[int]
    """Tokens computed after the last round of each request."""


class AcceptanceSampler:
    """Accepted drafts of every request and round of a stream under one scheme.

    Rounds are drawn for groups of requests with neighbouring numbers. Raises Infeasible if the scheme drafts more than
    the acceptance covers.
    """

    def __init__(self, scheme: Scheme, acceptance: Acceptance, stream: RequestStream, seed: int) -> None:
        self.survival = Survival(scheme, acceptance, stream, seed)
        self._drawer = RoundDrawer(scheme, self.survival, stream.output_tokens, seed)
        self._prompt, self._output = stream.prompt_tokens, stream.output_tokens
        many = _ROUNDS * len(self._output) // max(1, int(self._output.sum()))
        self._size = max(1, min(1024, many))  # requests of a group
        self._groups: dict[int, DrawnRounds] = {}
        self._laid_out: dict[int, _LaidOutDrafts] = {}

    def __call__(self, request: Request, number: int, drafts: int) -> int:
        """Return how many of `drafts` drafts are accepted in verification `number` of a request."""
        return min(int(self.accepted(request, number, 1)[0]), drafts)

    def tokens_after(self, request: Request, first: int, count: int, drafts: int, tokens: int) -> Ints:
        """Return the tokens of a request after each of `count` verifications of `drafts` drafts, starting from
        `tokens`, and after further verifications that are drawn already."""
        rounds, at, end = self._rounds(request.id, first, count)
        if drafts < self.survival.depth:
            accepted = np.minimum(rounds.accepted[at:end], drafts)
            return accepted.cumsum(dtype=np.int64) + np.arange(tokens + 1, tokens + 1 + end - at)
        if at:
            tokens -= int(rounds.tokens[at - 1])
        return rounds.tokens[at:end] + tokens

    def laid_out(self, request: Request, lay_out: Callable[[Ints, Ints, list[int]], Ints]) -> tuple[Ints, int] | None:
        """Return all rounds of a request whose prompt is computed, with all drafts each, in the layout of `lay_out`,
        and the tokens that are computed then; None if more rounds would have to be drawn.

        `lay_out` is called for a whole group at once, with (tokens computed before each round, prompt tokens of each
        request, position of each request's first round).
        """
        number, row = divmod(request.id, self._size)
        group = self._laid_out.get(number)
        if group is None:
            # Requests come in order, so the oldest group is the one that is over.
            if len(self._laid_out) >= _LAID_OUT:
                del self._laid_out[next(iter(self._laid_out))]
            group = self._laid_out[number] = self._lay_out(number, lay_out)
        begin, end = group.begins[row], group.ends[row]
        return (group.rows[:, begin:end], group.final[row]) if end <= group.begins[row + 1] else None

    def accepted(self, request: Request, first: int, count: int) -> Counts:
        """Return the drafts that would be accepted in each of `count` verifications if all were made."""
        rounds, at, _ = self._rounds(request.id, first, count)
        return rounds.accepted[at : at + count]

    def stops(self, request: Request, first: int, count: int) -> Counts:
        """Return the number of drafts after which the drafter stops in each verification, its confidence being the
        acceptance."""
        rounds, at, _ = self._rounds(request.id, first, count)
        return rounds.stops[at : at + count]

    @property
    def varies(self) -> bool:
        """True if a drafter that stops by itself may stop after a different number of drafts in every round."""
        return self._drawer.varies

    def _lay_out(self, number: int, lay_out: Callable[[Ints, Ints, list[int]], Ints]) -> _LaidOutDrafts:
        rounds, _, _ = self._rounds(number * self._size, 0, 0)
        begins = np.array(rounds.starts)
        of_group = slice(number * self._size, number * self._size + len(begins) - 1)
        prompt, output = self._prompt[of_group], self._output[of_group]
        before = np.concatenate([[0], rounds.tokens])
        passed = before[begins[:-1]]
        # The step that completes the prompt delivers the first token, so rounds deliver the others.
        ends = rounds.tokens.searchsorted(passed + output - 1) + 1
        final = prompt + before[np.minimum(ends, len(rounds.tokens))] - passed
        before = before[:-1] + np.repeat(prompt - passed, np.diff(begins))
        rows = lay_out(before, prompt, rounds.starts)
        return _LaidOutDrafts(rows, rounds.starts, ends.tolist(), final.tolist())

    def _rounds(self, request: int, first: int, count: int) -> tuple[DrawnRounds, int, int]:
        """Return drawn rounds, and the begin and end of those of a request from round `first` on, at least `count`."""
        number, row = divmod(request, self._size)
        group = self._groups.get(number)
        if group is None:
            if len(self._groups) >= _GROUPS:
                del self._groups[next(iter(self._groups))]
            requests = np.arange(number * self._size, min((number + 1) * self._size, len(self._output)))
            group = self._groups[number] = self._drawer.draw(requests, 0, self._drawer.enough(requests))
        at, end = group.starts[row] + first, group.starts[row + 1]
        if at + count <= end:
            return group, at, end
        start = 0 if self._drawer.from_the_first else first
        end = first - start + count
        # Beyond what the group drew: for this request alone, with the same numbers as if the group had drawn more.
        return self._drawer.draw(np.array([request]), start, np.array([end])), first - start, end
