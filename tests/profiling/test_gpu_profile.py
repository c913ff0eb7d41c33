"""The profile of a GPU that comes with simtune, measured on one H100, and the points that it was fitted to."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.costs.hardware_profile import build
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.tables import read_tables
from simtune.profiling.fitting import VALIDATION
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Facts
from simtune.specs.pool import Batching, Pool

ROOT = Path(__file__).resolve().parents[2]
NAME = "h100-torch"
FACTS = ROOT / "simtune/hwprofiles" / NAME / "facts.yaml"
POINTS = Path(__file__).parent / "data/h100-torch.jsonl.gz"


def test_it_is_measured_and_states_its_errors() -> None:
    profile = load_hardware(NAME)
    assert profile.device == Facts.from_file(FACTS).device
    assert "not a data sheet" in profile.device.source
    assert {operator.provenance.kind for operator in profile.operators.values()} == {"measured"}
    for key in ("gemm.bf16", "decode_attention.bf16", "prefill_attention.bf16"):
        checked = profile.operators[key].hold_out[0]
        assert checked.split == VALIDATION
        assert checked.test_points >= 10
        assert checked.median < 0.1, key


def test_its_model_takes_no_time_of_a_data_sheet() -> None:
    pool = Pool(hardware=NAME, instances=1, batching=Batching(max_num_seqs=16, max_num_batched_tokens=512))
    steps = StepModel(load_model("llama-3.1-8b"), load_hardware(NAME), pool)
    assert steps.estimated == set()


def test_stored_points_give_its_operators() -> None:
    tables, profile = read_tables([POINTS]), load_hardware(NAME)
    assert set(tables.operators) == set(profile.operators)
    gemm = {"gemm.bf16": tables.operators["gemm.bf16"]}
    tables.operators = gemm
    fitted = build(tables, Facts.from_file(FACTS)).operators["gemm.bf16"]
    assert fitted.base.flops_per_s == pytest.approx(profile.operators["gemm.bf16"].base.flops_per_s, rel=0.01)
    assert fitted.base.bytes_per_s == pytest.approx(profile.operators["gemm.bf16"].base.bytes_per_s, rel=0.01)


def test_a_larger_batch_reads_weights_once() -> None:
    pool = Pool(hardware=NAME, instances=1, batching=Batching(max_num_seqs=16, max_num_batched_tokens=512))
    steps = StepModel(load_model("llama-3.1-8b"), load_hardware(NAME), pool)
    single, sixteen = (steps.seconds(StepWork(batch, 512 * batch, (), batch)) for batch in (1, 16))
    assert single < sixteen < 2 * single
