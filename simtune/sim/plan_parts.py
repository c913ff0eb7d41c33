"""The policies, routers and costs of a plan, built in or brought, and what is held against those that are brought.

A part from outside is checked when the plan is read (it can be had, it is whole, it has the options), when it is made,
and at every answer that the simulator goes by. Whatever it raises becomes one PartError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import isroutine
from operator import index
from typing import Any, cast

from simtune.costs.function import StepFunction, StepSeconds
from simtune.costs.protocol import ImbalanceCosts, StepCosts
from simtune.engine import POLICIES, Request, Scheduler
from simtune.errors import PartError, SimtuneError, UsageError
from simtune.sim.core import EngineCore
from simtune.sim.router import ROUTERS, Router
from simtune.specs.base import Spec
from simtune.specs.drafters import DRAFTERS
from simtune.specs.plan import Plan
from simtune.specs.plugins import Brought, PartKind, blame, described, option_problems
from simtune.specs.pool import POLICY_GROUP, Batching, Pool
from simtune.specs.routing import ROUTER_GROUP, OwnRouting, Routing
from simtune.specs.schemes import SCHEMES
from simtune.specs.study import Study
from simtune.workload.requests import RequestStream

POLICY: PartKind[Scheduler] = PartKind("policy", POLICY_GROUP, POLICIES, Scheduler)  # type: ignore[type-abstract]
ROUTER: PartKind[Router] = PartKind("router", ROUTER_GROUP, ROUTERS, Router)  # type: ignore[type-abstract]

Costs = StepCosts | StepSeconds
"""What a user may bring as a cost model."""
Where = tuple[str | int, ...]


def problems(spec: Spec) -> Iterator[tuple[Where, str]]:
    """(key, what is wrong) for the parts that a plan or study names, as far as it can be told before they are made."""
    if isinstance(spec, Plan):
        for i, pool in enumerate(spec.pools):
            yield from _policy_problems(("pools", i, "batching"), pool.batching.policy, pool.batching.options)
        for key, routing in (("router", spec.router), ("decode_router", spec.decode_router)):
            if isinstance(routing, OwnRouting):
                yield from _router_problems((key,), routing)
    elif isinstance(spec, Study):
        if spec.batching is not None:
            yield from _policy_problems(("batching",), spec.batching.policy, spec.batching.options)
        if isinstance(spec.router, OwnRouting):
            yield from _router_problems(("router",), spec.router)


def _policy_problems(at: Where, name: str, options: Mapping[str, Any] | None) -> Iterator[tuple[Where, str]]:
    if name in POLICIES and options is None:
        return
    try:
        policy = POLICY.find(name)
    except PartError as error:
        yield (*at, "policy"), str(error)
        return
    for option, message in option_problems(policy, options or {}, policy.settings()):
        yield (*at, "options", option), message


def _router_problems(at: Where, routing: OwnRouting) -> Iterator[tuple[Where, str]]:
    try:
        router = ROUTER.find(routing.kind)
    except PartError as error:
        yield (*at, "kind"), str(error)
        return
    for option, message in option_problems(router, routing.options, {"cores", *router.needs}):
        yield (*at, "options", option), message


def brought(plan: Plan, costs: Sequence[StepCosts]) -> list[Brought]:
    """The parts of a plan that are not built in."""
    policies = {pool.batching.policy for pool in plan.pools} - set(POLICIES)
    routers = {r.kind for r in (plan.router, plan.decode_router) if isinstance(r, OwnRouting)}
    return [
        *(Brought("policy", name, POLICY.find(name)) for name in sorted(policies)),
        *(Brought("router", name, ROUTER.find(name)) for name in sorted(routers)),
        *dict.fromkeys(own.part for own in costs if isinstance(own, OwnCosts)),
        *dict.fromkeys(_brought_drafting(plan)),
    ]


def _brought_drafting(plan: Plan) -> Iterator[Brought]:
    """Schemes and drafters that are not built in."""
    for pool in plan.pools:
        if pool.speculation is not None:
            scheme, drafter = pool.speculation.scheme, pool.speculation.drafter
            if scheme.kind not in SCHEMES:
                yield Brought("scheme", scheme.kind, type(scheme))
            if drafter.kind not in DRAFTERS:
                yield Brought("drafter", drafter.kind, type(drafter))


@contextmanager
def blamed(parts: Sequence[Brought]) -> Iterator[None]:
    """Turn what goes wrong while brought parts are at work into a PartError that says whose fault it is."""
    try:
        yield
    except SimtuneError:
        raise
    except Exception as error:
        if not parts:
            raise
        raise blame(error, parts) from error


def check_nobody_waits(plan: Plan, cores: Sequence[EngineCore]) -> None:
    """Raises PartError where a run is over and a policy from outside has left requests waiting at a core that is up."""
    named = {pool.name: pool.batching.policy for pool in plan.pools}
    for core in cores:
        name, scheduler = named[core.pool], core.scheduler
        if name not in POLICIES and core.up and scheduler.has_work:
            raise PartError(
                f"{Brought('policy', name, type(scheduler))}: {type(scheduler).__qualname__}.schedule answers None for "
                f"ever, with {scheduler.num_waiting} requests waiting and {scheduler.num_running} running"
            )


# --- policies ---------------------------------------------------------------------------------------------


def make_policy(batching: Batching, settings: Mapping[str, Any]) -> Scheduler:
    """A scheduler of the policy that is named, with its options. Raises UsageError where it refuses them, a PartError
    where it was brought."""
    policy = POLICY.find(batching.policy)
    try:
        return policy(**settings, **(batching.options or {}))
    except Exception as error:
        if batching.policy in POLICIES:
            if batching.options and isinstance(error, (TypeError, ValueError)):
                raise UsageError(f"batching.options of policy {batching.policy}: {described(error)}") from error
            raise
        raise _refusal(Brought("policy", batching.policy, policy), error) from error


def _refusal(part: Brought, error: Exception) -> PartError:
    return PartError(f"{part} cannot be made with what the plan says: {described(error)}")


# --- routers ----------------------------------------------------------------------------------------------

_LACKING = {
    "session": "needs sessions, and the workload names none; give it a shared_prefix, or choose another router",
    "block_tokens": "needs prompts that say what they share; use a trace with hash_ids, give the workload a "
    "shared_prefix, or choose another router",
}


def make_router(routing: Routing, cores: Sequence[EngineCore], stream: RequestStream, seed: int) -> Router:
    """The router that a plan names, with what it needs of a load. Raises UsageError where the load does not have it."""
    router = ROUTER.find(routing.kind)
    load = {
        "seed": seed,
        "session": None if stream.session is None else stream.session.tolist(),
        "block_tokens": None if stream.hash_ids is None else stream.block_tokens,
    }
    for need in sorted(router.needs):
        if load[need] is None:
            raise UsageError(f"the {routing.kind} router {_LACKING[need]}")
    needed = {need: load[need] for need in router.needs}
    if not isinstance(routing, OwnRouting):
        return router(cores, **routing.model_dump(exclude={"kind"}), **needed)
    part = Brought("router", routing.kind, router)
    try:
        return OwnRouter(router(cores, **routing.options, **needed), part)
    except Exception as error:
        raise _refusal(part, error) from error


class OwnRouter(Router):
    """A router from outside, whose every choice is looked at."""

    def __init__(self, router: Router, part: Brought) -> None:
        super().__init__(router.cores)
        self._router, self._part = router, part
        self.informed = router.informed

    def choose(self, request: Request, now: int) -> EngineCore | None:
        """What the router chooses. Raises PartError where that is not a core that is up, one of its own."""
        core = self._router.choose(request, now)
        if core is None:
            if any(core.up for core in self.cores):
                raise self._wrong("None, though cores are up")
        elif not any(core is one for one in self.cores):
            raise self._wrong(f"{core!r:.80}, which is none of its cores")
        elif not core.up:
            raise self._wrong(f"core {core.number}, which is down")
        return core

    def over(self, request: Request, core: EngineCore, now: int) -> None:
        """Tell the router."""
        self._router.over(request, core, now)

    def _wrong(self, answer: str) -> PartError:
        return PartError(f"{self._part}: {type(self._router).__qualname__}.choose answered {answer}")


# --- costs ------------------------------------------------------------------------------------------------


class OwnCosts:
    """A cost model from outside, whose every answer is looked at. What it has besides the protocol is there too."""

    def __init__(self, costs: Costs) -> None:
        """A function is taken for the seconds of a step. Raises PartError where a method of the protocol is missing."""
        name = str(getattr(costs, "__qualname__", type(costs).__qualname__))
        self.part = Brought("cost model", name, costs if isroutine(costs) else type(costs))
        is_function = callable(costs) and not hasattr(costs, "decode")
        self._costs: Any = StepFunction(cast(StepSeconds, costs)) if is_function else costs
        self._check_methods("decode", "mixed")

    @property
    def own(self) -> Any:
        """The cost model itself."""
        return self._costs

    def check_for(self, pool: Pool) -> None:
        """Raises PartError where the pool speculates and the costs do not know how long that takes."""
        if pool.speculation is not None:
            self._check_methods("round", "rounds")

    def _check_methods(self, *methods: str) -> None:
        for method in methods:
            if not callable(getattr(self._costs, method, None)):
                raise PartError(f"{self.part} has no method {method}; simtune.costs.protocol says what is asked of it")

    def __getattr__(self, name: str) -> Any:
        if name == "_costs":  # while it is unpickled there is nothing yet
            raise AttributeError(name)
        return getattr(self._costs, name)

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """See `StepCosts.decode`. Raises PartError for an answer that is none."""
        answer = self._costs.decode(num_decodes, context_tokens)
        try:
            first, slope, span = map(index, answer)
        except (TypeError, ValueError):
            raise self._wrong("decode", answer, "three whole numbers: ticks, ticks per further step, steps") from None
        if first < 1 or span < 1 or first + slope * (min(span, 2) - 1) < 1:
            raise self._wrong("decode", answer, "at least one tick for every step, and a span of at least 1")
        return first, slope, span

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        """See `StepCosts.mixed`. Raises PartError for an answer that is none."""
        answer = self._costs.mixed(num_decodes, context_tokens, chunks, num_samples)
        try:
            ticks = index(answer)
        except TypeError:
            raise self._wrong("mixed", answer, "a whole number of ticks") from None
        if ticks < 1:
            raise self._wrong("mixed", answer, "at least one tick")
        return ticks

    @property
    def balanced(self) -> bool:
        """Whether the costs know nothing of load imbalance; see `ImbalanceCosts`."""
        return not isinstance(self._costs, ImbalanceCosts) or self._costs.balanced

    def imbalance(self, num_decodes: int, context_tokens: int, longest_context: int, with_chunks: bool) -> int:
        """See `ImbalanceCosts.imbalance`; not to be asked of costs that are balanced."""
        ticks: int = self._costs.imbalance(num_decodes, context_tokens, longest_context, with_chunks)
        return ticks

    def round(self, *args: Any) -> int:
        """See `RoundCosts.round`; where a pool speculates, `check_for` has seen to it that the costs know."""
        ticks: int = self._costs.round(*args)
        return ticks

    def rounds(self, *args: Any) -> Sequence[int]:
        """See `RoundCosts.rounds`."""
        ends: Sequence[int] = self._costs.rounds(*args)
        return ends

    def _wrong(self, method: str, answer: object, wanted: str) -> PartError:
        return PartError(
            f"{self.part}: {self.part.name}.{method} answered {answer!r:.80}, and {wanted} are wanted; "
            "simtune.to_ticks turns seconds into ticks"
        )
