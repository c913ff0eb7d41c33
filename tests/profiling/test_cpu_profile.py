"""The profile of a processor that comes with simtune: one machine's, measured by `simtune profile` itself."""

from __future__ import annotations

from pathlib import Path

from simtune.costs.iteration import StepModel, StepWork
from simtune.profiling.fitting import VALIDATION
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Facts
from simtune.specs.pool import Batching, Pool

ROOT = Path(__file__).resolve().parents[2]
NAME = "cpu-x86-1thread"


def test_it_says_that_it_is_one_machines_and_how_far_off_it_was() -> None:
    profile = load_hardware(NAME)
    facts = Facts.from_file(ROOT / "simtune/hwprofiles" / NAME / "facts.yaml")
    assert profile.device == facts.device
    assert profile.device.price_per_hour_usd is None
    assert "one machine" in (ROOT / "simtune/hwprofiles" / NAME / "profile.yaml").read_text()[:400]
    assert "not a data sheet" in facts.device.source
    for key in ("gemm.bf16", "decode_attention.bf16", "prefill_attention.bf16"):
        checked = profile.operators[key].hold_out[0]
        assert checked.split == VALIDATION
        assert checked.test_points >= 5
        assert checked.median < 0.1, key
    assert {operator.provenance.kind for operator in profile.operators.values()} == {"measured"}


def test_it_serves_the_model_it_was_measured_for_without_estimates() -> None:
    pool = Pool(
        hardware=NAME,
        instances=1,
        batching=Batching(max_num_seqs=16, max_num_batched_tokens=512),
        cuda_graphs=False,
    )
    steps = StepModel(load_model("llama-3.2-1b"), load_hardware(NAME), pool)
    assert steps.estimated == set()
    one, sixteen = (steps.seconds(StepWork(b, 1024 * b, (), b)) for b in (1, 16))
    assert 0.01 < one < sixteen < 16 * one  # a step reads the weights once, however many sequences share it
