"""Step costs from a log of whole steps that an engine ran: simtune/steps@1, as `simtune profile --engine` writes it.

    t = sum of c_i x_i, all c_i >= 0,   times exp(residual)

The x of a step follow from its batch: 1, its tokens m (verified drafts among them), m beyond 16 and beyond 128,
decodes, context tokens, chunks, pairs of a new token and one that it attends to, cached tokens that chunks read, and m
times all tokens read, for engines whose attention covers the tokens of all requests under one mask. The fit selects the
terms that an engine's time depends on: by non-negative least squares of the relative error. The residual is a Gaussian
process on its logarithm (`simtune.costs.residual`), which fades to nothing away from the steps measured.

The file is the log itself, fitted when it is read: a longer log is a better cost model. Of equal steps the median
counts for the shape of the fit. A load takes the sum of its steps, though, and some steps take longer than similar ones
for reasons that no batch shows: a batch that has just changed, a garbage collection. So all times are scaled at the
end, those with prompt tokens and those without, until the fit adds up to the total of the log, as Duan's smearing does
(Journal of the American Statistical Association 78, 1983).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate
from math import exp
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from simtune.arrays import Array, Ints
from simtune.costs.beyond import GROWTH
from simtune.costs.calibration import TimedStep, read_steps
from simtune.costs.iteration import StepWork
from simtune.costs.predict import OUTSIDE, Z90, Basis, octaves
from simtune.costs.protocol import ChunkList
from simtune.costs.residual import CLIP, Process, cover, fit_process
from simtune.costs.ticks import to_ticks
from simtune.errors import Problem, SpecError

FEWEST = 12
"""Least number of different steps that a fit needs."""
HICCUP = 2.0
"""Factor over the predicted time above which a step was held up, and does not count for the scales."""
MOST = 250
"""Steps that the residual keeps as points; the base is fitted to all."""

_KNEES = (16, 128)
_FOLDS = 5
_SIZES = (0, 2, 4)
"""Tokens, context and pairs among the aggregates: the larger half of each is left out, to see how far off a fit is
beyond its log."""
BatchKey = tuple[int, int, tuple[tuple[int, int], ...], int]
"""Decodes, context tokens, chunks, draft tokens."""


class LogErrors(NamedTuple):
    """Log errors of a fit on steps that it did not see: standard deviations, of which 1.645 hold 90 %."""

    inside: dict[bool, float]
    """Error of steps among those measured, by whether they have chunks."""
    beyond: float
    """Error of steps larger than those measured, an octave beyond or less."""


class EngineSteps:
    """A cost model by a log of steps; see the module."""

    def __init__(self, steps: Sequence[TimedStep], name: str = "a log of steps") -> None:
        """Fit the steps. Raises SpecError if too few steps differ."""
        by_key: dict[BatchKey, list[float]] = {}
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
        self._seconds: dict[BatchKey, float] = {}
        self._scales = self._smeared(by_key)
        self._off: dict[bool, float] = {}

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """See `StepCosts.decode`; the step's time is given, and nothing about the next step."""
        return to_ticks(self.seconds(StepWork(num_decodes, context_tokens))), 0, 1

    def mixed(self, num_decodes: int, context_tokens: int, chunks: ChunkList, num_samples: int) -> int:
        """See `StepCosts.mixed`; the number of samples makes no difference."""
        return to_ticks(self.seconds(StepWork(num_decodes, context_tokens, chunks)))

    def seconds(self, work: StepWork) -> float:
        """Seconds of one step by the fit, also of a step that was measured."""
        key = _key(work)
        step_s = self._seconds.get(key)
        if step_s is None:
            step_s = float(self._unscaled([key])[0]) * self._scales.get(bool(key[2]), 1.0)
            if off := self._off.get(bool(key[2])):
                step_s *= exp(off * self._log_sd_of(key))
            self._seconds[key] = step_s
        return step_s

    def in_world(self, decodes: float, prompts: float) -> Self:
        """Return the costs in a world in which steps without chunks, and those with, are off by these numbers of
        standard deviations."""
        world = copy(self)
        world._seconds, world._off = {}, {False: decodes, True: prompts}
        world.errors = self.errors  # Computed once for all worlds.
        return world

    def _log_sd_of(self, key: BatchKey) -> float:
        """Return the standard deviation of the log error of a step, wider the farther it is beyond those measured."""
        inside, x = self.errors.inside[bool(key[2])], np.array(_aggregates(key))
        beyond = float(octaves(x, self._high).max())
        return inside if not beyond else max(inside, self.errors.beyond) * (1 + beyond) ** GROWTH

    @cached_property
    def errors(self) -> LogErrors:
        """Errors on steps left out of the fit: each fifth of the log, and its largest steps; those of all steps if the
        log has too few of a kind."""
        unfitted = self._held_out()
        typical = self.log_sd if unfitted is None else _log_sd(unfitted[1])
        chunks = np.array([bool(key[2]) for key in self._keys])
        inside = {
            kind: _log_sd(unfitted[1][chunks[unfitted[0]] == kind])
            if unfitted is not None and (chunks[unfitted[0]] == kind).sum() >= FEWEST
            else typical
            for kind in (True, False)
        }
        far = self._beyond()
        return LogErrors(inside, max(typical, OUTSIDE * typical if far is None else far))

    def _held_out(self) -> tuple[Ints, Array] | None:
        """Return steps, and the log errors of a fit of the others; None if these are too few."""
        order = np.random.default_rng(0).permutation(len(self._keys))
        folds = [self._without(order[fold::_FOLDS]) for fold in range(_FOLDS)]
        if any(logs is None for logs in folds):
            return None
        rows = np.concatenate([order[fold::_FOLDS] for fold in range(_FOLDS)])
        return rows, np.concatenate([logs for logs in folds if logs is not None])

    def _beyond(self) -> float | None:
        """Return the standard deviation of log errors on the larger half of the steps by a fit of the others, reduced
        to steps just beyond it: of tokens, of context or of pairs, whichever is farthest off; None if there are too few
        steps."""
        x = np.array([_aggregates(key) for key in self._keys])
        log_sds = []
        for feature in _SIZES:
            larger = x[:, feature] > np.median(x[:, feature])
            logs = self._without(np.flatnonzero(larger)) if larger.sum() >= FEWEST else None
            if logs is not None:
                beyond = octaves(x[larger, feature], x[~larger, feature].max())
                log_sds.append(_log_sd(logs / (1 + beyond) ** GROWTH))
        return max(log_sds, default=None)

    def _without(self, rows: Ints) -> Array | None:
        """Return log(measured / predicted) of some steps by a fit of all others; None if those are too few."""
        remaining = [self._keys[row] for row in np.setdiff1d(np.arange(len(self._keys)), rows)]
        if len(remaining) < FEWEST:
            return None
        steps = [TimedStep(_work(key), self._measured[key]) for key in remaining]
        fit, chosen = EngineSteps(steps), [self._keys[row] for row in rows]
        logs: Array = np.log([self._measured[key] for key in chosen]) - np.log(fit._unscaled(chosen))
        return logs

    def basis(self, num_decodes: int, context_tokens: int, chunks: ChunkList) -> Basis:
        """Return the basis of a step: measured, within the measured steps, or outside."""
        key = _key(StepWork(num_decodes, context_tokens, chunks))
        if key in self._measured:
            return Basis.MEASURED
        x = np.array(_aggregates(key))
        return Basis.INTERPOLATED if ((self._low <= x) & (x <= self._high)).all() else Basis.EXTRAPOLATED

    @cached_property
    def log_sd(self) -> float:
        """Standard deviation of the log error of the steps of the fit, each as predicted from the others."""
        if self._residual is None:
            measured = np.array([self._measured[key] for key in self._keys])
            logs = np.log(measured / (_terms(self._keys) @ self._coefficients))
        else:
            logs, _ = self._residual.left_out()
        return _log_sd(logs)

    def _unscaled(self, keys: Sequence[BatchKey]) -> Array:
        """Seconds of each step by the fit to medians."""
        times: Array = (_terms(keys) @ self._coefficients) * np.exp(self._correction(keys))
        return times

    def _smeared(self, by_key: dict[BatchKey, list[float]]) -> dict[bool, float]:
        """Return measured over predicted seconds, summed over steps with chunks and over those without."""
        sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
        for key, predicted_s in zip(self._keys, self._unscaled(self._keys).tolist(), strict=True):
            took = [seconds for seconds in by_key[key] if seconds < HICCUP * predicted_s]
            sums[bool(key[2])][0] += sum(took)
            sums[bool(key[2])][1] += predicted_s * len(took)
        return {chunks: took / predicted_s for chunks, (took, predicted_s) in sums.items() if predicted_s}

    def _correction(self, keys: Sequence[BatchKey]) -> Array:
        if self._residual is None:
            return np.zeros(len(keys))
        return self._residual.mean(self._residual.standardised(_features(keys)))


class EngineRounds(EngineSteps):
    """Step costs of an engine that drafts: drafting is a part of the steps that were logged."""

    def round(
        self,
        num_decodes: int,
        verify_tokens: int,
        depth: int,
        context_tokens: int,
        chunks: ChunkList = (),
        completing: int = 0,
    ) -> int:
        """See `RoundCosts.round`; the depth is that of the log, and the number of completed prompts makes no
        difference."""
        drafts = verify_tokens - num_decodes
        return to_ticks(self.seconds(StepWork(num_decodes, context_tokens, chunks, draft_tokens=drafts)))

    def rounds(self, num_decodes: int, verify_tokens: int, depth: int, computed: Sequence[int] | Ints) -> Sequence[int]:
        """See `RoundCosts.rounds`."""
        context = (int(tokens) + verify_tokens for tokens in computed)
        return list(accumulate(self.round(num_decodes, verify_tokens, depth, tokens) for tokens in context))


def engine_costs(steps: Sequence[TimedStep], name: str = "a log of steps") -> EngineSteps:
    """Fit a log, as of an engine that drafts if a step of it verifies drafts.

    Raises SpecError if the log is too short.
    """
    drafts = any(step.batch.draft_tokens for step in steps)
    return (EngineRounds if drafts else EngineSteps)(steps, name)


def read_engine_costs(path: Path) -> EngineSteps:
    """Fit the log in a file. Raises SpecError if it is not a log, or too short."""
    return engine_costs(read_steps(path).steps, str(path))


def _log_sd(logs: Array) -> float:
    """Return the standard deviation of which 1.645 hold 90 % of these log errors."""
    return float(np.quantile(np.abs(logs), 0.9)) / Z90


def _key(work: StepWork) -> BatchKey:
    chunks = tuple((int(past), int(new)) for past, new in work.chunks)
    return work.num_decodes, work.context_tokens, chunks, work.draft_tokens


def _work(key: BatchKey) -> StepWork:
    decodes, context, chunks, drafts = key
    return StepWork(decodes, context, chunks, draft_tokens=drafts)


def _aggregates(key: BatchKey) -> tuple[float, ...]:
    """Return tokens, decodes, context tokens, chunks, pairs, cached tokens that chunks read."""
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


def _terms(keys: Sequence[BatchKey]) -> Array:
    """Return (steps, terms) of the base; none is negative."""
    m, decodes, context, chunks, pairs, past = np.array([_aggregates(key) for key in keys]).T
    new = np.array([sum(tokens for _, tokens in key[2]) for key in keys])
    beyond = [np.maximum(m - knee, 0) for knee in _KNEES]
    columns = [np.ones_like(m), m, *beyond, decodes, context, chunks, pairs, past, m * (context + past + new)]
    return np.column_stack(columns)


def _base(terms: Array, seconds: Array) -> Array:
    """Fit coefficients of at least 0 to the times, in relative error."""
    from scipy.optimize import nnls

    size = np.maximum(terms.max(axis=0), 1e-300)
    fitted, _ = nnls(terms / size / seconds[:, None], np.ones(len(seconds)))
    # every step takes some time, however small
    if not fitted[0]:
        fitted[0] = 1e-3 * float(seconds.min())
    coefficients: Array = fitted / size
    return coefficients


def _features(keys: Sequence[BatchKey]) -> dict[str, Array]:
    """Return the features of the residual."""
    m, decodes, context, chunks, pairs, past = np.array([_aggregates(key) for key in keys]).T
    return {
        "tokens": np.log2(m),
        "decodes": np.log2(1 + decodes),
        "context": np.log2(1 + context / np.maximum(decodes, 1)),
        "chunks": np.log2(1 + chunks),
        "pairs": np.log2(1 + pairs),
        "past": np.log2(1 + past),
    }


def _residual(keys: Sequence[BatchKey], z: Array) -> Process | None:
    by_name = _features(keys)
    z = np.clip(z, -CLIP, CLIP)
    if len(keys) > MOST:
        chosen = cover(by_name, MOST)
        by_name, z = {name: x[chosen] for name, x in by_name.items()}, z[chosen]
    return fit_process(by_name, z)
