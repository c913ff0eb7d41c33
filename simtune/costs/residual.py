"""Residual of the base form: a Gaussian process on the logarithm of measured over base.

    z = log(measured / base) ~ GP(0, signal^2 k(r)) + noise,   k(r) = (1 + sqrt(3) r) exp(-sqrt(3) r)

with r^2 the sum of ((x - x') / length)^2 over the standardised features of the operator kind
(`simtune.costs.operators.OperatorForm.features`), one length each. Far from the points the correction is zero and the
base remains. Signal, noise and lengths maximise the marginal likelihood times weak priors. One form for every operator;
benchmarks/costs/test_accuracy.py compares it with alternatives.

It is exact on a user's own points. Of published tables it keeps fewer points than they have rows, and weights that
depend on all rows (`Process.condensed`): from the exact process their times could be computed back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array
from simtune.specs.hardware import Residual

MAX_POINTS = 500
"""Points that a process keeps: its fit takes points^3, its prediction points."""

# A time off the base by more than a factor 20 is an outlier and counts as that much.
CLIP = 3.0
# quantiles of the fitted residuals that limit every correction
_CLAMP = (0.01, 0.99)
_MAX_ITERATIONS = 40
# From the hyperparameters of nearly the same points.
_FEW_ITERATIONS = 10
_LENGTH, _NOISE = (0.5, 1.5), (np.log(0.03), 1.0)  # priors of the logarithms: mean, standard deviation
_BOUNDS = {"length": (-3.0, 4.0), "signal": (-5.0, 1.5), "noise": (-6.0, -1.0)}  # of the logarithms
# Of the signal, on the diagonal of what would else be nearly singular.
_JITTER = 1e-4
MOST_MEANS = 10_000
"""Calls whose expectations a process keeps."""
_BATCH = 4096  # shapes per matrix of kernel values
_ROOT3 = np.sqrt(3.0)


class Hyper(NamedTuple):
    """Standard deviations of signal and noise, and lengths in standardised units."""

    length: Array
    signal: float
    noise: float

    def kernel(self, squares: Array) -> Array:
        """Return the covariance of the signal by squared scaled distances, which are overwritten."""
        # written in place: the arrays are large, and a new array costs more than the arithmetic
        r = np.maximum(squares, 0, out=squares)
        np.sqrt(r, out=r)
        r *= _ROOT3
        decay = np.negative(r)
        np.exp(decay, out=decay)
        r += 1
        r *= self.signal**2
        r *= decay
        return r


@dataclass(frozen=True)
class Process:
    """A fitted Gaussian process. `points` (n, d) are standardised; `weights` (n) are K^-1 z unless `condensed`."""

    names: tuple[str, ...]
    centre: Array
    spread: Array
    hyper: Hyper
    clamp: tuple[float, float]
    points: Array
    weights: Array
    _means: dict[bytes, Array] = field(init=False, default_factory=dict, repr=False, compare=False)
    """Expectations by the bytes of their shapes: plans that differ in their drafts ask for the same shapes again."""

    @classmethod
    def load(cls, spec: Residual, points: NDArray[Any], weights: NDArray[Any]) -> Process:
        """Return the process of a spec. Raises ValueError if the arrays do not match the spec."""
        if points.shape != (spec.points, len(spec.features)) or weights.shape != (spec.points,):
            raise ValueError(
                f"{spec.array}: points {points.shape} and weights {weights.shape} are not those of a residual with "
                f"{spec.points} points and {len(spec.features)} features"
            )
        return cls(
            spec.features,
            np.array(spec.centre),
            np.array(spec.spread),
            Hyper(np.array(spec.length), spec.signal, spec.noise),
            (spec.clamp[0], spec.clamp[1]),
            points.astype(np.float64),
            weights.astype(np.float64),
        )

    def spec(self, array: str) -> tuple[Residual, dict[str, NDArray[Any]]]:
        """Return the numbers for the profile, and the arrays by name, as `load` reads them."""
        residual = Residual(
            features=self.names,
            centre=tuple(self.centre.tolist()),
            spread=tuple(self.spread.tolist()),
            length=tuple(self.hyper.length.tolist()),
            signal=self.hyper.signal,
            noise=self.hyper.noise,
            clamp=self.clamp,
            points=len(self.points),
            array=array,
        )
        return residual, {f"{array}.points": self.points.astype(np.float32), f"{array}.weights": self.weights}

    def standardised(self, by_name: dict[str, Array]) -> Array:
        """Return (points, features) of shapes given by feature name."""
        return (np.stack([by_name[name] for name in self.names], axis=-1) - self.centre) / self.spread

    def mean(self, x: Array) -> Array:
        """Expected log(measured / base) at standardised features (points, d), within the clamp."""
        shapes = x.tobytes()
        if shapes not in self._means:
            if len(self._means) >= MOST_MEANS:
                self._means.clear()
            mean = np.concatenate([self._covariance(part) @ self.weights for part in _batches(x)])
            self._means[shapes] = mean.clip(*self.clamp)
        return self._means[shapes].copy()

    def sd(self, x: Array) -> Array:
        """Standard deviation of the log of one more measurement there, noise included."""
        from scipy.linalg import solve_triangular

        prior = self.hyper.signal**2 + self.hyper.noise**2
        whitened = [solve_triangular(self._factor, self._covariance(part).T, lower=True) for part in _batches(x)]
        explained = np.concatenate([(part**2).sum(0) for part in whitened])
        return np.sqrt(np.maximum(prior - explained, self.hyper.noise**2))

    def left_out(self) -> tuple[Array, Array]:
        """Return residual and sd of every point as predicted from all the others, with the same hyperparameters.

        Only for a process that still has the points of its fit.
        """
        inverse = _inverse(self._factor)
        sd = 1 / np.sqrt(np.diag(inverse))
        return self.weights * sd**2, sd

    def rescaled(self, spread: Array) -> Hyper:
        """The hyperparameters for features standardised by another spread."""
        return self.hyper._replace(length=self.hyper.length * self.spread / spread)

    def condensed(self, by_name: dict[str, Array], z: Array, count: int) -> Process:
        """Return the process of all these residuals on at most `count` centres of their shapes, hyperparameters kept.

        Each centre is the mean of the shapes nearest to one of `count` points that cover those of the process. With
        covariances K among centres c and shapes n, weights are (noise^2 K_cc + K_cn K_nc)^-1 K_cn z: the mean of the
        process as far as the centres determine its signal (deterministic training conditional; Quinonero-Candela and
        Rasmussen, JMLR 6, 2005). On large tables that is nearer than the exact process of as many rows, see
        benchmarks/costs/test_centres.py.
        """
        from scipy.cluster.vq import vq
        from scipy.linalg import cho_solve, solve_triangular

        x = self.standardised(by_name)
        # Means of all shapes nearby, not single ones: a row of a table may lie at the edge of what it stands for.
        nearest, _ = vq(x, self.points[maximin(self.points, count)])
        centres = np.array([x[nearest == i].mean(0) for i in np.unique(nearest)])
        process = replace(self, points=centres.astype(np.float32).astype(np.float64))
        factor = _cholesky(process._covariance(process.points), _JITTER * self.hyper.signal)
        # In terms of K_cc^-1/2, for the condition's sake.
        gram, weights = np.zeros_like(factor), np.zeros(len(factor))
        for rows, values in zip(_batches(x), _batches(np.clip(z, -CLIP, CLIP)), strict=True):
            towards = solve_triangular(factor, process._covariance(rows).T, lower=True)
            gram += towards @ towards.T
            weights += towards @ values
        weights = cho_solve((_cholesky(gram, self.hyper.noise), True), weights)
        return replace(process, weights=solve_triangular(factor, weights, lower=True, trans=1))

    @cached_property
    def _factor(self) -> Array:
        return _cholesky(self._covariance(self.points), self.hyper.noise)

    def _covariance(self, x: Array) -> Array:
        points, norms = self._scaled
        a = x / self.hyper.length
        squares = (a * a).sum(1)[:, None] + norms
        squares -= 2 * a @ points.T
        return self.hyper.kernel(squares)

    @cached_property
    def _scaled(self) -> tuple[Array, Array]:
        """Points in units of the lengths, and their squared norms, which every prediction needs."""
        scaled = self.points / self.hyper.length
        return scaled, (scaled * scaled).sum(1)


def fit_process(by_name: dict[str, Array], z: Array, like: Process | None = None) -> Process | None:
    """Fit the process of log residuals z at shapes given by their features; None if no feature varies.

    Its time grows with the cube of the number of points; see `cover` for choosing `MAX_POINTS` of them. Most of it goes
    into the hyperparameters: starting from those of `like`, if given and of the same features, takes few iterations.
    """
    from scipy.linalg import cho_solve

    names = _varying(by_name)
    if not names:
        return None
    raw = np.stack([by_name[name] for name in names], axis=-1)
    centre, spread = _short(raw.mean(0)), _short(raw.std(0))
    # As it will be stored.
    x = ((raw - centre) / spread).astype(np.float32).astype(np.float64)
    z = np.clip(z, -CLIP, CLIP)
    hyper = _most_likely(x, z, None if like is None or like.names != names else like.rescaled(spread))
    clamp = _short(np.quantile(z, _CLAMP))
    process = Process(names, centre, spread, hyper, (float(clamp[0]), float(clamp[1])), x, np.zeros(len(x)))
    return replace(process, weights=cho_solve((process._factor, True), z))


def cover(by_name: dict[str, Array], count: int) -> NDArray[np.intp]:
    """Return the rows of `count` shapes that cover all of them, by `maximin` in their standardised features."""
    raw = np.stack([by_name[name] for name in _varying(by_name)], axis=-1)
    return maximin((raw - raw.mean(0)) / raw.std(0), count)


def _varying(by_name: dict[str, Array]) -> tuple[str, ...]:
    return tuple(name for name, x in by_name.items() if np.ptp(x) > 1e-9)


def maximin(x: Array, count: int) -> NDArray[np.intp]:
    """Return rows that cover the rest well: the one nearest the centre, then always the farthest from those chosen."""
    chosen = np.empty(count, dtype=np.intp)
    at = int(((x - x.mean(0)) ** 2).sum(1).argmin())
    nearest = np.full(len(x), np.inf)
    for i in range(count):
        chosen[i] = at
        nearest = np.minimum(nearest, ((x - x[at]) ** 2).sum(1))
        at = int(nearest.argmax())
    return chosen


def _most_likely(x: Array, z: Array, near: Hyper | None = None) -> Hyper:
    start = np.array([_LENGTH[0]] * x.shape[1] + [np.log(max(0.05, z.std())), _NOISE[0]])
    if near is not None:
        start = np.log([*near.length, near.signal, near.noise])
    iterations = _MAX_ITERATIONS if near is None else _FEW_ITERATIONS
    length, signal, noise = _split(np.exp(_optimum(x.tobytes(), z.tobytes(), start.tobytes(), iterations)))
    return Hyper(_short(length), float(_short(signal)), float(_short(noise)))


# The profile of an engine and the comparison that follows fit the same log.
@lru_cache(maxsize=16)
def _optimum(points: bytes, residuals: bytes, start: bytes, iterations: int) -> Array:
    """Return the most likely theta of `negative_log_posterior`, for arrays given as bytes."""
    from scipy.optimize import minimize

    z, theta = np.frombuffer(residuals), np.frombuffer(start)
    size = len(theta) - 2
    bounds = [_BOUNDS["length"]] * size + [_BOUNDS["signal"], _BOUNDS["noise"]]
    squares = pair_squares(np.frombuffer(points).reshape(len(z), size))
    # Bounded in logarithms: without bounds few points drive a length to infinity.
    optimum = minimize(
        negative_log_posterior,
        theta,
        args=(squares, z),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": iterations},
    )
    likeliest: Array = optimum.x
    return likeliest


def pair_squares(x: Array) -> Array:
    """Return (d, pairs) squared differences of all pairs of different points, feature by feature."""
    pairs = _pairs(len(x))
    return ((x[pairs.first] - x[pairs.second]) ** 2).T.copy()


class _Pairs(NamedTuple):
    """All pairs of n different points: both points, and LAPACK's index of the pair's lower element in n^2."""

    first: NDArray[np.intp]
    second: NDArray[np.intp]
    at: NDArray[np.intp]


@lru_cache(maxsize=2)
def _pairs(n: int) -> _Pairs:
    first, second = np.tril_indices(n, -1)
    return _Pairs(first, second, second * n + first)


def negative_log_posterior(theta: Array, squares: Array, z: Array) -> tuple[float, Array]:
    """-log p(z | theta) p(theta) up to a constant, and its gradient.

    theta: the logarithms of the lengths, of the signal and of the noise. With Q = w w^T - K^-1 and w = K^-1 z,
    the derivative of the likelihood is -1/2 tr(Q dK/dtheta).
    """
    from scipy.linalg.lapack import dpotrf, dpotri, dpotrs

    n = len(z)
    length, signal, noise = _split(np.exp(theta))
    pairs = _pairs(n)
    scaled = length**-2 @ squares
    np.sqrt(scaled, out=scaled)
    scaled *= _ROOT3
    decay = np.exp(-scaled)
    scaled += 1
    covariance = signal**2 * scaled * decay
    # Its lower half, column by column as LAPACK has it.
    kernel = np.zeros(n * n)
    kernel[pairs.at] = covariance
    kernel[:: n + 1] = signal**2 + noise**2
    # LAPACK directly: scipy copies and checks the matrix, which takes as long again for a few hundred points.
    factor, failed = dpotrf(kernel.reshape(n, n).T, lower=1, clean=0, overwrite_a=1)
    if failed:
        raise np.linalg.LinAlgError(f"the covariance of {n} points is not positive definite")
    weights, _ = dpotrs(factor, z, lower=1)
    value = 0.5 * z @ weights + np.log(np.diag(factor)).sum()
    inverse = dpotri(factor, lower=1, overwrite_c=1)[0].T.ravel()
    q_diagonal = weights**2 - inverse[:: n + 1]
    # each element of q stands for two elements of the symmetric Q
    q = weights[pairs.first] * weights[pairs.second] - inverse[pairs.at]
    by_signal, by_noise = -2 * q @ covariance - signal**2 * q_diagonal.sum(), -(noise**2) * q_diagonal.sum()
    q *= decay
    gradient = np.concatenate([-3 * signal**2 * (squares @ q) / length**2, [by_signal, by_noise]])
    deviation = np.concatenate([(theta[:-2] - _LENGTH[0]) / _LENGTH[1], [0, (theta[-1] - _NOISE[0]) / _NOISE[1]]])
    scale = np.concatenate([np.full(len(length), _LENGTH[1]), [1, _NOISE[1]]])
    return float(value + 0.5 * deviation @ deviation), gradient + deviation / scale


def _split(values: Array) -> tuple[Array, float, float]:
    return values[:-2], float(values[-2]), float(values[-1])


def _cholesky(kernel: Array, noise: float) -> Array:
    """Lower factor of the covariance of measured points."""
    from scipy.linalg import cholesky

    covariance = kernel.copy()
    covariance[np.diag_indices(len(kernel))] += noise**2
    factor: Array = cholesky(covariance, lower=True, overwrite_a=True, check_finite=False)
    return factor


def _inverse(factor: Array) -> Array:
    """Inverse of the matrix with this lower factor; only its lower half is filled in."""
    from scipy.linalg.lapack import dpotri

    inverse: Array
    inverse, _ = dpotri(factor, lower=1)
    return inverse


def _batches(x: Array) -> list[Array]:
    return [x[at : at + _BATCH] for at in range(0, len(x), _BATCH)] or [x]


def _short(values: Any) -> Array:
    """Round to six significant digits, as they are stored in the profile."""
    digits: Array = np.vectorize(lambda value: float(f"{value:.6g}"))(values)
    return digits
