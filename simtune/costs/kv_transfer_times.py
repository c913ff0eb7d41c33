"""Time until a decode instance continues a prompt that another instance has computed, as measured on two engines.

    t = setup + bytes / rate,   both >= 0

by non-negative least squares of the relative error, of the median of equal sizes: the median removes transfers that
other work on the machine delayed. The time is that from the decode engine's receipt of the request to its first token,
which vLLM samples anew from the received cache; so the step that samples it is a part of `setup`.

A log is JSON lines: a header, then one line for each transfer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from simtune.errors import Problem, SpecError
from simtune.specs.base import LONGEST_S
from simtune.specs.input_files import json_lines, read_packed_text
from simtune.specs.schema_versions import schema_problem

SCHEMA = "simtune/transfers@1"
FEWEST = 3
"""Least number of sizes that a fit needs."""
FASTEST = 1e15
"""Bytes per second of a link whose times do not grow with the size."""


class MeasuredTransfer(NamedTuple):
    """Transfer of the KV cache of one prompt."""

    bytes: int
    seconds: float


class TransferFit(NamedTuple):
    """Time of transfers."""

    setup_s: float
    bytes_per_s: float

    def seconds(self, size: int) -> float:
        """Seconds of a transfer of `size` bytes."""
        return self.setup_s + size / self.bytes_per_s


def fit_transfers(transfers: Sequence[MeasuredTransfer], name: str = "a log of transfers") -> TransferFit:
    """Fit the times of transfers. Raises SpecError if there are too few sizes."""
    from scipy.optimize import nnls

    by_size: dict[int, list[float]] = {}
    for size, seconds in transfers:
        by_size.setdefault(size, []).append(seconds)
    if len(by_size) < FEWEST:
        raise SpecError(Problem(name, f"holds transfers of {len(by_size)} sizes; at least {FEWEST} are needed"))
    times = np.array([median(seconds) for seconds in by_size.values()])
    sizes = np.array(list(by_size), dtype=np.float64)
    columns = np.column_stack([1 / times, sizes / sizes.max() / times])
    (setup_s, of_largest_s), _ = nnls(columns, np.ones(len(times)))
    return TransferFit(float(setup_s), min(FASTEST, float(sizes.max() / max(of_largest_s, 1e-30))))


def write_transfers(transfers: Iterable[MeasuredTransfer], **identity: str) -> str:
    """Return the text of a log; `identity` states its model and engine."""
    lines = [{"schema": SCHEMA, **identity}, *(transfer._asdict() for transfer in transfers)]
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


def read_transfers(path: Path) -> list[MeasuredTransfer]:
    """Read a log. Raises SpecError naming the line that is not of such a log."""
    lines = json_lines(read_packed_text(path), str(path))
    number, header = next(lines, (1, {}))
    if header.get("schema") != SCHEMA:
        message = schema_problem(header.get("schema"), SCHEMA, "measure the transfers again")
        raise SpecError(Problem(str(path), message, "schema", number))
    return [_transfer(path, line, data) for line, data in lines]


def _transfer(path: Path, line: int, data: dict[str, object]) -> MeasuredTransfer:
    size, seconds = data.get("bytes"), data.get("seconds")
    if type(size) is int and size > 0 and isinstance(seconds, (int, float)) and 0 < seconds <= LONGEST_S:
        return MeasuredTransfer(size, float(seconds))
    message = f"must have bytes, a whole number above 0, and seconds, above 0 and up to {LONGEST_S:g}"
    raise SpecError(Problem(str(path), message, line=line))


def read_transfer_fit(path: Path) -> TransferFit:
    """Fit the log in a file. Raises SpecError if it is not a log, or too short."""
    return fit_transfers(read_transfers(path), str(path))
