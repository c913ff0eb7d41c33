"""The load client: streamed completions of an OpenAI-compatible server, at their times, with the time of every token.

It also measures its own lateness (`Lateness`), which is checked before its times are judged.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from simtune.errors import EngineError
from simtune.validation.client.http_exchange import (
    Exchange,
    Piece,
    ResponseCaps,
    ServerAddress,
    ask,
    fetch,
    look_up,
    read_response,
)
from simtune.validation.client.measured_run import Lateness, MeasuredRequest
from simtune.validation.client.prometheus import MetricsReading
from simtune.validation.client.prompts import Prompts
from simtune.validation.client.real_clock import Echo, Ticker, now
from simtune.validation.client.relay import Direct, Relay, ServerPath
from simtune.validation.client.streaming import Answer
from simtune.workload.requests import RequestStream

LEAD_S = 0.2
"""Seconds between the last preparation and the first request."""
LOOK_EVERY_S = 0.1
"""Seconds between two checks for responses that have become silent."""
METRICS_BYTES = 64 * 1024 * 1024
"""Most bytes of all readings of /metrics together; beyond it only the last reading is kept."""


@dataclass(frozen=True)
class Patience:
    """Limits of waiting, in seconds, and of the size of a response."""

    silence_s: float = 120.0
    """Longest wait for a connection, and for the next byte of a response, including the first."""
    request_s: float = 3600.0
    """Longest time of a request, from its sending to the end of its response."""
    metrics_every_s: float = 1.0
    """Time between two readings of /metrics."""
    caps: ResponseCaps = field(default_factory=ResponseCaps)


class Traffic(NamedTuple):
    """Results of a load."""

    requests: tuple[MeasuredRequest, ...]
    lateness: Lateness
    readings: tuple[MetricsReading, ...]


def send(
    server: ServerAddress,
    model: str,
    stream: RequestStream,
    prompts: Prompts,
    patience: Patience | None = None,
    decode: ServerAddress | None = None,
) -> Traffic:
    """Send every request of a stream to a model, by the server's name for it, and wait for all responses.

    With `decode` the first server only computes prompts, and the other one decodes (`simtune.validation.client.relay`).
    The load is an open loop if the stream has arrival times, counted from its first; otherwise a closed loop of its
    users, who send no request before it is due if the stream states when that is. A request that fails is kept with
    its error. Raise EngineError if there is no such host.
    """
    bodies = [_body(model, stream, prompts, i) for i in range(len(stream))]
    path = Direct(server, bodies) if decode is None else Relay(server, decode, bodies)
    drive = _Drive(path, stream, patience or Patience())
    with _no_collection():
        asyncio.run(drive.run())
    return drive.traffic()


def served_model(server: ServerAddress) -> str:
    """Return the first model that a server lists. Raise EngineError if it lists none."""
    text = ask(server, "/v1/models")
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise EngineError(f"{server.url}: does not say which models it serves (/v1/models)") from None


def _body(model: str, stream: RequestStream, prompts: Prompts, request: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompts[request],
        "max_tokens": int(stream.output_tokens[request]),
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if stream.priority.any():
        body["priority"] = int(stream.priority[request])
    return body


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage before and after, not while times are taken."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass(eq=False)
class _Sent:
    """A request that was sent, times on the clock."""

    request: int
    due_s: float | None
    sent_s: float
    exchanges: list[Exchange] = field(default_factory=list)
    """Exchanges with the servers that it was sent to, in order; the last may be in progress."""
    error: str | None = None


class _Drive:
    """A load while it is sent."""

    def __init__(self, path: ServerPath, stream: RequestStream, patience: Patience) -> None:
        self._path, self._stream, self._patience = path, stream, patience
        self._sent: list[_Sent] = []
        self._under_way: set[_Sent] = set()
        self._scrapes: list[tuple[float, list[list[Piece]]]] = []
        self._metrics_bytes = 0
        self._start = 0.0

    async def run(self) -> None:
        """Send all requests, and wait for all responses."""
        self._addresses = [await look_up(server) for server in self._path.servers]
        await self._read_metrics()
        beside = [asyncio.create_task(self._scrape()), asyncio.create_task(self._look())]
        try:
            with Echo(by_kernel=not any(server.tls for server in self._path.servers)) as self._echo:
                await (self._closed_loop() if self._stream.arrival_s is None else self._open_loop())
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        await self._read_metrics()

    async def _open_loop(self) -> None:
        assert self._stream.arrival_s is not None
        due_s: list[float] = (self._stream.arrival_s - self._stream.arrival_s[0]).tolist()
        loop = asyncio.get_running_loop()
        all_sent: asyncio.Future[None] = loop.create_future()
        tasks: list[asyncio.Task[None]] = []

        def begin(request: int) -> None:
            tasks.append(loop.create_task(self._one(request, self._start + due_s[request])))
            if request == len(due_s) - 1:
                all_sent.set_result(None)

        self._start = now() + LEAD_S
        ticker = Ticker([self._start + due for due in due_s], lambda i: loop.call_soon_threadsafe(begin, i))
        ticker.start()
        try:
            await all_sent
            await asyncio.gather(*tasks)
        finally:
            ticker.stop()
            for task in tasks:
                task.cancel()

    async def _closed_loop(self) -> None:
        stream, coming = self._stream, iter(range(len(self._stream)))
        self._start = now()

        async def user() -> None:
            for request in coming:
                due_s = None
                if stream.due_s is not None:
                    due_s = max(now(), self._start + float(stream.due_s[request] - stream.due_s[0]))
                    await asyncio.sleep(due_s - now())
                await self._one(request, due_s)
                if stream.think_s:
                    await asyncio.sleep(stream.think_s)

        await asyncio.gather(*(user() for _ in range(min(stream.users or 1, len(stream)))))

    async def _one(self, request: int, due_s: float | None) -> None:
        sent = _Sent(request, due_s, now())
        self._sent.append(sent)
        for address in self._addresses:
            message = self._path.message(request, sent.exchanges)
            if message is None or sent.error is not None:
                return
            try:
                async with asyncio.timeout(self._patience.silence_s):
                    sent.exchanges.append(await address.open(message, self._caps(request)))
            except TimeoutError:
                sent.error = f"cannot be reached: no connection within {self._patience.silence_s:g} s"
                return
            except OSError as error:
                sent.error = f"cannot be reached: {os.strerror(error.errno) if error.errno else error}"
                return
            await self._closed(sent)

    def _caps(self, request: int) -> ResponseCaps:
        return self._patience.caps.of_stream(int(self._stream.output_tokens[request]))

    async def _closed(self, sent: _Sent) -> None:
        exchange = sent.exchanges[-1]
        self._under_way.add(sent)
        try:
            await exchange.closed
        finally:
            self._under_way.discard(sent)
            exchange.abort()
            if exchange.too_long is not None:
                sent.error = exchange.too_long

    async def _look(self) -> None:
        """Abort requests that have been silent, or under way, for too long."""
        silence_s, request_s = self._patience.silence_s, self._patience.request_s
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            at_s = now()
            for sent in list(self._under_way):
                if at_s - sent.exchanges[-1].last_s > silence_s:
                    sent.error = f"silent for {silence_s:g} s"
                elif at_s - sent.sent_s > request_s:
                    sent.error = f"not complete within {request_s:g} s"
                else:
                    continue
                sent.exchanges[-1].abort()

    async def _scrape(self) -> None:
        while True:
            await asyncio.sleep(self._patience.metrics_every_s)
            await self._read_metrics()

    async def _read_metrics(self) -> None:
        at_s, patience = now(), self._patience
        every = (fetch(address, "/metrics", patience.silence_s, patience.caps) for address in self._addresses)
        reading = list(await asyncio.gather(*every))
        if self._metrics_bytes > METRICS_BYTES and len(self._scrapes) > 1:
            self._scrapes.pop()
        self._metrics_bytes += sum(len(data) for pieces in reading for _, data in pieces)
        self._scrapes.append((at_s, reading))

    # --- when all is over ---------------------------------------------------------------------------------

    def traffic(self) -> Traffic:
        """Return the requests with their times, the lateness of the client and the readings of metrics."""
        rows = sorted((self._row(sent) for sent in self._sent), key=lambda row: row.request)
        late_s = [sent.sent_s - sent.due_s for sent in self._sent if sent.due_s is not None]
        scrapes = ((at_s - self._start, _metrics(answers)) for at_s, answers in self._scrapes)
        readings = [MetricsReading(at_s, text) for at_s, text in scrapes if text is not None]
        return Traffic(tuple(rows), _lateness(late_s, self._echo.delays_s), tuple(readings))

    def _row(self, sent: _Sent) -> MeasuredRequest:
        answer = Answer(int(self._stream.output_tokens[sent.request]))
        error = sent.error
        if sent.exchanges:
            why = self._path.read(answer, sent.exchanges)
            if error is None:
                error = why
            elif sent.exchanges[-1].too_long is None:
                error = f"{error}, {answer.so_far}"
        times = tuple(at_s - self._start for at_s in answer.times_s)
        return MeasuredRequest(
            request=sent.request,
            due_s=None if sent.due_s is None else sent.due_s - self._start,
            sent_s=max(0.0, sent.sent_s - self._start),
            first_token_s=times[0] if times else None,
            finish_s=times[-1] if times and error is None else None,
            prompt_tokens=int(self._stream.prompt_tokens[sent.request]),
            output_tokens=answer.tokens,
            times_s=times,
            error=error,
        )


def _metrics(answers: Sequence[Sequence[Piece]]) -> str | None:
    """Return the metrics of all servers, one after the other; None if a server reports none."""
    texts = []
    for pieces in answers:
        response = read_response(pieces)
        if response is None or response.status != 200 or not response.complete:
            return None
        texts.append(response.text.decode("utf-8", "replace"))
    return "\n".join(texts)


def _lateness(late_s: Sequence[float], loop_s: Sequence[float]) -> Lateness:
    sends = np.maximum(0.0, late_s) if late_s else np.zeros(1)
    loop = np.maximum(0.0, loop_s) if loop_s else np.zeros(1)
    return Lateness(
        send_p50_s=float(np.percentile(sends, 50)),
        send_p99_s=float(np.percentile(sends, 99)),
        send_max_s=float(sends.max()),
        loop_p99_s=float(np.percentile(loop, 99)),
        loop_max_s=float(loop.max()),
    )
