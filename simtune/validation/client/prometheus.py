"""Readings of an engine's Prometheus metrics during a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from simtune.validation.client.measured_run import MeasuredDrafts, QueueSamples

_SAMPLE = re.compile(r"^(\w+:\w+)(?:\{[^\n]*?\})?[ \t]+(\S+)", re.MULTILINE)

_MOST = 2.0**53
"""Largest count that a floating-point number holds exactly."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "queried": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
    "hits": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
    "rounds": ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_drafts"),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_draft_tokens"),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens"),
}
"""Metrics that are read, by the names under which engines count them; several engines in one server are added up."""


class MetricsReading(NamedTuple):
    """Text of /metrics, and its time in seconds since the run began."""

    at_s: float
    text: str


def values(text: str) -> dict[str, float]:
    """Return the values of NAMES in a text. NaN and infinity are legal there and mean that an engine has no value; they
    count as absent, as does what no counter can hold."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number) and 0 <= number <= _MOST:
            sums[name] = sums.get(name, 0.0) + number
    read = {}
    for quantity, names in NAMES.items():
        metric = next((name for name in names if name in sums), None)
        if metric is not None:
            read[quantity] = sums[metric]
    return read


def engine_facts(readings: Sequence[MetricsReading]) -> dict[str, Any]:
    """Return fields of `MeasuredFacts` from readings before, during and after a run; missing metrics are left out."""
    read = [(r.at_s, values(r.text)) for r in readings]
    if not read:
        return {}
    facts: dict[str, Any] = {}
    during = [(at_s, v) for at_s, v in read if at_s >= 0 and {"running", "waiting"} <= v.keys()]
    if during:
        columns = zip(*((at_s, v["running"], v["waiting"]) for at_s, v in during), strict=True)
        facts["queues"] = QueueSamples.model_validate(dict(zip(("t_s", "running", "waiting"), columns, strict=True)))
    before, after = read[0][1], read[-1][1]
    # A counter that fell belongs to an engine that started anew: its rise is not known.
    rise = {
        quantity: after[quantity] - before[quantity]
        for quantity in after
        if after[quantity] >= before.get(quantity, math.inf)
    }
    if "preemptions" in rise:
        facts["preemptions"] = round(rise["preemptions"])
    if rise.get("queried") and "hits" in rise:
        facts["prefix_hit_rate"] = min(1.0, rise["hits"] / rise["queried"])
    if rise.get("rounds"):
        facts["drafts"] = MeasuredDrafts(
            rounds=round(rise["rounds"]),
            draft_tokens=round(rise.get("draft_tokens", 0.0)),
            accepted_tokens=round(rise.get("accepted_tokens", 0.0)),
        )
    return facts
