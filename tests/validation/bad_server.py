"""A server of raw bytes: every POST gets what a script sends, except that every second one is answered well."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"

Script = Callable[[socket.socket, threading.Event], None]
"""Answers one request; it ends when the client goes away (OSError), or the event is set."""


def event(tokens: object) -> bytes:
    """Return a message that carries a token; `tokens` is the count that it states, as JSON."""
    text = tokens if isinstance(tokens, bytes) else json.dumps(tokens).encode()
    return b'data: {"choices": [{"index": 0, "text": " t"}], "usage": {"completion_tokens": ' + text + b"}}\n\n"


def good(connection: socket.socket, over: threading.Event) -> None:
    """Send the four tokens that were asked for."""
    connection.sendall(HEAD + b"".join(event(n + 1) for n in range(4)) + DONE)


def says(data: bytes) -> Script:
    """Return a script that sends some bytes and closes."""
    return lambda connection, over: connection.sendall(data)


def repeats(head: bytes, data: bytes, every_s: float = 0.0) -> Script:
    """Return a script that sends `data` for ever after `head`."""

    def script(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(head)
        while not over.wait(every_s):
            connection.sendall(data)

    return script


@dataclass
class BadServer:
    """Server on the loopback. Requests alternate between the script and a good answer."""

    script: Script
    metrics: bytes = b""
    url: str = ""
    posts: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def _serve(self, server: socket.socket) -> None:
        threads = []
        while not self.over.is_set():
            with suppress(TimeoutError):
                connection, _ = server.accept()
                threads.append(threading.Thread(target=self._answer, args=(connection,), daemon=True))
                threads[-1].start()
        for thread in threads:
            thread.join()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(5.0)
            request = b""
            while b"\r\n\r\n" not in request:
                more = connection.recv(1 << 16)
                if not more:
                    return
                request += more
            head, _, body = request.partition(b"\r\n\r\n")
            if head.startswith(b"GET"):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n" + self.metrics)
                return
            (length,) = (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
            while len(body) < length:
                more = connection.recv(1 << 16)
                if not more:
                    return
                body += more
            self.posts += 1
            (self.script if self.posts % 2 else good)(connection, self.over)


@contextmanager
def serving(script: Script, metrics: bytes = b"") -> Iterator[BadServer]:
    """Run a bad server in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        bad = BadServer(script, metrics, f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread = threading.Thread(target=bad._serve, args=(listener,), daemon=True)
        thread.start()
        try:
            yield bad
        finally:
            bad.over.set()
            thread.join()
