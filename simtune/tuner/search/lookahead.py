"""Worker processes that run tasks before their results are needed; the results are taken one by one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Generic, Protocol, TypeVar

from simtune.sim.parallel import say_alone

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Task(Protocol[R_co]):
    """A task that can be sent to a worker process."""

    def run(self) -> R_co:
        """Return the result, which depends on nothing but the task."""


class LookAhead(Generic[K, R]):
    """Results by key. Tasks that were started and are no longer expected are cancelled."""

    def __init__(self, pool: Executor) -> None:
        self._pool: Executor | None = pool
        self._under_way: dict[K, Future[R]] = {}

    def result(self, key: K, task: Task[R], expected: Iterable[tuple[K, Task[R]]]) -> R:
        """Return the result of the task, while workers start the tasks that are expected after it.

        If the system kills a worker, for example when memory runs out, this process continues alone.
        """
        if self._pool is None:
            return task.run()
        try:
            return self._from_pool(self._pool, key, task, expected)
        except BrokenExecutor as lost:
            say_alone(lost)
            self._pool = None
            return task.run()

    def _from_pool(self, pool: Executor, key: K, task: Task[R], expected: Iterable[tuple[K, Task[R]]]) -> R:
        if key not in self._under_way:
            self._under_way[key] = pool.submit(_run, task)
        expected_keys = {key}
        for later, later_task in expected:
            expected_keys.add(later)
            if later not in self._under_way:
                self._under_way[later] = pool.submit(_run, later_task)
        for forgotten in self._under_way.keys() - expected_keys:
            self._under_way.pop(forgotten).cancel()
        return self._under_way.pop(key).result()


def _run(task: Task[R]) -> R:
    return task.run()
