"""The most users of a closed loop that a plan serves within the SLO: the load of the objectives `users` and
`users_per_gpu`.

Users are doubled until the SLO is missed, and then bisected: the answer is exact if more users never help. Every number
of users is simulated on the same requests, and on more of them for more users (ROUNDS for each).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from simtune.results.result import Result
from simtune.sim.deployment import Deployment
from simtune.specs.workload import Slo
from simtune.tuner.search.draws import MOST_REQUESTS, LoadDraws
from simtune.workload.requests import RequestStream

ROUNDS = 3
"""Least arrivals of each user after the warm-up, by which users have come to run side by side."""


class UserLoad(NamedTuple):
    """A closed loop of any number of users."""

    stream: RequestStream
    draws: LoadDraws
    draw: int = 0

    @property
    def most(self) -> int:
        """Users beyond which runs would have too many requests."""
        size = len(self.stream) / self.stream.arrivals
        return max(1, int(MOST_REQUESTS / size / ROUNDS))

    def of_users(self, users: int) -> RequestStream:
        """Return the requests of a number of users."""
        arrivals = self.stream.warm_up_arrivals + ROUNDS * users
        longer = self.stream if arrivals <= self.stream.arrivals else self.draws.stream(arrivals, self.draw)
        return replace(longer, users=users)


def most_users(load: UserLoad, simulate: Callable[[RequestStream], Result]) -> Result:
    """Return the run of the most users that meets the SLO; if none does, that of one user."""
    runs: dict[int, Result] = {}

    def meets(users: int) -> bool:
        if users not in runs:
            runs[users] = replace(simulate(load.of_users(users)), searched_users=users)
        return runs[users].meets_slo

    low, high = 0, min(load.most, load.stream.users or 1)
    while meets(high):
        if high == load.most:
            return runs[high]
        low, high = high, min(load.most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return runs[max(low, 1)]


def run_at_load(
    deployment: Deployment, stream: RequestStream, slo: Slo, users: UserLoad | None, *, record: bool = False
) -> Result:
    """Simulate a deployment under a stream, or with the most `users` that meet the SLO."""
    if users is None:
        return deployment.simulate(stream, slo, record=record)
    return most_users(users, lambda requests: deployment.simulate(requests, slo, record=record))
