"""Path of a request: to one server, or to a prefill server and then to a decode server.

If prefill and decode are separate, a router usually connects the engines; here the client does its work. The prefill
server gets a request for one token with `kv_transfer_params` that make it keep the KV cache, and its response contains
the place of the cache; the decode server gets the same request with these parameters, and fetches the cache itself, as
with vLLM's NixlConnector. The first token has arrived when the prefill server has answered. The decode server samples
it once more, from the transferred cache, before it continues; that token is not counted again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from simtune.validation.client.http_exchange import Exchange, Response, ServerAddress, read_response
from simtune.validation.client.streaming import Answer, quoted

PATH = "/v1/completions"
KEEP: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
"""Parameters that make a prefill server keep the KV cache for another server."""
CLOSED = "the connection was closed"


class ServerPath(Protocol):
    """Servers that a request is sent to, one after the other, and the combination of their responses."""

    @property
    def servers(self) -> Sequence[ServerAddress]:
        """Servers in the order in which they are used."""
        ...

    def message(self, request: int, earlier: Sequence[Exchange]) -> bytes | None:
        """Return the message to the next server, after the exchanges with earlier ones; None if no server is left to
        ask."""
        ...

    def read(self, answer: Answer, exchanges: Sequence[Exchange]) -> str | None:
        """Fill `answer` from the exchanges, of which there is at least one. Return why it is incomplete, or None."""
        ...


class Direct:
    """Path to one server, which streams its output."""

    def __init__(self, server: ServerAddress, bodies: Sequence[Mapping[str, Any]]) -> None:
        """`bodies` are those of all requests."""
        self.servers = (server,)
        self._messages = [server.request("POST", PATH, _text(body)) for body in bodies]

    def message(self, request: int, earlier: Sequence[Exchange]) -> bytes | None:
        """See `ServerPath`."""
        return self._messages[request]

    def read(self, answer: Answer, exchanges: Sequence[Exchange]) -> str | None:
        """See `ServerPath`."""
        (exchange,) = exchanges
        return _read_stream(answer, read_response(exchange.pieces))


class Relay:
    """Path to a prefill server, and then to a decode server."""

    def __init__(self, prefill: ServerAddress, decode: ServerAddress, bodies: Sequence[Mapping[str, Any]]) -> None:
        """`bodies` are those of all requests, as a single server would get them."""
        self.servers = (prefill, decode)
        self._bodies = bodies
        self._messages = [prefill.request("POST", PATH, _text(_prefill_body(body))) for body in bodies]

    def message(self, request: int, earlier: Sequence[Exchange]) -> bytes | None:
        """See `ServerPath`."""
        if not earlier:
            return self._messages[request]
        if self._bodies[request]["max_tokens"] == 1:
            return None
        kv_params = _kept(read_response(earlier[0].pieces))
        if isinstance(kv_params, str):
            # `read` reports the reason.
            return None
        return self.servers[1].request("POST", PATH, _text({**self._bodies[request], "kv_transfer_params": kv_params}))

    def read(self, answer: Answer, exchanges: Sequence[Exchange]) -> str | None:
        """See `ServerPath`."""
        first, *later = exchanges
        response = read_response(first.pieces)
        if answer.wanted == 1:
            why = _why_unread(response)
        else:
            kv_params = _kept(response)
            why = kv_params if isinstance(kv_params, str) else None
        if why is not None:
            return f"prefill: {why}"
        came_s = first.pieces[-1][0]
        if not later:
            answer.tokens, answer.times_s = 1, [came_s]
            return answer.end()
        why = _read_stream(answer, read_response(later[0].pieces))
        answer.tokens, answer.times_s[:1] = max(1, answer.tokens), [came_s]
        return None if why is None else f"decode: {why}"


def _prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request for one token, not streamed; the KV cache is kept if a decode server follows."""
    left_out = ("stream", "stream_options")
    prefill = {name: value for name, value in body.items() if name not in left_out} | {"max_tokens": 1}
    return prefill if body["max_tokens"] == 1 else prefill | {"kv_transfer_params": KEEP}


def _kept(response: Response | None) -> dict[str, Any] | str:
    """Return the parameters of the KV cache that a prefill server keeps, or why they are not known."""
    why = _why_unread(response)
    if response is None or why is not None:
        return why or ""
    try:
        kv_params = json.loads(response.text)["kv_transfer_params"]
    except (ValueError, LookupError, TypeError, RecursionError):
        kv_params = None
    if not isinstance(kv_params, dict):
        return "its answer does not say where the KV cache is (kv_transfer_params): it has no KV connector"
    return kv_params


def _why_unread(response: Response | None) -> str | None:
    """Return why a response is not read as a complete answer, or None."""
    if response is None:
        return CLOSED
    return _refusal(response) or (None if response.complete else CLOSED)


def _refusal(response: Response) -> str | None:
    """Return why a response is no answer, or None."""
    if 300 <= response.status < 400:
        where = quoted(response.headers.get("location", "no address").encode())
        return f"answered {response.status}, a redirect to {where}, which is not followed"
    if response.status != 200:
        return f"answered {response.status}: {quoted(response.text)}"
    return None


def _read_stream(answer: Answer, response: Response | None) -> str | None:
    """Fill `answer` from a stream. Return why it is incomplete, or None."""
    if response is None:
        return f"{CLOSED}, {answer.so_far}"
    why = _refusal(response)
    if why is not None:
        return why
    if response.content_type != "text/event-stream":
        return f"does not stream: its answer is {quoted(response.content_type.encode()) or 'of no type'}"
    for at_s, data in response.body:
        answer.feed(data, at_s)
    if answer.problem is None and not response.complete:
        return f"{CLOSED}, {answer.so_far}"
    return answer.end()


def _text(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
