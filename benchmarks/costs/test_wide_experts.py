"""DeepSeek-V3 with its experts on 128 H100s, beside what was published of it.

    python -m pytest benchmarks/costs/test_wide_experts.py -m benchmark_only -s

The paper of Step-3 (arXiv 2507.19427) gives 2,324 output tokens a second and GPU for DeepSeek-V3 on Hopper GPUs at 50
ms a token, 4K tokens of context, in fp8 and without MTP. DeepSeek's own profile of decoding
(github.com/deepseek-ai/profile-data) has 128 ranks, tp 1, 128 sequences on each, and two micro-batches: while one
computes, tokens of the other are exchanged. A step of `StepModel` does one thing after the other. So it is shown four
ways: in one batch, as `StepModel` has it; in two halves one after the other; and in two halves with the exchange hidden
as far as it can be, which no schedule of two halves beats. And as a pool has it that says `overlap: two_batches`, whose
attention hides nothing. The last two are held against the published figure. Experts are those of each engine's table;
the exchange between nodes and latent attention are off the data sheet.

SGLang's deployment on 96 H100s (lmsys.org/blog/2025-05-05-large-scale-ep): for each node of eight, prefill instances of
four nodes compute 54,543 and 50,302 tokens a second of prompts of 2,000 and 4,000, those of nine nodes decode 22,282,
256 sequences on a rank after prompts of 2,000, both in two micro-batches. And DeepEP's README (of version 2) gives its
exchange of 8,192 tokens of a rank over two and four nodes of Hopper GPUs as 90 and 61 GB/s to dispatch, 81 and 61 to
combine, local traffic included.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.costs.fit import fit_operator
from simtune.costs.hardware_profile import build, usable
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.predict import Profile
from simtune.costs.tables import read_tables
from simtune.costs.tables.common import take
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Arrays, Facts, Hardware, Provenance
from simtune.specs.pool import Batching, KvCache, Parallelism, Pool

pytestmark = pytest.mark.benchmark_only

PUBLISHED, BAND = 2324, 0.2
PREFILL_NODES, PREFILLED = 4, {2000: 54543, 4000: 50302}
DECODE_NODES, DECODED = 9, 22282
EXCHANGED = {(2, "moe_dispatch"): 90e9, (2, "moe_combine"): 81e9, (4, "moe_dispatch"): 61e9, (4, "moe_combine"): 61e9}
RANKS, BATCH, CONTEXT = 128, 128, 4096
EXPERTS = "moe.fp8_block"
EXCHANGES = ("moe_dispatch", "moe_combine")


def with_experts_of(engine: str, data_dir: Path) -> Hardware:
    """The H100 with an engine's kernels for experts in block-scaled fp8."""
    profile = load_hardware("h100-sxm")
    folder = data_dir / "profiles/aiconfigurator_0.12/h100_sxm"
    table = read_tables(sorted(folder.glob(f"{engine}_*_moe_perf.parquet"))).operators[EXPERTS]
    device = profile.device
    source = Provenance(kind="published-tables", source=table.origin.name, licence=table.origin.licence)
    operator, arrays = fit_operator(
        table, device.processors, device.flops_per_s["fp8"], device.memory_bytes_per_s, source
    )
    changed = profile.model_copy(update={"operators": {**profile.operators, EXPERTS: operator}})
    return changed.with_arrays(Arrays({**profile.arrays, **arrays}))


def split(step: dict[str, float]) -> tuple[float, float]:
    """Seconds of computing, and of exchanging tokens."""
    exchange = sum(step[kind] for kind in EXCHANGES)
    return sum(step.values()) - exchange, exchange


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "sglang"])
def test_deepseek_v3_on_128_ranks(engine: str, data_dir: Path, record: Recorder) -> None:
    model = load_model("deepseek-v3").model_copy(update={"expert_dtype": "fp8_block"})
    pool = Pool(
        hardware="h100-sxm",
        instances=1,
        parallelism=Parallelism(expert_parallel=True, attention_dp=RANKS),
        batching=Batching(max_num_seqs=2 * BATCH, max_num_batched_tokens=4096),
        kv_cache=KvCache(dtype="fp8"),
    )
    hardware = with_experts_of(engine, data_dir)
    steps = StepModel(model, hardware, pool)
    overlapped = StepModel(model, hardware, pool.model_copy(update={"overlap": "two_batches"}))
    whole, half = (steps.breakdown(StepWork(b, b * CONTEXT, (), b)) for b in (BATCH, BATCH // 2))
    print(f"\n{engine}: " + ", ".join(f"{kind} {1e3 * seconds:.1f} ms" for kind, seconds in whole.items()))
    compute, exchange = split(half)
    ways = {
        "one batch": sum(whole.values()),
        "two halves in turn": 2 * (compute + exchange),
        "two halves, exchange hidden": 2 * max(compute, exchange),
        "overlap: two_batches": overlapped.gpu_s(StepWork(BATCH, BATCH * CONTEXT, (), BATCH)),
    }
    for name, seconds in ways.items():
        rate = BATCH / seconds
        print(f"  {name}: {1e3 * seconds:.1f} ms, {rate:,.0f} tokens/s/GPU, {rate / PUBLISHED - 1:+.0%} of published")
        record(f"{engine}, {name}", 100 * abs(rate / PUBLISHED - 1), "% off", "lower")
    for name in ("two halves, exchange hidden", "overlap: two_batches"):
        assert BATCH / ways[name] == pytest.approx(PUBLISHED, rel=BAND)


def deepseek(nodes: int, tokens: int, overlap: Literal["two_batches"] | None) -> StepModel:
    """DeepSeek-V3 with attention and experts on each H100 of some nodes, by SGLang's kernels."""
    model = load_model("deepseek-v3").model_copy(update={"expert_dtype": "fp8_block"})
    pool = Pool(
        hardware="h100-sxm",
        instances=1,
        parallelism=Parallelism(expert_parallel=True, attention_dp=8 * nodes),
        batching=Batching(max_num_seqs=512, max_num_batched_tokens=tokens),
        overlap=overlap,
    )
    return StepModel(model, load_hardware("h100-sxm-sglang"), pool)


@pytest.mark.parametrize("prompt", PREFILLED)
def test_prefill_of_sglang_on_four_nodes(prompt: int, record: Recorder) -> None:
    prompts = 16000 // prompt
    work = StepWork(0, 0, ((0, prompt),) * prompts, prompts)
    for overlap in (None, "two_batches"):
        rate = 8 * prompts * prompt / deepseek(PREFILL_NODES, 16384, overlap).gpu_s(work)
        print(f"\n{prompt}, {overlap}: {rate:,.0f} tokens/s/node, {rate / PREFILLED[prompt] - 1:+.0%} of published")
    record(f"prefill, prompts of {prompt}", 100 * abs(rate / PREFILLED[prompt] - 1), "% off", "lower")
    assert rate == pytest.approx(PREFILLED[prompt], rel=BAND)


def test_decode_of_sglang_on_nine_nodes(record: Recorder) -> None:
    work = StepWork(256, 256 * 2000, (), 256)
    for overlap in (None, "two_batches"):
        rate = 8 * 256 / deepseek(DECODE_NODES, 512, overlap).gpu_s(work)
        print(f"\n{overlap}: {rate:,.0f} tokens/s/node, {rate / DECODED - 1:+.0%} of published")
    record("decode, nine nodes", 100 * abs(rate / DECODED - 1), "% off", "lower")
    assert rate == pytest.approx(DECODED, rel=BAND)


@pytest.mark.parametrize(("nodes", "kind"), EXCHANGED)
def test_exchange_between_nodes(nodes: int, kind: str, record: Recorder) -> None:
    tokens, steps = 8192, deepseek(nodes, 16384, None)
    seconds = float(steps.routed(np.array([tokens]))[kind][0]) / 58  # layers with experts
    width = 7168 * (1 if kind == "moe_dispatch" else 2)
    visited = nodes * (1 - math.prod(1 - 256 / nodes / (256 - taken) for taken in range(8)))
    rate = tokens * visited * width / seconds
    print(f"\n{nodes} nodes, {kind}: {rate / 1e9:.0f} GB/s, {rate / EXCHANGED[nodes, kind] - 1:+.0%} of published")
    record(f"{kind} over {nodes} nodes", 100 * abs(rate / EXCHANGED[nodes, kind] - 1), "% off", "lower")
    assert rate == pytest.approx(EXCHANGED[nodes, kind], rel=0.3)


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
@pytest.mark.parametrize(
    ("card", "folder"), [("h200-sxm", "h200_sxm"), ("b200", "b200_sxm"), ("b300", "b300_sxm"), ("gb300", "gb300")]
)
def test_kernels_behind_the_exchange_on_other_numbers_of_ranks(
    card: str, folder: str, mode: str, data_dir: Path, record: Recorder
) -> None:
    facts = Facts.from_file(Path(__file__).parents[2] / f"simtune/hwprofiles/{card}/facts.yaml")
    tables = read_tables(sorted((data_dir / "profiles/aisimulate_0.13" / folder).glob("*wideep_*_moe*")), "sglang")
    tables = usable(tables, facts)
    table = tables.operators[key := f"moe.{mode}.fp8_block"]
    local = table.shape["experts"]
    errors: list[float] = []
    for experts in np.unique(local):
        trained = take(table, np.flatnonzero(local != experts))
        predictor = Profile(build(replace(tables, operators={key: trained}), facts)).predictor(
            "moe", "fp8_block", variant=mode
        )
        held_out = take(table, np.flatnonzero(local == experts))
        errors += (predictor.seconds(**held_out.shape) / held_out.seconds - 1).tolist()
    sizes = np.abs(errors)
    print(f"\n{card}, {mode}: {len(errors)} rows: {np.median(sizes):.1%} / {np.quantile(sizes, 0.9):.1%}")
    record(f"{card} {mode}, another number of ranks", 100 * float(np.median(sizes)), "% median", "lower")
    assert np.median(sizes) < 0.1
