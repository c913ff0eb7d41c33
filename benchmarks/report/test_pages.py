"""How large pages are and how fast they answer, in Chromium, in processor time of all of it.

    python -m pytest benchmarks/report/test_pages.py -m benchmark_only -s

Ten runs in one page: its bytes, and the time until it is drawn. A search of 2,000 candidates: from moving a slider
until the ranking and the star stand anew. A timeline of 100,000 spans: until all of it is drawn again.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import random
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from benchmarks.picture import BROWSERS
from benchmarks.results import Recorder
from simtune.report import compare, page
from simtune.report.compare import Compared, NamedRun
from simtune.runs.run_reader import read_run
from simtune.runs.schema import Run
from simtune.runs.swimlanes import SWIMLANES_SCHEMA, CoreLane, RequestLife, Swimlanes
from tests.runs.made_up import make_run, optimized

__all__ = ["make_run", "optimized"]

pytestmark = pytest.mark.benchmark_only

MOST_BYTES, MOST_OPENING_MS, MOST_ANSWER_MS = 8_000_000, 2_000.0, 100.0
REPEATS = 15
HEAD = '<script>fetch("/head")</script><title>'
SAY = """<script>
const settled = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
addEventListener("load", async () => {{
  await settled();
  await fetch("/opened");
  await new Promise(done => setTimeout(done, 1500));
  await fetch("/begin");
  for (let i = 0; i < {repeats}; i++) {{
    {act}
    await settled();
  }}
  const own = ["/head", "/opened", "/begin", "/favicon.ico"].map(path => location.origin + path);
  const others = performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !own.includes(name));
  await fetch("/others/" + encodeURIComponent(others.join(" ")));
  await fetch("/end");
}});
</script></body>"""
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


def processor_ms(root: int) -> float:
    """Processor time of a process and all below it, from Linux's /proc: what a machine that does nothing else takes."""
    parents, spent = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            spent[int(folder.name)] = (int(fields[11]) + int(fields[12])) * TICK_MS
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below and pid not in below}:
        below |= more
    return sum(spent.get(pid, 0.0) for pid in below)


def said(html: str, act: str = "") -> tuple[float, float]:
    """(ms until a page is drawn, ms for `act` and what follows from it), of processor time of all of the browser.

    A page that asks any address for anything fails; an icon of its tab every browser asks its server for by itself.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    body = html.replace("<title>", HEAD, 1).replace("</body>", SAY.format(repeats=REPEATS, act=act)).encode()
    heard: dict[str, float] = {}
    others: list[str] = []
    done = threading.Event()

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path in ("/head", "/opened", "/begin", "/end"):
                heard[self.path] = processor_ms(started.pid)
            if self.path.startswith("/others/"):
                others.append(unquote(self.path.removeprefix("/others/")))
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            if self.path == "/page":
                self.wfile.write(body)
            if self.path == "/end":
                done.set()

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    with serving(Page) as port, tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"]
        command += [f"--user-data-dir={profile}", "--remote-debugging-port=0", f"http://127.0.0.1:{port}/page"]
        started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert done.wait(240), "the page said nothing"
        finally:
            started.terminate()
            started.wait(20)
    assert others == [""], f"the page asked for {others}"
    return heard["/opened"] - heard["/head"], (heard["/end"] - heard["/begin"]) / REPEATS


@contextlib.contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[int]:
    """A server of this machine alone; its port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def test_ten_runs_in_one_page(make_run: Any, record: Recorder) -> None:
    runs = tuple(NamedRun(f"run {i}", read_run(make_run())) for i in range(10))
    html = compare.render(Compared(runs))
    opened = said(html)[0]
    record("ten runs: size", len(html.encode()) / 1e6, "MB", "lower")
    record("ten runs: drawn after", opened, "ms", "lower", noise=0.3 * opened)
    assert len(html.encode()) <= MOST_BYTES
    assert opened <= MOST_OPENING_MS


def test_sliders_over_two_thousand_candidates(make_run: Any, record: Recorder) -> None:
    run = read_run(make_run())
    simulated = [c for c in run.candidates if c.ttft_p99_s is not None]
    chance = random.Random(0)
    many = []
    for i in range(2_000 - len(run.candidates)):
        one, off = simulated[i % len(simulated)], chance.uniform(0.5, 1.5)
        update = {"candidate": f"{one.candidate}-{i}", "status": "feasible", "rank": len(run.candidates) + i}
        for name in ("ttft_p99_s", "tpot_p99_s", "output_tokens_per_s_per_user", "output_tokens_per_s_per_gpu"):
            update[name] = getattr(one, name) * off
        many.append(one.model_copy(update=update))
    html = page.render(Run(run.summary, (*run.candidates, *many)))
    act = """const s = document.getElementById("tpot"); s.value = 300 + 40 * i; s.dispatchEvent(new Event("input"));"""
    answer = said(html, act)[1]
    record("a slider over 2,000 candidates", answer, "ms", "lower", noise=0.3 * answer)
    assert answer <= MOST_ANSWER_MS


def test_a_timeline_of_a_hundred_thousand_spans(make_run: Any, record: Recorder) -> None:
    run = read_run(make_run(searched=False))._replace(swimlanes=timeline(4, 25_000))
    act = 'document.querySelector("#swimlanes [data-do=" + (i % 2 ? "all" : "in") + "]").click();'
    answer = said(page.render(run), act)[1]
    record("a timeline of 100,000 spans drawn again", answer, "ms", "lower", noise=0.3 * answer)
    assert answer <= MOST_ANSWER_MS


def timeline(instances: int, spans: int) -> Swimlanes:
    """Swimlanes that are busy most of the time, and 2,000 lives."""
    chance = random.Random(1)
    step, busy = 10_000, [chance.randrange(4_000, 10_000) for _ in range(spans)]
    zeros, kinds = [0] * spans, [chance.randrange(3) for _ in range(spans)]
    of = [[b if kind == k else 0 for b, kind in zip(busy, kinds, strict=True)] for k in range(3)]
    running = [chance.randrange(256) for _ in range(spans)]
    swimlane = {
        "core": 0, "blocks": 1000, "start_us": (0, *[step] * (spans - 1)), "length_us": busy, "steps": [1] * spans,
        "prefill_us": of[0], "mixed_us": of[1], "draft_us": zeros, "decode_us": of[2], "running_low": running,
        "running_high": running, "waiting_low": zeros, "waiting_high": zeros, "free_blocks_low": running,
        "free_blocks_high": running, "transfer_us": (),
    }  # fmt: skip
    lives = [
        RequestLife(
            request=i, prompt_tokens=100, output_tokens=100, swimlane=0, arrival_us=i * 100_000,
            scheduled_us=i * 100_000,
            first_token_us=i * 100_000 + 50_000, transferred_us=None, finish_us=i * 100_000 + 4_000_000,
            preempted_us=(), chunks=(),
        )
        for i in range(2_000)
    ]  # fmt: skip
    return Swimlanes(
        schema_id=SWIMLANES_SCHEMA, duration_us=step * spans, steps=instances * spans, steps_per_span=1, requests=2_000,
        swimlanes=tuple(CoreLane.model_validate({"instance": f"mixed {i}", **swimlane}) for i in range(instances)),
        lives=tuple(lives),
    )  # fmt: skip
