"""Times of day as logs write them: text in one of a few forms, or a number since 1970 whose size tells its unit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

NAMES = (
    "timestamp", "@timestamp", "time", "ts", "start_time", "startTime", "request_time", "received_at", "created_at",
    "created",
)  # fmt: skip
"""Names of the time of a request in logs, the surest first."""

FORMS = (
    "2026-03-01T09:30:00+01:00, 2026-03-01 09:30:00.123 or 01.03.2026 09:30:00 (UTC unless an offset follows), or "
    "seconds, milliseconds, microseconds or nanoseconds since 1970"
)
"""The forms that are read, in words. Dates with slashes are refused: 03/01 is a day in March or in January."""

EARLIEST_S = 1e8
"""Numbers beyond are seconds since 1970, below since some start."""

_TIME = re.compile(
    r"(?:(\d{4})[-/](\d\d)[-/](\d\d)|(\d\d)\.(\d\d)\.(\d{4}))[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?"
    r" ?(?:Z|UTC|([+-])(\d\d):?(\d\d))?"
)
_LAST_NS = 2**63
"""Nanoseconds since 1970: more is no time of day, and may be no float."""
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3), (EARLIEST_S, 1.0))
"""(least number, how many make a second)."""


def per_second(value: float) -> float | None:
    """Return how many of its units make a second, for a number since 1970; None for one that is too small or large."""
    return next((per_s for least, per_s in _UNITS if least <= value < _LAST_NS), None)


def text_ns(text: str) -> tuple[np.datetime64, int] | None:
    """Return the time in a text, and how many minutes its clock is ahead of UTC; None for a text that is no time."""
    parts = _TIME.fullmatch(text.strip())
    if parts is None:
        return None
    year, month, day, day_first, month_second, year_last, clock, fraction, sign, hours, minutes = parts.groups()
    date = f"{year}-{month}-{day}" if year else f"{year_last}-{month_second}-{day_first}"
    try:
        at = np.datetime64(f"{date}T{clock}.{fraction or 0}", "ns")
    except ValueError:
        return None
    ahead = 0 if sign is None else (-1 if sign == "-" else 1) * (60 * int(hours) + int(minutes))
    return at, ahead


def epoch_s(value: Any) -> float | None:
    """Return seconds since 1970 of a time of day; None for what is none."""
    if isinstance(value, str):
        at = text_ns(value)
        return None if at is None else float(at[0].astype(np.int64)) / 1e9 - 60 * at[1]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    per_s = per_second(value)
    return None if per_s is None else float(value) / per_s


def are_texts(values: Sequence[Any]) -> bool:
    """True if the first value that is not empty is a text and no number."""
    first = next((value for value in values if not (isinstance(value, str) and not value.strip())), None)
    if not isinstance(first, str):
        return False
    try:
        float(first)
    except ValueError:
        return True
    return False
