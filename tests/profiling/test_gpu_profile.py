"""The profiles of GPUs that come with simtune, measured on one of each, and the points that they were fitted to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simtune.costs.hardware_profile import build
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.predict import Profile
from simtune.costs.tables import read_tables
from simtune.costs.tables.own import MeasuredPoint, read_points
from simtune.profiling.fitting import VALIDATION
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Facts
from simtune.specs.pool import Batching, Pool

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("h100-torch", "h200-torch")
SHEETS = {"h100-torch": "h100-sxm", "h200-torch": "h200-sxm"}
"""Profiles from published tables of the same card."""

pytestmark = pytest.mark.parametrize("name", NAMES)


def facts(name: str) -> Path:
    return ROOT / "simtune/hwprofiles" / name / "facts.yaml"


def points(name: str) -> Path:
    return Path(__file__).parent / f"data/{name}.jsonl.gz"


def test_it_is_measured_and_states_its_errors(name: str) -> None:
    profile = load_hardware(name)
    assert profile.device == Facts.from_file(facts(name)).device
    assert "not a data sheet" in profile.device.source
    assert {operator.provenance.kind for operator in profile.operators.values()} == {"measured"}
    for key in ("gemm.bf16", "decode_attention.bf16", "prefill_attention.bf16"):
        checked = profile.operators[key].hold_out[0]
        assert checked.split == VALIDATION
        assert checked.test_points >= 4
        assert checked.median < 0.1, key


def test_its_model_takes_no_time_of_a_data_sheet(name: str) -> None:
    pool = Pool(hardware=name, instances=1, batching=Batching(max_num_seqs=16, max_num_batched_tokens=512))
    steps = StepModel(load_model("llama-3.1-8b"), load_hardware(name), pool)
    assert steps.estimated == set()


def test_stored_points_give_its_operators(name: str) -> None:
    tables, profile = read_tables([points(name)]), load_hardware(name)
    assert set(tables.operators) == set(profile.operators)
    gemm = {"gemm.bf16": tables.operators["gemm.bf16"]}
    tables.operators = gemm
    fitted = build(tables, Facts.from_file(facts(name))).operators["gemm.bf16"]
    assert fitted.base.flops_per_s == pytest.approx(profile.operators["gemm.bf16"].base.flops_per_s, rel=0.01)
    assert fitted.base.bytes_per_s == pytest.approx(profile.operators["gemm.bf16"].base.bytes_per_s, rel=0.01)


def test_products_of_published_tables_take_what_was_measured(name: str) -> None:
    """No published table saw these points, and torch calls the products that engines call."""
    _, measured, _ = read_points(points(name))
    products = [p for p in measured if p.kind == "gemm" and p.role != "sentinel" and p.seconds]
    assert len(products) > 60
    shape = {size: np.array([p.shape[size] for p in products]) for size in ("m", "n", "k")}
    seconds = Profile(load_hardware(SHEETS[name])).predictor("gemm", "bf16").seconds(**shape)
    off = np.abs(seconds / np.array([p.seconds for p in products]) - 1)
    assert np.median(off) < 0.05
    assert np.quantile(off, 0.9) < 0.15


def single_decodes(name: str) -> list[MeasuredPoint]:
    _, measured, _ = read_points(points(name))
    return [p for p in measured if p.kind == "step" and p.shape["decodes"] <= 1 and p.seconds]


def test_whole_steps_take_the_sum_of_their_operators(name: str) -> None:
    """Prompts and single decodes of the whole model, as one graph. Steps of several decodes were timed with a copy of
    the cache that no engine makes."""
    pool = Pool(hardware=name, instances=1, batching=Batching(max_num_seqs=16, max_num_batched_tokens=512))
    steps = StepModel(load_model("llama-3.1-8b"), load_hardware(name), pool)
    whole = single_decodes(name)
    assert len(whole) > 5
    for point in whole:
        s = {size: round(value) for size, value in point.shape.items()}
        chunks = ((s["past"], s["tokens"]),) if s["tokens"] else ()
        work = StepWork(s["decodes"], s["decodes"] * s["context"], chunks, s["samples"])
        assert sum(steps.breakdown(work).values()) == pytest.approx(point.seconds, rel=0.05), point.shape


def test_a_larger_batch_reads_weights_once(name: str) -> None:
    pool = Pool(hardware=name, instances=1, batching=Batching(max_num_seqs=16, max_num_batched_tokens=512))
    steps = StepModel(load_model("llama-3.1-8b"), load_hardware(name), pool)
    single, sixteen = (steps.seconds(StepWork(batch, 512 * batch, (), batch)) for batch in (1, 16))
    assert single < sixteen < 2 * single
