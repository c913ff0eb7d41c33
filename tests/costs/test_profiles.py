"""The shipped profiles: they load, say how far off they are, and are what a fit of the published tables
gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.costs.shipped import fitted
from simtune.costs.curve import MAX_KNOTS
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.operators import OPERATORS, Chip
from simtune.costs.predict import Predictor
from simtune.specs import yamlfile
from simtune.specs.catalog import kernels_of, load_hardware, load_model, names
from simtune.specs.hardware import Facts
from simtune.specs.pool import Batching, Parallelism, Pool

ROOT = Path(__file__).resolve().parents[2]

_RECIPES_TEXT = (ROOT / "simtune/hwprofiles/recipes.yaml").read_text()
ALL_RECIPES: dict[str, dict[str, Any]] = yamlfile.parse(_RECIPES_TEXT, "recipes.yaml").data
RECIPES = {name: recipe for name, recipe in ALL_RECIPES.items() if not {"carried", "newer"} & recipe.keys()}
NEWER = {name: recipe for name, recipe in ALL_RECIPES.items() if "newer" in recipe}
FITTED = [name for name, recipe in RECIPES.items() if "sources" in recipe]
CARDS = [name for name in FITTED if "facts" not in RECIPES[name]]
NORMS_BY_SHEET = ("h100-sxm", "h200-sxm", "b200", "gb200", "b300", "gb300")
"""vLLM compiles its norms; what there is of tables is of older ones (benchmarks/costs/test_norms.py)."""
MEASURED = ("cpu-x86-1thread", "h100-torch", "h200-torch")  # by simtune itself: tests/profiling
GEFORCE = ("rtx-3090", "rtx-4090", "rtx-5090")  # half the rate where 16-bit products are summed in 32 bits
NO_FP16 = ("gaudi-3", "tpu-v6e", "tpu-v7")  # their data sheets give no rate of it
ONE_RATE = ("gaudi-3",)  # as fast in bf16 as in fp8
ONE_MEMORY = ("gb10",)  # processor and GPU share it
LICENCES = ("Apache-2.0", "MIT")


def test_every_profile_has_a_recipe() -> None:
    assert {*names("hardware")} - {*MEASURED} == {*RECIPES}


@pytest.mark.parametrize("name", FITTED)
def test_a_shipped_profile_says_what_it_is(name: str) -> None:
    profile = load_hardware(name)
    assert (profile.name, profile.engine) == (name, RECIPES[name]["engine"])
    assert "gemm.bf16" in profile.operators
    assert ("elementwise.norm.bf16" in profile.operators) == (name not in NORMS_BY_SHEET)
    assert any(key.startswith("prefill_attention.bf16") for key in profile.operators)
    own = 0
    for key, operator in profile.operators.items():
        assert set(operator.box) == set(OPERATORS[operator.kind].shape), key
        assert operator.interval is not None, key
        assert operator.provenance.licence in LICENCES
        if operator.provenance.kind == "transferred":
            assert "transfer" in RECIPES[name] or "fill" in RECIPES[name], key
            continue
        own += 1
        assert operator.hold_out or (operator.provenance.points or 0) < 40, f"{key}: too few rows to hold any back"
        assert all(0 < errors.median < errors.p90 < errors.max for errors in operator.hold_out), key
        assert operator.provenance.kind == "published-tables"
        assert " rows read, " in (operator.provenance.note or ""), key
    assert own > len(profile.operators) / 2, "most of it was measured on the card itself"
    assert profile.host.provenance.note
    assert profile.device.price_source is not None
    assert profile.device.price_source.startswith("an example")


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in FITTED])
def test_what_is_carried_over_says_so(name: str) -> None:
    profile = load_hardware(name)
    assert {operator.provenance.kind for operator in profile.operators.values()} == {"transferred"}
    assert all(RECIPES[name]["transfer"] in operator.provenance.source for operator in profile.operators.values())


@pytest.mark.parametrize("name", [name for name in ("rtx-4090", "l40s") if name in FITTED])
def test_every_engine_has_kernels_of_its_own(name: str) -> None:
    assert kernels_of("h100-sxm", "trtllm-1.2") == "h100-sxm-trtllm"
    assert kernels_of(name, "sglang-0.5") == name, "nobody measured them"


@pytest.mark.parametrize(
    "name", [name if name == "rtx-4090" else pytest.param(name, marks=pytest.mark.slow) for name in FITTED]
)
def test_a_shipped_profile_is_a_fit_of_the_published_tables(name: str, data_dir: Path) -> None:
    shipped, fresh = load_hardware(name), fitted(name, RECIPES[name], data_dir)
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
        here, there = (
            Predictor(p.operators[key], p.device.processors, p.arrays, Chip.of(p.device)) for p in (shipped, fresh)
        )
        assert here.seconds(**middle) == pytest.approx(there.seconds(**middle), rel=0.01), key
    assert shipped.host.step_s == pytest.approx(fresh.host.step_s, rel=0.01)
    assert shipped.host.per_sequence_s == pytest.approx(fresh.host.per_sequence_s, rel=0.01)


@pytest.mark.parametrize("name", FITTED)
def test_a_shipped_profile_holds_no_rows_of_the_tables(name: str) -> None:
    """Curves have few knots, and a residual has fewer points than there were rows: only fitted numbers are shipped."""
    profile = load_hardware(name)
    for key, operator in profile.operators.items():
        assert all(len(c.x) <= MAX_KNOTS for c in operator.curves), key
        assert operator.kind != "gemm" or not operator.curves, key
        if operator.residual is not None and operator.provenance.kind != "transferred":
            assert operator.provenance.points is not None
            assert operator.residual.points <= min(500, 0.75 * operator.provenance.points), key
    assert all(name.rsplit(".", 1)[1] in ("points", "weights") for name in profile.arrays)


@pytest.mark.parametrize(
    "path",
    sorted(p for p in (ROOT / "simtune/hwprofiles").glob("*/facts.yaml") if p.parent.name not in MEASURED),
    ids=lambda p: p.parent.name,
)
def test_a_data_sheet_hangs_together(path: Path) -> None:
    facts = Facts.from_file(path)
    device = facts.device
    assert facts.name == path.parent.name
    assert load_hardware(facts.name).device == device, "fitted or transferred from these facts"
    assert device.flops_per_s.get("fp16") == (None if facts.name in NO_FP16 else device.flops_per_s["bf16"])
    for dtype in ("fp8", "int8"):
        usual = 1 if facts.name in ONE_RATE else 2
        ratio = device.flops_per_s.get(dtype, usual * device.flops_per_s["bf16"]) / device.flops_per_s["bf16"]
        assert ratio == pytest.approx(usual, rel=0.02) or (dtype == "int8" and facts.name in GEFORCE)
    assert device.architecture
    links = {name: link.bytes_per_s for name, link in facts.links.items()}
    if facts.name in ONE_MEMORY:
        assert links["host"] == device.memory_bytes_per_s
        assert links["intra_node"] == links["inter_node"], "a machine has one chip"
    else:
        assert 1e9 < links["host"] <= links["intra_node"] < device.memory_bytes_per_s
    assert device.price_source is not None
    assert "example" in device.price_source


@pytest.mark.parametrize("name", ["h100-sxm", "h200-sxm", "b200", "gb200", "a100-sxm-80g"])
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
