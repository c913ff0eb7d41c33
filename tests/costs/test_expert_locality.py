"""Experts placed well: what ranks exchange for them, and nothing else, becomes less."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.step_calls import COMMUNICATION
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.pool import Batching, Parallelism, Pool
from simtune.specs.research import Research

HARDWARE = {name: load_hardware(name) for name in ("h100-sxm", "a100-sxm-80g")}
MODEL = load_model("qwen3-30b-a3b")


def breakdown(hardware: str, groups: int, decodes: int, locality: float | None) -> dict[str, float]:
    pool = Pool(
        hardware=hardware,
        instances=1,
        parallelism=Parallelism(attention_dp=groups, expert_parallel=True),
        batching=Batching(max_num_seqs=512, max_num_batched_tokens=2048),
        research=Research(expert_locality=locality),
    )
    return StepModel(MODEL, HARDWARE[hardware], pool).breakdown(StepWork(decodes, 100 * decodes, [], decodes))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(HARDWARE)), st.sampled_from([2, 8, 16]), st.integers(1, 256), st.floats(0.01, 0.99))
def test_only_the_exchange_becomes_less_and_at_the_ends_all_or_nothing_of_it(
    hardware: str, groups: int, decodes: int, locality: float
) -> None:
    none, zero, some, all_ = (breakdown(hardware, groups, decodes, at) for at in (None, 0.0, locality, 1.0))
    assert none == zero
    exchanged = [kind for kind in COMMUNICATION if none.get(kind)]
    assert exchanged
    for kind, seconds in none.items():
        if kind in exchanged:
            assert some[kind] <= seconds
            assert not all_.get(kind)
        else:
            assert some[kind] == all_[kind] == pytest.approx(seconds)


@pytest.mark.parametrize("given", [{"attention_dp": 1, "expert_parallel": True}, {"attention_dp": 2}])
def test_without_an_exchange_there_is_nothing_to_spare(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="set expert_parallel and an attention_dp above 1, or remove it"):
        Pool(
            hardware="h100-sxm",
            instances=1,
            parallelism=Parallelism(**given),
            batching=Batching(max_num_seqs=512, max_num_batched_tokens=2048),
            research=Research(expert_locality=0.5),
        )
