"""Share of a scheduler's budgets that drafts take."""

from __future__ import annotations

from dataclasses import dataclass

from simtune.engine.drafting.terms import DraftingTerms


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """Needs of each request besides its tokens; zero without a drafter."""

    max_model_len: int
    extra_slots: int = 0
    """Tokens of the budget, in every step."""
    lookahead: int = 0
    """Tokens beyond those of a step that the request's blocks must have room for."""
    padding: int = 0
    """Placeholder drafts of a newcomer with one token to compute, to be as wide as the others."""

    @classmethod
    def of(cls, terms: DraftingTerms | None, max_num_batched_tokens: int, max_model_len: int) -> DraftNeeds:
        """Return the needs of a drafter. Raises ValueError if a step has no room for the extra slots of one request."""
        if terms is None:
            return cls(max_model_len)
        if max_num_batched_tokens <= terms.extra_slots:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must exceed the drafter's extra slots "
                f"({terms.extra_slots})"
            )
        padding = terms.max_drafts if terms.pads else 0
        if 1 + padding + terms.extra_slots > max_num_batched_tokens:
            # With padding vLLM would wait forever.
            padding = 0
        return cls(max_model_len, terms.extra_slots, terms.lookahead, padding)

    def padding_after(self, past: int) -> int:
        """Padding of a request with `past` tokens computed: none if the model's length has no room for it."""
        return self.padding if past + self.padding + 2 <= self.max_model_len else 0

    def slots(self, past: int, num_tokens: int) -> int:
        """Number of tokens for which a prompt must have blocks to compute `num_tokens` after `past` ones."""
        slots = past + num_tokens + self.lookahead
        return slots if slots < self.max_model_len else self.max_model_len
