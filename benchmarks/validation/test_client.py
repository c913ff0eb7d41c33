"""How late the load client is with 200 streams at once, and whether it loses any.

    python -m pytest benchmarks/validation -m benchmark_only -s

A server on the loopback, in a process of its own on another core, answers 200 requests at once with 100 tokens each, 40
ms apart: 5,000 messages a second. Printed: how late stamps are, by the echo that the client sends itself, and how late
requests are sent that come one after the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.specs.workload import Arrivals, ClosedLoop, FixedInterval, FixedLength, Workload
from simtune.validation.client.http_exchange import ServerAddress
from simtune.validation.client.load_client import send
from simtune.validation.client.prompts import Prompts
from simtune.workload.requests import build_stream

pytestmark = pytest.mark.benchmark_only

STREAMS, TOKENS, TOKEN_S = 200, 100, 0.04
RATE_RPS = 150.0
SERVE = """
import os, sys
if os.cpu_count() > 1 and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {1})
from tests.fake_server import FakeServer
with FakeServer(first_token_s=0.5, token_s=float(sys.argv[1])) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def on_a_core() -> Iterator[None]:
    """The client on the first core, where there are two."""
    if not hasattr(os, "sched_setaffinity") or (os.cpu_count() or 1) < 2:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {0})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("on_a_core")
@pytest.mark.parametrize("arrivals", [ClosedLoop(users=STREAMS), FixedInterval(rate_rps=RATE_RPS)])
def test_two_hundred_streams_at_once(arrivals: Arrivals, record: Recorder) -> None:
    workload = Workload(
        name="streams", arrivals=arrivals, prompt=FixedLength(tokens=200), output=FixedLength(tokens=TOKENS)
    )
    stream = build_stream(workload, None, requests=STREAMS, seed=0)
    command = [sys.executable, "-c", SERVE, str(TOKEN_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = process.stdout.readline().strip()
        runs = [send(ServerAddress(url), "fake", stream, Prompts(stream, 32000)) for _ in range(3)]
        process.stdin.close()
    lost = sum(r.error is not None for traffic in runs for r in traffic.requests)
    p99 = [1e3 * traffic.lateness.loop_p99_s for traffic in runs]
    sends = [1e3 * traffic.lateness.send_p99_s for traffic in runs]
    tpot = [np.diff(r.times_s)[1:].mean() for traffic in runs for r in traffic.requests if r.times_s]
    how = "at once" if isinstance(arrivals, ClosedLoop) else f"{RATE_RPS:g} a second"
    print(f"\n{STREAMS} streams, {how}: lost {lost}, stamps late p99 {', '.join(f'{x:.2f}' for x in p99)} ms,", end=" ")
    print(f"sends {', '.join(f'{x:.2f}' for x in sends)} ms,", end=" ")
    print(f"TPOT seen {1e3 * np.mean(tpot):.2f} ms, served every {1e3 * TOKEN_S:g} ms")
    record(f"client, 200 streams {how}: lost", lost, "requests", "same")
    record.samples(f"client, 200 streams {how}: lateness p99", p99, "ms", "lower")
    assert lost == 0
