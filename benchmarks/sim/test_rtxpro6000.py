"""A real vLLM against its simulation: 300 ShareGPT requests to Llama-3.1-8B on an RTX PRO 6000.

    python -m pytest benchmarks/sim/test_rtxpro6000.py -m benchmark_only -s

The kernel tables of the machine (LLMServingSim) are fitted, nothing else; then the arrivals and lengths of the run are
simulated with the settings of its engine, vLLM 0.19.0 with its defaults: asynchronous scheduling, CUDA graphs, chunked
prefill, 128 sequences, 2,048 tokens. Nothing is fitted to the log. Assumed besides: no host time, since asynchronous
scheduling hides it behind steps of 11 to 100 ms (and no table tells it); sampling by the data sheet; kernels that wait
for one another do not overlap, and no time passes between them.

Latencies count from a request's arrival, in the log as in the simulation. The log's own `queued_s` is when the engine
took a request in, between two steps: 23 ms later in the mean, which with asynchronous scheduling are the rest of the
step under way, before the one that was dispatched already.

Prints mean and percentiles of TTFT, TPOT and latency beside the measured ones, with the same simulation less what the
tables say of decodes in one kernel with a prefill chunk and of unequal contexts, and draws requests running and waiting
over time into runs/rtx-pro-6000.html.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune import simulate
from simtune.costs.hardware_profile import build
from simtune.costs.tables import read_tables
from simtune.report import figures
from simtune.specs.hardware import ARRAYS, Facts, Hardware
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, Pool
from tests.validation.served import Comparison, Served, compare

pytestmark = pytest.mark.benchmark_only

ROOT = Path(__file__).resolve().parents[2]
TABLES = tuple(f"tp1_{name}.csv.gz" for name in ("attention", "dense", "per_sequence", "skew"))
TARGETS = {"tpot": 0.015, "e2el": 0.02, "ttft": 0.05}
"""Of the means."""


def columns(path: Path, *names: str) -> list[np.ndarray]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        rows = list(csv.DictReader(file))
    return [np.array([float(row[name]) for row in rows]) for name in names]


def measured(folder: Path) -> Served:
    names = ("arrival_s", "queued_s", "scheduled_s", "first_token_s", "last_token_s", "output_toks")
    arrival, queued, scheduled, first, last, tokens = columns(folder / "vllm_requests.csv.gz", *names)
    # The client's clock and the engine's begin at the first request each: it waited as long as none is taken in early.
    arrival += (queued - arrival).min()
    return Served(arrival, scheduled, first, last, tokens.astype(int))


def simulated(folder: Path, profile: Path, scratch: Path) -> Served:
    """Times are from the first arrival on, as in the log."""
    arrival_ns, *tokens = columns(
        folder / "sharegpt_llama31_8b_300_workload.csv.gz", "arrival_time_ns", "input_toks", "output_toks"
    )
    rows = zip((arrival_ns - arrival_ns[0]) / 1e9, *(column.astype(int) for column in tokens), strict=True)
    lines = [f"{at:.9f},{prompt},{output}" for at, prompt, output in rows]
    trace = scratch / "trace.csv"
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n")
    batching = Batching(max_num_seqs=128, max_num_batched_tokens=2048)
    plan = Plan(
        name="rtx", model="llama-3.1-8b", pools=(Pool(hardware="rtx-pro-6000", instances=1, batching=batching),)
    )
    return Served.of(simulate(str(trace), plan=plan, hardware=str(profile)))


def plain(profile: Hardware) -> Hardware:
    """The same without what is known of mixed kernels and unequal contexts."""
    operators = {
        key: operator.model_copy(update={"uneven_s": None})
        for key, operator in profile.operators.items()
        if operator.kind != "mixed_attention"
    }
    return profile.model_copy(update={"operators": operators})


def written(profile: Hardware, folder: Path) -> Path:
    folder.mkdir()
    (folder / ARRAYS).write_bytes(profile.arrays.to_bytes())
    (folder / "profile.yaml").write_text(profile.to_yaml())
    return folder


def queues_figure(folder: Path, log: Served, simulation: Served) -> dict[str, Any]:
    """Requests running and waiting: simulated ones as lines, what the engine said every second as dots."""
    seconds, running, waiting = columns(folder / "vllm_timeseries.csv", "t", "running", "waiting")
    fine = np.linspace(0, max(log.finish_s.max(), simulation.finish_s.max()), 800)
    data = []
    for name, dots, line, colour in zip(
        ("running", "waiting"), (running, waiting), simulation.in_flight(fine), figures.COLOURS, strict=False
    ):
        data.append({"x": fine.round(3).tolist(), "y": line.tolist(), "name": f"{name}, simulated", "mode": "lines"})
        data[-1]["line"] = {"color": colour, "width": 2}
        data.append({"x": seconds.tolist(), "y": dots.tolist(), "name": f"{name}, vLLM", "mode": "markers"})
        data[-1]["marker"] = {"color": colour, "size": 5, "symbol": "circle-open"}
    return {"data": data, "layout": figures.layout(figures.axis("seconds"), figures.axis("requests"))}


def show(rows: list[Comparison], before: list[Comparison]) -> None:
    print("\nmetric  statistic   measured ms  simulated ms   error    without mixed kernels and unequal contexts")
    for row, other in zip(rows, before, strict=True):
        print(
            f"{row.metric:7} {row.statistic:9} {1e3 * row.measured_s:12,.1f} {1e3 * row.predicted_s:13,.1f} "
            f"{row.error:+7.2%}    {other.error:+7.2%}"
        )


def test_against_vllm(data_dir: Path, tmp_path: Path, record: Recorder) -> None:
    folder = data_dir / "validation" / "llmservingsim_rtxpro6000_llama31_8b"
    facts = Facts.from_file(ROOT / "simtune/hwprofiles/rtx-pro-6000/facts.yaml")
    profile = build(read_tables([folder / name for name in TABLES]), facts)
    log = measured(folder)
    simulation = simulated(folder, written(profile, tmp_path / "profile"), tmp_path)
    rows = compare(log, simulation)
    show(rows, compare(log, simulated(folder, written(plain(profile), tmp_path / "plain"), tmp_path)))

    figure = figures.fragment(queues_figure(folder, log, simulation), "queues", 420)
    page = ROOT / "runs" / "rtx-pro-6000.html"
    page.parent.mkdir(exist_ok=True)
    page.write_text(f"<!doctype html><meta charset=utf-8><script>{figures.plotly_js()}</script>{figure}")
    seconds, running, waiting = columns(folder / "vllm_timeseries.csv", "t", "running", "waiting")
    off = [np.abs(a - b).mean() for a, b in zip(simulation.in_flight(seconds), (running, waiting), strict=True)]
    print(f"mean distance over {len(seconds)} s: running {off[0]:.1f}, waiting {off[1]:.1f} requests; {page}")

    for row in rows:
        if row.statistic == "mean":
            print(f"{row.metric} mean {row.error:+.2%}, target {TARGETS[row.metric]:.1%}")
            record(f"{row.metric} mean", 100 * abs(row.error), "% off", "lower")
            assert abs(row.error) <= TARGETS[row.metric]
