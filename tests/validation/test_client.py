"""The load client against a server that misbehaves on purpose: every failure has its name, the rest is kept."""

import contextlib
import re
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from simtune.errors import EngineError, UsageError
from simtune.specs.workload import Arrivals, ClosedLoop, FixedInterval, FixedLength, SharedPrefix, Workload
from simtune.validation.client import real_clock
from simtune.validation.client.http_exchange import Piece, ServerAddress, ask, read_response
from simtune.validation.client.load_client import Patience, Traffic, send, served_model
from simtune.validation.client.prometheus import MetricsReading, engine_facts
from simtune.validation.client.prompts import Prompts
from simtune.validation.client.real_clock import StampedSocket, now, pause
from simtune.validation.client.streaming import Answer
from simtune.workload.requests import RequestStream, build_stream
from tests.fake_server import FakeServer

FAST = FixedInterval(rate_rps=200.0)


def stream(requests: int, arrivals: Arrivals = FAST, tokens: int = 8) -> RequestStream:
    workload = Workload(
        name="w",
        arrivals=arrivals,
        prompt=FixedLength(tokens=20),
        output=FixedLength(tokens=tokens),
        shared_prefix=SharedPrefix(groups=1, tokens=16),
    )
    return build_stream(workload, None, requests=requests, seed=0)


def sent(server: FakeServer, load: RequestStream, silence_s: float = 30.0) -> Traffic:
    patience = Patience(silence_s=silence_s, metrics_every_s=0.02)
    return send(ServerAddress(server.url, server.api_key), "fake", load, Prompts(load, 1000), patience)


def test_every_request_is_sent_as_drawn_and_every_token_stamped() -> None:
    load = stream(10)
    with FakeServer(api_key="secret") as server:
        traffic = sent(server, load)
    assert [r.error for r in traffic.requests] == [None] * 10
    assert [r.request for r in traffic.requests] == list(range(10))
    prompts = Prompts(load, 1000)
    by_prompt = sorted(tuple(r["prompt"]) for r in server.requests)
    assert by_prompt == sorted(tuple(prompts[i]) for i in range(10))
    assert all(r["max_tokens"] == 8 and r["ignore_eos"] and r["temperature"] == 0 for r in server.requests)
    for i, r in enumerate(traffic.requests):
        assert r.due_s == pytest.approx(i / 200)
        assert r.due_s is not None
        assert r.sent_s is not None
        assert r.sent_s >= r.due_s - 1e-4
        assert r.times_s is not None
        assert len(r.times_s) <= 8, "what came together counts as one"
        assert list(r.times_s) == sorted(r.times_s)
        assert r.first_token_s == r.times_s[0] > r.sent_s
        assert r.finish_s == r.times_s[-1]
        assert r.output_tokens == 8
    assert traffic.lateness.send_max_s >= traffic.lateness.send_p99_s >= traffic.lateness.send_p50_s >= 0
    queues = engine_facts(traffic.readings)["queues"]
    assert max(queues.running) >= 1
    assert set(server.addresses) == {"/v1/completions", "/metrics"}


def test_a_client_that_holds_requests_back_has_no_more_under_way() -> None:
    load = stream(8, FixedInterval(rate_rps=1000.0, max_in_flight=2))
    with FakeServer() as server:
        traffic = sent(server, load)
    rows = traffic.requests
    assert [r.error for r in rows] == [None] * 8
    for row in rows:
        assert sum(1 for r in rows if r.sent_s <= row.sent_s < (r.finish_s or 0.0)) <= 2
        assert row.sent_s >= row.request / 1000.0


def test_tokens_are_counted_where_the_server_counts_only_in_the_end() -> None:
    with FakeServer(counts=False) as server:
        traffic = sent(server, stream(2))
    assert [(r.error, r.output_tokens) for r in traffic.requests] == [(None, 8)] * 2


def test_in_a_closed_loop_so_many_are_under_way_and_no_more() -> None:
    load = stream(9, ClosedLoop(users=3), tokens=4)
    with FakeServer() as server:
        traffic = sent(server, load)
    assert [r.error for r in traffic.requests] == [None] * 9
    assert all(r.due_s is None for r in traffic.requests)
    began = np.array([r.sent_s for r in traffic.requests])
    ended = np.array([r.finish_s for r in traffic.requests], dtype=float)
    under_way = [(np.logical_and(began <= t, ended > t)).sum() for t in began]
    assert max(under_way) == 3


WRONG = {
    "500": r"answered 500: .*out of memory.*",
    "redirect": r"answered 307, a redirect to .*/elsewhere, which is not followed",
    "stall": r"silent for 0\.5 s, after 4 of 8 tokens",
    "close": r"the connection was closed, after 4 of 8 tokens",
    "half_line": r"the stream ended within a line, after 4 of 8 tokens",
    "short": r"4 tokens came, not 8",
    "not_json": r"sent what is no completion, after 4 of 8 tokens: tokens, honestly",
    "error": r"reported after 4 of 8 tokens: the engine core died",
    "whole": r"does not stream: its answer is application/json",
}


def test_priorities_are_said_where_there_are_any_and_users_think_between_their_requests() -> None:
    load = stream(4)
    with FakeServer() as server:
        sent(server, replace(load, priority=np.array([0, 2, 1, 0])))
        sent(server, load)
    assert sorted(asked.get("priority", -1) for asked in server.requests) == [-1] * 4 + [0, 0, 1, 2]
    thinking = stream(4, ClosedLoop(users=2, think_s=0.05))
    with FakeServer() as server:
        requests = sent(server, thinking).requests
    for first, second in ((0, 2), (1, 3)):
        begun = sorted(r.sent_s for r in requests)
        ended = sorted(r.finish_s or 0.0 for r in requests)
        assert begun[second] - ended[first] > 0.04


def test_every_failure_is_named_and_the_others_are_kept() -> None:
    threads = threading.active_count()
    with FakeServer(misbehaves={2 * i: kind for i, kind in enumerate(WRONG)}) as server:  # type: ignore[misc]
        traffic = sent(server, stream(2 * len(WRONG), ClosedLoop(users=1)), silence_s=0.5)
    for i, said in enumerate(WRONG.values()):
        error = traffic.requests[2 * i].error
        assert error is not None
        assert re.fullmatch(said, error), error
        assert traffic.requests[2 * i + 1].error is None
    assert "/elsewhere" not in server.addresses
    assert threading.active_count() == threads, "nothing is left running"


def test_a_server_that_dies_leaves_what_it_had_answered() -> None:
    with FakeServer(misbehaves={5: "die"}) as server:
        traffic = sent(server, stream(8, ClosedLoop(users=1)))
    assert [r.error is None for r in traffic.requests] == [True] * 5 + [False] * 3
    assert traffic.requests[5].error == "the connection was closed, after 4 of 8 tokens"
    assert re.match(r"cannot be reached: |the connection was closed", traffic.requests[7].error or "")


def test_two_hundred_streams_at_once_lose_nothing() -> None:
    load = stream(200, ClosedLoop(users=200), tokens=20)
    with FakeServer(first_token_s=0.5, token_s=0.02) as server:
        traffic = sent(server, load)
    assert [r.error for r in traffic.requests] == [None] * 200
    assert max(len(r["prompt"]) for r in server.requests) == 20
    began, first = max(r.sent_s for r in traffic.requests), min(r.finish_s or 0.0 for r in traffic.requests)
    assert began < first, "all of them were under way together"


def test_a_wrong_key_and_a_wrong_address_are_said() -> None:
    with FakeServer(api_key="secret") as server:
        assert served_model(ServerAddress(server.url + "/v1/", "secret")) == "fake"
        assert ask(ServerAddress(server.url, "secret"), "/health") == b""
        with pytest.raises(EngineError, match=r"answered /v1/models with 401"):
            served_model(ServerAddress(server.url))
        url = server.url
    with pytest.raises(EngineError, match="cannot be reached"):
        served_model(ServerAddress(url))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://", "http://host:port", "http://h/?q=1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="invalid server address"):
        ServerAddress(url)


# --- what needs no server ---------------------------------------------------------------------------------


def test_messages_may_come_in_pieces_and_together() -> None:
    whole = b"".join(
        b'data: {"choices": [{"text": "x"}], "usage": {"completion_tokens": %d}}\n\n' % n for n in (1, 2, 4)
    )
    at_once, in_pieces = Answer(4), Answer(4)
    at_once.feed(whole, 1.0)
    for i in range(len(whole)):
        in_pieces.feed(whole[i : i + 1], float(i))
    assert at_once.times_s == [1.0, 1.0, 1.0]
    assert len(in_pieces.times_s) == 3
    assert in_pieces.tokens == at_once.tokens == 4
    assert at_once.end() is None


def test_metrics_are_sums_over_engines_and_differences_over_the_run() -> None:
    def text(running: int, preempted: int, drafts: int) -> str:
        return (
            f'# HELP vllm:num_requests_running\nvllm:num_requests_running{{engine="0"}} {running}\n'
            f'vllm:num_requests_running{{engine="1"}} 1.0\nvllm:num_requests_waiting{{engine="0"}} 2.0\n'
            f"vllm:num_preemptions_total {preempted}\nvllm:spec_decode_num_drafts_total {drafts}\n"
            f"vllm:spec_decode_num_draft_tokens_total {3 * drafts}\n"
            f"vllm:spec_decode_num_accepted_tokens_total {2 * drafts}\n"
        )

    facts = engine_facts(
        [MetricsReading(-1.0, text(0, 5, 10)), MetricsReading(1.0, text(3, 6, 15)), MetricsReading(2.0, text(4, 7, 20))]
    )
    assert (facts["queues"].t_s, facts["queues"].running, facts["queues"].waiting) == ((1.0, 2.0), (4.0, 5.0), (2, 2))
    assert facts["preemptions"] == 2
    drafts = facts["drafts"]
    assert (drafts.rounds, drafts.draft_tokens, drafts.accepted_tokens) == (10, 30, 20)
    assert engine_facts([MetricsReading(-1.0, "go_goroutines 7\n")]) == {}
    assert engine_facts([]) == {}


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_response_is_the_same_in_whatever_pieces_it_comes(size: int) -> None:
    raw = HEAD + b"3\r\nabc\r\n5;x=y\r\n12345\r\n0\r\n\r\n"
    pieces: list[Piece] = [(float(i), raw[i : i + size]) for i in range(0, len(raw), size)]
    response = read_response(pieces)
    assert response is not None
    assert (response.status, response.content_type, response.complete) == (200, "text/event-stream", True)
    assert [data for _, data in response.body] == [b"abc", b"12345"]
    times = [at for at, _ in response.body]
    assert times == sorted(times)
    ended = len(HEAD) + len(b"3\r\nabc\r\n") - 1  # the last byte of the first chunk
    assert times[0] == ended // size * size


@pytest.mark.parametrize(
    ("raw", "complete"),
    [
        (HEAD + b"3\r\nabc\r\n", False),
        (HEAD + b"zz\r\n", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabc", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", True),
        (b"HTTP/1.0 200 OK\r\n\r\nabc", True),
    ],
)
def test_a_response_says_whether_it_is_whole(raw: bytes, complete: bool) -> None:
    response = read_response([(0.0, raw)])
    assert response is not None
    assert response.complete == complete


@pytest.mark.parametrize(
    "raw", [b"", b"HTTP/1.1 200 OK\r\nContent-", b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 hm\r\n\r\n"]
)
def test_what_is_no_response_is_none(raw: bytes) -> None:
    assert read_response([(0.0, raw)]) is None


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection of the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as far:
        near, _ = server.accept()
        with near:
            yield near, far


def waited(receive: Callable[[], tuple[float, bytes]], near: socket.socket, far: socket.socket) -> tuple[float, float]:
    """A message's stamp, and when it was read: 50 ms after it had come."""
    far.sendall(b"token")
    assert select.select([near], [], [], 10)[0]
    pause(0.05)
    read_s = now()
    at_s, data = receive()
    assert data == b"token"
    return at_s, read_s


@pytest.fixture
def stamping() -> Iterator[None]:
    """A kernel that stamps messages as they come: it starts to a while after it is first asked, and some never do."""
    with connected() as (near, far):
        near.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_TIMESTAMPNS", 35), 1)

        def receive() -> tuple[float, bytes]:
            data, more, _, _ = near.recvmsg(64, 64)
            ages_s = [
                time.time() - struct.unpack("@qq", stamp)[0] - struct.unpack("@qq", stamp)[1] * 1e-9
                for _, _, stamp in more
            ]
            return now() - max(ages_s, default=0.0), data

        for _ in range(20):
            at_s, read_s = waited(receive, near, far)
            if at_s < read_s - 0.04:
                break
        else:
            pytest.skip("this kernel does not stamp messages as they come")
        yield


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels are not asked")
@pytest.mark.usefixtures("stamping")
def test_the_kernel_stamps_what_nobody_has_read() -> None:
    with connected() as (near, far):
        stamped = StampedSocket(near)
        with pytest.raises(BlockingIOError):
            stamped.receive()
        at_s, read_s = waited(stamped.receive, near, far)
        assert at_s < read_s - 0.04


class StampedAgo:
    """Stands for a socket whose messages have come so many seconds before they are read."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def setsockopt(self, *option: int) -> None:
        pass

    def recvmsg(self, *most: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        stamp = struct.pack("@qq", *divmod(time.time_ns() - round(self._seconds * 1e9), 10**9))
        assert real_clock._STAMPED is not None
        return b"x", [(socket.SOL_SOCKET, real_clock._STAMPED, stamp)], 0, None


@pytest.mark.skipif(sys.platform != "linux", reason="kernels elsewhere stamp otherwise")
@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 0.5])
def test_a_clock_that_is_set_moves_no_message(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    stamped = StampedSocket(StampedAgo(0.05))  # type: ignore[arg-type]
    wall, set_by = time.time_ns, [0.0]
    monkeypatch.setattr(time, "time_ns", lambda: wall() + round(set_by[0] * 1e9))
    assert stamped.receive()[0] < now() - 0.04, "as the kernel says"
    began = now()
    monkeypatch.setattr(stamped.socket, "_seconds", jump_s + 0.05)  # it came before the clock was set
    set_by[0] = jump_s
    assert began <= stamped.receive()[0] <= now(), "when it was read"
    monkeypatch.setattr(stamped.socket, "_seconds", 0.05)
    assert stamped.receive()[0] < now() - 0.04, "by the clock as it is now"


def test_where_no_kernel_stamps_reading_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_clock, "_STAMPED", None)
    with connected() as (near, far):
        at_s, read_s = waited(StampedSocket(near).receive, near, far)
        assert read_s <= at_s <= now()
