"""Traits that a batching policy states on its class: what a plan may ask of it, and what bounds may count on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypedDict

from simtune.engine.kv import KvBlocks

Feature = Literal[
    "active_seqs",
    "async_scheduling",
    "cascade_attention",
    "dynamic_chunks",
    "images",
    "long_prefills",
    "lora",
    "prefill_interval",
    "prefix_caching",
    "reserve_full_isl",
    "safety_margin",
    "self_preemption",
    "speculation",
    "swap",
    "watermark",
]
"""Features of a policy that a plan may ask for."""
SETTINGS_OF: dict[Feature, frozenset[str]] = {
    "active_seqs": frozenset(),
    "async_scheduling": frozenset({"async_scheduling"}),
    "cascade_attention": frozenset(),
    "dynamic_chunks": frozenset({"linear_tokens"}),
    "images": frozenset(),
    "long_prefills": frozenset({"long_prefill_token_threshold", "long_prefill_token_threshold_adaptive"}),
    "lora": frozenset(),
    "prefill_interval": frozenset({"prefill_schedule_interval", "prefill_steps_aligned"}),
    "prefix_caching": frozenset({"prefix_caching", "hash_block_tokens"}),
    "reserve_full_isl": frozenset({"scheduler_reserve_full_isl"}),
    "safety_margin": frozenset({"safety_margin"}),
    "self_preemption": frozenset({"self_preemption_ends_step"}),
    "speculation": frozenset({"speculation"}),
    "swap": frozenset({"preemption"}),
    "watermark": frozenset({"watermark_blocks"}),
}
"""Settings that are passed to a policy that offers a feature."""
Hint = Literal["deadline", "predicted_tokens"]
"""Fields of a request that are filled in for policies that read them."""


class Settings(TypedDict, total=False):
    """Settings of every policy; see `simtune.engine.scheduler.Scheduler`."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool
    watermark_blocks: int


class PolicyTraits:
    """Traits of a policy, as class attributes that a derived policy may state anew."""

    offers: ClassVar[frozenset[Feature]] = frozenset({"watermark"})
    lacks: ClassVar[Mapping[Feature, str]] = {}
    """Reasons why the policy cannot have features that it does not offer, for the message that refuses them."""
    cuts_prompts: ClassVar[Literal["always", "if asked", "never"]] = "if asked"
    """Condition for spreading prompts over steps: if `chunked_prefill` is set, always, or never."""
    reads: ClassVar[frozenset[Hint]] = frozenset()
    drafts_vary: ClassVar[bool] = False
    """True if the policy, with drafts, has schemes whose number of drafts differs between rounds."""
    takes_over: ClassVar[bool] = True
    """True if the policy can serve a decode pool: `expect` accepts requests whose prompt is computed elsewhere."""
    extends_cache: ClassVar[bool] = True
    """True if the policy's prefix cache, if it offers one, can have tiers below it (`KvBlocks.tiers`)."""
    loads_ahead: ClassVar[bool] = False
    """True if requests can wait for blocks from host memory before they are admitted (`simtune.engine.offloading`)."""
    chunks_follow: ClassVar[bool] = False
    """True if the policy's engine, over a pipeline, schedules the next chunk of a prompt as soon as the last one has
    left the first stage, unless a plan sets `chunk_pipeline`."""
    decodes_followed: ClassVar[bool] = False
    """True if such chunks may also follow a step that has decodes: see `simtune.engine.following`."""
    first_come: ClassVar[bool] = False
    """True if first tokens come in the order in which requests were added, those of one step at once, and no request is
    admitted while a preempted one waits; unless a `long_prefill_token_threshold` or a `prefill_schedule_interval` lets
    short prompts overtake. Not inherited: a derived policy may have another order."""
    recomputes: bool = True
    """True if a request may lose its blocks and compute all its tokens again, in one step without chunked prefill."""

    @classmethod
    def recomputes_with(cls, options: Mapping[str, Any]) -> bool:
        """Return `recomputes` of a scheduler with these options."""
        return cls.recomputes

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.first_come = vars(cls).get("first_come", False)

    @classmethod
    def settings(cls) -> frozenset[str]:
        """Return the names of the settings that a plan passes to the constructor, besides the policy's own options."""
        return frozenset(Settings.__annotations__).union(*(SETTINGS_OF[feature] for feature in cls.offers))

    def check(
        self, kv: KvBlocks, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, chunked_prefill: bool
    ) -> None:
        """Raise ValueError for settings with which an admitted request could wait forever."""
        if kv.blocks_for(max_model_len) > kv.total:
            raise ValueError(
                f"one request of max_model_len ({max_model_len}) needs {kv.blocks_for(max_model_len)} KV blocks "
                f"of {kv.block_size} tokens; there are {kv.total}"
            )
        rule = f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least"
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"{rule} max_num_seqs ({max_num_seqs})")
        if not chunked_prefill and self.recomputes and max_num_batched_tokens < max_model_len:
            raise ValueError(f"without chunked prefill {rule} max_model_len ({max_model_len})")
