"""Prompts that lose their blocks again and again: a run that would never end is refused, one that takes long is not."""

from __future__ import annotations

from typing import Any

import pytest

from simtune.costs.compiled import LinearCosts
from simtune.engine import VllmFcfs
from simtune.errors import UsageError
from simtune.results.result import Result
from simtune.sim.core import EngineCore
from simtune.sim.deployment import deploy
from simtune.sim.recorder import OFTEN
from simtune.sim.stalls import Stalls
from simtune.sim.world import World
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.testing.clusters import stream_of

STEP_S = 1e-3


def apart(
    recover_s: float | None = None, *, reserve: bool = False, answer: int = 2, seats: int = 2, **how: Any
) -> Result:
    """Prompts of 40 tokens, in steps of 8 of them, on a prefill instance of 60; the decode instance is lost once the
    first request, of `answer` tokens, is answered. The KV cache of the second one waits for it, and leaves room for
    half a prompt."""

    def pool(role: str, longest: int, seats: int) -> dict[str, Any]:
        batching = {"policy": "vllm-fcfs", "max_num_seqs": seats, "max_num_batched_tokens": 8}
        return {
            "name": role[0],
            "role": role,
            "hardware": "h100-sxm",
            "instances": 1,
            "batching": {**batching, "scheduler_reserve_full_isl": reserve},
            "kv_cache": {"block_size": 1, "num_blocks": longest + 1},
            "max_model_len": longest,
        }

    failure = {"kind": "failure", "pool": "d", "instance": 0, "at_s": 0.01 + answer * STEP_S, "recover_s": recover_s}
    plan = Plan.model_validate(
        {
            "name": "apart",
            "model": "llama-3.2-1b",
            "pools": [pool("prefill", 60, 2), pool("decode", 60 + answer, seats)],
            "link": {"bytes_per_s": 1e9, "setup_s": 0.0, "descriptor_s": 0.0},
            "events": [failure],
        },
        strict=False,
    )
    deployment = deploy(plan, load_model("llama-3.2-1b"), load_hardware("h100-sxm"), LinearCosts(step_s=STEP_S))
    return deployment.simulate(stream_of([0.0, 0.02, 0.02], [4, 40, 40], [answer, 4, 4]), **how)


@pytest.mark.parametrize("single_steps", [False, True])
def test_a_prompt_that_never_gets_its_blocks_ends_the_run_with_what_it_waits_for(single_steps: bool) -> None:
    with pytest.raises(UsageError) as error:
        apart(single_steps=single_steps)
    assert str(error.value) == (
        "the run would never end: instance 0 of pool p computes the prompt of request 2 again and again, and no "
        "request makes progress; the blocks that it needs hold 1 KV cache that waits for a decode instance, and none "
        "is up or about to come: let one come back in events (recover_s), or set "
        "batching.scheduler_reserve_full_isl to true"
    )


@pytest.mark.parametrize("single_steps", [False, True])
def test_the_remedies_of_the_message_help(single_steps: bool) -> None:
    result = apart(reserve=True, single_steps=single_steps)
    assert (int(result.completed.sum()), result.unserved) == (1, 2)
    late = apart(20.0, single_steps=single_steps)
    assert late.completed.all()
    assert late.outcome.preemptions.tolist()[2] > 3 * OFTEN, "it was computed in vain for 20 s, and then was not"


def test_a_prompt_that_waits_long_for_a_decode_instance_that_is_busy_is_computed_in_the_end() -> None:
    """The first request has the only seat of the decode instance for 20,000 steps."""
    result = apart(0.001, answer=20_000, seats=1)
    assert result.completed.all()
    assert result.outcome.preemptions.tolist()[2] > 3 * OFTEN


def test_blocks_that_are_lost_end_the_run_too() -> None:
    """A fault of a policy, which keeps blocks of no request."""
    policy = VllmFcfs(
        num_blocks=100,
        block_size=1,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=100,
        scheduler_reserve_full_isl=False,
    )
    policy.kv.take(70)
    world = World([EngineCore(policy, LinearCosts(step_s=STEP_S), pool="p")], stream_of([0.0], [40], [2]))
    with pytest.raises(UsageError, match=r"prompt of request 0 again and again.*policy VllmFcfs preempts it each time"):
        world.run()


def test_the_check_is_called_for_requests_that_are_preempted_often(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(Stalls, "check", lambda self, request: called.append(request.id))
    preempted = apart(20.0).outcome.preemptions.tolist()
    assert called == [2] * (preempted[2] // OFTEN)
