"""Measured serving runs of others as loads and plans of ours, by rule and never by row.

What the table does not tell is assumed alike for all rows of an engine, version and precision, and the load by the
origin of the row:

* a public sweep draws both lengths evenly from 0.8 L to L and keeps `concurrency` requests under way, ten times as many
  in all, the first of them at once;
* a gap analysis asks as often, with equal requests (genai-perf as in src/aiconfigurator/eval of
  ai-dynamo/aiconfigurator: ten requests for each user, no deviation of lengths); only those of `OUT_OF_STEP` with
  lengths that vary by a tenth.

Engines run with their presets (`preset_of`, `settings_of`), and with what their launch files say besides
(`benchmarks.serving.launches`).
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.launches import Launch, analysed, swept
from simtune.specs.catalog import load_engine, load_hardware, load_model, names
from simtune.specs.model import LayerGroup, Model, MoeFeedForward
from simtune.specs.plan import Plan
from simtune.specs.preset import merged
from simtune.specs.workload import ClosedLoop, FixedLength, Quantiles, Workload

MODELS = {
    "Qwen/Qwen3-32B": "qwen3-32b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
}
HARDWARE = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "b200_sxm": "b200"}
ROUTING_SKEW = 0.7
"""Zipf exponent of how often experts are chosen. AIConfigurator takes models to route by its `power_law_1.01`: times of
experts on one rank under it, over those of tokens dealt out, are about those of the experts that exponents of 0.5 to
0.9 wake, from one to eight rows an expert."""
OUT_OF_STEP = "llama-3.1-8b"
"""The model whose gap analyses are taken to have asked with lengths that vary by a tenth."""
VLLM_11 = "2025-11-04"
"""The day on which public sweeps went over from vLLM 0.10.2 to 0.11 (SemiAnalysisAI/InferenceX, .github/configs and
pull requests 102, closed, and 159, merged); releases are told from December 2025 on."""
ROUNDS = 10
"""Requests per client."""


@dataclass(frozen=True)
class Run:
    """One measured row."""

    row: dict[str, str]

    @property
    def model(self) -> str:
        return MODELS[self.row["model"]]

    @property
    def hardware(self) -> str:
        return HARDWARE[self.row["gpu"]]

    @property
    def dense(self) -> bool:
        return self.model not in ("gpt-oss-120b", "deepseek-v3")

    def number(self, name: str, default: int = 0) -> int:
        value = self.row[name]
        return int(float(value)) if value else default

    @property
    def ranks(self) -> tuple[int, int]:
        """GPUs that divide the attention of a layer, and groups of them with data-parallel attention.

        Some rows multiply sizes where experts are spread. How to read them is told by their ids (`tp4_ep4`), and by the
        launch files of the day (SemiAnalysisAI/InferenceX, benchmarks/ and .github/configs/nvidia-master.yaml): vLLM's
        of MiniMax have `--tensor-parallel-size T --enable-expert-parallel` and no data parallelism, where the table has
        tp T, attention_dp T and moe_ep T x T; TensorRT-LLM's have tp T, ep T and attention_dp on, where it has
        attention_dp T x T and moe_tp = moe_ep = T. All run in one node of 8 GPUs.
        """
        tp, groups = self.number("tp", 1), max(1, self.number("attention_dp", 1))
        experts = self.number("moe_ep", 1)
        if groups > 1 and tp == groups and experts == tp * groups:
            return tp, 1
        if experts > 1 and groups == experts * experts:
            return 1, experts
        return max(1, tp // groups), groups

    @property
    def sweep(self) -> bool:
        """Whether the row is of the public sweep."""
        return self.row["origin"] == "public sweep"

    @property
    def concurrency(self) -> int:
        return self.number("concurrency")

    @property
    def measured(self) -> dict[str, float]:
        """Mean seconds."""
        return {name: float(self.row[f"{name}_ms"]) / 1e3 for name in ("ttft", "tpot")}


def runs(data_dir: Path) -> Iterator[Run]:
    with gzip.open(data_dir / "serving/silicon_dev.csv.gz", "rt") as file:
        yield from map(Run, csv.DictReader(file))


def model_of(run: Run) -> Model:
    """The checkpoint that was served: the model in the formats of the row."""
    model = load_model(run.model)
    model = model.model_copy(update={"layers": tuple(map(_unevenly_routed, model.layers))})
    if run.model == "gpt-oss-120b":
        # Its 4-bit experts take 8-bit activations on Blackwell: TensorRT-LLM chooses that itself there (TRTLLM-Gen
        # kernels), and public sweeps tell vLLM to (VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8). Elsewhere 16 bits.
        return model.model_copy(update={"expert_dtype": "mxfp4_mxfp8"}) if run.hardware == "b200" else model
    if not run.row["gemm"]:
        return model
    return model.model_copy(update={"weight_dtype": run.row["gemm"], "expert_dtype": run.row["moe"]})


def _unevenly_routed(layers: LayerGroup) -> LayerGroup:
    if not isinstance(layers.feed_forward, MoeFeedForward):
        return layers
    feed_forward = layers.feed_forward.model_copy(update={"routing_skew": ROUTING_SKEW})
    return layers.model_copy(update={"feed_forward": feed_forward})


def workload_of(run: Run) -> Workload:
    """The load of a row, by its origin."""
    lengths: dict[str, Any] = {}
    for name, column in (("prompt", "isl"), ("output", "osl")):
        tokens, (least, most) = run.number(column), spread_of(run)
        drawn = Quantiles(levels=(0.0, 1.0), tokens=(max(1.0, least * tokens), most * tokens))
        lengths[name] = drawn if least < most else FixedLength(tokens=tokens)
    return Workload(
        name="silicon",
        requests=ROUNDS * run.concurrency,
        arrivals=ClosedLoop(users=run.concurrency),
        **lengths,
    )


def spread_of(run: Run) -> tuple[float, float]:
    """The shortest and the longest requests of a row, over its lengths."""
    if run.sweep:
        return 0.8, 1.0
    if run.model == OUT_OF_STEP:
        return 0.9, 1.1
    return 1.0, 1.0


def preset_of(run: Run) -> str:
    """The engine preset of a row: the newest release that is not newer, or the oldest there is. Where the row tells no
    release, the newest; of vLLM the one that sweeps had on the day."""
    family = run.row["engine"]
    releases = sorted(_release(name) for name in names("engine") if load_engine(name).family == family)
    version = run.row["engine_version"]
    untold = (0, 10 if run.row["measured"] < VLLM_11 else 11) if family == "vllm" else releases[-1]
    measured = _release(f"-{version}") if version[:1].isdigit() else untold
    fitting = [release for release in releases if release <= measured] or releases[:1]
    return f"{family}-{'.'.join(map(str, fitting[-1]))}"


def _release(name: str) -> tuple[int, ...]:
    """Major and minor number of what stands behind a name."""
    return tuple(int(part) for part in name.rpartition("-")[2].split(".")[:2])


def settings_of(run: Run, model: Model) -> dict[str, Any]:
    """Of its preset, and what its launch file says besides."""
    settings = load_engine(preset_of(run)).settings(load_hardware(run.hardware).device, model)
    launch = launch_of(run)
    return merged(swept(launch) if run.sweep else analysed(launch), settings)


def launch_of(run: Run) -> Launch:
    """What its launch file goes by."""
    return Launch(
        engine=run.row["engine"],
        release=run.row["engine_version"],
        weights=run.row["gemm"],
        model=run.model,
        hardware=run.hardware,
        tp=run.number("tp", 1),
        isl=run.number("isl"),
        osl=run.number("osl"),
        concurrency=run.concurrency,
        sweep=run.sweep,
        longest=longest(run),
    )


def longest(run: Run) -> int:
    """Tokens of the longest request of a row."""
    return round(spread_of(run)[1] * (run.number("isl") + run.number("osl"))) + 2


def plan_of(run: Run, model: Model) -> Plan:
    """The deployment of a row under the settings of its engine."""
    tp, groups = run.ranks
    experts = not run.dense and run.number("moe_ep", 1) > 1
    parallelism = {"tp": tp, "attention_dp": groups, "expert_parallel": experts}
    pool = {
        "hardware": run.hardware,
        "instances": 1,
        "parallelism": parallelism,
        "engine": preset_of(run),
        "max_model_len": launch_of(run).max_model_len,
        **settings_of(run, model),
    }
    return Plan.model_validate({"name": "silicon", "model": model.name, "pools": [pool]})


def error(predicted: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    """predicted / measured - 1 by metric."""
    return {name: predicted[name] / measured[name] - 1 for name in measured}


def quantiles(errors: list[float]) -> tuple[float, float, float]:
    """Signed median, median and p90 of the size, in per cent."""
    off = 100 * np.array(errors)
    return float(np.median(off)), float(np.median(np.abs(off))), float(np.quantile(np.abs(off), 0.9))
