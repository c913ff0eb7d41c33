"""Feasibility of a pool: check that an engine could run it as the plan states, and find its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simtune.costs.drafting import DraftMemory, draft_memory, drafting_pool
from simtune.costs.memory import GIB, Memory, kv_capacity
from simtune.costs.predict import Profile
from simtune.costs.protocol import UNBOUNDED
from simtune.engine import POLICIES
from simtune.engine.policy_traits import Feature
from simtune.errors import Infeasible
from simtune.sim import adapter_rules, cascade, encoding
from simtune.sim.drafting import Drafting, check_drafting
from simtune.sim.plan_parts import POLICY
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model, MoeFeedForward
from simtune.specs.pool import Batching, Pool

FIXED_SCHEMES = ("chain", "static_tree", "dynamic_tree")
"""Schemes that draft equally much in every round."""


def check(pool: Pool, model: Model, hardware: Hardware, drafting: Drafting | None = None) -> Memory:
    """Return the memory of one instance of a pool, including a drafter's. Raise Infeasible if the engine would refuse
    the pool's settings."""
    max_model_len = pool.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise Infeasible(
            f"max_model_len ({max_model_len}) exceeds the longest context of {model.name} ({model.max_position})"
        )
    kinds = (cascade.refusals, encoding.refusals, adapter_rules.refusals)
    for refusal in (*_refusals(pool), *(refusal for refusals in kinds for refusal in refusals(pool, model))):
        raise Infeasible(f"pool {pool.name}: {refusal}")
    _check_seats_and_budget(pool, max_model_len)
    _check_weights(pool, model, hardware)
    memory = _memory(pool, model, hardware, drafting, max_model_len)
    pp = pool.parallelism.pp
    if (pool.batching.max_num_active_seqs or pp) < pp:
        raise Infeasible(f"max_num_active_seqs ({pool.batching.max_num_active_seqs}) must be at least pp ({pp})")
    if memory.seats < pp:
        raise Infeasible(
            f"memory holds the states of {memory.seats} sequences and pp ({pp}) sequences must fit; raise tp"
        )
    blocks, needed_blocks = memory.num_blocks // pp, -(-max_model_len // pool.kv_cache.block_size)
    if blocks < needed_blocks:
        missing_gib = (needed_blocks - blocks) * pool.kv_cache.block_size * memory.kv_bytes_per_token * pp / GIB
        raise Infeasible(
            f"{model.name} fits {hardware.name} with tp={pool.parallelism.tp} pp={pp}, but its KV cache holds {blocks} "
            f"blocks and one request of max_model_len ({max_model_len}) needs {needed_blocks}: {missing_gib:.1f} GiB "
            "per device are missing; raise tp or pp, or lower max_model_len"
        )
    return memory


def _refusals(pool: Pool) -> Iterator[str]:
    """Yield a message for each setting that the pool's policy does not offer, alone or in this combination."""
    batching, kv_cache, name = pool.batching, pool.kv_cache, pool.batching.policy
    policy = POLICY.find(name)
    requested: dict[Feature, tuple[str, bool]] = {
        "prefix_caching": ("prefix_caching", kv_cache.prefix_caching),
        "swap": ("swap", kv_cache.preemption == "swap"),
        "dynamic_chunks": ("chunk_pipeline: dynamic", batching.chunk_pipeline == "dynamic"),
        "speculation": ("speculation", pool.speculation is not None),
        "cascade_attention": ("cascade_attention", bool(pool.cascade_attention)),
        "lora": ("lora", pool.lora is not None),
        "safety_margin": ("safety_margin", batching.safety_margin is not None),
        "long_prefills": ("long_prefill_token_threshold", batching.long_prefill_token_threshold is not None),
        "prefill_interval": ("prefill_schedule_interval", batching.prefill_schedule_interval is not None),
        "active_seqs": ("max_num_active_seqs", batching.max_num_active_seqs is not None),
        "images": ("encoder", pool.encoder is not None),
        "reserve_full_isl": ("scheduler_reserve_full_isl", batching.scheduler_reserve_full_isl is not None),
    }
    for feature, (key, setting) in requested.items():
        if setting and feature not in policy.offers:
            why = f": {policy.lacks[feature]}" if feature in policy.lacks else ""
            yield f"policy {name} has no {key}{why}; leave it out, or choose {_offering(feature)}"
    yield from _refused_drafts(pool)
    sigma_unless_given = Batching.model_fields["prediction_sigma"].default
    if "predicted_tokens" not in policy.reads and batching.prediction_sigma != sigma_unless_given:
        yield f"policy {name} predicts no output lengths; leave prediction_sigma out, or choose {_predicting()}"
    yield from _refused_caches(pool)
    if pool.role == "decode" and not policy.takes_over:
        yield f"policy {name} forms its batches of prompts; a decode pool needs another policy"
    if not batching.chunked_prefill and policy.cuts_prompts == "always":
        yield f"policy {name} always cuts prompts at the token budget; leave chunked_prefill out"
    if kv_cache.watermark and "watermark" not in policy.offers:
        instead = "keeps blocks free by safety_margin" if "safety_margin" in policy.offers else "has no watermark"
        yield f"policy {name} {instead}; leave kv_cache.watermark out"


def _refused_caches(pool: Pool) -> Iterator[str]:
    """Yield a message for each part of a prefix cache that does not go with the pool's policy or with another part."""
    kv_cache, name = pool.kv_cache, pool.batching.policy
    if kv_cache.prefix_caching and kv_cache.preemption == "swap":
        yield "prefix_caching and preemption by swap do not go together; choose one"
    if kv_cache.tiers and not POLICY.find(name).extends_cache:
        yield f"policy {name} has no tiers below its prefix cache; leave kv_cache.tiers out"
    elif any(tier.fetched == "ahead" for tier in kv_cache.tiers or ()):
        yield from _refused_ahead(pool)


def _refused_ahead(pool: Pool) -> Iterator[str]:
    """Yield a message for each part of a pool that does not go with a tier from which requests fetch ahead."""
    if not POLICY.find(pool.batching.policy).loads_ahead:
        yield f"policy {pool.batching.policy} fetches within steps; set fetched of the tier to before or beside"
    for part in ("lora", "encoder"):
        if getattr(pool, part) is not None:
            yield f"{part} and a tier with fetched: ahead are mutually exclusive; set fetched to before"


def _refused_drafts(pool: Pool) -> Iterator[str]:
    """Yield a message if the pool's policy cannot draft as its scheme does."""
    if pool.speculation is None or POLICY.find(pool.batching.policy).drafts_vary:
        return
    if pool.speculation.scheme.kind not in FIXED_SCHEMES:
        name, schemes = pool.batching.policy, ", ".join(FIXED_SCHEMES)
        yield f"policy {name} drafts equally much in every round; choose scheme {schemes}"


def _offering(feature: Feature) -> str:
    """Return the built-in policies that offer a feature."""
    return " or ".join(name for name, policy in POLICIES.items() if feature in policy.offers)


def _predicting() -> str:
    """Return the built-in policies that use predicted output lengths."""
    return " or ".join(name for name, policy in POLICIES.items() if "predicted_tokens" in policy.reads)


def _check_seats_and_budget(pool: Pool, max_model_len: int) -> None:
    batching, pp = pool.batching, pool.parallelism.pp
    if batching.max_num_seqs < pp:
        raise Infeasible(f"max_num_seqs ({batching.max_num_seqs}) must be at least pp ({pp})")
    if batching.max_num_batched_tokens < batching.max_num_seqs:
        raise Infeasible(
            f"max_num_batched_tokens ({batching.max_num_batched_tokens}) must be at least max_num_seqs "
            f"({batching.max_num_seqs}); vLLM refuses it too"
        )
    policy = POLICY.find(batching.policy)
    never = policy.cuts_prompts == "never"
    prompt_in_one_step = (never or not batching.chunked_prefill) and policy.recomputes_with(batching.options or {})
    if prompt_in_one_step and batching.max_num_batched_tokens < max_model_len:
        why = f"policy {batching.policy} never cuts prompts: " if never else "without chunked prefill "
        raise Infeasible(
            f"{why}max_num_batched_tokens ({batching.max_num_batched_tokens}) must be at least max_model_len "
            f"({max_model_len})"
        )


def _check_weights(pool: Pool, model: Model, hardware: Hardware) -> None:
    """Check quantised weights: an engine quantises a 16- or 32-bit checkpoint, to a type that the device has kernels
    for."""
    served = model.with_weights(pool.weight_dtype)
    if served is model:
        return
    if model.layer_dtypes != {model.dtype}:
        raise Infeasible(
            f"pool {pool.name}: weight_dtype {pool.weight_dtype}: the checkpoint of {model.name} is quantised already "
            f"({', '.join(sorted(model.layer_dtypes))}); leave weight_dtype out, or name another checkpoint as model"
        )
    profile = Profile(hardware)
    profile.predictor("gemm", served.weight_dtype)
    if any(isinstance(group.feed_forward, MoeFeedForward) for group in served.layers):
        profile.predictor("moe", served.dtype_of("experts"))


def _memory(pool: Pool, model: Model, hardware: Hardware, drafting: Drafting | None, max_model_len: int) -> Memory:
    """Return the memory of an instance; a drafter on separate GPUs limits the blocks, any other one uses the target's
    memory."""
    extra, most = DraftMemory(0.0, 0.0), UNBOUNDED
    if pool.speculation is not None:
        if drafting is None:
            raise ValueError(f"pool {pool.name} speculates: what its speculation names must be given")
        check_drafting(pool, drafting, max_model_len)
        extra = draft_memory(pool.speculation.drafter, model, pool, drafting.model)
        if pool.devices > pool.model_devices:
            # The weights and KV cache of a drafter on separate GPUs take nothing of the target's memory.
            most, extra = _alone(drafting.model, pool, hardware).num_blocks, DraftMemory(0.0, 0.0)
    memory = kv_capacity(model, hardware, pool, *extra)
    return replace(memory, num_blocks=min(memory.num_blocks, most))


def _alone(draft: Model | None, pool: Pool, hardware: Hardware) -> Memory:
    """Return the memory of the pool's draft model on separate devices."""
    assert draft is not None
    assert pool.speculation is not None
    its_own = drafting_pool(pool.speculation.drafter, pool)
    return kv_capacity(draft, hardware, its_own.model_copy(update={"speculation": None}))
