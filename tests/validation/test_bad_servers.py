"""The load client against servers that misbehave: each bad answer fails one request, by name, within its limits."""

from __future__ import annotations

import gc
import re
import socket
import sys

import pytest

from simtune.errors import EngineError
from simtune.specs.workload import ClosedLoop, FixedInterval, FixedLength, Workload
from simtune.validation.client.http_exchange import ResponseCaps, ServerAddress
from simtune.validation.client.load_client import Patience, Traffic, send, served_model
from simtune.validation.client.prometheus import MetricsReading, engine_facts
from simtune.validation.client.prompts import Prompts
from simtune.workload.requests import RequestStream, build_stream
from tests.validation.bad_server import CHUNKED, DONE, HEAD, Script, event, repeats, says, serving

MIB = 1024**2
PATIENCE = Patience(silence_s=0.4, request_s=1.0, metrics_every_s=0.1)
OK = b"HTTP/1.1 200 OK\r\n"
DEEP = b"[" * 100_000
LONG = b"x" * 65536


def one_by_one(requests: int) -> RequestStream:
    load = Workload(
        name="w",
        arrivals=ClosedLoop(users=1),
        prompt=FixedLength(tokens=20),
        output=FixedLength(tokens=4),
    )
    return build_stream(load, None, requests=requests, seed=0)


def sent(url: str, load: RequestStream, patience: Patience = PATIENCE) -> Traffic:
    return send(ServerAddress(url), "bad", load, Prompts(load, 1000), patience)


def peak_mib() -> float:
    """Return the most memory that this process has had; 0 where that cannot be asked."""
    try:
        import resource  # not on Windows
    except ImportError:
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else MIB)


BAD: dict[str, tuple[Script, str]] = {
    "slow headers": (repeats(OK, b"X", 0.05), "not complete within 1 s, after 0 of 4 tokens"),
    "no answer": (repeats(b"", b"", 0.05), "silent for 0.4 s, after 0 of 4 tokens"),
    "endless headers": (repeats(OK, b"X-Y: " + LONG + b"\r\n"), "sent HTTP headers of more than 65,536 bytes"),
    "endless header line": (repeats(OK + b"X: ", LONG), "sent HTTP headers of more than 65,536 bytes"),
    "endless body": (repeats(HEAD, event(1)), r"sent more than 1,064,960 bytes|counts .*"),
    "endless line": (repeats(HEAD + b"data: ", LONG), "sent more than 1,064,960 bytes"),
    "endless chunk": (repeats(CHUNKED + b"ffffffffff\r\n", LONG), "sent more than 1,064,960 bytes"),
    "endless chunk size": (repeats(CHUNKED, b"f" * 65536), "sent more than 1,064,960 bytes"),
    "one byte at a time": (repeats(HEAD, b":"), "sent more than 1,064,960 bytes|not complete within 1 s.*"),
    "comments for ever": (repeats(HEAD, b": ping\n\n", 0.05), "not complete within 1 s, after 0 of 4 tokens"),
    "blank lines for ever": (repeats(CHUNKED, b"1\r\n\n\r\n", 0.05), "not complete within 1 s, after 0 of 4 tokens"),
    "longer than it says": (says(OK + b"Content-Type: text/event-stream\r\nContent-Length: 3\r\n\r\n" + event(1)),
        "1 tokens came, not 4"),
    "shorter than it says": (says(OK + b"Content-Type: text/event-stream\r\nContent-Length: 999999\r\n\r\n" + event(1)),
        "the connection was closed, after 1 of 4 tokens"),
    "length of many digits": (says(HEAD[:-2] + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n" + event(1)),
        "1 tokens came, not 4"),
    "length in other digits": (says(HEAD[:-2] + b"Content-Length: \xb2\xb3\r\n\r\n" + event(1)),
        "1 tokens came, not 4"),
    "status in other digits": (says(b"HTTP/1.1 \xb2\xb3\xb9 OK\r\n\r\n"),
        "the connection was closed, after 0 of 4 tokens"),
    "no HTTP": (says(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "the connection was closed, after 0 of 4 tokens"),
    "redirect": (says(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://elsewhere/" + b"a" * 9000 + b"\r\n\r\n"),
        r"answered 307, a redirect to http://elsewhere/a+ \.\.\., which is not followed"),
    "early close": (says(HEAD), "0 tokens came, not 4"),
    "closed within a chunk": (says(CHUNKED + b"ff\r\ndata: {"), "the connection was closed, after 0 of 4 tokens"),
    "deep JSON": (says(HEAD + b"data: " + DEEP + b"\n\n"),
        r"sent what is no completion, after 0 of 4 tokens: \[+ \.\.\."),
    "deep usage": (says(HEAD + event(b'{"a":' * 100_000)), "sent what is no completion, after 0 of 4 tokens: .*"),
    "NaN": (says(HEAD + event(1) + event(b"NaN")), "counts nan tokens, after 1 of 4 tokens"),
    "Infinity": (says(HEAD + event(b"Infinity")), "counts inf tokens, after 0 of 4 tokens"),
    "a negative count": (says(HEAD + event(-1) + DONE), "counts -1 tokens, after 0 of 4 tokens"),
    "too many tokens": (says(HEAD + event(10**30) + DONE), "counts 10{30} tokens, after 0 of 4 tokens"),
    "a number of 9,000 digits": (says(HEAD + event(b"9" * 9000)),
        "sent what is no completion, after 0 of 4 tokens: .*"),
    "half a surrogate": (says(HEAD + b'data: {"error": "\\ud800"}\n\n'), "sent what is no completion, .*"),
    "bytes that are no text": (says(HEAD + b"data: \xff\xfe\xfd\n\n"), "sent what is no completion, .*"),
    "a huge line": (says(CHUNKED + b"200000\r\n" + b"data: " + b"a" * 0x1FFFFA + b"\r\n0\r\n\r\n"),
        "sent more than 1,064,960 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_answer_fails_one_request(name: str) -> None:
    script, error = BAD[name]
    gc.collect()
    before = peak_mib()
    with serving(script) as bad:
        requests = sent(bad.url, one_by_one(4)).requests
    assert [r.error is None for r in requests] == [False, True, False, True]
    for r in (requests[0], requests[2]):
        assert re.fullmatch(error, r.error or "", re.DOTALL), r.error
    assert peak_mib() - before < 256


def test_caps_can_be_raised() -> None:
    """A stream of 3 MiB of comments before its tokens."""
    script = says(HEAD + b": " + b"a" * (3 * MIB) + b"\n" + b"".join(event(n + 1) for n in range(4)) + DONE)
    with serving(script) as bad:
        assert sent(bad.url, one_by_one(1)).requests[0].error == "sent more than 1,064,960 bytes"
    patient = Patience(silence_s=2.0, caps=ResponseCaps(stream=8 * MIB))
    with serving(script) as bad:
        # The line itself is still too long.
        assert sent(bad.url, one_by_one(1), patient).requests[0].error == (
            "sent a line of more than 1,048,576 bytes, after 0 of 4 tokens"
        )
    pieces = (b": " + b"a" * 1000 + b"\n") * 3000
    with serving(says(HEAD + pieces + b"".join(event(n + 1) for n in range(4)) + DONE)) as bad:
        assert sent(bad.url, one_by_one(1), patient).requests[0].error is None


@pytest.mark.parametrize("metrics", [b"", DEEP, b"a" * (20 * MIB), b"vllm:num_requests_running NaN\n" * 1000])
def test_bad_metrics_fail_no_request(metrics: bytes) -> None:
    with serving(says(HEAD + b"".join(event(n + 1) for n in range(4)) + DONE), metrics) as bad:
        traffic = sent(bad.url, one_by_one(4))
    assert [r.error for r in traffic.requests] == [None] * 4
    assert engine_facts(traffic.readings) == {}


def test_not_a_number_and_infinity_are_absent_metrics() -> None:
    text = (
        "vllm:num_requests_running{{}} {running}\n"
        "vllm:num_requests_waiting{{}} 0\n"
        "vllm:num_preemptions_total {preempted}\n"
    )
    values = [("1", "3"), ("NaN", "+Inf"), ("2", "1e400"), ("-1", "5"), ("2", "4")]
    readings = [
        MetricsReading(float(at), text.format(running=running, preempted=preempted))
        for at, (running, preempted) in enumerate(values)
    ]
    facts = engine_facts(readings)
    assert facts["queues"].running == (1.0, 2.0, 2.0)
    assert facts["preemptions"] == 1
    # An engine that started anew counts from zero: the rise is not known.
    assert "preemptions" not in engine_facts(
        [readings[0], MetricsReading(9.0, text.format(running="0", preempted="1"))]
    )


def test_ten_thousand_refused_connections_are_ten_thousand_errors() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    load = Workload(
        name="w", arrivals=FixedInterval(rate_rps=20_000.0), prompt=FixedLength(tokens=1), output=FixedLength(tokens=4)
    )
    traffic = sent(f"http://127.0.0.1:{port}", build_stream(load, None, requests=10_000, seed=0), Patience())
    assert {r.error for r in traffic.requests} == {"cannot be reached: Connection refused"}


def test_a_server_that_accepts_and_never_reads_is_silent() -> None:
    """Connections in the backlog of a process that does not accept them."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        traffic = sent(f"http://127.0.0.1:{listener.getsockname()[1]}", one_by_one(2))
    assert [r.error for r in traffic.requests] == ["silent for 0.4 s, after 0 of 4 tokens"] * 2


@pytest.mark.parametrize("models", [DEEP, b"{}", b"NaN", b'{"data": []}', b"a" * (17 * MIB)])
def test_a_list_of_models_that_cannot_be_read_is_one_message(models: bytes) -> None:
    with serving(says(b""), models) as bad, pytest.raises(EngineError, match=re.escape(bad.url)):
        served_model(ServerAddress(bad.url))


def test_a_host_name_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(EngineError, match="http://a"):
        served_model(ServerAddress("http://" + "a" * 70 + ".example"))
