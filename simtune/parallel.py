"""Work for several processes whose results come back in the order in which it was given out."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

_PR_SET_PDEATHSIG = 1  # of prctl(2): the signal a process gets when its parent ends

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def executor(jobs: int | None, most: int) -> Iterator[Executor | None]:
    """A pool of `jobs` processes (default: one per core), at most `most`; None when one would do."""
    jobs = min(jobs or os.cpu_count() or 1, most)
    if jobs <= 1:
        yield None
        return
    pool = ProcessPoolExecutor(jobs, initializer=_enter_worker, initargs=(os.getpid(),))
    try:
        yield pool
    except Exception:
        pool.shutdown(wait=True, cancel_futures=True)  # or the process may end while the pool still closes its pipes
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _enter_worker(parent: int) -> None:
    """An interrupt is the parent's affair: workers finish what they are at and are given no more. Where the parent ends
    however suddenly, so do they."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it had ended before
            os._exit(1)


def ordered_map(pool: Executor | None, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
    """`work(task)` for every task, in the order of the tasks.

    Where the system kills a worker, as it does when memory runs out, what is left is done in this process.
    """
    done = 0
    if pool is not None:
        try:
            for result in pool.map(work, tasks):
                yield result
                done += 1
            return
        except BrokenProcessPool:
            sys.stderr.write("a worker process was killed, perhaps for want of memory; going on with one process\n")
    yield from map(work, tasks[done:])
