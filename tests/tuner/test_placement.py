"""Replicas of experts on GPUs and layers on unequal devices: the oracle's numbers, brute force, EPLB's own example."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.programs.placement import (
    ExpertPlacement,
    greedy_experts,
    grouped_experts,
    least_load,
    partition,
    place_experts,
)
from simtune.errors import Infeasible, UsageError
from tests.oracles import placement as brute

EXACT = 1e-5


@pytest.fixture(scope="module")
def oracle(oracle_dir: Path) -> Any:
    return json.loads((oracle_dir / "milp.json").read_text())


def equal_loads(load: Sequence[float], placed: ExpertPlacement, gpus: int) -> list[float]:
    """Of every GPU, when replicas share equally."""
    loads = [0.0] * gpus
    for whole, on in zip(load, placed.gpus, strict=True):
        for g in on:
            loads[g] += whole / len(on)
    return loads


def test_the_oracles_experts(oracle: Any) -> None:
    case = oracle["expert_placement"]
    load, gpus, slots = case["load"], case["gpus"], case["slots"]
    best = place_experts(load, gpus, slots)
    assert best.proven
    assert best.heaviest == pytest.approx(case["milp"], abs=EXACT)
    assert best.heaviest == pytest.approx(least_load(load, best.gpus, gpus), abs=EXACT)
    assert best.heaviest == pytest.approx(brute.experts(load, gpus, slots), abs=EXACT)
    assert case["ideal"] <= best.bound <= best.heaviest
    greedy = greedy_experts(load, gpus, slots)
    assert greedy.heaviest == pytest.approx(case["greedy"], abs=EXACT)
    assert [len(on) for on in greedy.gpus] == case["greedy_counts"]
    assert brute.equal_split(load, gpus, slots) == pytest.approx(case["equal_split_optimum"], abs=EXACT)


def test_random_experts_are_brute_force() -> None:
    rng = random.Random(5)
    for _ in range(8):
        load = [round(rng.paretovariate(1.3), 2) for _ in range(4)]
        best, greedy = place_experts(load, 3, 2), greedy_experts(load, 3, 2)
        assert best.heaviest == pytest.approx(brute.experts(load, 3, 2), abs=EXACT)
        assert all(sum(g in on for on in best.gpus) <= 2 for g in range(3))
        equal = brute.equal_split(load, 3, 2)
        assert equal - EXACT <= greedy.heaviest <= 1.15 * equal
        assert greedy.heaviest == pytest.approx(max(equal_loads(load, greedy, 3)))
        assert best.heaviest <= greedy.heaviest + EXACT
        assert best.bound <= best.heaviest


def test_32_experts_on_8_gpus(oracle: Any) -> None:
    """The greedy placement is within a fifth of a per cent of the mean, which nothing can beat."""
    case = oracle["expert_32x8"]
    greedy = greedy_experts(case["load"], case["gpus"], case["slots"])
    assert greedy.heaviest == pytest.approx(case["greedy"], abs=EXACT)
    assert greedy.bound == pytest.approx(case["ideal"], abs=EXACT)
    assert least_load(case["load"], greedy.gpus, case["gpus"]) <= greedy.heaviest + EXACT


def test_placed_in_time_or_with_a_bound(oracle: Any) -> None:
    """Whether a solver proves it depends on the solver and the machine; what it says holds in any case."""
    case = oracle["expert_32x8"]
    placed = place_experts(case["load"], case["gpus"], case["slots"])
    assert placed.bound <= case["milp"] + EXACT
    assert placed.heaviest >= case["milp"] - EXACT
    assert placed.heaviest == pytest.approx(case["milp"], abs=EXACT) or not placed.proven
    assert least_load(case["load"], placed.gpus, case["gpus"]) <= placed.heaviest + EXACT


# Two layers of 12 experts, 4 groups, 2 nodes of 4 GPUs with 2 slots: the example in the README of
# github.com/deepseek-ai/EPLB, and the experts that it puts on each GPU.
EPLB = (
    (
        (90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86),
        ((5, 6), (5, 7), (8, 4), (3, 4), (10, 9), (10, 2), (0, 1), (11, 1)),
    ),
    (
        (20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27),
        ((7, 10), (6, 8), (6, 11), (8, 9), (2, 4), (5, 1), (5, 0), (3, 1)),
    ),
)


@pytest.mark.parametrize(("load", "published"), EPLB)
def test_groups_go_to_nodes_as_in_eplbs_example(
    load: tuple[float, ...], published: tuple[tuple[int, int], ...]
) -> None:
    placed = grouped_experts(load, nodes=2, gpus_per_node=4, slots=2, groups=4)
    on_gpu = [sorted(e for e, on in enumerate(placed.gpus) for of in on if of == g) for g in range(8)]
    replicas = [len(placed.gpus[e]) for e in range(len(load))]
    weights = sorted(sorted(load[e] / replicas[e] for e in held) for held in published)
    assert sorted(sorted(load[e] / replicas[e] for e in held) for held in on_gpu) == weights, "but for equal weights"
    assert replicas == [sum(held.count(e) for held in published) for e in range(len(load))]
    assert placed.heaviest == pytest.approx(max(equal_loads(load, placed, 8)))
    for group in range(4):
        nodes = {g // 4 for e in range(3 * group, 3 * group + 3) for g in placed.gpus[e]}
        assert len(nodes) == 1


def test_what_does_not_fit_is_refused() -> None:
    for place in (place_experts, greedy_experts):
        with pytest.raises(Infeasible, match="5 experts do not fit 2 GPUs with 2 slots each; allow 3 slots"):
            place([1.0] * 5, 2, 2)
    with pytest.raises(UsageError, match="groups must divide the experts"):
        grouped_experts([1.0] * 12, nodes=2, gpus_per_node=2, slots=3, groups=5)


# --- layers of a pipeline ---------------------------------------------------------------------------------


def test_the_oracles_pipelines(oracle: Any) -> None:
    case = oracle["pipeline"]
    cut = partition(case["layer"], case["layer_mem"], case["speed"], case["mem"], case["comm"])
    assert cut.slowest_s == pytest.approx(case["dp"], abs=EXACT)
    wide = partition([1.0] * 80, [1.0] * 80, [1, 1, 1.7, 1.7, 2.2, 2.2], [12, 12, 20, 20, 30, 30], 0.05)
    assert wide.slowest_s == pytest.approx(oracle["pipeline_80_layers_6_devices_dp"]["value"], abs=EXACT)
    assert [stage.first for stage in wide.stages[1:]] == [stage.last + 1 for stage in wide.stages[:-1]]


def test_random_pipelines_are_brute_force() -> None:
    rng = random.Random(6)
    impossible = 0
    for _ in range(20):
        layers = rng.choice([4, 6, 8])
        layer_s = [rng.choice([1.0, 1.5, 2.0, 3.0]) for _ in range(layers)]
        speed, memory = [rng.choice([1.0, 1.5, 2.0]) for _ in range(3)], [rng.choice([2, 3, 4]) for _ in range(3)]
        best = brute.pipeline(layer_s, [1.0] * layers, speed, memory, 0.1)
        if math.isinf(best):
            impossible += 1
            with pytest.raises(Infeasible, match="do not fit the memory of the 3 devices"):
                partition(layer_s, [1.0] * layers, speed, memory, 0.1)
            continue
        cut = partition(layer_s, [1.0] * layers, speed, memory, 0.1)
        assert cut.slowest_s == pytest.approx(best, abs=EXACT)
        assert len({stage.device for stage in cut.stages}) == len(cut.stages)
        assert cut.stages[0].first == 0
        assert cut.stages[-1].last == layers - 1
        takes = [
            sum(layer_s[s.first : s.last + 1]) / speed[s.device] + (0.1 if s.last < layers - 1 else 0.0)
            for s in cut.stages
        ]
        assert max(takes) == pytest.approx(cut.slowest_s)
        assert all(s.last - s.first + 1 <= memory[s.device] for s in cut.stages)
    assert 0 < impossible < 20
