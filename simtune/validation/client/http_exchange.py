"""HTTP for a load client: one request over a connection of its own, and the response with the times of its pieces.

Engines send the tokens of a step to all streams at once. So the kernel stamps every piece as it arrives, and the client
does as little as possible: it stores the piece, and parses it as HTTP when the run is over. What it stores of a
response is limited (`ResponseCaps`), so that a server without end cannot fill the memory. Proxies and redirects are not
followed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from simtune.errors import EngineError, UsageError
from simtune.validation.client.real_clock import StampedSocket, now

_LAST_CHUNK = b"0\r\n\r\n"
_HEAD_END = b"\r\n\r\n"
_PIECE_BYTES = 160
"""Bytes of memory that a stored piece takes beside its data."""
_SIZE_LINE = 1024
"""Longest line that says how long a chunk is."""

Piece = tuple[float, bytes]
"""Time at which a piece arrived, and its bytes."""


@dataclass(frozen=True)
class ResponseCaps:
    """Most bytes that are stored of one response; a response that is longer fails."""

    head: int = 64 * 1024
    body: int = 16 * 1024 * 1024
    """Bytes of a response that is no stream, memory for its pieces included."""
    stream: int | None = None
    """Bytes of a stream, memory for its pieces included; 1 MiB and 4 KiB for each token if None."""

    def of_stream(self, tokens: int) -> ResponseCaps:
        """Return the caps of a stream of a number of tokens. An engine sends 200 to 400 bytes for a token."""
        return ResponseCaps(self.head, self.stream or 1024 * 1024 + 4096 * tokens)


@dataclass(frozen=True)
class ServerAddress:
    """Address of an OpenAI-compatible server: `http://HOST:PORT`, with or without /v1."""

    url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        """Raise UsageError if the URL is no address of a server."""
        parts = urlsplit(self.url)
        try:
            right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            right = False
        if not right or parts.query or parts.fragment or parts.username:
            raise UsageError(f"{self.url}: invalid server address; expected http://HOST:PORT")

    @property
    def name(self) -> str:
        """Name of the host."""
        return urlsplit(self.url).hostname or ""

    @property
    def tls(self) -> bool:
        """True if the connection uses TLS."""
        return urlsplit(self.url).scheme == "https"

    @property
    def port(self) -> int:
        """Port on the host."""
        return urlsplit(self.url).port or (443 if self.tls else 80)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a request."""
        base = urlsplit(self.url).path.rstrip("/").removesuffix("/v1")
        head = [f"{method} {base}{path} HTTP/1.1", f"Host: {urlsplit(self.url).netloc}", "Connection: close"]
        if self.api_key is not None:
            head.append(f"Authorization: Bearer {self.api_key}")
        if body:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*head, "", ""]).encode() + body


@dataclass(frozen=True)
class Address:
    """Address of a server, looked up once."""

    server: ServerAddress
    family: int
    host: str

    async def open(self, request: bytes, caps: ResponseCaps) -> Exchange:
        """Connect and send. Raise OSError if the server cannot be reached."""
        loop = asyncio.get_running_loop()
        if self.server.tls:
            _, private = await loop.create_connection(
                lambda: PrivateExchange(request, loop.create_future(), caps),
                self.host,
                self.server.port,
                family=self.family,
                ssl=True,
                server_hostname=self.server.name,
            )
            return private
        connection = socket.socket(self.family, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, (self.host, self.server.port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            exchange = StampedExchange(StampedSocket(connection), loop, caps)
            await loop.sock_sendall(connection, request)
        except BaseException:
            connection.close()
            raise
        exchange.listen()
        return exchange


async def look_up(server: ServerAddress) -> Address:
    """Return the address of a server. Raise EngineError if there is no such host."""
    loop = asyncio.get_running_loop()
    try:
        addresses = await loop.getaddrinfo(server.name, server.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise EngineError(f"{server.url}: {getattr(error, 'strerror', None) or error}") from None
    family, _, _, _, host = addresses[0]
    return Address(server, family, str(host[0]))


class Exchange:
    """A request in progress, and the pieces received so far."""

    def __init__(self, closed: asyncio.Future[None], caps: ResponseCaps) -> None:
        """`closed` is done when the connection is closed."""
        self.pieces: list[Piece] = []
        self.closed = closed
        self.last_s = now()
        """Time of the last piece, or of the start of the exchange."""
        self.too_long: str | None = None
        """Cap that the response exceeds, in words; its pieces are dropped then."""
        self._caps = caps
        self._stored = 0
        self._head: bytearray | None = bytearray()

    def abort(self) -> None:
        """Close without waiting for anything."""
        raise NotImplementedError

    def _take(self, at_s: float, data: bytes) -> bool:
        """Store a piece with its time. Return True if it ends the response, because some servers keep the connection
        open, or if the response is longer than its caps."""
        self.last_s = at_s
        self.pieces.append((at_s, data))
        self._stored += len(data) + _PIECE_BYTES
        if self._head is not None:
            self._read_head(self._head, data)
        if self._stored > self._caps.head + self._caps.body:
            self._refuse(f"sent more than {self._caps.body:,} bytes")
        return self.too_long is not None or (data.endswith(_LAST_CHUNK) and data[-7:-5] in (b"", b"\r\n"))

    def _read_head(self, head: bytearray, data: bytes) -> None:
        """Look for the end of the head, which may lie in two pieces."""
        begin = max(0, len(head) - len(_HEAD_END) + 1)
        head += data
        if (end := head.find(_HEAD_END, begin)) >= 0:
            self._head = None
        if (len(head) if end < 0 else end) > self._caps.head:
            self._refuse(f"sent HTTP headers of more than {self._caps.head:,} bytes")

    def _refuse(self, why: str) -> None:
        self.too_long = why
        self.pieces.clear()

    def _is_over(self) -> None:
        """Mark the exchange as closed; the stored pieces show whether the response is complete."""
        if not self.closed.done():
            self.closed.set_result(None)


class StampedExchange(Exchange):
    """Exchange over a socket whose messages the kernel stamps."""

    def __init__(self, its: StampedSocket, loop: asyncio.AbstractEventLoop, caps: ResponseCaps) -> None:
        super().__init__(loop.create_future(), caps)
        self._socket, self._loop = its, loop

    def listen(self) -> None:
        """Start to store what arrives."""
        self._loop.add_reader(self._socket.socket, self._read)

    def _read(self) -> None:
        try:
            at_s, data = self._socket.receive()
        except BlockingIOError:
            return
        except OSError:
            self.abort()
            return
        if not data or self._take(at_s, data):
            self.abort()

    def abort(self) -> None:
        """See `Exchange`."""
        if self._socket.socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.socket)
            self._socket.socket.close()
        self._is_over()


class PrivateExchange(Exchange, asyncio.Protocol):
    """Exchange over TLS: pieces are stamped when the event loop has read them."""

    def __init__(self, request: bytes, closed: asyncio.Future[None], caps: ResponseCaps) -> None:
        super().__init__(closed, caps)
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Store a piece."""
        if self._take(now(), data):
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Mark the exchange as closed."""
        self._is_over()

    def abort(self) -> None:
        """See `Exchange`."""
        self._transport.abort()


@dataclass
class Response:
    """Response as parsed from HTTP."""

    status: int
    headers: dict[str, str]
    """Headers by name in lower case."""
    body: list[Piece] = field(default_factory=list)
    """Pieces of the body; a chunk is stamped with the time at which it was complete."""
    complete: bool = False

    @property
    def content_type(self) -> str:
        """Content type without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def text(self) -> bytes:
        """Body as one string of bytes."""
        return b"".join(data for _, data in self.body)


def read_response(pieces: Sequence[Piece]) -> Response | None:
    """Return the response in the pieces of a connection that is closed; None if its head is not complete."""
    raw = bytearray()
    for i, (at_s, data) in enumerate(pieces):
        begin = max(0, len(raw) - len(_HEAD_END) + 1)
        raw += data
        if (end := raw.find(_HEAD_END, begin)) >= 0:
            response = _head(bytes(raw[:end]))
            if response is not None:
                _read_body(response, [(at_s, bytes(raw[end + len(_HEAD_END) :])), *pieces[i + 1 :]])
            return response
    return None


def _head(text: bytes) -> Response | None:
    first, *lines = text.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    code = status[:3]
    if not version.startswith("HTTP/1.") or not _is_number(code):
        return None
    pairs = (line.partition(":") for line in lines)
    return Response(int(code), {name.strip().lower(): value.strip() for name, _, value in pairs})


def _read_body(response: Response, pieces: Sequence[Piece]) -> None:
    if response.headers.get("transfer-encoding", "").lower() == "chunked":
        for at_s, chunk in _chunks(pieces):
            if chunk:
                response.body.append((at_s, chunk))
            else:
                response.complete = True
        return
    response.body = [piece for piece in pieces if piece[1]]
    length = response.headers.get("content-length", "")
    response.complete = not _is_number(length) or len(response.text) >= int(length)


def _is_number(text: str) -> bool:
    """True for ASCII digits, at most 18 of them: what `int` reads as one machine number."""
    return text.isascii() and text.isdigit() and len(text) <= 18


class _CutOff(NamedTuple):
    """First chunk of some data, and the place at which the next begins."""

    chunk: bytes
    end: int


def _chunks(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield whole chunks with their times, including the last, empty one if it arrived. Invalid data ends them."""
    buffer = bytearray()
    for at_s, data in pieces:
        buffer += data
        begin = 0
        while (cut := _first_chunk(buffer, begin)) is not None:
            yield at_s, cut.chunk
            if not cut.chunk:
                return
            begin = cut.end
        del buffer[:begin]


def _first_chunk(data: bytearray, begin: int) -> _CutOff | None:
    line_end = data.find(b"\r\n", begin, begin + _SIZE_LINE)
    if line_end < 0:
        return None
    try:
        size = int(bytes(data[begin:line_end]).partition(b";")[0], 16)
    except ValueError:
        return None
    end = line_end + 2 + size
    if size < 0 or (size and len(data) < end + 2):
        return None
    return _CutOff(bytes(data[line_end + 2 : end]), end + 2)


async def fetch(address: Address, path: str, silence_s: float, caps: ResponseCaps) -> list[Piece]:
    """Return the pieces of a response to GET within `silence_s` seconds; empty if the server cannot be reached, or the
    response is longer than its caps."""
    exchange: Exchange | None = None
    try:
        async with asyncio.timeout(silence_s):
            exchange = await address.open(address.server.request("GET", path), caps)
            await exchange.closed
    except (OSError, TimeoutError):
        pass
    finally:
        if exchange is not None:
            exchange.abort()
    return exchange.pieces if exchange is not None else []


def ask(server: ServerAddress, path: str, silence_s: float = 10.0) -> bytes:
    """Return the body of a response to GET. Raise EngineError if the status is not 200."""

    async def one() -> list[Piece]:
        return await fetch(await look_up(server), path, silence_s, ResponseCaps())

    response = read_response(asyncio.run(one()))
    if response is None:
        raise EngineError(f"{server.url}: cannot be reached, or does not answer {path}")
    if response.status != 200 or not response.complete:
        raise EngineError(f"{server.url}: answered {path} with {response.status}")
    return response.text
