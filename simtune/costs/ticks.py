"""The simulator's unit of time: one tick is 2**-40 s, about 0.9 picoseconds.

Ticks are integers, so equal steps added one by one and multiplied at once agree to the last bit.
"""

from __future__ import annotations

TICKS_PER_SECOND = 1 << 40


def to_ticks(seconds: float) -> int:
    """Return the nearest whole number of ticks."""
    return round(seconds * TICKS_PER_SECOND)
