"""Description of a load: rates over time, burstiness, lengths, re-use; and the distance between two loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from pydantic import Field

from simtune.arrays import Array, Ints
from simtune.specs.base import Count, NonNegative, Record, Seq, Share, Whole

BINS_OF_TIME = 48
BINS_OF_LENGTH = 40
LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class LengthFacts(Record):
    """A distribution of lengths in tokens, with a histogram over logarithmic bins."""

    mean: NonNegative
    p50: NonNegative
    p90: NonNegative
    p99: NonNegative
    max: NonNegative
    edges: Seq[float] = Field(description="tokens, one more than counts")
    counts: Seq[Whole]


class LoadFacts(Record):
    """Facts of a load: requests, rates and lengths."""

    requests: Count
    span_s: NonNegative | None = Field(description="from the first to the last arrival; null in a closed loop")
    rate_rps: NonNegative | None
    users: Whole | None = Field(description="of a closed loop")
    max_in_flight: Count | None = Field(
        None, description="requests that the client has under way at most; rates are then those at which they are due"
    )
    peak_rps: NonNegative | None = Field(description="largest of rates_rps")
    gap_cv: NonNegative | None = Field(description="standard deviation over mean of the gaps; 1 for Poisson arrivals")
    bin_s: NonNegative | None = Field(description="width of a bin of rates_rps")
    rates_rps: Seq[NonNegative] = Field(description="arrivals per second over time")
    prompt_tokens: LengthFacts
    output_tokens: LengthFacts
    shared_prompt_share: Share | None = Field(
        description="of all prompt tokens those that an endless prefix cache would find; null if no blocks are named"
    )
    sessions: Whole | None
    arrivals: Count | None = Field(
        None, description="families or sessions that arrive, if requests follow one another: rates and gaps are theirs"
    )


class LoadColumns(Protocol):
    """Columns of requests, from a trace or from a stream drawn from a spec."""

    @property
    def arrivals_s(self) -> Array | None:
        """Arrival times of requests, families or sessions in order, in seconds; None if they are not known or follow
        from answers."""

    @property
    def prompt_tokens(self) -> Ints:
        """Prompt tokens of every request."""

    @property
    def output_tokens(self) -> Ints:
        """Output tokens of every request."""

    @property
    def hash_ids(self) -> Sequence[tuple[int, ...]] | None:
        """Names of the blocks of every prompt; None if they are not known."""

    @property
    def block_tokens(self) -> int:
        """Tokens per named block."""

    @property
    def session(self) -> Ints | None:
        """Conversation of each request; None if not known."""


def load_facts(requests: LoadColumns, users: int | None = None, due_s: Array | None = None) -> LoadFacts:
    """Return the facts of recorded or simulated requests; `users` is the number of users of a closed loop, or with
    `due_s`, the times at which requests are due, the most requests under way."""
    count, session = len(requests.prompt_tokens), requests.session
    arrival_s = requests.arrivals_s if due_s is None else due_s
    span_s = None if arrival_s is None else float(arrival_s[-1] - arrival_s[0])
    rates, bin_s = rates_over_time(arrival_s) if arrival_s is not None and span_s else (np.zeros(0), None)
    gaps = np.diff(arrival_s) if arrival_s is not None and span_s else np.zeros(0)
    families = _arrivals(arrival_s, count)
    return LoadFacts(
        requests=count,
        span_s=span_s,
        rate_rps=None if arrival_s is None or not span_s else (len(arrival_s) - 1) / span_s,
        users=users if due_s is None else None,
        max_in_flight=None if due_s is None else users,
        peak_rps=float(rates.max()) if len(rates) else None,
        gap_cv=float(gaps.std() / gaps.mean()) if len(gaps) > 1 else None,
        bin_s=bin_s,
        rates_rps=tuple(rates.tolist()),
        prompt_tokens=length_facts(requests.prompt_tokens),
        output_tokens=length_facts(requests.output_tokens),
        shared_prompt_share=shared_share(requests.hash_ids, requests.block_tokens, requests.prompt_tokens),
        sessions=None if session is None else len(np.unique(session)),
        **families,
    )


def _arrivals(arrival_s: Array | None, requests: int) -> dict[str, int]:
    """Return the number of arrivals as a field, if it is not that of requests."""
    return {} if arrival_s is None or len(arrival_s) == requests else {"arrivals": len(arrival_s)}


def rates_over_time(arrival_s: Array, bins: int = BINS_OF_TIME) -> tuple[Array, float]:
    """Return arrivals per second in equal bins from the first to the last arrival, and the width of a bin in seconds.

    There are at most as many bins as leave eight requests to each on average.
    """
    bins = max(1, min(bins, len(arrival_s) // 8))
    counts, edges = np.histogram(arrival_s, bins=bins)
    width = float(edges[1] - edges[0])
    return counts / width, width


def length_facts(tokens: Ints) -> LengthFacts:
    """Return the facts of a column of lengths."""
    low, high = max(1, int(tokens.min())), max(int(tokens.max()), 2)
    edges = np.unique(np.rint(np.geomspace(low, high + 1, BINS_OF_LENGTH + 1)))
    counts, _ = np.histogram(tokens, bins=edges)
    at = {name: float(np.quantile(tokens, level)) for name, level in LEVELS.items()}
    return LengthFacts(
        mean=float(tokens.mean()),
        **at,
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
    )


def shared_share(hash_ids: Sequence[tuple[int, ...]] | None, block_tokens: int, prompt_tokens: Ints) -> float | None:
    """Return the share of all prompt tokens that lie in leading blocks of an earlier prompt; None if blocks are not
    named."""
    if hash_ids is None:
        return None
    known_blocks: set[int] = set()
    shared = 0
    for row in hash_ids:
        for block in row:
            if block not in known_blocks:
                break
            shared += 1
        known_blocks.update(row)
    return min(1.0, shared * block_tokens / float(prompt_tokens.sum()))


class Agreement(NamedTuple):
    """Number of a load, as recorded and as drawn from the spec."""

    what: str
    recorded: float | None
    drawn: float | None


def dispersion(arrival_s: Array, window_s: float) -> float | None:
    """Return variance over mean of the arrivals in windows of this length: 1 for Poisson arrivals at one rate, 0 for a
    clock.

    None if there are too few windows. They begin half a mean gap before the first arrival, so that those of a clock
    do not lie on their ends.
    """
    span_s = float(arrival_s[-1] - arrival_s[0])
    windows = int(span_s / window_s)
    if windows < 8:
        return None
    since_s = arrival_s - arrival_s[0] + span_s / (len(arrival_s) - 1) / 2
    counts, _ = np.histogram(since_s, bins=windows, range=(0.0, windows * window_s))
    mean = float(counts.mean())
    return float(counts.var() / mean) if mean > 0 else None


def kolmogorov_distance(a: Array | Ints, b: Array | Ints) -> float:
    """Return the largest difference of two empirical distributions, between 0 and 1."""
    points = np.sort(np.concatenate([a, b]))
    below = [np.searchsorted(np.sort(x), points, side="right") / len(x) for x in (a, b)]
    return float(np.abs(below[0] - below[1]).max())
