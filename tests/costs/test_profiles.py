"""The shipped profiles: they load, say how far off they are, and are what a fit of the published tables
gives.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from simtune.costs.curve import MAX_KNOTS
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.operators import OPERATORS
from simtune.costs.predict import Predictor
from simtune.costs.profile import Facts, build
from simtune.costs.tables import read_tables
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Hardware
from simtune.specs.plan import Batching, Parallelism, Pool

ROOT = Path(__file__).resolve().parents[2]

SOURCES = {
    "h100-sxm": ("aiconfigurator/h100_sxm", "vidur/h100", "vidur/a100/cpu_overheads.csv.gz"),
    "a100-sxm-80g": ("aiconfigurator/a100_sxm", "vidur/a100"),
    "rtx-4090": ("llmservingsim/rtx4090",),
    "rtx-pro-6000": tuple(
        f"../validation/llmservingsim_rtxpro6000_llama31_8b/tp1_{table}.csv.gz"
        for table in ("attention", "dense", "per_sequence", "skew")
    ),
}
LAYERS = {
    *("gemm.bf16", "prefill_attention.bf16", "decode_attention.bf16", "mixed_attention.bf16"),
    *(f"elementwise.{variant}.bf16" for variant in ("norm", "activation", "rope")),
}
SERVERS = LAYERS - {"mixed_attention.bf16"} | {
    *("elementwise.add.bf16", "send_recv.bf16", "all_reduce.bf16", "all_reduce.nccl.bf16", "all_reduce.int8"),
    *(f"{kind}.{dtype}" for kind in ("all_gather", "reduce_scatter", "all_to_all") for dtype in ("bf16", "int8")),
}
OPERATORS_OF = {
    "h100-sxm": SERVERS
    | {"gemm.fp8", "moe.bf16", "moe.fp8", "moe.int4"}
    | {"prefill_attention.bf16.kv-fp8", "decode_attention.bf16.kv-fp8"},
    "a100-sxm-80g": SERVERS,
    "rtx-4090": LAYERS,
    "rtx-pro-6000": LAYERS,
}
MEASURED = ("cpu-x86-1thread",)  # by simtune itself: tests/profiling
LICENCES = ("Apache-2.0", "MIT")


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
        assert operator.interval is not None, key
        assert all(0 < errors.median < errors.p90 < errors.max for errors in operator.hold_out), key
        assert operator.provenance.kind == "published-tables"
        assert operator.provenance.licence in LICENCES
        assert " rows read, " in (operator.provenance.note or ""), key
    assert profile.host.provenance.note
    assert profile.device.price_source is not None
    assert profile.device.price_source.startswith("an example")


@pytest.mark.parametrize("name", [pytest.param("h100-sxm", marks=pytest.mark.slow), *list(SOURCES)[1:]])
def test_a_shipped_profile_is_a_fit_of_the_published_tables(name: str, data_dir: Path) -> None:
    shipped, fresh = load_hardware(name), refitted(name, data_dir)
    assert set(shipped.operators) == set(fresh.operators)
    for key, operator in fresh.operators.items():
        assert shipped.operators[key].base.model_dump() == pytest.approx(operator.base.model_dump(), rel=0.01), key
        assert shipped.operators[key].provenance == operator.provenance, key
        assert shipped.operators[key].uneven_s == operator.uneven_s, key
        for ours, theirs in zip(shipped.operators[key].hold_out, operator.hold_out, strict=True):
            assert ours.model_dump(exclude={"split"}) == pytest.approx(
                theirs.model_dump(exclude={"split"}), rel=0.1, abs=0.02
            ), key
        middle = {n: np.sqrt(np.prod(box)) for n, box in operator.box.items()} | dict.fromkeys(
            {"skew"} & set(operator.box), 0.0
        )
        here, there = (Predictor(p.operators[key], p.device.processors, p.arrays) for p in (shipped, fresh))
        assert here.seconds(**middle) == pytest.approx(there.seconds(**middle), rel=0.01), key
    assert shipped.host.step_s == pytest.approx(fresh.host.step_s, rel=0.01)
    assert shipped.host.per_sequence_s == pytest.approx(fresh.host.per_sequence_s, rel=0.01)


@pytest.mark.parametrize("name", SOURCES)
def test_a_shipped_profile_holds_no_rows_of_the_tables(name: str) -> None:
    """Curves have few knots, and a residual has fewer points than there were rows: only fitted numbers are shipped."""
    profile = load_hardware(name)
    for key, operator in profile.operators.items():
        assert all(len(c.x) <= MAX_KNOTS for c in operator.curves), key
        assert operator.kind != "gemm" or not operator.curves, key
        if operator.residual is not None:
            assert operator.provenance.points is not None
            assert operator.residual.points <= min(500, 0.75 * operator.provenance.points), key
    assert all(name.rsplit(".", 1)[1] in ("points", "weights") for name in profile.arrays)


@pytest.mark.parametrize(
    "path",
    sorted(p for p in (ROOT / "hwprofiles").glob("*/facts.yaml") if p.parent.name not in MEASURED),
    ids=lambda p: p.parent.name,
)
def test_a_data_sheet_hangs_together(path: Path) -> None:
    facts = Facts.from_file(path)
    device = facts.device
    assert facts.name == path.parent.name
    assert load_hardware(facts.name).device == device, "fitted or transferred from these facts"
    assert device.flops_per_s["fp16"] == device.flops_per_s["bf16"]
    for dtype in ("fp8", "int8"):
        ratio = device.flops_per_s.get(dtype, 2 * device.flops_per_s["bf16"]) / device.flops_per_s["bf16"]
        assert ratio == pytest.approx(2, rel=0.02) or (facts.name, dtype) == ("rtx-4090", "int8")
    assert device.architecture
    assert 1e9 < facts.links["host"].bytes_per_s <= facts.links["intra_node"].bytes_per_s < device.memory_bytes_per_s
    assert device.price_source is not None
    assert "example" in device.price_source


@pytest.mark.parametrize("name", ["h100-sxm", "a100-sxm-80g"])
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
    step = sum(StepModel(model, hardware, pool).breakdown(StepWork(1, 1024, (), 1)).values())
    floor = 2 * (8.03e9 - 128256 * 4096) / hardware.device.memory_bytes_per_s  # all but the embedding table is read
    assert floor < step < 2 * floor
