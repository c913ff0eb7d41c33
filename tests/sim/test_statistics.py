"""Warm-up, intervals for means and percentiles of one run, and times between tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import stdtrit

from simtune.arrays import Array
from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.results.result import Result
from simtune.results.statistics import BATCHES, T_QUANTILE, TokenIntervals, batch_means, warm_up
from simtune.testing.clusters import stream_of
from tests.sim.worlds import Setting


def autoregressive(rng: np.random.Generator, n: int, correlation: float, mean: float = 10.0) -> Array:
    """AR(1) with unit variance, begun in its steady state."""
    noise = rng.standard_normal(n) * math.sqrt(1 - correlation**2)
    x = np.empty(n)
    x[0] = rng.standard_normal()
    for i in range(1, n):
        x[i] = correlation * x[i - 1] + noise[i]
    return mean + x


def waits_of_mm1(rng: np.random.Generator, n: int, rho: float) -> Array:
    """Waits in an M/M/1 queue with arrivals at rate 1, begun empty (Lindley's recursion)."""
    work = rng.exponential(rho, n) - rng.exponential(1.0, n)
    total = np.concatenate([[0.0], np.cumsum(work)])[:n]
    waits: Array = total - np.minimum.accumulate(total)
    return waits


# --- warm-up ----------------------------------------------------------------------------------------------


def test_the_warm_up_ends_where_the_transient_does(oracle_dir: Path) -> None:
    """A series that decays for so many values to its level, and stays there."""
    length = json.loads((oracle_dir / "stats.json").read_text())["mser5"]["transient_length"]
    cuts = []
    for seed in range(20):
        noise = 0.5 * np.random.default_rng(seed).standard_normal(5000)
        decay = np.maximum(0.0, 8.0 * (1 - np.arange(5000) / length))
        cuts.append(warm_up(10 + decay + noise))
    assert np.mean(cuts) == pytest.approx(length, abs=20)
    assert min(cuts) >= length - 60, "what is left of the decay there is less than the noise of five values"


def test_a_steady_series_loses_next_to_nothing() -> None:
    cuts = [warm_up(np.random.default_rng(seed).standard_normal(5000)) for seed in range(20)]
    assert np.mean(cuts) < 250
    assert warm_up(np.full(1000, 3.0)) == 0


def test_without_a_steady_state_half_of_it_is_the_start() -> None:
    assert warm_up(np.arange(1000.0)) == 500
    assert warm_up(np.arange(19.0)) == 0, "too few values to tell"


def test_the_cut_is_the_one_of_the_definition() -> None:
    """MSER-5 by its formula, one sum per candidate."""
    rng = np.random.default_rng(3)
    for n in (20, 23, 400):
        values = np.cumsum(rng.standard_normal(n)) + 1e6
        fives = [values[i : i + 5].mean() for i in range(0, n - n % 5, 5)]
        scores = [
            sum((y - np.mean(fives[cut:])) ** 2 for y in fives[cut:]) / (len(fives) - cut) ** 2
            for cut in range(len(fives) // 2 + 1)
        ]
        assert warm_up(values) == 5 * int(np.argmin(scores))


# --- batch means ------------------------------------------------------------------------------------------


def covers(interval: tuple[float, float] | None, truth: float) -> bool:
    assert interval is not None
    return interval[0] <= truth <= interval[1]


def test_intervals_of_a_correlated_series_cover_its_mean_and_median() -> None:
    rng = np.random.default_rng(1)
    runs = [autoregressive(rng, 4000, 0.8) for _ in range(300)]
    # 300 draws of a 95 % interval scatter by 1.3 %; twenty batches of 200 are still a little alike.
    assert 0.91 <= np.mean([covers(batch_means(run, "mean"), 10.0) for run in runs]) <= 0.98
    assert 0.91 <= np.mean([covers(batch_means(run, "p50"), 10.0) for run in runs]) <= 0.98
    naive = [abs(run.mean() - 10.0) <= 1.96 * run.std() / math.sqrt(len(run)) for run in runs]
    assert np.mean(naive) < 0.6, "as if the values were independent"


def test_intervals_of_waits_in_a_queue_cover_the_mean_of_theory(oracle_dir: Path) -> None:
    oracle = json.loads((oracle_dir / "stats.json").read_text())["batch_means_mm1"]
    rng = np.random.default_rng(2)
    runs = [waits_of_mm1(rng, 60_000, oracle["rho"]) for _ in range(200)]
    assert oracle["true_mean_wait"] == pytest.approx(oracle["rho"] ** 2 / (1 - oracle["rho"]))
    coverage = np.mean([covers(batch_means(run, "mean"), oracle["true_mean_wait"]) for run in runs])
    assert coverage == pytest.approx(oracle["coverage_batch_means"], abs=0.04)


def test_too_few_values_have_no_interval() -> None:
    values = np.random.default_rng(0).random(BATCHES * 1200)
    assert batch_means(values, "p99") is not None
    assert batch_means(values[: BATCHES * 900], "p99") is None, "nine beyond the percentile in a batch"
    assert batch_means(values[: BATCHES * 9], "mean") is None


# --- times between tokens ---------------------------------------------------------------------------------

rows = st.tuples(st.integers(1, 200), st.integers(0, 9), st.integers(1, 12), st.integers(1, 4))


@given(st.lists(rows, min_size=1, max_size=12))
def test_progressions_say_what_all_the_tokens_would(rows: list[tuple[int, int, int, int]]) -> None:
    tokens = np.sort(
        [first + k * slope for first, slope, steps, decodes in rows for k in range(steps) for _ in range(decodes)]
    )
    itl = TokenIntervals(np.array(rows, dtype=np.int64))
    assert itl.count == len(tokens)
    assert itl.mean_s() * TICKS_PER_SECOND == pytest.approx(tokens.mean(), rel=1e-12)
    assert itl.max_s() * TICKS_PER_SECOND == tokens[-1]
    for share in (0.0, 0.01, 0.5, 0.9, 0.99, 1.0):
        expected = tokens[max(1, math.ceil(share * len(tokens))) - 1]
        assert itl.quantile_s(share) * TICKS_PER_SECOND == expected


def test_times_between_tokens_of_a_tiny_world() -> None:
    """Steps of 1 s and 1 s for every prompt token. A (1 -> 4 tokens) decodes beside B's prompt of 3 once."""
    stream = stream_of([0.0, 2.5], [1, 3], [4, 2])
    world = Setting(100, 1, 4, 8, 1, LinearCosts(step_s=1.0, per_token_s=1.0), stream)
    result = Result(stream, world.run(), num_gpus=1)
    # Every computed token costs 1 s. A's prompt ends at 2; it decodes until 4, then beside B's prompt until 9
    # (1 + 1 + 3 s); both decode until 12 (1 + 2 s), and are done.
    assert result.finish_s.tolist() == [12.0, 12.0]
    assert result.first_token_s.tolist() == [2.0, 9.0]
    itl = result.itl
    assert itl is not None
    assert itl.count == 4, "three of A's four tokens come after another, and one of B's"
    assert itl.mean_s() == pytest.approx((2 + 5 + 3 + 3) / 4)
    assert [itl.quantile_s(share) for share in (0.25, 0.5, 0.75, 1.0)] == [2.0, 3.0, 3.0, 5.0]
    assert result.summary().metrics["itl"].max == itl.max_s() == 5.0
    # The same time is in the TPOT of both.
    assert (result.tpot_s * (stream.output_tokens - 1)).sum() == pytest.approx(itl.mean_s() * itl.count)


def test_the_quantile_of_batch_means_is_that_of_student() -> None:
    assert pytest.approx(float(stdtrit(BATCHES - 1, 0.975)), abs=1e-12) == T_QUANTILE
