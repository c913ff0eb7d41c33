"""Draws that depend on a seed, a purpose and a number alone: uniforms, lengths, and values such as pauses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from simtune.arrays import Array, Ints
from simtune.errors import UsageError
from simtune.specs.tower import MediaKind
from simtune.specs.traces import Trace
from simtune.specs.workload import (
    FixedLength,
    Lengths,
    Lognormal,
    LognormalSpread,
    Quantiles,
    QuantileSpread,
    TraceLengths,
)

# Keys of the random streams: changing one changes every result.
ARRIVALS, PROMPT, OUTPUT, CLASS, GROUP, PREDICTION, TURNS, PAUSE, FORK, SUB_TURNS = range(10)
ADAPTER = 20


class ItemStreams(NamedTuple):
    """Keys of the random streams of one item: its size among those of the load, its sides, its seconds."""

    size: int
    width: int
    height: int
    seconds: int


class MediaStreams(NamedTuple):
    """Keys of the random streams of one kind of media."""

    share: int
    number: int
    repeats: int
    in_set: int
    new: ItemStreams
    of_set: ItemStreams


MEDIA: Mapping[MediaKind, MediaStreams] = {
    # images have no seconds: keys of streams that are never drawn
    "image": MediaStreams(10, 11, 12, 13, ItemStreams(14, 15, 16, -1), ItemStreams(17, 18, 19, -1)),
    "video": MediaStreams(21, 22, 23, 24, ItemStreams(25, 26, 27, 28), ItemStreams(29, 30, 31, 32)),
    "audio": MediaStreams(33, 34, 35, 36, ItemStreams(-1, -1, -1, 37), ItemStreams(-1, -1, -1, 38)),
}


class Span(NamedTuple):
    """Range of requests by number, from `first` up to but not including `end`."""

    first: int
    end: int
    unit: float = 0.0
    """Arrival of the request before, at rate 1."""

    @property
    def numbers(self) -> Ints:
        """Numbers of the requests."""
        return np.arange(self.first, self.end)


def uniforms(seed: int, purpose: int, requests: int) -> Array:
    """Return one uniform in [0, 1) per request: draw i of the stream (seed, purpose)."""
    return drawn(seed, purpose, Span(0, requests))


def drawn(seed: int, purpose: int, span: Span) -> Array:
    """Return the uniforms of a range of requests."""
    bits = np.random.Philox(np.random.SeedSequence((seed, purpose)))
    assert span.first % 4 == 0, "a step of Philox makes four uniforms"
    bits.advance(span.first // 4)
    return np.random.Generator(bits).random(span.end - span.first)


def sampled_lengths(
    by_class: Sequence[Lengths], class_index: Ints, uniforms: Array, trace: Trace | None, side: str, span: Span
) -> Ints:
    """Return the tokens of requests, each by the distribution of its class, at levels in [0, 1)."""
    if all(lengths is by_class[0] for lengths in by_class):
        return _sample(by_class[0], uniforms, trace, side, span.first)
    samples = np.stack([_sample(lengths, uniforms, trace, side, span.first) for lengths in by_class])
    tokens: Ints = samples[class_index, np.arange(len(uniforms))]
    return tokens


def lengths_at(lengths: Lengths, levels: Array) -> Ints:
    """Return the quantiles of a distribution of lengths that needs no trace, at levels in [0, 1)."""
    return _sample(lengths, levels, None, "prompt")


def normal_quantiles(levels: Array) -> Array:
    """Return quantiles of the standard normal distribution at levels in [0, 1).

    Not by scipy.special, whose import takes longer than a short simulation.
    """
    quantile = NormalDist().inv_cdf
    return np.array([quantile(level) if level > 0 else -math.inf for level in levels.tolist()])


def _sample(lengths: Lengths, uniforms: Array, trace: Trace | None, side: str, first: int = 0) -> Ints:
    match lengths:
        case FixedLength(tokens=tokens):
            return np.full(len(uniforms), tokens, dtype=np.int64)
        case Lognormal(mean_tokens=mean, sigma=sigma, max_tokens=most):
            log_tokens = math.log(mean) - sigma**2 / 2 + sigma * normal_quantiles(uniforms)
            tokens_drawn = np.ceil(np.exp(np.minimum(log_tokens, math.log(most))))
            return np.clip(tokens_drawn, 1, most).astype(np.int64)
        case Quantiles(levels=levels, tokens=quantiles):
            return np.rint(np.interp(uniforms, levels, quantiles)).astype(np.int64)
        case TraceLengths():
            column = needed_trace(trace).prompt_tokens if side == "prompt" else needed_trace(trace).output_tokens
            return column[np.arange(first, first + len(uniforms)) % len(column)]


def needed_trace(trace: Trace | None) -> Trace:
    """Return the trace. Raise UsageError if there is none."""
    if trace is None:
        raise UsageError("the workload replays a trace (kind: trace), but no trace was read for it")
    return trace


def spread_values(spread: float | LognormalSpread | QuantileSpread, levels: Array) -> Array:
    """Return a fixed value for each level, or the quantiles of a distribution at levels in [0, 1)."""
    match spread:
        case LognormalSpread(mean=mean, sigma=sigma, max=most):
            logs = math.log(mean) - sigma**2 / 2 + sigma * normal_quantiles(levels)
            return np.exp(np.minimum(logs, math.log(most)))
        case QuantileSpread(levels=at, values=values):
            return np.interp(levels, at, values)
        case _:
            return np.full(len(levels), float(spread))
