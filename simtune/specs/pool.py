"""Pool of a plan: identical instances of one engine with every setting of parallelism, batching and memory."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from simtune.specs.adapters import Lora
from simtune.specs.autoscaling import Autoscaling, check_autoscaling
from simtune.specs.base import (
    BlockSize,
    Context,
    Count,
    Dtype,
    ErrorAt,
    GpuCount,
    LogSigma,
    Name,
    NonNegative,
    Options,
    Part,
    Positive,
    Seats,
    Seconds,
    Seq,
    TokensPerStep,
)
from simtune.specs.cache_tiers import CacheTier, named_tiers
from simtune.specs.draft_rules import DraftRules
from simtune.specs.drafters import Drafter
from simtune.specs.encoder import Encoder
from simtune.specs.part_names import PartName
from simtune.specs.research import IN_RESEARCH, Research
from simtune.specs.shares import DeviceShare
from simtune.specs.speculation import Speculation

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
Policy = Annotated[str, PartName(POLICY_GROUP, POLICY_NAMES)]
Role = Literal["mixed", "prefill", "decode"]


ChunkPipeline = Literal["one", "fixed", "dynamic"]
QueueLimit = Annotated[int, Field(ge=0, le=10**12)]
QUEUE_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens", "max_queued_requests")
"""Keys of `batching` by which servers reject requests."""


class Parallelism(Part):
    """GPUs of one instance: tp * pp * attention_dp * cp * prefill_context_parallel."""

    tp: GpuCount = 1
    pp: GpuCount = 1
    cp: GpuCount | None = Field(
        None,
        description="context parallelism: groups of tp ranks that share every sequence, each with its part of the "
        "tokens of a step and of the KV cache",
    )
    decode_context_parallel: GpuCount | None = Field(
        None,
        description="of tp: ranks of a group that keep a part of each sequence's tokens instead of the same KV heads; "
        "decodes read as much less, and exchange their results once a layer. 1 unless given",
    )
    prefill_context_parallel: GpuCount | None = Field(
        None,
        description="groups of tp ranks that divide the tokens of steps with prompts: each gathers the keys and values "
        "of the others once a layer and keeps all of them; every group computes steps without prompts. 1 unless given",
    )
    expert_parallel: bool = Field(False, description="whole experts on each rank, instead of slices of all of them")
    attention_dp: GpuCount = Field(
        1, description="groups of tp ranks with requests of their own, that share the experts: data-parallel attention"
    )
    expert_replicas: Annotated[int, Field(ge=0, le=100_000)] | None = Field(
        None, description="whole experts placed by their load as EPLB does; number of replicas over all ranks"
    )
    elastic_experts: bool | None = Field(
        None,
        description="true: an instance goes on with fewer ranks if some fail or leave (events of a plan, autoscaling "
        "with min_ranks), as far as these have room for all experts; each rank keeps its number of experts. False "
        "unless given: the whole instance fails with a rank",
    )

    @model_validator(mode="after")
    def _places_whole_experts(self) -> Self:
        if self.expert_replicas is not None and not self.expert_parallel:
            raise ErrorAt("requires whole experts on each rank; set expert_parallel, or remove it", "expert_replicas")
        return self

    @model_validator(mode="after")
    def _goes_on_with_fewer_ranks(self) -> Self:
        if self.elastic_experts and (self.attention_dp == 1 or self.expert_replicas is None):
            raise ErrorAt(
                "requires data-parallel ranks and experts that are placed by load; set attention_dp above 1 and "
                "expert_replicas, or remove it",
                "elastic_experts",
            )
        return self

    @model_validator(mode="after")
    def _shares_caches_within_tp(self) -> Self:
        if self.decode_ranks == 1:
            return self
        if self.tp % self.decode_ranks:
            raise ErrorAt(f"must divide tp ({self.tp}); lower it, or raise tp", "decode_context_parallel")
        if self.context_ranks > 1:
            raise ErrorAt("cannot be combined with cp, whose ranks share sequences too", "decode_context_parallel")
        return self

    @model_validator(mode="after")
    def _divides_prompts_one_way(self) -> Self:
        for key in ("cp", "decode_context_parallel"):
            if self.prompt_groups > 1 and (getattr(self, key) or 1) > 1:
                raise ErrorAt(
                    f"cannot be combined with {key}, which divides the KV cache; set one of the two to 1",
                    "prefill_context_parallel",
                )
        return self

    @property
    def decode_ranks(self) -> int:
        """Ranks of tp that share the cache of every sequence: `decode_context_parallel`, or 1 without it."""
        return self.decode_context_parallel or 1

    @property
    def context_ranks(self) -> int:
        """Groups of ranks among which every sequence is divided: `cp`, or 1 without it."""
        return self.cp or 1

    @property
    def prompt_groups(self) -> int:
        """Groups of tp ranks that divide the tokens of steps with prompts: `prefill_context_parallel`, or 1."""
        return self.prefill_context_parallel or 1

    @property
    def expert_groups(self) -> int:
        """Groups of tp ranks over which routed experts are spread."""
        return self.attention_dp * self.prompt_groups

    @property
    def devices(self) -> int:
        """GPUs of one instance."""
        return self.tp * self.pp * self.expert_groups * self.context_ranks


class Batching(Part):
    """Continuous batching as vLLM names it."""

    policy: Policy = "vllm-fcfs"
    max_num_seqs: Seats
    max_num_batched_tokens: TokensPerStep
    chunked_prefill: bool = True
    chunk_pipeline: ChunkPipeline | None = Field(
        None,
        description="chunks of one prompt in a pipeline of stages: one: the next is scheduled when the last one has "
        "left all stages; fixed: as soon as it has left the first, each of max_num_batched_tokens; dynamic: the same, "
        "and chunks shrink so that each takes as long as the first (SGLang). Unless given, fixed with the policies of "
        "vLLM V1 and SGLang, otherwise one",
    )
    safety_margin: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="transformers policies: share of free blocks below which no request is admitted; the policy's own "
        "unless given",
    )
    long_prefill_token_threshold: TokensPerStep | None = Field(
        None,
        description="vLLM policies: most tokens of one prompt in a step, so that several prompts can progress; a "
        "prompt that is alone is not limited",
    )
    long_prefill_token_threshold_adaptive: bool | None = Field(
        None,
        description="vLLM policies: true: that threshold is at least an equal share of the budget, over the requests "
        "that run or wait; false unless given",
    )
    prefill_schedule_interval: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        None,
        description="vLLM policies: while requests decode, only one step of this number has prompts, unless requests "
        "still waited after the last of these; every step unless given",
    )
    max_num_active_seqs: Seats | None = Field(
        None,
        description="vLLM policies: most requests that run at a time, if fewer than max_num_seqs, for which graphs and "
        "buffers are made",
    )
    max_num_queued_reqs: QueueLimit | None = Field(
        None,
        description="vLLM: most requests in flight, waiting or running, in all ranks of an instance, whose server "
        "rejects others (HTTP 503); no limit unless given",
    )
    max_num_queued_tokens: QueueLimit | None = Field(
        None,
        description="vLLM: tokens of prompts without a first token from which on the server of an instance rejects new "
        "requests (HTTP 503); no limit unless given",
    )
    max_queued_requests: QueueLimit | None = Field(
        None,
        description="SGLang: most requests that wait in one scheduler, which rejects others (HTTP 503); no limit "
        "unless given",
    )
    scheduler_reserve_full_isl: bool | None = Field(
        None,
        description="vLLM policies: false: a request is admitted if the tokens of its first step fit the KV cache; "
        "true (default): only if all its known tokens do",
    )
    self_preemption_ends_step: bool | None = Field(
        None,
        description="vLLM's priorities: true (default, releases up to 0.32): a resident that is preempted because its "
        "own next block is missing is the last that gets tokens in that step; false (0.33): the more urgent ones "
        "behind it get theirs",
    )
    draft_rules: DraftRules | None = Field(
        None,
        description="vLLM's rules for drafts: vllm-0.32 (default): after EAGLE, MTP and block drafters the last block "
        "found in the prefix cache is computed again, block drafters take a part of each step's tokens, and accepted "
        "tokens are cached with their request's next step; vllm-0.33: after EAGLE and MTP a block is found together "
        "with the token after it, block drafters run in a pass of their own, for at most max_num_batched_tokens / "
        "(drafts and lookahead) requests at a time, and accepted tokens are cached at once",
    )
    prediction_sigma: LogSigma = Field(
        0.5, description="error of predicted output lengths, for policies that use them: log standard deviation"
    )
    options: Options | None = Field(
        None,
        description="options of a policy: arguments of its constructor beside the settings of every policy "
        "(tensorrt-llm: capacity_scheduler_policy, ...; sglang: schedule_conservativeness, ...)",
    )


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
    tiers: Seq[CacheTier] | None = Field(
        None,
        description="levels of the prefix cache below the devices, the fastest first: where the device's own cache "
        "ends, what they have of a prompt is fetched instead of computed; or a published cache by name: hicache, "
        "lmcache, kvbm",
    )
    preemption: Literal["recompute", "swap"] = "recompute"
    watermark: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="share of blocks kept free at admission")

    @field_validator("tiers", mode="before")
    @classmethod
    def _of_a_published_cache(cls, tiers: Any) -> Any:
        return named_tiers(tiers)

    @model_validator(mode="after")
    def _tiers_extend_a_cache(self) -> Self:
        if not self.tiers:
            return self
        if not self.prefix_caching:
            raise ErrorAt("requires a prefix cache, which they extend; set prefix_caching, or remove them", "tiers")
        ahead = [tier.fetched == "ahead" for tier in self.tiers]
        if any(ahead) and len(ahead) > 1:
            raise ErrorAt("must have one tier only with fetched: ahead; remove the others", "tiers")
        names = [tier.name for tier in self.tiers]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise ErrorAt(f"{name} is the name of another tier; rename one", "tiers", number, "name")
        return self


class HostTimes(Part):
    """Time of the engine's host side for a step: fixed, and for each sequence in it."""

    step_s: Seconds
    per_sequence_s: Seconds
    ranks_step_s: Seconds | None = Field(
        None, description="additional seconds of a step of an instance with several GPUs, whose processes get messages"
    )
    ranks_sequence_s: Seconds | None = Field(None, description="the same for each sequence in it")
    draft_step_s: Seconds | None = Field(
        None,
        description="seconds of each pass of a drafter on the GPU, which nothing hides; unless given none, or without "
        "graphs and asynchronous scheduling those of a step",
    )
    draft_sequence_s: Seconds | None = Field(None, description="the same for each sequence in it")
    log_sd: Annotated[float, Field(ge=0, le=3)] | None = Field(
        None,
        description="typical error of these times, as a standard deviation of their logarithm; by origin unless given",
    )
    origin: Literal["measured", "other release", "assumed"] | None = Field(
        None,
        description="measured on this release of the engine, on another one, or not at all; exact unless given",
    )


class GraphSizes(Part):
    """Largest step for which an engine captures CUDA graphs; the kernels of larger ones are launched one by one."""

    most: TokensPerStep = Field(description="tokens of the largest step with a graph")
    per_seat: Count | None = Field(
        None, description="tokens for each of max_num_seqs, if that makes fewer; whatever max_num_seqs unless given"
    )
    most_with_prompts: Count | None = Field(
        None,
        description="tokens of the largest step with prompts that graphs make no longer than its kernels, if fewer: "
        "vLLM runs such steps in pieces of graphs and launches attention between them",
    )
    launch_s: Seconds = Field(description="host seconds per layer of launching the kernels of a larger step")

    def largest(self, max_num_seqs: int, prompts: bool = False) -> int:
        """Return the tokens of the largest step with a graph, of steps with prompts if `prompts`."""
        most = self.most
        if prompts and self.most_with_prompts is not None:
            most = min(most, self.most_with_prompts)
        return most if self.per_seat is None else min(most, self.per_seat * max_num_seqs)


class FrontEndTimes(Part):
    """Time of an instance's front end for each request before its engine sees it, one request after the other: HTTP,
    chat template, tokeniser, the way to the engine's process.
    """

    request_s: Annotated[float, Field(ge=0, le=3600)]
    token_s: Annotated[float, Field(ge=0, le=1)] = Field(description="additional seconds for each token of its prompt")


StreamInterval = Annotated[int, Field(ge=1, le=10_000)]

FusedKernel = Literal["norm", "rope", "attention"]
Quantising = Literal["fused", "queries", "apart"]
ExchangeKind = Literal["deepep", "all_gather"]

Overlap = Literal["two_batches", "split_sequence", "ladder"]


class OverlapThresholds(Part):
    """Tokens of a step from which on it is run as two batches, as vLLM's dbo_decode_token_threshold and
    dbo_prefill_token_threshold."""

    decode_tokens: Annotated[int, Field(ge=2, le=10**9)] = Field(32, description="of a step that only decodes")
    prefill_tokens: Annotated[int, Field(ge=2, le=10**9)] = Field(512, description="of a step with prompts")


_NO_RESEARCH = Research()


class Pool(Part):
    """Identical instances with one role."""

    name: Name = "mixed"
    role: Role = "mixed"
    hardware: str
    engine: str | None = Field(
        None,
        description="an engine preset, by name or file: settings that are left out here are those of that release; "
        "vllm is the newest release that has a preset, vllm@0.21 the nearest at or below",
    )
    engine_asked: str | None = Field(None, description="family or release for which the preset `engine` was chosen")
    instances: GpuCount
    spare: Annotated[int, Field(ge=0, le=1000)] = Field(
        0,
        description="instances beside these that stand by with the weights loaded: they are paid for, get no requests, "
        "and one takes the place of an instance that fails",
    )
    parallelism: Parallelism = Parallelism()
    weight_dtype: Dtype | None = Field(
        None,
        description="dtype to which the engine quantises the matrices inside the layers as it loads them; as in the "
        "model's checkpoint unless given; drafters keep theirs",
    )
    batching: Batching
    kv_cache: KvCache = KvCache()
    host: HostTimes | None = Field(
        None, description="those of the engine preset unless given, or of the hardware profile if it has none"
    )
    front_end: FrontEndTimes | None = Field(
        None,
        description="time of requests before an engine sees them, which times to first token include; none unless "
        "given. Decode pools get their requests from prefill pools, without passing it",
    )
    async_scheduling: bool = True
    drafts_awaited: bool | None = Field(
        None,
        description="true: steps with drafts are scheduled when the last one's tokens are known, whatever "
        "async_scheduling; by the drafter unless given",
    )
    exposed_host: HostTimes | Literal["all"] | None = Field(
        None,
        description="part of the host's time of a step that asynchronous scheduling does not hide; all: sampling makes "
        "the host wait for the devices, and they wait for its other work; nothing unless given",
    )
    cuda_graphs: bool = Field(True, description="false: every kernel is launched on its own, as enforce-eager does")
    graph_sizes: GraphSizes | None = Field(
        None, description="largest step with a CUDA graph; with cuda_graphs, steps of any size have one unless given"
    )
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
    expert_exchange: ExchangeKind = Field(
        "deepep",
        description="how whole experts get tokens of other groups with data-parallel attention: each sent to the ranks "
        "it visits (DeepEP), or all gathered by all ranks, whose sums are scattered again; slices take the latter",
    )
    shared_experts_beside: TokensPerStep | None = Field(
        None,
        description="largest step, in tokens, in which shared experts run on a stream of their own beside the routed "
        "ones; in larger steps, and in all unless given, one after the other",
    )
    expert_activations: Literal["mxfp8"] | None = Field(
        None,
        description="format to which an engine quantises the inputs of experts in mxfp4; the activations' own unless "
        "given",
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
    overlap: Overlap | None = Field(
        None,
        description="communication of a step beside its products: two_batches: the exchange with experts of one half "
        "of the batch beside the products of the other, from overlap_thresholds on, as in vLLM; "
        "split_sequence: all communication, with halves of a prompt (ISO), in steps with prompts; ladder: of a layer "
        "beside those of the next; without communication it changes nothing",
    )
    overlap_thresholds: OverlapThresholds | None = Field(
        None, description="steps that two_batches splits: those of 32 decodes or, with prompts, 512 tokens unless given"
    )
    stream_interval: StreamInterval | None = Field(
        None,
        description="tokens of an answer that the engine sends to the client at a time, after the first one, which it "
        "sends at once; times between tokens are then those between messages, but for pools that draft; 1 unless given",
    )
    encoder: Encoder | None = Field(
        None,
        description="the encoders of the model for images, videos and sound run in the steps of the pool, and take "
        "memory; needed for loads with media, unless a stage encodes them; none unless given",
    )
    cascade_attention: bool | None = Field(
        None,
        description="true: a step attends once to what all running requests begin with, if 8 or more share 256 tokens "
        "or more and it pays by the rule of vLLM, which has it no more since 0.33; false unless given",
    )
    lora: Lora | None = Field(
        None, description="slots for LoRA adapters; the pool serves the base model alone unless given"
    )
    max_model_len: Context | None = Field(None, description="longest prompt + output; the model's limit unless given")
    speculation: Speculation | None = Field(
        None, description="how the pool drafts; every token is decoded singly unless given"
    )
    share: DeviceShare | None = Field(None, description="share of its GPUs; the pool has them to itself unless given")
    autoscaling: Autoscaling | None = Field(
        None,
        description="starts and drains instances, or ranks of each instance, as the load asks for them; the pool keeps "
        "its own unless given",
    )
    costs: str | None = Field(
        None,
        description="measured whole steps in place of operators: a table (CSV, Parquet) or a log (.jsonl)",
    )
    research: Research | None = Field(
        None, description="settings of published systems that no engine has; a plan without this block is one to run"
    )

    @model_validator(mode="before")
    @classmethod
    def _has_research_in_one_block(cls, data: Any) -> Any:
        for path, key in IN_RESEARCH.items():
            block: Any = data
            for part in path[:-1]:
                block = block.get(part) if isinstance(block, dict) else None
            if isinstance(block, dict) and path[-1] in block:
                raise ErrorAt(f"is a setting of published systems; write it as research: {{{key}: ...}}", *path)
        return data

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        check_pool(self)
        return self

    @property
    def engine_release(self) -> str | None:
        """The engine, by the release for which its preset was chosen if one was named (`vllm@0.31`)."""
        return self.engine_asked if self.engine_asked is not None and "@" in self.engine_asked else self.engine

    @property
    def schedules_async(self) -> bool:
        """True if a step is scheduled before the last one's tokens are known: `async_scheduling`, unless drafts must be
        awaited. It is so with schemes that no engine has (PEARL, DSI, frontier) as well.
        """
        return self.async_scheduling and (self.speculation is None or not self.awaits(self.speculation.drafter))

    def awaits(self, drafter: Drafter) -> bool:
        """True if drafts of this drafter must be known before the next step is scheduled."""
        return drafter.awaited or bool(self.drafts_awaited)

    @property
    def message_tokens(self) -> int:
        """Tokens in a message to the client: `stream_interval`, or 1 without it."""
        return self.stream_interval or 1

    @property
    def queue_limits(self) -> tuple[str, ...]:
        """Keys of `batching` by which the pool's servers may reject requests."""
        return tuple(key for key in QUEUE_LIMITS if getattr(self.batching, key) is not None)

    @property
    def hides_host(self) -> bool:
        """True if all or part of the host's work runs while the devices compute: if scheduling is asynchronous, unless
        all of it is exposed.
        """
        return self.schedules_async and self.exposed_host != "all"

    @property
    def most_instances(self) -> int:
        """Most instances that the pool has at a time, those that stand by among them."""
        scaling = self.autoscaling
        most = None if scaling is None else scaling.max_instances
        return self.instances + self.spare if most is None else most

    @property
    def devices(self) -> int:
        """GPUs of one instance, those that a drafter has for itself among them."""
        drafter = 0 if self.speculation is None else self.speculation.own_devices(self.parallelism.tp)
        return self.model_devices + drafter

    @property
    def model_devices(self) -> int:
        """GPUs of one instance that hold the model: those of `parallelism`, and those of `research.afd`."""
        return self.parallelism.devices + (0 if self.studied.afd is None else self.studied.afd.ffn_devices)

    @property
    def studied(self) -> Research:
        """Settings of `research`; all absent without the block."""
        return self.research or _NO_RESEARCH

    def stated(self, key: str) -> Any:
        """Return a setting by its key, such as `kv_cache.block_size`, if a plan, study or engine preset sets it; None
        if its value is only the default of this schema."""
        part_name, name = key.split(".")
        part = getattr(self, part_name)
        return getattr(part, name) if name in part.model_fields_set else None


# --- how settings go together -----------------------------------------------------------------------------


def check_pool(pool: Pool) -> None:
    """Raise ErrorAt for the first rule that a pool breaks."""
    for rule in _RULES:
        rule(pool)


def _refines_a_limit(pool: Pool) -> None:
    batching = pool.batching
    if batching.max_num_active_seqs is not None and batching.max_num_active_seqs > batching.max_num_seqs:
        raise ErrorAt(
            f"{batching.max_num_active_seqs} exceeds max_num_seqs ({batching.max_num_seqs}); lower or remove it",
            "batching",
            "max_num_active_seqs",
        )
    if batching.long_prefill_token_threshold_adaptive and batching.long_prefill_token_threshold is None:
        raise ErrorAt(
            "requires a threshold; set long_prefill_token_threshold, or remove it",
            "batching",
            "long_prefill_token_threshold_adaptive",
        )


def _rejects_new_requests(pool: Pool) -> None:
    for key in pool.queue_limits:
        if pool.role == "decode":
            raise ErrorAt(
                "applies to new requests, which decode pools do not get; set it on prefill pools, or remove it",
                "batching",
                key,
            )
        if pool.role == "prefill" and key == "max_queued_requests":
            raise ErrorAt(
                "has no effect with separate prefill and decode, where SGLang ignores it; remove it",
                "batching",
                key,
            )


def _holds_one_request(pool: Pool) -> None:
    blocks, longest = pool.kv_cache.num_blocks, pool.max_model_len
    if blocks is not None and longest is not None:
        blocks_needed = -(-longest // pool.kv_cache.block_size)
        if (blocks - 1) // pool.parallelism.pp < blocks_needed:
            raise ErrorAt(
                f"{blocks} KV blocks, one of them the engine's own, cannot hold one request of max_model_len "
                f"({longest}), which needs {blocks_needed * pool.parallelism.pp}; give "
                f"{blocks_needed * pool.parallelism.pp + 1} or more, or lower max_model_len",
                "kv_cache",
                "num_blocks",
            )


def _goes_with_afd(pool: Pool) -> None:
    if pool.studied.afd is None:
        return
    shares = "cannot be combined with afd, whose devices have equal shares of the experts; remove it"
    alone = "cannot be combined with afd, which overlaps its own parts and has both sides on GPUs; remove it"
    for path, value, why in (
        (("parallelism", "expert_replicas"), pool.parallelism.expert_replicas, shares),
        (("research", "expert_locality"), pool.studied.expert_locality, shares),
        (("overlap",), pool.overlap, alone),
        (("research", "offload"), pool.studied.offload, alone),
    ):
        if value is not None:
            raise ErrorAt(why, *path)


def _splits_steps(pool: Pool) -> None:
    if pool.overlap_thresholds is not None and pool.overlap != "two_batches":
        raise ErrorAt(
            "has no effect unless steps are split; set overlap to two_batches, or remove it", "overlap_thresholds"
        )


def _has_a_ring(pool: Pool) -> None:
    if pool.studied.cp_ring is not None and pool.parallelism.context_ranks == 1:
        raise ErrorAt("requires ranks that share sequences; set cp above 1, or remove cp_ring", "research", "cp_ring")


_UNDIVIDED_DRAFTS = (
    "unless an MTP head drafts: vLLM 0.32 and 0.33 refuse others (MRV2 PCP only supports DSpark or single-module MTP "
    "speculative decoding), and of these two MTP is modelled"
)


def _divides_prompts(pool: Pool) -> None:
    if pool.parallelism.prompt_groups == 1:
        return
    cache, studied = pool.kv_cache, pool.studied
    for path, is_set, why in (
        (("speculation",), pool.speculation and not pool.speculation.drafter.divides_prompts, _UNDIVIDED_DRAFTS),
        (("lora",), pool.lora, "which vLLM 0.28 to 0.33 refuses (MRV2 PCP does not support LoRA yet)"),
        (("encoder",), pool.encoder, "which vLLM 0.28 to 0.33 refuses (MRV2 PCP does not support MM inputs yet)"),
        (("cascade_attention",), pool.cascade_attention, "which is not divided among groups of ranks"),
        (("kv_cache", "preemption"), cache.preemption == "swap", "by which every group of ranks would move its copy"),
        (("research", "offload"), studied.offload, "of which every group of ranks would need its copy"),
        (("research", "afd"), studied.afd, "whose attention devices are groups of tp ranks"),
    ):
        if is_set:
            name = "swap" if path[-1] == "preemption" else path[-1]
            raise ErrorAt(
                f"cannot be combined with {name}, {why}; remove it, or set prefill_context_parallel to 1",
                *path,
            )


def _exchanges_what_is_spared(pool: Pool) -> None:
    if pool.studied.expert_locality is None:
        return
    if not (pool.parallelism.expert_parallel and pool.parallelism.attention_dp > 1):
        raise ErrorAt(
            "requires data-parallel attention and whole experts on other ranks; set expert_parallel and an "
            "attention_dp above 1, or remove it",
            "research",
            "expert_locality",
        )
    if pool.expert_exchange == "all_gather":
        raise ErrorAt(
            "has no effect if all ranks gather all tokens; set expert_exchange to deepep, or remove it",
            "research",
            "expert_locality",
        )


def _one_target_for_each_drafter(pool: Pool) -> None:
    if pool.devices > pool.model_devices:
        for key in ("pp", "attention_dp"):
            if getattr(pool.parallelism, key) > 1:
                raise ErrorAt(
                    f"a drafter with GPUs of its own drafts for one batch at a time, and {key} makes "
                    f"{getattr(pool.parallelism, key)} of them; set it to 1, raise tp instead, or draft a chain",
                    "parallelism",
                    key,
                )


def _stands_by(pool: Pool) -> None:
    for key in ("autoscaling", "share"):
        if pool.spare and getattr(pool, key) is not None:
            raise ErrorAt(f"cannot be combined with {key}; remove one of the two", "spare")


def _goes_on_with_fewer_ranks(pool: Pool) -> None:
    if not pool.parallelism.elastic_experts:
        return
    for key in ("encoder", "lora", "costs"):
        if getattr(pool, key) is not None:
            raise ErrorAt(f"cannot be combined with {key}; remove one of the two", "parallelism", "elastic_experts")
    if pool.studied.afd is not None:
        raise ErrorAt("cannot be combined with afd; remove one of the two", "parallelism", "elastic_experts")
    if pool.cascade_attention:
        raise ErrorAt("cannot be combined with cascade_attention; remove one", "parallelism", "elastic_experts")


_RULES = (
    _refines_a_limit,
    _rejects_new_requests,
    _holds_one_request,
    _goes_with_afd,
    _splits_steps,
    _has_a_ring,
    _divides_prompts,
    _exchanges_what_is_spared,
    _one_target_for_each_drafter,
    check_autoscaling,
    _stands_by,
    _goes_on_with_fewer_ranks,
)
