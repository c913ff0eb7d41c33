"""Placement of replicas of experts, and the load of the busiest rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

from simtune.costs.operators.moe import visit_probabilities


def spread(load: Sequence[float], gpus: int, slots: int) -> tuple[list[list[int]], list[float]]:
    """Return (the GPUs of each expert, the load of each GPU) as EPLB places them: replicas share a load equally.

    Free slots go, one by one, to the expert whose replicas are heaviest; then the replicas, heaviest first, to the
    lightest GPU with room (DeepSeek, github.com/deepseek-ai/EPLB). The slots must be enough for all experts.
    """
    replicas = [1] * len(load)
    by_weight = [(-expert_load, e) for e, expert_load in enumerate(load)]
    heapq.heapify(by_weight)
    for _ in range(gpus * slots - len(load)):
        _, e = by_weight[0]
        replicas[e] += 1
        heapq.heapreplace(by_weight, (-load[e] / replicas[e], e))
    items = sorted(((load[e] / n, e) for e, n in enumerate(replicas) for _ in range(n)), key=lambda i: (-i[0], i[1]))
    loads, room = [0.0] * gpus, [slots] * gpus
    on: list[list[int]] = [[] for _ in load]
    for weight, e in items:
        g = min((g for g in range(gpus) if room[g]), key=lambda g: loads[g])
        loads[g] += weight
        room[g] -= 1
        on[e].append(g)
    return on, loads


@lru_cache(maxsize=256)
def busiest_share(experts: int, experts_per_token: int, ep: int, skew: float, replicas: int) -> float:
    """Expected rows of the busiest of `ep` ranks over the mean, with `replicas` replicas placed as EPLB does."""
    load: list[float] = visit_probabilities(experts, experts_per_token, skew).tolist()
    _, loads = spread(load, ep, -(-(experts + replicas) // ep))
    return max(loads) * ep / sum(load)
