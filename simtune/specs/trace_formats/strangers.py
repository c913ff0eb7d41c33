"""Files that people also have at hand and that are no requests: what each is, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from simtune.specs.trace_formats.log_rows import parsed_json

_BINARY = {
    b"PAR1": "a Parquet file",
    b"PK\x03\x04": "a zip archive or a spreadsheet (.xlsx)",
    b"SQLite format 3\x00": "an SQLite database",
    b"ARROW1": "an Arrow file",
    b"%PDF": "a PDF",
}

_SCRAPE = (
    "it counts requests and holds none; scrape the server's /metrics twice and make a load of that: "
    "simtune workload before.prom after.prom --span 30m"
)

_TEXTS: dict[str, tuple[str, str]] = {
    "Avg prompt throughput:": ("an engine's log (vLLM)", _SCRAPE),
    "Decode batch.": ("an engine's log (SGLang)", _SCRAPE),
    "#running-req:": ("an engine's log (SGLang)", _SCRAPE),
    "<!DOCTYPE html": ("a web page", "give the requests behind it as CSV or JSON lines"),
    "<html": ("a web page", "give the requests behind it as CSV or JSON lines"),
}
"""Words of a file's beginning -> what it is, what to do."""

_STEPS = (
    "it times steps and holds no requests; a hardware profile is corrected by an engine's log of requests or steps: "
    "simtune calibrate"
)
_TOTALS = (
    "it holds totals and no requests; run vllm bench serve --save-result --save-detailed, whose file simtune workload "
    "reads"
)
_LENGTHS = "it holds totals and no requests; state a workload with its prompt, output and arrivals"


def _keys(*names: str) -> Callable[[Any], bool]:
    return lambda row: isinstance(row, Mapping) and set(names) <= row.keys()


_OBJECTS: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (_keys("n_prompt", "n_gen", "avg_ts"), "llama-bench's results", _STEPS),
    (_keys("avg_latency", "latencies", "percentiles"), "vllm bench latency's results", _STEPS),
    (_keys("elapsed_time", "num_requests", "tokens_per_second"), "vllm bench throughput's results", _TOTALS),
    (_keys("load_summary", "successes"), "inference-perf's results", _LENGTHS),
    (_keys("request_info", "performance", "world_info"), "trtllm-bench's report", _LENGTHS),
    (_keys("architectures", "hidden_size"), "a model's config.json", "give it as --model"),
    (_keys("quantization", "producer"), "a checkpoint's hf_quant_config.json", "leave it beside its config.json"),
    (_keys("traceEvents"), "a timeline of a profiler", _STEPS),
)
"""Test of the first JSON object of a file, title of the kind and what to do with it."""

_HEAD = 1 << 16
"""Characters at the beginning of a file that show what kind of file it is."""


def binary_title(raw: bytes) -> str | None:
    """Return what a file is and what to do with it, if its first bytes are those of a known binary format."""
    title = next((title for magic, title in _BINARY.items() if raw.startswith(magic)), None)
    return None if title is None else f"looks like {title}, which is not read; export its requests as CSV or JSON lines"


def stranger(text: str) -> str | None:
    """Return what a text is and what to do with it, if it is of a kind that holds no requests; else None."""
    head = text[:_HEAD]
    start = head.lstrip()
    verdict = None
    if start[:1] in ("{", "["):
        first = parsed_json(text) or parsed_json(start.partition("\n")[0])
        row = first[0] if isinstance(first, list) and first else first
        verdict = next(((title, remedy) for is_one, title, remedy in _OBJECTS if is_one(row)), None)
    verdict = verdict or next((entry for words, entry in _TEXTS.items() if words in head), None)
    return None if verdict is None else f"looks like {verdict[0]}: {verdict[1]}"
