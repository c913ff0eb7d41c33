"""Metrics of a vLLM server for Prometheus: one or several scrapes of `/metrics`, and what happened between them.

The text is Prometheus' exposition format 0.0.4, or OpenMetrics (which ends with `# EOF`). Numbers of all engines and
models of a scrape are added up. A count that falls means that the server restarted: all that it counts happened since
then.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from simtune.errors import Problem, SpecError
from simtune.specs.input_files import decoded, numbered_lines, read_bytes, unpacked

LARGEST = 8 << 20
"""Bytes of a file that is read as a scrape: servers write some hundred kilobytes."""
PREFIX = "vllm:"
PROMPT, OUTPUT = "vllm:request_prompt_tokens", "vllm:request_generation_tokens"
TTFT = "vllm:time_to_first_token_seconds"
TPOT = ("vllm:request_time_per_output_token_seconds", "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds")  # fmt: skip
"""Names of the metric in versions of vLLM, the time of whole requests first."""
TOTALS = {PROMPT: "vllm:prompt_tokens_total", OUTPUT: "vllm:generation_tokens_total"}

_SAMPLE = re.compile(
    r'(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>(?:[^"}]|"(?:\\.|[^"\\])*")*)\})?'
    r"[ \t]+(?P<value>\S+)(?:[ \t]+(?P<time>-?[\d.]+(?:[eE][+-]?\d+)?))?(?:[ \t]+#.*)?[ \t]*"
)
_LABEL = re.compile(r'(?P<key>[a-zA-Z_]\w*)\s*=\s*"(?P<text>(?:\\.|[^"\\])*)"')
_FIRST = re.compile(r"# (HELP|TYPE|UNIT) [a-zA-Z_:]")


@dataclass(frozen=True, slots=True)
class Histogram:
    """Requests by how much of something they had: `below[i]` of them at most `edges[i]`, the last of which is inf."""

    edges: tuple[float, ...]
    below: tuple[float, ...]
    total: float
    """Sum of the observed values over all requests."""

    @property
    def count(self) -> float:
        """Number of requests."""
        return self.below[-1]

    @property
    def mean(self) -> float | None:
        """Mean of the observed values; None if there are no requests."""
        return self.total / self.count if self.count else None

    def quantile(self, level: float) -> float | None:
        """Return a quantile as Prometheus' histogram_quantile does: linear within a bucket; the last finite edge beyond
        it.
        """
        rank, before, low = level * self.count, 0.0, 0.0
        if not self.count:
            return None
        for edge, below in zip(self.edges, self.below, strict=True):
            if below >= rank and below > before:
                return low if math.isinf(edge) else low + (edge - low) * (rank - before) / (below - before)
            before, low = below, low if math.isinf(edge) else edge
        return low

    def since(self, earlier: Histogram) -> Histogram:
        """Return what was added since an earlier histogram; all of it if the server began anew."""
        if any(a < b for a, b in zip((*self.below, self.total), (*earlier.below, earlier.total), strict=True)):
            return self
        below = tuple(a - b for a, b in zip(self.below, earlier.below, strict=True))
        return Histogram(self.edges, below, self.total - earlier.total)


@dataclass(frozen=True, slots=True)
class Scrape:
    """A response of `/metrics`."""

    file: str
    sha256: str
    time_s: float | None
    """Time in seconds since 1970; None if the samples have none."""
    histograms: Mapping[str, Histogram]
    totals: Mapping[str, float]
    """Counters by name."""
    models: tuple[str, ...]


def is_scrape(text: str) -> bool:
    """True if a text is a scrape: it begins with a comment on a metric, or with a sample of vLLM's."""
    start = text.lstrip()[:400]
    return _FIRST.match(start) is not None or start.startswith(PREFIX)


def is_scrape_file(path: Path) -> bool:
    """True if a file is a scrape; False if it does not exist. Raises UsageError if it cannot be read."""
    small = path.is_file() and path.stat().st_size <= LARGEST
    return small and is_scrape(decoded(path, unpacked(path, read_bytes(path))))


def read_scrape(path: Path) -> Scrape:
    """Read one scrape. Raises SpecError if a line is none of the format, or a histogram that is needed is missing or
    damaged; UsageError if the file cannot be read.
    """
    raw = read_bytes(path)
    return _ScrapeReader(str(path)).read(decoded(path, unpacked(path, raw)), raw)


class _ScrapeReader:
    """Adds up the samples of one file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        self._sums: dict[str, float] = defaultdict(float)
        self._lines: dict[str, int] = {}
        self._models: dict[str, None] = {}
        self._time: float | None = None

    def read(self, text: str, raw: bytes) -> Scrape:
        """Read all lines of a scrape."""
        per_s = 1.0 if text.rstrip().endswith("# EOF") else 1e3
        for number, line in numbered_lines(text):
            if line.startswith("#"):
                continue
            sample = _SAMPLE.fullmatch(line)
            if sample is None:
                self._stop('is no sample of a scrape, such as vllm:request_success_total{model_name="m"} 12', number)
            elif sample["name"].startswith(PREFIX):
                self._add(sample, number)
        if not self._lines:
            self._stop("is a Prometheus scrape without any metric of vLLM; theirs begin with vllm:", None)
        histograms = {name: self._histogram(name) for name in (PROMPT, OUTPUT)}
        histograms |= {name: self._histogram(name) for name in (TTFT, *TPOT) if name in self._buckets}
        time_s = None if self._time is None else self._time / per_s
        return Scrape(
            self.file, hashlib.sha256(raw).hexdigest(), time_s, histograms, dict(self._sums), tuple(self._models)
        )

    def _add(self, sample: re.Match[str], number: int) -> None:
        name, labels = sample["name"], {x["key"]: x["text"] for x in _LABEL.finditer(sample["labels"] or "")}
        try:
            value = float(sample["value"])
        except ValueError:
            self._stop(f"must be a number, not {sample['value']}", number, name)
        self._lines.setdefault(name, number)
        if "model_name" in labels:
            self._models[labels["model_name"]] = None
        if sample["time"] is not None:
            self._time = float(sample["time"])
        if not name.endswith("_bucket"):
            self._sums[name] += value
            return
        try:
            edge = float(labels["le"])
        except (KeyError, ValueError):
            self._stop("a bucket needs its upper edge, le", number, name)
        if not (math.isfinite(value) and value >= 0):
            self._stop(f"must be a count, not {sample['value']}", number, name)
        self._buckets[name.removesuffix("_bucket")][edge] += value
        self._lines.setdefault(name.removesuffix("_bucket"), number)

    def _histogram(self, name: str) -> Histogram:
        buckets = sorted(self._buckets.get(name, {}).items())
        if not buckets:
            near = ", ".join(sorted(self._buckets)) or "no histogram"
            self._stop(f"this histogram is missing; found: {near}", None, name)
        edges, below = (tuple(column) for column in zip(*buckets, strict=True))
        at = self._lines[name]
        if not math.isinf(edges[-1]):
            self._stop('the bucket le="+Inf" is missing', at, name)
        if len(edges) == 1:
            self._stop('has no bucket but le="+Inf"', at, name)
        if any(a > b for a, b in itertools.pairwise(below)):
            self._stop("the counts of its buckets must not fall", at, name)
        if f"{name}_sum" not in self._sums:
            self._stop("is missing beside its buckets", at, f"{name}_sum")
        return Histogram(edges, below, self._sums[f"{name}_sum"])

    def _stop(self, message: str, line: int | None, key: str = "") -> NoReturn:
        raise SpecError(Problem(self.file, message, key, line))


@dataclass(frozen=True, slots=True)
class BetweenScrapes:
    """Requests between two scrapes, or before the only one."""

    seconds: float | None
    """Seconds between the scrapes; None if not known."""
    histograms: Mapping[str, Histogram]
    anew: bool
    """True if the server began anew between the scrapes."""


def intervals(scrapes: Sequence[Scrape]) -> list[BetweenScrapes]:
    """Between scrapes of one server, in order of time; of a single one, all since the server began.

    Raises SpecError if the later of two has other buckets.
    """
    if len(scrapes) == 1:
        return [BetweenScrapes(None, scrapes[0].histograms, False)]
    if all(scrape.time_s is not None for scrape in scrapes):
        scrapes = sorted(scrapes, key=lambda scrape: scrape.time_s or 0.0)
    between = []
    for a, b in itertools.pairwise(scrapes):
        seconds = None if a.time_s is None or b.time_s is None else b.time_s - a.time_s
        common = [name for name in b.histograms if name in a.histograms]
        for name in common:
            if a.histograms[name].edges != b.histograms[name].edges:
                raise SpecError(
                    Problem(b.file, f"has other buckets than {a.file}; read them in separate commands", name)
                )
        added = {name: b.histograms[name].since(a.histograms[name]) for name in common}
        between.append(BetweenScrapes(seconds, added, added[PROMPT] is b.histograms[PROMPT]))
    return between
