"""A log of an engine's steps as a cost model: near what it has not seen, and as a file for simulations."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from simtune import api
from simtune.cli.simulate import simulate
from simtune.costs.calibration import TimedStep, read_steps, write_steps
from simtune.costs.engine_steps import EngineRounds, EngineSteps, read_engine_costs
from simtune.costs.iteration import StepWork
from simtune.costs.predict import Basis
from simtune.costs.protocol import RoundCosts
from simtune.costs.step_files import read_costs
from simtune.costs.step_table import StepTable
from simtune.errors import SpecError, UsageError
from simtune.testing import CostSuite
from simtune.validation.judge.prediction import predict
from simtune.validation.loads import NamedLoad

LOAD = {"arrival_s": np.arange(20) * 0.05, "prompt_tokens": np.full(20, 300), "output_tokens": np.full(20, 20)}


def truth(work: StepWork) -> float:
    """Bound by the weights up to 20 tokens, then by tokens."""
    pairs = sum(new * (past + new / 2) for past, new in work.chunks)
    return (
        5e-4 + max(4e-3, 2e-4 * work.num_tokens) + 1e-4 * work.num_decodes + 2e-7 * work.context_tokens + 3e-9 * pairs
    )


def steps(seed: int, count: int, noise: float = 0.01) -> list[TimedStep]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        decodes = int(rng.integers(0, 17))
        chunks = tuple((int(rng.integers(0, 1500)), int(rng.integers(1, 200))) for _ in range(rng.integers(0, 3)))
        if not chunks:
            decodes = max(decodes, 1)
        context = int(decodes * rng.integers(20, 1500))
        work = StepWork(decodes, context, chunks, decodes + len(chunks))
        found.append(TimedStep(work, truth(work) * float(np.exp(noise * rng.normal()))))
    return found


@cache
def shared_fit() -> EngineSteps:
    return EngineSteps(steps(0, 200))


class TestEngineSteps(CostSuite):
    costs = shared_fit()


class TestEngineRounds(CostSuite):
    costs = EngineRounds(steps(0, 200))


def test_steps_that_were_not_fitted_are_near() -> None:
    errors = [abs(shared_fit().seconds(s.batch) / s.seconds - 1) for s in steps(1, 100, 0.0)]
    assert np.median(errors) < 0.02
    assert np.quantile(errors, 0.9) < 0.06
    assert 0.005 < shared_fit().log_sd < 0.05


def test_a_term_for_all_queries_against_all_keys_is_found() -> None:
    """As transformers has it, whose attention goes over everything under one mask."""

    def crossed(work: StepWork) -> float:
        return 2e-3 + 1e-8 * work.num_tokens * (work.context_tokens + sum(map(sum, work.chunks)))

    fitted = EngineSteps([s._replace(seconds=crossed(s.batch)) for s in steps(2, 200)])
    errors = [abs(fitted.seconds(s.batch) / crossed(s.batch) - 1) for s in steps(3, 60)]
    assert np.quantile(errors, 0.9) < 0.05


def test_times_rest_on_what_was_measured() -> None:
    seen = steps(0, 200)[0].batch
    assert shared_fit().basis(seen.num_decodes, seen.context_tokens, seen.chunks) == Basis.MEASURED
    assert shared_fit().basis(3, 1234, ()) == Basis.INTERPOLATED
    assert shared_fit().basis(64, 64 * 5000, ()) == Basis.EXTRAPOLATED
    assert shared_fit().seconds(StepWork(64, 64 * 5000)) > shared_fit().seconds(StepWork(16, 16 * 1500))


def test_equal_steps_count_by_their_median() -> None:
    noisy = [s._replace(seconds=s.seconds * f) for s in steps(0, 200) for f in (1.0, 1.01, 9.0)]
    work = StepWork(4, 4000)
    assert EngineSteps(noisy).seconds(work) == pytest.approx(shared_fit().seconds(work), rel=0.03)


def test_what_some_steps_take_longer_for_no_reason_is_in_the_sum() -> None:
    """Of equal steps one in four takes half as long again: the median does not show it, a load does."""
    noisy = [s._replace(seconds=s.seconds * f) for s in steps(0, 200, 0.0) for f in (1.0, 1.0, 1.0, 1.5)]
    fitted = EngineSteps(noisy)
    for prompts in (False, True):
        kind = [s for s in noisy if bool(s.batch.chunks) == prompts]
        said = sum(fitted.seconds(s.batch) for s in kind)
        assert said == pytest.approx(sum(s.seconds for s in kind), rel=1e-9)


def drafted(count: int) -> list[TimedStep]:
    """Steps whose decodes verify three drafts each; a token more takes 0.1 ms."""
    rng = np.random.default_rng(5)
    found = []
    for _ in range(count):
        decodes = int(rng.integers(1, 17))
        work = StepWork(decodes, int(decodes * rng.integers(20, 1500)), (), decodes, draft_tokens=3 * decodes)
        found.append(TimedStep(work, 3e-3 + 1e-4 * work.num_tokens))
    return found


def test_steps_that_verify_drafts_are_steps_of_more_tokens(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text(write_steps(drafted(60)))
    assert [s.batch for s in read_steps(file).steps] == [s.batch for s in drafted(60)]
    fitted = read_engine_costs(file)
    assert isinstance(fitted, EngineRounds)
    assert fitted.round(6, 24, 3, 3000) / 2**40 == pytest.approx(5.4e-3, rel=0.02)
    first, second = fitted.rounds(6, 24, 3, [3000, 3015])
    assert first == fitted.round(6, 24, 3, 3024)
    assert second - first == fitted.round(6, 24, 3, 3039)


def test_a_log_without_drafts_says_nothing_of_them() -> None:
    assert not isinstance(shared_fit(), RoundCosts)


def test_a_log_of_one_step_is_refused() -> None:
    with pytest.raises(SpecError, match="holds 1 steps that differ; at least 12"):
        EngineSteps(steps(0, 1) * 50)


def test_logs_are_written_as_they_are_read(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text(write_steps(steps(0, 30), model="llama-3.1-8b"))
    assert [s.seconds for s in read_steps(file).steps] == [s.seconds for s in steps(0, 30)]
    assert [s.batch.chunks for s in read_steps(file).steps] == [s.batch.chunks for s in steps(0, 30)]


def test_a_log_drives_the_simulator(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text(write_steps(steps(0, 200)))
    assert isinstance(read_costs(file), EngineSteps)
    result = api.simulate(LOAD, model="llama-3.1-8b", costs=file)
    assert result.completed.all()
    mean = result.statistic("tpot", "mean")
    assert mean is not None
    assert 4e-3 < mean < 6e-2
    done = CliRunner().invoke(
        simulate,
        ["--model", "llama-3.1-8b", "--workload", "chat", "--requests", "20", "--rate", "2", "--costs", str(file)],
    )
    assert done.exit_code == 0, done.output


def test_anything_else_is_a_table(tmp_path: Path) -> None:
    table = tmp_path / "steps.csv"
    table.write_text("decodes,context_tokens,seconds\n1,100,0.01\n2,400,0.02\n")
    assert isinstance(read_costs(table), StepTable)
    with pytest.raises(UsageError, match="no such file"):
        read_costs(tmp_path / "nowhere.jsonl")


def log_errors(fit: EngineSteps, fresh: list[TimedStep]) -> tuple[np.ndarray, np.ndarray]:
    """Log errors without their signs on fresh steps, and the standard deviations that the fit states for them."""
    off = [abs(np.log(step.seconds / fit.seconds(step.batch))) for step in fresh]
    stated = [np.log(fit.in_world(1.0, 1.0).seconds(step.batch) / fit.seconds(step.batch)) for step in fresh]
    return np.array(off), np.array(stated)


@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_errors_of_held_out_steps_cover_steps_that_the_log_lacks(noise: float) -> None:
    fit, fresh = (noisy_fit() if noise == 0.1 else shared_fit()), steps(1, 60, noise)
    off, stated = log_errors(fit, fresh)
    assert 0.8 <= np.mean(off <= 1.645 * stated) <= 1
    assert stated.max() < 4 * noise + 0.05, "no wider than it has to be"


def test_steps_beyond_the_log_are_less_sure_and_covered() -> None:
    small = [step for step in steps(0, 200) if step.batch.num_tokens < 60 and step.batch.context_tokens < 8000]
    large = [step for step in steps(1, 100) if step.batch.num_tokens > 150]
    fit = EngineSteps(small)
    off, stated = log_errors(fit, large)
    assert np.mean(off <= 1.645 * stated) >= 0.8
    assert stated.min() > max(fit.errors.inside.values())


def test_a_step_just_beyond_the_log_is_as_sure_as_the_largest_ones() -> None:
    """The error grows by a power of the octaves beyond the largest step, from the error of the largest steps on."""
    fit = shared_fit()
    off = fit.in_world(1.0, 0.0)
    steps_of = [StepWork(1, context) for context in range(1, 2_000_000, 5000)]
    sd = [math.log(off.seconds(step) / fit.seconds(step)) for step in steps_of]
    first = next(value for value in sd if value > sd[0] + 1e-9)
    largest = max(fit.errors.inside[False], fit.errors.beyond)
    assert first == pytest.approx(largest, rel=0.1)
    assert sd == sorted(sd)
    assert sd[-1] > 1.5 * largest


def test_worlds_of_steps_are_off_by_kind() -> None:
    fit, decode, prompt = shared_fit(), StepWork(4, 2000), StepWork(4, 2000, ((0, 100),))
    slow_decodes = fit.in_world(2.0, 0.0)
    assert slow_decodes.seconds(decode) == pytest.approx(
        fit.seconds(decode) * float(np.exp(2 * fit.errors.inside[False]))
    )
    assert slow_decodes.seconds(prompt) == fit.seconds(prompt)
    assert fit.in_world(0.0, 0.0).seconds(decode) == fit.seconds(decode)


def test_a_log_too_short_to_hold_steps_back_takes_the_error_of_all() -> None:
    fit = EngineSteps(steps(0, 13))
    assert set(fit.errors.inside.values()) == {fit.log_sd}
    assert fit.errors.beyond >= fit.log_sd


@cache
def noisy_fit() -> EngineSteps:
    return EngineSteps(steps(0, 60, 0.1))


def test_a_simulation_by_a_log_has_intervals_that_hold_the_truth() -> None:
    """A longer and quieter log of the same engine predicts the duration within the interval of the first."""
    specs = api.load_specs("llama-3.1-8b", None, LOAD)
    of_few, of_many = (api.set_up(specs, costs=fit) for fit in (noisy_fit(), shared_fit()))
    predicted = predict(of_few.deployment, NamedLoad("a", of_few.stream), 20, 0)
    assert predicted.drawn is not None
    low, high = predicted.drawn.intervals["duration_s"]
    assert low < of_many.run().duration_s < high < 2 * low
