"""TensorRT-LLM's balance: ranks with data-parallel attention hold prompts back for one another."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine.policies.tensorrt_llm import TensorRtLlmScheduler
from simtune.engine.prompt_balance import PromptBalance, RankLoad
from simtune.results.outcome import Outcome
from simtune.sim.core import EngineCore
from simtune.sim.stepping import DpGroup
from simtune.sim.world import World
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream

COSTS = LinearCosts(step_s=0.01, per_token_s=1e-4)
SEATS, BUDGET = 4, 24


def run(
    ranks: int, stream: RequestStream, *, single_steps: bool = False, record: bool = False, **options: Any
) -> Outcome:
    group = DpGroup()
    cores = [
        EngineCore(
            TensorRtLlmScheduler(
                num_blocks=4000,
                block_size=4,
                max_num_seqs=SEATS,
                max_num_batched_tokens=BUDGET,
                max_model_len=400,
                chunked_prefill=False,
                **options,
            ),
            COSTS,
            stepping=group,
        )
        for _ in range(ranks)
    ]
    return World(cores, stream, single_steps=single_steps, record=record).run()


def balanced(timeout: int = 50, wait: int = 10) -> dict[str, Any]:
    return {
        "attention_dp_enable_balance": True,
        "attention_dp_timeout_iters": timeout,
        "attention_dp_batching_wait_iters": wait,
    }


@dataclass
class PlainRequest:
    number: int
    prompt: int
    output: int
    emitted: int = 0


def plainly(ranks: int, arrivals: list[int], lengths: list[tuple[int, int]], timeout: int, wait: int) -> list[int]:
    """Return the tick of each first token: a group written apart, step by step, with room for every request."""
    coming = deque(enumerate(zip(arrivals, lengths, strict=True)))
    queues: list[list[PlainRequest]] = [[] for _ in range(ranks)]
    running: list[list[PlainRequest]] = [[] for _ in range(ranks)]
    first = [-1] * len(lengths)
    now = without = gathered = 0
    while coming or any(queues) or any(running):
        if not (any(queues) or any(running)):
            now = max(now, coming[0][1][0])
        while coming and coming[0][1][0] <= now:
            number, (_, (prompt, output)) = coming.popleft()
            queues[number % ranks].append(PlainRequest(number, prompt, output))
        starting: list[list[PlainRequest]] = []
        for queue, batch in zip(queues, running, strict=True):
            tokens, chosen = BUDGET - len(batch), []
            for request in queue[: SEATS - len(batch)]:
                if request.prompt > tokens:
                    break
                tokens -= request.prompt
                chosen.append(request)
            starting.append(chosen)
        busy = all(running)
        free = all(len(batch) < SEATS for batch in running)
        if free and all(starting):
            without, hold = 0, busy and gathered < wait
            if busy:
                gathered = gathered + 1 if hold else 0
        else:
            without += 1
            hold = busy and without < timeout
            without = without if hold else 0
        if hold:
            starting = [[] for _ in starting]
        tokens_of = [
            len(batch) + sum(request.prompt for request in chosen)
            for batch, chosen in zip(running, starting, strict=True)
        ]
        now += max(COSTS.mixed(0, 0, [(0, tokens)], 0) if tokens else 0 for tokens in tokens_of)
        for queue, batch, chosen in zip(queues, running, starting, strict=True):
            for request in chosen:
                queue.remove(request)
                first[request.number] = now
            for request in [*batch, *chosen]:
                request.emitted += 1
            batch[:] = [request for request in [*batch, *chosen] if request.emitted < request.output]
    return first


worlds = (
    st.integers(2, 4),
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.004, 0.03, 0.4]), st.integers(1, BUDGET), st.integers(1, 60)),
        min_size=1,
        max_size=25,
    ),
)


@given(*worlds, st.sampled_from([0, 1, 3, 8]), st.sampled_from([0, 1, 4]))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_first_tokens_are_those_of_a_group_written_apart(
    ranks: int, requests: list[tuple[float, int, int]], timeout: int, wait: int
) -> None:
    gaps, prompts, outputs = (list(column) for column in zip(*requests, strict=True))
    stream = stream_of(np.cumsum(gaps).tolist(), prompts, outputs)
    options = balanced(timeout, wait)
    flown = run(ranks, stream, **options)
    arrivals = np.rint(np.cumsum(gaps) * TICKS_PER_SECOND).astype(int).tolist()
    expected = plainly(ranks, arrivals, list(zip(prompts, outputs, strict=True)), timeout, wait)
    assert flown.first_token.tolist() == expected
    for stepped in (run(ranks, stream, record=True, **options), run(ranks, stream, single_steps=True, **options)):
        assert stepped.first_token.tolist() == flown.first_token.tolist()
        assert stepped.finish.tolist() == flown.finish.tolist()


def test_a_prompt_waits_for_the_rest_of_a_timeout_or_for_prompts_of_all_ranks() -> None:
    """Two ranks decode from step 1 on. The prompt of 2 comes to rank 0 in step 3; with a timeout of 6 steps the sixth
    without prompts on both lets it go on, with prompts of 2 and 3 on both ranks neither waits longer."""
    lengths = ([4, 4, 4], [40, 40, 1])
    alone = run(2, stream_of([0.0, 0.0, 0.025], *lengths), record=True, **balanced(6, 0))
    starts = sorted({r.start for r in alone.records})
    assert starts.index(int(alone.scheduled[2])) == 6
    together = run(2, stream_of([0.0, 0.0, 0.025, 0.026], [4] * 4, [40, 40, 1, 1]), record=True, **balanced(6, 0))
    starts = sorted({r.start for r in together.records})
    assert [starts.index(int(tick)) for tick in together.scheduled[2:]] == [3, 3]


def test_balance_trades_first_tokens_for_tokens_between() -> None:
    generator = np.random.default_rng(5)
    arrivals = np.cumsum(generator.exponential(0.05, 200)).tolist()
    stream = stream_of(arrivals, generator.integers(8, BUDGET, 200).tolist(), [30] * 200)
    plain, balance = run(4, stream), run(4, stream, **balanced(20, 2))
    waits = [float((outcome.first_token - outcome.arrival).mean()) for outcome in (plain, balance)]
    decoding = [float((outcome.finish - outcome.first_token).mean()) for outcome in (plain, balance)]
    assert waits[1] > waits[0]
    assert decoding[1] < decoding[0]


def test_a_group_that_begins_anew_has_counted_nothing() -> None:
    ranks = [RankLoad(True, 1, True), RankLoad(False, 1, True)]
    balance = PromptBalance(lambda: ranks[0], True, 3, 0)
    counted = [balance.holds(ranks) for _ in range(2)]
    balance.restart()
    assert [*counted, *(balance.holds(ranks) for _ in range(3))] == [True, True, True, True, False]


def test_prompts_of_ranks_do_not_wait_for_tokens() -> None:
    """TensorRT-LLM reads batch_wait_timeout_iters without data-parallel attention only."""
    stream = stream_of([0.0, 0.0, 0.025, 0.04], [4] * 4, [30, 30, 2, 2])
    waits: dict[str, Any] = {"batch_wait_timeout_iters": 5, "batch_wait_max_tokens_ratio": 0.9}
    assert run(2, stream, **waits).first_token.tolist() == run(2, stream).first_token.tolist()


@pytest.mark.parametrize("options", [balanced(-1, 0), balanced(5, -2)])
def test_negative_numbers_of_steps_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be 0 or more"):
        run(2, stream_of([0.0], [4], [4]), **options)
