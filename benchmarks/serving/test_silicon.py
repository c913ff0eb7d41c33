"""Measured serving runs of three engines beside their simulation: mean TTFT and TPOT.

    python -m pytest benchmarks/serving -m benchmark_only -s

379 runs that AIConfigurator publishes (its `silicon_sample.csv`, a cut). What the table does not say is assumed by
engine, release and origin: `benchmarks.serving.silicon` and `benchmarks.serving.launches`, most of it from published
launch files. Chosen on runs are: what launching a step with prompts takes in TensorRT-LLM, and that one seat is missing
(on those of Llama-3.1-8B); that no two prompts share a step of its analyses (on these and those of Qwen3-32B); that
requests of Llama-3.1-8B do not stay in step, on two engines; SGLang's host time for each sequence, and how many users
wait for a seat in SGLang 0.5.6 (on those of Llama-3.1-8B); what launching prompts takes with the Triton experts of
TensorRT-LLM, and in an SGLang of 2025, on first tokens. Errors are shown without all of these too. Rules were
chosen knowing the runs; how unevenly models route (`ROUTING_SKEW`) by tables of kernels beside them. Of each group: the
signed median error, then median and 90th percentile of its size, in per cent, and the targets.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import simtune
from benchmarks.results import Recorder
from benchmarks.serving.silicon import Run, error, model_of, plan_of, preset_of, quantiles, runs, workload_of
from simtune.errors import SimtuneError
from simtune.specs.catalog import kernels_of, load_hardware

pytestmark = pytest.mark.benchmark_only


class Target(NamedTuple):
    """Median and 90th percentile of the error, in per cent."""

    tpot: tuple[float, float]
    ttft: tuple[float, float] | None


TARGETS = {
    "vllm, dense": Target((4, 15), (15, 45)),
    "trtllm, dense": Target((6, 18), (20, 50)),
    "sglang, dense": Target((6, 20), (25, 60)),
    "gpt-oss": Target((8, 25), None),
    "DeepSeek": Target((8, 25), None),
}


CHOSEN_ON: tuple[dict[str, str], ...] = (
    {"model": "meta-llama/Llama-3.1-8B-Instruct", "engine": "trtllm"},
    {"model": "meta-llama/Llama-3.1-8B-Instruct", "engine": "sglang"},
    {"model": "Qwen/Qwen3-32B", "engine": "trtllm"},
    {"model": "openai/gpt-oss-120b", "gpu": "h200_sxm", "engine": "trtllm"},
    {"model": "deepseek-ai/DeepSeek-R1", "engine": "sglang", "engine_version": ""},
)
"""Columns of the runs that a number was chosen on."""
COLUMNS = ("model", "gpu", "engine", "engine_version", "gemm")


def chosen_on(cell: tuple[str, ...]) -> bool:
    """Whether a number was chosen on the runs of a cell of `COLUMNS`."""
    own = dict(zip(COLUMNS, cell, strict=True))
    return any(columns.items() <= own.items() for columns in CHOSEN_ON)


def group_of(run: Run) -> str:
    """The row of the table of targets that a run belongs to."""
    if run.dense:
        return f"{run.row['engine']}, dense"
    return "gpt-oss" if run.model == "gpt-oss-120b" else "DeepSeek"


def predicted(run: Run) -> dict[str, float]:
    """Mean seconds."""
    model, hardware = model_of(run), load_hardware(kernels_of(run.hardware, preset_of(run)))
    result = simtune.simulate(workload_of(run), plan=plan_of(run, model), model=model, hardware=hardware)
    return {"ttft": float(result.ttft_s.mean()), "tpot": float(result.tpot_s.mean())}


@cache
def errors(data_dir: Path) -> tuple[dict[str, dict[tuple[str, ...], dict[str, list[float]]]], list[str]]:
    """Errors by group and by model, card, engine, release and format; and what could not be simulated."""
    found: dict[str, dict[tuple[str, ...], dict[str, list[float]]]] = {name: {} for name in TARGETS}
    refused = []
    for run in runs(data_dir):
        cell = found[group_of(run)].setdefault(tuple(run.row[name] for name in COLUMNS), defaultdict(list))
        try:
            for metric, off in error(predicted(run), run.measured).items():
                cell[metric].append(off)
        except SimtuneError as problem:
            refused.append(f"{run.row['id']}: {problem}")
    return found, refused


@pytest.mark.parametrize("group", TARGETS)
def test_measured_runs(group: str, data_dir: Path, record: Recorder) -> None:
    cells, target = errors(data_dir)[0][group], TARGETS[group]
    for metric, limits in zip(("tpot", "ttft"), target, strict=True):
        pooled = [off for cell in cells.values() for off in cell[metric]]
        signed, median, p90 = quantiles(pooled)
        asked = "" if limits is None else f" (target {limits[0]:g} / {limits[1]:g})"
        print(f"\n{group}, {metric}, {len(pooled)} runs: {signed:+.1f}, {median:.1f} / {p90:.1f} %{asked}", end="")
        record(f"{group}, {metric}, median", median, "% off", "lower")
        record(f"{group}, {metric}, p90", p90, "% off", "lower")
        others = [off for key, cell in cells.items() if not chosen_on(key) for off in cell[metric]]
        if len(others) < len(pooled):
            signed, median, p90 = quantiles(others)
            print(
                f"\n    {len(others)} without those that numbers were chosen on: "
                f"{signed:+.1f}, {median:.1f} / {p90:.1f} %",
                end="",
            )
            record(f"{group}, {metric}, without those that numbers were chosen on, median", median, "% off", "lower")
            record(f"{group}, {metric}, without those that numbers were chosen on, p90", p90, "% off", "lower")
    for key, cell in sorted(cells.items()):
        if cell["tpot"]:
            shown = (
                f"{metric} {{:+.1f}}, {{:.1f}} / {{:.1f}}".format(*quantiles(cell[metric])) for metric in target._fields
            )
            print(f"\n    {len(cell['tpot']):3} {' '.join(filter(None, key)):75} {'  '.join(shown)}", end="")


def test_none_is_refused_that_ran(data_dir: Path) -> None:
    refused = errors(data_dir)[1]
    assert not refused, "\n".join(refused[:20])
