"""Fit of a workload spec to ServeGen's tables: rates of clients in windows of time, and lengths of their requests.

The tables are those of alibaba/ServeGen (Xiang et al., NSDI 2026), all clients of a model in one: `RATES` from its
chunk-N-trace.csv, `LENGTHS` from its chunk-N-dataset.json.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.errors import Problem, SpecError, UsageError
from simtune.specs.input_files import csv_table, decoded, read_bytes, unpacked
from simtune.specs.workload import Piecewise, Quantiles, Segment, Workload
from simtune.workload.load import Agreement
from simtune.workload.requests import build_stream

RATES = ("client", "window_start_s", "rate_rps")
LENGTHS = ("client", "window_start_s", "field", "tokens", "prob")
FIELDS = {"input_tokens": "prompt", "output_tokens": "output"}
LEVELS = (*(i / 200 for i in range(200)), *(1 - 0.005 / 2**i for i in range(1, 12)), 1.0)
"""Levels of the quantiles, denser towards the end: few requests are long, and a line to the longest would lengthen
many."""
DRAWN = 8000
SEED = 0

WindowRates = dict[tuple[str, float], float]


class Pieces(NamedTuple):
    """Rows of both kinds of tables: requests/s by client and window; (client, window, tokens, share) by side."""

    rates: WindowRates
    lengths: dict[str, list[tuple[str, float, int, float]]]


class ServeGenLoad(NamedTuple):
    """A spec, its numbers beside those of the tables, and notes for the reader."""

    workload: Workload
    agreements: tuple[Agreement, ...]
    notes: tuple[str, ...]


def is_servegen_file(path: Path) -> bool:
    """True if the first line of a file names the columns of a ServeGen table; False if there is no file."""
    if not path.is_file() or not path.name.endswith((".csv", ".csv.gz")):
        return False
    header = decoded(path, unpacked(path, read_bytes(path)).partition(b"\n")[0]).strip().split(",")
    return set(RATES) <= set(header) or set(LENGTHS) <= set(header)


def read_tables(files: Sequence[Path]) -> Pieces:
    """Read tables. Raise SpecError with line and column if a value is invalid, UsageError if a file cannot be read."""
    pieces = Pieces({}, defaultdict(list))
    for path in files:
        header, rows, lines = csv_table(decoded(path, unpacked(path, read_bytes(path))), str(path))
        columns = RATES if set(RATES) <= set(header) else LENGTHS
        if not set(columns) <= set(header):
            absent = ", ".join(column for column in RATES if column not in header)
            raise SpecError(Problem(str(path), f"not a ServeGen table: column {absent} is missing", "", 1))
        at = [header.index(column) for column in columns]
        for row, line in zip(rows, lines, strict=True):
            _add(pieces, columns, [row[i] for i in at], str(path), line)
    return pieces


def _add(pieces: Pieces, columns: Sequence[str], cells: Sequence[str], file: str, line: int) -> None:
    def number(column: str) -> float:
        text = cells[columns.index(column)]
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise SpecError(Problem(file, f"must be a number of 0 or more, not {text!r}", column, line))
        return value

    client, window = cells[0], number("window_start_s")
    if columns is RATES:
        pieces.rates[client, window] = number("rate_rps")
        return
    side = FIELDS.get(cells[2])
    if side is None:
        raise SpecError(Problem(file, f"must be one of {', '.join(FIELDS)}, not {cells[2]!r}", "field", line))
    pieces.lengths[side].append((client, window, round(number("tokens")), number("prob")))


def fit_servegen(files: Sequence[Path], name: str) -> ServeGenLoad:
    """Return the load of all clients together: Poisson at the sum of their rates in each window, and the lengths of
    those whose lengths are known, each weighted by its requests in the windows of its lengths.

    Raises UsageError if one table is missing.
    """
    pieces = read_tables(files)
    file_names = " ".join(map(str, files))
    if not pieces.rates or len(pieces.lengths) < len(FIELDS):
        lacking = "rates" if not pieces.rates else "lengths (client, window_start_s, field, tokens, prob)"
        raise UsageError(f"{file_names}: without a table of {lacking} there is no load; name both")
    segments = _segments(pieces.rates)
    weights = {side: _weighted(rows, pieces.rates) for side, rows in pieces.lengths.items()}
    requests = sum(s.for_s * s.rate_rps for s in segments)
    workload = Workload(
        name=name,
        source=f"ServeGen (alibaba/ServeGen; Xiang et al., NSDI 2026): {file_names}",
        requests=max(1, min(DRAWN, round(requests))),
        arrivals=Piecewise(segments=segments),
        prompt=_quantiles(*weights["prompt"]),
        output=_quantiles(*weights["output"]),
    )
    clients = {client for client, _ in pieces.rates}
    clients_with_lengths = clients & {client for rows in pieces.lengths.values() for client, *_ in rows}
    notes = (
        f"read as tables of ServeGen: {len(clients)} clients, {len(segments)} windows",
        "not in a spec: how bursty each client is within a window; arrivals are Poisson there",
        *(
            [f"lengths are of {len(clients_with_lengths)} of {len(clients)} clients"]
            if len(clients_with_lengths) < len(clients)
            else []
        ),
    )
    return ServeGenLoad(workload, _agreements(workload, weights, segments), notes)


def _segments(rates: WindowRates) -> tuple[Segment, ...]:
    """Return windows as long as the shortest time between two of them; windows that no client has are pauses."""
    starts = sorted({window for _, window in rates})
    width = min((b - a for a, b in pairwise(starts)), default=600.0)
    sums = np.zeros(round((starts[-1] - starts[0]) / width) + 1)
    for (_, window), rate in rates.items():
        sums[round((window - starts[0]) / width)] += rate
    if not sums.any():
        raise UsageError("no client of these tables sends anything: all rates are 0")
    return tuple(Segment(for_s=width, rate_rps=float(rate)) for rate in sums)


def _weighted(
    rows: Sequence[tuple[str, float, int, float]], rates: WindowRates
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return token counts and the share of requests that have each."""
    of_client: dict[str, list[float]] = defaultdict(list)
    for client, window in sorted({(client, window) for client, window, *_ in rows}):
        of_client[client].append(window)
    sent: dict[tuple[str, float], float] = defaultdict(float)
    for (client, window), rate in rates.items():
        begun = [start for start in of_client.get(client, ()) if start <= window]
        if begun:
            sent[client, begun[-1]] += rate
    shares: dict[int, float] = defaultdict(float)
    for client, window, count, share in rows:
        shares[max(1, count)] += share * sent[client, window]
    tokens = np.array(sorted(shares), dtype=np.int64)
    weight = np.array([shares[t] for t in tokens.tolist()])
    if not weight.sum() > 0:
        raise UsageError("no client whose lengths are known sends anything in the windows that they are of")
    return tokens, weight / weight.sum()


def _quantiles(tokens: NDArray[np.int64], shares: NDArray[np.float64]) -> Quantiles:
    at = np.searchsorted(np.cumsum(shares), np.array(LEVELS) - 1e-12).clip(0, len(tokens) - 1)
    return Quantiles(levels=LEVELS, tokens=tuple(float(t) for t in tokens[at]))


def _agreements(
    workload: Workload,
    weights: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]],
    segments: Sequence[Segment],
) -> tuple[Agreement, ...]:
    """Return the numbers of the tables, beside those that the spec draws."""
    stream = build_stream(workload, None, requests=DRAWN, seed=SEED)
    arrivals = stream.arrival_s
    assert arrivals is not None
    first = min(len(segments), 1 + int(arrivals[-1] // segments[0].for_s))
    mean = sum(s.rate_rps for s in segments[:first]) / first
    rows = [Agreement(f"requests/s, first {first} windows", mean, stream.offered_rate_rps)]
    for side, (tokens, shares) in weights.items():
        tokens_drawn = getattr(stream, f"{side}_tokens")
        p99 = float(tokens[np.searchsorted(np.cumsum(shares), 0.99).clip(0, len(tokens) - 1)])
        rows.append(Agreement(f"{side} tokens, mean", float(tokens @ shares), float(tokens_drawn.mean())))
        rows.append(Agreement(f"{side} tokens, p99", p99, float(np.quantile(tokens_drawn, 0.99))))
    return tuple(rows)
