"""Numbers given as options: bounded as those in files are, and refused in one line."""

from __future__ import annotations

import math
import re
from typing import Any

import click

LARGEST_RATE, LONGEST_S = 1e9, 2.0**22
"""Requests per second, and simulated seconds, as `simtune.specs.base` has them (which loads pydantic)."""


class WholeRange(click.IntRange):
    """A whole number between two bounds."""

    def __init__(self, least: int, most: int) -> None:
        super().__init__(min=least, max=most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a number; text of thousands of digits is refused before it is read."""
        if isinstance(value, str) and len(value) > len(str(self.max)) + 20:
            self.fail(f"{value[:20]}... is not in the range {self._describe_range()}.", param, ctx)
        return super().convert(value, param, ctx)


class RealRange(click.FloatRange):
    """A finite number above `above` or from `least` on, and at most `most`."""

    def __init__(self, *, above: float | None = None, least: float = 0.0, most: float, below: bool = False) -> None:
        """`below` excludes `most` itself."""
        super().__init__(min=least if above is None else above, max=most, min_open=above is not None, max_open=below)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a number; NaN lies between no bounds, though it is below none and above none."""
        number = super().convert(value, param, ctx)
        if math.isnan(number) or 0 < number < SMALLEST:
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A duration as 90s, 3m, 1.5h or plain seconds, read as seconds."""

    name = "duration"

    def __init__(self, least_s: float) -> None:
        self.least_s = least_s

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read a duration, or pass on seconds."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(value))
        seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
        if not self.least_s <= seconds <= LONGEST_S:
            least = f"{self.least_s:g} second{'s' * (self.least_s != 1)}"
            self.fail(f"{str(value)[:20]!r}: write it as 90s, 3m or 1h, from {least} to 48 days", param, ctx)
        return seconds


SMALLEST = 1e-18
"""Smallest number of an option; the inverse of a smaller one would be no number."""

JOBS = WholeRange(1, 10_000)
SEED = WholeRange(0, 2**63 - 1)
REQUESTS = WholeRange(1, 10**9)
WORLDS = 100_000
"""Most redrawn worlds."""
GPUS = WholeRange(1, 100_000)
RATE = RealRange(above=0, most=LARGEST_RATE)
LIMIT = RealRange(above=0, most=LONGEST_S)
"""Limit of a latency, in seconds."""
TRIALS = WholeRange(1, 10_000)
"""Rounds, repetitions and parts."""
