"""Host time of an engine is found in its own log of steps, if the engine does not hide it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from simtune.costs.calibration import Log, TimedStep
from simtune.costs.host_fit import fit_host_times
from simtune.costs.iteration import StepModel, StepWork
from tests.cli.conftest import call
from tests.costs.made_up import hardware, model, pool

SYNCHRONOUS = pool(asynchronous=False)


def log_of(step_s: float, per_sequence_s: float, noise: float = 0.0, sizes: tuple[int, ...] = (1, 4, 16, 60)) -> Log:
    """Return decodes of a made-up engine, and a prompt that took far longer than its kernels."""
    plain, draws = StepModel(model(), hardware(), SYNCHRONOUS), np.random.default_rng(1)
    works = [StepWork(n, n * context, (), n) for n in sizes for context in (10, 100, 1000)]
    host_s = [(step_s + per_sequence_s * w.num_seqs) * float(np.exp(noise * draws.standard_normal())) for w in works]
    steps = [TimedStep(w, plain.gpu_s(w) + host) for w, host in zip(works, host_s, strict=True)]
    return Log([*steps, TimedStep(StepWork(0, 0, ((0, 50),), 1), 9.0)])


def test_step_and_sequence_are_found() -> None:
    found = fit_host_times(model(), hardware(), SYNCHRONOUS, log_of(9e-4, 16e-6))
    assert found is not None
    assert (found.step_s, found.per_sequence_s) == pytest.approx((9e-4, 16e-6), rel=0.01)
    assert found.origin == "measured"
    assert found.log_sd == pytest.approx(0.0, abs=0.01)


def test_its_error_is_what_is_left_over() -> None:
    found = fit_host_times(model(), hardware(), SYNCHRONOUS, log_of(9e-4, 16e-6, noise=0.2))
    assert found is not None
    assert (found.step_s, found.per_sequence_s) == pytest.approx((9e-4, 16e-6), rel=0.35)
    assert found.log_sd is not None
    assert 0.05 < found.log_sd < 0.4


def test_no_part_is_negative() -> None:
    found = fit_host_times(model(), hardware(), SYNCHRONOUS, log_of(0.0, 16e-6))
    assert found is not None
    assert found.step_s == pytest.approx(0.0, abs=1e-6)


def test_a_hidden_host_and_batches_of_one_size_tell_nothing() -> None:
    assert fit_host_times(model(), hardware(), pool(), log_of(9e-4, 16e-6)) is None
    assert fit_host_times(model(), hardware(), SYNCHRONOUS, log_of(9e-4, 16e-6, sizes=(4, 4, 4))) is None


def test_the_command_prints_it_for_a_plan_that_schedules_step_by_step(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "schema: simtune/plan@1\nname: p\nmodel: llama-3.1-8b\npools:\n- hardware: l4\n  instances: 1\n"
        "  engine: vllm-0.11\n"
    )
    steps = [{"decodes": n, "context_tokens": 500 * n, "seconds": 0.06 + 1e-3 + 2e-4 * n} for n in range(1, 40)]
    lines = [{"schema": "simtune/steps@1"}, *steps]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = call(
        "calibrate", "l4", "--plan", plan, "--measured", tmp_path / "steps.jsonl", "--out", tmp_path / "l4", "--json"
    )
    assert told.code == 0, told
    document = json.loads(told.out)
    assert document["host"]["origin"] == "measured"
    assert document["host"]["step_s"] >= 0
