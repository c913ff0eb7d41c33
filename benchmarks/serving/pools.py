"""Measured deployments with prefill and decode pools, predicted by plain presets.

    python -m benchmarks.serving.pools DATA [--jobs 2] [--users 600]

The 72 runs of `silicon_pd_dev.csv.gz`: DeepSeek-R1 on pools of H100, H200, B200 and GB200. What a user has is known:
cards, engine, release, formats, instances and how each is divided. Everything else is the preset's: the table tells
neither token budgets nor the link, and nothing here was chosen on runs. Whether a run had drafts is not in it either.

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
from pathlib import Path
from typing import Any

import numpy as np

import simtune
from benchmarks.serving.record import SPARE_TOKENS, PlainRun
from benchmarks.serving.silicon import error, longest, preset_of, workload_of
from simtune.costs.other_engines import load_kernels
from simtune.errors import SimtuneError
from simtune.specs.catalog import load_engine, load_hardware
from simtune.specs.plan import Plan

FILE = "silicon_pd_dev.csv.gz"
METRICS = ("tpot", "ttft", "tokens")
ROLES = ("prefill", "decode")
BEHIND_DYNAMO = {"0.5.1": "trtllm-1.0", "0.8.1": "trtllm-1.2"}
"""Presets of TensorRT-LLM by the release of Dynamo in front of it, which is what the table tells. Assumed: what runs of
the sweep without Dynamo had in those months."""


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
        settings = load_engine(self.release).settings(load_hardware(self.hardware).device, self.served)
        pools = [{"max_model_len": longest(self) + SPARE_TOKENS, **settings, **self._pool(role)} for role in ROLES]
        return Plan.model_validate({"name": "run", "model": self.served.name, "pools": pools, "link": {}})

    def _pool(self, role: str) -> dict[str, Any]:
        return {
            "name": role,
            "role": role,
            "hardware": self.hardware,
            "engine": self.release,
            "instances": self.number(f"{role}_instances"),
            "parallelism": {
                "tp": self.number(f"{role}_tp", 1),
                "attention_dp": self.number(f"{role}_attention_dp", 1),
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


def main() -> None:
    """Predict the runs and print errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--users", type=int, default=600)
    parser.add_argument("--match", default="", help="only runs whose id contains this")
    options = parser.parse_args()
    runs = [r for r in pooled_runs(options.data) if r.concurrency <= options.users and options.match in r.row["id"]]
    groups: dict[str, list[dict[str, float]]] = defaultdict(list)
    with ProcessPoolExecutor(options.jobs) as pool:
        for run, found in zip(runs, pool.map(judged, runs, chunksize=1), strict=True):
            row = run.row
            measured = f"{row['id']}: TTFT {run.measured['ttft']:.3f} s, TPOT {1e3 * run.measured['tpot']:.1f} ms"
            if isinstance(found, str):
                print(f"{measured}: refused: {found}", flush=True)
                continue
            print(measured, *(f"{metric} {100 * off:+.0f}%" for metric, off in found.items()), flush=True)
            for group in ("all", f"{row['engine']} {row['gpu']} {row['precision']}"):
                groups[group].append(found)
    for group, errors in groups.items():
        print(f"{group}: {len(errors)} runs: {words(errors)}")


if __name__ == "__main__":
    main()
