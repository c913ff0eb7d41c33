"""Placement by trying everything: replicas of experts on GPUs, and cuts of a pipeline over devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product

from examples.programs.placement import least_load


def experts(load: Sequence[float], gpus: int, slots: int) -> float:
    """The lightest heaviest GPU over all placements, the load of each expert split best."""
    homes = [c for size in range(1, gpus + 1) for c in combinations(range(gpus), size)]
    return min(
        least_load(load, on, gpus)
        for on in product(homes, repeat=len(load))
        if all(sum(g in of for of in on) <= slots for g in range(gpus))
    )


def _replicas(total: int, experts: int) -> Iterator[tuple[int, ...]]:
    if experts == 1:
        yield (total,)
        return
    for first in range(1, total - experts + 2):
        for rest in _replicas(total - first, experts - 1):
            yield (first, *rest)


def equal_split(load: Sequence[float], gpus: int, slots: int) -> float:
    """The same with equal splits over replicas, several of which may be on one GPU: EPLB's problem."""
    best = math.inf
    for counts in _replicas(gpus * slots, len(load)):
        items = sorted((w / n for w, n in zip(load, counts, strict=True) for _ in range(n)), reverse=True)
        best = min(best, _packed(items, gpus, slots, best))
    return best


def _packed(items: Sequence[float], gpus: int, slots: int, below: float) -> float:
    def pack(i: int, loads: tuple[tuple[float, int], ...], below: float) -> float:
        if max(loads)[0] >= below:
            return below
        if i == len(items):
            return max(loads)[0]
        for g in {use: g for g, use in enumerate(loads) if use[1] < slots}.values():
            weight, held = loads[g]
            below = pack(i + 1, (*loads[:g], (weight + items[i], held + 1), *loads[g + 1 :]), below)
        return below

    return pack(0, ((0.0, 0),) * gpus, below)


def pipeline(
    layer_s: Sequence[float],
    layer_bytes: Sequence[float],
    speed: Sequence[float],
    memory: Sequence[float],
    send_s: float,
) -> float:
    """The fastest slowest stage over all cuts and orders of devices; infinite where none fits."""
    layers, best = len(layer_s), math.inf
    for stages in range(1, len(speed) + 1):
        for inner in combinations(range(1, layers), stages - 1):
            ends = (0, *inner, layers)
            runs = [(ends[i], ends[i + 1]) for i in range(stages)]
            for devices in permutations(range(len(speed)), stages):
                if all(sum(layer_bytes[a:b]) <= memory[d] for (a, b), d in zip(runs, devices, strict=True)):
                    slowest = max(
                        sum(layer_s[a:b]) / speed[d] + (send_s if b < layers else 0.0)
                        for (a, b), d in zip(runs, devices, strict=True)
                    )
                    best = min(best, slowest)
    return best
