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
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.results import Recorder
from simtune.costs.fit import fit_operator
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.tables import read_tables
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Arrays, Hardware, Provenance
from simtune.specs.pool import Batching, KvCache, Parallelism, Pool

pytestmark = pytest.mark.benchmark_only

PUBLISHED, BAND = 2324, 0.2
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
