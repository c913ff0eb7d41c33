"""Plan: a deployment with every knob set. `optimize` writes it, `simulate` and `validate` read it."""

from __future__ import annotations

import math
from itertools import product
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from simtune import plugins
from simtune.errors import suggest
from simtune.specs.base import (
    DTYPE_BYTES,
    BlockSize,
    Context,
    Count,
    Dtype,
    ErrorAt,
    Gpus,
    LogSigma,
    Name,
    NonNegative,
    Options,
    Part,
    Positive,
    Seats,
    Seconds,
    Seq,
    Spec,
    TokenBudget,
)
from simtune.specs.control import RoleControl, check_control
from simtune.specs.parts import PartName
from simtune.specs.shares import DeviceShare, check_shares
from simtune.specs.speculation import Speculation
from simtune.specs.stages import Stage, check_stages

PositiveShare = Annotated[float, Field(gt=0, le=1)]
KvDtype = Literal["fp32", "bf16", "fp16", "fp8", "int8"]
POLICY_NAMES = (
    "vllm-fcfs",
    "vllm-priority",
    "vllm-v0",
    "sglang",
    "tensorrt-llm",
    "transformers-fifo",
    "transformers-prefill-first",
    "static",
    "orca",
    "sarathi",
    "shortest-predicted-first",
    "earliest-deadline-first",
    "dual-queue",
    "skip-join-mlfq",
    "priority-layers",
    "layered-prefill",
)
"""Built-in policies; `simtune.engine` documents each."""
POLICY_GROUP = "simtune.policies"
"""Entry point group in which packages register policies of their own."""
ROUTER_GROUP = "simtune.routers"
Policy = Annotated[str, PartName(POLICY_GROUP, POLICY_NAMES)]
Role = Literal["mixed", "prefill", "decode"]
MOST_GPUS = 1_000_000
"""Most GPUs of a deployment."""


class Afd(Part):
    """Attention and feed-forward blocks on GPUs of their own (AFD): tokens go from one to the other in every layer."""

    ffn_devices: Gpus = Field(description="GPUs that share the feed-forward blocks: whole experts on each")
    batches: Annotated[int, Field(ge=1, le=16)] = Field(
        3, description="parts of the batch that are under way at a time, so that neither side waits"
    )


class Parallelism(Part):
    """GPUs of one instance: tp * pp * attention_dp * cp, and those of `afd`."""

    tp: Gpus = 1
    pp: Gpus = 1
    cp: Gpus | None = Field(
        None,
        description="context parallelism: groups of tp ranks that share every sequence, each with its part of the "
        "tokens of a step and of the KV cache",
    )
    cp_ring: Literal["one_way", "both_ways"] | None = Field(
        None, description="how keys and values are passed around the groups of cp; in one direction unless given"
    )
    expert_parallel: bool = Field(False, description="whole experts on each rank, instead of slices of all of them")
    attention_dp: Gpus = Field(
        1, description="groups of tp ranks with requests of their own, that share the experts: data-parallel attention"
    )
    expert_replicas: Annotated[int, Field(ge=0, le=100_000)] | None = Field(
        None, description="whole experts placed by their load as EPLB does; number of replicas over all ranks"
    )
    afd: Afd | None = Field(
        None, description="feed-forward blocks on GPUs of their own; on those of attention unless given"
    )
    expert_locality: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="share of the exchange between ranks for their experts that good placement saves"
    )

    @model_validator(mode="after")
    def _places_whole_experts(self) -> Self:
        if self.expert_replicas is not None and not self.expert_parallel:
            raise ErrorAt("requires whole experts on each rank; set expert_parallel, or remove it", "expert_replicas")
        for key in ("expert_replicas", "expert_locality"):
            if self.afd is not None and getattr(self, key) is not None:
                raise ErrorAt(
                    "cannot be combined with afd, whose devices have equal shares of the experts; remove it", key
                )
        if self.expert_locality is not None and not (self.expert_parallel and self.attention_dp > 1):
            raise ErrorAt(
                "requires data-parallel attention and whole experts on other ranks; set expert_parallel and an "
                "attention_dp above 1, or remove it",
                "expert_locality",
            )
        return self

    @model_validator(mode="after")
    def _has_a_ring(self) -> Self:
        if self.cp_ring is not None and self.context_ranks == 1:
            raise ErrorAt("requires ranks that share sequences; set cp above 1, or remove cp_ring", "cp_ring")
        return self

    @property
    def context_ranks(self) -> int:
        """Groups of ranks among which every sequence is divided: `cp`, or 1 without it."""
        return self.cp or 1

    @property
    def devices(self) -> int:
        """GPUs of one instance."""
        attention_devices = self.tp * self.pp * self.attention_dp * self.context_ranks
        return attention_devices if self.afd is None else attention_devices + self.afd.ffn_devices


class Batching(Part):
    """Continuous batching as vLLM names it."""

    policy: Policy = "vllm-fcfs"
    max_num_seqs: Seats
    max_num_batched_tokens: TokenBudget
    chunked_prefill: bool = True
    safety_margin: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="transformers policies: share of free blocks below which no request is admitted; the policy's own "
        "unless given",
    )
    long_prefill_token_threshold: TokenBudget | None = Field(
        None,
        description="vLLM policies: most tokens of one prompt in a step, so that several prompts can progress; a "
        "prompt that is alone is not limited",
    )
    scheduler_reserve_full_isl: bool | None = Field(
        None,
        description="vLLM policies: false: a request is admitted if the tokens of its first step fit the KV cache; "
        "true (default): only if all its known tokens do",
    )
    prediction_sigma: LogSigma = Field(
        0.5, description="error of predicted output lengths, for policies that use them: log standard deviation"
    )
    options: Options | None = Field(
        None,
        description="options of a policy: arguments of its constructor beside the settings of every policy "
        "(tensorrt-llm: capacity_scheduler_policy, ...; sglang: schedule_conservativeness, ...)",
    )


class KvPolicy(Part):
    """Keys and values of a sequence that are stored and read once its prompt is computed. The effect on the output is
    not modelled.
    """

    kept: PositiveShare = Field(1.0, description="share of the tokens whose keys and values stay in the cache")
    bits: Annotated[float, Field(gt=0, le=32)] | None = Field(
        None, description="bits of a value in the cache, scales included; those of its dtype unless given"
    )
    decode_sparsity: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of what is in the cache that a decode does not read"
    )
    prefill_sparsity: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the attention of prompts that is left out"
    )

    def held(self, dtype: str) -> float:
        """Bytes in the cache over those of all keys and values in this dtype."""
        return self.kept * (1.0 if self.bits is None else self.bits / (8 * DTYPE_BYTES[dtype]))

    def read(self, dtype: str) -> float:
        """Bytes that a decode reads over those of all keys and values."""
        return self.held(dtype) * (1 - self.decode_sparsity)


class KvCache(Part):
    """The paged KV cache. Values from the engine's own log are better than memory accounting: `other_memory_gib`
    replaces its one estimate, and `num_blocks` overrides it altogether, per pipeline rank.
    """

    dtype: KvDtype | None = Field(None, description="the model's own dtype unless given")
    block_size: BlockSize = 16
    memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.92
    memory_utilization_of: Literal["device", "free"] | None = Field(
        None,
        description="memory of which memory_utilization is a share: the whole device, weights and all else included "
        "(vLLM, SGLang; the default), or the memory that is free beside them (TensorRT-LLM)",
    )
    state_memory_ratio: Annotated[NonNegative, Field(le=1000)] | None = Field(
        None,
        description="memory for the states of linear attention over that for keys and values; the seats are then "
        "limited by the states, at most max_num_seqs. Unless given, states are kept for max_num_seqs "
        "sequences",
    )
    states_per_seat: Annotated[int, Field(ge=1, le=100)] | None = Field(
        None, description="states that a running sequence may need, with state_memory_ratio; 1 unless given"
    )
    other_memory_gib: NonNegative | None = Field(
        None,
        description="memory of all but weights and KV cache on each device, from the engine's log (vLLM: activation "
        "peak, memory outside torch, CUDA graphs if it counts them); estimated unless given",
    )
    num_blocks: Annotated[Count, Field(le=2**40)] | None = None
    prefix_caching: bool = Field(False, description="re-use the blocks of prompts that begin alike")
    preemption: Literal["recompute", "swap"] = "recompute"
    watermark: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="share of blocks kept free at admission")
    policy: KvPolicy | None = Field(
        None, description="part of the keys and values that is kept and read; all unless given"
    )


class HostTimes(Part):
    """Time of the engine's host side for a step: fixed, and for each sequence in it."""

    step_s: Seconds
    per_sequence_s: Seconds


class FrontEndTimes(Part):
    """Time of an instance's front end for each request before its engine sees it, one request after the other: HTTP,
    chat template, tokeniser, the way to the engine's process.
    """

    request_s: Annotated[float, Field(ge=0, le=3600)]
    token_s: Annotated[float, Field(ge=0, le=1)] = Field(description="additional seconds for each token of its prompt")


class Runtime(Part):
    """Kernels that an engine other than vLLM launches: more and smaller ones than the operators of the cost model."""

    kernels_per_layer: Count
    kernel_floor_s: Seconds = Field(
        description="GPU seconds of each kernel beyond the time of its operator, with or without graphs"
    )
    launch_s: Seconds = Field(description="host seconds to launch each kernel without CUDA graphs")


class Offload(Part):
    """Weights and keys and values in the memory of the host, and the part that the processor computes there."""

    weights: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="share of the weights; in every step they are sent to the devices, but for those `computed`"
    )
    computed: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="share of these weights that the processor multiplies in host memory"
    )
    kv_cache: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the keys and values; the processor attends to them beside the devices"
    )
    bytes_per_s: Positive | None = Field(
        None, description="rate at which the processor reads the host's memory; needed if it computes or attends"
    )
    memory_gib: Positive | None = Field(None, description="host memory for keys and values; needed if some are there")

    @model_validator(mode="after")
    def _says_what_the_host_has(self) -> Self:
        if (self.computed or self.kv_cache) and self.bytes_per_s is None:
            raise ErrorAt("is required if the processor computes; state how fast it reads its memory", "bytes_per_s")
        if self.kv_cache and self.memory_gib is None:
            raise ErrorAt(
                "is required if keys and values are in the host's memory; state how much it has for them", "memory_gib"
            )
        if self.computed and not self.weights:
            raise ErrorAt("requires weights in the host's memory; give weights a share, or remove it", "computed")
        if self.bytes_per_s is not None and not (self.computed or self.kv_cache):
            raise ErrorAt(
                "has no effect if the processor reads nothing; give computed or kv_cache a share, or remove it",
                "bytes_per_s",
            )
        if self.memory_gib is not None and not self.kv_cache:
            raise ErrorAt(
                "has no effect without keys and values there; give kv_cache a share, or remove it", "memory_gib"
            )
        return self


FusedKernel = Literal["norm", "rope", "attention"]
Quantising = Literal["fused", "queries", "apart"]
ExpertExchange = Literal["deepep", "all_gather"]

Overlap = Literal["two_batches", "split_sequence", "ladder"]


class Pool(Part):
    """Identical instances with one role."""

    name: Name = "mixed"
    role: Role = "mixed"
    hardware: str
    engine: str | None = Field(
        None, description="an engine preset, by name or file: settings that are left out here are those of that release"
    )
    instances: Gpus
    parallelism: Parallelism = Parallelism()
    weight_dtype: Dtype | None = Field(
        None,
        description="dtype to which the engine quantises the matrices inside the layers as it loads them; as in the "
        "model's checkpoint unless given; drafters keep theirs",
    )
    batching: Batching
    kv_cache: KvCache = KvCache()
    host: HostTimes | None = Field(None, description="those of the hardware profile unless given")
    front_end: FrontEndTimes | None = Field(
        None,
        description="time of requests before an engine sees them, which times to first token include; none unless "
        "given. Decode pools get their requests from prefill pools, without passing it",
    )
    async_scheduling: bool = True
    exposed_host: HostTimes | Literal["all"] | None = Field(
        None,
        description="part of the host's time of a step that asynchronous scheduling does not hide; all: sampling makes "
        "the host wait for the devices, and they wait for its other work; nothing unless given",
    )
    cuda_graphs: bool = Field(True, description="false: every kernel is launched on its own, as enforce-eager does")
    fused: Seq[FusedKernel] = Field(
        (),
        description="small operations without a kernel of their own: norm: in the all-reduce before it, where that is "
        "small; rope: in attention; attention: quantising what comes out of it, in attention",
    )
    quantising: Quantising = Field(
        "fused",
        description="of inputs of products in 8 and 4 bits: in the norms and activations before them, or apart, by "
        "kernels of their own but behind all-reduces that hold a norm; of queries beside a KV cache of 8 bits: before "
        "them, or by a kernel of their own (queries, apart)",
    )
    expert_exchange: ExpertExchange = Field(
        "deepep",
        description="how whole experts get tokens of other groups with data-parallel attention: each sent to the ranks "
        "it visits (DeepEP), or all gathered by all ranks, whose sums are scattered again; slices take the latter",
    )
    expert_flops_per_s: Positive | None = Field(
        None,
        description="highest rate of the kernels of routed experts on a device, if the engine is set to use others "
        "than those of the profile; they read weights as fast as those",
    )
    prompt_launch_s: Seconds | None = Field(
        None,
        description="host seconds per layer of launching the kernels of a step with prompt tokens, of an engine whose "
        "graphs hold decode steps only; unless given graphs hold these too, or pieces of them",
    )
    runtime: Runtime | None = Field(
        None, description="kernels of an engine other than vLLM; vLLM's kernels unless given"
    )
    offload: Offload | None = Field(
        None, description="parts of weights and KV cache in host memory; nothing unless given"
    )
    overlap: Overlap | None = Field(
        None,
        description="communication of a step beside its products: two_batches: the exchange with experts of one half "
        "of the batch beside the products of the other, from 32 decodes or, with prompts, 512 tokens on, as in vLLM; "
        "split_sequence: all communication, with halves of a prompt (ISO), in steps with prompts; ladder: of a layer "
        "beside those of the next; without communication it changes nothing",
    )
    max_model_len: Context | None = Field(None, description="longest prompt + output; the model's limit unless given")
    speculation: Speculation | None = Field(
        None, description="how the pool drafts; every token is decoded singly unless given"
    )
    share: DeviceShare | None = Field(None, description="share of its GPUs; the pool has them to itself unless given")
    costs: str | None = Field(
        None,
        description="measured whole steps in place of operators: a table (CSV, Parquet) or a log (.jsonl)",
    )

    @model_validator(mode="after")
    def _holds_one_request(self) -> Self:
        blocks, longest = self.kv_cache.num_blocks, self.max_model_len
        if blocks is not None and longest is not None:
            blocks_needed = -(-longest // self.kv_cache.block_size)
            if (blocks - 1) // self.parallelism.pp < blocks_needed:
                raise ErrorAt(
                    f"{blocks} KV blocks, one of them the engine's own, cannot hold one request of max_model_len "
                    f"({longest}), which needs {blocks_needed * self.parallelism.pp}; give "
                    f"{blocks_needed * self.parallelism.pp + 1} or more, or lower max_model_len",
                    "kv_cache",
                    "num_blocks",
                )
        return self

    @model_validator(mode="after")
    def _goes_with_afd(self) -> Self:
        if self.parallelism.afd is not None:
            for key in ("overlap", "offload"):
                if getattr(self, key) is not None:
                    raise ErrorAt(
                        "cannot be combined with afd, which overlaps its own parts and has both sides on GPUs; "
                        "remove it",
                        key,
                    )
        return self

    @model_validator(mode="after")
    def _exchanges_what_is_spared(self) -> Self:
        if self.parallelism.expert_locality is not None and self.expert_exchange == "all_gather":
            raise ErrorAt(
                "has no effect if all ranks gather all tokens; set expert_exchange to deepep, or remove it",
                "parallelism",
                "expert_locality",
            )
        return self

    @model_validator(mode="after")
    def _one_target_for_each_drafter(self) -> Self:
        if self.devices > self.parallelism.devices:
            for key in ("pp", "attention_dp"):
                if getattr(self.parallelism, key) > 1:
                    raise ErrorAt(
                        f"a drafter with GPUs of its own drafts for one batch at a time, and {key} makes "
                        f"{getattr(self.parallelism, key)} of them; set it to 1, raise tp instead, or draft a chain",
                        "parallelism",
                        key,
                    )
        return self

    @property
    def schedules_async(self) -> bool:
        """True if a step is scheduled before the last one's tokens are known: `async_scheduling`, unless drafts must be
        awaited. It is so with schemes that no engine has (PEARL, DSI, frontier) as well.
        """
        return self.async_scheduling and (self.speculation is None or not self.speculation.drafter.awaited)

    @property
    def hides_host(self) -> bool:
        """True if all or part of the host's work runs while the devices compute: if scheduling is asynchronous, unless
        all of it is exposed.
        """
        return self.schedules_async and self.exposed_host != "all"

    @property
    def devices(self) -> int:
        """GPUs of one instance, those that a drafter has for itself among them."""
        drafter = 0 if self.speculation is None else self.speculation.own_devices(self.parallelism.tp)
        return self.parallelism.devices + drafter

    def stated(self, key: str) -> Any:
        """Return a setting by its key, such as `kv_cache.block_size`, if a plan, study or engine preset sets it; None
        if its value is only the default of this schema."""
        part_name, name = key.split(".")
        part = getattr(self, part_name)
        return getattr(part, name) if name in part.model_fields_set else None


# --- routers ----------------------------------------------------------------------------------------------
# Fields besides `kind` are options of the router of that name in `simtune.sim.router`.


class RoundRobinRouting(Part):
    """Route to one instance after the other; pools may get unequal shares by weight."""

    kind: Literal["round_robin"] = "round_robin"
    weights: dict[str, Positive] = Field({}, description="share of each pool by name, per instance; 1 unless given")


class _StaleRouting(Part):
    stale_s: Seconds = Field(0.0, description="age in seconds of the router's knowledge of the instances")


class LeastOutstandingRouting(_StaleRouting):
    """The instance with the fewest requests under way."""

    kind: Literal["least_outstanding"] = "least_outstanding"


class LeastTokensRouting(_StaleRouting):
    """Route to the instance whose requests under way have the fewest prompt tokens, which its KV cache must hold."""

    kind: Literal["least_tokens"] = "least_tokens"


class ByLengthRouting(_StaleRouting):
    """Prompts go to the pools for their length: of these the instance with the fewest prompt tokens under way."""

    kind: Literal["by_length"] = "by_length"
    longest: dict[str, Count] = Field(
        {}, description="most prompt tokens of a pool's requests, by name; a pool that is left out takes the longest"
    )


class PowerOfTwoRouting(_StaleRouting):
    """Route to the instance with fewer requests under way, of two drawn at random."""

    kind: Literal["power_of_two"] = "power_of_two"


class SessionAffinityRouting(Part):
    """Requests of one session go to one instance, by rendezvous hashing."""

    kind: Literal["session_affinity"] = "session_affinity"


class PrefixAwareRouting(_StaleRouting):
    """The instance with the least work: prompt tokens it would have to compute, plus those it has under way.

    What an instance has cached is what the router sent it, at least the latest `memory_tokens` of it.
    """

    kind: Literal["prefix_aware"] = "prefix_aware"
    load_weight: NonNegative = Field(1.0, description="weight of a token under way over one that is to be computed")
    memory_tokens: Annotated[Count, Field(le=10**12)] = Field(
        1_000_000, description="prompt tokens per instance that the router remembers"
    )


class OwnRouting(Part):
    """A router that is not built in: a class by its import path, or by the name a package registered it under."""

    TAG: ClassVar[str] = plugins.EXAMPLE
    kind: Annotated[str, PartName(ROUTER_GROUP)]
    options: Options = Field({}, description="arguments of its constructor")


def _routing_tag(value: Any) -> str | None:
    """Return the tag of the class below that reads a router."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return OwnRouting.TAG if PartName(ROUTER_GROUP).knows(kind) else kind


Routing = Annotated[
    Annotated[RoundRobinRouting, Tag("round_robin")]
    | Annotated[LeastOutstandingRouting, Tag("least_outstanding")]
    | Annotated[LeastTokensRouting, Tag("least_tokens")]
    | Annotated[ByLengthRouting, Tag("by_length")]
    | Annotated[PowerOfTwoRouting, Tag("power_of_two")]
    | Annotated[SessionAffinityRouting, Tag("session_affinity")]
    | Annotated[PrefixAwareRouting, Tag("prefix_aware")]
    | Annotated[OwnRouting, Tag(OwnRouting.TAG)],
    Discriminator(_routing_tag),
]

# --- what happens to instances ----------------------------------------------------------------------------


class _Event(Part):
    at_s: Seconds = Field(description="seconds after the earliest possible arrival")
    pool: str
    instance: Annotated[int, Field(ge=0, lt=100_000)] = Field(description="number of the instance in the pool, from 0")


class Start(_Event):
    """The instance is not there before at_s, and takes delay_s to come up."""

    kind: Literal["start"] = "start"
    delay_s: Seconds = 0.0

    @property
    def over_s(self) -> float:
        """When the instance is up."""
        return self.at_s + self.delay_s


class Failure(_Event):
    """The instance is lost with everything in it; its requests are sent again. It is back after recover_s, or never."""

    kind: Literal["failure"] = "failure"
    recover_s: Annotated[Seconds, Field(gt=0)] | None = None

    @property
    def over_s(self) -> float:
        """When the instance is back, if ever."""
        return math.inf if self.recover_s is None else self.at_s + self.recover_s


class Switch(_Event):
    """The instance takes no new requests, finishes what it has, and joins pool `to` after delay_s."""

    kind: Literal["switch"] = "switch"
    to: str
    delay_s: Seconds = 0.0

    @property
    def over_s(self) -> float:
        """Never: it is an instance of the other pool then, which no event can name."""
        return math.inf


Event = Annotated[Start | Failure | Switch, Field(discriminator="kind")]


FirstToken = Literal["prefill", "transfer", "decode"]
"""Stage that delivers the client's first token if prefill and decode are apart."""


class KvLink(Part):
    """The way of a KV cache from a prefill to a decode instance.

    Rates are those of the prefill hardware's link `path`, over all GPUs of the instance, unless given or measured.
    """

    path: str = "inter_node"
    bytes_per_s: Positive | None = Field(None, description="rate of one prefill instance, all its GPUs together")
    setup_s: NonNegative | None = Field(None, description="seconds before the first byte of a transfer")
    descriptor_s: NonNegative | None = Field(
        None, description="seconds for each piece of memory; there are blocks x layers x 2 of them"
    )
    packed: bool = Field(False, description="one piece per block instead")
    layerwise: bool = Field(False, description="each layer is sent while the next is computed")
    costs: str | None = Field(
        None, description="measured transfers in place of the link's rates: a log of `simtune profile --transfers`"
    )
    first_token: FirstToken | None = Field(
        None,
        description="source of the client's first token: the prefill instance, as its prompt is done; the decode "
        "instance as the KV cache has arrived (transfer: the token is sent along); or its first step, which "
        "samples the token again (decode). Unless given, that of the router that is emitted: transfer with "
        "SGLang and TensorRT-LLM, otherwise decode",
    )
    merged: bool | None = Field(
        None,
        description="neighbouring blocks are sent as one piece, so that pieces are counted per request, not per block; "
        "true with SGLang unless given",
    )
    shared: bool = Field(False, description="true: all prefill instances share one link; false: each has its own")

    @model_validator(mode="after")
    def _measured_or_rated(self) -> Self:
        if self.costs is not None:
            if self.path != KvLink.model_fields["path"].default:
                raise ErrorAt(
                    "cannot be combined with costs, whose measured transfers replace the link's rates; remove one "
                    "of the two",
                    "path",
                )
            if self.packed and self.descriptor_s is None:
                raise ErrorAt(
                    "a measured transfer has its pieces in it; give descriptor_s, or leave this out", "packed"
                )
        return self


class PairLink(KvLink):
    """The way from one prefill pool to one decode pool, in place of the one between all."""

    source: str = Field(alias="from", description="name of the prefill pool")
    to: str = Field(description="name of the decode pool")


class Plan(Spec):
    """A deployment with every knob set."""

    KIND: ClassVar[str] = "plan"
    model: str
    pools: Annotated[Seq[Pool], Field(min_length=1, strict=False)]
    router: Routing = RoundRobinRouting()
    decode_router: Routing | None = Field(
        None, description="router that chooses the decode instance; least_tokens unless given"
    )
    link: KvLink | None = Field(None, description="link between prefill and decode instances")
    links: Annotated[Seq[PairLink], Field(strict=False)] | None = Field(
        None, description="links between single pairs of pools; other pairs have the link above"
    )
    events: Annotated[Seq[Event], Field(strict=False)] = ()
    stages: Annotated[Seq[Stage], Field(strict=False)] | None = Field(
        None, description="services that requests go through before a pool, or beside it"
    )
    control: RoleControl | None = Field(
        None,
        description="lets instances of the prefill and the decode pool take the other role; none does unless given",
    )

    @property
    def num_devices(self) -> int:
        """GPUs of all pools and stages."""
        of_stages = sum(stage.instances * stage.devices for stage in self.stages or ())
        return of_stages + sum(p.instances * p.devices for p in self.pools if p.share is None or p.share.beside is None)

    def pool(self, name: str) -> Pool:
        """The pool of a name that is there."""
        return next(pool for pool in self.pools if pool.name == name)

    @model_validator(mode="after")
    def _distinct_pool_names(self) -> Self:
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ValueError(f"pools must have different names: {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _stages_lead_somewhere(self) -> Self:
        check_stages(self.stages or (), [(pool.name, pool.role) for pool in self.pools])
        return self

    @model_validator(mode="after")
    def _shares_add_up(self) -> Self:
        for i, pool in enumerate(self.pools):
            if pool.share is not None and pool.share.beside is not None:
                self._named(pool.share.beside, "it is to be beside", "pools", i, "share", "beside")
        check_shares(self.pools)
        return self

    @model_validator(mode="after")
    def _front_ends_alike(self) -> Self:
        """Raise ErrorAt if only some pools have a front end: requests take the front end that is free first, before
        they are routed.
        """
        has_front_end = [pool.front_end is not None for pool in self.pools if pool.role != "decode"]
        if any(has_front_end) and not all(has_front_end):
            without = next(p.name for p in self.pools if p.role != "decode" and p.front_end is None)
            raise ErrorAt(
                f"pool {without} has no front_end, and requests pass one before they are routed; give one to all pools "
                "that take new requests, of 0 seconds where there is none",
                "pools",
            )
        return self

    @model_validator(mode="after")
    def _equal_instances_controlled(self) -> Self:
        if self.control is not None:
            check_control(self.control, self.pools, bool(self.events))
        return self

    @model_validator(mode="after")
    def _of_some_size(self) -> Self:
        if self.num_devices > MOST_GPUS:
            largest = max(range(len(self.pools)), key=lambda i: self.pools[i].instances * self.pools[i].devices)
            raise ErrorAt(f"{self.num_devices:,} GPUs in all, at most {MOST_GPUS:,}", "pools", largest, "instances")
        return self

    @model_validator(mode="after")
    def _roles_complete(self) -> Self:
        roles = {pool.role for pool in self.pools}
        if "mixed" in roles and len(roles) > 1:
            raise ValueError("pools are either all mixed, or prefill and decode; found both kinds")
        if roles in ({"prefill"}, {"decode"}):
            (role,) = roles
            other_role = "decode" if role == "prefill" else "prefill"
            raise ValueError(f"a {role} pool needs a {other_role} pool beside it; add one, or make the role mixed")
        if roles == {"prefill", "decode"} and self.link is None and self.links is None:
            raise ValueError(
                "prefill and decode pools need a link between them; write `link: {}` for the hardware's inter_node link"
            )
        return self

    @model_validator(mode="after")
    def _pools_apart_to_join(self) -> Self:
        for key in ("link", "links", "decode_router"):
            if all(pool.role == "mixed" for pool in self.pools) and getattr(self, key) is not None:
                raise ErrorAt(
                    "has no effect if all pools are mixed; remove it, or give pools the roles prefill and decode",
                    key,
                )
        return self

    @model_validator(mode="after")
    def _links_between_pools(self) -> Self:
        pairs: set[tuple[str, str]] = set()
        for i, link in enumerate(self.links or ()):
            for key, name, role in (("from", link.source, "prefill"), ("to", link.to, "decode")):
                self._named(name, "the link names", "links", i, key)
                if self.pool(name).role != role:
                    raise ErrorAt(f"pool {name} is a {self.pool(name).role} pool; give a {role} pool", "links", i, key)
            if (link.source, link.to) in pairs:
                raise ErrorAt(f"there are two links from {link.source} to {link.to}; leave one out", "links", i)
            pairs.add((link.source, link.to))
        return self

    @model_validator(mode="after")
    def _every_pair_linked_once(self) -> Self:
        pairs = {(link.source, link.to) for link in self.links or ()}
        names_by_role = ([p.name for p in self.pools if p.role == role] for role in ("prefill", "decode"))
        without = [pair for pair in product(*names_by_role) if pair not in pairs]
        if self.links is not None and self.link is None and without:
            source, to = without[0]
            raise ErrorAt(f"no link leads from {source} to {to}; add a link, or one for all (`link`)", "links")
        if self.link is not None and pairs and not without:
            raise ErrorAt(
                "every pair of pools has a link of its own in `links`, so `link` is not used; remove it", "link"
            )
        return self

    def way(self, source: str, to: str) -> KvLink:
        """The link from a prefill to a decode pool."""
        kv_link = next((link for link in self.links or () if (link.source, link.to) == (source, to)), self.link)
        assert kv_link is not None
        return kv_link

    @model_validator(mode="after")
    def _pools_of_routers(self) -> Self:
        for key, router in (("router", self.router), ("decode_router", self.decode_router)):
            if isinstance(router, RoundRobinRouting):
                for name in router.weights:
                    self._chosen(name, "the router gives a weight to", key, "weights", name)
            elif isinstance(router, ByLengthRouting):
                for name in router.longest:
                    self._chosen(name, "the router gives prompts up to a length to", key, "longest", name)
        return self

    def _chosen(self, name: str, who: str, key: str, *at: str) -> None:
        """Raise ErrorAt if a router (`key`) names a pool that is not there, or not among those it chooses from."""
        self._named(name, who, key, *at)
        role = self.pool(name).role
        if (role == "decode") != (key == "decode_router") and role != "mixed":
            requests = "new requests" if key == "router" else "those whose prompt is done"
            right_key = "decode_router" if key == "router" else "router"
            raise ErrorAt(
                f"{who} pool {name}, and {key} sends {requests}: name it in {right_key}, or leave it out", key, *at
            )

    @model_validator(mode="after")
    def _instances_of_events(self) -> Self:
        for i, event in enumerate(self.events):
            where = ("events", i)
            self._named(event.pool, f"the {event.kind} names", *where, "pool")
            size = self.pool(event.pool).instances
            if event.instance >= size:
                raise ErrorAt(
                    f"pool {event.pool} has {size} instances, numbered from 0; there is no {event.instance}",
                    *where,
                    "instance",
                )
            if isinstance(event, Switch):
                self._named(event.to, "the switch names", *where, "to")
                if event.to == event.pool:
                    raise ErrorAt(f"the switch leads from pool {event.pool} to itself", *where, "to")
        return self

    @model_validator(mode="after")
    def _events_in_order(self) -> Self:
        present: dict[tuple[str, int], float] = {}
        for i, event in enumerate(self.events):
            of_instance = (event.pool, event.instance)
            over = present.get(of_instance, 0.0)
            if event.at_s < over or (isinstance(event, Start) and of_instance in present):
                position = (
                    "before an earlier event of that instance is over" if over < math.inf else "after its last event"
                )
                raise ErrorAt(
                    f"the {event.kind} of instance {event.instance} of pool {event.pool} at {event.at_s:g} s comes "
                    f"{position}; list them in order, a start first; a failed instance comes back by recover_s",
                    "events",
                    i,
                    "at_s",
                )
            present[of_instance] = event.over_s
        return self

    def _named(self, name: str, who: str, *at: str | int) -> None:
        names = [pool.name for pool in self.pools]
        if name not in names:
            message = f"{who} pool {name!r}, which is not there{suggest(name, names)}; pools: {', '.join(names)}"
            raise ErrorAt(message, *at)
