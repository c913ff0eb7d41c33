"""One side of a comparison: its number against what the run or the memory model says, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simtune.costs.memory import kv_capacity
from simtune.errors import Infeasible, UsageError
from simtune.results.result import Result
from simtune.validation.published.sides import Runner, Side, SideResult, moved
from tests.reproduce.test_reproduce import entry

POISSON = {"kind": "poisson", "rate_rps": 4}
LOAD = {
    "arrivals": POISSON,
    "requests": 40,
    "prompt": 64,
    "output": {"kind": "lognormal", "mean_tokens": 30, "sigma": 0.6, "max_tokens": 64},
}


def measured(measure: dict[str, Any], **setup: Any) -> SideResult:
    """The variant's number of a system that has this setup."""
    of = entry(measure=measure, variant=setup)
    return Runner().measure(of.family, of.family.sides(of.system)["variant"], of.system.measure)


def side(**setup: Any) -> Side:
    of = entry(variant=setup)
    return Side(of.family, of.family.sides(of.system)["variant"], None, {})


def simulated(**setup: Any) -> Result:
    one = side(**setup)
    return one.deployment.simulate(one.stream)


def test_tokens_and_duration_are_those_of_the_run() -> None:
    result = simulated(workload=LOAD)
    assert measured({"kind": "load", "metric": "tokens"}, workload=LOAD).value == result.stream.output_tokens.sum()
    assert measured({"kind": "load", "metric": "duration"}, workload=LOAD).value == result.duration_s


def test_a_group_takes_until_its_last_branch_ends() -> None:
    setup = {"workload": LOAD, "branches": 4, "finish_first": 2}
    result = simulated(**setup)
    arrival, finish = result.arrival_s.tolist(), result.finish_s.tolist()
    groups = [max(finish[i : i + 4]) - arrival[i] for i in range(0, 40, 4)]
    assert measured({"kind": "load", "metric": "group"}, **setup).value == pytest.approx(np.mean(groups))
    whole = measured({"kind": "load", "metric": "group"}, workload=LOAD, branches=4).value
    assert whole > np.mean(groups), "branches that are stopped early end sooner"


def test_two_gpus_halve_what_each_is_worth() -> None:
    two = {"workload": LOAD, "pool": {"parallelism": {"tp": 2}}}
    all_of_them, each = (
        measured({"kind": "load", "metric": "output_tokens_per_s", "per_gpu": per_gpu}, **two).value
        for per_gpu in (False, True)
    )
    assert each == pytest.approx(all_of_them / 2)


def test_the_first_token_is_taken_apart_into_what_is_waited_for() -> None:
    found = measured({"kind": "load", "metric": "ttft", "statistic": "mean"}, workload=LOAD)
    assert found.per == "request"
    assert sum(found.parts.values()) == pytest.approx(found.value)
    assert "prefill" in found.parts


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_highest_rate_is_the_last_that_enough_requests_bear(share: float) -> None:
    limit, tolerance = 0.004, 0.05
    setup = {"workload": {**LOAD, "requests": 60}, "pool": {"batching": {"max_num_seqs": 4}}}
    limits = {"kind": "highest_rate", "ttft_s": 0.05, "tpot_s": limit, "share": share, "tolerance": tolerance}
    rate = measured({**limits, "from_rps": 0.5, "to_rps": 400}, **setup).value
    one = side(**setup)

    def good(rate: float) -> float:
        result = one.deployment.simulate(one.stream.at_rate(rate))
        within = (result.ttft_s <= 0.05) & (np.nan_to_num(result.tpot_s) <= limit)
        return 0.0 if result.saturated else float(within.mean())

    assert good(rate) >= share
    assert good(rate * (1 + tolerance)) < share


def test_the_longest_context_fits_and_a_longer_one_does_not() -> None:
    longest = {"kind": "memory", "metric": "longest_context"}
    found = measured(longest)
    one = side()

    def tokens_for(length: int) -> int:
        batching = one.pool.batching.model_copy(update={"max_num_seqs": 1})
        memory = kv_capacity(one.model, one.hardware[one.pool.name], one.pool.model_copy(update={"batching": batching}))
        return memory.num_blocks * memory.block_size if length else 0

    assert found.value <= tokens_for(round(found.value))
    assert found.value * 1.01 > tokens_for(round(found.value * 1.01)), "within the one percent of the search"
    at_once = measured(longest, pool={"batching": {"chunked_prefill": False, "max_num_batched_tokens": 4096}})
    assert at_once.value < found.value, "what is prefilled in one step needs room for all of it"
    assert found.parts["KV bytes of a token"] == 16 * 2 * 8 * 64 * 2, (
        "16 layers, keys and values of 8 heads of 64, bf16"
    )


def test_as_many_decodes_as_the_cache_holds() -> None:
    room = measured({"kind": "memory"}).value
    context = room // 10
    one = measured({"kind": "step"}, step={"decodes": "capacity", "context": context})
    assert one.note == "10 decodes"
    few = measured(
        {"kind": "step"}, step={"decodes": "capacity", "context": context}, pool={"batching": {"max_num_seqs": 3}}
    )
    assert few.note == "3 decodes"


def test_some_kinds_of_a_step_alone() -> None:
    step = {"decodes": 4, "context": 512}
    whole = measured({"kind": "step"}, step=step)
    some = measured({"kind": "step", "only": ["decode_attention", "gemm"]}, step=step)
    assert some.value == pytest.approx(whole.parts["decode_attention"] + whole.parts["gemm"])
    assert set(some.parts) == {"decode_attention", "gemm"}


def test_on_other_hardware_all_pools_move() -> None:
    pools = ({"hardware": "l40s", "role": "prefill"}, {"role": "decode", "instances": 2})
    on = moved({"hardware": "h100-sxm", "pool": {"hardware": "l4", "instances": 1}, "pools": pools}, "a100-sxm-80gb")
    assert on["hardware"] == "a100-sxm-80gb"
    assert on["pool"] == {"instances": 1}
    assert on["pools"] == [{"role": "prefill"}, {"role": "decode", "instances": 2}]
    assert "pools" not in moved({"pool": {}}, "l4")


CLOSED = {**LOAD, "arrivals": {"kind": "closed_loop", "users": 2}}


@pytest.mark.parametrize(
    ("measure", "setup", "error", "said"),
    [
        ({"request_class": "nobody", "metric": "ttft"}, {"workload": LOAD}, UsageError, "is called 'nobody'"),
        ({}, {"workload": LOAD, "order": "prefix"}, UsageError, "give the workload a shared_prefix"),
        ({}, {"workload": CLOSED, "branches": 4}, UsageError, "users of a closed loop do not: use other arrivals"),
        (
            {"kind": "highest_rate", "ttft_s": 1e-6, "from_rps": 1, "to_rps": 2},
            {"workload": LOAD},
            Infeasible,
            "not met at 1 requests/s either; lower from_rps",
        ),
        (
            {"kind": "step", "within_s": 1e-6},
            {"step": {"decodes": 8, "context": 64}},
            Infeasible,
            "one decode already takes longer than 1e-06 s",
        ),
        (
            {"kind": "step"},
            {"step": {"decodes": "capacity", "context": 1e9}},
            Infeasible,
            "not one sequence of 1,000,000,000 tokens fits",
        ),
        (
            {"kind": "step"},
            {"step": {"decodes": 2, "context": 64, "shared_prefix": 64}},
            UsageError,
            "shared_prefix 64 is all of the context of 64 tokens",
        ),
        ({"kind": "memory", "metric": "longest_context"}, {"model": "llama-2-70b"}, Infeasible, "not even 256 tokens"),
    ],
)
def test_what_cannot_be_measured_is_said(
    measure: dict[str, Any], setup: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        measured({"kind": "load", **measure}, **setup)
