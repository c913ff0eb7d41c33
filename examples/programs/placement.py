"""Placement on the GPUs of an instance: replicas of experts, and layers of a pipeline over unequal devices.

Experts. Every replica takes a slot of a GPU; the load of an expert is split over its replicas. `place_experts` makes
the largest load of a GPU as small as can be, any split allowed; `greedy_experts` is what EPLB does (DeepSeek,
github.com/deepseek-ai/EPLB): equal splits, further replicas for the heaviest, packed heaviest first. For a given
placement, the largest load under the best split is a maximum over sets of GPUs (Hall's theorem), `least_load`:

    max over sets S of GPUs    load of the experts that live only in S / |S|

Layers. `partition` cuts the layers into runs, one for each device that is used, so that the slowest of them is as fast
as can be: a dynamic programme over (layers done, devices of each kind used).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, combinations, product
from typing import NamedTuple

from simtune.costs.expert_replicas import spread
from simtune.errors import Infeasible, UsageError
from simtune.tuner.space.integer_programs import TOLERANCE, add_variable, solve

TIME_LIMIT_S = 10.0


class ExpertPlacement(NamedTuple):
    """GPUs that hold replicas of each expert, and the load of the heaviest GPU."""

    gpus: tuple[tuple[int, ...], ...]
    """GPUs by expert."""
    heaviest: float
    """Load of the heaviest GPU, in the unit of the given loads."""
    bound: float
    """Load below which no placement brings its heaviest GPU."""
    proven: bool
    """True if no placement has a lighter heaviest GPU, with splits of this kind."""


def place_experts(
    load: Sequence[float], gpus: int, slots: int, *, time_limit_s: float = TIME_LIMIT_S
) -> ExpertPlacement:
    """Return the placement with the lightest heaviest GPU, if an expert's load may be split over its replicas in any
    way.

    `slots` is the number of experts that a GPU holds. An integer programme: the best placement found in
    `time_limit_s` is returned with its `bound`. Raise Infeasible if the slots are too few for all experts.
    """
    import pulp

    _check_slots(load, gpus, slots)
    problem = pulp.LpProblem("experts", pulp.LpMinimize)
    heaviest = add_variable(problem, "heaviest", sum(load) / gpus)
    problem += heaviest
    has_replica = [[add_variable(problem, f"here{e}_{g}", binary=True) for g in range(gpus)] for e in range(len(load))]
    share = [[add_variable(problem, f"share{e}_{g}", 0) for g in range(gpus)] for e in range(len(load))]
    for e, expert_load in enumerate(load):
        problem += pulp.lpSum(has_replica[e]) >= 1
        problem += pulp.lpSum(share[e]) == expert_load
        for g in range(gpus):
            problem += share[e][g] <= expert_load * has_replica[e][g]
    for g in range(gpus):
        problem += pulp.lpSum(row[g] for row in has_replica) <= slots
        problem += pulp.lpSum(row[g] for row in share) <= heaviest
    proven = solve(problem, time_limit_s=time_limit_s)
    on = tuple(tuple(g for g in range(gpus) if row[g].value() > 0.5) for row in has_replica)
    value = float(heaviest.value())
    return ExpertPlacement(on, value, value * (1 - TOLERANCE) if proven else sum(load) / gpus, proven)


def greedy_experts(load: Sequence[float], gpus: int, slots: int) -> ExpertPlacement:
    """Return EPLB's placement: replicas of an expert share its load equally.

    Free slots go, one by one, to the expert whose replicas are heaviest; then the replicas, heaviest first, to the
    lightest GPU with room. A GPU is listed twice for an expert if two of its replicas are placed there. Raise
    Infeasible if the slots are too few for all experts.
    """
    _check_slots(load, gpus, slots)
    on, loads = spread(load, gpus, slots)
    return ExpertPlacement(tuple(map(tuple, on)), max(loads), sum(load) / gpus, False)


def grouped_experts(load: Sequence[float], nodes: int, gpus_per_node: int, slots: int, groups: int) -> ExpertPlacement:
    """Return EPLB's hierarchical placement, in which whole groups of experts go to one node each.

    Tokens limited to few groups stay in few nodes; replicas are made and packed within a node. Groups are consecutive
    experts, equally many, heaviest first to the lightest node with room for another. Raise UsageError if groups do not
    divide experts or nodes do not divide groups.
    """
    if len(load) % groups or groups % nodes:
        raise UsageError(
            f"{len(load)} experts in {groups} groups on {nodes} nodes: groups must divide the experts, and nodes the "
            "groups"
        )
    size = len(load) // groups
    weights = [sum(load[k * size : (k + 1) * size]) for k in range(groups)]
    room, total = [groups // nodes] * nodes, [0.0] * nodes
    of_node: list[list[int]] = [[] for _ in range(nodes)]
    for k in sorted(range(groups), key=lambda k: (-weights[k], k)):
        node = min((n for n in range(nodes) if room[n]), key=lambda n: total[n])
        room[node] -= 1
        total[node] += weights[k]
        of_node[node] += range(k * size, (k + 1) * size)
    on: list[tuple[int, ...]] = [()] * len(load)
    heaviest = 0.0
    for node, experts in enumerate(of_node):
        placed = greedy_experts([load[e] for e in experts], gpus_per_node, slots)
        heaviest = max(heaviest, placed.heaviest)
        for e, gpus in zip(experts, placed.gpus, strict=True):
            on[e] = tuple(node * gpus_per_node + g for g in gpus)
    return ExpertPlacement(tuple(on), heaviest, sum(load) / (nodes * gpus_per_node), False)


def least_load(load: Sequence[float], on: Sequence[Sequence[int]], gpus: int) -> float:
    """Return the load of the heaviest GPU of a placement when every expert's load is split best.

    The time is proportional to 2^gpus, so use it for few GPUs.
    """
    homes = [frozenset(of) for of in on]
    return max(
        sum(expert_load for expert_load, home in zip(load, homes, strict=True) if home <= set(chosen)) / size
        for size in range(1, gpus + 1)
        for chosen in combinations(range(gpus), size)
    )


def _check_slots(load: Sequence[float], gpus: int, slots: int) -> None:
    if gpus * slots < len(load):
        raise Infeasible(
            f"{len(load)} experts do not fit {gpus} GPUs with {slots} slots each; allow {-(-len(load) // gpus)} slots"
        )


# --- layers of a pipeline ---------------------------------------------------------------------------------


class LayerSpan(NamedTuple):
    """Layers `first` to `last`, both included, on a device."""

    device: int
    first: int
    last: int


class Partition(NamedTuple):
    """Stages in the order of the layers; the slowest takes `slowest_s`."""

    slowest_s: float
    stages: tuple[LayerSpan, ...]


def partition(
    layer_s: Sequence[float],
    layer_bytes: Sequence[float],
    speed: Sequence[float],
    memory_bytes: Sequence[float],
    send_s: float = 0.0,
) -> Partition:
    """Return the cut of a pipeline over devices of unequal speed and memory with the fastest slowest stage; not all
    devices need be used, and their order is free.

    A stage takes the time of its layers (`layer_s`, on a device of speed 1) over the device's speed, and `send_s` more
    unless it is the last. Devices that are alike count as one kind, so that 80 layers over 6 devices of 3 kinds are
    80 x 27 states. Raise Infeasible if the layers do not fit the memory.
    """
    kinds = sorted(Counter(zip(speed, memory_bytes, strict=True)).items())
    cuts = _Cuts(layer_s, layer_bytes, send_s)
    best: dict[_State, tuple[float, _State | None]] = {(0, (0,) * len(kinds)): (0.0, None)}
    for state in product(range(len(layer_s)), product(*(range(count + 1) for _, count in kinds))):
        if state not in best:
            continue
        # States are visited in the order of the layers done, so the best way to this one is final.
        so_far, (start, devices_used) = best[state][0], state
        for k, (kind, count) in enumerate(kinds):
            if devices_used[k] == count:
                continue
            for end, takes in cuts.from_layer(start, *kind):
                after = (end, (*devices_used[:k], devices_used[k] + 1, *devices_used[k + 1 :]))
                slowest = max(so_far, takes)
                if after not in best or slowest < best[after][0]:
                    best[after] = (slowest, state)
    final_states = [(value, state) for state, (value, _) in best.items() if state[0] == len(layer_s)]
    if not final_states:
        raise Infeasible(
            f"{len(layer_s)} layers do not fit the memory of the {len(speed)} devices, one run of layers on each"
        )
    slowest, state = min(final_states)
    devices = [*zip(speed, memory_bytes, strict=True)]
    free = [[d for d, device in enumerate(devices) if device == kind] for kind, _ in kinds]
    return Partition(slowest, tuple(_stages(best, state, free))[::-1])


_State = tuple[int, tuple[int, ...]]
"""(layers done, devices of each kind used)."""


def _stages(
    best: Mapping[_State, tuple[float, _State | None]], state: _State, free: Sequence[list[int]]
) -> Iterator[LayerSpan]:
    """Yield the stages from the last to the first; `free` are the devices of each kind."""
    while (before := best[state][1]) is not None:
        k = next(k for k in range(len(free)) if state[1][k] > before[1][k])
        yield LayerSpan(free[k].pop(), before[0], state[0] - 1)
        state = before


class _Cuts:
    """Times of runs of layers."""

    def __init__(self, layer_s: Sequence[float], layer_bytes: Sequence[float], send_s: float) -> None:
        self._seconds, self._bytes = [0.0, *accumulate(layer_s)], [0.0, *accumulate(layer_bytes)]
        self._layers, self._send_s = len(layer_s), send_s

    def from_layer(self, start: int, speed: float, memory_bytes: float) -> Iterator[tuple[int, float]]:
        """Yield (layer after the last, seconds) of the runs from a layer on that fit a device."""
        for end in range(start + 1, self._layers + 1):
            if self._bytes[end] - self._bytes[start] > memory_bytes * (1 + 1e-12):
                return
            send_s = self._send_s if end < self._layers else 0.0
            yield end, (self._seconds[end] - self._seconds[start]) / speed + send_s
