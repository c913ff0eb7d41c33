"""Step costs by a log of whole steps that an engine took: simtune/steps@1, as `simtune profile --engine` writes it.

    t = sum of c_i x_i, all c_i >= 0,   times exp(residual)

The x of a step are what its batch comes to: 1, its tokens m (verified drafts among them), m beyond 16 and beyond 128,
decodes, context tokens, chunks, pairs of a new token and one that it attends to, cached tokens that chunks read, and m
times all tokens read, for engines whose attention goes over the tokens of all requests under one mask. Which of them an
engine's time goes by the fit finds out: by non-negative least squares of the relative error. What is left is a Gaussian
process on its logarithm (`simtune.costs.residual`), which fades to nothing away from the steps measured.

The file is the log itself, fitted when it is read: a longer log is a better cost model. Of equal steps the median
counts for the shape of the fit. A load takes the sum of its steps, though, and some steps take longer than their like
for reasons that no batch shows: a batch that has just changed, a collection of garbage. So all times are scaled at the
end, those with prompt tokens and those without, until the fit adds up to what the log took, as Duan's smearing does
(Journal of the American Statistical Association 78, 1983).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np

from simtune.arrays import Array, Ints
from simtune.costs.calibration import TimedStep, read_steps
from simtune.costs.iteration import StepWork
from simtune.costs.predict import Basis
from simtune.costs.residual import CLIP, Process, cover, fit_process
from simtune.costs.ticks import to_ticks
from simtune.errors import Problem, SpecError

FEWEST = 12
"""Steps that differ and that a fit needs at least."""
HICCUP = 2.0
"""Times what is said of it: a step that took longer was held up, and is no part of what steps take."""
MOST = 250
"""Steps that the residual keeps; the base is fitted to all."""

_KNEES = (16, 128)
Chunks = Sequence[tuple[int, int]]
Key = tuple[int, int, tuple[tuple[int, int], ...], int]
"""Decodes, context tokens, chunks, draft tokens."""


class EngineSteps:
    """A cost model by a log of steps; see the module."""

    def __init__(self, steps: Sequence[TimedStep], name: str = "a log of steps") -> None:
        """Raises SpecError where there are too few steps that differ."""
        by_key: dict[Key, list[float]] = {}
        for step in steps:
            by_key.setdefault(_key(step.batch), []).append(step.seconds)
        if len(by_key) < FEWEST:
            message = f"holds {len(by_key)} steps that differ; at least {FEWEST} are needed"
            raise SpecError(Problem(name, message))
        self._keys = list(by_key)
        self._measured = {key: float(np.median(times)) for key, times in by_key.items()}
        seconds = np.array([self._measured[key] for key in self._keys])
        terms = _terms(self._keys)
        self._coefficients = _base(terms, seconds)
        self._residual = _residual(self._keys, np.log(seconds / (terms @ self._coefficients)))
        features = np.array([_aggregates(key) for key in self._keys])
        self._low, self._high = features.min(axis=0), features.max(axis=0)
        self._seconds: dict[Key, float] = {}
        self._scales = self._smeared(by_key)

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """One step, and nothing about the next."""
        return to_ticks(self.seconds(StepWork(num_decodes, context_tokens))), 0, 1

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Chunks, num_samples: int) -> int:
        """See `StepCosts.mixed`; how many are sampled makes no difference."""
        return to_ticks(self.seconds(StepWork(num_decodes, context_tokens, chunks)))

    def seconds(self, work: StepWork) -> float:
        """Of one step: what the fit says, also of one that was measured."""
        key = _key(work)
        known = self._seconds.get(key)
        if known is None:
            known = self._seconds[key] = float(self._unscaled([key])[0]) * self._scales.get(bool(key[2]), 1.0)
        return known

    def basis(self, num_decodes: int, context_tokens: int, chunks: Chunks) -> Basis:
        """Whether a step was measured, lies within what was, or outside."""
        key = _key(StepWork(num_decodes, context_tokens, chunks))
        if key in self._measured:
            return Basis.MEASURED
        x = np.array(_aggregates(key))
        return Basis.INTERPOLATED if ((self._low <= x) & (x <= self._high)).all() else Basis.EXTRAPOLATED

    @cached_property
    def log_sd(self) -> float:
        """Standard deviation of the log error of the steps it was fitted to, each as the others say it."""
        if self._residual is None:
            measured = np.array([self._measured[key] for key in self._keys])
            logs = np.log(measured / (_terms(self._keys) @ self._coefficients))
        else:
            logs, _ = self._residual.left_out()
        return float(np.quantile(np.abs(logs), 0.9)) / 1.645

    def _unscaled(self, keys: Sequence[Key]) -> Array:
        """Seconds of each step of equal ones in the middle."""
        times: Array = (_terms(keys) @ self._coefficients) * np.exp(self._correction(keys))
        return times

    def _smeared(self, by_key: dict[Key, list[float]]) -> dict[bool, float]:
        """What steps took over what is said of them, all together, of those with chunks and of those without."""
        sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
        for key, said in zip(self._keys, self._unscaled(self._keys).tolist(), strict=True):
            took = [seconds for seconds in by_key[key] if seconds < HICCUP * said]
            sums[bool(key[2])][0] += sum(took)
            sums[bool(key[2])][1] += said * len(took)
        return {chunks: took / said for chunks, (took, said) in sums.items() if said}

    def _correction(self, keys: Sequence[Key]) -> Array:
        if self._residual is None:
            return np.zeros(len(keys))
        return self._residual.mean(self._residual.standardised(_features(keys)))


class EngineRounds(EngineSteps):
    """The same of an engine that drafts: drafting is a part of the steps that were logged."""

    def round(
        self,
        num_decodes: int,
        verify_tokens: int,
        depth: int,
        context_tokens: int,
        chunks: Chunks = (),
        completing: int = 0,
    ) -> int:
        """See `RoundCosts.round`; the depth is that of the log, and how many prompts end makes no difference."""
        drafts = verify_tokens - num_decodes
        return to_ticks(self.seconds(StepWork(num_decodes, context_tokens, chunks, draft_tokens=drafts)))

    def rounds(self, num_decodes: int, verify_tokens: int, depth: int, computed: Sequence[int] | Ints) -> Sequence[int]:
        """See `RoundCosts.rounds`."""
        context = (int(tokens) + verify_tokens for tokens in computed)
        return list(accumulate(self.round(num_decodes, verify_tokens, depth, tokens) for tokens in context))


def engine_costs(steps: Sequence[TimedStep], name: str = "a log of steps") -> EngineSteps:
    """Fitted to a log, of an engine that drafts where a step of it verifies drafts. Raises SpecError where it is too
    short."""
    drafts = any(step.batch.draft_tokens for step in steps)
    return (EngineRounds if drafts else EngineSteps)(steps, name)


def read_engine_costs(path: Path) -> EngineSteps:
    """Fitted to the log in a file. Raises SpecError where it is none, or too short."""
    return engine_costs(read_steps(path).steps, str(path))


def _key(work: StepWork) -> Key:
    chunks = tuple((int(past), int(new)) for past, new in work.chunks)
    return work.num_decodes, work.context_tokens, chunks, work.draft_tokens


def _aggregates(key: Key) -> tuple[float, ...]:
    """Tokens, decodes, context tokens, chunks, pairs, cached tokens that chunks read."""
    decodes, context, chunks, drafts = key
    new = sum(tokens for _, tokens in chunks)
    pairs = sum(tokens * past + tokens * (tokens + 1) / 2 for past, tokens in chunks)
    return (
        float(decodes + drafts + new),
        float(decodes),
        float(context),
        float(len(chunks)),
        pairs,
        float(sum(p for p, _ in chunks)),
    )


def _terms(keys: Sequence[Key]) -> Array:
    """(steps, terms) of the base; none is negative."""
    m, decodes, context, chunks, pairs, past = np.array([_aggregates(key) for key in keys]).T
    new = np.array([sum(tokens for _, tokens in key[2]) for key in keys])
    beyond = [np.maximum(m - knee, 0) for knee in _KNEES]
    columns = [np.ones_like(m), m, *beyond, decodes, context, chunks, pairs, past, m * (context + past + new)]
    return np.column_stack(columns)


def _base(terms: Array, seconds: Array) -> Array:
    """Coefficients of at least 0 by which the terms come nearest to the times, in relative error."""
    from scipy.optimize import nnls

    size = np.maximum(terms.max(axis=0), 1e-300)
    fitted, _ = nnls(terms / size / seconds[:, None], np.ones(len(seconds)))
    if not fitted[0]:  # no step takes nothing, however small
        fitted[0] = 1e-3 * float(seconds.min())
    coefficients: Array = fitted / size
    return coefficients


def _features(keys: Sequence[Key]) -> dict[str, Array]:
    """What the residual goes by."""
    m, decodes, context, chunks, pairs, past = np.array([_aggregates(key) for key in keys]).T
    return {
        "tokens": np.log2(m),
        "decodes": np.log2(1 + decodes),
        "context": np.log2(1 + context / np.maximum(decodes, 1)),
        "chunks": np.log2(1 + chunks),
        "pairs": np.log2(1 + pairs),
        "past": np.log2(1 + past),
    }


def _residual(keys: Sequence[Key], z: Array) -> Process | None:
    by_name = _features(keys)
    z = np.clip(z, -CLIP, CLIP)
    if len(keys) > MOST:
        chosen = cover(by_name, MOST)
        by_name, z = {name: x[chosen] for name, x in by_name.items()}, z[chosen]
    return fit_process(by_name, z)
