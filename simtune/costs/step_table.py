"""Step costs from a file: a table of whole engine steps that were measured.

A row is a step: `decodes` sequences that decode and read `context_tokens` tokens of KV in all, chunks of
`prefill_tokens` prompt tokens in all after `past_tokens` cached ones, and the time it took, in a column `seconds`,
`milliseconds` or `microseconds`. Absent columns are taken as zero, except the first two and the time. CSV, plain or
gzipped, or Parquet. Tables of single operators are for `simtune fit`.

A step that is a row gets the time of the row; of equal rows the median counts. Between rows time never falls with any
of the four numbers. Among the functions that pass through the rows, never fall, and grow nowhere faster than the rows
do, the middle between the largest and the smallest is taken (McShane's and Whitney's extension of a Lipschitz function,
with a distance that counts only the numbers that a step has more of):

    low(x) = max over rows of t - K d(row, x)    high(x) = min over rows of t + K d(x, row)    t(x) = (low + high) / 2

d(x, y) is the seconds of all that x has more of than y, by a linear model of the rows, fitted with slopes of at least
0. Rows that fall where they ought to rise, by noise, count between rows as the middle of the longest before and the
shortest after them, and as smooth as nearly all pairs of them are. Outside the table the linear model continues.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np

from simtune.arrays import Array
from simtune.costs.predict import Basis
from simtune.costs.protocol import ChunkList
from simtune.costs.tables.common import Columns, read_csv, read_parquet
from simtune.costs.ticks import to_ticks
from simtune.errors import Problem, SpecError, UsageError

COLUMNS = ("decodes", "context_tokens", "prefill_tokens", "past_tokens")
REQUIRED = COLUMNS[:2]
UNITS = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6}

LONGEST_S = 60.0
"""Upper limit of the shortest step of a table: above it the time is in another unit than its column states."""

MOST_ROWS = 2000
"""Rows that are interpolated between: of more, evenly chosen ones. All rows are returned as they are."""

_FEWEST = 2
# share of the span of all rows, the least slope of a number, so that none is free
_LEAST_SLOPE = 1e-3
_NEARLY_ALL = 0.95  # of pairs of rows
_NEAR = 1e-12  # seconds
_BLOCK = 256  # rows whose distances to all others are held at a time

StepKey = tuple[int, int, int, int]


class StepTable:
    """A cost model by a table of whole steps; see the module. `rows` (n, 4) are in the order of `COLUMNS`."""

    def __init__(self, rows: Array, seconds: Array, name: str = "a table of steps") -> None:
        self._name = name
        distinct, row_of = np.unique(rows, axis=0, return_inverse=True)
        row_of = row_of.ravel()
        times = np.array([np.median(seconds[row_of == i]) for i in range(len(distinct))])
        self._measured: dict[StepKey, float] = {
            (int(b), int(c), int(p), int(past)): float(t) for (b, c, p, past), t in zip(distinct, times, strict=True)
        }
        chosen = np.unique(np.linspace(0, len(distinct) - 1, min(MOST_ROWS, len(distinct))).round().astype(int))
        self._rows, self._times = distinct[chosen], times[chosen]
        self._low, self._high = distinct.min(axis=0), distinct.max(axis=0)
        self._seconds: dict[StepKey, float] = {}

    @classmethod
    def read(cls, path: Path) -> StepTable:
        """Read a table from its file.

        Raises SpecError naming every column that is missing, and the line of the first cell of each that is not valid;
        UsageError if there is no such file.
        """
        if not path.exists():
            raise UsageError(f"{path}: no such file; give a table of whole steps, CSV or Parquet")
        columns = read_parquet(path) if path.suffix == ".parquet" else read_csv(path)
        unit = _unit(columns)
        columns.require(*REQUIRED)
        present = [*(name for name in COLUMNS if name in columns.names), unit]
        by_name = {name: columns.numbers(name) for name in present}
        problems = [p for name, values in by_name.items() if (p := _impossible(columns, name, values)) is not None]
        if problems:
            raise SpecError(problems)
        zero = np.zeros(len(columns))
        rows = np.column_stack([by_name.get(name, zero) for name in COLUMNS])
        _check_steps(columns, rows, UNITS[unit] * by_name[unit], unit)
        return cls(rows, UNITS[unit] * by_name[unit], path.name)

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """See `StepCosts.decode`; the step's time is given, and nothing about the next step."""
        return to_ticks(self.seconds(num_decodes, context_tokens, ())), 0, 1

    def mixed(self, num_decodes: int, context_tokens: int, chunks: ChunkList, num_samples: int) -> int:
        """See `StepCosts.mixed`; the number of samples makes no difference."""
        return to_ticks(self.seconds(num_decodes, context_tokens, chunks))

    def seconds(self, num_decodes: int, context_tokens: int, chunks: ChunkList) -> float:
        """Seconds of one step. Raises UsageError if the step has decodes or prompt tokens and no row of the table has
        any."""
        key = _key(num_decodes, context_tokens, chunks)
        step_s = self._measured.get(key) or self._seconds.get(key)
        if step_s is None:
            self._check_known(key)
            step_s = self._seconds[key] = self._between(np.array(key, dtype=np.float64))
        return step_s

    def basis(self, num_decodes: int, context_tokens: int, chunks: ChunkList) -> Basis:
        """Return the basis of a step: a row of the table, between rows, or beyond all rows in some way."""
        key = _key(num_decodes, context_tokens, chunks)
        if key in self._measured:
            return Basis.MEASURED
        x = np.array(key)
        more, less = (self._rows >= x).all(axis=1).any(), (self._rows <= x).all(axis=1).any()
        return Basis.INTERPOLATED if more and less else Basis.EXTRAPOLATED

    @cached_property
    def log_sd(self) -> float:
        """Standard deviation of the log error between rows, scaled so that 1.645 of it hold 90 %.

        Every row is predicted from the others with the slopes of all.
        """
        logs = []
        for i in np.unique(np.linspace(0, len(self._rows) - 1, min(200, len(self._rows))).round().astype(int)):
            without_row = np.arange(len(self._rows)) != i
            logs.append(np.log(self._middle(self._features(self._rows[i]), without_row) / self._times[i]))
        return float(np.quantile(np.abs(logs), 0.9)) / 1.645

    def _check_known(self, key: StepKey) -> None:
        lacking = [COLUMNS[i] for i in (0, 2) if key[i] and not self._high[i]]
        if lacking:
            raise UsageError(
                f"{self._name}: no row has {' or '.join(lacking)} above 0, and the simulated plan runs steps with "
                f"{key[0]} decodes and {key[2]} prompt tokens; add rows of such steps"
            )

    def _between(self, x: Array) -> float:
        within = np.clip(x, self._low, self._high)
        seconds = self._middle(self._features(within))
        return float(seconds + self._slopes @ (self._features(x) - self._features(within)).clip(0))

    def _middle(self, x: Array, rows: Array | slice = slice(None)) -> float:
        points, times = self._points[rows], self._monotone[rows]
        low = (times - self._steepest * ((points - x).clip(0) @ self._slopes)).max()
        high = (times + self._steepest * ((x - points).clip(0) @ self._slopes)).min()
        return float(low + high) / 2 if low > 0 else float(high) / 2

    @staticmethod
    def _features(rows: Array) -> Array:
        """Return the four numbers, and the pairs of a new token and one that it attends to; none falls with any of
        them."""
        new, past = rows[..., 2], rows[..., 3]
        features: Array = np.concatenate([rows, (new * (past + new / 2))[..., None]], axis=-1)
        return features

    @cached_property
    def _points(self) -> Array:
        return self._features(self._rows)

    @cached_property
    def _slopes(self) -> Array:
        """Seconds for one more of each feature, by a linear model with slopes of at least nearly 0."""
        from scipy.optimize import nnls

        size = np.maximum(np.ptp(self._points, axis=0), 1.0)
        system = np.column_stack([np.ones(len(self._points)), self._points / size])
        fitted, _ = nnls(system / self._times[:, None], np.ones(len(system)))
        least = _LEAST_SLOPE * max(float(np.ptp(self._times)), float(self._times.min()))
        slopes: Array = np.maximum(fitted[1:], least) / size
        return slopes

    @cached_property
    def _monotone(self) -> Array:
        """Times of the rows, smoothed so that none falls."""
        middle: Array = np.empty_like(self._times)
        for i, row in enumerate(self._rows):
            before, after = (self._rows <= row).all(axis=1), (self._rows >= row).all(axis=1)
            middle[i] = (self._times[before].max() + self._times[after].min()) / 2
        return middle

    @cached_property
    def _steepest(self) -> float:
        """Factor by which all pairs of rows grow faster than the linear model, or nearly all pairs if some rows fall:
        then noise alone is steeper between neighbours."""
        steepness = [np.ones(1)]
        for begin in range(0, len(self._points), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            apart: Array = (self._points[block, None, :] - self._points[None, :, :]).clip(0) @ self._slopes
            longer = self._monotone[block, None] - self._monotone[None, :]
            grows = longer > 0
            steepness.append(longer[grows] / np.maximum(apart[grows], _NEAR))
        share = 1.0 if np.array_equal(self._monotone, self._times) else _NEARLY_ALL
        return float(max(1.0, np.quantile(np.concatenate(steepness), share)))


def _key(num_decodes: int, context_tokens: int, chunks: ChunkList) -> StepKey:
    return num_decodes, context_tokens, sum(new for _, new in chunks), sum(past for past, _ in chunks)


def _unit(columns: Columns) -> str:
    """Return the column that has the time. Raises SpecError if there is none, or several."""
    time_columns = [unit for unit in UNITS if unit in columns.names]
    if len(time_columns) != 1:
        problem = f"{' and '.join(time_columns)} are both present" if time_columns else "column is missing"
        message = f"{problem}; give the time of a step in one column: {', '.join(UNITS)}"
        raise SpecError(Problem(str(columns.path), message, time_columns[-1] if time_columns else "seconds", 1))
    return time_columns[0]


def _impossible(columns: Columns, name: str, values: Array) -> Problem | None:
    """Return the first cell of a column that is not valid; None if all are."""
    time = name in UNITS
    wrong = ~np.isfinite(values) | (values <= 0 if time else (values < 0) | (values != np.rint(values)))
    if not wrong.any():
        return None
    at = int(wrong.argmax())
    rule = "must be a time above 0" if time else "must be a whole number of at least 0"
    cell = columns.cells(name)[at]
    return Problem(str(columns.path), f"{cell!r}: {rule}; correct or remove the row", name, columns.line(at))


def _check_steps(columns: Columns, rows: Array, seconds: Array, unit: str) -> None:
    """Raise SpecError if rows are too few, a step does nothing, or the time is in another unit."""
    file = str(columns.path)
    if len(rows) < _FEWEST:
        raise SpecError(Problem(file, f"has {len(rows)} rows; at least {_FEWEST} steps are needed"))
    idle = (rows[:, 0] == 0) & (rows[:, 2] == 0)
    lonely = (rows[:, 0] == 0) & (rows[:, 1] > 0)
    for wrong, key, message in (
        (idle, "decodes", "the step neither decodes nor prefills; leave the row out"),
        (
            lonely,
            "context_tokens",
            "is what decodes read, and there are none; cached tokens of prompts are past_tokens",
        ),
    ):
        if wrong.any():
            raise SpecError(Problem(file, message, key, columns.line(int(wrong.argmax()))))
    if seconds.min() > LONGEST_S:
        message = (
            f"the shortest step takes {seconds.min():,.0f} s; is the time in another unit? Name the column by it: "
        )
        raise SpecError(Problem(file, message + ", ".join(UNITS), unit))
