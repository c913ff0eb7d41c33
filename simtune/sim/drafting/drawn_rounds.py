"""Verification rounds drawn for many requests at once: the number of drafts accepted and made in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.sim.drafting.survival import Survival, at_least
from simtune.sim.drafting.uniform import Bits, as_uniform, random_bits, uniform
from simtune.specs.acceptance import Revealed
from simtune.specs.schemes import Scheme

Counts = NDArray[np.integer]


class DrawnRounds(NamedTuple):
    """Rounds of some requests, one request after the other."""

    starts: list[int]
    """Position of each request's first round, and the end of the last request's rounds."""
    accepted: Counts
    stops: Counts
    """Drafts made before the drafter stops."""
    tokens: Ints
    """Tokens of all rounds up to and including each, those of the requests before included."""


class RoundDrawer:
    """Draws rounds of one scheme; each round of a request has its own random number, whatever else is drawn."""

    def __init__(self, scheme: Scheme, survival: Survival, output_tokens: Ints, seed: int) -> None:
        self._shape, self._shortest, self._stops_below = scheme.shape, scheme.shortest, scheme.stops_below
        self._survival, self._output, self._seed = survival, output_tokens, seed
        self._lengths = scheme.lengths if scheme.adapts else None

    @property
    def varies(self) -> bool:
        """True if a drafter that stops by itself may stop after a different number of drafts in every round."""
        revealed = any(isinstance(rates, Revealed) for rates in self._survival.rates)
        return self._lengths is not None or (self._stops_below is not None and revealed)

    @property
    def from_the_first(self) -> bool:
        """True if a request's rounds must be drawn from its first, because each depends on those before."""
        return self._shape.overlapped or self._lengths is not None

    def enough(self, requests: Ints) -> Ints:
        """Return the rounds that each of the requests may need; for a few of them more may be needed."""
        output, columns = self._output[requests], self._survival.columns(requests)
        # A token comes after every round, or after as many rounds as there are replicas.
        if self._shape.overlapped:
            per_token = 1 + (self._shape.replicas - 1) * (1 - columns[:, 0])
            return np.ceil(output * per_token).astype(np.int64)
        columns = columns[:, : self._shortest]
        mean_accepted, squared = columns.sum(axis=1), columns @ np.arange(1.0, 2 * columns.shape[1], 2)
        rounds = output / (1 + mean_accepted)
        # Four standard deviations above the mean number of rounds.
        more = 4 * np.sqrt(rounds * (squared - mean_accepted**2)) / (1 + mean_accepted)
        enough: Ints = np.minimum(output, (rounds + more).astype(np.int64) + 3)
        return enough

    def draw(self, requests: Ints, first: int, counts: Ints) -> DrawnRounds:
        """Draw `counts` rounds of each of the requests, from round `first` on."""
        starts = [0, *counts.cumsum().tolist()]
        of_each = np.repeat(requests, counts)
        rounds = np.arange(first, first + len(of_each)) - np.repeat(np.array(starts[:-1]), counts)
        bits = random_bits(self._seed, requests, rounds, counts=counts)
        accepted = self._by_survival(requests, counts, bits)
        stops = np.zeros_like(accepted) if self.varies else accepted
        if any(isinstance(rates, Revealed) for rates in self._survival.rates) and not self._shape.tree:
            self._by_confidence(requests, counts, rounds, bits, accepted, stops)
        if self._shape.overlapped:
            accepted, stops = overlapped(accepted, starts, self._shape.depth, self._shape.replicas)
        if self._lengths is not None:
            accepted, stops = adapted(accepted, starts, self._lengths)
        # Every round yields one token more than accepted drafts; a round of -1 drafts yields none.
        tokens = accepted.cumsum(dtype=np.int64)
        tokens += np.arange(1, len(tokens) + 1)
        return DrawnRounds(starts, accepted, stops, tokens)

    def _by_survival(self, requests: Ints, counts: Ints, bits: Bits) -> Counts:
        """Return the drafts accepted in each round: the number of survivals above the random number of the round."""
        # 2^64 does not fit 64 bits; the largest double below it is 2^64 - 2048.
        limits = np.minimum(self._survival.columns(requests) * 2.0**64, 2.0**64 - 2048).astype(np.uint64)
        alike = bool((limits == limits[0]).all())
        accepted: Counts = np.zeros(len(bits), dtype=np.uint8)
        for limit in limits.T:
            accepted += bits < (limit[0] if alike else np.repeat(limit, counts))
        return accepted

    def _by_confidence(
        self, requests: Ints, counts: Ints, rounds: Ints, bits: Bits, accepted: Counts, stops: Counts
    ) -> None:
        """Write the rounds of classes whose drafts each have an acceptance of their own into `accepted` and `stops`."""
        of_each = np.repeat(requests, counts)
        classes = self._survival.class_of[of_each]
        for index, rates in enumerate(self._survival.rates):
            of_class = classes == index
            if isinstance(rates, Revealed):
                class_accepted, class_made = self._revealed(rates, of_each[of_class], rounds[of_class], bits[of_class])
                accepted[of_class] = class_accepted
            elif self._stops_below is not None:
                class_made = np.repeat(self._survival.drafts_above(self._stops_below, requests), counts)[of_class]
            if self._stops_below is not None:
                stops[of_class] = class_made
        if self._stops_below is not None:
            np.minimum(accepted, stops, out=accepted)

    def _revealed(self, rates: Revealed, requests: Ints, rounds: Ints, bits: Bits) -> tuple[Counts, Counts]:
        """Return (drafts accepted, drafts made) if every draft token has an acceptance of its own, which is drawn
        too."""
        number = as_uniform(bits)
        alive: Array = np.ones_like(number)
        accepted, num_made = np.zeros(number.shape, dtype=np.uint8), np.zeros(number.shape, dtype=np.uint8)
        rate, bounds = np.array(rates.rate), np.cumsum(rates.share)[:-1]
        for depth in range(1, self._shape.depth + 1):
            alive = alive * rate[bounds.searchsorted(uniform(self._seed, requests, rounds, depth), "right")]
            accepted += number < alive
            num_made += at_least(alive, self._stops_below or 0.0)
        return accepted, num_made


def adapted(
    right: Counts, starts: Sequence[int], lengths: Callable[[Iterator[int]], Iterator[int]]
) -> tuple[Counts, Counts]:
    """Return (drafts accepted, drafts made) in rounds of requests that begin at `starts`, given the number of drafts
    that are right in each round, and the function by which lengths follow from those."""
    num_right, draft_lengths = right.tolist(), list[int]()
    for begin, end in pairwise(starts):
        draft_lengths += islice(lengths(iter(num_right[begin:end])), end - begin)
    stops = np.array(draft_lengths, dtype=np.int64)
    return np.minimum(right, stops), stops


def overlapped(right: Counts, starts: Sequence[int], window: int, replicas: int) -> tuple[Counts, Counts]:
    """Return (drafts accepted, drafts computed) in rounds of DSI, of requests that begin at `starts`, given the number
    of drafts that are right in each round. PEARL is DSI with one replica.

    Of m drafts to verify the target computes all but the last, and its own next token is added unless that is
    the last draft itself: min(right + 1, m) tokens. With no drafts yet it computes one token and looks whether the
    first draft made meanwhile is the same. Before that verdict come replicas - 1 rounds without any, here and in
    `simtune.engine` rounds of -1 drafts: not even the token that is certain is verified, and none delivered.
    """
    # A state is a list: the state after 0, 1, ... window right drafts, and last how many drafts are computed in it.
    states: dict[int, list[Any]] = {pending: [] for pending in (0, window - 1, window)}
    anew = states[0]
    for _ in range(replicas - 1):
        anew = [anew] * (window + 1) + [-1]
    for pending, state in states.items():
        after, num_needed = (window, pending) if pending else (window - 1 or window, 1)
        state += [states[after] if drafts >= num_needed else anew for drafts in range(window + 1)]
        state.append(max(pending - 1, 0))
    num_right, counts = right.tolist(), []
    for begin, end in pairwise(starts):
        before = accumulate(num_right[begin:end], getitem, initial=anew)
        counts += [state[-1] for state in islice(before, end - begin)]
    computed = np.array(counts, dtype=np.int64)
    return np.minimum(right, computed), computed
