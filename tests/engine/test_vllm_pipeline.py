"""Chunks beside a decode in a pipeline, against vLLM's own scheduler behind a batch queue.

    VLLM_PYTHON=.venv-vllm/bin/python python -m pytest -m slow tests/engine/test_vllm_pipeline.py

One request decodes while a later one's prompt is computed in chunks, with any number of stages; both are on one virtual
engine, which then has the batches of vLLM's single scheduler.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.results.outcome import Outcome
from simtune.sim.stepping import Pipeline
from simtune.sim.world import World
from simtune.testing.clusters import stream_of
from tests.sim.worlds import Setting

PYTHON = os.environ.get("VLLM_PYTHON", "")
DRIVER = Path(__file__).with_name("vllm_pipeline.py")
CASES = 300

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no interpreter with vLLM")]


def drawn(number: int) -> dict[str, Any]:
    """Return stages, ticks of a step, budget, and a request that decodes for longer than the prompt after it takes."""
    draw = random.Random(number)
    stages, budget, prompt = draw.choice((2, 3, 4)), draw.randint(4, 40), draw.randint(1, 900)
    chunks = -(-prompt // (budget - 1))
    first = [0, draw.randint(1, budget), chunks + 30]
    return {
        "stages": stages,
        "ticks": 12,
        "budget": budget,
        "requests": [first, [draw.randint(1, 12 * 12), prompt, draw.randint(1, 5)]],
    }


def simulated(case: dict[str, Any]) -> Outcome:
    arrivals, prompts, answers = zip(*case["requests"], strict=True)
    stream = stream_of([tick / TICKS_PER_SECOND for tick in arrivals], list(prompts), list(answers))
    setting = Setting(2000, 4, 4, case["budget"], 1, LinearCosts(case["ticks"] / TICKS_PER_SECOND), stream)
    cores = setting.make_cores(Pipeline(case["stages"], chunks_follow=True))
    return World(cores, stream).run()


def test_prompts_beside_a_decode_take_as_long_as_vllm_takes(tmp_path: Path) -> None:
    cases = [drawn(number) for number in range(CASES)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.run(
        [PYTHON, DRIVER, tmp_path / "cases.json"], env=environment, capture_output=True, text=True, check=True
    )
    answers = json.loads(process.stdout.splitlines()[-1])
    assert len(answers) == CASES
    longer = 0
    for case, answer in zip(cases, answers, strict=True):
        outcome = simulated(case)
        assert outcome.first_token.tolist() == answer["first"], case
        # Decodes wait for the last chunk of the prompt here, and not in vLLM: a step at most.
        assert 0 <= outcome.finish[0] - answer["finish"][0] <= case["ticks"], case
        longer += outcome.first_token[1] < simulated_one(case).first_token[1]
    assert longer > CASES / 2, "most prompts are shorter than if their chunks did not follow one another"


def simulated_one(case: dict[str, Any]) -> Outcome:
    """Return the run in which a chunk is scheduled when the last one has left all stages."""
    arrivals, prompts, answers = zip(*case["requests"], strict=True)
    stream = stream_of([tick / TICKS_PER_SECOND for tick in arrivals], list(prompts), list(answers))
    setting = Setting(2000, 4, 4, case["budget"], 1, LinearCosts(case["ticks"] / TICKS_PER_SECOND), stream)
    return World(setting.make_cores(Pipeline(case["stages"])), stream).run()
