"""Prefill and decode on two servers: what each is asked, and how their answers become one."""

import json
import re
from collections.abc import Sequence

import numpy as np
import pytest

from simtune.validation.client import relay
from simtune.validation.client.http_exchange import Exchange, ResponseCaps, ServerAddress
from simtune.validation.client.load_client import Patience, Traffic, send
from simtune.validation.client.prompts import Prompts
from simtune.validation.client.relay import Relay
from simtune.validation.client.streaming import Answer
from simtune.workload.requests import RequestStream
from tests.fake_server import FakeServer
from tests.validation.test_client import stream

PATIENCE = Patience(silence_s=30.0, metrics_every_s=0.02)


def relayed(prefill: FakeServer, decode: FakeServer, load: RequestStream) -> Traffic:
    first, second = (ServerAddress(server.url, server.api_key) for server in (prefill, decode))
    return send(first, "fake", load, Prompts(load, 1000), PATIENCE, second)


def test_the_prompt_goes_to_one_server_and_then_to_the_other_with_what_the_first_said() -> None:
    load = stream(6)
    with FakeServer(api_key="one", first_token_s=0.03) as prefill, FakeServer(api_key="two", token_s=0.02) as decode:
        traffic = relayed(prefill, decode, load)
    assert [r.error for r in traffic.requests] == [None] * 6
    assert [r.output_tokens for r in traffic.requests] == [8] * 6
    for asked in prefill.requests:
        assert asked["max_tokens"] == 1
        assert asked["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    said = {f"{i + 1}" for i in range(6)}
    assert {asked["kv_transfer_params"]["remote_request_id"] for asked in decode.requests} == said
    assert all(asked["max_tokens"] == 8 and asked["stream"] for asked in decode.requests)
    assert sorted(map(json.dumps, (r["prompt"] for r in decode.requests))) == sorted(
        map(json.dumps, (r["prompt"] for r in prefill.requests))
    )
    assert any("vllm:num_requests_running" in r.text for r in traffic.readings)


def test_the_first_token_is_that_of_the_prefill_server() -> None:
    with FakeServer() as prefill, FakeServer(first_token_s=0.2, token_s=0.05) as decode:
        (request,) = relayed(prefill, decode, stream(1)).requests
    assert request.times_s is not None
    assert request.first_token_s == request.times_s[0]
    assert len(request.times_s) == 8
    assert request.times_s[1] - request.times_s[0] > 0.2, "the other server's first token is not counted again"


def test_answers_of_one_token_stay_with_the_prefill_server() -> None:
    with FakeServer() as prefill, FakeServer() as decode:
        traffic = relayed(prefill, decode, stream(3, tokens=1))
    assert [(r.error, r.output_tokens) for r in traffic.requests] == [(None, 1)] * 3
    assert decode.requests == []
    assert all("kv_transfer_params" not in asked for asked in prefill.requests)
    assert np.isfinite(np.array([r.finish_s for r in traffic.requests], dtype=np.float64)).all()


def test_a_server_that_says_nothing_has_closed() -> None:
    assert relay._why_unread(None) == relay.CLOSED
    answer = Answer(8)
    assert relay._read_stream(answer, None) == f"{relay.CLOSED}, {answer.so_far}"


@pytest.mark.parametrize(
    ("servers", "said"),
    [
        (("500", None), r"prefill: answered 500: .*out of memory"),
        (("whole", None), r"prefill: its answer does not say where the KV cache is"),
        ((None, "500"), r"decode: answered 500"),
        ((None, "whole"), r"decode: does not stream"),
        ((None, "close"), r"decode: the connection was closed, after 4 of 8 tokens"),
    ],
)
def test_which_of_them_failed_is_said(servers: Sequence[str | None], said: str) -> None:
    first, second = (FakeServer(misbehaves={} if wrong is None else {0: wrong}) for wrong in servers)  # type: ignore[dict-item]
    with first as prefill, second as decode:
        traffic = relayed(prefill, decode, stream(2))
    errors = [r.error for r in traffic.requests]
    assert sum(error is not None for error in errors) == 1
    (error,) = filter(None, errors)
    assert re.match(said, error)


@pytest.mark.parametrize("tokens", [1, 8])
def test_half_an_answer_of_the_prefill_server_is_none(tokens: int) -> None:
    servers = [ServerAddress(f"http://127.0.0.1:{port}") for port in (1, 2)]
    relay, cut = Relay(servers[0], servers[1], [{"max_tokens": tokens}]), Exchange(None, ResponseCaps())  # type: ignore[arg-type]
    cut.pieces = [(1.0, b'HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"choices": [')]
    answer = Answer(tokens)
    assert relay.message(0, [cut]) is None
    assert relay.read(answer, [cut]) == "prefill: the connection was closed"
    assert (answer.tokens, answer.times_s) == (0, [])


def test_the_first_token_counts_where_the_decode_server_fails() -> None:
    with FakeServer() as prefill, FakeServer(misbehaves={0: "500"}) as decode:
        (request,) = relayed(prefill, decode, stream(1)).requests
    assert request.error is not None
    assert request.finish_s is None
    assert request.output_tokens == len(request.times_s or ()) == 1
