"""The shipped profiles: they load, say how far off they are, and are what a fit of the published tables
gives.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from simtune.costs.iteration import Batch, StepModel
from simtune.costs.operators import OPERATORS
from simtune.costs.profile import Facts, build
from simtune.costs.tables import read_tables
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Hardware
from simtune.specs.plan import Batching, Parallelism, Pool

ROOT = Path(__file__).resolve().parents[2]

SOURCES = {
    "h100-sxm": ("aiconfigurator/h100_sxm", "vidur/h100", "vidur/a100/cpu_overheads.csv.gz"),
    "a100-sxm-80g": ("aiconfigurator/a100_sxm", "vidur/a100"),
}
COMMON = {
    "gemm.bf16",
    "prefill_attention.bf16",
    "decode_attention.bf16",
    "all_reduce.bf16",
    *(f"elementwise.{variant}.bf16" for variant in ("norm", "activation", "rope", "add")),
}
OPERATORS_OF = {
    "h100-sxm": COMMON
    | {"gemm.fp8", "moe.bf16", "moe.fp8", "prefill_attention.bf16.kv-fp8", "decode_attention.bf16.kv-fp8"},
    "a100-sxm-80g": COMMON,
}


@cache
def refitted(name: str, data_dir: Path) -> Hardware:
    facts = Facts.from_file(ROOT / "hwprofiles" / name / "facts.yaml")
    return build(read_tables([data_dir / "profiles" / source for source in SOURCES[name]]), facts)


@pytest.mark.parametrize("name", SOURCES)
def test_a_shipped_profile_says_what_it_is(name: str) -> None:
    profile = load_hardware(name)
    assert set(profile.operators) == OPERATORS_OF[name]
    for key, operator in profile.operators.items():
        assert set(operator.box) == set(OPERATORS[operator.kind].shape), key
        assert operator.hold_out, key
        assert all(0 < errors.median < errors.p90 < errors.max for errors in operator.hold_out), key
        assert operator.provenance.licence in ("Apache-2.0", "MIT")
    assert profile.host.provenance.note
    assert profile.device.price_source is not None
    assert profile.device.price_source.startswith("an example")


@pytest.mark.parametrize("name", SOURCES)
def test_a_shipped_profile_is_a_fit_of_the_published_tables(name: str, data_dir: Path) -> None:
    shipped, fresh = load_hardware(name), refitted(name, data_dir)
    assert set(shipped.operators) == set(fresh.operators)
    for key, operator in fresh.operators.items():
        assert shipped.operators[key].base.model_dump() == pytest.approx(operator.base.model_dump(), rel=0.01), key
        for ours, theirs in zip(shipped.operators[key].hold_out, operator.hold_out, strict=True):
            assert ours.model_dump(exclude={"split"}) == pytest.approx(
                theirs.model_dump(exclude={"split"}), rel=0.02, abs=0.002
            ), key
    assert shipped.host.step_s == pytest.approx(fresh.host.step_s, rel=0.01)
    assert shipped.host.per_sequence_s == pytest.approx(fresh.host.per_sequence_s, rel=0.01)


@pytest.mark.parametrize("name", SOURCES)
def test_fitted_rates_stay_below_the_data_sheet(name: str) -> None:
    """GEMM and decode attention run long enough for their rates to mean something."""
    profile = load_hardware(name)
    for key in ("gemm.bf16", "decode_attention.bf16"):
        base, device = profile.operators[key].base, profile.device
        assert 0.3 * device.memory_bytes_per_s < base.bytes_per_s < 1.05 * device.memory_bytes_per_s, key
    gemm = profile.operators["gemm.bf16"].base
    assert 0.5 * device.flops_per_s["bf16"] < gemm.flops_per_s < device.flops_per_s["bf16"]


def test_a_decode_step_of_an_8b_model_is_slower_than_reading_its_weights() -> None:
    """Memory bandwidth is a floor nothing passes, and a modern engine stays within twice of it at batch 1."""
    model, hardware = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
    pool = Pool(
        hardware="h100-sxm",
        instances=1,
        parallelism=Parallelism(),
        batching=Batching(max_num_seqs=256, max_num_batched_tokens=8192),
    )
    step = sum(StepModel(model, hardware, pool).breakdown(Batch(1, 1024, (), 1)).values())
    floor = 2 * (8.03e9 - 128256 * 4096) / hardware.device.memory_bytes_per_s  # all but the embedding table is read
    assert floor < step < 2 * floor
