"""Server that imitates OpenAI-compatible engines, decodes nothing, and misbehaves as configured.

It runs on the loopback in a thread with its own event loop; tokens come at the times of a simple schedule: the first
`first_token_s` after the request, the others `token_s` apart, all on one clock and independently for every request.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Misbehaviour = Literal["500", "redirect", "stall", "close", "half_line", "short", "not_json", "error", "whole", "die"]


@dataclass
class FakeServer:
    """`with FakeServer() as server: ... server.url`. Received requests are in `requests`, in order."""

    first_token_s: float = 0.01
    token_s: float = 0.001
    misbehaves: Mapping[int, Misbehaviour] = field(default_factory=dict)
    """Fault by the number of the request as it comes in: it occurs after half of its tokens, or instead of them."""
    api_key: str | None = None
    counts: bool = True
    """True if every message has the number of tokens so far."""
    port: int = 0
    """Port of the server; any free one unless given."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    """Requested paths, in order."""

    def __enter__(self) -> FakeServer:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fake-server", daemon=True)
        self._running = 0
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.port}"

    def _serve(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        self._die()
        await asyncio.gather(*(task for task in self._connections.values() if task is not None))

    def _die(self) -> None:
        """Close all connections at once, as when the process ends."""
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = asyncio.current_task()
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone, or the server has died
        finally:
            del self._connections[writer]
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read one request and respond; False if the connection has ended."""
        line = await reader.readline()
        if not line:
            return False
        method, path, _ = line.decode().split(" ", 2)
        headers: dict[str, str] = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.addresses.append(path)
        goes_on = await self._answer(method, path, headers, body, writer)
        return goes_on and headers.get("connection", "").lower() != "close"

    async def _answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            await _respond(writer, "401 Unauthorized", '{"error": "wrong key"}')
        elif method == "POST" and path == "/v1/completions":
            return await self._complete(json.loads(body), writer)
        elif path == "/v1/models":
            await _respond(writer, "200 OK", json.dumps({"data": [{"id": "fake"}]}))
        elif path == "/metrics":
            await _respond(writer, "200 OK", self._metrics())
        elif path == "/health":
            await _respond(writer, "200 OK", "")
        else:
            await _respond(writer, "404 Not Found", '{"error": "no such path"}')
        return True

    def _metrics(self) -> str:
        names = {"num_requests_running": self._running, "num_requests_waiting": 0, "num_preemptions_total": 0}
        return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in names.items())

    async def _complete(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        wrong = self.misbehaves.get(len(self.requests))
        self.requests.append(request)
        if wrong == "500":
            await _respond(writer, "500 Internal Server Error", '{"error": "out of memory"}')
            return True
        if wrong == "redirect":
            await _respond(writer, "307 Temporary Redirect", "", f"Location: {self.url}/elsewhere\r\n")
            return True
        if wrong == "whole":
            await _respond(writer, "200 OK", '{"choices": []}')
            return True
        if not request.get("stream"):
            await self._prefill(request, writer)
            return True
        self._running += 1
        try:
            return await self._stream(request, wrong, writer)
        finally:
            self._running -= 1

    async def _prefill(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Respond to a prompt alone; with the location of its KV cache, if the request asks for it."""
        number = len(self.requests)
        await asyncio.sleep(self.first_token_s)
        answer: dict[str, Any] = {"choices": [{"index": 0, "text": " t1", "finish_reason": "length"}]}
        if request.get("kv_transfer_params", {}).get("do_remote_decode"):
            answer["kv_transfer_params"] = {"do_remote_prefill": True, "remote_request_id": str(number)}
        await _respond(writer, "200 OK", json.dumps(answer))

    async def _stream(self, request: dict[str, Any], wrong: Misbehaviour | None, writer: asyncio.StreamWriter) -> bool:
        tokens, half = request["max_tokens"], request["max_tokens"] // 2
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        begun = self._loop.time()
        for sent in range(tokens):
            due = begun + self.first_token_s + sent * self.token_s
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            if wrong is not None and sent == half:
                return await self._misbehave(wrong, writer)
            _chunk(writer, self._event(sent + 1, len(request["prompt"])))
            await writer.drain()
        usage = {"prompt_tokens": len(request["prompt"]), "completion_tokens": tokens}
        _chunk(writer, {"object": "text_completion", "choices": [], "usage": usage})
        _chunk(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _event(self, tokens: int, prompt_tokens: int) -> dict[str, Any]:
        choice = {"index": 0, "text": f" t{tokens}", "finish_reason": None}
        event: dict[str, Any] = {"object": "text_completion", "choices": [choice]}
        if self.counts:
            event["usage"] = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
        return event

    async def _misbehave(self, wrong: Misbehaviour, writer: asyncio.StreamWriter) -> bool:
        """Interrupt an answer; False if the connection is closed, or True if the response ends in order."""
        if wrong == "stall":
            await self._over.wait()
        elif wrong == "die":
            self._die()
        elif wrong == "half_line":
            writer.write(b'19\r\ndata: {"choices": [{"inde\r\n0\r\n\r\n')
        elif wrong == "not_json":
            _chunk(writer, "tokens, honestly")
            writer.write(b"0\r\n\r\n")
        elif wrong == "error":
            _chunk(writer, {"error": {"message": "the engine core died"}})
            writer.write(b"0\r\n\r\n")
        elif wrong == "short":
            _chunk(writer, "[DONE]")
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        if wrong == "close":
            writer.transport.abort()
        return wrong not in ("close", "die", "stall")


def _chunk(writer: asyncio.StreamWriter, event: dict[str, Any] | str) -> None:
    text = event if isinstance(event, str) else json.dumps(event)
    data = f"data: {text}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def _respond(writer: asyncio.StreamWriter, status: str, body: str, more: str = "") -> None:
    kind = "application/json" if body[:1] in "{[" else "text/plain"
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body.encode())}\r\n{more}\r\n"
    writer.write((head + body).encode())
    await writer.drain()
