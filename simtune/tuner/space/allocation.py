"""Allocation of instances to nodes, for several roles and types of GPU, as an integer programme.

Every instance is known by its role, its GPUs and the rate it serves alone. Equal nodes are not distinguished:
all ways to fill one of them that no other way beats (none serves as much in every role on no more GPUs) are listed, and
the programme has one integer z_f for each. With P, D, M the rates of a filling, and KV the bytes of a request,

    max pd + mixed   or   min price with pd + mixed >= demand
    pd <= sum P_f z_f,   pd <= sum D_f z_f,   mixed <= sum M_f z_f,   sum of z_f over the fillings of a node <= nodes
    pd * KV <= link,   price <= budget,   and for each rack with an uplink: KV that leaves it, or comes to it, <= uplink

An instance over k whole nodes is a column of its own that takes k of them. Nothing else grows with the number of nodes:
512 GPUs are a few dozen integers. Rates add up, so if each is an upper bound, the result is one too, and the value of
the linear relaxation bounds every allocation (`AllocationAnswer.lp_bound`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from simtune.errors import Infeasible, SimtuneError, UsageError
from simtune.specs.pool import Role
from simtune.tuner.space.integer_programs import TOLERANCE, Unsolvable, add_variable, constraint, solve, solver_name

TIME_LIMIT_S = 10.0
"""Seconds for each solver run; the answer reports if it was not proved within them."""
_EXACT = 1e-9
"""Relative amount below a rate that lets a solver reach the rate again."""


@dataclass(frozen=True)
class Nodes:
    """A number of equal nodes: one type of GPU, as many on each, in one rack."""

    gpu: str
    nodes: int
    gpus_per_node: int
    price_per_gpu_hour: float = 1.0
    """Price per GPU and hour; with the default of 1 prices count GPUs."""
    rack: str = ""


@dataclass(frozen=True)
class Fleet:
    """All GPUs that can be allocated, and the links between them."""

    nodes: tuple[Nodes, ...]
    link_bytes_per_s: float = math.inf
    """Bandwidth of the link that carries the KV caches of all requests from prefill to decode instances."""
    uplinks_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Bandwidth by rack, each way, for KV caches from and to other racks. A rack without an entry has no limit."""
    budget_per_hour: float = math.inf

    @property
    def price_per_hour(self) -> float:
        """Price of the whole fleet per hour."""
        return sum(n.nodes * n.gpus_per_node * n.price_per_gpu_hour for n in self.nodes)


@dataclass(frozen=True)
class InstanceRate:
    """A kind of instance, and the requests per second that one of them serves within the SLO, or can serve at most."""

    name: str
    role: Role
    gpu: str
    gpus: int
    """GPUs of an instance; more than one node has must be whole nodes."""
    rate_rps: float


class Placement(NamedTuple):
    """Nodes, or groups of nodes that one instance spans, that are filled in the same way."""

    nodes: Nodes
    instances: dict[str, int]
    """Number of instances on each, by the name of their `InstanceRate`."""
    times: int


@dataclass(frozen=True)
class AllocationAnswer:
    """The best allocation. `value` is `rate_rps`, or `price_per_hour` if a demand is to be met.

    No allocation of the fleet has a value above `lp_bound`, or a price below it. The counts are the best if
    `proven`; otherwise they are the best found within the time limit, and `lp_bound` still holds.
    """

    value: float
    lp_bound: float
    counts: dict[str, int]
    placements: tuple[Placement, ...]
    rate_rps: float
    prefill_decode_rps: float
    """Share of `rate_rps` through prefill and decode instances; mixed instances serve the rest."""
    price_per_hour: float
    proven: bool
    solver: str


def allocate(
    fleet: Fleet,
    rates: Sequence[InstanceRate],
    *,
    kv_bytes_per_request: float = 0.0,
    demand_rps: float | None = None,
    hybrid: bool = True,
    time_limit_s: float = TIME_LIMIT_S,
) -> AllocationAnswer:
    """Return the instances that serve most within the budget, at the lowest price; or the cheapest that serve
    `demand_rps`.

    `hybrid=False` allows either mixed instances, or prefill and decode instances, not both beside one another.
    Raise UsageError if the fleet or the rates make no sense, Infeasible if the demand exceeds what the fleet can serve
    within the budget, and SimtuneError if the solver finds nothing in `time_limit_s`.
    """
    _check(fleet, rates, kv_bytes_per_request, demand_rps)
    problem = _AllocationQuestion(_merged(fleet), kv_bytes_per_request, demand_rps, time_limit_s)
    allowed: list[Sequence[InstanceRate]] = [rates]
    if not hybrid:
        allowed = [[r for r in rates if (r.role == "mixed") == mixed] for mixed in (True, False)]
    answers, refusal = [], Infeasible("no kind of instance fits any node of the fleet")
    for kinds in allowed:
        try:
            if kinds:
                answers.append(_answer(problem, kinds))
        except Infeasible as error:
            refusal = error
    if not answers:
        raise refusal
    if demand_rps is None:
        best = max(answers, key=lambda a: (a.value, -a.price_per_hour))
        bound = max(a.lp_bound for a in answers)
    else:
        best = min(answers, key=lambda a: a.value)
        bound = min(a.lp_bound for a in answers)
    return replace(best, lp_bound=bound, proven=all(a.proven for a in answers))


def shadow_prices(
    fleet: Fleet, rates: Sequence[InstanceRate], *, demand_rps: float | None = None, time_limit_s: float = TIME_LIMIT_S
) -> dict[str, float]:
    """Return the dual values of the relaxation that bounds the answers of `allocate`.

    A value is what one more request per second is worth of each role (`prefill`, `decode`, `mixed`) and of the
    `demand`, and what one more unit of the `budget` is worth. Raise the same errors as `allocate`.
    """
    _check(fleet, rates, 0.0, demand_rps)
    problem = _AllocationQuestion(_merged(fleet), 0.0, demand_rps, time_limit_s)
    columns = [column for nodes in problem.fleet.nodes for column in _columns(nodes, rates)]
    if not columns:
        raise Infeasible("no kind of instance fits any node of the fleet; allow smaller ones, or whole nodes of it")
    try:
        return _Programme(problem, columns, demand_rps).shadow_prices()
    except Unsolvable:
        raise Infeasible(f"the fleet does not serve {demand_rps:g} requests/s") from None


def _check(fleet: Fleet, rates: Sequence[InstanceRate], kv_bytes: float, demand_rps: float | None) -> None:
    """Raise UsageError for values that make no sense, all of them at once."""
    wrong = [*_wrong_rates(fleet, rates), *_wrong_fleet(fleet)]
    if not 0 <= kv_bytes < math.inf:
        wrong.append(f"a request with {kv_bytes:g} bytes of KV cache; they must be 0 or more")
    if demand_rps is not None and not 0 < demand_rps < math.inf:
        wrong.append(f"a demand of {demand_rps:g} requests/s; it must be above 0")
    if wrong:
        raise UsageError("\n".join(wrong))


def _wrong_rates(fleet: Fleet, rates: Sequence[InstanceRate]) -> Iterator[str]:
    for name, count in Counter(r.name for r in rates).items():
        if count > 1:
            yield f"{count} instances are called {name}; give each kind a name of its own"
    gpus = {n.gpu for n in fleet.nodes}
    for r in rates:
        if r.gpu not in gpus:
            yield f"{r.name}: the fleet has no {r.gpu}; it has {', '.join(sorted(gpus)) or 'nothing'}"
        if r.gpus < 1 or not 0 <= r.rate_rps < math.inf:
            yield f"{r.name}: {r.gpus} GPUs that serve {r.rate_rps:g} requests/s; give 1 GPU or more, and a rate from 0"


def _wrong_fleet(fleet: Fleet) -> Iterator[str]:
    for n in fleet.nodes:
        if min(n.nodes, n.gpus_per_node - 1) < 0 or not 0 < n.price_per_gpu_hour < math.inf:
            yield f"{n.gpu}: {n.nodes} nodes of {n.gpus_per_node} GPUs at {n.price_per_gpu_hour:g} an hour"
    if unknown := sorted(set(fleet.uplinks_bytes_per_s) - {n.rack for n in fleet.nodes}):
        yield f"no node is in rack {', '.join(unknown)}, which has an uplink"
    limits = {"link": fleet.link_bytes_per_s, "budget": fleet.budget_per_hour}
    limits |= {f"uplink of {rack}": rate for rack, rate in fleet.uplinks_bytes_per_s.items()}
    for name, limit in limits.items():
        if not limit >= 0:
            yield f"{name}: {limit:g}; it must be 0 or more"


def _merged(fleet: Fleet) -> Fleet:
    """Return the same fleet, with equal nodes merged into one entry."""
    count: Counter[Nodes] = Counter()
    for nodes in fleet.nodes:
        count[replace(nodes, nodes=0)] += nodes.nodes
    return replace(fleet, nodes=tuple(replace(nodes, nodes=n) for nodes, n in count.items()))


# --- fillings of a node -----------------------------------------------------------------------------------


class _Column(NamedTuple):
    """A way to use `takes` nodes, and the rates that it serves."""

    nodes: Nodes
    takes: int
    counts: tuple[tuple[str, int], ...]
    gpus: int
    rates: tuple[float, float, float]
    """Rates of prefill, decode and mixed instances."""

    @property
    def price(self) -> float:
        return self.gpus * self.nodes.price_per_gpu_hour


ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")


def _columns(nodes: Nodes, rates: Iterable[InstanceRate]) -> Iterator[_Column]:
    """Yield every filling worth considering for nodes of a kind."""
    best: dict[tuple[str, int], InstanceRate] = {}
    for r in rates:
        fastest = best.get((r.role, r.gpus))
        if r.gpu == nodes.gpu and r.rate_rps > (fastest.rate_rps if fastest else 0.0):
            best[r.role, r.gpus] = r
    inside = [r for r in best.values() if r.gpus <= nodes.gpus_per_node]
    for filling in _fillings(inside, nodes.gpus_per_node):
        yield _Column(nodes, 1, tuple((r.name, n) for r, n in filling.counts), filling.gpus, filling.rates)
    for r in best.values():
        takes, over = divmod(r.gpus, nodes.gpus_per_node)
        if takes > 1 and not over and takes <= nodes.nodes:
            yield _Column(nodes, takes, ((r.name, 1),), r.gpus, _by_role(r, 1))


class _Filling(NamedTuple):
    counts: tuple[tuple[InstanceRate, int], ...]
    gpus: int
    rates: tuple[float, float, float]

    def beats(self, other: _Filling) -> bool:
        """True if it serves as much in every role on no more GPUs."""
        return self.gpus <= other.gpus and all(a >= b for a, b in zip(self.rates, other.rates, strict=True))


def _by_role(r: InstanceRate, count: int) -> tuple[float, float, float]:
    prefill, decode, mixed = (count * r.rate_rps if r.role == role else 0.0 for role in ROLES)
    return prefill, decode, mixed


def _fillings(kinds: Sequence[InstanceRate], gpus: int) -> list[_Filling]:
    """Return the fillings that no other filling beats, without the empty one.

    Built kind by kind: a filling that is beaten now is also beaten after more instances are added to both.
    """
    fillings = [_Filling((), 0, (0.0, 0.0, 0.0))]
    for r in sorted(kinds, key=lambda r: (-r.gpus, r.role, r.name)):
        grown = []
        for filling in fillings:
            for count in range((gpus - filling.gpus) // r.gpus + 1):
                a, b, c = filling.rates
                p, d, m = _by_role(r, count)
                counts = (*filling.counts, (r, count)) if count else filling.counts
                grown.append(_Filling(counts, filling.gpus + count * r.gpus, (a + p, b + d, c + m)))
        fillings = _undominated(grown)
    return [filling for filling in fillings if filling.counts]


def _undominated(fillings: list[_Filling]) -> list[_Filling]:
    """Return the fillings that no other filling beats, in the order of GPUs, then of falling rates.

    In this order a later filling cannot beat an earlier one unless both are equal.
    """
    best: list[_Filling] = []
    for filling in sorted(fillings, key=lambda f: (f.gpus, *(-rate for rate in f.rates))):
        if not any(earlier.beats(filling) for earlier in best):
            best.append(filling)
    return best


# --- the programme ----------------------------------------------------------------------------------------


class _AllocationQuestion(NamedTuple):
    fleet: Fleet
    kv_bytes: float
    demand_rps: float | None
    time_limit_s: float

    def kv_rate(self, bytes_per_s: float) -> float:
        """Return the requests per second whose KV caches a link can carry."""
        return bytes_per_s / self.kv_bytes if self.kv_bytes else math.inf


class _Programme:
    """The programme over given columns. With `least_rps` it minimises the price, otherwise it maximises the rate."""

    def __init__(self, asked: _AllocationQuestion, columns: Sequence[_Column], least_rps: float | None) -> None:
        import pulp

        self._asked, self.columns = asked, columns
        sense = pulp.LpMaximize if least_rps is None else pulp.LpMinimize
        self.problem = problem = pulp.LpProblem("allocation", sense)
        self._z = [
            add_variable(problem, f"z{i}", 0, c.nodes.nodes // c.takes, whole=True) for i, c in enumerate(columns)
        ]
        self._prefill_decode, self._mixed = (
            add_variable(problem, "prefill_decode", 0),
            add_variable(problem, "mixed", 0),
        )
        rate = self._prefill_decode + self._mixed
        price = pulp.lpSum(c.price * z for c, z in zip(columns, self._z, strict=True))
        problem += rate if least_rps is None else price
        if least_rps is not None:
            problem += rate >= least_rps, "demand"
        if math.isfinite(asked.fleet.budget_per_hour):
            problem += price <= asked.fleet.budget_per_hour, "budget"
        for nodes in asked.fleet.nodes:
            nodes_used = [c.takes * z for c, z in zip(columns, self._z, strict=True) if c.nodes is nodes]
            if nodes_used:
                problem += pulp.lpSum(nodes_used) <= nodes.nodes
        self._serve()

    def _serve(self) -> None:
        """Add the constraints of rates on capacity, and of KV caches on links."""
        import pulp

        problem, fleet = self.problem, self._asked.fleet
        racks = defaultdict(list)
        for column, z in zip(self.columns, self._z, strict=True):
            racks[column.nodes.rack].append((column, z))
        total = dict.fromkeys(ROLES, 0)
        for i, (rack, in_rack) in enumerate(sorted(racks.items())):
            capacity = {role: pulp.lpSum(c.rates[k] * z for c, z in in_rack) for k, role in enumerate(ROLES)}
            served: dict[Role, Any] = {"mixed": capacity["mixed"]}
            uplink = self._asked.kv_rate(fleet.uplinks_bytes_per_s.get(rack, math.inf))
            if math.isfinite(uplink):
                stays = add_variable(problem, f"stays{i}", 0)
                for role in ("prefill", "decode"):
                    crosses = add_variable(problem, f"{role}{i}", 0, uplink)
                    problem += stays + crosses <= capacity[role]
                    served[role] = stays + crosses
            else:
                served |= {"prefill": capacity["prefill"], "decode": capacity["decode"]}
            total = {role: total[role] + served[role] for role in ROLES}
        problem += self._prefill_decode <= total["prefill"], "prefill"
        problem += self._prefill_decode <= total["decode"], "decode"
        problem += self._mixed <= total["mixed"], "mixed"
        link = self._asked.kv_rate(fleet.link_bytes_per_s)
        if math.isfinite(link):
            problem += self._prefill_decode <= link

    def relaxed(self) -> float:
        """Return the value if a fraction of a node could be filled."""
        import pulp

        solve(self.problem, whole=False, time_limit_s=self._asked.time_limit_s)
        return float(pulp.value(self.problem.objective))

    def shadow_prices(self) -> dict[str, float]:
        """Return the worth of one more unit of each limit if a fraction of a node could be filled, by the name of its
        row."""
        self.relaxed()
        rows = {name: constraint(self.problem, name) for name in (*ROLES, "budget", "demand")}
        return {name: abs(row.pi or 0.0) for name, row in rows.items() if row is not None}

    def solved(self) -> tuple[list[tuple[_Column, int]], bool]:
        """Return the number of times that each column is used, and True if that is proved to be the best."""
        proven = solve(self.problem, time_limit_s=self._asked.time_limit_s)
        counts = [round(z.value() or 0.0) for z in self._z]
        return [(c, n) for c, n in zip(self.columns, counts, strict=True) if n], proven


def _answer(asked: _AllocationQuestion, rates: Sequence[InstanceRate]) -> AllocationAnswer:
    """Return the best allocation. Raise Infeasible if the demand is out of reach."""
    columns = [column for nodes in asked.fleet.nodes for column in _columns(nodes, rates)]
    if not columns:
        raise Infeasible("no kind of instance fits any node of the fleet; allow smaller ones, or whole nodes of it")
    most = _Programme(asked, columns, None)
    if asked.demand_rps is None:
        # Solvers are exact to a tolerance, and the bound must hold for the exact optimum.
        bound = most.relaxed() * (1 + TOLERANCE)
        used_columns, proven = most.solved()
        # The programme maximises the rate alone: of the allocations with this rate take the cheapest.
        used_columns = _cheapest(asked, columns, used_columns)
        value = _served(asked, used_columns)[0]
    else:
        cheapest = _Programme(asked, columns, asked.demand_rps)
        try:
            bound = cheapest.relaxed() * (1 - TOLERANCE)
            used_columns, proven = cheapest.solved()
        except Unsolvable:
            # How far the fleet does reach is what the user needs to know next.
            reach = _served(asked, most.solved()[0])[0]
            raise Infeasible(
                f"{asked.demand_rps:g} requests/s are asked for; the fleet serves {reach:.4g} at most within its "
                "links and budget. Lower the demand, or allow more GPUs, links or budget"
            ) from None
        value = sum(n * c.price for c, n in used_columns)
    rate, prefill_decode = _served(asked, used_columns)
    counts: Counter[str] = Counter()
    for column, times in used_columns:
        for name, n in column.counts:
            counts[name] += n * times
    return AllocationAnswer(
        value=value,
        lp_bound=bound,
        counts=dict(sorted(counts.items())),
        placements=tuple(Placement(c.nodes, dict(c.counts), n) for c, n in used_columns),
        rate_rps=rate,
        prefill_decode_rps=prefill_decode,
        price_per_hour=sum(n * c.price for c, n in used_columns),
        proven=proven,
        solver=solver_name(),
    )


def _served(asked: _AllocationQuestion, taken: Sequence[tuple[_Column, int]]) -> tuple[float, float]:
    """Return (requests per second of an allocation, those of them that go through prefill and decode instances).

    In each rack prefill and decode instances first serve one another: swapping a way out and a way in for one that
    stays never needs more of an uplink. What is left of them goes over the uplinks.
    """
    racks: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    mixed = 0.0
    for column, times in taken:
        prefill, decode, mixed_rate = column.rates
        racks[column.nodes.rack][0] += times * prefill
        racks[column.nodes.rack][1] += times * decode
        mixed += times * mixed_rate
    stays = out = into = 0.0
    for rack, (prefill, decode) in racks.items():
        uplink = asked.kv_rate(asked.fleet.uplinks_bytes_per_s.get(rack, math.inf))
        mixed_rate = min(prefill, decode)
        stays, out, into = (
            stays + mixed_rate,
            out + min(prefill - mixed_rate, uplink),
            into + min(decode - mixed_rate, uplink),
        )
    prefill_decode = min(stays + min(out, into), asked.kv_rate(asked.fleet.link_bytes_per_s))
    return prefill_decode + mixed, prefill_decode


def _cheapest(
    asked: _AllocationQuestion, columns: Sequence[_Column], taken: list[tuple[_Column, int]]
) -> list[tuple[_Column, int]]:
    """Return an allocation that serves as much for the lowest price; the given one if none is found in time."""
    rate = _served(asked, taken)[0]
    try:
        cheaper, _ = _Programme(asked, columns, rate * (1 - _EXACT)).solved()
    except SimtuneError:
        return taken
    return cheaper if _served(asked, cheaper)[0] >= rate * (1 - TOLERANCE) else taken
