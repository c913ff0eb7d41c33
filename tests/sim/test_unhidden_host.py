"""A host that waits for sampling while its scheduler is a step ahead: `exposed_host: all`."""

from __future__ import annotations

from typing import Any

import pytest

from simtune.results.result import Result
from simtune.sim.deployment import deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.testing.clusters import stream_of

HOST_S = 0.004
ARRIVALS = [0.0, 0.0, *(0.03 * i for i in range(1, 11))]
STREAM = stream_of(ARRIVALS, [40 + 7 * i for i in range(12)], [3 + 5 * i for i in range(12)])


def served(
    policy: str, *, single_steps: bool = False, stream: Any = STREAM, step_s: float = HOST_S, exposed: str | None = None
) -> Result:
    pool = {
        "hardware": "h100-sxm",
        "instances": 1,
        "max_model_len": 512,
        "batching": {"policy": policy, "max_num_seqs": 4, "max_num_batched_tokens": 128},
        "host": {"step_s": step_s, "per_sequence_s": 0.0},
        "exposed_host": exposed,
    }
    plan = Plan.model_validate({"name": "host", "model": "llama-3.1-8b", "pools": [pool]})
    return deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm")).simulate(
        stream, single_steps=single_steps
    )


@pytest.mark.parametrize("policy", ["sglang", "vllm-fcfs"])
def test_jumps_are_single_steps_to_the_tick(policy: str) -> None:
    jumped, stepped = (served(policy, exposed="all", single_steps=single) for single in (False, True))
    for column in ("scheduled", "first_token", "finish"):
        assert getattr(jumped.outcome, column).tolist() == getattr(stepped.outcome, column).tolist()
    assert jumped.completed.all()


def test_every_step_of_a_request_alone_waits_for_the_host_too() -> None:
    """The host is shorter than a step here, so that hidden it costs nothing."""
    alone = stream_of([0.0], [64], [100])
    without, hidden = (served("sglang", stream=alone, step_s=step_s) for step_s in (0.0, HOST_S))
    shown = served("sglang", stream=alone, exposed="all")
    assert hidden.tpot_s.tolist() == without.tpot_s.tolist()
    assert shown.tpot_s[0] - without.tpot_s[0] == pytest.approx(HOST_S, rel=1e-9)
    assert shown.ttft_s[0] - without.ttft_s[0] == pytest.approx(HOST_S, rel=1e-9)
