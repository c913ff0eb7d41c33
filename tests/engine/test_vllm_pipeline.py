"""Pipelines against vLLM's own scheduler behind a batch queue: chunks beside a decode, to the tick, and whole loads.

    VLLM_PYTHON=.venv-vllm/bin/python python -m pytest -m slow tests/engine/test_vllm_pipeline.py

One request that decodes and a later one, whose prompt is computed in chunks, are on one virtual engine, which then has
the batches of vLLM's single scheduler. The requests of a load are dealt among as many virtual engines as there are
stages, whose batches are others than vLLM's.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simtune.arrays import Array
from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.results.outcome import Outcome
from simtune.sim import stepping
from simtune.sim.stepping import Pipeline
from simtune.sim.world import World
from simtune.testing.clusters import stream_of
from tests.sim.worlds import Setting

PYTHON = os.environ.get("VLLM_PYTHON", "")
DRIVER = Path(__file__).with_name("vllm_pipeline.py")
CASES, LOADS = 300, 6

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no interpreter with vLLM")]


def run_by_vllm(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.run(
        [PYTHON, DRIVER, folder / "cases.json"], env=environment, capture_output=True, text=True, check=True
    )
    answers: list[dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])
    assert len(answers) == len(cases)
    return answers


def simulated(case: dict[str, Any], engines: int, *, follow: bool = True) -> Outcome:
    arrivals, prompts, answers = zip(*case["requests"], strict=True)
    stream = stream_of([tick / TICKS_PER_SECOND for tick in arrivals], list(prompts), list(answers))
    costs = LinearCosts(case["ticks"] / TICKS_PER_SECOND, case.get("token_ticks", 0) / TICKS_PER_SECOND)
    seats = case.get("seats", 4) // engines
    setting = Setting(50_000 // engines, 4, seats, case["budget"], engines, costs, stream)
    return World(setting.make_cores(Pipeline(case["stages"], chunks_follow=follow)), stream).run()


# --- a prompt beside a decode ---------------------------------------------------------------------------------------


def beside_a_decode(number: int) -> dict[str, Any]:
    """Draw stages, a budget, and a request that decodes for longer than the prompt after it takes."""
    draw = random.Random(number)
    stages, budget, prompt = draw.choice((2, 3, 4)), draw.randint(4, 40), draw.randint(1, 900)
    decoding = [0, draw.randint(1, budget), -(-prompt // (budget - 1)) + 30]
    later = [draw.randint(1, 12 * 12), prompt, draw.randint(1, 5)]
    return {"stages": stages, "ticks": 12, "budget": budget, "requests": [decoding, later]}


def test_prompts_beside_a_decode_take_as_long_as_vllm_takes(tmp_path: Path) -> None:
    cases, shorter = [beside_a_decode(number) for number in range(CASES)], 0
    for case, answer in zip(cases, run_by_vllm(cases, tmp_path), strict=True):
        outcome = simulated(case, 1)
        assert outcome.first_token.tolist() == answer["first"], case
        # Decodes wait for the last chunk of the prompt here, and not in vLLM: a step at most.
        assert 0 <= outcome.finish[0] - answer["finish"][0] <= case["ticks"], case
        shorter += outcome.first_token[1] < simulated(case, 1, follow=False).first_token[1]
    assert shorter > CASES / 2, "most prompts are shorter than if their chunks did not follow one another"


# --- loads ----------------------------------------------------------------------------------------------------------


def load(number: int, stages: int, gap: int) -> dict[str, Any]:
    draw, tick, requests = random.Random(number), 0, []
    for _ in range(60):
        tick += int(draw.expovariate(1 / gap))
        requests.append([tick, draw.randint(20, 2500), draw.randint(10, 120)])
    return {"stages": stages, "ticks": 4800, "token_ticks": 48, "budget": 512, "seats": 48, "requests": requests}


def means(case: dict[str, Any], first: Any, finish: Any) -> Array:
    """Return the mean ticks to the first token, and between tokens."""
    arrivals, _, answers = (np.array(column) for column in zip(*case["requests"], strict=True))
    first, finish = np.array(first), np.array(finish)
    return np.array([(first - arrivals).mean(), ((finish - first) / (answers - 1)).mean()])


@pytest.mark.parametrize("stages", [2, 4])
def test_loads_come_near_to_those_of_vllm(stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both times stay on the slow side, nearer than where no chunk follows a step with decodes."""
    cases = [load(number, stages, gap) for number in range(LOADS) for gap in (60_000, 90_000, 150_000)]
    by_vllm = [means(c, a["first"], a["finish"]) for c, a in zip(cases, run_by_vllm(cases, tmp_path), strict=True)]

    def error() -> Array:
        outcomes = [simulated(case, stages) for case in cases]
        ours = [means(case, o.first_token, o.finish) for case, o in zip(cases, outcomes, strict=True)]
        relative: Array = np.mean(np.array(ours) / np.array(by_vllm), axis=0) - 1
        return relative

    followed = error()
    monkeypatch.setattr(stepping, "may_be_followed", lambda core, step: False)
    alone = error()
    assert (followed > 0).all()
    assert followed[0] < 0.18
    assert followed[1] < 0.1
    assert (followed < 0.5 * alone).all()
