"""Engines in this process after profiles of their own steps, at three loads that no profile saw.

    pip install torch transformers
    python -m pytest benchmarks/validation/test_driven_engines.py -m benchmark_only -s

The small model of examples/closed-loop is driven through designed sessions in rounds; after each round the three loads
are served for real, by the engine's own processor time, from which the gauge divides out how much slower the machine is
by then. Printed: how far off steps are that were not fitted, predicted and measured means, and the repeat noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.results import Recorder
from benchmarks.validation.loads import METRICS, at_once, three_loads
from simtune.costs.engine_steps import EngineSteps
from simtune.sim.deployment import NO_HARDWARE, Deployment, deploy
from simtune.sim.plan_parts import OwnCosts
from simtune.specs.catalog import load_model
from simtune.validation.servers.driven_engines import (
    DrivenRequest,
    DrivenTimes,
    EngineSize,
    StepDriver,
    deployment_of,
    driver,
)
from simtune.validation.servers.engine_profile import profile_engine
from simtune.workload.requests import RequestStream

pytestmark = pytest.mark.benchmark_only

MODEL = Path(__file__).parents[2] / "examples" / "closed-loop" / "model.yaml"
POLICIES = {"torch": "vllm-fcfs", "transformers": "transformers-fifo"}
SIZE = EngineSize(8, 256, 512)
REPEATS, REQUESTS = 3, 24
MOST = 0.1
"""Target of every mean; twice the repeat noise counts as met."""


class Kept:
    """A driver that stays when a profile is through with it."""

    def __init__(self, its: StepDriver) -> None:
        self.size, self.facts, self.run = its.size, its.facts, its.run

    def close(self) -> None:
        """Goes on."""


@pytest.mark.parametrize("engine", list(POLICIES))
def test_a_profile_of_its_steps_foretells_an_engine(engine: str, tmp_path: Path, record: Recorder) -> None:
    pytest.importorskip("torch")
    if engine == "transformers":
        pytest.importorskip("transformers")
    model = load_model(str(MODEL))
    its = driver(engine, model, SIZE)
    requests, measured = at_once(REQUESTS, 3, (32, 384), (8, 64)), dict[str, list[Mapping[str, float]]]()
    loads: Mapping[str, RequestStream] = {}
    for part in range(1, REPEATS + 1):
        profiled = profile_engine(lambda reference_s: Kept(its), model, tmp_path, budget_s=1e9, rounds=part)
        deployment = deployed(profiled.costs, engine)
        loads = loads or three_loads(deployment, requests, 1)
        for name, stream in loads.items():
            measured.setdefault(name, []).append(means(served(its, stream), stream))
    its.close()
    missed = []
    print(f"\n{engine}, gauge against {1e3 * its.facts()['reference_s']:.2f} ms")
    for kind, held in profiled.errors.items():
        print(
            f"held out, {kind}: {held.steps} steps, median {held.median:.1%}, p90 {held.p90:.1%}, all {held.total:+.1%}"
        )
        record(f"{engine}, its own profile: {kind} steps held out, median", 100 * held.median, "% off", "lower")
    for name, stream in loads.items():
        predicted = deployment.simulate(stream)
        for metric in METRICS:
            found = [run[metric] for run in measured[name]]
            middle, said = float(np.median(found)), float(predicted.values(metric).mean())
            error, noise = said / middle - 1, (max(found) - min(found)) / 2 / middle
            print(f"{name:9} {metric:5} {1e3 * said:8.1f} ms, measured {1e3 * middle:8.1f}: {error:+.1%} ± {noise:.1%}")
            record(f"{engine}, its own profile, {name}: {metric} mean", 100 * abs(error), "% off", "lower")
            if abs(error) > max(MOST, 2 * noise):
                missed.append(f"{name} {metric} {error:+.1%}")
    assert not missed


def deployed(costs: EngineSteps, engine: str) -> Deployment:
    """The engine that is driven, with these costs."""
    driven = deployment_of(load_model(str(MODEL)), SIZE, POLICIES[engine])
    return deploy(driven.plan, driven.model, NO_HARDWARE, OwnCosts(costs))


def served(its: StepDriver, stream: RequestStream) -> list[DrivenTimes]:
    """A load by the engine's own processor time."""
    assert stream.arrival_s is not None
    rows = zip(stream.arrival_s.tolist(), stream.prompt_tokens.tolist(), stream.output_tokens.tolist(), strict=True)
    return its.run([DrivenRequest(*row) for row in rows], "cpu").requests


def means(times: Sequence[DrivenTimes], stream: RequestStream) -> dict[str, float]:
    """Mean TTFT, TPOT and E2EL."""
    sent, first, finish = np.array([(each.sent, each.first_token, each.finish) for each in times]).T
    tpot = (finish - first) / (stream.output_tokens - 1)
    return {"ttft": (first - sent).mean(), "tpot": tpot.mean(), "e2el": (finish - sent).mean()}
