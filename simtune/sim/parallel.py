"""Parallel work in several processes, on this machine or on a Dask cluster; results keep the order of the tasks.

The result of a task does not depend on the process that works on it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from simtune import __version__
from simtune.errors import UsageError

_PR_SET_PDEATHSIG = 1  # of prctl(2): the signal a process gets when its parent ends

ANSWERS_S = 10.0
"""Seconds that a cluster may take to answer, and to have a worker."""

T = TypeVar("T")
R = TypeVar("R")


class DaskCluster:
    """The workers of a Dask cluster, for as long as one is connected (`connected`)."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def pool(self) -> Executor:
        """Return an executor over the workers; shutting it down leaves the cluster as it is."""
        return _ClusterPool(self._client)


Jobs = int | DaskCluster | None
"""Workers: a number of processes (None: one per core), or a cluster."""


@contextmanager
def executor(jobs: Jobs, most: int) -> Iterator[Executor | None]:
    """Yield a pool of `jobs` processes (default: one per core), at most `most`; None if one process would do."""
    if isinstance(jobs, DaskCluster):
        with jobs.pool() as workers:
            yield workers
        return
    jobs = min(jobs or os.cpu_count() or 1, most)
    if jobs <= 1:
        yield None
        return
    pool = _Workers(jobs, initializer=_enter_worker, initargs=(os.getpid(),))
    try:
        yield pool
    except Exception:
        # Without waiting, the process could end while the pool still closes its pipes.
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Workers(ProcessPoolExecutor):
    """Processes that an interrupt never reaches: it is held back while they start, until they ignore it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Executor.submit`; the first task starts the processes."""
        with _interrupts_held_back():
            return super().submit(fn, *args, **kwargs)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Block SIGINT in this thread, and in what it starts; an interrupt that comes meanwhile is raised afterwards."""
    # On Windows.
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _enter_worker(parent: int) -> None:
    """Prepare a worker process: it ignores interrupts, which the parent handles, and finishes its task; on Linux it is
    killed when the parent ends."""
    # Ctrl-C reaches all processes of a terminal; the parent decides what becomes of the search.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent ended before prctl took effect, so no signal will come.
        if os.getppid() != parent:
            os._exit(1)


def ordered_map(pool: Executor | None, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
    """Yield `work(task)` for every task, in the order of the tasks.

    If the system kills a worker, as it does when memory runs out, this process does the remaining tasks. A cluster
    gives the tasks of a lost worker to the others; if none is left, this process does the remaining tasks too.
    """
    num_done = 0
    if pool is not None:
        try:
            # Counted as they come, so that what is done is not done again if a worker is lost.
            for result in pool.map(work, tasks):
                yield result
                num_done += 1
            return
        except BrokenProcessPool as lost:
            say_alone(lost)
    yield from map(work, tasks[num_done:])


def say_alone(lost: BrokenExecutor) -> None:
    """Report on stderr why one process continues the work of several."""
    reason = str(lost) if isinstance(lost, ClusterLost) else "a worker process was killed, probably out of memory"
    sys.stderr.write(f"{reason}; going on with one process\n")


# --- a Dask cluster ---------------------------------------------------------------------------------------


class ClusterLost(BrokenProcessPool):
    """Raised when a cluster cannot work on any task any more."""


class _ClusterFuture(Future[Any]):
    """Future of one task on a cluster."""

    def __init__(self, its: Any) -> None:
        super().__init__()
        self._its = its
        its.add_done_callback(self._settle)

    def cancel(self) -> bool:
        """Cancel the task on the cluster and here."""
        self._its.cancel(force=True)
        return super().cancel()

    def _settle(self, its: Any) -> None:
        if self.set_running_or_notify_cancel():
            try:
                with _lost_as_broken():
                    self.set_result(its.result())
            except BaseException as error:
                self.set_exception(error)


@contextmanager
def _lost_as_broken() -> Iterator[None]:
    """Translate Dask's errors for tasks that no worker could do. Raises ClusterLost."""
    from distributed import KilledWorker
    from distributed.comm import CommClosedError

    try:
        yield
    except KilledWorker as error:
        raise ClusterLost("workers of the cluster were killed by one task, probably out of memory") from error
    except (CancelledError, CommClosedError) as error:
        raise ClusterLost("the cluster does not answer any more") from error


class _ClusterPool(Executor):
    """Executor on the workers of a cluster. Tasks whose worker is lost are given to another one."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a single task; its result raises ClusterLost if the cluster cannot do it."""
        return _ClusterFuture(self._client.submit(fn, *args, pure=False, **kwargs))

    def map(
        self, fn: Callable[..., Any], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[Any]:
        """Return the results in order. Raises ClusterLost if the cluster cannot compute them."""
        futures = self._client.map(fn, *(list(tasks) for tasks in iterables), pure=False)
        try:
            with _lost_as_broken():
                for future in futures:
                    yield future.result(timeout)
        finally:
            self._client.cancel(futures, force=True)


@contextmanager
def connected(where: str, answers_s: float = ANSWERS_S) -> Iterator[DaskCluster]:
    """Connect to the cluster at an address (tcp://host:port), or start `local:N`: N workers on this machine, which
    listen on 127.0.0.1 only and end with this process.

    Raises UsageError if Dask is not installed, no scheduler answers, there is no worker, or workers have another
    release.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise UsageError(f"--cluster {where}: needs Dask; pip install 'simtune[cluster]'") from None
    kind, _, number = where.partition(":")
    if kind == "local":
        if not number.isdecimal() or int(number) < 1:
            raise UsageError(f"--cluster {where}: write local:N with the number of workers, such as local:2")
        with (
            LocalCluster(
                n_workers=int(number),
                threads_per_worker=1,
                host="127.0.0.1",
                # The dashboard listens on any free port.
                dashboard_address="127.0.0.1:0",
                silence_logs=logging.ERROR,
            ) as local_cluster,
            Client(local_cluster) as client,
        ):
            yield DaskCluster(client)
        return
    try:
        client = Client(where, timeout=answers_s)
    except (OSError, ValueError, TypeError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"--cluster {where}: no Dask scheduler answers there within {answers_s:g} s ({cause}); start one, or add "
            "--cluster-fallback to go on without it"
        ) from None
    with client:
        _check_workers(client, where, answers_s)
        yield DaskCluster(client)


def _check_workers(client: Any, where: str, answers_s: float) -> None:
    """Raise UsageError if a cluster has no worker, or a worker with another release of simtune."""
    try:
        client.wait_for_workers(1, timeout=answers_s)
    except TimeoutError:
        raise UsageError(
            f"--cluster {where}: it has no workers; start some (dask worker {where}), or add --cluster-fallback to go "
            "on without it"
        ) from None
    for worker, release in sorted(client.run(_release, on_error="return").items()):
        if isinstance(release, ImportError):
            raise UsageError(f"--cluster {where}: worker {worker} has no simtune; install {__version__} there")
        # A worker that was lost meanwhile returns an error, which is no string.
        if isinstance(release, str) and release != __version__:
            raise UsageError(
                f"--cluster {where}: worker {worker} has simtune {release}, and this is {__version__}: answers could "
                "differ; install the same there"
            )


def _release() -> str:
    return __version__
