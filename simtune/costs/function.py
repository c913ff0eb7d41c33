"""Step costs by a plain function of seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simtune.costs.ticks import to_ticks

SecondsFunction = Callable[[int, int, Sequence[tuple[int, int]]], float]


class StepFunction:
    """A cost model of a function `seconds(num_decodes, context_tokens, chunks)`.

    It is called for every step, which is exact and slower than a model that knows how its steps grow;
    `simtune.costs.protocol.StepCosts` describes the arguments.
    """

    def __init__(self, seconds: SecondsFunction) -> None:
        self._seconds = seconds

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """See `StepCosts.decode`; the step's time is given, and nothing about the next step."""
        return to_ticks(self._seconds(num_decodes, context_tokens, ())), 0, 1

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        """See `StepCosts.mixed`; the number of samples makes no difference."""
        return to_ticks(self._seconds(num_decodes, context_tokens, chunks))
