"""Pool whose memory has been checked, and the fresh engine cores of its instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simtune.costs.adapters import AdapterCosts
from simtune.costs.estimate import link_of
from simtune.costs.memory import Memory, kv_bytes_per_token
from simtune.costs.protocol import UNBOUNDED, StepCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import DraftingTerms
from simtune.engine.offloading_scheduler import OffloadingScheduler
from simtune.engine.policy_traits import Feature
from simtune.sim.adapters import give_slots
from simtune.sim.admission import AdmissionLimits
from simtune.sim.cascade import CascadeRule, attend_once
from simtune.sim.core import EngineCore, Stepping
from simtune.sim.drafting import AcceptanceSampler, Drafting, drafter_share, drafting_terms
from simtune.sim.encoding import PoolEncoder, encode_in_steps
from simtune.sim.message_gaps import MessageGaps
from simtune.sim.plan_parts import POLICY, make_policy
from simtune.sim.rank_changes import RankTerms
from simtune.sim.stepping import DpGroup, Pipeline
from simtune.sim.tier_links import TierMaker
from simtune.specs.cache_tiers import CacheTier
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.pool import Parallelism, Pool
from simtune.workload.requests import RequestStream


def extend_caches(cores: Sequence[EngineCore], maker: TierMaker) -> None:
    """Give the prefix caches of a pool's cores their tiers."""
    for core in cores:
        scheduler = core.scheduler
        if not maker.loads_ahead:
            scheduler.kv.tiers, core.fetches = maker.of_instance(core.instance)
            continue
        assert isinstance(scheduler, OffloadingScheduler), "see `simtune.sim.feasibility`"
        offloading, core.loads = maker.host_memory()
        scheduler.offload(offloading)


@dataclass(frozen=True)
class DeployedPool:
    """A pool whose memory has been checked, with its step costs compiled."""

    spec: Pool
    hardware: Hardware
    """Hardware of an instance: the pool's devices, or its share of them."""
    memory: Memory
    costs: StepCosts
    max_model_len: int
    kv_block_bytes: int
    """Bytes of one KV block, summed over all GPUs of an instance."""
    drafting: Drafting | None = None
    """Loaded parts of the pool's speculation; None if it does not speculate."""
    whole: Hardware | None = None
    """Hardware of the whole devices, of which `hardware` may be a share; None if it is `hardware` itself."""
    cascade: CascadeRule | None = None
    """Rule by which steps attend once to what all contexts begin with; None if none does."""
    encoder: PoolEncoder | None = None
    """Vision encoder in the steps; None if the pool encodes nothing."""
    adapters: AdapterCosts | None = None
    """Costs of LoRA adapters; None without slots for any."""
    idle_devices: int = 0
    """GPUs of an instance beside those of `spec`: replicas of a target that would only make verdicts later."""

    by_ranks: Mapping[int, RankTerms] = field(default_factory=dict)
    """Terms of every number of ranks that events or autoscaling give instances."""

    @property
    def num_cores(self) -> int:
        """Number of engine cores in all instances."""
        return self.spec.instances * self.cores_each

    @property
    def most_cores(self) -> int:
        """Largest number of engine cores that serve at a time: of an autoscaled pool those of `max_instances`."""
        scaling = self.spec.autoscaling
        most = None if scaling is None else scaling.max_instances
        return self.num_cores if most is None else most * self.cores_each

    @property
    def cores_each(self) -> int:
        """Engine cores per instance: its virtual engines, or its groups of ranks under data-parallel attention."""
        return self.spec.parallelism.pp * self.spec.parallelism.attention_dp

    @property
    def core_seats(self) -> int:
        """Requests that one core of an instance runs at a time."""
        share = drafter_share(self.spec)
        limits = self.spec.batching.max_num_active_seqs, None if share is None else share.most_requests
        return min(self.memory.seats, *(limit or UNBOUNDED for limit in limits)) // self.spec.parallelism.pp

    @property
    def chunks_follow(self) -> bool:
        """True if chunks of one prompt follow one another through the stages of a pipeline."""
        setting = self.spec.batching.chunk_pipeline
        follow = POLICY.find(self.spec.batching.policy).chunks_follow if setting is None else setting != "one"
        return follow and self.spec.parallelism.pp > 1

    def speculation(self, stream: RequestStream, seed: int) -> DraftingTerms | None:
        """Return the drafting terms of the pool's schedulers, with the accepted drafts of each request of a stream;
        None if the pool does not speculate."""
        if self.spec.speculation is None:
            return None
        assert self.drafting is not None
        sampler = AcceptanceSampler(self.spec.speculation.scheme, self.drafting.acceptance, stream, seed)
        return drafting_terms(self.spec.speculation, sampler, drafter_share(self.spec))

    def cores(
        self, instances: int, hash_block_tokens: int | None, speculation: DraftingTerms | None = None
    ) -> list[EngineCore]:
        """Return fresh cores of the first `instances` instances, ordered so that round robin goes over instances first.

        An instance with pp pipeline stages runs pp cores ("virtual engines") that share the stages, each with its own
        batch, its share of the seats and of the KV blocks; a core's step takes the time of all stages. With
        data-parallel attention each group of tp ranks is a core with seats and blocks of its own; all step together.
        """
        settings = self._settings(hash_block_tokens, speculation)
        stepping = [self._stepping() for _ in range(instances)]
        cores = [
            EngineCore(
                make_policy(self.spec.batching, settings),
                self.costs,
                instance,
                self.spec.name,
                stepping=stepping[instance],
                swap=self._swap_ticks,
            )
            for _ in range(self.cores_each)
            for instance in range(instances)
        ]
        if self.spec.kv_cache.tiers:
            block_size, shape = self.spec.kv_cache.block_size, (instances, self.cores_each)
            maker = TierMaker(self.tiers, self._copied_bytes, block_size, *shape)
            extend_caches(cores, maker)
        if self.cascade is not None:
            attend_once(cores, self.costs, self.cascade)
        if self.encoder is not None:
            encode_in_steps(cores, self.encoder.costs)
        if self.adapters is not None:
            give_slots(cores, self.spec, self.adapters)
        if self.spec.queue_limits:
            admission = [AdmissionLimits(self.spec.batching) for _ in range(instances)]
            for core in cores:
                core.admission = admission[core.instance]
        if self.spec.message_tokens > 1 and speculation is None:
            for core in cores:
                core.gaps = MessageGaps(self.spec.message_tokens)
        return cores

    @property
    def tiers(self) -> list[CacheTier]:
        """Tiers below the prefix cache with their sizes in bytes and the rates of their links."""
        devices = self.spec.model_devices
        cache_bytes = self.memory.num_blocks * self.spec.parallelism.attention_dp * self._copied_bytes
        resolved = []
        for tier in self.spec.kv_cache.tiers or ():
            rate = tier.bytes_per_s or link_of(self.hardware, "host").bytes_per_s * devices
            size = {"bytes": tier.size(devices, cache_bytes), "bytes_per_device": None, "device_ratio": None}
            resolved.append(tier.model_copy(update={**size, "bytes_per_s": rate}))
        return resolved

    @property
    def _copied_bytes(self) -> int:
        """Bytes that a KV block takes in a tier: a copy for each group of ranks that divide prompts (vLLM 0.33:
        `num_copies` in vllm/v1/kv_offload/cpu/spec.py)."""
        return self.kv_block_bytes * self.spec.parallelism.prompt_groups

    def _stepping(self) -> Stepping:
        """Return a new object that shares an instance's GPUs among its cores."""
        parallelism = self.spec.parallelism
        if parallelism.pp > 1:
            return Pipeline(parallelism.pp, chunks_follow=self.chunks_follow)
        return DpGroup() if parallelism.attention_dp > 1 else Stepping()

    def _settings(self, hash_block_tokens: int | None, speculation: DraftingTerms | None) -> dict[str, Any]:
        """Return the arguments of the pool's policy: those of every policy, and those of the features that it
        offers."""
        pool, batching, kv_cache = self.spec, self.spec.batching, self.spec.kv_cache
        num_blocks = self.memory.num_blocks // pool.parallelism.pp
        # A step can be scheduled ahead only if its number of drafts is known before they are made.
        ahead = pool.schedules_async and (pool.speculation is None or pool.speculation.scheme.counts_ahead)
        margin = batching.safety_margin
        of_features: dict[Feature, dict[str, Any]] = {
            "async_scheduling": {"async_scheduling": ahead},
            "dynamic_chunks": {"linear_tokens": self._linear_tokens},
            "active_seqs": {},
            "cascade_attention": {},
            "images": {} if self.encoder is None else {"encoder": self.encoder.limits},
            "lora": {},
            "long_prefills": {
                "long_prefill_token_threshold": batching.long_prefill_token_threshold or 0,
                "long_prefill_token_threshold_adaptive": bool(batching.long_prefill_token_threshold_adaptive),
            },
            "prefill_interval": {
                "prefill_schedule_interval": batching.prefill_schedule_interval or 1,
                "prefill_steps_aligned": pool.parallelism.attention_dp > 1,
            },
            "prefix_caching": {"prefix_caching": kv_cache.prefix_caching, "hash_block_tokens": hash_block_tokens},
            "reserve_full_isl": {"scheduler_reserve_full_isl": batching.scheduler_reserve_full_isl is not False},
            "safety_margin": {} if margin is None else {"safety_margin": margin},
            "self_preemption": {"self_preemption_ends_step": batching.self_preemption_ends_step is not False},
            "speculation": {"speculation": speculation},
            "swap": {"preemption": kv_cache.preemption},
            "watermark": {"watermark_blocks": int(kv_cache.watermark * num_blocks)},
        }
        settings: dict[str, Any] = {
            "num_blocks": num_blocks,
            "block_size": kv_cache.block_size,
            "max_num_seqs": self.core_seats,
            "max_num_batched_tokens": batching.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "chunked_prefill": batching.chunked_prefill,
        }
        for feature in POLICY.find(batching.policy).offers:
            settings |= of_features[feature]
        return settings

    @property
    def _linear_tokens(self) -> float | None:
        """Length of a prompt at which the part of its time that grows by its square reaches the part that grows by its
        length, by the pool's step costs; None without dynamic chunks, or if no part grows by the square."""
        if self.spec.batching.chunk_pipeline != "dynamic":
            return None
        # SGLang fits prompts up to 1.25 first chunks as it starts; costs are tabled up to one.
        tokens = np.unique(np.linspace(1, self.spec.batching.max_num_batched_tokens, 64).astype(int))
        ticks = [self.costs.mixed(0, 0, [(0, int(length))], 1) for length in tokens]
        square, linear, _ = np.polyfit(tokens, ticks, 2)
        return float(linear / square) if square > 0 and linear > 0 else None

    @property
    def _swap_ticks(self) -> int:
        """Ticks to move one KV block to or from host memory; 0 if the pool does not swap."""
        if self.spec.kv_cache.preemption != "swap":
            return 0
        host = link_of(self.hardware, "host").bytes_per_s * self.spec.model_devices
        return round(self.kv_block_bytes / host * TICKS_PER_SECOND)


def kv_block_bytes(model: Model, pool: Pool) -> int:
    """Return the bytes of one KV block of a model, summed over all GPUs of an instance."""
    kv_dtype = pool.kv_cache.dtype or model.kv_dtype or model.dtype
    return round(pool.kv_cache.block_size * kv_bytes_per_token(model, Parallelism(), 0, kv_dtype))
