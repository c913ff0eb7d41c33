"""Experts placed by their load, with replicas: what the busiest rank is left with."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.programs.placement import greedy_experts, least_load
from simtune.costs.expert_replicas import busiest_share, spread
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.memory import weights_bytes
from simtune.costs.operators.moe import rank_load, visit_probabilities
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.pool import Parallelism, Pool

QWEN = load_model("qwen3-30b-a3b")


@settings(max_examples=40)
@given(load=st.lists(st.floats(0.01, 9), min_size=4, max_size=24), gpus=st.integers(2, 4), extra=st.integers(0, 3))
def test_loads_are_conserved_and_no_gpu_is_overfull(load: list[float], gpus: int, extra: int) -> None:
    slots = -(-len(load) // gpus) + extra
    on, loads = spread(load, gpus, slots)
    assert sum(loads) == pytest.approx(sum(load))
    assert all(homes for homes in on)
    held = np.bincount([g for homes in on for g in homes], minlength=gpus)
    assert held.sum() == gpus * slots
    assert held.max() <= slots
    assert max(loads) >= least_load(load, on, gpus) * (1 - 1e-9)
    assert greedy_experts(load, gpus, slots).heaviest == max(loads)


@pytest.mark.parametrize("skew", [0.5, 1.0, 1.5])
def test_more_replicas_leave_less_on_the_busiest_rank_down_to_the_mean(skew: float) -> None:
    shares = [busiest_share(128, 8, 8, skew, replicas) for replicas in (0, 8, 32, 128, 1024)]
    assert all(more <= fewer * 1.02 for fewer, more in pairwise(shares))
    assert shares[-1] == pytest.approx(1, rel=0.02)
    by_chance = float(rank_load(np.array([1e9]), 128, 8, 8, skew)[0])
    assert shares[1] < by_chance


def test_without_replicas_the_busiest_expert_alone_may_be_the_busiest_rank() -> None:
    load = visit_probabilities(128, 8, 1.5)
    assert busiest_share(128, 8, 128, 1.5, 0) == pytest.approx(float(load.max()) * 128 / float(load.sum()))


def test_even_routing_gains_nothing_and_replicas_take_memory() -> None:
    def pool(replicas: int | None) -> Pool:
        parallelism = {"tp": 8, "expert_parallel": True, "expert_replicas": replicas}
        batching = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
        fields = {"hardware": "h100-sxm", "instances": 1, "batching": batching, "parallelism": parallelism}
        return Pool.model_validate(fields, strict=False)

    step = StepWork(64, 64 * 1000, (), 64)
    plain, placed = (StepModel(QWEN, load_hardware("h100-sxm"), pool(n)).breakdown(step) for n in (None, 0))
    assert placed["moe"] == pytest.approx(plain["moe"], rel=1e-9)
    without, with_them = (
        weights_bytes(QWEN, Parallelism(tp=8, expert_parallel=True, expert_replicas=n), 0) for n in (None, 32)
    )
    expert = 3 * 2048 * 768 * 2
    assert with_them - without == pytest.approx(48 * 4 * expert, rel=1e-6)


def test_slices_of_experts_are_not_placed() -> None:
    with pytest.raises(ValueError, match="requires whole experts on each rank"):
        Parallelism(tp=8, expert_replicas=8)
