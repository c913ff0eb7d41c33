"""What a search takes, in units of ten million turns of `s += i * i`, measured in turns with it.

    python -m pytest benchmarks/tuner/test_search_speed.py -m benchmark_only -s

One process, CPU seconds: until the first plan that meets the SLO, and until no plan can be better by more than the gap
that is printed. Prefill and decode pools are searched beside mixed ones where the name says PD.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import Recorder
from simtune.api import load_question
from simtune.specs.drafters import Eagle
from simtune.specs.speculation import DrafterChoice
from simtune.specs.study import HardwareCount, Search, Study
from simtune.specs.workload import Slo
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.course import SearchCourse
from simtune.tuner.trial import Tuned

pytestmark = pytest.mark.benchmark_only

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "study.yaml"
LIMITS = {
    "p99": Slo(ttft_s={"p99": 2.0}, tpot_s={"p99": 0.05}),
    "mean": Slo(ttft_s={"mean": 1.0}, tpot_s={"mean": 0.03}),
}


def unit_s() -> float:
    def turns() -> int:
        s = 0
        for i in range(10_000_000):
            s += i * i
        return s

    begun = time.process_time()
    turns()
    return time.process_time() - begun


def study(model: str, devices: int, slo: Slo, *layouts: Any) -> Study:
    return Study(
        name=f"{model}-{devices}",
        model=model,
        hardware=(HardwareCount(profile="h200-sxm", devices=devices),),
        workload="chat",
        slo=slo,
        search=Search(
            layouts=layouts,
            tp=(1, 2, 4, 8),
            pp=(1,),
            max_num_seqs=(64, 128, 256, 512),
            max_num_batched_tokens=(2048, 4096, 8192),
            requests=2000,
            rate_tolerance=0.05,
        ),
    )


def wide_experts() -> Study:
    """DeepSeek-V3 with its own drafter, experts and attention spread over up to 16 of 32 GPUs."""
    acceptance = Path(__file__).with_name("mtp-deepseek-v3.yaml")
    return Study(
        name="deepseek-v3-32",
        model="deepseek-v3",
        hardware=(HardwareCount(profile="h200-sxm", devices=32),),
        workload="chat",
        slo=Slo(ttft_s={"p99": 5.0}, tpot_s={"p99": 0.1}),
        speculation=(DrafterChoice(name="mtp", drafter=Eagle(method="mtp"), acceptance=str(acceptance)),),
        search=Search(
            layouts=("mixed", "prefill-decode"),
            tp=(1, 8),
            pp=(1,),
            attention_dp=(1, 8, 16),
            expert_parallel=(False, True),
            max_num_seqs=(64, 128, 256, 512),
            max_num_batched_tokens=(2048, 4096, 8192),
            requests=2000,
            rate_tolerance=0.05,
        ),
    )


CASES: dict[str, str | Study] = {"quickstart, 8 x H100": str(QUICKSTART)} | {
    f"{model} on {devices} x H200, {' and '.join(layouts)}, {statistic}": study(model, devices, slo, *layouts)
    for model, devices in (("llama-3.1-70b", 8), ("qwen3-32b", 8), ("qwen3-32b", 16))
    for statistic, slo in LIMITS.items()
    for layouts in (("mixed",), ("mixed", "prefill-decode"))
}
CASES["deepseek-v3 with its drafter on 32 x H200, mixed and prefill-decode, p99"] = wide_experts()


@pytest.mark.parametrize("name", CASES)
def test_search(name: str, record: Recorder) -> None:
    before, begun, first = unit_s(), time.process_time(), [0.0]

    def note(now: SearchCourse) -> None:
        if now.best is not None and not first[0]:
            first[0] = time.process_time() - begun

    tuned = optimize(load_question(CASES[name]), jobs=1, progress=note)
    whole = time.process_time() - begun
    unit = (before + unit_s()) / 2
    simulated = sum(row.simulations > 0 for row in tuned.rows)
    record(f"{name}: first plan", first[0] / unit, "units", "lower")
    record(f"{name}: certified", whole / unit, "units", "lower")
    record(f"{name}: output tokens", _tokens_per_gpu(tuned), "tokens/s/GPU", "higher")
    record(f"{name}: plans simulated", simulated / len(tuned.rows), "of all", "lower")
    print(
        f"{name}: first plan {first[0] / unit:.1f} units, all {whole / unit:.1f}, gap {tuned.gap:.1%}; "
        f"{simulated} of {len(tuned.rows)} plans, {sum(row.simulations for row in tuned.rows)} simulations; "
        f"{tuned.chosen.candidate.name}: {tuned.value:.4g} {tuned.question.objective.unit}, "
        f"{_tokens_per_gpu(tuned):,.0f} output tokens/s/GPU"
    )


def _tokens_per_gpu(tuned: Tuned) -> float:
    """Output tokens of the requests that come in a second at the chosen rate."""
    candidate, rate = tuned.chosen.candidate, tuned.chosen.rate_rps
    assert rate is not None
    return rate * tuned.question.facts(candidate, tuned.question.stream(candidate)).output_tokens / candidate.num_gpus
