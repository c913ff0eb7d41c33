"""Number of drafts of each member of a batch."""

from __future__ import annotations

from collections.abc import Mapping

from simtune.engine.drafting.terms import DraftingTerms
from simtune.engine.request import Request


class DraftCounts:
    """Drafts per member and step, as given to the drafter after the latest step, before it stops by itself."""

    def __init__(self, terms: DraftingTerms) -> None:
        self._terms = terms
        self._shares: dict[Request, int] = {}  # used if the drafts are counted for the batch
        self.most = terms.max_drafts
        """Most drafts of any request."""

    @property
    def depth(self) -> int | None:
        """Drafts in turn of every member's next step; None if it depends on the member."""
        terms = self._terms
        if terms.depth is not None:
            return terms.depth if self.most else 0
        return self.most if terms.stops is None and terms.shares is None and terms.lengths is None else None

    def of(self, request: Request) -> int:
        """Return the drafts of one request, a member or about to become one."""
        if self._terms.shares is not None:
            return self._shares.get(request, 0)
        if self._terms.lengths is not None:
            return min(self.most, self._terms.lengths(request))
        return self.most

    def renew(self, requests: int, members: Mapping[Request, object]) -> bool:
        """Run the drafter after a step of `requests` requests; True if the drafts of any member may have changed."""
        terms = self._terms
        if terms.shares is not None:
            if members.keys() == self._shares.keys():
                return False
            self._shares = dict(zip(members, terms.shares(list(members)), strict=True))
            return True
        most, self.most = self.most, self._after(requests)
        return most != self.most

    def last(self, members: Mapping[Request, object], requests: int) -> bool:
        """True if the drafts stay the same after steps of these members, `requests` requests."""
        if self._terms.shares is not None:
            return members.keys() == self._shares.keys()
        return self._after(requests) == self.most

    def _after(self, requests: int) -> int:
        drafts, most = self._terms.drafts, self._terms.max_drafts
        return most if drafts is None else min(drafts(requests), most)
