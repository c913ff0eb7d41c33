"""Work done by several processes ahead of its turn, for somebody who takes the results one by one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Generic, Protocol, TypeVar

from simtune.sim.parallel import say_alone

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Task(Protocol[R_co]):
    """Something that can be sent to a worker, and run there."""

    def run(self) -> R_co:
        """The result, which depends on nothing but the task."""


class LookAhead(Generic[K, R]):
    """Results by key. What was begun and is not expected any more is cancelled."""

    def __init__(self, pool: Executor) -> None:
        self._pool: Executor | None = pool
        self._under_way: dict[K, Future[R]] = {}

    def result(self, key: K, task: Task[R], expected: Iterable[tuple[K, Task[R]]]) -> R:
        """Of the task, while others begin with what is expected after it.

        Where the system kills a worker, as it does when memory runs out, this process goes on alone.
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
        wanted = {key}
        for later, its in expected:
            wanted.add(later)
            if later not in self._under_way:
                self._under_way[later] = pool.submit(_run, its)
        for forgotten in self._under_way.keys() - wanted:
            self._under_way.pop(forgotten).cancel()
        return self._under_way.pop(key).result()


def _run(task: Task[R]) -> R:
    return task.run()
