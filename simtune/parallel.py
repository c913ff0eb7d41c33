"""Work for several processes whose results come back in the order in which it was given out."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def executor(jobs: int | None, most: int) -> Iterator[Executor | None]:
    """A pool of `jobs` processes (default: one per core), at most `most`; None when one would do."""
    jobs = min(jobs or os.cpu_count() or 1, most)
    if jobs <= 1:
        yield None
        return
    # An interrupt is the parent's affair: workers finish what they are at and are given no more.
    pool = ProcessPoolExecutor(jobs, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        yield pool
    except Exception:
        pool.shutdown(wait=True, cancel_futures=True)  # or the process may end while the pool still closes its pipes
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def ordered_map(pool: Executor | None, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
    """`work(task)` for every task, in the order of the tasks."""
    return map(work, tasks) if pool is None else pool.map(work, tasks)
