"""Plans of a study: every choice of pools, settings and routers within its devices and constraints."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache, cached_property
from itertools import combinations, product
from typing import Any

from pydantic import ValidationError

from simtune.errors import Infeasible
from simtune.specs.autoscaling import Autoscaling
from simtune.specs.base import problems_of
from simtune.specs.constraints import Constraint
from simtune.specs.plan import KvLink, Plan
from simtune.specs.pool import Parallelism, Pool, Role
from simtune.specs.preset import merged
from simtune.specs.routing import RoundRobinRouting, Routing
from simtune.specs.speculation import Speculation
from simtune.specs.study import PoolChoices, Study
from simtune.specs.variants import PlanFragment, Variant
from simtune.specs.yamlfile import Document
from simtune.tuner.space.variant_choices import narrowed

PER_DEVICE = ("goodput_per_gpu", "goodput_per_dollar", "pareto")
"""Objectives for which only the ratio of prefill to decode instances matters, not how many there are of each."""
COUNTING = ("gpus", "usd_per_million_tokens", "gpu_hours_per_million_tokens", "joules_per_token")
"""Objectives for which every number of instances is a plan of its own."""


def gpu_word(profile: str) -> str:
    """Return a hardware profile as it is written in names."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", profile).strip("-")


@dataclass(frozen=True, order=True)
class PoolShape:
    """Division of GPUs into the instances of a pool. Pools of one shape share their compiled costs."""

    gpu: str
    """Name of a hardware profile of the study."""
    tp: int
    pp: int = 1
    attention_dp: int = 1
    expert_parallel: bool = False
    kv_dtype: str = ""
    """Empty for the default of the engine or the model."""
    role: Role = "mixed"
    weight_dtype: str = ""
    """Empty for the dtype of the model's checkpoint."""
    max_model_len: int = 0
    """0 for the longest request that may be simulated."""
    variant: str = ""
    """Name of the variant of the study; empty for the plans as they are."""
    engine: str = ""
    """Engine preset of the variant, or `none`; empty for the study's only one."""
    checkpoint: str = ""
    """Model of the variant; empty for the study's."""
    cp: int = 1
    """Groups of ranks that share every sequence, if the variant sets them."""
    prompt_groups: int = 1
    """Groups of ranks that divide prompts, if the variant sets them."""
    ffn_devices: int = 0
    """GPUs of the feed-forward blocks, if the variant has them apart."""
    spare: int = 0
    """Instances that stand by beside those that serve, if the variant has some."""
    encoder_devices: int = 0
    """GPUs of the servers that encode media in front of the pool, if the variant has some."""

    @property
    def encodes(self) -> bool:
        """True if instances encode the media of their prompts themselves."""
        return self.role != "decode" and not self.encoder_devices

    @property
    def parallelism(self) -> Parallelism:
        """Parallelism of an instance, without what a variant adds."""
        return Parallelism(tp=self.tp, pp=self.pp, attention_dp=self.attention_dp, expert_parallel=self.expert_parallel)

    @property
    def devices(self) -> int:
        """GPUs of one instance, without those that a drafter has for itself."""
        return self.tp * self.pp * self.attention_dp * self.cp * self.prompt_groups + self.ffn_devices

    def devices_of(self, instances: int) -> int:
        """Return the GPUs of a number of instances, of those that stand by and of encoder servers, without those of
        drafters."""
        return (instances + self.spare) * self.devices + self.encoder_devices

    @cached_property
    def name(self) -> str:
        """Name of the shape, e.g. tp2-pp1, with the settings that differ from the usual ones."""
        more = [f"dp{self.attention_dp}"] * (self.attention_dp > 1) + [f"cp{self.cp}"] * (self.cp > 1)
        more += [f"pcp{self.prompt_groups}"] * (self.prompt_groups > 1)
        more += [f"ffn{self.ffn_devices}"] * bool(self.ffn_devices) + [f"spare{self.spare}"] * bool(self.spare)
        more += [f"enc{self.encoder_devices}"] * bool(self.encoder_devices)
        more += ["ep"] * self.expert_parallel
        more += [f"w-{self.weight_dtype}"] if self.weight_dtype else []
        more += [f"kv-{self.kv_dtype}"] if self.kv_dtype else []
        more += [f"len{self.max_model_len}"] if self.max_model_len else []
        more += [f"v-{self.variant}"] if self.variant else []
        return "-".join([f"tp{self.tp}-pp{self.pp}", *more])


@dataclass(frozen=True)
class PoolChoice:
    """A pool with all settings that are searched."""

    shape: PoolShape
    instances: int
    """Instances that serve; of an autoscaled pool its `max_instances`."""
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool | None = None
    """None for the setting of the engine, or else off."""
    drafter: str = ""
    """Label of a drafter of the study; empty for no drafter."""
    speculation: Speculation | None = field(default=None, compare=False)
    """Speculation of the pool, which follows from the other fields."""
    fixed: Pool | None = field(default=None, compare=False)
    """Pool of the plan, if the study fixes it as a whole."""
    own_name: str = field(default="", compare=False)
    """Name of the pool, if another pool has the same role."""
    weight: float | None = field(default=None, compare=False)
    """Weight of each of its cores in round robin beside another pool, which follows from the other fields."""
    changes: Mapping[str, Any] | None = field(default=None, compare=False)
    """Settings that the variant of the shape merges over the pool."""
    score: float | None = field(default=None, compare=False)
    """Score of its model; None if it has none."""
    scaling: Autoscaling | None = field(default=None, compare=False)
    """Autoscaling that the variant of the shape sets."""

    @property
    def devices(self) -> int:
        """GPUs of all instances, including those that stand by and those of drafters and of encoder servers in front;
        none of a pool beside another one on the same GPUs, which counts them."""
        if self.beside:
            return 0
        if self.fixed is not None:
            return self.fixed.most_instances * self.fixed.devices + self.shape.encoder_devices
        return (self.instances + self.shape.spare) * self._devices_each + self.shape.encoder_devices

    @cached_property
    def changed(self) -> str:
        """Settings of the variant as a text, equal if they are."""
        return repr(self.changes) if self.changes else ""

    @property
    def beside(self) -> str:
        """Name of the pool on whose GPUs the variant puts the instances; empty if they have GPUs of their own."""
        return ((self.changes or {}).get("share") or {}).get("beside") or ""

    @property
    def _devices_each(self) -> int:
        drafter = 0 if self.speculation is None else self.speculation.own_devices(self.shape.tp)
        return self.shape.devices + drafter

    @property
    def least_devices(self) -> int:
        """GPUs that the pool always holds: those of `min_instances` or `min_ranks` if it is autoscaled, or else all."""
        if self.scaling is None:
            return self.devices
        if self.scaling.min_ranks is not None:
            return self.instances * self.scaling.min_ranks * self._devices_each // self.shape.attention_dp
        return self.scaling.min_instances * self._devices_each

    @property
    def _first_instances(self) -> int:
        """Instances that the pool begins with, unless the variant states them."""
        if self.scaling is None or self.scaling.scales_ranks:
            return self.instances
        return self.scaling.min_instances

    @cached_property
    def alone(self) -> PoolChoice:
        """The choice with one instance that is always there, its ranks or not; the pool itself if the study fixes it as
        a whole."""
        if self.scaling is not None and not self.scaling.scales_ranks:
            changes = {key: value for key, value in (self.changes or {}).items() if key not in _OF_INSTANCES}
            return replace(self, instances=1, changes=changes, scaling=None)
        return self if self.fixed is not None or self.instances == 1 else replace(self, instances=1)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Sorting key of choices."""
        caching = -1 if self.prefix_caching is None else int(self.prefix_caching)
        return (
            astuple(self.shape),
            self.instances,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            caching,
            self.drafter,
        )

    @property
    def name(self) -> str:
        """Name of the choice, e.g. tp2-pp1-x4-s256-t8192, with the other settings that are searched."""
        name = f"{self.shape.name}-x{self.instances}-s{self.max_num_seqs}-t{self.max_num_batched_tokens}"
        caching = {None: "", True: "-cached", False: "-uncached"}[self.prefix_caching]
        return name + caching + (f"-{self.drafter}" if self.drafter else "")

    @property
    def pool_name(self) -> str:
        """Name of the pool in a plan, unless the study fixes the pool as a whole."""
        return self.own_name or self.shape.role

    @cached_property
    def names(self) -> Mapping[str, Any]:
        """Settings by the names that constraints use (`simtune.specs.constraints.POOL_NAMES`)."""
        shape = self.shape
        return {
            "role": shape.role,
            "gpu": shape.gpu,
            "tp": shape.tp,
            "pp": shape.pp,
            "attention_dp": shape.attention_dp,
            "expert_parallel": shape.expert_parallel,
            "weight_dtype": shape.weight_dtype,
            "kv_dtype": shape.kv_dtype,
            "instances": self.instances,
            "devices": self.devices,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "prefix_caching": bool(self.prefix_caching),
            "max_model_len": shape.max_model_len,
            "drafter": self.drafter,
            "variant": shape.variant,
            "engine": shape.engine,
            "model": shape.checkpoint,
            "score": self.score,
        }

    def pool(self, study: Study, max_model_len: int, engine: Mapping[str, Any]) -> Pool:
        """Return the pool of this choice, with the settings of `engine` for what the study leaves open.

        Raise Infeasible if a variant's settings contradict the others.
        """
        if self.fixed is not None:
            return self.fixed.model_copy(update={"max_model_len": self.fixed.max_model_len or max_model_len})
        kv_cache: dict[str, Any] = {"dtype": self.shape.kv_dtype} if self.shape.kv_dtype else {}
        if self.prefix_caching is not None:
            kv_cache["prefix_caching"] = self.prefix_caching
        settings = {
            "name": self.pool_name,
            "role": self.shape.role,
            # What the variant sets of an autoscaled pool, its first instances among it, is merged over this.
            "instances": self._first_instances,
            "parallelism": self.shape.parallelism,
            "batching": {
                "max_num_seqs": self.max_num_seqs,
                "max_num_batched_tokens": self.max_num_batched_tokens,
                **({} if study.batching is None else study.batching.model_dump(exclude_unset=True, exclude_none=True)),
            },
            "max_model_len": self.shape.max_model_len or max_model_len,
            "speculation": self.speculation,
            **({"weight_dtype": self.shape.weight_dtype} if self.shape.weight_dtype else {}),
            **({"kv_cache": kv_cache} if kv_cache else {}),
        }
        settings = merged(settings, {"hardware": self.shape.gpu, **engine})
        return Pool.model_validate(settings) if not self.changes else _changed(settings, self.changes)


def _changed(settings: dict[str, Any], changes: Mapping[str, Any]) -> Pool:
    """Return a pool with the settings of a variant over its own. Raise Infeasible if they contradict each other."""
    batching, cut = dict(settings["batching"]), settings["parallelism"]
    if "policy" in changes.get("batching", {}):
        # Options are arguments of the policy that the variant replaces.
        batching.pop("options", None)
    under = {**settings, "batching": batching, "parallelism": cut.model_dump(exclude_unset=True)}
    data = merged(changes, under)
    try:
        return Pool.model_validate(data)
    except ValidationError as error:
        problem = problems_of(Pool, error, Document("", data, None))[0]
        raise Infeasible(f"{problem.key}: {problem.message}") from None


_OF_INSTANCES = ("autoscaling", "instances")
"""Settings of a variant that a single instance of a pool does not have."""
PlanShape = tuple[tuple[PoolShape, int], ...]
"""Shapes of the pools of a plan, each with its instances: plans of one shape differ in settings alone."""


@dataclass(frozen=True)
class Candidate:
    """A point of the search space: a mixed pool, two mixed pools of different hardware, or a prefill and a decode
    pool."""

    pools: tuple[PoolChoice, ...]
    router: int = 0
    """Index of the router among those of the study."""

    @classmethod
    def mixed(
        cls,
        gpu: str,
        tp: int,
        pp: int = 1,
        instances: int = 1,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        drafter: str = "",
        speculation: Speculation | None = None,
    ) -> Candidate:
        """Return a candidate of one mixed pool."""
        shape = PoolShape(gpu, tp, pp)
        choice = PoolChoice(
            shape, instances, max_num_seqs, max_num_batched_tokens, drafter=drafter, speculation=speculation
        )
        return cls((choice,))

    @cached_property
    def shape(self) -> PlanShape:
        """Shapes and instances of the pools: plans of one shape differ in settings alone."""
        return tuple((pool.shape, pool.instances) for pool in self.pools)

    @cached_property
    def num_gpus(self) -> int:
        """GPUs of all pools."""
        return sum(pool.devices for pool in self.pools)

    @property
    def gpus_per_instance(self) -> int:
        """GPUs of one instance, the most of any pool."""
        return max(pool.shape.devices for pool in self.pools)

    @property
    def drafter(self) -> str:
        """Label of the drafter of the pool that drafts; empty if no pool drafts."""
        return next((pool.drafter for pool in self.pools if pool.drafter), "")

    @property
    def speculation(self) -> Speculation | None:
        """Speculation of the pool that drafts; None if no pool drafts."""
        return next((pool.speculation for pool in self.pools if pool.speculation is not None), None)

    @property
    def decoding(self) -> PoolChoice:
        """The pool that decodes: the only one, or the decode pool."""
        return self.pools[-1]

    @property
    def prefilling(self) -> PoolChoice | None:
        """The prefill pool; None if prompts have no pool of their own."""
        return self.pools[0] if len(self.pools) > 1 and not self.of_kinds else None

    @property
    def of_kinds(self) -> bool:
        """True if mixed pools of several kinds of hardware share the requests."""
        return len(self.pools) > 1 and self.pools[0].shape.role == "mixed"

    @property
    def cut(self) -> tuple[PoolShape, ...]:
        """Shape of each pool, without the number of its instances."""
        return tuple(pool.shape for pool in self.pools)

    @property
    def key(self) -> tuple[Any, ...]:
        """Sorting key of candidates."""
        return (len(self.pools), tuple(pool.key for pool in self.pools), self.router)

    @property
    def name(self) -> str:
        """Name of the plan, e.g. tp2-pp1-x4-s256-t8192; of prefill and decode pools p.tp1-..._d.tp2-...

        The name includes the GPU if a study has several, and the router's number if it has several routers.
        """
        parts = [self._pool_name(pool) for pool in self.pools]
        return "_".join(parts) + (f"-router{self.router + 1}" if self.router else "")

    def _pool_name(self, pool: PoolChoice) -> str:
        role = "" if pool.shape.role == "mixed" else f"{pool.shape.role[0]}."
        return f"{role}{self.gpu_label(pool)}{pool.name}"

    gpu_labels: bool = False
    """True if names include the GPU on which a pool runs."""
    changes: PlanFragment | None = field(default=None, compare=False)
    """Router, link and encoder servers of the variant of the pools; None if the plan has those of the study."""

    def gpu_label(self, pool: PoolChoice) -> str:
        """Return the GPU as it is written in the name; empty if the study has one kind of GPU."""
        return gpu_word(pool.shape.gpu) + "-" if self.gpu_labels else ""

    def routing(self, study: Study) -> Routing:
        """Return the router of the plan: that of its variant, or one of the study's."""
        of_variant = None if self.changes is None else self.changes.router
        return of_variant or study.routers[self.router]

    @property
    def scales(self) -> bool:
        """True if instances of a pool come and go with the load."""
        return any(pool.scaling is not None for pool in self.pools)

    @property
    def shares(self) -> bool:
        """True if prefill and decode instances are on the same GPUs."""
        return any(pool.beside for pool in self.pools)

    @property
    def prefills_locally(self) -> bool:
        """True if decode instances may compute prompts themselves."""
        local = None if self.changes is None or self.prefilling is None else self.changes.local_prefill
        return local is not None and local.keeps_any

    def with_pools(self, pools: Iterable[PoolChoice]) -> Candidate:
        """Return the same plan with other pools."""
        return replace(self, pools=tuple(pools))

    def plan(
        self, study: Study, max_model_len: int, engine: Callable[[PoolShape], Mapping[str, Any]] = lambda shape: {}
    ) -> Plan:
        """Return the plan of this candidate. `engine` returns the settings of the study's engine for instances of a
        shape."""
        pools = tuple(pool.pool(study, max_model_len, engine(pool.shape)) for pool in self.pools)
        apart, changes = self.prefilling is not None, self.changes or PlanFragment()
        return Plan(
            name=self.name,
            model=self.decoding.shape.checkpoint or study.model,
            pools=pools,
            router=self._weighted(self.routing(study)),
            decode_router=(changes.decode_router or study.decode_router) if apart else None,
            link=(changes.link or study.link or KvLink()) if apart else None,
            local_prefill=changes.local_prefill if apart else None,
            stages=None if changes.encoders_apart is None else (changes.encoders_apart.stage(pools[0].name),),
        )

    def _weighted(self, router: Routing) -> Routing:
        """Return round robin with the weights of the pools, if they have weights; any other router unchanged."""
        weights = {pool.pool_name: pool.weight for pool in self.pools if pool.weight is not None}
        if not weights or not isinstance(router, RoundRobinRouting):
            return router
        return RoundRobinRouting(weights=weights)


# --- the space --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Space:
    """All candidates of a study that satisfy its constraints, and the number that each constraint left out."""

    candidates: tuple[Candidate, ...]
    left_out: Mapping[str, int]
    """Number of plans by the constraint that left them out, in its own words."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Number of plans by the reason why the engine would not run them (`simtune.tuner.space.expressible`)."""
    unfit: Mapping[str, int] = field(default_factory=dict)
    """Number of plans of several pools, one of which cannot be, by the reason why; for each such pool one plan is still
    among the candidates, and not counted here."""

    @property
    def reasons(self) -> dict[str, int]:
        """Number of plans that were left out unseen, by the reason, the most frequent first."""
        counts = Counter({f"constraint `{text}`": count for text, count in self.left_out.items()})
        for why, count in (*self.refused.items(), *self.unfit.items()):
            counts[without_numbers(why)] += count
        # Of a pool that cannot be, one plan is a candidate; if that is the only one, none is left out.
        return {why: count for why, count in counts.most_common() if count}

    @property
    def shapes(self) -> dict[PlanShape, list[Candidate]]:
        """Candidates by the shape of their pools."""
        shapes: dict[PlanShape, list[Candidate]] = {}
        for candidate in self.candidates:
            shapes.setdefault(candidate.shape, []).append(candidate)
        return shapes


def without_numbers(reason: str) -> str:
    """Return a refusal without the numbers that differ from plan to plan, and without its remedy."""
    if "are missing" in reason:
        return "weights and KV cache do not fit the memory"
    return re.sub(r"^(model \S+|pool \S+)( on \S+)?:? ", "", re.sub(r" \(\d+\)", "", reason).split(";")[0])


def space_of(study: Study) -> Space:
    """Return the space of a study. Raise Infeasible if it is empty, naming the constraints that contradict each
    other."""
    every = list(candidates(study))
    if not every:
        raise too_few_devices(study)
    verdicts = _Verdicts(study)
    plans, left_out = [], Counter[str]()
    for candidate in every:
        broken = next((text for text in study.constraints if not verdicts.holds(text, candidate)), None)
        if broken is None:
            plans.append(candidate)
        else:
            left_out[broken] += 1
    if not plans:
        raise Infeasible(_contradiction(study, every, verdicts))
    return Space(tuple(plans), left_out)


def too_few_devices(study: Study) -> Infeasible:
    """Return the error for a study whose devices are too few for any plan."""
    counts = ", ".join(f"{entry.devices} {entry.profile}" for entry in study.hardware)
    return Infeasible(
        f"{study.name}: no tp x pp of the search space fits {counts} devices; allow more devices, or smaller "
        "search.tp and search.pp"
    )


class _Verdicts:
    """Verdicts of constraints on candidates."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._constraints = {text: Constraint(text) for text in study.constraints}

    def holds(self, text: str, candidate: Candidate) -> bool:
        constraint = self._constraints[text]
        plan = {"num_gpus": candidate.num_gpus, "router": candidate.routing(self._study).kind}
        if candidate.of_kinds:
            return all(constraint.holds_for_plan({"mixed": pool.names}, plan) for pool in candidate.pools)
        if constraint.roles:
            return constraint.holds_for_plan({pool.shape.role: pool.names for pool in candidate.pools}, plan)
        return all(constraint.holds(pool.names, plan) for pool in candidate.pools)


def _contradiction(study: Study, every: Sequence[Candidate], verdicts: _Verdicts) -> str:
    """Return which constraints contradict each other: a minimal set of them that no plan satisfies."""
    fulfilled = {
        text: {i for i, candidate in enumerate(every) if verdicts.holds(text, candidate)} for text in study.constraints
    }
    conflict = list(study.constraints)
    for text in study.constraints:
        fewer = [constraint_text for constraint_text in conflict if constraint_text != text]
        if fewer and not set.intersection(*(fulfilled[constraint_text] for constraint_text in fewer)):
            conflict = fewer
    lines = " and ".join(f"`{text}`" for text in conflict)
    why = "contradict each other" if len(conflict) > 1 else "holds for none"
    return f"{study.name}: of {len(every):,} plans, {lines} {why}; loosen one, or allow other choices in search"


@dataclass(frozen=True)
class PoolProduct:
    """All plans that combine the choices of their pools: one side for each pool."""

    sides: tuple[tuple[PoolChoice, ...], ...]
    """Choices of each pool. Products share the tuples: equal sides are one object."""
    routers: int
    """Number of routers; each is combined with all choices."""
    gpu_labels: bool = False
    """See `Candidate.gpu_labels`."""
    changes: PlanFragment | None = None
    """See `Candidate.changes`."""

    def __len__(self) -> int:
        """Number of plans."""
        return math.prod(map(len, self.sides)) * self.routers

    @property
    def first(self) -> Candidate:
        """Plan of the first choice of each pool; every side has choices."""
        return self.plan(tuple(side[0] for side in self.sides))

    def plan(self, pools: tuple[PoolChoice, ...], router: int = 0) -> Candidate:
        """Return the plan with these pools."""
        return Candidate(pools, router, self.gpu_labels, self.changes)

    def plans(self) -> Iterator[Candidate]:
        """Yield every plan, each once."""
        for pools in product(*self.sides):
            for router in range(self.routers):
                yield self.plan(pools, router)


def candidates(study: Study) -> Iterator[Candidate]:
    """Yield every candidate of a study whatever its constraints, in ascending order, each once."""
    yield from in_order([plan for plans in products(study) for plan in plans.plans()])


def in_order(every: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates sorted by their keys, which are compared once for each of the few pools of many candidates."""
    pools = {id(pool): pool for candidate in every for pool in candidate.pools}
    rank_of_key = {key: rank for rank, key in enumerate(sorted({pool.key for pool in pools.values()}))}
    ranks = {number: rank_of_key[pool.key] for number, pool in pools.items()}
    return sorted(every, key=lambda c: (len(c.pools), *[ranks[id(pool)] for pool in c.pools], c.router))


def products(study: Study) -> list[PoolProduct]:
    """Return all plans of a study whatever its constraints, as products of the choices of their pools; no product is
    empty."""
    return [plans for variant in study.variants for plans in _of_variant(narrowed(study, variant), variant)]


def _of_variant(study: Study, variant: Variant) -> Iterator[PoolProduct]:
    """Yield the plans of a study that have one of its variants."""
    sides: list[tuple[tuple[PoolChoice, ...], ...]] = []
    if "mixed" in study.search.layouts and not study.fixed and variant.changes_mixed:
        sides += ((side,) for side in _mixed(study, variant))
        sides += _of_kinds(study, variant) if study.search.mixed_kinds else ()
    if "prefill-decode" in study.search.layouts:
        sides += _disaggregated(study, variant)
    several, routers = len(study.hardware) > 1, 1 if variant.plan.router else len(study.routers)
    changes = variant.plan if variant.plan != PlanFragment() else None
    for choices in sides:
        if all(choices):
            yield PoolProduct(choices, routers, several, changes)


def _mixed(study: Study, variant: Variant) -> Iterator[tuple[PoolChoice, ...]]:
    for shape in _pool_shapes(study, "mixed", variant):
        most = _most(study, shape)
        counts_of_study = _choices(study, "mixed").instances
        if counts_of_study is not None:
            counts: Iterable[int] = [n for n in dict.fromkeys(counts_of_study) if n <= most]
        elif _counting(study, shape):
            counts = range(1, most + 1)
        else:
            counts = [most] if most else []
        for instances in counts:
            yield _settings(study, shape, instances, variant)


def _of_kinds(study: Study, variant: Variant) -> Iterator[tuple[tuple[PoolChoice, ...], ...]]:
    """Yield the sides of two mixed pools of different hardware, in the study's order; none with encoder servers, which
    are in front of one pool."""
    if variant.plan.encoders_apart is not None:
        return
    settings = cache(lambda shape, instances: _named_settings(study, shape, instances, variant))
    for first, second in combinations(_pool_shapes(study, "mixed", variant), 2):
        if first.gpu != second.gpu:
            for counts in _counts(study, first, second):
                yield tuple(settings(shape, n) for shape, n in zip((first, second), counts, strict=True))


def _named_settings(study: Study, shape: PoolShape, instances: int, variant: Variant) -> tuple[PoolChoice, ...]:
    """Return the settings that are searched of a pool that is named by its hardware."""
    name = f"mixed-{gpu_word(shape.gpu)}"
    return tuple(replace(choice, own_name=name) for choice in _settings(study, shape, instances, variant))


def _counting(study: Study, side: PoolShape | PoolChoice) -> bool:
    """True if every number of instances is a plan of its own: also if the budget may allow only some numbers, and for
    objectives per GPU if the variant has encoder servers, whose number is the same for all."""
    shape = side.shape if isinstance(side, PoolChoice) else side
    if shape.encoder_devices and study.objective in PER_DEVICE:
        return True
    return study.objective in COUNTING or study.limits.usd_per_hour is not None


def _most(study: Study, shape: PoolShape) -> int:
    """Return the most instances of a shape that the devices allow."""
    devices = study.devices(shape.gpu)
    for_instances = min(devices, study.limits.gpus or devices) - shape.encoder_devices
    return max(0, for_instances // shape.devices - shape.spare)


def _disaggregated(study: Study, variant: Variant) -> Iterator[tuple[tuple[PoolChoice, ...], ...]]:
    """Yield the sides of a prefill and a decode pool."""
    fixed = {pool.role: pool for pool in study.fixed}
    # Cached so that many pairs share the same objects (`PlanCache` looks pools up by object).
    settings = cache(lambda shape, instances: _settings(study, shape, instances, variant))
    numbers: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    sides: list[list[PoolShape | Pool]] = [
        [fixed[role]] if role in fixed else [*_pool_shapes(study, role, variant)] for role in ("prefill", "decode")
    ]
    counted = _equal_counts if variant.shares else _counts
    for prefill, decode in _together(sides, variant):
        pair = [_fixed_choice(study, side, variant) if isinstance(side, Pool) else side for side in (prefill, decode)]
        # Shapes of as many GPUs have the same numbers of instances.
        key = tuple(side if isinstance(side, PoolChoice) else _size(side) for side in pair)
        if key not in numbers:
            numbers[key] = counted(study, *pair)
        for counts in numbers[key]:
            yield tuple(
                (side,) if isinstance(side, PoolChoice) else settings(side, n)
                for side, n in zip(pair, counts, strict=True)
            )


def _size(shape: PoolShape) -> tuple[str, int, int, int]:
    """Return what the numbers of instances of a shape depend on."""
    return shape.gpu, shape.devices, shape.spare, shape.encoder_devices


def _together(
    sides: Sequence[Sequence[PoolShape | Pool]], variant: Variant
) -> Iterator[tuple[PoolShape | Pool, PoolShape | Pool]]:
    """Yield the shapes of prefill and decode pools that go together: on the same GPUs only those that are cut
    alike."""
    for prefill, decode in product(*sides):
        alike = isinstance(prefill, PoolShape) and replace(prefill, role="decode") == decode
        if alike or not variant.shares:
            yield prefill, decode


def _equal_counts(
    study: Study, prefill: PoolShape | PoolChoice, decode: PoolShape | PoolChoice
) -> list[tuple[int, int]]:
    """Return the numbers of instances of two pools on the same GPUs: as many of each, and all that fit unless every
    number is a plan of its own, or given."""
    assert isinstance(prefill, PoolShape)
    assert isinstance(decode, PoolShape)
    counts = sorted(set(_of_side(study, prefill)) & set(_of_side(study, decode)))
    every = _counting(study, prefill) or _given(study, prefill) or _given(study, decode)
    return [(count, count) for count in (counts if every else counts[-1:])]


def _fixed_choice(study: Study, pool: Pool, variant: Variant) -> PoolChoice:
    cut, batching = pool.parallelism, pool.batching
    shape = PoolShape(
        pool.hardware, cut.tp, cut.pp, cut.attention_dp, cut.expert_parallel, pool.kv_cache.dtype or "", pool.role,
        pool.weight_dtype or "", variant=variant.label, spare=pool.spare,
        encoder_devices=variant.encoder_devices(pool.role),
    )  # fmt: skip
    return PoolChoice(
        shape,
        pool.instances,
        batching.max_num_seqs,
        batching.max_num_batched_tokens,
        pool.kv_cache.prefix_caching,
        fixed=pool,
        score=study.score,
    )


def _counts(study: Study, prefill: PoolShape | PoolChoice, decode: PoolShape | PoolChoice) -> list[tuple[int, int]]:
    """Return the numbers of instances of a prefill and a decode pool.

    If instances are counted (`_counting`) or given: every pair. If only the ratio matters: each ratio once, as large as
    it fits. Otherwise: the pairs to which the devices allow no further instance.
    """
    fitting = _fitting(study, prefill, decode)
    if _counting(study, prefill):
        return sorted(fitting)
    if study.objective in PER_DEVICE:
        fixed_counts = any(_given(study, side) for side in (prefill, decode))
        return sorted(pair for pair in fitting if fixed_counts or _next_of_ratio(*pair) not in fitting)
    return sorted((p, d) for p, d in fitting if (p + 1, d) not in fitting and (p, d + 1) not in fitting)


def _fitting(study: Study, prefill: PoolShape | PoolChoice, decode: PoolShape | PoolChoice) -> set[tuple[int, int]]:
    """Return the numbers of instances of the two pools for which there are enough devices."""
    sides = (prefill, decode)
    fixed = [side for side in sides if isinstance(side, PoolChoice)]
    of_prefill, of_decode = (side.shape if isinstance(side, PoolChoice) else side for side in sides)
    pairs = product(*(_of_side(study, side) for side in sides))
    return {(p, d) for p, d in pairs if _fits(study, ((of_prefill, p), (of_decode, d)), fixed)}


def _given(study: Study, side: PoolShape | PoolChoice) -> bool:
    """True if a study sets the number of instances."""
    return isinstance(side, PoolChoice) or _choices(study, side.role).instances is not None


def _next_of_ratio(p: int, d: int) -> tuple[int, int]:
    """Return the next larger pair of numbers in the same ratio."""
    divisor = math.gcd(p, d)
    return p + p // divisor, d + d // divisor


def _of_side(study: Study, side: PoolShape | PoolChoice) -> Sequence[int]:
    if isinstance(side, PoolChoice):
        return [side.instances]
    counts_of_study, most = _choices(study, side.role).instances, _most(study, side)
    return range(1, most + 1) if counts_of_study is None else [n for n in counts_of_study if n <= most]


def _fits(study: Study, cut: Sequence[tuple[PoolShape, int]], fixed: Sequence[PoolChoice]) -> bool:
    """True if the devices and the limits of a study are enough for these instances."""
    devices_used = Counter[str]()
    for shape, instances in cut:
        devices = next((choice.devices for choice in fixed if choice.shape == shape), shape.devices_of(instances))
        devices_used[shape.gpu] += devices
    if study.limits.gpus is not None and sum(devices_used.values()) > study.limits.gpus:
        return False
    return all(count <= study.devices(gpu) for gpu, count in devices_used.items())


def _choices(study: Study, role: Role) -> PoolChoices:
    """Return the choices that are searched for the pools of a role."""
    search = study.search
    common = {name: getattr(search, name) for name in PoolChoices.model_fields if hasattr(search, name)}
    of_role = {"prefill": search.prefill, "decode": search.decode}.get(role)
    overrides = {} if of_role is None else {name: value for name, value in of_role if value is not None}
    return PoolChoices.model_construct(**{"gpus": None, "drafters": None, **common, **overrides})


def _pool_shapes(study: Study, role: Role, variant: Variant) -> list[PoolShape]:
    """Return the shapes that are searched for the pools of a role, each once."""
    choices, changes = _choices(study, role), variant.of_role(role)
    gpus = choices.gpus or [entry.profile for entry in study.hardware]
    cuts = (choices.tp or (), choices.pp or (), choices.attention_dp or (), choices.expert_parallel or ())
    dtypes = (choices.kv_dtype or ("",), choices.weight_dtype or ("",))
    lengths = [changes["max_model_len"]] if "max_model_len" in changes else study.search.max_model_len or (0,)
    parallelism = changes.get("parallelism", {})
    cp, afd = parallelism.get("cp") or 1, changes.get("research", {}).get("afd") or {}
    of_variant = (
        variant.label,
        variant.engine,
        variant.checkpoint,
        cp,
        parallelism.get("prefill_context_parallel") or 1,
        afd.get("ffn_devices", 0),
        changes.get("spare", 0),
        variant.encoder_devices(role),
    )
    every = product(gpus, *cuts, *dtypes, lengths)
    return list(
        dict.fromkeys(
            PoolShape(gpu, tp, pp, dp, ep, kv_dtype, role, weight_dtype, longest, *of_variant)
            for gpu, tp, pp, dp, ep, kv_dtype, weight_dtype, longest in every
        )
    )


def _settings(study: Study, shape: PoolShape, instances: int, variant: Variant) -> tuple[PoolChoice, ...]:
    """Return the settings that are searched of a pool, each once."""
    choices, changes = _choices(study, shape.role), variant.of_role(shape.role) or None
    labels = ["", *(choice.label for choice in study.speculation)]
    drafters = list(choices.drafters or (labels if shape.role != "prefill" else [""]))
    if variant.drafter is not None and shape.role != "prefill":
        drafters = [variant.drafter.label]
    sizes = sorted(_sizes(study, shape.role, drafters == [""]))
    every = dict.fromkeys(product(sizes, choices.prefix_caching or (None,), drafters))
    scaling = None if changes is None else changes.get("autoscaling")
    first = PoolChoice(
        shape,
        instances,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        changes=changes,
        score=variant.scored(study.score),
        scaling=None if scaling is None else Autoscaling.model_validate(scaling),
    )
    return tuple(
        replace(first, max_num_seqs=seqs, max_num_batched_tokens=tokens, prefix_caching=caching, drafter=drafter)
        for (seqs, tokens), caching, drafter in every
    )


def _sizes(study: Study, role: Role, plain: bool) -> set[tuple[int, int]]:
    """Return the pairs of seats and token budget.

    Unless the study sets them, prefill instances have as many seats as their budget allows, and decode instances that
    do not draft have the smallest budget that holds a token for each seat: these limits are not reached there.
    """
    choices = _choices(study, role)
    seats, budgets = choices.max_num_seqs or (), choices.max_num_batched_tokens or ()
    of_role = {"prefill": study.search.prefill, "decode": study.search.decode}.get(role) or PoolChoices()
    if role == "prefill" and of_role.max_num_seqs is None:
        return {(max((s for s in seats if s <= t), default=min(seats)), t) for t in budgets}
    if role == "decode" and of_role.max_num_batched_tokens is None and plain:
        return {(s, min((t for t in budgets if t >= s), default=max(budgets))) for s in seats}
    return set(product(seats, budgets))
