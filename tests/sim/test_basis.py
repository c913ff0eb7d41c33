"""What a run's numbers rest on: some of its own steps, each standing for its time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from simtune.api import load_specs as specs_of
from simtune.api import set_up
from simtune.cli.simulate import simulate
from simtune.costs.basis import KindBasis
from simtune.costs.compiled import LinearCosts
from simtune.costs.predict import Basis
from simtune.engine import Step
from simtune.results.outcome import SampledStep
from simtune.results.summary import BasisShares, CostBasis, OperatorBasis
from simtune.sim.run_basis import asked_calls, cost_basis, evenly, note, summed
from simtune.sim.sampling import MOST, StepSampler
from simtune.sim.step_timing import JumpTime


def step(decodes: int) -> Step:
    return Step(num_decodes=decodes, context_tokens=100 * decodes, chunks=[], preempted=[])


def sampled(durations: list[int]) -> tuple[SampledStep, ...]:
    """Of steps of these ticks, which decode as many as their number."""
    sampler, busy = StepSampler(interval=1), 0
    for number, ticks in enumerate(durations, start=1):
        busy += ticks
        if busy >= sampler.due:
            sampler.take(busy, step(number), JumpTime(ticks, repetitions=1), ticks)
    return sampler.steps()


@pytest.mark.parametrize("durations", [[7] * 5000, [1] * 1000 + [10**6], [10**9], list(range(1, 700))])
def test_steps_stand_for_their_time(durations: list[int]) -> None:
    steps, total = sampled(durations), sum(durations)
    assert 1 <= len(steps) <= 2 * MOST
    weights = np.array([s.ticks for s in steps])
    assert weights.sum() == pytest.approx(total, rel=2 / MOST)
    mean = sum(d * n for n, d in enumerate(durations, start=1)) / total
    assert weights @ [s.num_decodes for s in steps] / weights.sum() == pytest.approx(mean, rel=3 / MOST)


def test_a_repeated_step_is_taken_with_the_contexts_of_the_repetitions_that_are_due() -> None:
    """As if each repetition had been a step of its own."""
    jumped, stepped = StepSampler(interval=25), StepSampler(interval=25)
    time = JumpTime(10, 1, 11)
    jumped.take(time.total, step(4), time, time.total)
    for number in range(11):
        own = replace(step(4), context_tokens=400 + 4 * number)
        ticks = time.elapsed(number + 1) - time.elapsed(number)
        if time.elapsed(number + 1) >= stepped.due:
            stepped.take(time.elapsed(number + 1), own, JumpTime(ticks, repetitions=1), ticks)
    assert jumped.steps() == stepped.steps()
    assert len({taken.context_tokens for taken in jumped.steps()}) > 3


def test_evenly_keeps_the_time() -> None:
    steps = [SampledStep(ticks, ticks, 1, 1, 1, ()) for ticks in (1, 1, 98, 100)]
    kept = evenly(steps, 2)
    assert [s.num_decodes for s in kept] == [98, 100]
    assert [s.ticks for s in kept] == [100, 100]
    assert evenly(steps, 4) == steps


def basis(**shares: float) -> CostBasis:
    kinds = ("measured", "interpolated", "extrapolated", "carried_over", "data_sheet")
    known: dict[str, Any] = {**dict.fromkeys(kinds, 0.0), **shares}
    return CostBasis(
        **known, operators=(OperatorBasis(operator="gemm", share=1.0, log_sd=0.1, basis=BasisShares(**known)),)
    )


def test_a_note_is_made_above_a_tenth() -> None:
    assert note(basis(interpolated=0.9, extrapolated=0.1)) is None
    said = note(basis(interpolated=0.6, extrapolated=0.1, carried_over=0.3))
    assert said == (
        "40% of the step time rests on no measurement of such shapes: 10% extrapolated (gemm), 30% carried over (gemm)"
    )


def test_a_run_says_what_it_rests_on() -> None:
    experiment = set_up(specs_of("llama-3.1-8b", "h100-sxm", "chat"), requests=100)
    result = experiment.run()
    found = cost_basis(experiment.deployment, result)
    assert found is not None
    data = found.to_data()
    shares = [data[name] for name in ("measured", "interpolated", "extrapolated", "carried_over", "data_sheet")]
    assert sum(shares) == pytest.approx(1, abs=1e-4)
    assert data["interpolated"] > 0.5
    assert sum(o["share"] for o in data["operators"]) == pytest.approx(1, abs=1e-4)
    again = cost_basis(experiment.deployment, experiment.run(record=True))
    assert again is not None
    assert again.interpolated == pytest.approx(found.interpolated, abs=0.02), "recorded or not"


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_shares_of_the_time_are_the_same_in_any_unit(unit: float) -> None:
    gemm, attention = KindBasis(), KindBasis()
    gemm.add(3 * unit, Basis.MEASURED, 0.0)
    attention.add(1 * unit, Basis.EXTRAPOLATED, 0.2)
    found = summed([{"gemm": gemm, "attention": attention}])
    assert found is not None
    assert (found.measured, found.extrapolated) == (0.75, 0.25)
    assert [(o.operator, o.share, o.log_sd) for o in found.operators] == [("gemm", 0.75, 0.0), ("attention", 0.25, 0.2)]


def test_shares_have_six_digits() -> None:
    gemm, attention = KindBasis(), KindBasis()
    gemm.add(2.0, Basis.MEASURED, 0.0)
    attention.add(1.0, Basis.EXTRAPOLATED, 1 / 7)
    basis = summed([{"gemm": gemm, "attention": attention}])
    assert basis is not None
    assert (basis.measured, basis.extrapolated) == (0.666667, 0.333333)
    assert [operator.log_sd for operator in basis.operators] == [0.0, 0.142857]


TWO_APART = {"arrival_s": [0.0, 1.0], "prompt_tokens": [8, 8], "output_tokens": [4, 4]}


def test_own_costs_rest_on_nothing_that_is_known_here() -> None:
    specs = specs_of("llama-3.1-8b", None, TWO_APART)
    experiment = set_up(specs, costs=lambda num_decodes, context_tokens, chunks: 1e-3)
    result = experiment.run()
    assert cost_basis(experiment.deployment, result) is None
    assert [*asked_calls(experiment.deployment, result)] == [], "nor do they ask operators for anything"


def test_the_steps_of_a_run_ask_the_operators_of_its_hardware() -> None:
    experiment = set_up(specs_of("llama-3.1-8b", "h100-sxm", TWO_APART))
    asked = [*asked_calls(experiment.deployment, experiment.run())]
    assert {hardware for hardware, _ in asked} == {"h100-sxm"}
    assert {"decode_attention", "prefill_attention"} <= {call.kind for _, call in asked}


class Stated(LinearCosts):
    """Of steps that all take as long, those with a prompt were measured."""

    log_sd = 0.2

    def basis(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]]) -> int:
        return Basis.MEASURED if chunks else Basis.EXTRAPOLATED


def test_own_costs_may_state_what_they_rest_on_and_err_where_nothing_was_measured() -> None:
    """One step in four has the prompt, for either request."""
    experiment = set_up(specs_of("llama-3.1-8b", None, TWO_APART), costs=Stated(step_s=0.01))
    found = cost_basis(experiment.deployment, experiment.run())
    assert found is not None
    assert (found.measured, found.extrapolated) == pytest.approx((0.25, 0.75), abs=0.01)
    (step,) = found.operators
    assert step.operator == "step"
    assert step.log_sd == pytest.approx(0.2 * found.extrapolated, abs=1e-6)


def test_the_command_says_so() -> None:
    asked = ["--model", "llama-3.1-8b", "--hardware", "h20", "--workload", "chat", "--requests", "50"]
    shown = CliRunner().invoke(simulate, asked)
    assert "step time" in shown.stdout
    assert "carried over" in shown.stdout
    assert "rests on no measurement of such shapes" in shown.stderr
    as_json = CliRunner().invoke(simulate, [*asked, "--json"])
    assert json.loads(as_json.stdout)["cost_basis"]["carried_over"] > 0.5
