"""Policies, routers and costs of a plan, built in or from outside, and the checks of those from outside.

A part from outside is checked when the plan is read (it can be loaded, is complete, has the options), when it is made,
and at every answer that the simulator uses. Whatever it raises becomes one PartError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import isroutine
from operator import index
from typing import Any, cast

from simtune.costs.function import SecondsFunction, StepFunction
from simtune.costs.protocol import ImbalanceCosts, StepCosts
from simtune.engine import POLICIES, Request, Scheduler
from simtune.engine.encoding import ENCODING
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
from simtune.specs.variants import Fragment, variants_of
from simtune.workload.requests import RequestStream

POLICY: PartKind[Scheduler] = PartKind("policy", POLICY_GROUP, POLICIES, Scheduler)  # type: ignore[type-abstract]
ROUTER: PartKind[Router] = PartKind("router", ROUTER_GROUP, ROUTERS, Router)  # type: ignore[type-abstract]

Costs = StepCosts | SecondsFunction
"""Cost models that a user may bring."""
Where = tuple[str | int, ...]


def problems(spec: Spec) -> Iterator[tuple[Where, str]]:
    """Yield (key, problem) for the parts that a plan or study names, as far as they can be checked before they are
    made."""
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
        for i, fragment in enumerate(spec.search.variants or ()):
            yield from _fragment_problems(("search", "variants", i), fragment)


def _fragment_problems(at: Where, fragment: Fragment) -> Iterator[tuple[Where, str]]:
    """Yield the problems of the policies and the routers that a fragment of a study names."""
    (variant,) = variants_of([fragment])
    for role, settings in ((), variant.pool), *(((role,), settings) for role, settings in variant.by_role.items()):
        batching = settings.get("batching", {})
        if "policy" in batching:
            yield from _policy_problems((*at, *role, "batching"), batching["policy"], batching.get("options"))
    for key in ("router", "decode_router"):
        routing = getattr(variant.plan, key)
        if isinstance(routing, OwnRouting):
            yield from _router_problems((*at, key), routing)


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
    """Return the parts of a plan that are not built in."""
    policies = {pool.batching.policy for pool in plan.pools} - set(POLICIES)
    routers = {r.kind for r in (plan.router, plan.decode_router) if isinstance(r, OwnRouting)}
    return [
        *(Brought("policy", name, POLICY.find(name)) for name in sorted(policies)),
        *(Brought("router", name, ROUTER.find(name)) for name in sorted(routers)),
        *dict.fromkeys(model.part for model in costs if isinstance(model, OwnCosts)),
        *dict.fromkeys(_brought_drafting(plan)),
    ]


def _brought_drafting(plan: Plan) -> Iterator[Brought]:
    """Yield schemes and drafters that are not built in."""
    for pool in plan.pools:
        if pool.speculation is not None:
            scheme, drafter = pool.speculation.scheme, pool.speculation.drafter
            if scheme.kind not in SCHEMES:
                yield Brought("scheme", scheme.kind, type(scheme))
            if drafter.kind not in DRAFTERS:
                yield Brought("drafter", drafter.kind, type(drafter))


@contextmanager
def blamed(parts: Sequence[Brought]) -> Iterator[None]:
    """Turn exceptions raised while parts from outside run into a PartError that names the part at fault."""
    try:
        yield
    except SimtuneError:
        raise
    except Exception as error:
        if not parts:
            raise
        raise blame(error, parts) from error


def check_nobody_waits(plan: Plan, cores: Sequence[EngineCore]) -> None:
    """Raise PartError if a run is over and a policy from outside has left requests waiting at a core that is up."""
    policy_of_pool = {pool.name: pool.batching.policy for pool in plan.pools}
    for core in cores:
        name, scheduler = policy_of_pool[core.pool], core.scheduler
        if name not in POLICIES and core.up and scheduler.has_work:
            raise PartError(
                f"{Brought('policy', name, type(scheduler))}: {type(scheduler).__qualname__}.schedule() returned None "
                f"with {scheduler.num_waiting} requests waiting and {scheduler.num_running} running (deadlock)"
            )


# --- policies ---------------------------------------------------------------------------------------------


def make_policy(batching: Batching, settings: Mapping[str, Any]) -> Scheduler:
    """Return a scheduler of the policy that `batching` names, with its options. Raise UsageError if a built-in policy
    refuses the options, PartError if one from outside does."""
    policy = POLICY.find(batching.policy)
    if "encoder" in settings:
        policy = ENCODING.get(policy, policy)
    try:
        return policy(**settings, **(batching.options or {}))
    except Exception as error:
        if batching.policy in POLICIES:
            if batching.options and isinstance(error, (TypeError, ValueError)):
                raise UsageError(f"batching.options of policy {batching.policy}: {described(error)}") from error
            raise
        raise _refusal(Brought("policy", batching.policy, policy), error) from error


def _refusal(part: Brought, error: Exception) -> PartError:
    return PartError(f"{part} cannot be created with the plan's options: {described(error)}")


# --- routers ----------------------------------------------------------------------------------------------

_LACKING = {
    "session": "needs sessions, and the workload has none; give it a shared_prefix, or choose another router",
    "block_tokens": "needs prompts that say what they share; use a trace with hash_ids, give the workload a "
    "shared_prefix, or choose another router",
}


def make_router(routing: Routing, cores: Sequence[EngineCore], stream: RequestStream, seed: int) -> Router:
    """Return the router that a plan names, with the data of the load that it needs. Raise UsageError if the load lacks
    them."""
    router = ROUTER.find(routing.kind)
    load = {
        "seed": seed,
        "session": None if stream.session is None else stream.session.tolist(),
        "block_tokens": None if stream.hash_ids is None else stream.block_tokens,
    }
    for need in sorted(router.needs):
        if load[need] is None:
            raise UsageError(f"the {routing.kind} router {_LACKING[need]}")
    arguments = {need: load[need] for need in router.needs}
    if not isinstance(routing, OwnRouting):
        return router(cores, **routing.model_dump(exclude={"kind"}), **arguments)
    part = Brought("router", routing.kind, router)
    try:
        return OwnRouter(router(cores, **routing.options, **arguments), part)
    except Exception as error:
        raise _refusal(part, error) from error


class OwnRouter(Router):
    """Wrapper of a router from outside that checks every choice."""

    def __init__(self, router: Router, part: Brought) -> None:
        super().__init__(router.cores)
        self._router, self._part = router, part
        self.informed = router.informed

    def choose(self, request: Request, now: int) -> EngineCore | None:
        """Return the router's choice. Raise PartError if that is not one of its cores, or a core that is down."""
        core = self._router.choose(request, now)
        if core is None:
            if any(core.up for core in self.cores):
                raise self._wrong("None although cores are up; return a core that is up")
        elif not any(core is own_core for own_core in self.cores):
            raise self._wrong(f"{core!r:.80}, which is not one of its cores; return one of self.cores")
        elif not core.up:
            raise self._wrong(f"core {core.number}, which is down; return a core that is up")
        return core

    def over(self, request: Request, core: EngineCore, now: int) -> None:
        """Inform the router."""
        self._router.over(request, core, now)

    def _wrong(self, answer: str) -> PartError:
        return PartError(f"{self._part}: {type(self._router).__qualname__}.choose returned {answer}")


# --- costs ------------------------------------------------------------------------------------------------


class OwnCosts:
    """Wrapper of a cost model from outside that checks every answer. What it has besides the protocol is there too."""

    def __init__(self, costs: Costs) -> None:
        """Wrap a cost model, or a function that returns the seconds of a step. Raise PartError if a method of the
        protocol is missing."""
        name = str(getattr(costs, "__qualname__", type(costs).__qualname__))
        self.part = Brought("cost model", name, costs if isroutine(costs) else type(costs))
        is_function = callable(costs) and not hasattr(costs, "decode")
        self._costs: Any = StepFunction(cast(SecondsFunction, costs)) if is_function else costs
        self._check_methods("decode", "mixed")

    @property
    def own(self) -> Any:
        """The wrapped cost model."""
        return self._costs

    def check_for(self, pool: Pool) -> None:
        """Raise PartError if the pool speculates and the costs lack the methods for that."""
        if pool.speculation is not None:
            self._check_methods("round", "rounds")

    def _check_methods(self, *methods: str) -> None:
        for method in methods:
            if not callable(getattr(self._costs, method, None)):
                raise PartError(f"{self.part} has no method {method}; implement it as simtune.costs.protocol describes")

    def __getattr__(self, name: str) -> Any:
        # No attribute is set yet during unpickling.
        if name == "_costs":
            raise AttributeError(name)
        return getattr(self._costs, name)

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """Return `StepCosts.decode` of the wrapped model. Raise PartError for an invalid answer."""
        answer = self._costs.decode(num_decodes, context_tokens)
        try:
            first, slope, span = map(index, answer)
        except (TypeError, ValueError):
            raise self._wrong("decode", answer, "three whole numbers: ticks, ticks per further step, steps") from None
        if first < 1 or span < 1 or first + slope * (min(span, 2) - 1) < 1:
            raise self._wrong("decode", answer, "at least one tick for every step, and a span of at least 1")
        return first, slope, span

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        """Return `StepCosts.mixed` of the wrapped model. Raise PartError for an invalid answer."""
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
        """True if the costs do not model load imbalance; see `ImbalanceCosts`."""
        # Checking a protocol takes long, and most costs are balanced.
        return bool(getattr(self._costs, "balanced", True)) or not isinstance(self._costs, ImbalanceCosts)

    def imbalance(self, num_decodes: int, context_tokens: int, longest_context: int, with_chunks: bool) -> int:
        """Return `ImbalanceCosts.imbalance` of the wrapped model; not to be called if the costs are balanced."""
        ticks: int = self._costs.imbalance(num_decodes, context_tokens, longest_context, with_chunks)
        return ticks

    def round(self, *args: Any) -> int:
        """Return `RoundCosts.round` of the wrapped model; `check_for` has checked that it exists if a pool
        speculates."""
        ticks: int = self._costs.round(*args)
        return ticks

    def rounds(self, *args: Any) -> Sequence[int]:
        """Return `RoundCosts.rounds` of the wrapped model."""
        ends: Sequence[int] = self._costs.rounds(*args)
        return ends

    def _wrong(self, method: str, answer: object, wanted: str) -> PartError:
        return PartError(
            f"{self.part}: {self.part.name}.{method} returned {answer!r:.80}, expected {wanted}; "
            "simtune.to_ticks converts seconds to ticks"
        )
