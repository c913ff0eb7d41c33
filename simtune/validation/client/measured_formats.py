"""Measurements of other tools, read and written in their own formats.

vllm bench serve     one JSON object, with --save-result --save-detailed: lists by request, in seconds
aiperf               profile_export.jsonl: one line per request, times in nanoseconds and milliseconds
guidellm             benchmarks.json of one benchmark: requests by how they ended, times in seconds since the epoch
simtune              JSON lines, `simtune/measured@1` (`simtune.validation.client.measured_run`)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from simtune.errors import Problem, SpecError, UsageError
from simtune.specs.input_files import JsonError, parse_json, read_text
from simtune.validation.client.measured_run import (
    MEASURED_METRICS,
    EngineFacts,
    MeasuredFacts,
    MeasuredRequest,
    MeasuredRun,
    read_measured,
)

_STATISTICS = ("mean", "p50", "p90", "p99")


def read_run(path: Path) -> MeasuredRun:
    """Return a run in any of the formats, recognised by its content.

    Raise UsageError for a file in none of the formats or without the data that judging needs, and SpecError for an
    invalid file.
    """
    text = read_text(path)
    first = _object(text.partition("\n")[0]) or {}
    if str(first.get("schema", "")).startswith("simtune/"):
        return read_measured(path)
    try:
        if {"metadata", "metrics"} <= first.keys():
            return _aiperf(path, text)
        document = _object(text) or {}
        if "input_lens" in document or "total_input_tokens" in document:
            return _vllm_bench(path, document)
        if isinstance(document.get("benchmarks"), list):
            return _guidellm(path, document["benchmarks"])
    except ValidationError as error:
        item = error.errors()[0]
        raise SpecError(Problem(str(path), str(item["msg"]), ".".join(map(str, item["loc"])))) from None
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise SpecError(Problem(str(path), f"is cut off or of another version: {error!r}")) from None
    if "request_latency" in document or "time_to_first_token" in document:
        raise UsageError(
            f"{path}: contains aggregates only; pass the profile_export.jsonl that aiperf writes next to it"
        )
    raise UsageError(
        f"{path}: unknown format; expected a run of simtune, of `vllm bench serve --save-detailed`, of aiperf or of "
        "guidellm"
    )


def _object(text: str) -> dict[str, Any] | None:
    try:
        data = parse_json(text)
    except JsonError:
        return None
    return data if isinstance(data, dict) else None


def _run(path: Path, engine: EngineFacts, tool: str, rows: Sequence[dict[str, Any]]) -> MeasuredRun:
    """Return the run of some rows; times of the rows are on any clock, and count from the first request sent here."""
    begun = min(row["sent_s"] for row in rows)
    requests = []
    for number, row in enumerate(sorted(rows, key=lambda row: float(row["sent_s"]))):
        moved = {key: None if row[key] is None else row[key] - begun for key in ("sent_s", "first_token_s", "finish_s")}
        times = None if row["times_s"] is None else tuple(t - begun for t in row["times_s"])
        requests.append(MeasuredRequest(**{**row, **moved, "times_s": times, "request": number, "due_s": None}))
    facts = MeasuredFacts(label=path.stem[:100], engine=engine, source=f"{tool}, {path.name}")
    return MeasuredRun(facts, tuple(requests))


# --- vllm bench serve -------------------------------------------------------------------------------------


def _vllm_bench(path: Path, data: Mapping[str, Any]) -> MeasuredRun:
    lists = ("input_lens", "output_lens", "ttfts", "itls", "start_times")
    if absent := [name for name in lists if not data.get(name)]:
        raise UsageError(f"{path}: lacks {', '.join(absent)}; run `vllm bench serve --save-result --save-detailed`")
    errors = data.get("errors") or [""] * len(data["ttfts"])
    rows = []
    for *columns, error in zip(*(data[name] for name in lists), errors, strict=True):
        prompt, output, ttft, gaps, sent = columns
        times = list(accumulate(gaps, initial=sent + ttft)) if output and not error else None
        rows.append(
            {
                "sent_s": sent,
                "first_token_s": times[0] if times else None,
                "finish_s": times[-1] if times else None,
                "prompt_tokens": prompt,
                "output_tokens": output,
                "times_s": times,
                "error": error or (None if times else "no tokens came"),
            }
        )
    return _run(path, EngineFacts(engine=str(data.get("backend", "vllm")), model=data.get("model_id")), "vllm", rows)


def to_vllm_bench(run: MeasuredRun) -> str:
    """Return the run as `vllm bench serve --save-detailed` writes it, as far as it was measured."""
    rows = run.requests
    data: dict[str, Any] = {
        "backend": run.facts.engine.engine,
        "model_id": run.facts.engine.model,
        "num_prompts": len(rows),
        "completed": int(run.completed.sum()),
        "failed": len(run.failed),
        "duration": run.duration_s,
        "total_input_tokens": int(run.prompt_tokens[run.completed].sum()),
        "total_output_tokens": int(run.output_tokens[run.completed].sum()),
        "request_throughput": run.request_throughput_rps,
        "output_throughput": run.output_tokens_per_s,
        "input_lens": [r.prompt_tokens for r in rows],
        "output_lens": [r.output_tokens for r in rows],
        "start_times": [r.sent_s for r in rows],
        "ttfts": np.nan_to_num(run.ttft_s).tolist(),
        "itls": [np.diff(r.times_s or ()).tolist() for r in rows],
        "latencies": np.nan_to_num(run.e2el_s).tolist(),
        "errors": [r.error or "" for r in rows],
    }
    data |= {f"{name}_{metric}_ms": value for (metric, name), value in _statistics(run).items()}
    return json.dumps(data, allow_nan=False) + "\n"


def _statistics(run: MeasuredRun) -> dict[tuple[str, str], float | None]:
    """Return the statistics in milliseconds, by metric and vLLM's name of the statistic."""
    values = {(m, s): run.statistic(m, s) for m in MEASURED_METRICS for s in _STATISTICS}
    return {(m, "median" if s == "p50" else s): None if v is None else 1e3 * v for (m, s), v in values.items()}


# --- aiperf -----------------------------------------------------------------------------------------------


def _aiperf(path: Path, text: str) -> MeasuredRun:
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if (record := _object(line)) is None:
            raise SpecError(Problem(str(path), "not a JSON object; the file may be cut off", "", number))
        if record["metadata"].get("benchmark_phase", "profiling") == "profiling":
            rows.append(_aiperf_row(record))
    if not rows:
        raise UsageError(f"{path}: has no requests of the profiling phase")
    return _run(path, EngineFacts(engine="unknown"), "aiperf", rows)


def _aiperf_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of one line; a failed request has an error and hardly any metric."""

    def metric(name: str) -> Any:
        return record["metrics"].get(name, {}).get("value")

    sent = record["metadata"]["request_start_ns"] * 1e-9
    error, ttft, latency = record.get("error"), metric("time_to_first_token"), metric("request_latency")
    answered = error is None and None not in (ttft, latency)
    gaps, times = metric("inter_chunk_latency"), None
    if answered and isinstance(gaps, list):
        times = list(accumulate((1e-3 * gap for gap in gaps), initial=sent + 1e-3 * ttft))
    return {
        "sent_s": sent,
        "first_token_s": sent + 1e-3 * ttft if answered else None,
        "finish_s": sent + 1e-3 * latency if answered else None,
        "prompt_tokens": max(1, int(metric("input_sequence_length") or 1)),
        "output_tokens": int(metric("output_sequence_length") or 0),
        "times_s": times,
        "error": None if answered else _words(error),
    }


# --- guidellm ---------------------------------------------------------------------------------------------


def _guidellm(path: Path, benchmarks: Sequence[Mapping[str, Any]]) -> MeasuredRun:
    if len(benchmarks) != 1:
        raise UsageError(f"{path}: contains {len(benchmarks)} benchmarks; pass a file with one, of one rate")
    by_end = benchmarks[0]["requests"]
    ends = ("successful", "errored", "incomplete")
    # A request that was never sent has no time at which it was.
    rows = [_guidellm_row(row, end) for end in ends for row in by_end.get(end) or () if _sent(row) is not None]
    if not rows:
        raise UsageError(f"{path}: has no requests")
    return _run(path, EngineFacts(engine="unknown"), "guidellm", rows)


def _sent(row: Mapping[str, Any]) -> float | None:
    sent: float | None = row["info"]["timings"].get("request_start")
    return sent


def _guidellm_row(row: Mapping[str, Any], end: str) -> dict[str, Any]:
    timings = row["info"]["timings"]
    first = timings.get("first_output_token_iteration") or timings.get("first_token_iteration")
    last = timings.get("last_token_iteration")
    answered = end == "successful" and None not in (first, last)
    error = row["info"].get("error") or ("no tokens came" if end == "successful" else end)
    return {
        "sent_s": _sent(row),
        "first_token_s": first if answered else None,
        "finish_s": last if answered else None,
        "prompt_tokens": max(1, int(row["input_metrics"].get("text_tokens") or 1)),
        "output_tokens": int(row["output_metrics"].get("text_tokens") or 0),
        "times_s": None,
        "error": None if answered else str(error),
    }


def _words(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message") or error.get("type") or "failed")
    return str(error) if error else "no tokens came"


def to_aiperf(run: MeasuredRun) -> str:
    """Return the run as aiperf's profile_export.jsonl: one line per request."""
    lines = []
    for r in run.requests:
        metrics: dict[str, Any] = {
            "input_sequence_length": {"value": r.prompt_tokens, "unit": "tokens"},
            "output_sequence_length": {"value": r.output_tokens, "unit": "tokens"},
        }
        if r.error is None and r.first_token_s is not None and r.finish_s is not None:
            metrics["time_to_first_token"] = {"value": 1e3 * (r.first_token_s - r.sent_s), "unit": "ms"}
            metrics["request_latency"] = {"value": 1e3 * (r.finish_s - r.sent_s), "unit": "ms"}
            if r.times_s:
                gaps = [1e3 * (b - a) for a, b in zip(r.times_s, r.times_s[1:], strict=False)]
                metrics["inter_chunk_latency"] = {"value": gaps, "unit": "ms"}
        start, end = round(1e9 * r.sent_s), None if r.finish_s is None else round(1e9 * r.finish_s)
        metadata: dict[str, Any] = {"session_num": r.request, "benchmark_phase": "profiling"}
        metadata |= {"request_start_ns": start, "request_end_ns": end}
        error = None if r.error is None else {"message": r.error}
        lines.append(json.dumps({"metadata": metadata, "metrics": metrics, "error": error}, allow_nan=False))
    return "\n".join(lines) + "\n"


EXPORTS = {"vllm": (".json", to_vllm_bench), "aiperf": (".jsonl", to_aiperf)}
"""File ending and writer of each tool, by its name."""
