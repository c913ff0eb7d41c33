"""Errors of predictions on measured serving runs, as `simtune show CARD` and reports state them.

    python -m benchmarks.serving.record DATA [--jobs 2] [--like]

Every run of `silicon_dev.csv.gz` and `silicon_dev2.csv.gz` is predicted with what a user has who knows the card, the
engine, its release and the number formats: the plain preset of the release, without what launch files set besides
(`benchmarks.serving.launches` has those) and without a rule that was chosen on runs. Loads are as in
`benchmarks.serving.silicon`. `--like` shows what the facts of published launch files (`simtune list launches`) change,
of the run's own card and of another one, and how much of the errors is common to a cell. Errors, not the measurements,
are written to simtune/costs/accuracy.json.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product, tee
from pathlib import Path
from typing import Any

import numpy as np

import simtune
from benchmarks.serving import silicon
from benchmarks.serving.silicon import Run, error, longest, preset_of, spread_of, workload_of
from simtune.costs.accuracy_record import RECORD, AccuracyCell, AccuracyRecord, kind_of, number_format
from simtune.costs.other_engines import load_kernels
from simtune.errors import SimtuneError
from simtune.specs.catalog import load_engine, load_hardware, load_launch, load_model, names
from simtune.specs.launch import LaunchFacts, LoadShape
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.preset import Case, EnginePreset

FILES = ("silicon_dev.csv.gz", "silicon_dev2.csv.gz")
MODELS = silicon.MODELS | {
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen/Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-v3",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-v3",
}
CHECKPOINTS = {"Qwen/Qwen3-235B-A22B-FP8": "fp8_block"}
"""Formats of checkpoints that a row names, by their config.json, where its own column is coarser."""
SPARE_TOKENS = 200
"""Tokens by which a user sets the longest request above those of the load: that of the model would often not fit."""
ORIGINS = {"public sweep": "inferencex-", "gap analysis": "aiconfigurator-"}
"""Prefix of the names of launch facts for runs of an origin."""
HARDWARE = silicon.HARDWARE | {"b300_sxm": "b300", "gb200": "gb200"}


@cache
def every_launch() -> tuple[LaunchFacts, ...]:
    """Return all launch facts."""
    return tuple(map(load_launch, names("launch")))


@cache
def model_named(name: str) -> Model:
    """Return a model of the catalogue."""
    return load_model(name)


class PlainRun(Run):
    """A measured run as a user would state it."""

    @property
    def model(self) -> str:
        return MODELS[self.row["model"]]

    @property
    def hardware(self) -> str:
        return HARDWARE[self.row["gpu"]]

    @property
    def served(self) -> Model:
        """The model in the formats of the row; in those of its checkpoint for gpt-oss, `CHECKPOINTS` and rows
        without formats."""
        model = model_named(self.model)
        if (stated := CHECKPOINTS.get(self.row["model"])) is not None:
            return model.model_copy(update={"weight_dtype": stated})
        if self.model == "gpt-oss-120b" or not self.row["gemm"]:
            return model
        if model.weight_dtype == "fp8_block" and self.row["gemm"] == "fp8":
            return model
        return model.model_copy(update={"weight_dtype": self.row["gemm"], "expert_dtype": self.row["moe"]})

    @property
    def release(self) -> str:
        """Name of the engine preset of its release."""
        return preset_of(self)

    @property
    def preset(self) -> EnginePreset:
        """Settings of its engine: those of the release, with steps for the longest prompt if prompts are not cut.

        Without chunked prefill TensorRT-LLM rejects prompts longer than max_num_tokens (tensorrt_llm/llmapi/llm.py,
        _check_arguments), and a prompt of almost that length waits until nothing decodes. A user raises it to
        `SPARE_TOKENS` above the longest prompt, like the longest request: chat templates add some tokens.
        """
        preset = load_engine(self.release)
        batching = preset.pool["batching"]
        least_tokens = round(spread_of(self)[1] * self.number("isl")) + SPARE_TOKENS
        if batching.get("chunked_prefill", True) or least_tokens <= batching["max_num_batched_tokens"]:
            return preset
        case = Case(pool={"batching": {"max_num_batched_tokens": least_tokens}})
        return preset.model_copy(update={"cases": (*preset.cases, case)})

    @property
    def plan(self) -> Plan:
        """The deployment under its engine's settings."""
        tp, groups = self.ranks
        model = self.served
        experts = kind_of(model) == "moe" and self.number("moe_ep", 1) > 1
        settings = self.preset.settings(load_hardware(self.hardware).device, model)
        pool = {
            "max_model_len": longest(self) + SPARE_TOKENS,
            **settings,
            "hardware": self.hardware,
            "instances": 1,
            "parallelism": {"tp": tp, "attention_dp": groups, "expert_parallel": experts},
            "engine": self.release,
        }
        return Plan.model_validate({"name": "run", "model": model.name, "pools": [pool]})

    @property
    def cell(self) -> tuple[str, ...]:
        """Model, kind, card, engine, release and format."""
        model = self.served
        engine = self.row["engine"]
        return self.model, kind_of(model), self.hardware, engine, self.release, number_format(model)

    @property
    def series(self) -> tuple[str, ...]:
        """Release, parallelism and lengths: runs of a cell that share them differ by their number of users."""
        return tuple(self.row[name] for name in ("engine_version", "tp", "attention_dp", "moe_ep", "isl", "osl"))

    def errors(self) -> dict[str, float]:
        """Predicted over measured means, less 1."""
        hardware = load_kernels(self.hardware, self.release)
        result = simtune.simulate(workload_of(self), plan=self.plan, model=self.served, hardware=hardware)
        predicted = {"ttft": float(result.ttft_s.mean()), "tpot": float(result.tpot_s.mean())}
        return error(predicted, self.measured)


class LikeRun(PlainRun):
    """A measured run with the launch facts of a published deployment of its model, card, engine and format."""

    @property
    def launch(self) -> LaunchFacts | None:
        """The launch facts of the origin of the run; None where nothing was published."""
        of_model = (launch for launch in self.of_engine if launch.model == self.model)
        return next((launch for launch in of_model if self._has_weights(launch) and self._is_of_card(launch)), None)

    @property
    def of_engine(self) -> Iterator[LaunchFacts]:
        """Launch facts of its origin and engine, for servers without pools."""
        for launch in every_launch():
            fits = launch.engine.startswith(self.row["engine"]) and not launch.disaggregated
            if fits and launch.name.startswith(ORIGINS[self.row["origin"]]):
                yield launch

    def _has_weights(self, launch: LaunchFacts) -> bool:
        return launch.weights == number_format(self.served)

    def _is_of_card(self, launch: LaunchFacts) -> bool:
        return launch.hardware == self.hardware

    @property
    def release(self) -> str:
        """Name of the engine preset of its release, or of the launch file's if neither the row nor the day tells it."""
        assert self.launch is not None
        is_told = self.row["engine_version"][:1].isdigit() or self.row["engine"] == "vllm"
        return super().release if is_told else self.launch.engine

    @property
    def preset(self) -> EnginePreset:
        """Settings of its engine: those of the launch file, and of the release where it sets nothing."""
        assert self.launch is not None
        return self.launch.over(super().preset, LoadShape.of(workload_of(self), None))


class OtherCardRun(LikeRun):
    """A measured run with the launch facts of a deployment on another card than its own."""

    def _is_of_card(self, launch: LaunchFacts) -> bool:
        return launch.hardware != self.hardware


class OtherModelRun(LikeRun):
    """A measured run with the launch facts of a deployment of another model, of its card and format if there is one."""

    @property
    def launch(self) -> LaunchFacts | None:
        """The launch facts of another model, of its origin and engine; None where nothing was published."""
        others = (launch for launch in self.of_engine if launch.model != self.model)
        return max(others, key=lambda launch: (self._is_of_card(launch), self._has_weights(launch)), default=None)


def plain_runs(data: Path) -> Iterator[PlainRun]:
    """Yield the runs of both tables."""
    for name in FILES:
        with gzip.open(data / "serving" / name, "rt") as file:
            yield from map(PlainRun, csv.DictReader(file))


def judged(run: PlainRun) -> tuple[tuple[str, ...], dict[str, float] | str]:
    """Return the cell of a run and its errors, or the reason why it is refused."""
    try:
        return run.cell, run.errors()
    except SimtuneError as problem:
        return run.cell, f"{run.row['id']}: {problem}"


def record_of(judgements: Iterator[tuple[tuple[str, ...], dict[str, float] | str]]) -> AccuracyRecord:
    """Return the record of runs that were judged."""
    tpot: dict[tuple[str, ...], list[float]] = defaultdict(list)
    ttft: dict[tuple[str, ...], list[float]] = defaultdict(list)
    refused: dict[tuple[str, ...], int] = defaultdict(int)
    for number, (cell, errors) in enumerate(judgements, 1):
        if isinstance(errors, str):
            print(errors, file=sys.stderr)
            refused[cell] += 1
        else:
            tpot[cell].append(round(errors["tpot"], 4))
            ttft[cell].append(round(errors["ttft"], 4))
        if number % 20 == 0:
            print(f"{number} runs", file=sys.stderr, flush=True)
    keys = ("model", "kind", "hardware", "engine", "preset", "format")
    cells = tuple(
        AccuracyCell.model_validate(
            {**dict(zip(keys, cell, strict=True)), "tpot": sorted(tpot[cell]), "ttft": sorted(ttft[cell]),
             "refused": refused[cell]}
        )
        for cell in sorted({*tpot, *refused})
    )  # fmt: skip
    return AccuracyRecord(schema_="simtune/accuracy-record@1", simtune=simtune.__version__, cells=cells)


def print_spread(
    runs: Sequence[PlainRun], judgements: Sequence[tuple[tuple[str, ...], dict[str, float] | str]]
) -> None:
    """Print how far off predictions are, by kind and metric: all, less the median of each cell, less that of each
    series of numbers of users."""
    done = [
        (run, cell, errors) for run, (cell, errors) in zip(runs, judgements, strict=True) if isinstance(errors, dict)
    ]
    for kind, metric in product(("dense", "moe"), ("tpot", "ttft")):
        of_kind = [(run, cell, errors[metric]) for run, cell, errors in done if cell[1] == kind]
        off = [error for _, _, error in of_kind]
        by_cell = less_medians((cell, error) for _, cell, error in of_kind)
        by_series = less_medians(((*cell, *run.series), error) for run, cell, error in of_kind)
        parts = (
            f"{100 * np.median(np.abs(e)):.0f}/{100 * np.quantile(np.abs(e), 0.9):.0f}"
            for e in (off, by_cell, by_series)
        )
        print(kind, metric, len(off), "runs, all, less cells, less series:", *parts, flush=True)


def less_medians(errors: Iterable[tuple[tuple[str, ...], float]]) -> list[float]:
    """Return errors (predicted / measured - 1) with each group's predictions divided by the group's median ratio."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for group, off in errors:
        groups[group].append(1 + off)
    return [ratio / float(np.median(ratios)) - 1 for ratios in groups.values() for ratio in ratios]


def print_launched(data: Path, jobs: int) -> None:
    """Print errors of the runs for which a launch file of their model, card, engine and format is known: plain, with
    the facts of it, and with those of another card.
    """
    runs = [run for run in (LikeRun(run.row) for run in plain_runs(data)) if run.launch is not None]
    with ProcessPoolExecutor(jobs) as pool:
        kinds: dict[str, type[PlainRun]] = {
            "plain": PlainRun,
            "like": LikeRun,
            "like, of another card": OtherCardRun,
            "like, of another model": OtherModelRun,
        }
        for title, kind_of_run in kinds.items():
            predicted = [kind_of_run(run.row) for run in runs]
            chosen = [run for run in predicted if not isinstance(run, LikeRun) or run.launch is not None]
            judgements = list(pool.map(judged, chosen, chunksize=1))
            record = record_of(iter(judgements))
            print(title)
            print_spread(chosen, judgements)
            for cell in record.cells:
                same = record.accuracy(model=cell.model, hardware=cell.hardware, engine=cell.engine, format=cell.format)
                assert same is not None
                print(f"{title}: {cell.hardware}, {cell.preset}, {cell.format}: {same.words}")
            for kind in ("dense", "moe"):
                if (group := record.accuracy(kind=kind)) is not None:
                    print(f"{title}: {kind}: {group.words}, {group.refused} refused", flush=True)


def main() -> None:
    """Write the record, and print it by kind; with --like print what launch facts change instead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--like", action="store_true", help="with launch facts, beside plain presets; writes nothing")
    options = parser.parse_args()
    if options.like:
        print_launched(options.data, options.jobs)
        return
    found: Any = list(plain_runs(options.data))
    with ProcessPoolExecutor(options.jobs) as pool:
        judgements, again = tee(pool.map(judged, found, chunksize=1))
        record = record_of(judgements)
    RECORD.write_text(json.dumps(record.to_data(), indent=1) + "\n", encoding="utf-8")
    for kind in ("dense", "moe"):
        print(kind, record.accuracy(kind=kind))
    print_spread(found, list(again))


if __name__ == "__main__":
    main()
