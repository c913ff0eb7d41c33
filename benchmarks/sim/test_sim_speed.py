"""How fast the simulator is: jumps against single steps, a heap against simpy, a whole trace in a whole process.

    make bench        or        python -m pytest benchmarks/sim -m benchmark_only -s

Ratios are of CPU seconds, medians of several runs in one process on one machine; nothing is asserted about time.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

from benchmarks.machine import SCALED, children_s, repeated
from benchmarks.results import Recorder
from simtune.results.outcome import Outcome
from simtune.sim.deployment import Deployment, default_plan, deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.workload import Lognormal, Poisson, Workload
from simtune.workload.requests import RequestStream, build_stream
from tests.conftest import DATA

pytestmark = pytest.mark.benchmark_only

LOADS = {
    "chat": (8.0, 900, 250),
    "reasoning": (0.8, 600, 4000),
    "code completion": (8.0, 2000, 30),
}
"""Requests per second, mean prompt tokens, mean output tokens."""


def over(slow: Callable[[], Any], fast: Callable[[], Any], rounds: int = 5) -> tuple[list[float], list[float]]:
    """CPU seconds of both, in turns."""
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for seconds, work in zip(took, (slow, fast), strict=True):
            start = time.process_time()
            work()
            seconds.append(time.process_time() - start)
    return took


def ratios(slow: list[float], fast: list[float]) -> list[float]:
    return [a / b for a, b in zip(slow, fast, strict=True)]


def world(load: str, requests: int) -> tuple[Deployment, RequestStream]:
    rate, prompt, output = LOADS[load]
    workload = Workload(
        name="load",
        arrivals=Poisson(rate_rps=rate),
        prompt=Lognormal(mean_tokens=prompt, sigma=0.8, max_tokens=30_000),
        output=Lognormal(mean_tokens=output, sigma=0.8, max_tokens=30_000),
    )
    stream = build_stream(workload, None, requests=requests, seed=1)
    model, hardware = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
    return deploy(default_plan(model, hardware, stream), model, hardware), stream


@pytest.mark.parametrize("load", LOADS)
def test_jumps_against_single_steps(load: str, record: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    deployment, stream = world(load, 2000)

    def run(single_steps: bool) -> Outcome:
        return deployment.simulate(stream, single_steps=single_steps).outcome

    jumped, stepped = run(False), run(True)
    assert jumped.finish.tolist() == stepped.finish.tolist()
    took = over(lambda: run(True), lambda: run(False), rounds=3)
    slow, fast = map(statistics.median, took)
    record.samples(f"{load}, single steps over jumps", ratios(*took), "x", "higher")
    record(f"{load}, events", jumped.events, "events", "lower")
    with capsys.disabled():
        print(
            f"\n{load}: 2,000 requests, {jumped.steps:,} steps in {jumped.events:,} events; "
            f"single steps {slow:.2f} s, jumps {fast:.3f} s CPU: {slow / fast:.0f} x"
        )


def test_a_heap_against_simpy(record: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    """The event loop alone, without engine or costs: 100,000 timed events of 8 cores, every third one interrupted."""
    import simpy

    cores, rounds = 8, 12_500
    gaps = np.random.default_rng(0).integers(1, 1000, (cores, rounds)).tolist()

    def with_heap() -> int:
        heap: list[tuple[int, int, int, int]] = []
        numbers = done = 0
        valid = [0] * cores
        left = [iter(g) for g in gaps]
        for core in range(cores):
            numbers += 1
            valid[core] = numbers
            heapq.heappush(heap, (next(left[core]), 0, numbers, core))
        while heap:
            now, _, number, core = heapq.heappop(heap)
            if valid[core] != number:
                continue
            done += 1
            gap = next(left[core], None)
            if gap is None:
                continue
            if done % 3 == 0:  # a jump that will be cut short
                numbers += 1
                heapq.heappush(heap, (now + 2 * gap, 0, numbers, core))
            numbers += 1
            valid[core] = numbers
            heapq.heappush(heap, (now + gap, 0, numbers, core))
        return done

    def with_simpy() -> int:
        environment = simpy.Environment()
        done = 0

        def core(own: list[int]) -> Generator[Any, Any, None]:
            nonlocal done
            for gap in own:
                if done % 3 == 0:
                    environment.process(cutter(environment.active_process, gap))
                    with contextlib.suppress(simpy.Interrupt):
                        yield environment.timeout(2 * gap)
                else:
                    yield environment.timeout(gap)
                done += 1

        def cutter(victim: Any, gap: int) -> Generator[Any, Any, None]:
            yield environment.timeout(gap)
            victim.interrupt()

        for own in gaps:
            environment.process(core(own))
        environment.run()
        return done

    assert with_heap() == with_simpy() == cores * rounds
    took = over(with_simpy, with_heap)
    theirs, ours = map(statistics.median, took)
    record.samples("simpy over a heap", ratios(*took), "x", "higher")
    with capsys.disabled():
        print(f"\n100,000 events: simpy {theirs:.2f} s, heap {ours:.3f} s CPU: {theirs / ours:.1f} x")


def test_the_azure_conversation_trace_in_a_whole_process(record: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    trace = DATA / "traces" / "azure_2023_conv.csv.gz"
    if not trace.is_file():
        pytest.skip(f"{trace} is absent")
    command = [sys.executable, "-m", "simtune", "simulate", "--json"]
    command += ["--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", str(trace)]

    def simulate() -> None:
        answer = subprocess.run(command, capture_output=True, check=True).stdout
        assert json.loads(answer)["completed"] == 12_000

    took = repeated(simulate, clock=children_s)
    mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    record.samples("Azure conversation trace, whole process", took.scaled, SCALED, "lower")
    with capsys.disabled():
        print(
            f"\n12,000 requests of the Azure conversation trace, whole process: "
            f"{statistics.median(took.seconds):.2f} CPU s, {mib:.0f} MiB at most"
        )
