"""Faults of a table of times, found by the data sheet of its device and by the rows around a row.

Published tables contain single times that are tens of times off (a mean of six runs, one of which was interrupted),
and tables in another unit than their neighbours. Neither shows in a merge; both would distort a fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simtune.arrays import Array, Mask
from simtune.costs.operators import OPERATORS, UNKNOWN, Chip, Setting, Terms
from simtune.costs.predict import base_seconds
from simtune.costs.tables.common import Table, take
from simtune.errors import UsageError

OFF = 8.0
"""A row this many times longer or shorter than its neighbours in shape is an outlier."""

NEIGHBOURS = 8
MANY = 0.05
"""Share of strange rows above which they are no accident but a table that was misread."""

# What kernels reach of the data sheet; only differences between rows matter here.
_SHEET_SHARE = 0.7
# Kernels read some bytes from a cache that the operators count.
_IMPOSSIBLE = 3.0
# What fits into a cache passes the memory's rate, on GDDR cards by far.
_CACHED, _IMPOSSIBLE_CACHED = 256e6, 8.0
# Sums inside a switch let an all-reduce pass its link's rate.
_IMPOSSIBLE_LINK = 1.5
_LAUNCHED_SHARE = 0.1
_NARROW, _LONG_S, _PAIRS, _HEEDED = 8, 50e-6, 15, 0.9
"""A window narrow enough, a time long enough, and pairs enough to show if the window was applied; with one, published
tables take 0.1 to 0.76 of the time without at the median."""

_DISORDER = 1.3
"""Factor by which a row may take longer than another with at least as much of everything: kernels change with sizes."""
_DISORDERLY = 0.1
"""Share of rows that must be removed to restore order above which it is no accident: two kernels take turns."""
_AT_ONCE = 4000
"""Rows that are compared with one another at a time."""

# Rows this far from the bulk of a table are in another unit.
_UNITS = 100.0
# Usual overheads; tables of kernels start with 0.5 to 5 of them, those of launches with 14 to 73.
_LAUNCHES = 8.0
# Best share of the data sheet below which a table with no time under a millisecond is in another unit.
_SLOW = 0.002


@dataclass(frozen=True, slots=True)
class Sheet:
    """Data-sheet rates of the device for one operator: flops and bytes per second (of the link if it uses one)."""

    processors: int
    flops_per_s: float
    bytes_per_s: float
    chip: Chip = UNKNOWN


def launches(table: Table, sheet: Sheet) -> str | None:
    """Return why the times are those of a host that launches, not of kernels; None if they are not.

    If the shortest hundredth of the rows takes many times the overhead of such a kernel, and hardly any of that by the
    data sheet, nothing on the device can have taken it.
    """
    operator = OPERATORS[table.kind]
    if table.origin.kind == "measured" or operator.link or len(table) <= NEIGHBOURS:
        return None
    shortest_s = float(np.quantile(table.seconds, 0.01))
    idle = float(np.median(_share(table, sheet)[table.seconds <= shortest_s]))
    if shortest_s < _LAUNCHES * operator.overhead_s or idle > _LAUNCHED_SHARE:
        return None
    return (
        f"{table.key}: no row is shorter than {1e6 * table.seconds.min():.0f} us, where the data sheet allows "
        f"{idle:.1%} of that and a kernel starts in about {1e6 * operator.overhead_s:.0f}: {', '.join(table.files)} "
        "must time launches"
    )


ABOVE_LAUNCHES = 1.5
"""Times of a call over those of its launches from which the device is taken to have been the slower of the two."""
_IDLE = 2.0
"""Times of the shortest rows up to which rows that leave the device idle are launches."""
_LEFT = 60  # rows above the launches that a fit needs


def above_launches(table: Table, sheet: Sheet) -> Table:
    """Return the rows of a table of launches that took the device longer than the host, with the time of the launches;
    a table of kernels as it is, and a table of launches with too few such rows.

    Of a block of several kernels a row is the greater of the two times. Of a single kernel rows just above its launch
    say nothing of the kernel.
    """
    if launches(table, sheet) is None or not OPERATORS[table.kind].several_kernels:
        return table
    idle = _share(table, sheet) < _LAUNCHED_SHARE
    shortest_s = float(np.quantile(table.seconds, 0.01))
    launch_s = float(np.median(table.seconds[idle & (table.seconds < _IDLE * shortest_s)]))
    launched = table.seconds < ABOVE_LAUNCHES * launch_s
    if len(table) - launched.sum() < _LEFT:
        return table
    why = f"less than {ABOVE_LAUNCHES:g} times the {1e3 * launch_s:.3g} ms in which the host launched the kernels"
    return replace(_without(table, launched, why), launch_s=launch_s)


def screen(table: Table, sheet: Sheet, *, repair: bool = False) -> Table:
    """Return the table without outliers and impossible rows, which are counted.

    With `repair`, message sizes that are too large for the link and possible as bytes per element are divided by it,
    rows of a window that was ignored are left out, and so are matrix products out of order. Raises UsageError for a
    table whose times cannot be those of its operator.
    """
    if table.origin.kind == "measured":
        # the unit is known, noisy points are left out, and data that is warm in a step was measured warm
        return table
    table = _windowed(_possible(table, sheet, repair), repair)
    table = _one_unit(table, sheet)
    off = _off_neighbours(table, _expected(table, sheet))
    if off.mean() > MANY:
        raise UsageError(
            f"{table.key}: {off.sum():,} of {len(table):,} rows are more than {OFF:g} times off their neighbours in "
            f"shape; are several units or kernels mixed in {', '.join(table.files)}?"
        )
    return _ordered(_without(table, off, f"more than {OFF:g} times off the rows around them"), repair)


def _possible(table: Table, sheet: Sheet, repair: bool) -> Table:
    link = OPERATORS[table.kind].link
    limit = _IMPOSSIBLE_LINK if link else _IMPOSSIBLE
    share = _share(table, sheet)
    cached = (_terms(table, sheet).bytes < _CACHED) & (not link)
    impossible = share > np.where(cached, _IMPOSSIBLE_CACHED, limit)
    if not impossible.any():
        if share.max(initial=0.0) < _SLOW and table.seconds.min() > 1e-3:
            raise UsageError(
                f"{table.key}: no row is shorter than {1e3 * table.seconds.min():.3g} ms or reaches "
                f"{share.max():.2%} of the data sheet; the times in {', '.join(table.files)} must be in a smaller unit"
            )
        return table
    if impossible.mean() <= MANY:
        return _without(table, impossible, f"more than {limit:g} times faster than the data sheet allows")
    # bytes that were read as elements make messages `width` times too large: the one unit that can be repaired
    width = Setting.of(1, table.dtype, None).dtype_bytes
    if link and width > 1 and "bytes" in table.shape:
        smaller = replace(table, shape={**table.shape, "bytes": table.shape["bytes"] / width})
        if not (_share(smaller, sheet) > limit).any():
            if not repair:
                raise UsageError(
                    f"{table.key}: {impossible.sum():,} of {len(table):,} rows pass the rate of the link unless the "
                    f"message sizes in {', '.join(table.files)} are bytes, not elements; give --repair to take them "
                    "as such"
                )
            why = f"message sizes taken as bytes: as elements {impossible.sum():,} rows would pass the rate of the link"

            return replace(smaller, remarks=(*table.remarks, why))
    quantity = "message sizes" if link else "times"
    raise UsageError(
        f"{table.key}: {impossible.sum():,} of {len(table):,} rows are up to {share.max():.3g} times faster than the "
        f"data sheet allows; {quantity} in {', '.join(table.files)} must be in another unit, of another "
        "device, or taken on data that stayed in a cache; leave the file out"
    )


def _windowed(table: Table, repair: bool) -> Table:
    """Check rows of a narrow window against the same call without one: equal times mean that the window was ignored."""
    if "window" not in table.shape:
        return table
    window, context = table.shape["window"], table.shape["context"]
    calls = list(zip(*(x for name, x in table.shape.items() if name != "window"), strict=True))
    full_seconds = {calls[row]: table.seconds[row] for row in np.flatnonzero(window >= context)}
    long = np.flatnonzero((_NARROW * window <= context) & (table.seconds > _LONG_S))
    ratios = [table.seconds[row] / full_seconds[calls[row]] for row in long if calls[row] in full_seconds]
    if len(ratios) < _PAIRS or np.median(ratios) < _HEEDED:
        return table
    why = f"{len(ratios):,} rows of a window of an eighth of the context or less take as long as without it"
    if repair:
        return _without(table, window < context, f"with a window, which was ignored: {why}")
    raise UsageError(
        f"{table.key}: {why}; it must have been ignored in {', '.join(table.files)}; give --repair to leave all rows "
        "with a window out"
    )


def _ordered(table: Table, repair: bool) -> Table:
    """Return the table without rows, as few as are found, that take longer than others with at least as much of all."""
    if not OPERATORS[table.kind].ordered:
        return table
    rows = np.column_stack([table.shape[name] for name in OPERATORS[table.kind].ordered])
    shuffled = np.random.default_rng(0).permutation(len(table))
    off = np.zeros(len(table), dtype=np.bool_)
    for group in np.array_split(shuffled, -(-len(table) // _AT_ONCE)):
        off[group] = _out_of_order(rows[group], table.seconds[group])
    if not off.any():
        return table
    if repair and off.mean() <= _DISORDERLY:
        return _without(table, off, f"more than {_DISORDER:g} times off the order of sizes")
    remark = f"{off.sum():,} of {len(table):,} rows are more than {_DISORDER:g} times off the order of sizes"
    return replace(table, remarks=(*table.remarks, remark))


def _out_of_order(sizes: Array, seconds: Array) -> Mask:
    """Select rows, those with most conflicts first, without which none takes far longer than one nowhere smaller."""
    conflicts = np.array(
        [(sizes >= size).all(axis=1) & (took > _DISORDER * seconds) for size, took in zip(sizes, seconds, strict=True)]
    )
    conflicts |= conflicts.T
    number, off = conflicts.sum(axis=1), np.zeros(len(seconds), dtype=np.bool_)
    while number.any():
        worst = int(number.argmax())
        off[worst] = True
        number[conflicts[worst]] -= 1
        number[worst] = 0
        conflicts[:, worst] = False
    return off


def _share(table: Table, sheet: Sheet) -> Array:
    """Return the data sheet's shortest time over the measured one."""
    terms = _terms(table, sheet)
    shortest: Array = np.maximum(terms.flops / sheet.flops_per_s, terms.bytes / sheet.bytes_per_s)
    return shortest / table.seconds


def _one_unit(table: Table, sheet: Sheet) -> Table:
    deviation = _expected(table, sheet)
    far = np.abs(deviation - np.median(deviation)) > np.log(_UNITS)
    if far.mean() > MANY:
        raise UsageError(
            f"{table.key}: {far.sum():,} of {len(table):,} rows are more than {_UNITS:g} times off the others; are two "
            f"units of time mixed in {', '.join(table.files)}?"
        )
    return table


def _expected(table: Table, sheet: Sheet) -> Array:
    """Return log(measured / a plain guess from the data sheet): only its differences are meaningful."""
    operator = OPERATORS[table.kind]
    overhead_s = 0.9 * float(np.quantile(table.seconds, 0.01))
    guess = base_seconds(
        _terms(table, sheet),
        _SHEET_SHARE * sheet.flops_per_s,
        _SHEET_SHARE * sheet.bytes_per_s,
        overhead_s,
        operator.block_s,
        1 + operator.overlap,
        operator.ahead_s,
    )
    return np.log(table.seconds / guess)


def _off_neighbours(table: Table, deviation: Array) -> Mask:
    """Select rows whose deviation differs by more than log(8) from the median of the nearest rows in log shape."""
    off = np.zeros(len(table), dtype=np.bool_)
    if len(table) <= NEIGHBOURS:
        return off
    from scipy.spatial import cKDTree

    logs = np.column_stack([np.log2(np.maximum(x, 1e-9)) for x in table.shape.values()])
    spread = logs.std(axis=0)
    points = logs[:, spread > 0] / spread[spread > 0]
    suspects = np.flatnonzero(np.abs(deviation - np.median(deviation)) > np.log(OFF) / 2)
    if len(suspects):
        near = np.asarray(cKDTree(points).query(points[suspects], NEIGHBOURS + 1)[1])
        around = np.median(deviation[near[:, 1:]], axis=1)
        off[suspects] = np.abs(deviation[suspects] - around) > np.log(OFF)
    return off


def _terms(table: Table, sheet: Sheet) -> Terms:
    setting = Setting.of(sheet.processors, table.dtype, table.kv_dtype, sheet.chip)
    return OPERATORS[table.kind].terms(table.shape, setting)


def _without(table: Table, rows: Mask, why: str) -> Table:
    if not rows.any():
        return table
    left_out = {**table.left_out, why: table.left_out.get(why, 0) + int(rows.sum())}
    return replace(take(table, np.flatnonzero(~rows)), left_out=left_out)
