"""The real clock of validation: monotonic seconds, actions at given times, and the lateness of an event loop."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

ECHO_EVERY_S = 0.005


def now() -> float:
    """Return seconds of a monotonic clock; its zero has no meaning."""
    return time.perf_counter()


def pause(seconds: float) -> None:
    """Sleep for some seconds."""
    time.sleep(seconds)


_STAMPED = getattr(socket, "SO_TIMESTAMPNS", 35) if sys.platform == "linux" else None
_STAMP = struct.Struct("@qq")  # seconds and nanoseconds


class StampedSocket:
    """A socket whose messages the kernel stamps as they arrive, if it can, so that reading late does no harm.

    Bytes that are read at once have one stamp, that of the last message. Stamps are in time of day; if the time of day
    has been set since it was last read, the time of reading is used instead.
    """

    def __init__(self, its: socket.socket) -> None:
        """Take over a connected TCP socket, and make it non-blocking."""
        self.socket, self._day = its, _time_of_day()
        its.setblocking(False)
        if _STAMPED is not None:
            # Without the option messages are stamped when they are read.
            with suppress(OSError):
                its.setsockopt(socket.SOL_SOCKET, _STAMPED, 1)

    def receive(self, most: int = 1 << 16) -> tuple[float, bytes]:
        """Return the time of arrival by `now`, and the bytes received; empty at the end. Raise OSError."""
        data, more, _, _ = self.socket.recvmsg(most, _ROOM)
        before, self._day = self._day, _time_of_day()
        arrived_s = self._day.before
        if not before.goes_with(self._day):
            return arrived_s, data
        for level, kind, stamp in more:
            if (level, kind, len(stamp)) == (socket.SOL_SOCKET, _STAMPED, _STAMP.size):
                seconds, nanoseconds = _STAMP.unpack(stamp)
                arrived_s -= max(0.0, (self._day.nanoseconds - seconds * 10**9 - nanoseconds) * 1e-9)
        return arrived_s, data


class _TimeOfDay(NamedTuple):
    """Time of day, between two readings of the monotonic clock."""

    before: float
    nanoseconds: int
    after: float

    def goes_with(self, later: _TimeOfDay) -> bool:
        """True if both clocks may have advanced equally, to a microsecond; otherwise the time of day was set
        meanwhile."""
        passed = (later.nanoseconds - self.nanoseconds) * 1e-9
        return later.before - self.after - 1e-6 <= passed <= later.after - self.before + 1e-6


def _time_of_day() -> _TimeOfDay:
    return _TimeOfDay(now(), time.time_ns(), now())


_ROOM = socket.CMSG_SPACE(_STAMP.size)


class Ticker:
    """Calls `at(i)` at each of some ascending times, from a thread of its own: timers of an event loop are only
    accurate to a millisecond."""

    def __init__(self, times: Sequence[float], at: Callable[[int], object]) -> None:
        self._times, self._at = times, at
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="simtune-ticker", daemon=True)

    def start(self) -> None:
        """Start; calls whose times are past are made at once."""
        self._thread.start()

    def stop(self) -> None:
        """Make no more calls, and wait until the thread has ended."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        for i, due in enumerate(self._times):
            if self._over.wait(max(0.0, due - now())):
                return
            self._at(i)


class Echo:
    """Measures the delay of the stamps of messages on a socket.

    A thread sends the time over a connection of the loopback every `ECHO_EVERY_S`; the loop reads it and compares. That
    is how long a token that arrives at such a moment waits for its stamp: until the kernel has it, or until an event
    loop reads it. Enter it within the loop.
    """

    def __init__(self, *, by_kernel: bool = True) -> None:
        """`by_kernel` is True if the messages that the echo stands for are stamped by the kernel."""
        self.delays_s: list[float] = []
        self._by_kernel = by_kernel
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send, name="simtune-echo", daemon=True)

    def __enter__(self) -> Echo:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._far = socket.create_connection(server.getsockname())
            near, _ = server.accept()
        self._far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._near = StampedSocket(near)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(near, self._receive)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._loop.remove_reader(self._near.socket)
        self._near.socket.close()
        self._far.close()

    def _send(self) -> None:
        while not self._over.wait(ECHO_EVERY_S):
            self._far.send(struct.pack("d", now()))

    def _receive(self) -> None:
        at_s, data = self._near.receive(8 * 1024)
        stamped_s = at_s if self._by_kernel else now()
        self.delays_s += [stamped_s - sent for (sent,) in struct.iter_unpack("d", data)]
