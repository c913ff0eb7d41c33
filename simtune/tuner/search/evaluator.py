"""Simulations by key: some worked on ahead of their turn, and none whose result is known from an earlier search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor

from simtune.tuner.search.climb import Simulation, SimulationFinding
from simtune.tuner.search.lookahead import LookAhead
from simtune.tuner.search.search_journal import Ledger, key_of

SimulationKey = tuple[str, float | None, int]
"""Key of a simulation: name of the plan, rate, and draw."""
Keyed = tuple[SimulationKey, Simulation]


class TimeIsUp(KeyboardInterrupt):
    """Ends a search as an interrupt does: its best plan so far is confirmed and returned."""


class Evaluator:
    """Returns the findings of simulations. A `pool` works ahead; the `ledger` contains findings of earlier searches.

    `time_is_up` is asked before every simulation; if it is, TimeIsUp is raised once, so that the best plan so far can
    still be confirmed.
    """

    def __init__(
        self,
        pool: Executor | None,
        ledger: Ledger[SimulationFinding] | None,
        time_is_up: Callable[[], bool] | None = None,
    ) -> None:
        self._ahead = None if pool is None else LookAhead[SimulationKey, SimulationFinding](pool)
        self._ledger, self._time_is_up = ledger, time_is_up
        self.findings = 0
        """Findings that were asked for so far."""

    def finding(self, key: SimulationKey, task: Simulation, expected: Iterable[Keyed]) -> SimulationFinding:
        """Return the finding of one simulation, while workers start those expected after it."""
        self.findings += 1
        # From an earlier run of the same search: a journal must give the answer that simulating gave.
        finding = self._known(task)
        if finding is None:
            self.check_time()
            finding = task.run() if self._ahead is None else self._ahead.result(key, task, self._unknown(expected))
            if self._ledger is not None:
                self._ledger.keep(_ledger_key(task), finding)
        return finding

    def work_alone(self) -> None:
        """Simulate in this process from now on: the pool closes, or its workers are busy with what they began ahead."""
        self._ahead = None

    def check_time(self) -> None:
        """Raise TimeIsUp if the time of the search is up, once."""
        if self._time_is_up is not None and self._time_is_up():
            self._time_is_up = None
            raise TimeIsUp

    def _known(self, task: Simulation) -> SimulationFinding | None:
        return None if self._ledger is None else self._ledger.look(_ledger_key(task))

    def _unknown(self, expected: Iterable[Keyed]) -> Iterator[Keyed]:
        return ((key, task) for key, task in expected if self._known(task) is None)


def _ledger_key(task: Simulation) -> str:
    how = "all cores" if task.cores is None else "as long as it is" if task.draws is None else ""
    return key_of(task.deployment.plan, task.rate_rps, task.draw, len(task.stream), how)
