"""Conditional disaggregation: prompts that decode instances compute themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from simtune.costs.compiled import LinearCosts
from simtune.results.result import Result
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.testing.clusters import stream_of
from simtune.tuner.bounds import PlanBounds
from simtune.workload.requests import RequestStream
from tests.tuner.test_bounds import poisson

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
COSTS = LinearCosts(step_s=4e-3, per_token_s=2e-5, per_context_s=3e-8, per_pair_s=2e-9)
ALL = 2**40
POOL: dict[str, Any] = {
    "hardware": "h100-sxm",
    "instances": 2,
    "batching": {"max_num_seqs": 8, "max_num_batched_tokens": 256},
    "kv_cache": {"num_blocks": 400},
    "max_model_len": 1024,
}
ROUTER = {"kind": "least_tokens"}


def apart(decode: dict[str, Any] | None = None, **plan: Any) -> Deployment:
    pools = [{**POOL, "name": "p", "role": "prefill"}, {**POOL, "name": "d", "role": "decode", **(decode or {})}]
    return _deployed(pools, {"link": {}, "router": ROUTER, "decode_router": ROUTER, **plan})


def together() -> Deployment:
    return _deployed([{**POOL, "name": "d"}], {"router": ROUTER})


def _deployed(pools: list[dict[str, Any]], plan: dict[str, Any]) -> Deployment:
    spec = Plan.model_validate({"name": "p", "model": MODEL.name, "pools": pools, **plan}, strict=False)
    return deploy(spec, MODEL, HARDWARE, COSTS)


def same(first: Result, second: Result) -> bool:
    pairs = [(result.outcome.first_token, result.outcome.finish) for result in (first, second)]
    return all(np.array_equal(a, b) for a, b in zip(*pairs, strict=True))


@given(st.integers(0, 20), st.sampled_from([10.0, 60.0, 300.0]))
@settings(max_examples=12, deadline=None)
def test_without_a_threshold_all_is_apart_and_without_a_limit_all_is_together(seed: int, rate: float) -> None:
    """Threshold 0 equals prefill and decode apart, and an infinite one the decode pool as a mixed one, to the tick."""
    stream = poisson(120, rate, 100, 20, seed)
    plain = apart().simulate(stream)
    assert same(apart(local_prefill={"below_tokens": 0}).simulate(stream), plain)
    local = apart(local_prefill={"below_tokens": ALL}).simulate(stream)
    assert same(local, together().simulate(stream))
    assert not same(local, plain)
    assert local.outcome.transferred_bytes == 0


def test_a_rule_that_keeps_no_prompt_leaves_the_load_of_the_router_as_it_was() -> None:
    """No prompt is short enough to stay: each request is routed twice and counted once."""
    stream = poisson(60, 300.0, 100, 20, 3)
    assert same(apart(local_prefill={"below_tokens": 1}).simulate(stream), apart().simulate(stream))


@given(st.integers(0, 20), st.integers(1, 300), st.one_of(st.none(), st.integers(0, 6)))
@settings(max_examples=20, deadline=None)
def test_every_request_is_answered_whoever_computes_its_prompt(seed: int, below: int, queue: int | None) -> None:
    stream = poisson(80, 200.0, 120, 10, seed)
    result = apart(local_prefill={"below_tokens": below, "queue_above": queue}).simulate(stream)
    assert result.completed.all()
    assert (result.outcome.first_token <= result.outcome.finish).all()
    sent = np.isfinite(result.transferred_s)
    if queue is None:
        assert sent.tolist() == (stream.prompt_tokens >= below).tolist()
    single = apart(local_prefill={"below_tokens": below, "queue_above": queue}).simulate(stream, single_steps=True)
    assert same(result, single)


def test_a_queue_sends_prompts_to_decode_instances() -> None:
    """Of twelve prompts at once each of two prefill instances gets one and has another wait; the others stay."""
    stream = stream_of([0.0] * 12, [500] * 12, [4] * 12)
    result = apart(local_prefill={"below_tokens": 0, "queue_above": 0}).simulate(stream)
    assert 2 <= np.isfinite(result.transferred_s).sum() < 12
    assert np.isfinite(apart().simulate(stream).transferred_s).all()


def test_hits_count_as_computed() -> None:
    """The second prompt of a session has all but 40 tokens of the first in the decode instance's cache."""
    stream = turns()
    rule = {"below_tokens": 100, "below_share": 0.5}
    cached = {"kv_cache": {"num_blocks": 400, "prefix_caching": True}, "instances": 1}
    for decode, sent in ((cached, [True, False]), ({"instances": 1}, [True, True])):
        result = apart(decode, local_prefill=rule, decode_router={"kind": "round_robin"}).simulate(stream)
        assert np.isfinite(result.transferred_s).tolist() == sent


def turns() -> RequestStream:
    """Two prompts, the second 16 blocks of the first and 40 tokens more, long after it."""
    stream = stream_of([0.0, 10.0], [256, 296], [4, 4])
    return replace(stream, hash_ids=[tuple(range(16)), (*range(16), 100, 101, 102)], block_tokens=16)


def test_nothing_is_claimed_of_plans_that_bounds_do_not_know() -> None:
    stream = poisson(20, 10.0, 100, 20)
    assert not PlanBounds(apart(local_prefill={"below_tokens": 10}), stream).known
    assert PlanBounds(apart(local_prefill={"below_tokens": 0}), stream).known


def test_mixed_pools_have_no_prompts_to_leave() -> None:
    with pytest.raises(ValidationError, match="has no effect if all pools are mixed"):
        _deployed([POOL], {"local_prefill": {"below_tokens": 10}})
