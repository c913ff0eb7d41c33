"""The real clock of validation: seconds that only rise, things done at their times, and how late an event loop is."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

ECHO_EVERY_S = 0.005


def now() -> float:
    """Seconds of a clock that only rises; its zero means nothing."""
    return time.perf_counter()


def pause(seconds: float) -> None:
    """Do nothing for a while."""
    time.sleep(seconds)


class Ticker:
    """Calls `at(i)` at each of some times, which ascend, from a thread of its own: an event loop's timers are only good
    to a millisecond."""

    def __init__(self, times: Sequence[float], at: Callable[[int], object]) -> None:
        self._times, self._at = times, at
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="simtune-ticker", daemon=True)

    def start(self) -> None:
        """Begin; times that are past come at once."""
        self._thread.start()

    def stop(self) -> None:
        """Call no more, and wait until the thread has ended."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        for i, due in enumerate(self._times):
            if self._over.wait(max(0.0, due - now())):
                return
            self._at(i)


class Echo:
    """How long what comes over a socket waits until an event loop looks at it.

    A thread sends the time over a socket pair every `ECHO_EVERY_S`; the loop reads it and compares. That is what a
    token that comes at such a moment waits for its stamp. Enter it within the loop.
    """

    def __init__(self) -> None:
        self.delays_s: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send, name="simtune-echo", daemon=True)

    def __enter__(self) -> Echo:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._near, self._receive)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._loop.remove_reader(self._near)
        self._near.close()
        self._far.close()

    def _send(self) -> None:
        while not self._over.wait(ECHO_EVERY_S):
            self._far.send(struct.pack("d", now()))

    def _receive(self) -> None:
        data = self._near.recv(8 * 1024)
        seen = now()
        self.delays_s += [seen - sent for (sent,) in struct.iter_unpack("d", data)]
