"""Rules by which the draft length of a request follows from what became of its drafts so far."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from simtune.specs.base import Part, Positive

_SeatChange = Annotated[int, Field(ge=0, le=1024)]


class StepRule(Part):
    """Additive and multiplicative: longer after a round whose drafts were all kept, else shorter.

    The heuristic schedule of transformers' assisted generation is `up: 2, down: 1`.
    """

    kind: Literal["steps"] = "steps"
    up: _SeatChange = Field(0, description="tokens that are added if all drafts were kept")
    up_times: Annotated[float, Field(ge=1, le=1024)] = Field(
        1.0, description="factor of the length, before tokens are added"
    )
    down: _SeatChange = Field(0, description="tokens that are taken off if a draft was rejected")
    down_times: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="factor of the length, before tokens are taken off"
    )

    @model_validator(mode="after")
    def _moves(self) -> Self:
        if (self.up, self.down) == (0, 0) and self.up_times == self.down_times == 1:
            raise ValueError("neither grows nor shrinks: give up, down, up_times or down_times, or take a chain")
        return self

    def lengths(self, start: int, least: int, most: int, kept: Iterator[int]) -> Iterator[int]:
        """Drafts made in each round, given how many would be kept of each were all made."""
        length = start
        for right in kept:
            yield length
            if right >= length:
                length = min(most, int(length * self.up_times) + self.up)
            else:
                length = max(least, int(length * self.down_times) - self.down)


class GainRule(Part):
    """Draft the number of tokens that yields the most tokens a second by the acceptance measured so far, taken to be
    equal for all drafts: K with the largest (1 + a + ... + a^K) / (1 + K c) (Leviathan et al., arXiv 2211.17192).
    """

    kind: Literal["gain"] = "gain"
    draft_cost: Positive = Field(description="c: time of one draft over that of a verification")
    memory: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="weight of the drafts of a round over that of the round after it"
    )

    def lengths(self, start: int, least: int, most: int, kept: Iterator[int]) -> Iterator[int]:
        """Drafts made in each round, given how many would be kept of each were all made."""
        length, accepted, attempts = start, 0.0, 0.0
        for right in kept:
            yield length
            accepted = self.memory * accepted + min(right, length)
            # Drafts behind a rejected one were never judged, so they do not count.
            attempts = self.memory * attempts + min(right + 1, length)
            length = _most_gain(round(accepted / attempts, 3), self.draft_cost, least, most)


Rule = Annotated[StepRule | GainRule, Field(discriminator="kind")]


@lru_cache(maxsize=4096)
def _most_gain(acceptance: float, cost: float, least: int, most: int) -> int:
    """The length with the most tokens a second, the shortest of equals."""
    tokens, alive, best, length = 1.0, 1.0, 0.0, least
    for drafts in range(1, most + 1):
        alive *= acceptance
        tokens += alive
        gain = tokens / (1 + drafts * cost)
        if drafts >= least and gain > best:
            best, length = gain, drafts
    return length
