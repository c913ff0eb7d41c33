"""What an engine adds to its kernels is found where it is known."""

from __future__ import annotations

import pytest

from simtune.costs.calibration import TimedStep
from simtune.costs.iteration import StepModel, StepWork
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.pool import Batching, Pool
from simtune.validation.judge.added_by_engine import added


def test_what_was_added_is_found_again() -> None:
    pool = Pool(hardware="h100-sxm", instances=1, batching=Batching(max_num_seqs=64, max_num_batched_tokens=1024))
    kernels = StepModel(load_model("llama-3.1-8b"), load_hardware("h100-sxm"), pool)
    decodes = [StepWork(n, 500 * n, (), n) for n in (1, 4, 16, 64)]
    chunks = [StepWork(n, 500 * n, ((0, 128),), n + 1) for n in (1, 4, 16)]

    def took(work: StepWork, step_s: float, sequence_s: float) -> TimedStep:
        return TimedStep(work, sum(kernels.breakdown(work).values()) + step_s + sequence_s * work.num_seqs)

    steps = [took(work, 2e-3, 5e-5) for work in decodes] + [took(work, 3e-3, 1e-5) for work in chunks]
    decode, prefill = added(steps, kernels)
    assert (decode.kind, decode.steps, prefill.kind, prefill.steps) == ("decode", 4, "prefill", 3)
    assert (decode.per_step_s, decode.per_sequence_s) == pytest.approx((2e-3, 5e-5))
    assert (prefill.per_step_s, prefill.per_sequence_s) == pytest.approx((3e-3, 1e-5))
    assert decode.share == pytest.approx(1 - decode.kernels_s / decode.measured_s)
    assert added(steps[:4], kernels) == [decode]
