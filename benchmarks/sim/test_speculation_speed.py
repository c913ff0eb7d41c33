"""What drafting costs a simulation: the same 10,000 requests with a tree and without.

    python -m pytest benchmarks/sim/test_speculation_speed.py -m benchmark_only -s

CPU seconds, medians of some runs that take turns: of the simulation alone in one process, sampler included, and of
the whole command `simtune simulate`, in a process of its own each. Nothing is asserted about time.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.machine import children_s
from benchmarks.results import Recorder
from simtune.sim.deployment import default_plan, deploy
from simtune.sim.drafting import Drafting
from simtune.specs.acceptance import Acceptance, PerRank
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.drafters import Eagle
from simtune.specs.plan import Plan
from simtune.specs.schemes import Chain, Scheme, StaticTree
from simtune.specs.speculation import Speculation
from simtune.specs.workload import Lognormal, Poisson, Workload
from simtune.workload.requests import build_stream

pytestmark = pytest.mark.benchmark_only

LOADS = {
    "chat": (8.0, 900, 250),
    "busy chat": (20.0, 900, 250),
    "reasoning": (0.8, 600, 4000),
    "code completion": (8.0, 2000, 30),
}
"""Requests per second, mean prompt tokens, mean output tokens."""

RANKS = PerRank(probability=((0.6, 0.2, 0.1), (0.5, 0.18, 0.08), (0.45, 0.15, 0.06)))
SCHEMES: dict[str, Scheme] = {
    "tree": StaticTree(nodes=((1,), (2,), (3,), (1, 1), (1, 2), (2, 1), (1, 1, 1))),
    "chain": Chain(tokens=3),
}


ACCEPTANCE = Acceptance(name="assumed", origin="assumed", source="made up", rates=RANKS)


def cpu_s(
    works: list[Callable[[], Any]], clock: Callable[[], float] = time.process_time, turns: int = 5
) -> list[list[float]]:
    """Of each, in turns."""
    took: list[list[float]] = [[] for _ in works]
    for _ in range(turns):
        for seconds, work in zip(took, works, strict=True):
            start = clock()
            work()
            seconds.append(clock() - start)
    return took


def keep(name: str, drafting: list[float], plain: list[float], record: Recorder) -> None:
    record.samples(name, [a / b for a, b in zip(drafting, plain, strict=True)], "x", "lower")


def workload_of(load: str) -> Workload:
    rate, prompt, output = LOADS[load]
    return Workload(
        name="load",
        requests=10_000,
        arrivals=Poisson(rate_rps=rate),
        prompt=Lognormal(mean_tokens=prompt, sigma=0.8, max_tokens=30_000),
        output=Lognormal(mean_tokens=output, sigma=0.8, max_tokens=30_000),
    )


def drafting(plain: Plan, scheme: Scheme, acceptance: str) -> Plan:
    spec = Speculation(drafter=Eagle(), scheme=scheme, acceptance=acceptance)
    pools = tuple(pool.model_copy(update={"speculation": spec}) for pool in plain.pools)
    return plain.model_copy(update={"pools": pools})


@pytest.mark.parametrize("load", LOADS)
def test_a_tree_against_none(load: str, record: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    stream = build_stream(workload_of(load), None, requests=10_000, seed=1)
    model, hardware = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
    plain, acceptance = default_plan(model, hardware, stream), ACCEPTANCE
    plans = [plain, *(drafting(plain, scheme, "assumed") for scheme in SCHEMES.values())]
    deployments = [deploy(plan, model, hardware, drafting=Drafting(acceptance)) for plan in plans]
    results = [deployment.simulate(stream) for deployment in deployments]
    turns = cpu_s([lambda d=d: d.simulate(stream) for d in deployments])  # type: ignore[misc]
    took = [statistics.median(seconds) for seconds in turns]
    for name, seconds in zip(SCHEMES, turns[1:], strict=True):
        keep(f"{load}, {name} over none", seconds, turns[0], record)
    with capsys.disabled():
        print(f"\n{load}: 10,000 requests without drafts {took[0]:.2f} s CPU, {results[0].outcome.steps:,} steps")
        for name, s, result in zip(SCHEMES, took[1:], results[1:], strict=True):
            outcome, drafted = result.outcome, result.drafted
            print(
                f"  with a {name}: {s:.2f} s, {s / took[0]:.2f} x; "
                f"{outcome.steps:,} steps in {outcome.events:,} events, "
                f"{drafted.tokens / drafted.rounds:.2f} tokens per round"
            )


@pytest.mark.parametrize("load", LOADS)
def test_the_command_with_a_tree_against_none(
    load: str, record: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(name: str, schema: str, spec: Any) -> Path:
        facts = spec.model_dump(mode="json", exclude_none=True)
        (tmp_path / name).write_text(yaml.safe_dump({"schema": schema} | facts))
        return tmp_path / name

    workload = workload_of(load)
    stream = build_stream(workload, None, requests=10_000, seed=1)
    plain = default_plan(load_model("llama-3.1-8b"), load_hardware("h100-sxm"), stream)
    file = written("workload.yaml", "simtune/workload@1", workload)
    acceptance = written("acceptance.yaml", "simtune/acceptance@1", ACCEPTANCE)
    plans = {"plain": plain, "tree": drafting(plain, SCHEMES["tree"], str(acceptance))}

    def simulate(name: str) -> None:
        plan = written(f"{name}.plan.yaml", "simtune/plan@1", plans[name])
        options = ("--workload", file, "--plan", plan, "--requests", 10_000, "--seed", 1, "--json")
        command = [sys.executable, "-c", "import simtune.cli; simtune.cli.main()", "simulate", *map(str, options)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    plain_s, tree_s = cpu_s([lambda: simulate("plain"), lambda: simulate("tree")], children_s)
    took = [statistics.median(seconds) for seconds in (plain_s, tree_s)]
    keep(f"{load}, command, tree over none", tree_s, plain_s, record)
    with capsys.disabled():
        print(
            f"\n{load}: `simtune simulate` of 10,000 requests {took[0]:.2f} s CPU without drafts, {took[1]:.2f} s with "
            f"a tree, {took[1] / took[0]:.2f} x"
        )
