"""Measured deployments with prefill and decode pools, predicted by plain presets, and with published launch facts.

    python -m benchmarks.serving.pools DATA [--like] [--jobs 2] [--users 600]

The 72 runs of `silicon_pd_dev.csv.gz`: DeepSeek-R1 on pools of H100, H200, B200 and GB200. What a user has is known:
cards, engine, release, formats, instances and how each is divided. Everything else is the preset's: the table tells
neither token budgets nor the link, and nothing here was chosen on runs.

With `--like` each run is also predicted with the launch facts of its card, engine and format (`simtune list launches`:
names that end in -pd), if there are some. Whether a run had drafts is not in the table. Launch files state for which
numbers of users servers were launched without drafts, or both ways. A run's id ends in the number of its configuration,
and configurations differ if drafts do (SemiAnalysisAI/InferenceX-app, table configs), so runs of a configuration one of
which was launched without drafts only had none. Errors are printed apart for these and for the others.

Errors of TPOT, TTFT and output tokens/s are printed by engine and card: median and 90th percentile of their size, and
the signed median. Runs of more than `--users` are left out.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import simtune
from benchmarks.serving.record import SPARE_TOKENS, PlainRun, every_launch
from benchmarks.serving.silicon import error, longest, preset_of, workload_of
from simtune.costs.accuracy_record import number_format
from simtune.costs.other_engines import load_kernels
from simtune.errors import SimtuneError
from simtune.specs.catalog import load_engine, load_hardware
from simtune.specs.launch import Drafting, LaunchFacts, LoadShape
from simtune.specs.plan import Plan
from simtune.specs.pool import Role
from simtune.specs.preset import EnginePreset

FILE = "silicon_pd_dev.csv.gz"
METRICS = ("tpot", "ttft", "tokens")
ROLES: tuple[Role, ...] = ("prefill", "decode")
BEHIND_DYNAMO = {"0.5.1": "trtllm-1.0", "0.8.1": "trtllm-1.2"}
"""Presets of TensorRT-LLM by the release of Dynamo in front of it, which is what the table tells. Assumed: what runs of
the sweep without Dynamo had in those months."""
LAUNCHED_DIVISION = {("h200-sxm", 1024): (1, 8), ("h200-sxm", 8192): (8, 1)}
"""Attention's tp and data-parallel size of prefill instances by card and prompt tokens, as launch files have them where
the table, which has labels of the sweep, differs (left_out of inferencex-deepseek-v3-fp8-h200-trtllm-pd)."""
FIRST_SGLANG_FILE = "2026"
"""Launch files of SGLang are of February 2026; before, pools were divided otherwise, by scripts that are not public."""
UNDRAFTED, UNKNOWN = "no drafts", "drafts unknown"


class PooledRun(PlainRun):
    """A measured run of prefill and decode pools, as a user would state it."""

    @property
    def release(self) -> str:
        """Name of the engine preset."""
        if self.row["engine"] == "trtllm":
            return BEHIND_DYNAMO[self.row["engine_version"].partition("-")[0].partition(".post")[0]]
        return preset_of(self)

    @property
    def plan(self) -> Plan:
        """The deployment under its engine's settings."""
        pools = [{"max_model_len": longest(self) + SPARE_TOKENS, **self._settings(role)} for role in ROLES]
        return Plan.model_validate({"name": "run", "model": self.served.name, "pools": pools, "link": {}})

    @cached_property
    def launch(self) -> LaunchFacts | None:
        """Launch facts of prefill and decode pools of its card, engine, release, model and format; None if there are
        none."""
        if self.row["engine"] == "sglang" and self.row["measured"] < FIRST_SGLANG_FILE:
            return None
        key = self.hardware, self.release, self.model, number_format(self.served)
        of_pools = (facts for facts in every_launch() if facts.disaggregated)
        return next((f for f in of_pools if (f.hardware, f.engine, f.model, f.weights) == key), None)

    @property
    def drafting(self) -> Drafting | None:
        """Statement of its launch file on drafts; configurations of SGLang had none in 2025 (nvidia-master.yaml of
        November: spec-decoding none)."""
        if self.row["engine"] == "sglang" and self.row["measured"] < FIRST_SGLANG_FILE:
            return "never"
        return None if self.launch is None else self.launch.drafting(LoadShape.of(workload_of(self), None))

    @property
    def configuration(self) -> str:
        """Number of its configuration."""
        return self.row["id"].rpartition("_")[2]

    def preset_for(self, role: Role) -> EnginePreset:
        """Return the settings of its engine for a pool."""
        return load_engine(self.release)

    def division(self, role: Role) -> tuple[int, int]:
        """Return tp and data-parallel size of attention in the instances of a pool."""
        return self.number(f"{role}_tp", 1), self.number(f"{role}_attention_dp", 1)

    def _settings(self, role: Role) -> dict[str, Any]:
        tp, groups = self.division(role)
        return {
            **self.preset_for(role).settings(load_hardware(self.hardware).device, self.served),
            "name": role,
            "role": role,
            "hardware": self.hardware,
            "engine": self.release,
            "instances": self.number(f"{role}_instances"),
            "parallelism": {
                "tp": tp,
                "attention_dp": groups,
                "expert_parallel": self.number(f"{role}_moe_ep", 1) > 1,
            },
        }

    def errors(self) -> dict[str, float]:
        """Predicted over measured means, less 1; tokens are those of the closed loop, by Little's law."""
        hardware = load_kernels(self.hardware, self.release)
        result = simtune.simulate(workload_of(self), plan=self.plan, model=self.served, hardware=hardware)
        predicted = {"ttft": float(result.ttft_s.mean()), "tpot": float(result.tpot_s.mean())}
        measured = self.measured
        rates = [self.tokens_per_s(times) for times in (predicted, measured)]
        return error(predicted, measured) | {"tokens": rates[0] / rates[1] - 1}

    def tokens_per_s(self, times: dict[str, float]) -> float:
        """Output tokens a second of users who send the next request when they have an answer."""
        tokens = 0.9 * self.number("osl")
        return self.concurrency * tokens / (times["ttft"] + tokens * times["tpot"])


class LikePooledRun(PooledRun):
    """A measured run with the launch facts of its card, engine, model and format."""

    def preset_for(self, role: Role) -> EnginePreset:
        """Return the settings of the launch file for a pool, and of the engine where it sets nothing."""
        assert self.launch is not None
        return self.launch.over(super().preset_for(role), LoadShape.of(workload_of(self), None), role)

    def division(self, role: Role) -> tuple[int, int]:
        """Return tp and data-parallel size of attention in the instances of a pool."""
        launched = LAUNCHED_DIVISION.get((self.hardware, self.number("isl"))) if role == "prefill" else None
        return launched or super().division(role)


def undrafted(runs: list[PooledRun]) -> set[str]:
    """Return the configurations that had no drafts: for one of its runs, servers were launched without drafts only."""
    return {run.configuration for run in runs if run.drafting == "never"}


def pooled_runs(data: Path) -> Iterator[PooledRun]:
    """Yield the runs of the table."""
    with gzip.open(data / "serving" / FILE, "rt") as file:
        yield from map(PooledRun, csv.DictReader(file))


def judged(run: PooledRun) -> dict[str, float] | str:
    """Return the errors of a run, or the reason why it is refused."""
    try:
        return run.errors()
    except SimtuneError as problem:
        return str(problem)


def words(errors: list[dict[str, float]]) -> str:
    """Return median and 90th percentile of the size of errors, and their signed median."""
    parts = []
    for metric in METRICS:
        off = 100 * np.array([e[metric] for e in errors])
        parts.append(f"{metric} {np.median(abs(off)):.1f}/{np.quantile(abs(off), 0.9):.0f} ({np.median(off):+.0f})")
    return ", ".join(parts)


def predicted(runs: list[PooledRun], jobs: int, title: str, undrafted: set[str]) -> None:
    """Predict runs; print errors of each, and of groups."""
    groups: dict[str, list[dict[str, float]]] = defaultdict(list)
    with ProcessPoolExecutor(jobs) as pool:
        for run, judgement in zip(runs, pool.map(judged, runs, chunksize=1), strict=True):
            row = run.row
            measured = (
                f"{title}{row['id']}: TTFT {run.measured['ttft']:.3f} s, TPOT {1e3 * run.measured['tpot']:.1f} ms"
            )
            if isinstance(judgement, str):
                print(f"{measured}: refused: {judgement}", flush=True)
                continue
            print(measured, *(f"{metric} {100 * off:+.0f}%" for metric, off in judgement.items()), flush=True)
            drafts = UNDRAFTED if run.configuration in undrafted else UNKNOWN
            for group in ("all", drafts, f"{row['engine']} {row['gpu']} {row['precision']}"):
                groups[group].append(judgement)
    for group, errors in groups.items():
        print(f"{title}{group}: {len(errors)} runs: {words(errors)}", flush=True)


def main() -> None:
    """Predict the runs and print errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--users", type=int, default=600)
    parser.add_argument("--match", default="", help="only runs whose id contains this")
    parser.add_argument("--like", action="store_true", help="with launch facts too, where there are some")
    options = parser.parse_args()
    runs = list(pooled_runs(options.data))
    without_drafts = undrafted(runs)
    runs = [r for r in runs if r.concurrency <= options.users and options.match in r.row["id"]]
    predicted(runs, options.jobs, "", without_drafts)
    if options.like:
        launched = [run if run.launch is None else LikePooledRun(run.row) for run in runs]
        predicted(launched, options.jobs, "like: ", without_drafts)


if __name__ == "__main__":
    main()
