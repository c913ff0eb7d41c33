"""The rates that pools sustain, and the limits of single requests, against the formulas of their docstrings."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simtune.costs.bounds import CostBounds
from simtune.costs.compiled import StepTables, compile_costs
from simtune.specs.pool import Role
from simtune.specs.workload import Slo
from simtune.testing.clusters import stream_of
from simtune.tuner.bounds import Capacity
from simtune.tuner.bounds.best_case import PoolCapacity
from simtune.tuner.bounds.bounded_requests import BoundLoad
from simtune.tuner.bounds.limits import of_one_request, of_statistics
from simtune.workload.requests import RequestStream
from tests.costs.made_up import hardware, model, pool

LONGEST, SEATS, BUDGET = 600, 32, 256


@cache
def tables() -> StepTables:
    return compile_costs(model(), hardware(host_step_s=1e-4), pool(max_num_seqs=SEATS, budget=BUDGET), LONGEST).tables


def deployed(*, seats: int = SEATS, budget: int = BUDGET, blocks: int = 10_000, cores: int = 1, pp: int = 1,
             depth: int = 0, replicas: int = 0) -> Any:  # fmt: skip
    """All that the capacity of a pool depends on besides its costs."""
    shape = SimpleNamespace(depth=depth, replicas=replicas)
    spec = SimpleNamespace(
        batching=SimpleNamespace(max_num_seqs=seats, max_num_batched_tokens=budget),
        parallelism=SimpleNamespace(pp=pp),
        kv_cache=SimpleNamespace(block_size=16),
        speculation=None if not depth else SimpleNamespace(scheme=SimpleNamespace(shape=shape)),
    )
    return SimpleNamespace(spec=spec, memory=SimpleNamespace(num_blocks=blocks), num_cores=cores, most_cores=cores)


def load() -> RequestStream:
    draw = np.random.default_rng(0)
    return stream_of(np.arange(50) / 4.0, draw.integers(1, 400, 50), draw.integers(1, 150, 50))


def expected_rps(role: Role, stream: RequestStream, at: Any) -> float:
    """Cores over the mean seconds that a request keeps one busy."""
    costs, drafts = CostBounds(tables()), 0 if at.spec.speculation is None else at.spec.speculation.scheme.shape.depth
    outputs = np.ones(len(stream)) if role == "prefill" else stream.output_tokens
    prompts, decodes = stream.prompt_tokens, outputs - 1
    n = decodes.mean()
    # A round reads what its first token reads: of K + 1 tokens K / 2 fewer each, on average.
    context = (decodes * prompts + decodes * (decodes + 1) / 2).mean()
    read = max(0.0, context - n * drafts / 2) / (drafts + 1)
    pp = at.spec.parallelism.pp
    steps = [n / (drafts + 1) / (at.spec.batching.max_num_seqs // pp), read / (at.memory.num_blocks // pp * 16)]
    tokens, other_s = n, n * costs.head_cost_s()
    if role != "decode":
        tokens = (prompts + decodes).mean()
        steps.append(tokens / at.spec.batching.max_num_batched_tokens)
        other_s = costs.prefill_cost_s(prompts).mean() + outputs.mean() * costs.head_cost_s()
    busy_s = max(c0 * max(steps) + c1 * tokens for c0, c1 in costs.linear_minorants())
    busy_s += costs.context_cost_s() * read + other_s
    replicas = 1 if at.spec.speculation is None else max(1, at.spec.speculation.scheme.shape.replicas)
    return float(replicas * at.num_cores / busy_s)


POOLS: tuple[dict[str, int], ...] = (
    {},
    {"seats": 2},
    {"budget": 32},
    {"blocks": 40},
    {"cores": 3, "pp": 2},
    {"seats": 2, "pp": 2, "blocks": 60},
    {"depth": 3},
    {"depth": 3, "seats": 2},
    {"depth": 2, "blocks": 40},
    {"depth": 2, "replicas": 2},
)


@pytest.mark.parametrize("role", ["mixed", "prefill", "decode"])
@pytest.mark.parametrize("limits", POOLS)
def test_a_pool_sustains_its_cores_over_the_work_of_a_request(role: Role, limits: dict[str, int]) -> None:
    at, stream = deployed(**limits), load()
    capacity = PoolCapacity(tables(), stream, role, LONGEST, caches=False)
    assert capacity.rps(at) == pytest.approx(expected_rps(role, stream, at), rel=1e-9)
    if role == "mixed":
        assert Capacity(tables(), stream, LONGEST).rps(at) == pytest.approx(capacity.rps(at))


def test_requests_that_are_too_long_cost_nothing_and_answers_of_one_token_no_decode() -> None:
    stream, at = load(), deployed()
    short = stream.prompt_tokens + stream.output_tokens <= 300
    assert 0 < short.sum() < 50
    few = PoolCapacity(tables(), stream, "mixed", 300, caches=False).rps(at)
    fitting = stream_of(np.arange(short.sum()) * 1.0, stream.prompt_tokens[short], stream.output_tokens[short])
    assert few == pytest.approx(expected_rps("mixed", fitting, at) * 50 / short.sum(), rel=1e-9)
    ones = replace(stream, output_tokens=np.ones_like(stream.output_tokens))
    assert PoolCapacity(tables(), ones, "decode", LONGEST, caches=False).rps(at) == math.inf


def test_what_requests_may_share_is_the_beginning_that_another_one_has() -> None:
    """Blocks of 10 tokens, each named by all that leads to it: 1 and 2 are of several requests, 3 of one alone. A token
    of each prompt is computed whatever is cached."""
    stream = replace(
        stream_of([0.0, 1.0, 2.0, 3.0], [30, 20, 15, 30], [4, 6, 5, 1]),
        hash_ids=((1, 2, 3), (1, 2), (9,), (1, 4, 5)),
        block_tokens=10,
    )
    bound = BoundLoad(stream, 40)
    assert bound.could_share.tolist() == [20, 20, 0, 10]
    assert bound.could_hit.tolist() == [20, 19, 0, 10]
    assert bound.decodes.tolist() == [3.0, 5.0, 4.0, 0.0]
    # Decode k = 1 ... n reads the prompt and k tokens: n P + n (n + 1) / 2.
    assert bound.context.tolist() == [90 + 6, 100 + 15, 60 + 10, 0.0]
    assert bound.private.tolist() == [96 - 60, 115 - 100, 70.0, 0.0]
    assert bound.mean(bound.decodes) == 3.0
    assert BoundLoad(stream, 30).mean(bound.decodes) == (5 + 4) / 4, "34 and 31 tokens do not fit"


# --- limits of single requests ------------------------------------------------------------------------------


def classes(*slos: Slo | None, warm_up: int = 0) -> RequestStream:
    """Forty requests of as many classes as there are objectives, in turn; every fourth answer is one token."""
    outputs = np.where(np.arange(40) % 4 == 3, 1, 9)
    stream = stream_of(np.arange(40) / 4.0, np.full(40, 100), outputs)
    names = tuple(f"c{number}" for number in range(len(slos)))
    return replace(stream, class_index=np.arange(40) % len(slos), class_names=names, slos=slos, warm_up=warm_up)


def test_a_request_is_good_within_the_widest_limit_of_each_metric() -> None:
    slo = Slo(ttft_s={"p50": 1.0, "p99": 3.0}, e2el_s={"mean": 20.0})
    alike = of_one_request(classes(None), slo)
    assert set(alike.ttft_s.tolist()) == {3.0}
    assert set(alike.tpot_s.tolist()) == {math.inf}
    assert set(alike.e2el_s.tolist()) == {20.0}
    assert alike.allowed == 0
    apart = of_one_request(classes(Slo(ttft_s={"p90": 0.5}), None, warm_up=4), slo)
    assert apart.ttft_s.tolist() == [math.inf] * 4 + [0.5, 3.0] * 18
    assert apart.e2el_s.tolist() == [math.inf] * 4 + [math.inf, 20.0] * 18


def test_each_line_allows_as_many_misses_as_its_statistic_and_all_together_their_sum() -> None:
    """The p90 of 40 values is the 36th, so four may lie above; of the 30 with a second token p50 leaves 15 above."""
    lines, means = of_statistics(classes(None), Slo(ttft_s={"p90": 1.0}, tpot_s={"p50": 0.1}))
    ttft, tpot, together = lines
    assert means == []
    assert (set(ttft.ttft_s.tolist()), ttft.allowed) == ({1.0}, 40 - 1 - 35)
    assert set(ttft.tpot_s.tolist()) == {math.inf}
    assert (tpot.tpot_s.tolist(), tpot.allowed) == ([0.1, 0.1, 0.1, math.inf] * 10, 30 - 1 - 14)
    assert (set(together.ttft_s.tolist()), together.allowed) == ({1.0}, ttft.allowed + tpot.allowed)
    assert together.tpot_s.tolist() == tpot.tpot_s.tolist()


def test_a_mean_leaves_fewer_than_a_share_above_a_multiple() -> None:
    """Fewer than 40 / x of 40 requests lie above x times the mean: 26, 9 and 1 for x = 1.5, 4 and 20."""
    lines, (mean,) = of_statistics(classes(None), Slo(e2el_s={"mean": 2.0}))
    assert [(line.e2el_s[0], line.allowed) for line in lines[:-1]] == [(3.0, 26), (8.0, 9), (40.0, 1)]
    assert (lines[-1].e2el_s[0], lines[-1].allowed) == (40.0, 1), "the widest of all together"
    assert (mean.metric, int(mean.which.sum()), mean.limit_s) == ("e2el", 40, 2.0)
    by_class, means = of_statistics(classes(Slo(ttft_s={"p90": 1.0}), None), Slo(tpot_s={"mean": 0.1}))
    first, *markov, together = by_class
    assert first.ttft_s.tolist() == [1.0, math.inf] * 20
    # Of the other class ten answers have a second token.
    assert [(line.tpot_s.tolist().count(math.inf), line.allowed) for line in markov] == [(30, 6), (30, 2), (30, 0)]
    assert together.allowed == first.allowed
    assert [int(mean.which.sum()) for mean in means] == [10]
