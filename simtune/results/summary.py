"""Summary of a simulation: one declaration of its numbers, by which they are computed, written and read.

Further fields of a run's file are in `simtune.runs.schema`. Seconds, bytes, tokens, requests per second.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from simtune.errors import plural
from simtune.results.steady import Steadiness
from simtune.specs.base import Count, NonNegative, Positive, Record, Seq, Share, Whole
from simtune.specs.workload import SloMetric

T = TypeVar("T")


class Redrawn:
    """Mark of a field whose value differs between worlds, in which operators take other times."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(core_schema), "uncertain": True}


Uncertain = Annotated[T, Redrawn()]
"""A number for which `simulate --uncertainty` gives an interval; all others are the same in every world, or describe
the noise of a single run."""

Metric = Literal["ttft", "tpot", "itl", "e2el", "family", "family_active", "queue", "prefill", "transfer", "decode"]
"""Latency metrics; `family` is that of the families of a request graph or of sessions, from arrival until the
last node is over, `family_active` the part of it in which requests are under way."""


class Distribution(Record):
    """Distribution of one latency metric, in seconds; only the count if it is 0."""

    unit: Literal["s"]
    count: Whole = Field(description="requests, or tokens of itl")
    mean: Uncertain[NonNegative | None] = None
    std: Uncertain[NonNegative | None] = Field(None, description="not of itl")
    min: Uncertain[NonNegative | None] = Field(None, description="not of itl")
    p50: Uncertain[NonNegative | None] = None
    p90: Uncertain[NonNegative | None] = None
    p95: Uncertain[NonNegative | None] = None
    p99: Uncertain[NonNegative | None] = None
    max: Uncertain[NonNegative | None] = None
    ci95: dict[str, Seq[float]] | None = Field(
        None, description="by statistic: 95 % confidence interval for the noise of this run, by batch means"
    )


SLO_METRIC_NAMES: dict[SloMetric, str] = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "e2el": "E2EL",
    "family": "Family",
    "family_active": "Family without pauses",
}


def limit_sentence(bound: str, reached: str = "") -> str:
    """Return a bound such as `p99 TTFT ≤ 1,000 ms` with the value that was reached, if given."""
    return f"{bound} (it reaches {reached})" if reached else bound


class SloLimit(Record):
    """Line of a service level objective, with its value in the run."""

    request_class: str | None = Field(alias="class", description="null: all requests")
    metric: SloMetric
    statistic: str = Field(description="mean, or a percentile such as p99")
    limit_s: Positive
    value_s: Uncertain[NonNegative | None] = Field(description="null if nothing finished or the system is saturated")
    met: bool

    @property
    def bound(self) -> str:
        """Statistic, metric and limit: `p99 TTFT ≤ 1,000 ms`."""
        return f"{self.statistic} {SLO_METRIC_NAMES[self.metric]} ≤ {self.limit_s * 1e3:,.6g} ms"

    def sentence(self, reached: str = "") -> str:
        """Return the limit in words, with the class it belongs to and the value that the run reached, if given."""
        return limit_sentence(f"{self.bound} for {self.request_class}" if self.request_class else self.bound, reached)

    def __str__(self) -> str:
        return self.sentence("no finite value" if self.value_s is None else f"{self.value_s * 1e3:,.1f} ms")


class InstanceUse(Record):
    """Use of one simulated instance."""

    pool: str
    instance: Whole = Field(description="its number within the pool, from 0")
    busy: Uncertain[NonNegative] = Field(description="share of the time in which it ran steps")
    requests: Whole = Field(description="requests that it finished")
    held: Uncertain[Share | None] = Field(
        None, description="share of the time in which it held its GPUs; left out unless its pool is autoscaled"
    )
    busy_gpus: Uncertain[NonNegative | None] = Field(
        None,
        description="share of the time of all its GPUs in which they ran steps; left out unless its ranks come and go",
    )


class PoolScaling(Record):
    """Instances of an autoscaled pool over a run, from 0 s to the end of its last step. With `mean_ranks` the ranks of
    its instances come and go, and what counts instances below counts ranks, except `mean_instances`."""

    pool: str
    hours: Uncertain[NonNegative] = Field(description="length of the run")
    mean_instances: Uncertain[NonNegative] = Field(
        description="that hold GPUs: started, accepting or draining; of instances whose ranks come and go as much of "
        "each as its ranks are"
    )
    mean_ranks: Uncertain[NonNegative | None] = Field(
        None, description="data-parallel ranks that hold GPUs, of all instances; left out if instances come and go"
    )
    fewest: Uncertain[Whole] = Field(description="instances that hold GPUs")
    most: Uncertain[Whole]
    starts: Uncertain[Whole] = Field(description="instances that were started")
    drains: Uncertain[Whole] = Field(description="instances that were drained")
    gpu_hours: Uncertain[NonNegative] = Field(description="of GPUs that instances held")
    gpu_hours_of_most: Uncertain[NonNegative] = Field(description="of the GPUs of max_instances, all the time")
    at_s: Seq[NonNegative] = Field(description="when the numbers below changed, from 0 on")
    accepting: Seq[Whole] = Field(description="instances that accept requests, from then on")
    holding: Seq[Whole] = Field(description="instances that hold GPUs, from then on")

    @property
    def units(self) -> str:
        """Noun for the things that come and go."""
        return "instances" if self.mean_ranks is None else "ranks"

    @property
    def sentence(self) -> str:
        """Numbers of instances and their GPU-hours in words."""
        mean = self.mean_instances if self.mean_ranks is None else self.mean_ranks
        return (
            f"{self.fewest} to {self.most} {self.units}, {mean:.3g} on average, {self.starts} started, "
            f"{self.drains} drained; {self.gpu_hours:.4g} GPU-hours, of {self.gpu_hours_of_most:.4g} with all of them"
        )


class ChangedRanks(Record):
    """Change of the data-parallel ranks of an instance that went on."""

    pool: str
    instance: Whole
    at_s: NonNegative = Field(description="when ranks left, or began to join")
    ranks: Count = Field(description="data-parallel ranks from then on")
    pause_s: NonNegative = Field(description="in which no rank of the instance computed")
    resent: Uncertain[Whole] = Field(description="requests of ranks that left, which were sent again")

    @property
    def sentence(self) -> str:
        """Number of ranks, pause and lost requests in words."""
        return (
            f"instance {self.instance}: {self.ranks} after {self.at_s:g} s, paused {self.pause_s:.3g} s, "
            f"{plural(self.resent, 'request')} sent again"
        )


class PrefixCacheUse(Record):
    """Prompt tokens that a pool admitted, and the share of them that its prefix cache held."""

    pool: str
    queried_tokens: Uncertain[Count]
    hit_tokens: Uncertain[Whole]
    hit_rate: Uncertain[Share]


class CacheTierUse(Record):
    """Prompt tokens that a pool found in one tier below its devices, among `PrefixCacheUse.hit_tokens`."""

    pool: str
    tier: str
    hit_tokens: Uncertain[Whole]
    hit_rate: Uncertain[Share]


class EncoderWork(Record):
    """Work of the encoders of media in the steps of a pool."""

    pool: str
    encoded_images: Uncertain[Whole] = Field(description="images, videos and recordings encoded")
    cache_hits: Uncertain[Whole] = Field(description="whose embeddings a request found, made for an earlier one")
    encoder_s: Uncertain[NonNegative] = Field(description="seconds of steps spent in encoding, over all engine cores")
    busy_share: Uncertain[Share] = Field(description="of the time that engine cores are busy")

    @property
    def sentence(self) -> str:
        """Items and time in words."""
        return (
            f"{self.encoded_images:,} media items encoded, {self.cache_hits:,} in its cache; {self.encoder_s:.3g} s, "
            f"{self.busy_share:.1%} of busy time"
        )


class AdapterUse(Record):
    """LoRA adapters of the requests that a pool admitted, and the loads for which its steps waited."""

    pool: str
    requests: Uncertain[Whole] = Field(description="admissions of requests that ask for an adapter")
    hits: Uncertain[Whole] = Field(description="number of them that found it in a slot")
    hit_rate: Uncertain[Share | None] = Field(description="share of them; null without any")
    loads_from_host: Uncertain[Whole]
    loads_from_storage: Uncertain[Whole]
    waited_s: Uncertain[NonNegative] = Field(description="seconds for which steps waited for loads, of all its cores")


class Verifications(Record):
    """Totals of drafting. A wasted token was verified and not delivered."""

    rounds: Uncertain[Count] = Field(description="verifications of one request")
    tokens_per_round: Uncertain[Positive] = Field(description="delivered by one verification")
    draft_tokens: Uncertain[Whole]
    accepted_tokens: Uncertain[Whole]
    acceptance: Uncertain[NonNegative | None] = Field(description="share of the draft tokens; null if there were none")
    wasted_tokens: Uncertain[Whole]
    wasted_share: Uncertain[Share] = Field(description="of the verified tokens")


class HeldBack(Record):
    """Requests that the client held back because `max_in_flight` others were under way. Latencies begin after it."""

    max_in_flight: Count
    share: Uncertain[Share] = Field(description="of the requests that were sent")
    mean_s: Uncertain[NonNegative] = Field(description="mean time held back, of all requests")
    p99_s: Uncertain[NonNegative]
    max_s: Uncertain[NonNegative]


class ClassRejections(Record):
    """Requests of one class that servers rejected."""

    request_class: str = Field(alias="class")
    requests: Uncertain[Whole]


class Rejections(Record):
    """Requests that servers rejected (HTTP 503) because their queues were full. They count as missing every limit."""

    requests: Uncertain[Whole]
    share: Uncertain[Share] = Field(description="of all requests")
    classes: Seq[ClassRejections] = Field((), description="left out if there is one class")


class FirstTokenParts(Record):
    """Mean parts of the TTFT of a group of requests; they add up to its mean TTFT."""

    slowest: Share = Field(
        description="share of the requests that the group is: those with the longest TTFTs; 1 for all"
    )
    requests: Uncertain[Count]
    front_end_s: Uncertain[NonNegative] = Field(description="until it passed the front end")
    queue_s: Uncertain[NonNegative] = Field(description="from there until its first step")
    prefill_s: Uncertain[NonNegative] = Field(description="until its prompt was done")
    handover_s: Uncertain[NonNegative] = Field(
        description="until its KV cache had reached the decode instance, if that delivers the first token"
    )
    delivery_s: Uncertain[NonNegative] = Field(description="from there to the first token")

    @property
    def group(self) -> str:
        """The group in words."""
        return "all requests" if self.slowest == 1.0 else f"the slowest {self.slowest:.0%}"

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by the name of the part."""
        return {
            "front end": self.front_end_s,
            "queue": self.queue_s,
            "prefill": self.prefill_s,
            "handover": self.handover_s,
            "first delivery": self.delivery_s,
        }


class SimulationSummary(Record):
    """Numbers of a simulation of one plan under one load; null is a number that does not exist or has no bound."""

    requests: Whole
    completed: Uncertain[Whole]
    refused: Uncertain[Whole] = Field(
        description="requests longer than max_model_len, or with prompts that no step has room for"
    )
    unserved: Uncertain[Whole] = Field(description="requests left when no instance was up any more")
    preemptions: Uncertain[Whole]
    users: Count | None = Field(None, description="of a closed loop, if a search chose their number")
    duration_s: Uncertain[NonNegative] = Field(
        description="from the first arrival (after the warm-up) to the last finish: the makespan of a batch"
    )
    saturated: bool = Field(description="requests pile up faster than they are served")
    steadiness: Steadiness | None = Field(
        None,
        description="whether the plan keeps up with the load; null for a closed loop, a client that holds requests "
        "back, a batch and a single instant",
    )
    lifetimes: Uncertain[NonNegative | None] = Field(
        None,
        description="time in which requests arrive, over the mean end-to-end latency (of sessions: over their mean "
        "latency); null without a rate",
    )
    too_few_for: Seq[str] = Field(
        (), description="percentiles that fewer requests ended for than they need: ten must lie beyond"
    )
    offered_rate_rps: Positive | None = Field(
        description="null for a closed loop and a single instant; with held_back the rate at which requests are due"
    )
    held_back: HeldBack | None = Field(None, description="left out unless the client holds requests back")
    rejections: Rejections | None = Field(None, description="left out unless a pool limits its queue")
    request_throughput_rps: Uncertain[NonNegative | None]
    goodput_rps: Uncertain[NonNegative | None] = Field(
        description="answered within every limit that applies: share of the offered rate if stable, else finished rate"
    )
    slo_attainment: Uncertain[Share | None] = Field(
        description="share of the finished and rejected requests within every limit"
    )
    output_tokens_per_s: Uncertain[NonNegative | None]
    total_tokens_per_s: Uncertain[NonNegative | None] = Field(description="of prompts and outputs")
    output_tokens_per_s_per_gpu: Uncertain[NonNegative | None] = Field(
        description="of autoscaled pools over the mean number of GPUs that they hold"
    )
    output_tokens_per_s_per_user: Uncertain[NonNegative | None] = Field(description="1 / mean TPOT")
    energy_j: Uncertain[NonNegative | None] = Field(
        None, description="of all GPUs over duration_s; left out if a hardware profile states no power"
    )
    joules_per_token: Uncertain[NonNegative | None] = Field(None, description="that, over the output tokens")
    num_gpus: Count = Field(description="of all pools, of autoscaled ones those of the most instances")
    metrics: dict[Metric, Distribution]
    first_token_parts: Seq[FirstTokenParts] = Field(
        (), description="mean parts of the TTFT; left out if requests are not kept"
    )
    warm_up_requests: Whole | None = Field(
        description="requests before the TTFT settles; null if requests are not kept"
    )
    resent: Uncertain[Whole] = Field(description="times a request was sent to another instance after a failure")
    transferred_bytes: Uncertain[Whole] = Field(description="KV cache sent from prefill to decode instances")
    role_switches: Uncertain[Whole | None] = Field(
        None, description="instances that took the other role; left out without a controller"
    )
    instances: Seq[InstanceUse]
    autoscaling: Seq[PoolScaling] = Field(
        (), description="pools whose instances, or ranks of theirs, come and go with the load"
    )
    rank_changes: Seq[ChangedRanks] = Field(
        (), description="changes of the ranks of instances, by events of the plan or autoscaling"
    )
    prefix_cache: Seq[PrefixCacheUse] = Field((), description="pools that cache prefixes")
    cache_tiers: Seq[CacheTierUse] = Field((), description="tiers below the prefix caches of pools")
    encoders: Seq[EncoderWork] = Field((), description="pools that encode media in their steps")
    adapters: Seq[AdapterUse] = Field((), description="pools with slots for LoRA adapters")
    speculation: Verifications | None = Field(None, description="left out if no pool drafts")
    slo: Seq[SloLimit]

    @property
    def mean_gpus(self) -> float:
        """Mean number of GPUs that the deployment holds: all, unless pools are autoscaled."""
        return self.num_gpus - sum((of.gpu_hours_of_most - of.gpu_hours) / (of.hours or 1) for of in self.autoscaling)

    @property
    def power_w(self) -> float | None:
        """Mean power over the duration, of all GPUs; None if the energy is not known."""
        return None if self.energy_j is None or not self.duration_s else self.energy_j / self.duration_s


class LatencyQuantiles(Record):
    """Latencies at evenly spaced levels from 0 to 1; empty if nothing was counted."""

    ttft_s: Seq[float]
    tpot_s: Seq[float]
    e2el_s: Seq[float]


class BasisShares(Record):
    """Shares of time by its basis; they add up to 1 but for rounding."""

    measured: Share = Field(description="of shapes that were measured on this device")
    interpolated: Share = Field(description="of shapes among those measured")
    extrapolated: Share = Field(description="of shapes outside them")
    carried_over: Share = Field(description="measured on another device and moved to this one by the data sheets")
    other_engine: Share = Field(
        0.0, description="kernels of another engine than the one that runs; written only if there are any"
    )
    data_sheet: Share = Field(description="not measured: from the data sheet, or assumed")


class OperatorBasis(Record):
    """Basis of the time of one operator kind, and its typical error."""

    operator: str
    share: Share = Field(description="of the time of all kinds")
    log_sd: NonNegative = Field(description="typical log error of its time; 1.645 of it hold 90 %")
    basis: BasisShares


class BasisByOperator(BasisShares):
    """Shares of the time of all operators, and those of each."""

    other_releases: dict[str, Share] = Field(
        default_factory=dict,
        description="shares of the time, whatever their basis, of kernels of another release than the one that runs, "
        "by software; written only if there are any",
    )
    operators: Seq[OperatorBasis] = Field(description="the longest first")


class PoolBasis(BasisByOperator):
    """Basis of the step time of one pool."""

    pool: str
    profile: str = Field(description="hardware profile and engine")
    share: Share = Field(description="of the step time of all pools")


class CostBasis(BasisByOperator):
    """Basis of the simulated steps' time in kernels and collectives: steps of the run, weighted by their time."""

    pools: Seq[PoolBasis] = Field((), description="written only if pools run under several engines")


class Uncertainty(Record):
    """Results over redrawn worlds: intervals that hold the middle `level` of them, and shares of worlds."""

    worlds: Count
    level: Share
    saturated_probability: Share = Field(description="share of worlds in which the system is saturated")
    slo_probability: Share = Field(description="share of worlds in which every limit is met")
    intervals: dict[str, Any] = Field(
        description="nested like the summary, [low, high] in place of each uncertain number; null is unbounded"
    )

    def of(self, *keys: str) -> tuple[float | None, float | None] | None:
        """Return the interval of the number at these nested keys; None if there is none."""
        below: Any = self.intervals
        for key in keys:
            below = below.get(key) if isinstance(below, dict) else None
        return (below[0], below[1]) if isinstance(below, list) and len(below) == 2 else None


def is_uncertain(record: type[Record], name: str) -> bool:
    """True if a field is declared `Uncertain`."""
    return any(isinstance(mark, Redrawn) for mark in record.model_fields[name].metadata)
