"""Study: the question for `optimize`. Model, hardware and its number, load, objective, search space."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    field_serializer,
    field_validator,
    model_validator,
)

from simtune.specs.base import (
    Context,
    Count,
    Dtype,
    ErrorAt,
    GpuCount,
    LogSigma,
    NonNegative,
    Options,
    Part,
    Positive,
    Seats,
    Seconds,
    Seq,
    Spec,
)
from simtune.specs.constraints import Constraint
from simtune.specs.one_or_more import OneOrMore, listed
from simtune.specs.plan import KvLink
from simtune.specs.pool import KvDtype, Policy, Pool
from simtune.specs.routing import RoundRobinRouting, Routing
from simtune.specs.speculation import DrafterChoice
from simtune.specs.variants import Fragment, Variant, check_fragments, scales, variants_of
from simtune.specs.workload import Slo

ObjectiveName = Literal[
    "goodput_per_gpu",
    "goodput",
    "goodput_per_dollar",
    "gpus",
    "usd_per_million_tokens",
    "gpu_hours_per_million_tokens",
    "e2el",
    "makespan",
    "family",
    "family_active",
    "users",
    "users_per_gpu",
    "joules_per_token",
    "pareto",
]

Choices = Annotated[Seq[Seats], Field(min_length=1, strict=False)]
Flags = Annotated[Seq[bool], Field(min_length=1, strict=False)]
KvDtypes = Annotated[Seq[KvDtype], Field(min_length=1, strict=False)]
WeightDtypes = Annotated[Seq[Dtype], Field(min_length=1, strict=False)]
Labels = Annotated[Seq[str], Field(min_length=1, strict=False)]
EngineNames = Annotated[Seq[str], Field(min_length=2, strict=False)]


class HardwareCount(Part):
    """A hardware profile and how many devices of it may be used."""

    profile: str
    devices: GpuCount


HardwareCounts = Annotated[Seq[HardwareCount], Field(min_length=1, strict=False), BeforeValidator(listed), OneOrMore()]
"""Kinds of devices; a single kind may be written without a list."""


def _understood(text: str) -> str:
    Constraint(text)
    return text


class PoolChoices(Part):
    """Choices that are searched for the pools of one role; a key that is left out is searched as for all pools."""

    gpus: Labels | None = Field(None, description="hardware profiles of the study; all of them unless given")
    tp: Choices | None = None
    pp: Choices | None = None
    attention_dp: Choices | None = None
    expert_parallel: Flags | None = None
    weight_dtype: WeightDtypes | None = None
    kv_dtype: KvDtypes | None = None
    instances: Choices | None = None
    max_num_seqs: Choices | None = None
    max_num_batched_tokens: Choices | None = None
    prefix_caching: Flags | None = None
    drafters: Labels | None = Field(
        None, description="labels of `speculation`; '' is no drafter; all labels and '' unless given"
    )


class Confirmation(Part):
    """Confirmation of a plan before it is reported: on draws of the requests that the search has not seen."""

    draws: Annotated[int, Field(ge=0, le=20)] = Field(
        3, description="fresh draws, on all of which a plan must keep the SLO; 0: plans are not confirmed"
    )
    requests: Count = Field(
        8000, description="least requests of a draw; more if 25 lifetimes or a percentile need them"
    )


class Search(Part):
    """The space, and how finely it is searched."""

    layouts: Annotated[Seq[Literal["mixed", "prefill-decode"]], Field(min_length=1, strict=False)] = Field(
        ("mixed",), description="prefill-decode: a pool of prefill and one of decode instances, in all ratios that fit"
    )
    mixed_kinds: bool | None = Field(
        None,
        description="also search mixed pools of two kinds of hardware behind one router; round robin weighs each pool "
        "by the rate that it could sustain",
    )
    tp: Choices = (1, 2, 4, 8)
    pp: Choices = (1, 2, 4)
    attention_dp: Choices = (1,)
    expert_parallel: Flags = (False,)
    weight_dtype: WeightDtypes | None = Field(
        None,
        description="dtypes to which the engine quantises weights as it loads them; as in the checkpoint unless given",
    )
    kv_dtype: KvDtypes | None = Field(None, description="that of the engine or the model unless given")
    max_num_seqs: Choices = (64, 128, 256, 512)
    max_num_batched_tokens: Choices = (1024, 2048, 4096, 8192)
    prefix_caching: Flags | None = Field(None, description="as the engine sets it, else off, unless given")
    max_model_len: Annotated[Seq[Context], Field(min_length=1, strict=False)] | None = Field(
        None,
        description="longest prompt + output that the engine is set up for, for which some engines keep room; no less "
        "than the longest request. That one, rounded up to 256, unless given",
    )
    instances: Choices | None = Field(None, description="any number that the devices allow unless given")
    routers: Annotated[Seq[Routing], Field(min_length=1, strict=False)] | None = Field(
        None, description="routers in place of the study's one"
    )
    prefill: PoolChoices | None = Field(
        None,
        description="choices for prefill pools, if they differ; the numbers of seats that suit the budget unless given",
    )
    decode: PoolChoices | None = Field(
        None,
        description="choices for decode pools, if they differ; the smallest budget with a token for each seat unless "
        "given",
    )
    variants: Annotated[Seq[Fragment], Field(min_length=1, strict=False)] | None = Field(
        None,
        description="fragments of a pool, or of router, link, speculation and engine of a plan, each merged over every "
        "plan; {} stands for the plans as they are. Keys of one role are under prefill or decode; `name` is the label",
    )
    combine: bool | None = Field(
        None, description="also all combinations of variants that do not set the same key; false unless given"
    )
    requests: Count | None = Field(
        None,
        description="requests simulated per evaluation, and more if they last less than ten lifetimes; the workload's "
        "own number unless given",
    )
    confirm: Confirmation = Confirmation()
    front: Annotated[int, Field(ge=2, le=200)] = Field(
        16, description="loads at which the plans of a front are compared, for objective pareto"
    )
    rate_tolerance: Annotated[float, Field(ge=0.005, lt=1)] = Field(
        0.02,
        description="relative width at which the search for the highest rate stops; a small one costs many simulations",
    )


class StudyLimits(Part):
    """Bounds on other quantities of a plan, whatever the objective."""

    gpus: Count | None = Field(None, description="at most, in dollars; prices are those of the hardware profiles")
    usd_per_hour: Positive | None = Field(None, description="at most; prices are those of the hardware profiles")
    usd_per_million_tokens: Positive | None = Field(None, description="at most, of output tokens")
    joules_per_token: Positive | None = Field(None, description="at most, of output tokens")
    makespan: Positive | None = Field(None, description="at most, in seconds, until the last answer of a batch")
    goodput: Positive | None = Field(None, description="at least, requests/s")
    goodput_per_gpu: Positive | None = Field(None, description="at least, requests/s")
    goodput_per_dollar: Positive | None = Field(None, description="at least, requests per dollar")

    def given(self) -> dict[str, float]:
        """Limits that are set, by name."""
        return {name: value for name, value in self if value is not None}


class StudyBatching(Part):
    """Batching settings that all plans share; the sizes are searched."""

    policy: Policy = "vllm-fcfs"
    chunked_prefill: bool = True
    safety_margin: Annotated[float, Field(ge=0, le=1)] | None = None
    prediction_sigma: LogSigma | None = None
    options: Options | None = Field(None, description="options of a policy from outside the package")


class DayWindow(Part):
    """A part of a day with one mean rate."""

    hours: Annotated[Positive, Field(le=168)]
    rate_rps: Annotated[NonNegative, Field(le=1e9)]


class Day(Part):
    """Rates over a day, which repeats: given, or of the workload's trace."""

    startup_s: Seconds = Field(description="time from a replica's start until it serves")
    windows: Annotated[Seq[DayWindow], Field(min_length=1, max_length=1000, strict=False)] | None = Field(
        None, description="windows one after the other"
    )
    trace_window_h: Positive | None = Field(
        None, description="the workload's trace, cut into windows of this many hours"
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.windows is None) == (self.trace_window_h is None):
            raise ValueError("name either windows, or trace_window_h to cut the workload's trace")
        if self.windows is not None and not any(window.rate_rps for window in self.windows):
            raise ErrorAt("at least one window must have a rate above zero", "windows")
        shortest = min(window.hours for window in self.windows) if self.windows else self.trace_window_h
        if shortest is not None and self.startup_s > shortest * 3600:
            raise ErrorAt(f"is longer than the shortest window ({shortest:g} h)", "startup_s")
        return self


class Study(Spec):
    """The question put to `simtune optimize`.

    objective goodput_per_gpu, goodput and goodput_per_dollar look for the highest request rate that meets the SLO;
    gpus (fewest devices), usd_per_million_tokens (cheapest output tokens), gpu_hours_per_million_tokens (fewest
    GPU-hours), joules_per_token (least energy) and e2el (lowest mean end-to-end latency) are judged at the workload's
    own rate; makespan (seconds until the last answer) is of a workload with `batch: true`, family (lowest mean latency
    of a family) of one with a request graph. pareto is the front of tokens/s/user against tokens/s/GPU.
    Every candidate is tried without drafts, and with each drafter of `speculation`.
    """

    KIND: ClassVar[str] = "study"
    model: str
    hardware: HardwareCounts
    workload: str
    slo: Slo
    objective: ObjectiveName = "goodput_per_gpu"
    limits: StudyLimits = StudyLimits()
    engine: str | EngineNames | None = Field(
        None,
        description="an engine preset, by name or file: settings that the search leaves open are those of that "
        "release; of several each is tried with its kernels, scheduler and host times; none: a plan for no engine",
    )
    batching: StudyBatching | None = Field(None, description="the policy of all plans; vllm-fcfs unless given")
    router: Routing | None = Field(None, description="router of all plans; round_robin unless given")
    decode_router: Routing | None = Field(
        None, description="router that chooses the decode instance; least_tokens unless given"
    )
    link: KvLink | None = Field(None, description="link between prefill and decode instances; inter_node unless given")
    speculation: Annotated[Seq[DrafterChoice], Field(strict=False)] = ()
    score: float | None = Field(
        None,
        description="how well the model answers, where variants have other checkpoints of it with scores of theirs",
    )
    constraints: Annotated[Seq[Annotated[str, AfterValidator(_understood)]], Field(strict=False)] = Field(
        (), description="expressions that every plan must fulfil, such as tp <= 4 or gpu != 'l40s'"
    )
    fixed: Annotated[Seq[Pool], Field(strict=False)] = Field(
        (), description="a prefill or a decode pool that all plans have unchanged; the other one is searched"
    )
    day: Day | None = Field(None, description="find how many replicas of the chosen plan each hour of a day needs")
    search: Search = Search()
    seed: Annotated[int, Field(ge=0)] = 0

    @field_serializer("hardware")
    def _one_without_a_list(self, hardware: tuple[HardwareCount, ...]) -> Any:
        entries = [entry.model_dump() for entry in hardware]
        return entries[0] if len(entries) == 1 else entries

    @property
    def routers(self) -> tuple[Routing, ...]:
        """Routers among which plans choose."""
        return self.search.routers or (self.router or RoundRobinRouting(),)

    @property
    def single_engine(self) -> str | None:
        """Engine of all plans; None if the study names none or several."""
        return self.engine if isinstance(self.engine, str) else None

    @property
    def variants(self) -> list[Variant]:
        """Changes that are searched, each to all plans."""
        engines = () if self.engine is None or isinstance(self.engine, str) else self.engine
        return variants_of(self.search.variants, combine=bool(self.search.combine), engines=engines)

    @property
    def drafters(self) -> tuple[DrafterChoice, ...]:
        """Drafters of the study and of the variants."""
        of_variants = {v.drafter.label: v.drafter for v in self.variants if v.drafter is not None}
        return (*self.speculation, *of_variants.values())

    def devices(self, gpu: str) -> int:
        """Number of devices of a hardware profile that the study names."""
        return next(entry.devices for entry in self.hardware if entry.profile == gpu)

    @field_validator("router")
    @classmethod
    def _one_pool(cls, router: Routing | None) -> Routing | None:
        if isinstance(router, RoundRobinRouting) and router.weights:
            raise ValueError("has no effect: the plans of a study have one pool that takes requests; remove weights")
        return router

    @field_validator("speculation")
    @classmethod
    def _distinct_labels(cls, speculation: tuple[DrafterChoice, ...]) -> tuple[DrafterChoice, ...]:
        labels = [choice.label for choice in speculation]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"{labels.count(label)} drafters are called {label}; give each a name of its own")
        return speculation

    @field_validator("hardware")
    @classmethod
    def _distinct_profiles(cls, hardware: tuple[HardwareCount, ...]) -> tuple[HardwareCount, ...]:
        profiles = [entry.profile for entry in hardware]
        if len(set(profiles)) < len(profiles):
            raise ValueError(f"profiles must differ: {', '.join(profiles)}; add up the devices of each")
        return hardware

    @model_validator(mode="after")
    def _names_of_the_study(self) -> Self:
        profiles = [entry.profile for entry in self.hardware]
        labels = ["", *(choice.label for choice in self.speculation)]
        for role in ("prefill", "decode"):
            choices: PoolChoices = getattr(self.search, role) or PoolChoices()
            for key, allowed, chosen in (("gpus", profiles, choices.gpus), ("drafters", labels, choices.drafters)):
                for i, name in enumerate(chosen or ()):
                    if name not in allowed:
                        listing = ", ".join(repr(allowed_name) for allowed_name in allowed)
                        raise ErrorAt(f"the study has no {name!r}; expected one of {listing}", "search", role, key, i)
        return self

    @model_validator(mode="after")
    def _several_kinds(self) -> Self:
        if not self.search.mixed_kinds:
            return self
        if len(self.hardware) < 2 or "mixed" not in self.search.layouts or self.fixed:
            raise ErrorAt(
                "needs two kinds of hardware or more, layouts with mixed, and no fixed pool", "search", "mixed_kinds"
            )
        if self.day is not None:
            raise ErrorAt("a day requires pools of one kind of hardware; remove mixed_kinds", "day")
        return self

    @model_validator(mode="after")
    def _fragments(self) -> Self:
        search = self.search
        if search.variants is None:
            if search.combine:
                raise ErrorAt("has no effect without variants; list some, or remove it", "search", "combine")
            return self
        cuts = []
        for choices in (search, search.prefill, search.decode):
            keys = ("tp", "pp", "attention_dp", "expert_parallel")
            values = [(choices and getattr(choices, key)) or getattr(search, key) for key in keys]
            cuts += [dict(zip(keys, cut, strict=True)) for cut in product(*values)]
        pairs, drafters = "prefill-decode" in search.layouts, [choice.label for choice in self.speculation]
        try:
            check_fragments(search.variants, combine=bool(search.combine), pairs=pairs, cuts=cuts, taken=drafters)
        except ErrorAt as error:
            raise ErrorAt(str(error), "search", "variants", *error.at) from None
        if self.fixed and (number := self._with("share")) is not None:
            raise ErrorAt(
                "a fixed pool has its GPUs to itself; remove fixed, or share",
                "search", "variants", number, "share",
            )  # fmt: skip
        if self.fixed and (number := self._with("model")) is not None:
            raise ErrorAt(
                "a fixed pool serves the study's model; remove fixed, or search this checkpoint with another study",
                "search", "variants", number, "model",
            )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _replicas_without_spares(self) -> Self:
        if self.day is not None:
            for i, fragment in enumerate(self.search.variants or ()):
                if any("spare" in part for part in (fragment, fragment.get("prefill", {}), fragment.get("decode", {}))):
                    raise ErrorAt(
                        "a day starts and stops replicas, each with all that the plan has; remove day, or spare",
                        "search", "variants", i,
                    )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _replicas_that_are_known(self) -> Self:
        number = next((i for i, fragment in enumerate(self.search.variants or ()) if scales(fragment)), None)
        if number is not None and self.day is not None:
            raise ErrorAt(
                "a day starts and stops replicas by rates that are known beforehand; remove day, or autoscaling",
                "search", "variants", number,
            )  # fmt: skip
        return self

    def _with(self, key: str) -> int | None:
        """Return the number of the first fragment that has a key; None if none has."""
        return next((i for i, fragment in enumerate(self.search.variants or ()) if key in fragment), None)

    @model_validator(mode="after")
    def _scores(self) -> Self:
        unscored = next((v for v in self.variants if v.scored(self.score) is None), None)
        asking = [i for i, text in enumerate(self.constraints) if Constraint(text).mentions("score")]
        if asking and unscored is not None:
            where = "beside `model` in its variant" if unscored.checkpoint else "in the study, beside `model`"
            raise ErrorAt(
                f"{unscored.checkpoint or self.model} has no score; write `score` {where}", "constraints", asking[0]
            )
        if self.score is not None and not asking and self._with("model") is None:
            raise ErrorAt("has no effect without a variant that has another model; remove it", "score")
        return self

    @model_validator(mode="after")
    def _fixed_pools(self) -> Self:
        for i, pool in enumerate(self.fixed):
            if pool.role == "mixed" or any(pool.role == earlier.role for earlier in self.fixed[:i]):
                raise ErrorAt(
                    "fixed pools are one prefill or one decode pool; the other one is searched", "fixed", i, "role"
                )
            if pool.hardware not in [entry.profile for entry in self.hardware]:
                raise ErrorAt(
                    f"{pool.hardware} is no hardware of the study; list it there, with all its devices",
                    "fixed", i, "hardware",
                )  # fmt: skip
            if pool.autoscaling is not None:
                raise ErrorAt(
                    "instances of a fixed pool do not come and go; remove it, or search it as a variant of that pool",
                    "fixed", i, "autoscaling",
                )  # fmt: skip
        if len(self.fixed) == 2:
            raise ErrorAt("with both pools fixed nothing is left to search; use simulate", "fixed")
        if self.fixed and "prefill-decode" not in self.search.layouts:
            raise ErrorAt(
                f"a fixed {self.fixed[0].role} pool is of plans with pools of both; write layouts: [prefill-decode]",
                "search",
                "layouts",
            )
        return self

    @model_validator(mode="after")
    def _pools_apart_to_join(self) -> Self:
        for key in ("link", "decode_router"):
            if getattr(self, key) is not None and "prefill-decode" not in self.search.layouts:
                raise ErrorAt(
                    "has no effect if all plans have only mixed pools; write layouts: [prefill-decode] (or both) "
                    "under search, or remove it",
                    key,
                )
        return self
