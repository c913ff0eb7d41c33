"""Readers of acceptance from the files of engines, their benchmarks and publications.

The format of a file is recognised by its content:

    Prometheus text         vllm:spec_decode_* counters; of two files the difference, before and after a run
    log of vLLM             its `SpecDecoding metrics:` lines, added up
    JSON                    `vllm bench serve` (spec_decode_*), SGLang (accept_length, avg_spec_accept_length),
                            AIPerf (pooled_spec_decode_acceptance_histogram)
    JSON lines              responses of vLLM with metrics.speculative_decoding, one request each
    CSV                     head_index,top_k,accuracy (cumulative, as Medusa prints it); depth,rank,taken,reached;
                            accepted,drafted (one round a row)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simtune.errors import Problem, SpecError, UsageError
from simtune.specs.acceptance import Rates
from simtune.specs.input_files import JsonError, csv_table, json_lines, parse_json, read_text
from simtune.workload import acceptance_estimate

_COUNTER = re.compile(r"^vllm:(spec_decode_\w+?)(?:_total)?(?:\{(.*)\})?\s+([0-9.eE+-]+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_LOG_LINE = re.compile(
    r"SpecDecoding metrics:.*?Drafted: (\d+) tokens, Per-position acceptance rate: ([\d., ]+?), Avg Draft"
)


class Reading(NamedTuple):
    """Rates, and the source from which they were read, in words."""

    rates: Rates
    source: str


def read_acceptance(paths: Sequence[Path], draft_tokens: int | None = None, model: str | None = None) -> Reading:
    """Return the rates in one file, or between two readings of the same counters.

    `draft_tokens` of each round are needed if a file does not contain them; `model` chooses among several in a table.
    Raises SpecError or UsageError if a file has none of these formats, or impossible counts.
    """
    texts = [read_text(path) for path in paths]
    counted = all(_COUNTER.search(text) for text in texts)
    if len(paths) != 1 and not (len(paths) == 2 and counted):
        raise UsageError("give one file, or two readings of the same Prometheus counters, before and after a run")
    path, text = paths[0], texts[0]
    try:
        if counted:
            return _counters(paths, texts)
        if _LOG_LINE.search(text):
            return _log(path, text)
        return _table(path, text, model) if path.suffix == ".csv" else _json(path, text, draft_tokens)
    except (KeyError, TypeError, ArithmeticError, ValueError, AttributeError, IndexError) as error:
        fault = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise SpecError(Problem(str(path), f"malformed: {fault}")) from None


def _estimated(path: Path, key: str, counting: Callable[[], Rates]) -> Rates:
    try:
        return counting()
    except ValueError as error:
        raise SpecError(Problem(str(path), str(error), key)) from None


def _counters(paths: Sequence[Path], texts: Sequence[str]) -> Reading:
    readings = []
    for text in texts:
        counts: dict[str, float] = {}
        for name, labels, value in _COUNTER.findall(text):
            # Counters of several engines behind one address add up.
            position = _POSITION.search(labels)
            key = f"{name}[{position[1]}]" if position else name
            counts[key] = counts.get(key, 0.0) + float(value)
        readings.append(counts)
    path, counts = paths[-1], readings[-1]
    source = f"vLLM counters since its start, {path.name}"
    if len(readings) == 2:
        source = f"vLLM counters between {paths[0].name} and {path.name}"
        try:
            counts = acceptance_estimate.difference(*readings)
        except ValueError as error:
            raise SpecError(Problem(str(path), str(error))) from None
    drafts, per_position = "spec_decode_num_drafts", "spec_decode_num_accepted_tokens_per_pos"
    positions = sorted(int(_index(key)) for key in counts if key.startswith(per_position + "["))
    if drafts not in counts or not positions:
        raise SpecError(Problem(str(path), f"vllm:{drafts} and vllm:{per_position} are both needed"))
    accepted = [counts.get(f"{per_position}[{j}]", 0.0) for j in range(positions[-1] + 1)]
    key = f"vllm:{per_position}"
    return Reading(_estimated(path, key, lambda: acceptance_estimate.from_counters(counts[drafts], accepted)), source)


def _index(key: str) -> str:
    return key[key.index("[") + 1 : -1]


def _log(path: Path, text: str) -> Reading:
    drafts = 0.0
    accepted: list[float] = []
    for drafted, rates in _LOG_LINE.findall(text):
        shares = [float(r) for r in rates.split(",")]
        rounds = int(drafted) / len(shares)
        drafts += rounds
        accepted += [0.0] * (len(shares) - len(accepted))
        for j, share in enumerate(shares):
            accepted[j] += share * rounds
    rates_of = _estimated(path, "SpecDecoding metrics", lambda: acceptance_estimate.from_counters(drafts, accepted))
    return Reading(rates_of, f"log lines of vLLM, {path.name}")


def _json(path: Path, text: str, draft_tokens: int | None) -> Reading:
    try:
        documents = [parse_json(text)]
    except JsonError:
        documents = [document for _, document in json_lines(text, str(path))]
    requests = [h for h in (_per_request(d) for d in documents) if h is not None]
    if requests:
        rates = _estimated(path, "acceptance_histogram", lambda: acceptance_estimate.from_requests(requests))
        return Reading(rates, f"vLLM's metrics of {len(requests)} requests, {path.name}")
    data = documents[0] if len(documents) == 1 else None
    if not isinstance(data, dict):
        raise _unknown(path)
    if "spec_decode_per_position_acceptance_rates" in data:
        drafts = float(data["spec_decode_num_drafts"])
        shares = [float(r) for r in data["spec_decode_per_position_acceptance_rates"]]
        rates = _estimated(
            path,
            "spec_decode_per_position_acceptance_rates",
            lambda: acceptance_estimate.from_counters(drafts, [share * drafts for share in shares]),
        )
        return Reading(rates, f"vllm bench serve, {path.name}")
    if histogram := data.get("pooled_spec_decode_acceptance_histogram"):
        counts = {int(j): float(n) for j, n in histogram.items()}
        rates = _estimated(
            path,
            "pooled_spec_decode_acceptance_histogram",
            lambda: acceptance_estimate.from_histogram(counts, draft_tokens),
        )
        return Reading(rates, f"acceptance histogram of AIPerf, {path.name}")
    return _mean_length(path, data, draft_tokens)


def _mean_length(path: Path, data: dict[str, Any], draft_tokens: int | None) -> Reading:
    states = data.get("internal_states") or [{}]
    lengths = {
        "accept_length": data.get("accept_length"),
        "avg_spec_accept_length": data.get("avg_spec_accept_length") or states[0].get("avg_spec_accept_length"),
    }
    key, length = next(((k, x) for k, x in lengths.items() if x is not None), ("", None))
    if length is None:
        raise _unknown(path)
    if draft_tokens is None:
        raise UsageError(
            f"{path}: a mean length needs the draft tokens of a round: give --draft-tokens "
            "(SGLang's speculative-num-steps)"
        )
    rates = _estimated(path, key, lambda: acceptance_estimate.from_mean_length(float(length), draft_tokens))
    return Reading(rates, f"mean accepted length of SGLang, {path.name}; the same acceptance at every position")


def _per_request(document: Any) -> list[float] | None:
    """Return the histogram of one response of vLLM, None if it has none."""
    metrics = document.get("metrics") if isinstance(document, dict) else None
    speculative = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    histogram = speculative.get("acceptance_histogram") if isinstance(speculative, dict) else None
    return [float(n) for n in histogram] if isinstance(histogram, list) else None


def _table(path: Path, text: str, model: str | None) -> Reading:
    header, cells, _ = csv_table(text, str(path))
    rows, columns = [dict(zip(header, row, strict=True)) for row in cells], set(header)
    if not rows:
        raise _unknown(path)
    if {"head_index", "top_k", "accuracy"} <= columns:
        return _top_k(path, rows, model)
    if {"depth", "rank", "taken", "reached"} <= columns:
        by_depth: dict[int, list[tuple[int, float, float]]] = {}
        for row in rows:
            counts = (int(row["rank"]), float(row["taken"]), float(row["reached"]))
            by_depth.setdefault(int(row["depth"]), []).append(counts)
        ordered = [sorted(by_depth[d]) for d in sorted(by_depth)]
        candidates, reached = ([[x[i] for x in row] for row in ordered] for i in (1, 2))
        rates: Rates = _estimated(path, "taken", lambda: acceptance_estimate.from_ranks(candidates, reached))
        return Reading(rates, f"counts by depth and rank, {path.name}")
    if {"accepted", "drafted"} <= columns:
        rounds = [(int(row["accepted"]), int(row["drafted"])) for row in rows]
        rates = _estimated(path, "accepted", lambda: acceptance_estimate.from_windows(rounds))
        return Reading(rates, f"{len(rounds):,} rounds, {path.name}")
    raise _unknown(path)


def _top_k(path: Path, rows: list[dict[str, str]], model: str | None) -> Reading:
    models = sorted({row.get("target_model") or "" for row in rows})
    if model is None and len(models) > 1:
        raise UsageError(f"{path}: it has several models, choose one with --model: {', '.join(models)}")
    chosen = [row for row in rows if model is None or row.get("target_model") == model]
    if not chosen:
        raise UsageError(f"{path}: no model {model} in it: {', '.join(models)}")
    heads: dict[int, list[tuple[int, float]]] = {}
    for row in chosen:
        heads.setdefault(int(row["head_index"]), []).append((int(row["top_k"]), float(row["accuracy"])))
    cumulative = [[a for _, a in sorted(heads[h])] for h in sorted(heads)]
    of = f" of {model or models[0]}" if (model or models[0]) else ""
    rates = _estimated(path, "accuracy", lambda: acceptance_estimate.from_top_k(cumulative))
    return Reading(rates, f"top-k accuracies of heads{of}, {path.name}")


def _unknown(path: Path) -> SpecError:
    return SpecError(
        Problem(
            str(path),
            "no acceptance found; known formats are vLLM's counters, log lines, bench serve results and per-request "
            "metrics, SGLang's accept_length, AIPerf's histogram, and CSV with head_index,top_k,accuracy or "
            "depth,rank,taken,reached or accepted,drafted",
        )
    )
