"""Front ends: one request after the other before an engine sees it, by hand and beside runs without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simtune.results.result import Result
from simtune.runs.request_columns import requests_table
from simtune.sim.deployment import deploy
from simtune.sim.front_end import FrontEnd
from simtune.sim.plan_parts import OwnCosts
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.workload import Workload
from simtune.workload.requests import build_stream
from tests.sim.test_families import STEP_S, Constant


def simulated(
    front_end: dict[str, float] | None, instances: int = 1, load: dict[str, Any] | None = None, requests: int = 12
) -> Result:
    """12 requests at once, of 100 and 3 tokens, unless told otherwise; steps take the same, whatever is in them."""
    pool = {
        "hardware": "h100-sxm",
        "instances": instances,
        "batching": {"max_num_seqs": 64, "max_num_batched_tokens": 8192},
        "kv_cache": {"num_blocks": 4096},
        "max_model_len": 8192,
        "async_scheduling": False,
        "front_end": front_end,
    }
    plan = Plan.model_validate({"name": "p", "model": "llama-3.1-8b", "pools": [pool]}, strict=False)
    fixed = {"name": "w", "arrivals": {"kind": "closed_loop", "users": 12}}
    fixed |= {name: {"kind": "fixed", "tokens": tokens} for name, tokens in (("prompt", 100), ("output", 3))}
    workload = Workload.model_validate(fixed | (load or {}))
    deployment = deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"), OwnCosts(Constant()))
    return deployment.simulate(build_stream(workload, None, requests=requests, seed=0))


def test_requests_pass_one_after_the_other_and_the_server_that_is_free_first_has_the_next() -> None:
    one = FrontEnd([(0, 10, 2)])
    assert [one.passed(0, 5), one.passed(0, 5), one.passed(100, 0)] == [20, 40, 110]
    two = FrontEnd([(0, 10, 0)] * 2)
    assert [two.passed(0, 1) for _ in range(5)] == [10, 10, 20, 20, 30]
    tokens = FrontEnd([(0, 0, 1)] * 2)
    assert [tokens.passed(0, n) for n in (30, 5, 1, 40)] == [30, 30, 30, 46], "nobody overtakes"


def test_without_one_nothing_changes() -> None:
    free, none = simulated({"request_s": 0.0, "token_s": 0.0}, requests=60), simulated(None, requests=60)
    for name in ("arrival", "scheduled", "first_token", "finish"):
        assert (getattr(free.outcome, name) == getattr(none.outcome, name)).all()


def test_requests_that_come_at_once_are_seen_one_by_one() -> None:
    """Each is through a whole step after the one before: it has its first token a step later."""
    result = simulated({"request_s": STEP_S / 2, "token_s": STEP_S / 200})
    assert result.ttft_s == pytest.approx(STEP_S * np.arange(2, 14), rel=1e-6)
    assert result.tpot_s == pytest.approx(STEP_S)


def test_each_instance_has_one() -> None:
    result = simulated({"request_s": STEP_S, "token_s": 0.0}, instances=2)
    assert result.ttft_s == pytest.approx(STEP_S * np.repeat(np.arange(2, 8), 2), rel=1e-6)


def test_one_that_falls_behind_saturates_the_system() -> None:
    load = {"arrivals": {"kind": "poisson", "rate_rps": 4.0}}
    assert simulated({"request_s": 0.5, "token_s": 0.0}, load=load, requests=200).saturated
    assert not simulated({"request_s": 0.1, "token_s": 0.0}, load=load, requests=200).saturated


def test_pools_that_take_new_requests_all_have_one_or_none() -> None:
    shared = {"hardware": "h100-sxm", "instances": 1, "batching": {"max_num_seqs": 1, "max_num_batched_tokens": 64}}
    pools = [{"name": "a", **shared, "front_end": {"request_s": 0.1, "token_s": 0.0}}, {"name": "b", **shared}]
    with pytest.raises(ValueError, match="pool b has no front_end"):
        Plan.model_validate({"name": "p", "model": "llama-3.1-8b", "pools": pools}, strict=False)


def test_requests_of_a_family_that_are_aborted_in_it_reach_no_engine() -> None:
    """Of two branches the first to answer wins; the other one is still in the front end then."""
    branch = [{"name": "a", "count": 2, "first": 1, "prompt": {"kind": "fixed", "tokens": 100}}]
    load = {"arrivals": {"kind": "fixed", "rate_rps": 0.001}, "output": {"kind": "fixed", "tokens": 1}, "graph": branch}
    result = simulated({"request_s": 100 * STEP_S, "token_s": 0.0}, load=load, requests=1)
    assert sorted((result.outcome.scheduled >= 0).tolist()) == [False, True]


def test_parts_of_the_first_token_add_up_to_it() -> None:
    """Request n passes the front end after n + 1 requests' times and has its first token one to two steps later."""
    result = simulated({"request_s": STEP_S / 2, "token_s": STEP_S / 200}, requests=200)
    assert result.front_end_s[:12] == pytest.approx(STEP_S * np.arange(1, 13), rel=1e-6)
    every, slowest = result.first_token_parts()
    assert (every.slowest, every.requests, slowest.slowest, slowest.requests) == (1.0, 200, 0.1, 20)
    assert sum(every.parts.values()) == pytest.approx(result.ttft_s.mean())
    assert sum(slowest.parts.values()) == pytest.approx(np.sort(result.ttft_s)[-20:].mean())
    assert every.front_end_s == pytest.approx(result.front_end_s.mean())
    assert every.prefill_s == pytest.approx(STEP_S, rel=1e-6)
    assert (every.handover_s, every.delivery_s) == (0.0, 0.0)
    assert result.summary(noise=False).first_token_parts == (every, slowest)


def test_without_a_front_end_no_column_of_it_is_written() -> None:
    names = requests_table(simulated(None))
    assert "front_end_s" not in names
    assert "delivery_s" not in names
    with_one = requests_table(simulated({"request_s": 0.01, "token_s": 0.0}))
    assert with_one["front_end_s"] == pytest.approx(0.01 * np.arange(1, 13))
