"""Drafts of the residents of a list policy, verified round by round."""

from __future__ import annotations

from simtune.engine.batch import Tally
from simtune.engine.drafting.terms import DraftingTerms
from simtune.engine.request import Request


class RoundByRound:
    """Widths and results of verifications, each computed when its step begins and ends; costs O(residents) a step."""

    def __init__(self, terms: DraftingTerms, max_model_len: int) -> None:
        """Raise ValueError for drafts whose number differs between rounds, which no list policy makes."""
        if not terms.steady or terms.lengths is not None:
            raise ValueError("drafts must be as many in every round; use a chain, static_tree or dynamic_tree")
        self._terms = terms
        self._limit = max_model_len - 1  # an answer's last token is never computed
        self.depth = terms.max_drafts if terms.depth is None else terms.depth
        """Number of drafts in turn."""
        self.most = terms.max_drafts
        """Most drafts of a request in a round."""
        self.tally = Tally()
        """Totals of verifications so far."""

    def width(self, request: Request) -> int:
        """Return the tokens that the next step verifies for a request; drafts beyond max_model_len are not made."""
        return max(1, min(1 + self.most, self._limit - request.computed))

    def kept(self, request: Request, width: int) -> int:
        """End a verification of `width` tokens and return how many of them are kept."""
        drafts = width - 1
        accepted = self._terms.accepted(request, request.verifications, drafts) if drafts else 0
        request.verifications += bool(drafts)
        delivered = min(1 + accepted, request.output_tokens - request.emitted)
        self.tally = self.tally.plus(Tally(1, drafts, accepted, delivered))
        return 1 + accepted
