"""Properties of the drafts that are made for a scheduler, and of their acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Ints
from simtune.engine.request import Request


class AcceptedDrafts(Protocol):
    """Number of drafts accepted. It depends on nothing but the arguments, whatever else is in the step."""

    def __call__(self, request: Request, number: int, drafts: int, /) -> int:
        """Return the number accepted of `drafts` drafts in a request's verification `number`, counted from 0.

        At most `drafts`; in a tree at most its depth. For -1 drafts -1: nothing is verified in that round, and nothing
        delivered.
        """


class TokensAfter(Protocol):
    """`AcceptedDrafts` of many rounds at once."""

    def __call__(self, request: Request, first: int, count: int, drafts: int, tokens: int, /) -> Ints:
        """Return the tokens after each of at least `count` rounds from number `first` on, starting from `tokens`
        tokens, if `drafts` drafts are made in each, as far as the drafter does not stop by itself."""


class LayOut(Protocol):
    """Rows of the rounds of many requests in a batch: see `RoundPlanner.lay_out`."""

    def __call__(self, before: Ints, prompts: Ints, begins: Sequence[int], /) -> Ints:
        """Return the rows of all rounds, (2, rounds), given the tokens computed before each round, the prompt tokens of
        each request, and the index in `before` at which each request begins and the last one ends."""


class LaidOut(Protocol):
    """All rounds of one request, out of many requests that were drawn and laid out at once."""

    def __call__(self, request: Request, lay_out: LayOut, /) -> tuple[Ints, int] | None:
        """Return (rows of a request whose prompt was just computed, tokens computed after the last of its rounds), all
        drafts being made in each; None if unknown. `lay_out` may be called for any number of requests."""


@dataclass(frozen=True, slots=True)
class DraftingTerms:
    """Number of drafts, their cost to a scheduler, and their acceptance."""

    max_drafts: int
    """Most drafts verified per request and step, all nodes of a tree counted."""
    accepted: AcceptedDrafts
    drafts: Callable[[int], int] | None = None
    """Drafts of each request after a step, by the number of requests in the step; always max_drafts unless given."""
    lookahead: int = 0
    """Tokens beyond those of a step that a resident's blocks must have room for, if the drafter writes its own keys and
    values: vLLM takes max_drafts for draft models, EAGLE, MTP and dspark, one more for dflash."""
    extra_slots: int = 0
    """Tokens of the budget that each request takes besides its own, for tokens that the drafter alone computes: in vLLM
    1 for a draft model, max_drafts for dflash, max_drafts - 1 for dspark, else 0."""
    depth: int | None = None
    """Number of drafts in turn that are made in every step, whatever is verified: the depth of a tree. None for chains,
    whose drafts all follow each other."""
    stops: Callable[[Request, int, int], NDArray[np.integer]] | None = None
    """Number of drafts, by (request, first, count), after which the drafter stops by itself in each of `count` rounds;
    -1 if a request only waits for a verdict, and does not even verify the token that is certain."""
    lengths: Callable[[Request], int] | None = None
    """Number of drafts of a request if it is the same in all its rounds."""
    shares: Callable[[Sequence[Request]], Sequence[int]] | None = None
    """Drafts of each of these requests in one step, if drafts are counted for the batch."""
    drops_last_hit: bool = False
    """True if the last block found in the prefix cache is computed again, for a drafter that needs the target's hidden
    states of those tokens: EAGLE, MTP and block drafters in vLLM up to 0.32."""
    hashes_next: bool = False
    """True if a block is found only by requests that have the token after it in common too, on which the drafter's keys
    and values of its last token depend: EAGLE and MTP in vLLM 0.33, in place of `drops_last_hit`."""
    names_verified: bool = False
    """True if accepted tokens can be found in the prefix cache as soon as their verification is known (vLLM 0.33);
    otherwise, with synchronous scheduling, from the next step of their request on."""
    tokens_after: TokensAfter | None = None
    """Equal to `accepted`, but faster. Without it, rounds are computed one by one."""
    laid_out: LaidOut | None = None
    """Equal to `accepted`, but faster still, for requests that begin to decode."""

    @property
    def steady(self) -> bool:
        """True if a request drafts as much in each of its rounds."""
        return self.drafts is None and self.shares is None and self.stops is None

    @property
    def pads(self) -> bool:
        """True if a newcomer with one token to compute gets placeholder drafts, to be as wide as the others."""
        return self.steady
