"""Loads worth running on a real system to tell the leading plans of a search apart, and how sure the choice is then.

Let g be the logarithm of the chosen plan's value over that of its nearest rival, and y the logarithms of the mean
latencies that a run would show, both over the drawn worlds (`simtune.tuner.doubt.leaders`); n is the noise of a run.
Knowing y leaves of the variance of g

    s^2 (1 - R^2),   R^2 = cov(g, y) (cov(y) + n^2 I)^-1 cov(y, g) / s^2

and the better of the two plans is then chosen with the probability that is the mean over what y may turn out to be of
max(P, 1 - P). Runs are chosen one after the other, each the one after which this probability is largest; of equal ones
the one under whose load the two plans differ most, measured in the interval of the difference. Measurements move the
worlds by the same regression, with noise of its own in each (an ensemble Kalman filter).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from simtune.arrays import Array
from simtune.sim.drawn_worlds import DrawnWorlds
from simtune.specs.workload import ClosedLoop, FixedLength, Poisson, Workload
from simtune.tuner.doubt.confidence import normal_levels, sure_of_sign
from simtune.tuner.doubt.leaders import METRICS, Leader
from simtune.tuner.question import Question
from simtune.workload.requests import RequestStream, build_stream

WORLDS = 200
"""Number of worlds; they are drawn, not simulated."""
NOISE = 0.03
"""Standard deviation of the logarithm of a measured mean from run to run, and of the error of a plan by itself."""
NOISIER = {"ttft": 3.0, "tpot": 1.0}
"""Factor on that noise by metric: on published runs TTFT is three times as far off as TPOT, see docs/accuracy.md."""
MOST_LOADS, MOST_RUNS = 3, 6
ENOUGH = 0.95
"""Probability of choosing rightly from which on no more runs are proposed."""
WORTH_A_RUN = 0.01
"""Least gain in that probability that is worth a run."""
RUN_S = 60.0
"""Seconds that a run should last."""
FEWEST, MOST = 200, 1500
"""Requests of a run."""
OF_ONE_USER = 32
"""Requests of a run of one user, one after another."""

Kind = Literal["trace", "rate", "users"]


class LoadOption(NamedTuple):
    """A load that can be run, at a share of the chosen plan's highest rate for each GPU."""

    kind: Kind
    share: float
    """0 stands for one user."""

    @property
    def label(self) -> str:
        """Name of the load, of which files are named."""
        return f"{self.kind}-{round(100 * self.share)}" if self.share else "one-user"


OPTIONS = (
    LoadOption("trace", 1.0),
    LoadOption("trace", 0.8),
    LoadOption("trace", 0.5),
    LoadOption("rate", 0.9),
    LoadOption("rate", 0.5),
    LoadOption("users", 0.8),
    LoadOption("users", 0.4),
    LoadOption("users", 0.0),
)
"""Loads that are compared: the requests of the study as a trace, and requests of fixed lengths, which every load
generator can send, at a rate and by a number of users."""


@dataclass(frozen=True)
class LoadOfPlan:
    """A load as one plan receives it."""

    kind: Kind
    stream: RequestStream
    rate_rps: float | None
    users: int | None
    prompt_tokens: int | None
    """Tokens of every prompt; None if prompts differ."""
    output_tokens: int | None


class NextRun(NamedTuple):
    """A run that is proposed."""

    plan: int
    """Number of the plan among the leaders."""
    option: LoadOption
    right_after: float
    """Probability of choosing the better plan with this run and all before."""


class LoadsOfStudy:
    """Streams of every option for every leader."""

    def __init__(self, question: Question, plans: Sequence[Leader]) -> None:
        """Prepare loads at shares of the rate of the first plan for each of its GPUs."""
        self._question, self._chosen = question, plans[0]
        self._rps_per_gpu = plans[0].rate_rps / (plans[0].gpus * plans[0].servers)
        self._stream = question.draws.stream(MOST)
        self._in_flight: dict[float, float] = {}

    @property
    def options(self) -> list[LoadOption]:
        """Options that differ: without a trace if all requests are of the same lengths."""
        lengths = (self._stream.prompt_tokens, self._stream.output_tokens)
        same = not any(np.ptp(tokens) for tokens in lengths) and self._stream.hash_ids is None
        return [option for option in OPTIONS if not (same and option.kind == "trace")]

    def of(self, plan: Leader, option: LoadOption) -> LoadOfPlan:
        """Return a load as a plan receives it, on the part of it that is measured."""
        rate = float(f"{option.share * self._rps_per_gpu * plan.gpus:.3g}")
        prompt, output = (max(1, round(float(tokens.mean()))) for tokens in
                          (self._stream.prompt_tokens, self._stream.output_tokens))  # fmt: skip
        if option.kind == "trace":
            stream = self._question.draws.stream(_requests(rate)).at_rate(rate)
            return LoadOfPlan("trace", stream, rate, None, None, None)
        if option.kind == "rate":
            return LoadOfPlan("rate", self._fixed(Poisson(rate_rps=rate), _requests(rate)), rate, None, prompt, output)
        # Whole users: a plan with more GPUs in a server is given as many for each of them.
        users = max(1, round(self._users_per_gpu(option.share) * plan.gpus)) if option.share else 1
        requests = OF_ONE_USER if users == 1 else max(FEWEST, min(MOST, 8 * users))
        return LoadOfPlan("users", self._fixed(ClosedLoop(users=users), requests), None, users, prompt, output)

    def _fixed(self, arrivals: Poisson | ClosedLoop, requests: int) -> RequestStream:
        """Return requests that all have the mean lengths of the load."""
        prompt, output = (FixedLength(tokens=max(1, round(float(tokens.mean())))) for tokens in
                          (self._stream.prompt_tokens, self._stream.output_tokens))  # fmt: skip
        load = Workload(name="fixed-lengths", arrivals=arrivals, prompt=prompt, output=output, requests=requests)
        return build_stream(load, None, requests=requests, seed=self._question.study.seed)

    def _users_per_gpu(self, share: float) -> float:
        """Return the requests under way for each GPU of the chosen plan at a share of its rate, by Little's law."""
        if share not in self._in_flight:
            load = self.of(self._chosen, LoadOption("rate", share))
            result = self._chosen.server.simulate(load.stream, seed=self._question.study.seed)
            assert load.rate_rps is not None
            self._in_flight[share] = load.rate_rps * (result.statistic("e2el", "mean") or 0.0) / self._chosen.gpus
        return self._in_flight[share]


def _requests(rate_rps: float) -> int:
    return int(min(MOST, max(FEWEST, math.ceil(rate_rps * RUN_S))))


Latencies = Mapping[tuple[int, LoadOption], Mapping[str, Array]]
"""Logarithms of mean latencies in each world, by number of the plan and load, then by metric."""


def latencies(loads: LoadsOfStudy, plans: Sequence[Leader], worlds: DrawnWorlds, seed: int) -> Latencies:
    """Return the latencies of the first plan and its nearest rival under all loads."""
    return {
        (number, option): plans[number].latencies(loads.of(plans[number], option).stream, worlds, seed)
        for number in (0, nearest_of([plan.log_values for plan in plans]))
        for option in loads.options
    }


def nearest_of(values: Sequence[Array]) -> int:
    """Return the number of the rival that beats the first plan in most worlds."""
    return 1 + int(np.argmin([np.mean(np.where(values[0] == v, 0.5, values[0] > v)) for v in values[1:]]))


def choose(values: Sequence[Array], seen: Latencies, noise: float = NOISE) -> tuple[float, list[NextRun]]:
    """Return (probability that the better of the first plan and its nearest rival is chosen as things are, the runs
    that raise it most, in order).

    If none is worth a run, both plans are run under the load under which they differ most: that checks the prediction.
    `values` are the logarithms of the values of the plans in each world.
    """
    rival = nearest_of(values)
    gap = values[0] - values[rival]
    now = right_after(gap, [], noise)
    right, runs = now, list[NextRun]()
    keys = [key for key in seen if key[0] in (0, rival)]
    rows: list[tuple[str, Array]] = []
    while right < ENOUGH and len(runs) < MOST_RUNS:
        after = {key: right_after(gap, [*rows, *seen[key].items()], noise) for key in _open_keys(keys, runs)}
        # Rounded, so that runs that help alike are ordered by how far apart the plans are, and not by the last bits.
        best = max(after, key=lambda key: (round(after[key], 6), _apart(seen, key[1], rival)), default=None)
        if best is None or after[best] < right + WORTH_A_RUN:
            break
        right = after[best]
        rows += seen[best].items()
        runs.append(NextRun(*best, right))
    if not runs:
        farthest = max((key[1] for key in keys), key=lambda option: _apart(seen, option, rival))
        runs = [NextRun(plan, farthest, now) for plan in (0, rival)]
    return now, runs


def _open_keys(keys: Sequence[tuple[int, LoadOption]], runs: Sequence[NextRun]) -> list[tuple[int, LoadOption]]:
    """Return the runs that may be added: of a load that is run already, or of a new one while loads are few."""
    run_keys = {(run.plan, run.option) for run in runs}
    loads = {option for _, option in run_keys}
    return [key for key in keys if key not in run_keys and (key[1] in loads or len(loads) < MOST_LOADS)]


def _apart(seen: Latencies, option: LoadOption, rival: int) -> float:
    """Return the difference between the first plan and a rival under a load, in standard deviations of it."""
    ratios = [seen[0, option][name] - seen[rival, option][name] for name in METRICS if name in seen[0, option]
              and name in seen[rival, option]]  # fmt: skip
    return max((abs(float(r.mean())) / max(float(r.std()), 1e-9) for r in ratios), default=0.0)


def right_after(gap: Array, rows: Sequence[tuple[str, Array]], noise: float) -> float:
    """Return the probability of choosing the better of two plans once means of these metrics have been measured; `gap`
    and every mean have a value for each world."""
    mean, variance = float(gap.mean()), float(gap.var())
    explained = _explained(gap, rows, noise) if rows and variance else 0.0
    moved = math.sqrt(explained) * normal_levels()
    return float(np.mean(sure_of_sign(mean + moved, variance - explained)))


def noises(metrics: Sequence[str], noise: float) -> Array:
    """Return the noise of a measured mean of each metric."""
    return np.array([noise * NOISIER[metric] for metric in metrics])


def _explained(gap: Array, rows: Sequence[tuple[str, Array]], noise: float) -> float:
    """Return the variance of the gap that the rows explain, less what as many rows of noise alone would."""
    y = np.array([at - at.mean() for _, at in rows])
    count, variance = len(gap), float(gap.var())
    with_gap = y @ (gap - gap.mean()) / count
    covariance = y @ y.T / count + np.diag(noises([metric for metric, _ in rows], noise) ** 2)
    # Adjusted for the number of rows: by chance alone each of them explains a share of 1 / worlds.
    share = float(with_gap @ np.linalg.solve(covariance, with_gap)) / variance
    return variance * max(0.0, 1 - (1 - share) * (count - 1) / max(1, count - 1 - len(y)))


def conditioned(values: Array, predicted: Array, measured: Array, noise: Array, seed: int) -> Array:
    """Return values (a row for each plan, a column for each world) given measurements with their noise, of which
    `predicted` has a row each; all are logarithms."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, len(measured)))))
    # Noise of its own in each world: otherwise the worlds would end up closer together than the noise allows.
    noisy = predicted + noise[:, None] * generator.standard_normal(predicted.shape)
    y, v = (rows - rows.mean(axis=1, keepdims=True) for rows in (predicted, values))
    covariance = y @ y.T / y.shape[1] + np.diag(noise**2)
    gain = np.linalg.solve(covariance, y @ v.T / y.shape[1]).T
    return np.asarray(values + gain @ (measured[:, None] - noisy))
