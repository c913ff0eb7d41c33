"""Checks that a model can be split over the ranks of a plan as engines split it."""

from __future__ import annotations

from simtune.errors import Infeasible
from simtune.specs.model import (
    DenseFeedForward,
    FeedForward,
    FullAttention,
    MlaAttention,
    Model,
    MoeFeedForward,
    NoAttention,
    NoFeedForward,
)
from simtune.specs.pool import Parallelism, Pool
from simtune.specs.research import Afd


def check_parallelism(model: Model, pool: Pool) -> None:
    """Raise Infeasible if vLLM would refuse to shard this model this way."""
    parallelism = pool.parallelism
    if parallelism.pp > model.num_layers:
        raise Infeasible(f"model {model.name}: pp {parallelism.pp} exceeds its {model.num_layers} layers")
    if pool.studied.afd is not None:
        _check_apart(model, parallelism, pool.studied.afd)
        return
    _check_tensor_parallelism(model, parallelism)
    _check_expert_parallelism(model, parallelism)
    if parallelism.context_ranks > 1:
        _check_context_parallelism(model, parallelism)
    if parallelism.decode_ranks > 1:
        _check_decode_ranks(model, parallelism)
    if parallelism.prompt_groups > 1:
        _check_prompt_groups(model, parallelism)


def _check_prompt_groups(model: Model, parallelism: Parallelism) -> None:
    """Raise Infeasible for layers whose windows, states or selections would have to be passed between groups."""
    if any(type(group.attention) not in (FullAttention, MlaAttention, NoAttention) for group in model.layers):
        raise Infeasible(
            f"model {model.name} with prefill_context_parallel {parallelism.prompt_groups}: groups of ranks divide "
            "prompts of full and latent attention only; leave it out"
        )


def _check_decode_ranks(model: Model, parallelism: Parallelism) -> None:
    """Raise Infeasible where vLLM refuses the size (`verify_with_parallel_config` in vllm/config/model.py): ranks share
    what they would keep several times."""
    tp, size = parallelism.tp, parallelism.decode_ranks
    where = f"model {model.name} with decode_context_parallel {size}"
    if any(type(group.attention) not in (FullAttention, MlaAttention, NoAttention) for group in model.layers):
        raise Infeasible(f"{where}: ranks share caches of full and latent attention only; leave it out")
    for group in model.layers:
        heads, kv_heads = group.attention.heads, group.attention.shared_heads
        if kv_heads and (tp // kv_heads < size or (heads // kv_heads) % size):
            most = max(1, tp // kv_heads)
            raise Infeasible(
                f"{where}: tp {tp} keeps each of the {kv_heads} KV heads {most} times, and {heads // kv_heads} heads "
                f"share one; take a size that is at most {most} and divides {heads // kv_heads}, or raise tp"
            )


def _check_apart(model: Model, parallelism: Parallelism, afd: Afd) -> None:
    """Check attention as without experts, and that every device for feed-forward blocks gets an expert."""
    where = f"model {model.name} with afd"
    _check_tensor_parallelism(model.without_feed_forward(), parallelism)
    if parallelism.pp > 1 or parallelism.context_ranks > 1:
        raise Infeasible(f"{where}: attention devices are groups of tp ranks; set pp and cp to 1")
    experts = [g.feed_forward.experts for g in model.layers if isinstance(g.feed_forward, MoeFeedForward)]
    if min(experts, default=afd.ffn_devices) < afd.ffn_devices:
        raise Infeasible(f"{where}: {afd.ffn_devices} ffn_devices need an expert each; set at most {min(experts)}")


def _check_context_parallelism(model: Model, parallelism: Parallelism) -> None:
    """Raise Infeasible for windows, states and experts: passing them from rank to rank is not modelled."""
    where = f"model {model.name} with cp {parallelism.cp}"
    if any(type(group.attention) not in (FullAttention, MlaAttention, NoAttention) for group in model.layers):
        raise Infeasible(f"{where}: ranks share sequences of full attention only; set cp to 1")
    if any(isinstance(group.feed_forward, MoeFeedForward) for group in model.layers):
        raise Infeasible(f"{where}: ranks that share a sequence are modelled for dense models only; set cp to 1")


def _check_tensor_parallelism(model: Model, parallelism: Parallelism) -> None:
    """Check that heads and feed-forward widths divide evenly; KV heads may be fewer than ranks: they are repeated."""
    tp, where = parallelism.tp, _where(model, parallelism)
    for group in model.layers:
        heads, shared = group.attention.heads, group.attention.shared_heads
        if heads % tp:
            raise Infeasible(f"{where}: tp must divide the {heads} attention heads")
        if max(shared, tp) % min(shared, tp):
            raise Infeasible(f"{where}: tp must divide the {shared} KV heads or be a multiple of their number")
        for width, ranks in _split_widths(group.feed_forward, parallelism):
            if width % ranks:
                by = "tp" if ranks == tp else f"{_of_experts(parallelism)} ({ranks})"
                raise Infeasible(f"{where}: {by} must divide the feed-forward width {width}")


def _check_expert_parallelism(model: Model, parallelism: Parallelism) -> None:
    where = _where(model, parallelism)
    experts = [g.feed_forward.experts for g in model.layers if isinstance(g.feed_forward, MoeFeedForward)]
    ranks = parallelism.tp * parallelism.expert_groups
    if parallelism.expert_parallel and min(experts, default=ranks) < ranks:
        raise Infeasible(f"{where}: expert_parallel needs an expert for every rank; use at most {min(experts)} ranks")
    if parallelism.expert_parallel and not experts:
        raise Infeasible(f"model {model.name}: expert_parallel requires a mixture of experts; set it to false")
    if parallelism.attention_dp > 1 and (not experts or parallelism.pp > 1):
        raise Infeasible(f"{where}: attention_dp requires experts and pp 1; set it to 1 and use more instances")


def _of_experts(parallelism: Parallelism) -> str:
    """Return the keys whose product is the number of ranks that share the experts."""
    groups = {"attention_dp": parallelism.attention_dp, "prefill_context_parallel": parallelism.prompt_groups}
    return " x ".join(["tp", *(key for key, number in groups.items() if number > 1)])


def _where(model: Model, parallelism: Parallelism) -> str:
    return f"model {model.name} with tp {parallelism.tp}"


def _split_widths(feed_forward: FeedForward, parallelism: Parallelism) -> list[tuple[int, int]]:
    """Return widths, and the number of ranks among which each is split."""
    tp = parallelism.tp
    if isinstance(feed_forward, DenseFeedForward):
        return [(feed_forward.intermediate_size, tp)]
    if isinstance(feed_forward, NoFeedForward):
        return []
    sliced = [] if parallelism.expert_parallel else [(feed_forward.intermediate_size, tp * parallelism.expert_groups)]
    return [*sliced, (feed_forward.shared_intermediate_size, tp)]
