"""Allocation of instances to nodes: the oracle's numbers, brute force, links, budgets, and what a solver says."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import simtune
from examples.programs.slices import Slices, cheapest_types
from simtune.errors import Infeasible, SimtuneError, UsageError
from simtune.tuner.space import integer_programs
from simtune.tuner.space.allocation import Fleet, InstanceRate, Nodes, allocate
from tests.oracles import allocation as brute

EXACT = 1e-5
KV = 0.25


@pytest.fixture(scope="module")
def oracle(oracle_dir: Path) -> Any:
    return json.loads((oracle_dir / "milp.json").read_text())


RATES = (
    InstanceRate("preH2", "prefill", "H", 2, 3.1),
    InstanceRate("preH4", "prefill", "H", 4, 5.6),
    InstanceRate("preL2", "prefill", "L", 2, 0.9),
    InstanceRate("decH2", "decode", "H", 2, 2.0),
    InstanceRate("decH8", "decode", "H", 8, 10.5),
    InstanceRate("decL4", "decode", "L", 4, 1.7),
    InstanceRate("mixH2", "mixed", "H", 2, 1.15),
    InstanceRate("mixH8", "mixed", "H", 8, 5.2),
    InstanceRate("mixL2", "mixed", "L", 2, 0.45),
)
FLEET = Fleet((Nodes("H", 2, 8, 4.0), Nodes("L", 1, 4, 1.2)), link_bytes_per_s=2.6)


def of(instance: Any) -> tuple[Fleet, list[InstanceRate]]:
    """An instance of the oracle."""
    nodes = tuple(
        Nodes(gpu, count, size, instance["price"][gpu])
        for gpu, sizes in instance["nodes"].items()
        for size, count in sorted(Counter(sizes).items())
    )
    rates = [InstanceRate(c["name"], c["role"], c["type"], c["gpus"], c["rate"]) for c in instance["configs"]]
    return Fleet(nodes, link_bytes_per_s=instance["link"]), rates


def test_the_oracles_instance(oracle: Any) -> None:
    case = oracle["allocation_max_rate"]
    fleet, rates = of(case["instance"])
    assert (fleet, tuple(rates)) == (FLEET, RATES)
    answer = allocate(fleet, rates, kv_bytes_per_request=case["instance"]["kv_bytes"])
    assert answer.rate_rps == answer.value == pytest.approx(case["rate"], abs=EXACT)
    assert answer.price_per_hour == pytest.approx(case["price"], abs=EXACT)
    assert answer.prefill_decode_rps == pytest.approx(case["pd_rate"], abs=EXACT)
    assert answer.counts == {name.split("@")[0]: n for name, n in case["counts"].items()}
    assert answer.lp_bound > answer.value
    assert answer.proven
    demanded = oracle["allocation_min_cost"]
    answer = allocate(fleet, rates, kv_bytes_per_request=KV, demand_rps=demanded["demand"])
    assert answer.value == answer.price_per_hour == pytest.approx(demanded["price"], abs=EXACT)
    assert answer.rate_rps >= demanded["demand"]
    assert answer.lp_bound < answer.value


def test_512_gpus_are_a_few_dozen_integers(oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per-node integers were not proved in 20 s; fillings are, in a fraction of one."""
    sizes = []
    solve = integer_programs.solve
    monkeypatch.setattr(
        "simtune.tuner.space.allocation.solve",
        lambda problem, **settings: sizes.append(problem.numVariables()) or solve(problem, **settings),  # type: ignore[func-returns-value]
    )
    fleet = Fleet((Nodes("H", 32, 8, 4.0), Nodes("L", 32, 8, 1.2)), link_bytes_per_s=1e9)
    answer = allocate(fleet, RATES, kv_bytes_per_request=KV)
    assert answer.rate_rps == pytest.approx(oracle["allocation_512_gpus"]["patterns_cbc"]["rate"], abs=EXACT)
    assert answer.proven
    assert answer.value <= answer.lp_bound < 1.002 * answer.value
    assert max(sizes) < 100
    is_what_it_says(answer, fleet, RATES)


def some_rates(rng: random.Random) -> list[InstanceRate]:
    return [replace(r, rate_rps=round(r.rate_rps * rng.uniform(0.5, 1.8), 3)) for r in RATES]


def is_what_it_says(answer: Any, fleet: Fleet, rates: Sequence[InstanceRate]) -> None:
    """Counts, placements and price agree, and no node holds more than it has."""
    by_name = {r.name: r for r in rates}
    counts: Counter[str] = Counter()
    taken: Counter[tuple[str, str, int]] = Counter()
    for nodes, instances, times in answer.placements:
        gpus = sum(n * by_name[name].gpus for name, n in instances.items())
        assert all(by_name[name].gpu == nodes.gpu for name in instances)
        spanned = max(1, math.ceil(gpus / nodes.gpus_per_node))
        assert spanned == 1 or (len(instances) == 1 and gpus == spanned * nodes.gpus_per_node)
        taken[nodes.gpu, nodes.rack, nodes.gpus_per_node] += spanned * times
        for name, n in instances.items():
            counts[name] += n * times
    assert counts == answer.counts
    there: Counter[tuple[str, str, int]] = Counter()
    for nodes in fleet.nodes:
        there[nodes.gpu, nodes.rack, nodes.gpus_per_node] += nodes.nodes
    assert all(taken[key] <= there[key] for key in taken)


def test_random_allocations_are_brute_force() -> None:
    rng = random.Random(1)
    equal = 0
    for _ in range(40):
        rates = some_rates(rng)
        fleet = replace(
            FLEET, link_bytes_per_s=rng.choice([0.8, 2.6, 9.0]), budget_per_hour=rng.choice([math.inf, 30.0, 50.0])
        )
        answer = allocate(fleet, rates, kv_bytes_per_request=KV)
        rate, price = brute.most(fleet, rates, KV)
        is_what_it_says(answer, fleet, rates)
        assert answer.value <= answer.lp_bound
        assert answer.price_per_hour <= fleet.budget_per_hour + EXACT
        assert answer.price_per_hour == pytest.approx(price, abs=EXACT), "the cheapest of the best"
        equal += abs(answer.value - rate) < EXACT
    assert equal == 40


def test_random_prices_are_brute_force() -> None:
    rng = random.Random(2)
    for _ in range(10):
        rates, demand = some_rates(rng), rng.uniform(2.0, 14.0)
        lowest = brute.cheapest(FLEET, rates, KV, demand)
        if math.isinf(lowest):
            with pytest.raises(Infeasible, match=r"the fleet serves [0-9.]+ at most"):
                allocate(FLEET, rates, kv_bytes_per_request=KV, demand_rps=demand)
        else:
            answer = allocate(FLEET, rates, kv_bytes_per_request=KV, demand_rps=demand)
            assert answer.value == pytest.approx(lowest, abs=EXACT)
            assert answer.lp_bound <= answer.value


def test_racks_with_uplinks_are_brute_force() -> None:
    """KV caches stay in their rack where they can; brute force is told by a flow from rack to rack."""
    rng = random.Random(3)
    kinds = [r for r in RATES if r.name in ("preH4", "decH2", "mixH2", "preL2", "decL4")]
    crossed = 0
    for _ in range(12):
        rates = [replace(r, rate_rps=round(r.rate_rps * rng.uniform(0.5, 1.8), 3)) for r in kinds]
        fleet = Fleet(
            (Nodes("H", 1, 4, 4.0, "a"), Nodes("L", 1, 4, 1.2, "a"), Nodes("H", 1, 4, 4.0, "b")),
            link_bytes_per_s=rng.choice([math.inf, 0.9]),
            uplinks_bytes_per_s=rng.choice([{"a": 0.2}, {"a": 0.3, "b": 0.1}, {"b": 0.05}]),
        )
        answer = allocate(fleet, rates, kv_bytes_per_request=KV)
        assert answer.value == pytest.approx(brute.most(fleet, rates, KV)[0], abs=EXACT)
        is_what_it_says(answer, fleet, rates)
        unlimited = allocate(replace(fleet, uplinks_bytes_per_s={}), rates, kv_bytes_per_request=KV)
        crossed += answer.value < unlimited.value - EXACT
    assert crossed, "some uplink binds"


def test_an_instance_over_several_nodes_takes_whole_ones() -> None:
    fleet = Fleet((Nodes("H", 3, 4, 4.0), Nodes("L", 2, 2, 1.0)))
    rates = [
        InstanceRate("wide", "decode", "H", 8, 9.0),
        InstanceRate("pre", "prefill", "H", 2, 5.0),
        InstanceRate("mix", "mixed", "H", 4, 2.0),
        InstanceRate("small", "mixed", "L", 1, 0.3),
        InstanceRate("odd", "mixed", "H", 6, 99.0),  # neither within a node nor whole nodes
    ]
    answer = allocate(fleet, rates, kv_bytes_per_request=KV)
    assert answer.counts == {"wide": 1, "pre": 2, "small": 4}
    assert answer.value == pytest.approx(brute.most(fleet, rates, KV)[0]) == pytest.approx(10.2)
    is_what_it_says(answer, fleet, rates)
    with pytest.raises(Infeasible, match="whole nodes"):
        allocate(fleet, [rates[-1]])


def test_nodes_that_are_alike_may_be_given_one_by_one() -> None:
    apart = replace(FLEET, nodes=(Nodes("H", 1, 8, 4.0), Nodes("L", 1, 4, 1.2), Nodes("H", 1, 8, 4.0)))
    together = allocate(FLEET, RATES, kv_bytes_per_request=KV)
    assert allocate(apart, RATES, kv_bytes_per_request=KV) == together


def test_mixed_instances_or_prefill_and_decode() -> None:
    """A plan's pools are either all mixed, or prefill and decode."""
    apart, mixed = ([r for r in RATES if (r.role == "mixed") == of] for of in (False, True))
    answer = allocate(FLEET, RATES, kv_bytes_per_request=KV, hybrid=False)
    assert answer.value == pytest.approx(brute.most(FLEET, mixed, KV)[0], abs=EXACT)
    assert set(answer.counts) == {"mixH8", "mixL2"}
    faster = replace(FLEET, link_bytes_per_s=9.0)
    answer = allocate(faster, RATES, kv_bytes_per_request=KV, hybrid=False)
    assert answer.value == pytest.approx(brute.most(faster, apart, KV)[0], abs=EXACT)
    assert answer.value > allocate(faster, mixed).value
    assert set(answer.counts) <= {r.name for r in apart}
    assert answer.lp_bound >= allocate(faster, mixed).value
    assert allocate(faster, RATES, kv_bytes_per_request=KV, hybrid=False, demand_rps=5.0).counts == {"mixH8": 1}


def test_a_prefill_instance_alone_serves_nothing() -> None:
    answer = allocate(FLEET, [RATES[0]], kv_bytes_per_request=KV)
    assert answer.value == 0
    assert answer.counts == {}, "the cheapest of those that serve nothing"


def test_whether_the_answer_is_proved_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a time limit pulp's `status` says Optimal; `sol_status` tells."""
    import pulp

    class OutOfTime(pulp.LpSolver):  # type: ignore[misc]
        def __init__(self, sol_status: int) -> None:
            super().__init__(msg=False)
            self.sol_status = sol_status

        def actualSolve(self, problem: Any) -> int:
            problem.assignVarsVals({v.name: 0.0 for v in problem.variables()})
            problem.assignStatus(pulp.LpStatusOptimal, self.sol_status)
            status: int = pulp.LpStatusOptimal
            return status

    whole = integer_programs._solver
    for sol_status, ends in ((pulp.LpSolutionIntegerFeasible, None), (pulp.LpSolutionNoSolutionFound, "allow more")):
        monkeypatch.setattr(
            integer_programs, "_solver", lambda mip, limit, s=sol_status: OutOfTime(s) if mip else whole(mip, limit)
        )
        if ends is None:
            answer = allocate(FLEET, RATES, kv_bytes_per_request=KV)
            assert not answer.proven
            assert answer.value == 0 < answer.lp_bound
        else:
            with pytest.raises(SimtuneError, match=ends):
                allocate(FLEET, RATES, kv_bytes_per_request=KV)


@pytest.mark.parametrize(
    ("fleet", "rates", "demand", "why"),
    [
        (FLEET, [replace(RATES[0], gpu="B")], None, "the fleet has no B; it has H, L"),
        (FLEET, [RATES[0], RATES[0]], None, "2 instances are called preH2"),
        (FLEET, [replace(RATES[0], rate_rps=math.nan)], None, "preH2: 2 GPUs that serve nan"),
        (replace(FLEET, nodes=(Nodes("H", 1, 8, 0.0),)), RATES[:1], None, "1 nodes of 8 GPUs at 0 an hour"),
        (replace(FLEET, uplinks_bytes_per_s={"z": 1.0}), RATES, None, "no node is in rack z"),
        (replace(FLEET, budget_per_hour=-1.0), RATES, None, "budget: -1; it must be 0 or more"),
        (FLEET, RATES, -3.0, "a demand of -3"),
    ],
)
def test_what_makes_no_sense_is_refused(
    fleet: Fleet, rates: Sequence[InstanceRate], demand: float | None, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        allocate(fleet, rates, kv_bytes_per_request=KV, demand_rps=demand)


def test_it_is_public() -> None:
    assert simtune.allocate is allocate
    assert simtune.Fleet is Fleet


# --- slices of a load to types of GPU ---------------------------------------------------------------------


def test_slices_go_to_the_cheapest_types(oracle: Any) -> None:
    case = oracle["slices"]
    answer = cheapest_types(case["load"], case["price"])
    assert answer.price == pytest.approx(case["cost"], abs=EXACT)
    assert list(answer.gpus) == case["counts"]
    public = oracle["melange_public_example"]
    answer = cheapest_types(public["load"], public["price"])
    assert answer == Slices(answer.price, answer.lp_bound, (3, 1), answer.types, True)
    assert answer.price == pytest.approx(public["cost"], abs=EXACT)
    for gpus, of_type in zip(answer.gpus, range(2), strict=True):
        used = sum(row[of_type] for row, t in zip(public["load"], answer.types, strict=True) if t == of_type)
        assert used <= gpus + EXACT


def test_random_slices_are_brute_force() -> None:
    rng = random.Random(4)
    for _ in range(15):
        load = [[round(rng.uniform(a, b), 3) for a, b in ((0.05, 0.9), (0.03, 0.4), (0.05, 0.6))] for _ in range(6)]
        answer = cheapest_types(load, [1.0, 3.3, 1.9])
        assert answer.price == pytest.approx(brute.slices(load, [1.0, 3.3, 1.9]), abs=EXACT)
        assert answer.lp_bound <= answer.price


def test_a_slice_that_a_type_cannot_serve_goes_elsewhere() -> None:
    load = [[math.inf, 0.5], [0.1, 0.5]]
    assert cheapest_types(load, [1.0, 5.0]).types == (1, 1)
    assert cheapest_types(load, [1.0, 9.0], available=[1, 1]).types == (1, 1)
    assert cheapest_types([[0.4, 0.9], [0.4, 0.9]], [1.0, 9.0], available=[0, 2]).gpus == (0, 2)
    with pytest.raises(Infeasible, match="available"):
        cheapest_types(load, [1.0, 5.0], available=[4, 0])
    with pytest.raises(Infeasible, match="slice 1"):
        cheapest_types([[0.1], [math.inf]], [1.0])
