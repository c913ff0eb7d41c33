"""Allocation by trying everything: every way to fill every node, or every assignment of slices to types of GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from scipy.optimize import linprog

from simtune.tuner.space.allocation import Fleet, InstanceRate, Nodes

Use = tuple[float, float, float, float]
"""Prefill, decode and mixed requests per second of some nodes, and their price per hour."""


def _uses_of_a_node(nodes: Nodes, rates: Sequence[InstanceRate]) -> set[Use]:
    kinds = [r for r in rates if r.gpu == nodes.gpu and r.gpus <= nodes.gpus_per_node]
    uses: set[Use] = set()
    for counts in product(*(range(nodes.gpus_per_node // r.gpus + 1) for r in kinds)):
        gpus = sum(n * r.gpus for n, r in zip(counts, kinds, strict=True))
        if gpus <= nodes.gpus_per_node:
            served = {"prefill": 0.0, "decode": 0.0, "mixed": 0.0}
            for n, r in zip(counts, kinds, strict=True):
                served[r.role] += n * r.rate_rps
            prefill, decode, mixed = (round(x, 9) for x in served.values())
            uses.add((prefill, decode, mixed, round(gpus * nodes.price_per_gpu_hour, 9)))
    return uses


def _beaten(use: Use, by: Use) -> bool:
    return by != use and all(a >= b for a, b in zip(by[:3], use[:3], strict=True)) and by[3] <= use[3]


def _every_use(fleet: Fleet, rates: Sequence[InstanceRate]) -> Iterator[list[tuple[str, Use]]]:
    """Of each node by itself, or of groups of nodes that an instance spans: (rack, use)."""
    ways = []
    for nodes in fleet.nodes:
        single = _uses_of_a_node(nodes, rates)
        single = {u for u in single if not any(_beaten(u, v) for v in single)}
        wide = [r for r in rates if r.gpu == nodes.gpu and r.gpus > nodes.gpus_per_node]
        whole: list[list[tuple[str, Use]]] = []
        for counts in product(*(range(nodes.nodes * nodes.gpus_per_node // r.gpus + 1) for r in wide)):
            spanned = sum(n * r.gpus for n, r in zip(counts, wide, strict=True))
            if any(r.gpus % nodes.gpus_per_node for n, r in zip(counts, wide, strict=True) if n):
                continue
            left = nodes.nodes - spanned // nodes.gpus_per_node
            if left < 0:
                continue
            prefill, decode, mixed = (
                sum(n * r.rate_rps for n, r in zip(counts, wide, strict=True) if r.role == role)
                for role in ("prefill", "decode", "mixed")
            )
            across = (nodes.rack, (prefill, decode, mixed, spanned * nodes.price_per_gpu_hour))
            whole += [[across, *((nodes.rack, use) for use in combo)] for combo in product(single, repeat=left)]
        ways.append(whole)
    for combo in product(*ways):
        yield [use for whole in combo for use in whole]


def served(fleet: Fleet, uses: Sequence[tuple[str, Use]], kv_bytes: float) -> float:
    """Requests per second of an allocation: a linear programme of what flows from rack to rack."""
    racks = sorted({rack for rack, _ in uses})
    mixed = sum(use[2] for _, use in uses)
    prefill = [sum(use[0] for rack, use in uses if rack == r) for r in racks]
    decode = [sum(use[1] for rack, use in uses if rack == r) for r in racks]
    if not kv_bytes or not fleet.uplinks_bytes_per_s:
        link = fleet.link_bytes_per_s / kv_bytes if kv_bytes else math.inf
        return min(sum(prefill), sum(decode), link) + mixed
    n = len(racks)
    flow = np.eye(n * n).reshape(n * n, n, n)  # flow from rack i to rack j
    rows, limits = [], []
    for i, rack in enumerate(racks):
        uplink = fleet.uplinks_bytes_per_s.get(rack, math.inf) / kv_bytes
        out, into = flow[:, i, :].sum(axis=1), flow[:, :, i].sum(axis=1)
        rows += [out, into]
        limits += [prefill[i], decode[i]]
        if math.isfinite(uplink):
            rows += [out - flow[:, i, i], into - flow[:, i, i]]
            limits += [uplink, uplink]
    if math.isfinite(fleet.link_bytes_per_s):
        rows.append(np.ones(n * n))
        limits.append(fleet.link_bytes_per_s / kv_bytes)
    found = linprog(-np.ones(n * n), A_ub=np.array(rows), b_ub=np.array(limits))
    assert found.fun is not None, found.message
    return float(-found.fun) + mixed


def most(fleet: Fleet, rates: Sequence[InstanceRate], kv_bytes: float) -> tuple[float, float]:
    """(highest rate within the budget, lowest price of those that reach it)."""
    best = (0.0, 0.0)
    for uses in _every_use(fleet, rates):
        price = sum(use[3] for _, use in uses)
        if price <= fleet.budget_per_hour + 1e-9:
            rate = served(fleet, uses, kv_bytes)
            if rate > best[0] + 1e-9 or (rate > best[0] - 1e-9 and price < best[1]):
                best = (rate, price)
    return best


def cheapest(fleet: Fleet, rates: Sequence[InstanceRate], kv_bytes: float, demand: float) -> float:
    """The lowest price at which the demand is met; infinite where it cannot be."""
    prices = [math.inf]
    for uses in _every_use(fleet, rates):
        price = sum(use[3] for _, use in uses)
        if price < min(prices) and served(fleet, uses, kv_bytes) >= demand - 1e-9:
            prices.append(price)
    return min(prices)


def slices(load: Sequence[Sequence[float]], price: Sequence[float]) -> float:
    """The lowest price of GPUs, every slice of a load on one type of them."""
    best = math.inf
    for assigned in product(range(len(price)), repeat=len(load)):
        use = [0.0] * len(price)
        for slice_, of_type in zip(load, assigned, strict=True):
            use[of_type] += slice_[of_type]
        best = min(best, sum(p * math.ceil(u - 1e-9) for p, u in zip(price, use, strict=True)))
    return best
