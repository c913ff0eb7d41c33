"""An executor that computes nothing: its steps take what a cost model says, on a clock that it moves itself."""

from __future__ import annotations

from collections.abc import Sequence

from simtune.costs.protocol import StepCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import Request
from simtune.validation.servers.executed_scheduler import TokenShare


class PretendedClock:
    """Moves only when it is told to, in whole ticks."""

    def __init__(self) -> None:
        self.ticks = 0

    def now(self) -> float:
        return self.ticks / TICKS_PER_SECOND

    def wait_until(self, at_s: float) -> None:
        self.ticks = max(self.ticks, round(at_s * TICKS_PER_SECOND))

    def gauge(self, tokens: int) -> float:
        return 1.0


class PretendedExecutor:
    """Steps take what the costs say; requests must hold what a step computes after."""

    def __init__(self, costs: StepCosts, clock: PretendedClock) -> None:
        self._costs, self._clock = costs, clock
        self.cached: dict[Request, int] = {}

    def run(self, shares: Sequence[TokenShare]) -> None:
        for share in shares:
            assert self.cached.get(share.request, 0) == share.past
            self.cached[share.request] = share.past + share.tokens
        decodes = [s for s in shares if s.request.decoding]
        chunks = [(s.past, s.tokens) for s in shares if not s.request.decoding]
        context, samples = sum(s.past + 1 for s in decodes), sum(s.samples for s in shares)
        self._clock.ticks += self._costs.mixed(len(decodes), context, chunks, samples)

    def release(self, request: Request) -> None:
        self.cached.pop(request, None)
