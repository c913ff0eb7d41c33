"""Autoscaling of a pool: the rule by which its instances, or ranks of its instances, are started and drained, and its
limits.

Rules and defaults are those of Dynamo's planner (ai-dynamo/dynamo, components/src/dynamo/planner: config/defaults.py,
core/throughput_scaling.py, core/load_scaling.py), of Kubernetes' HorizontalPodAutoscaler, and of the saturation
analyser of llm-d (llm-d/llm-d-workload-variant-autoscaler, docs/saturation-analyzer.md). Ranks come and go as vLLM's do
with elastic expert parallelism, by one change after another (`scale_elastic_ep` in vllm/v1/engine/async_llm.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Protocol, Self

from pydantic import Field, model_validator

from simtune.specs.base import LONGEST_S, ErrorAt, GpuCount, NonNegative, Part, Positive, Rate, Seconds, Share

WatchedLoad = Literal["waiting", "under_way", "prompt_tokens", "kv_cache", "kv_demand"]
"""Load of an instance that a rule reads:

* `waiting`: requests that wait for a seat;
* `under_way`: requests that wait or run;
* `prompt_tokens`: tokens of prompts that wait;
* `kv_cache`: tokens of running requests over those that the KV cache has room for;
* `kv_demand`: the same, with the prompts that wait.
"""
OF_TOKENS = ("kv_cache", "kv_demand")
"""Loads that are read from the tokens of running requests."""

_WATCH = Field(
    description="load of an instance: requests that wait (waiting), or wait or run (under_way); tokens of prompts that "
    "wait (prompt_tokens); tokens of running requests over the size of the KV cache (kv_cache), or those and the "
    "prompts that wait (kv_demand)"
)


class _ScalingRule(Part):
    EVERY_S: ClassVar[float]
    """Interval of the rule in its source, in seconds."""
    STABILISE_S: ClassVar[float] = 0.0
    """Time for which the source of the rule remembers larger numbers before it scales down."""

    @property
    def watched(self) -> tuple[WatchedLoad, ...]:
        """Loads that the rule reads."""
        return ()

    @property
    def reads_tokens(self) -> bool:
        """True if the rule reads the tokens of running requests."""
        return any(load in OF_TOKENS for load in self.watched)


class RateRule(_ScalingRule):
    """Instances for the request rate of the last interval: the throughput-based mode of Dynamo's planner, with
    its constant predictor.
    """

    EVERY_S: ClassVar[float] = 180.0
    kind: Literal["rate"] = "rate"
    requests_per_s: Rate = Field(
        description="rate that one instance serves within the SLO, such as the goodput of a search with one instance"
    )


class ThresholdRule(_ScalingRule):
    """Start an instance if any is at `up` or above, drain one if all are at `down` or below, and change nothing before
    the last change is complete: the load-based mode of Dynamo's planner.
    """

    EVERY_S: ClassVar[float] = 5.0
    kind: Literal["thresholds"] = "thresholds"
    watch: WatchedLoad = _WATCH
    up: Positive = Field(description="an instance is started if any has this load or more; above down")
    down: NonNegative = Field(description="an instance is drained if all have this load or less")

    @property
    def watched(self) -> tuple[WatchedLoad, ...]:
        """Loads that the rule reads."""
        return (self.watch,)

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.up <= self.down:
            raise ErrorAt(f"up ({self.up:g}) must be above down ({self.down:g}); raise it", "up")
        return self


class TargetRule(_ScalingRule):
    """Instances by which the mean load comes to a target: Kubernetes' HorizontalPodAutoscaler."""

    EVERY_S: ClassVar[float] = 15.0
    STABILISE_S: ClassVar[float] = 300.0
    kind: Literal["target"] = "target"
    watch: WatchedLoad = _WATCH
    load: Positive = Field(description="mean load of an instance that is aimed at")
    tolerance: Share = Field(0.1, description="relative distance from it at which nothing changes")

    @property
    def watched(self) -> tuple[WatchedLoad, ...]:
        """Loads that the rule reads."""
        return (self.watch,)


class SaturationRule(_ScalingRule):
    """Start an instance if those that are not saturated have little to spare on average, drain one if the others could
    take over with enough to spare, and change nothing before the last change is complete: llm-d's saturation analyser.
    """

    EVERY_S: ClassVar[float] = 60.0
    kind: Literal["saturation"] = "saturation"
    kv_cache: Annotated[Positive, Field(le=1)] = Field(
        0.8, description="share of the KV cache from which on an instance is saturated"
    )
    waiting: Positive = Field(5.0, description="waiting requests from which on an instance is saturated")
    kv_cache_spare: Positive = Field(0.1, description="an instance is started if less of the KV cache is to spare")
    waiting_spare: Positive = Field(3.0, description="an instance is started if fewer waiting requests are to spare")

    @property
    def watched(self) -> tuple[WatchedLoad, ...]:
        """Loads that the rule reads."""
        return ("kv_cache", "waiting")

    @model_validator(mode="after")
    def _can_be_spared(self) -> Self:
        for key in ("kv_cache", "waiting"):
            most, spare = getattr(self, key), getattr(self, f"{key}_spare")
            if spare >= most:
                raise ErrorAt(
                    f"{key}_spare ({spare:g}) must be below {key} ({most:g}), or every instance would be short of it",
                    f"{key}_spare",
                )
        return self


class SlaRule(_ScalingRule):
    """Start an instance if all are estimated to miss a limit, drain one if the others would keep all limits with a
    margin, and change nothing before the last change is complete: the load-based mode of Dynamo's planner with target
    sla. The planner estimates by a regression over measured steps; here the step costs of the pool are its estimates.
    """

    EVERY_S: ClassVar[float] = 5.0
    kind: Literal["sla"] = "sla"
    ttft_s: Positive | None = Field(
        None, description="limit on the time of all prompts that wait and one more; no limit unless given"
    )
    tpot_s: Positive | None = Field(None, description="limit on the time of the next decode step; none unless given")
    sensitivity: Annotated[Positive, Field(le=1)] = Field(
        0.8, description="share of a limit within which one instance less must stay; of TTFT the part that queues cause"
    )

    @property
    def reads_tokens(self) -> bool:
        """True: steps are estimated by the tokens of running requests."""
        return True

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if self.ttft_s is None and self.tpot_s is None:
            raise ErrorAt("has no limit; give ttft_s, tpot_s or both")
        return self


ScalingRule = Annotated[RateRule | ThresholdRule | TargetRule | SaturationRule | SlaRule, Field(discriminator="kind")]


class Autoscaling(Part):
    """Instances of the pool come and go with its load, or with `min_ranks` the ranks of each instance.

    Every `every_s` the rule states how many instances there should be. A new instance accepts requests `startup_s`
    later; those that are too many are drained, the newest first: they take no new requests, those that wait there go
    elsewhere, those that run end. An instance holds its GPUs from its start until it is drained.

    Ranks are data-parallel ones, which share experts, and the rule reads each as it reads an instance. All ranks of the
    instance pause for `pause_s` when new ranks have started, and when those that are too many are drained; then
    the experts are spread over the ranks that there are. A rank holds its GPUs until the end of that pause.
    """

    rule: ScalingRule
    startup_s: Seconds = Field(
        description="from the decision to start an instance until it accepts requests: its GPUs, image, weights, "
        "graphs; of ranks until their instance pauses"
    )
    min_instances: GpuCount = Field(1, description="instances that there are always")
    max_instances: GpuCount | None = Field(
        None,
        description="most instances that hold GPUs at a time, draining ones among them: those that there are GPUs for; "
        "required without min_ranks",
    )
    min_ranks: GpuCount | None = Field(
        None,
        description="ranks that each instance always has; up to parallelism.attention_dp come and go, with "
        "elastic_experts. Instances come and go unless given",
    )
    initial_ranks: GpuCount | None = Field(
        None, description="ranks that each instance begins with; min_ranks unless given"
    )
    pause_s: Seconds | None = Field(
        None,
        description="seconds in which no rank of the instance computes when ranks join or leave; unless given, those "
        "in which a rank receives the experts that it does not have over the link between ranks",
    )
    every_s: Annotated[float, Field(ge=1e-3, le=LONGEST_S)] | None = Field(
        None,
        description="interval of the rule; unless given that of its source: rate 180, thresholds and sla 5, target "
        "15, saturation 60 s",
    )
    stabilise_s: Seconds | None = Field(
        None,
        description="an instance is drained only if the rule asked for fewer all this time; unless given 300 s with "
        "target, otherwise 0",
    )

    @property
    def interval_s(self) -> float:
        """Seconds between two decisions."""
        return self.rule.EVERY_S if self.every_s is None else self.every_s

    @property
    def scales_ranks(self) -> bool:
        """True if ranks of instances come and go, and no instances."""
        return self.min_ranks is not None

    @property
    def first_ranks(self) -> int:
        """Ranks that each instance begins with; 0 if instances come and go."""
        return self.initial_ranks or self.min_ranks or 0

    @property
    def window_s(self) -> float:
        """Seconds for which larger numbers that the rule asked for are remembered."""
        return self.rule.STABILISE_S if self.stabilise_s is None else self.stabilise_s

    @model_validator(mode="after")
    def _scales_one_of_both(self) -> Self:
        if self.min_ranks is None:
            for key in ("initial_ranks", "pause_s"):
                if getattr(self, key) is not None:
                    raise ErrorAt("has no effect unless ranks come and go; set min_ranks, or remove it", key)
            if self.max_instances is None:
                raise ErrorAt("lacks max_instances, which is required unless ranks come and go (min_ranks)")
            return self
        for key in ("max_instances", "min_instances"):
            if (getattr(self, key) or 1) > 1:
                raise ErrorAt("instances do not come and go if ranks do; remove it, or min_ranks", key)
        if self.initial_ranks is not None and self.initial_ranks < self.min_ranks:
            raise ErrorAt(
                f"{self.initial_ranks} ranks are fewer than min_ranks ({self.min_ranks}); raise it", "initial_ranks"
            )
        return self

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max_instances is not None and self.min_instances > self.max_instances:
            raise ErrorAt(
                f"{self.max_instances} instances at most are fewer than min_instances ({self.min_instances}); raise it",
                "max_instances",
            )
        return self


class _Ranks(Protocol):
    @property
    def attention_dp(self) -> int: ...
    @property
    def elastic_experts(self) -> bool | None: ...


class _ScaledPool(Protocol):
    @property
    def instances(self) -> int: ...
    @property
    def parallelism(self) -> _Ranks: ...
    @property
    def share(self) -> object: ...
    @property
    def speculation(self) -> object: ...
    @property
    def autoscaling(self) -> Autoscaling | None: ...


def check_autoscaling(pool: _ScaledPool) -> None:
    """Raise ErrorAt if a pool does not go with its autoscaling."""
    scaling = pool.autoscaling
    if scaling is None:
        return
    if scaling.scales_ranks:
        _check_ranks(scaling, pool.parallelism)
    else:
        assert scaling.max_instances is not None
        if not scaling.min_instances <= pool.instances <= scaling.max_instances:
            raise ErrorAt(
                f"the pool begins with {pool.instances}, and autoscaling keeps {scaling.min_instances} to "
                f"{scaling.max_instances}; change either",
                "instances",
            )
    if pool.share is not None:
        raise ErrorAt("instances on shares of the same GPUs cannot come and go alone; remove one", "autoscaling")
    if pool.speculation is not None and scaling.rule.reads_tokens:
        raise ErrorAt(
            "the tokens of requests that draft cannot be watched; watch waiting, under_way or prompt_tokens, or use "
            "the rule rate",
            "autoscaling",
            "rule",
        )


def _check_ranks(scaling: Autoscaling, parallelism: _Ranks) -> None:
    """Raise ErrorAt if the instances of a pool do not have the ranks that are to come and go."""
    if not parallelism.elastic_experts:
        raise ErrorAt(
            "requires instances that go on with fewer ranks; set attention_dp above 1, expert_parallel, "
            "expert_replicas and elastic_experts in parallelism, or scale instances (max_instances)",
            "autoscaling",
            "min_ranks",
        )
    for key in ("min_ranks", "initial_ranks"):
        ranks = getattr(scaling, key)
        if ranks is not None and ranks > parallelism.attention_dp:
            raise ErrorAt(
                f"an instance has at most {parallelism.attention_dp} ranks, and this is {ranks}; lower it, or raise "
                "parallelism.attention_dp",
                "autoscaling",
                key,
            )


class _PlanPool(Protocol):
    @property
    def autoscaling(self) -> Autoscaling | None: ...


def check_plan_scales(pools: Sequence[_PlanPool], excluding: Sequence[str]) -> None:
    """Raise ErrorAt if pools are autoscaled in a plan that has keys (`excluding`) which do not go with it."""
    for number, pool in enumerate(pools):
        if pool.autoscaling is not None and excluding:
            raise ErrorAt(
                f"cannot be combined with {excluding[0]} of the plan; remove one of the two",
                "pools",
                number,
                "autoscaling",
            )
