"""What benchmarks found, kept in a file and compared with what they find now.

A figure is one number with its unit, whether higher or lower is better (or neither: "same"), and its noise, the
spread over repeats in the same unit. A change counts when it is larger than the noise of both sides together and than
`LEAST` of the stored value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

SCHEMA = "simtune/benchmarks@1"
LEAST = 0.01
"""Share of the stored value below which no change counts."""

Better = Literal["higher", "lower", "same"]
Verdict = Literal["same", "better", "REGRESSION", "changed", "new", "absent"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number a benchmark came to."""

    value: float
    unit: str
    better: Better
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.better not in ("higher", "lower", "same"):
            raise ValueError(f"better is higher, lower or same, not {self.better!r}")
        if not (math.isfinite(self.value) and math.isfinite(self.noise)) or self.noise < 0:
            raise ValueError(f"value {self.value} and noise {self.noise} must be finite, and noise not negative")


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Where and when figures were found."""

    commit: str
    date: str
    python: str
    processor: str


class Stored(NamedTuple):
    """A figure and the circumstances it was found in."""

    figure: Figure
    circumstances: Circumstances


class Comparison(NamedTuple):
    """One row of the table: a side is None where the figure was not stored, or not found now."""

    name: str
    stored: Figure | None
    now: Figure | None
    verdict: Verdict

    @property
    def change(self) -> float | None:
        """Now over stored, less one; None where there is no such ratio."""
        if self.stored is None or self.now is None or self.stored.value == 0:
            return None
        return self.now.value / self.stored.value - 1


class Recorder:
    """Keeps the figures of one test. Their names begin with the test's file: `sim/scale: chat, ...`."""

    def __init__(self, file: Path, figures: dict[str, Figure]) -> None:
        self._prefix = f"{file.parent.name}/{file.stem.removeprefix('test_')}"
        self._figures = figures

    def __call__(self, name: str, value: float, unit: str, better: Better, noise: float = 0.0) -> None:
        """Keep one figure. Raises ValueError where the name is taken."""
        key = f"{self._prefix}: {name}"
        if key in self._figures:
            raise ValueError(f"{key} is recorded twice")
        self._figures[key] = Figure(float(f"{value:.6g}"), unit, better, float(f"{noise:.2g}"))

    def samples(self, name: str, samples: Sequence[float], unit: str, better: Better) -> None:
        """Keep the median of repeats, their spread as noise."""
        median, noise = middle(samples)
        self(name, median, unit, better, noise)


def middle(samples: Sequence[float]) -> tuple[float, float]:
    """(median, noise) of repeats: half the distance of their 10th and 90th percentiles."""
    low, median, high = np.quantile(samples, (0.1, 0.5, 0.9))
    return float(median), float(high - low) / 2


def verdict(stored: Figure | None, now: Figure | None) -> Verdict:
    """Whether a figure got worse, better or different by more than its noise."""
    if stored is None:
        return "new"
    if now is None:
        return "absent"
    if (stored.unit, stored.better) != (now.unit, now.better):
        return "changed"  # another quantity under the same name
    change = now.value - stored.value
    if abs(change) <= max(stored.noise + now.noise, LEAST * abs(stored.value)):
        return "same"
    if now.better == "same":
        return "changed"
    return "better" if (change > 0) == (now.better == "higher") else "REGRESSION"


def compare(stored: Mapping[str, Stored], now: Mapping[str, Figure]) -> list[Comparison]:
    """A row for every figure of either side, by name."""
    rows = []
    for name in sorted({*stored, *now}):
        before, after = stored[name].figure if name in stored else None, now.get(name)
        rows.append(Comparison(name, before, after, verdict(before, after)))
    return rows


def failed(rows: Iterable[Comparison]) -> list[Comparison]:
    """What must not pass unseen: regressions, and facts that changed."""
    return [row for row in rows if row.verdict in ("REGRESSION", "changed")]


def table(rows: Sequence[Comparison]) -> list[str]:
    """Lines of text: name, stored, now, change, verdict. Absent figures are shown where others of their file were
    found, and otherwise counted.
    """
    files = {_file(row.name) for row in rows if row.verdict != "absent"}
    shown = [row for row in rows if _file(row.name) in files]
    cells = [("figure", "stored", "now", "change", "verdict")]
    cells += [(row.name, _shown(row.stored), _shown(row.now), _change(row), row.verdict) for row in shown]
    widths = [max(len(line[i]) for line in cells) for i in range(5)]
    lines = []
    for name, stored, now, change, word in cells:
        numbers = f"{stored:>{widths[1]}}  {now:>{widths[2]}}  {change:>{widths[3]}}"
        lines.append(f"{name:<{widths[0]}}  {numbers}  {word}")
    absent = len(rows) - len(shown)
    return [*lines, f"absent: {absent} stored figures of files that were not run"] if absent else lines


def elsewhere(stored: Mapping[str, Stored], now: Iterable[str], here: Circumstances) -> list[str]:
    """A line for each other processor or Python that what is compared was stored on."""
    others = {stored[name].circumstances for name in now if name in stored}
    return [
        f"stored on {c.processor}, {c.python} ({c.date}, {c.commit}); this is {here.processor}, {here.python}"
        for c in sorted(others, key=lambda c: (c.date, c.commit))
        if (c.processor, c.python) != (here.processor, here.python)
    ]


def _file(name: str) -> str:
    return name.partition(":")[0]


def _shown(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    noise = f" ± {figure.noise:.2g}" if figure.noise else ""
    return f"{figure.value:,.4g}{noise} {figure.unit}"


def _change(row: Comparison) -> str:
    return "-" if row.change is None else f"{row.change:+.1%}"


def read(path: Path) -> dict[str, Stored]:
    """What is stored, by name; nothing where there is no file. Raises ValueError where it is another kind of file."""
    if not path.is_file():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema must be {SCHEMA}, found {document.get('schema')!r}")
    stored: dict[str, Stored] = {}
    for run in document["runs"]:
        circumstances = Circumstances(**{name: run[name] for name in Circumstances.__slots__})
        stored |= {name: Stored(Figure(**figure), circumstances) for name, figure in run["figures"].items()}
    return stored


def write(path: Path, stored: Mapping[str, Stored]) -> None:
    """Figures in groups that share their circumstances, oldest first, names in order."""
    runs: dict[Circumstances, dict[str, Any]] = {}
    for name in sorted(stored):
        figure, circumstances = stored[name]
        runs.setdefault(circumstances, {})[name] = asdict(figure)
    ordered = sorted(runs.items(), key=lambda item: (item[0].date, item[0].commit))
    document = {"schema": SCHEMA, "runs": [asdict(where) | {"figures": figures} for where, figures in ordered]}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
