"""What a scheduler knows of the drafts that are made for it, and of how many are accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Ints
from simtune.engine.request import Request


class AcceptedDrafts(Protocol):
    """How many drafts are accepted. The answer depends on nothing but the arguments, whoever else is in the step."""

    def __call__(self, request: Request, number: int, drafts: int, /) -> int:
        """Of so many drafts, in a request's verification `number`, counted from 0: at most `drafts`; in a tree at most
        its depth. Of -1 drafts -1: nothing is verified in that round, and nothing delivered."""


class TokensAfter(Protocol):
    """`AcceptedDrafts` of many rounds at once."""

    def __call__(self, request: Request, first: int, count: int, drafts: int, tokens: int, /) -> Ints:
        """After each of at least `count` rounds from number `first` on, how many tokens there are, when so many drafts
        are made in each, as far as the drafter does not stop by itself, and there were `tokens` before."""


class LayOut(Protocol):
    """What a batch makes of the rounds of many requests: see `RoundPlanner.lay_out`."""

    def __call__(self, before: Ints, prompts: Ints, begins: Sequence[int], /) -> Ints:
        """Rows of all rounds, (2, rounds), given the tokens computed before each round, the prompt tokens of each
        request, and where in `before` each request begins and the last one ends."""


class LaidOut(Protocol):
    """All rounds of one request, of many that were drawn and laid out at once."""

    def __call__(self, request: Request, lay_out: LayOut, /) -> tuple[Ints, int] | None:
        """(rows of a request whose prompt was just computed, tokens computed after the last of its rounds), all drafts
        being made in each; None where it cannot tell. `lay_out` may be asked for as many requests as one likes."""


@dataclass(frozen=True, slots=True)
class DraftingTerms:
    """How many drafts there are, what they cost a scheduler, and how many are accepted."""

    max_drafts: int
    """The most drafts verified per request and step, the nodes of a tree all counted."""
    accepted: AcceptedDrafts
    drafts: Callable[[int], int] | None = None
    """How many drafts each request gets after a step of so many requests; always max_drafts unless given."""
    lookahead: int = 0
    """Tokens beyond those of a step that a resident's blocks must have room for, where the drafter writes keys and
    values of its own: vLLM takes max_drafts for draft models, EAGLE, MTP and dspark, one more for dflash."""
    extra_slots: int = 0
    """What each request takes of the token budget besides its tokens, for what the drafter alone computes: in vLLM 1
    for a draft model, max_drafts for dflash, max_drafts - 1 for dspark, else 0."""
    depth: int | None = None
    """How many drafts in turn are made in every step, whatever is verified: the depth of a tree. None for chains, whose
    drafts all follow each other."""
    stops: Callable[[Request, int, int], NDArray[np.integer]] | None = None
    """Of (request, first, count): after how many drafts the drafter stops by itself in each of so many rounds; -1 where
    a request only waits for a verdict, and does not even verify the token that is certain."""
    lengths: Callable[[Request], int] | None = None
    """The same where it is the same in all rounds of a request."""
    shares: Callable[[Sequence[Request]], Sequence[int]] | None = None
    """How the drafts of one step are shared out among these requests, where they are counted for the batch."""
    drops_last_hit: bool = False
    """Whether the last block found in the prefix cache is computed again, for a drafter that needs what the target
    makes of those tokens: EAGLE, MTP and block drafters in vLLM."""
    tokens_after: TokensAfter | None = None
    """Says the same as `accepted`, faster. Without it, rounds are asked for one by one."""
    laid_out: LaidOut | None = None
    """Says the same as `accepted`, faster still, of requests that begin to decode."""

    @property
    def steady(self) -> bool:
        """Whether a request drafts as much in each of its rounds."""
        return self.drafts is None and self.shares is None and self.stops is None

    @property
    def pads(self) -> bool:
        """Whether a newcomer with one token to compute gets drafts that nobody made, to be as wide as the others."""
        return self.steady
