"""The path of a request: to one server, or to one that computes the prompt and then to another that answers.

Where prefill and decode are apart, a router stands before the engines; here the client does what it would. The prefill
server is asked for one token and told (`kv_transfer_params`) to keep the KV cache, and says where it is; the decode
server is sent the same request with what the other said, and fetches the cache itself. So it is with vLLM's
NixlConnector. The first token has come when the prefill server has answered. The decode server samples it once more,
from the cache that it was sent, before it goes on; that one is not counted again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from simtune.validation.client.http_exchange import Exchange, Response, ServerAddress, read_response
from simtune.validation.client.streaming import Answer, quoted

PATH = "/v1/completions"
KEEP: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a prefill server is told: another one will fetch the KV cache."""
CLOSED = "the connection was closed"


class ServerPath(Protocol):
    """Which servers a request is sent to, one after the other, and how their answers become one."""

    @property
    def servers(self) -> Sequence[ServerAddress]:
        """In the order in which they are asked."""
        ...

    def message(self, request: int, earlier: Sequence[Exchange]) -> bytes | None:
        """What the next server is sent, after the exchanges with those before it; None where there is nothing more to
        ask."""
        ...

    def read(self, answer: Answer, exchanges: Sequence[Exchange]) -> str | None:
        """Feed an answer with what came; why it is no whole one, or None. There is one exchange or more."""
        ...


class Direct:
    """To one server, which streams its answer."""

    def __init__(self, server: ServerAddress, bodies: Sequence[Mapping[str, Any]]) -> None:
        """`bodies` of all requests."""
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
    """To a prefill server, and then to a decode server."""

    def __init__(self, prefill: ServerAddress, decode: ServerAddress, bodies: Sequence[Mapping[str, Any]]) -> None:
        """`bodies` of all requests, as one server alone would get them."""
        self.servers = (prefill, decode)
        self._bodies = bodies
        self._messages = [prefill.request("POST", PATH, _text(_prefill_body(body))) for body in bodies]

    def message(self, request: int, earlier: Sequence[Exchange]) -> bytes | None:
        """See `ServerPath`."""
        if not earlier:
            return self._messages[request]
        if self._bodies[request]["max_tokens"] == 1:
            return None
        kept = _kept(read_response(earlier[0].pieces))
        if isinstance(kept, str):
            return None  # `read` will say so
        return self.servers[1].request("POST", PATH, _text({**self._bodies[request], "kv_transfer_params": kept}))

    def read(self, answer: Answer, exchanges: Sequence[Exchange]) -> str | None:
        """See `ServerPath`."""
        first, *rest = exchanges
        response = read_response(first.pieces)
        if answer.wanted == 1:
            why = _why_unread(response)
        else:
            kept = _kept(response)
            why = kept if isinstance(kept, str) else None
        if why is not None:
            return f"prefill: {why}"
        came_s = first.pieces[-1][0]
        if not rest:
            answer.tokens, answer.times_s = 1, [came_s]
            return answer.end()
        why = _read_stream(answer, read_response(rest[0].pieces))
        answer.tokens, answer.times_s[:1] = max(1, answer.tokens), [came_s]
        return None if why is None else f"decode: {why}"


def _prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """One token, not streamed; the KV cache is kept for another server where there is more to come."""
    left_out = ("stream", "stream_options")
    asked = {name: value for name, value in body.items() if name not in left_out} | {"max_tokens": 1}
    return asked if body["max_tokens"] == 1 else asked | {"kv_transfer_params": KEEP}


def _kept(response: Response | None) -> dict[str, Any] | str:
    """Where a prefill server keeps the KV cache, or why that is not known."""
    why = _why_unread(response)
    if response is None or why is not None:
        return why or ""
    try:
        kept = json.loads(response.text)["kv_transfer_params"]
    except (ValueError, LookupError, TypeError):
        kept = None
    if not isinstance(kept, dict):
        return "its answer does not say where the KV cache is (kv_transfer_params): it has no KV connector"
    return kept


def _why_unread(response: Response | None) -> str | None:
    """Why a response is not read as a whole answer, or None."""
    if response is None:
        return CLOSED
    return _refusal(response) or (None if response.complete else CLOSED)


def _refusal(response: Response) -> str | None:
    """Why a response is no answer, or None."""
    if 300 <= response.status < 400:
        return f"answered {response.status}, a redirect to {response.headers.get('location')}, which is not followed"
    if response.status != 200:
        return f"answered {response.status}: {quoted(response.text)}"
    return None


def _read_stream(answer: Answer, response: Response | None) -> str | None:
    """Feed an answer with a stream; why it is no whole one, or None."""
    if response is None:
        return f"{CLOSED}, {answer.so_far}"
    why = _refusal(response)
    if why is not None:
        return why
    if response.content_type != "text/event-stream":
        return f"does not stream: its answer is {response.content_type or 'of no type'}"
    for at_s, data in response.body:
        answer.feed(data, at_s)
    if answer.problem is None and not response.complete:
        return f"{CLOSED}, {answer.so_far}"
    return answer.end()


def _text(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
