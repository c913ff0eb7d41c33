"""Drafting terms of a pool's schedulers, and the check that its engine could draft like that."""

from __future__ import annotations

from dataclasses import dataclass

from simtune.engine import DraftingTerms
from simtune.errors import Infeasible
from simtune.sim.drafting.draft_lengths import SharedBudget, StopLengths
from simtune.sim.drafting.sampler import AcceptanceSampler
from simtune.specs.acceptance import Acceptance
from simtune.specs.draft_rules import DraftShare, draft_share
from simtune.specs.model import Model
from simtune.specs.pool import Pool
from simtune.specs.speculation import Speculation


@dataclass(frozen=True)
class Drafting:
    """Loaded parts that a pool's speculation names."""

    acceptance: Acceptance
    model: Model | None = None
    """The draft model; None if the drafter has none."""


def drafter_share(pool: Pool) -> DraftShare | None:
    """Return the share of the engine that the drafter of a pool takes; None if the pool does not speculate."""
    if pool.speculation is None:
        return None
    batching, transfers = pool.batching, pool.role != "mixed" or bool(pool.kv_cache.tiers)
    drafter, drafts = pool.speculation.drafter, pool.speculation.scheme.shape.drafts
    budget = batching.max_num_batched_tokens
    return draft_share(drafter, drafts, batching.draft_rules, budget=budget, transfers=transfers)


def drafting_terms(spec: Speculation, sampler: AcceptanceSampler, share: DraftShare | None = None) -> DraftingTerms:
    """Return the drafting terms of a scheduler for a pool's speculation; as in vLLM 0.32 unless `share` is given."""
    scheme, drafter, shape = spec.scheme, spec.drafter, spec.scheme.shape
    if share is None:
        share = DraftShare(drafter.extra_slots(shape.drafts), drafter.drops_last_hit)
    lengths = shares = None
    if scheme.stops_below is not None and not sampler.varies:
        lengths = StopLengths(sampler.survival, scheme.stops_below)
    if scheme.batch_tokens is not None:
        shares = SharedBudget(sampler.survival, scheme.batch_tokens)
    return DraftingTerms(
        # 0 would disable drafting.
        max_drafts=max(int(shape.overlapped), shape.drafts),
        accepted=sampler,
        tokens_after=sampler.tokens_after,
        laid_out=sampler.laid_out,
        drafts=scheme.tokens_for if scheme.varies_with_batch else None,
        lookahead=drafter.lookahead(shape.ahead),
        extra_slots=share.extra_slots,
        depth=shape.depth if shape.tree or shape.overlapped else None,
        stops=sampler.stops if sampler.varies or shape.overlapped else None,
        lengths=lengths,
        shares=shares,
        drops_last_hit=share.drops_last_hit,
        hashes_next=share.hashes_next,
        names_verified=share.names_verified,
    )


def check_drafting(pool: Pool, drafting: Drafting, max_model_len: int) -> None:
    """Raise Infeasible if the engine of a pool that speculates could not draft like this."""
    spec, budget = pool.speculation, pool.batching.max_num_batched_tokens
    assert spec is not None
    shape, most_depth = spec.scheme.shape, spec.drafter.most_depth
    if most_depth is not None and shape.depth > most_depth:
        heads = f"{most_depth} {spec.drafter.label.capitalize()} heads"
        raise Infeasible(f"{heads} cannot draft {shape.depth} tokens deep; draft less deep")
    share = drafter_share(pool)
    assert share is not None
    slots = share.extra_slots
    # A round verifies the certain token and all drafts, and the engine reserves slots for the drafter besides.
    needed_tokens = 1 + shape.drafts + slots
    if share.most_requests is not None:
        # vLLM refuses a budget that no more than holds the block of one request.
        needed_tokens = max(needed_tokens, 1 + spec.drafter.lookahead(shape.drafts))
    if needed_tokens > budget:
        shape_name = "tree" if shape.tree else "chain"
        raise Infeasible(
            f"one sequence with a {shape_name} of {shape.drafts} drafts takes {needed_tokens} tokens of a step, and "
            f"max_num_batched_tokens is {budget}; draft less, or raise it"
        )
    if share.most_requests is not None and share.most_requests < pool.parallelism.pp:
        raise Infeasible(
            f"max_num_batched_tokens ({budget}) has room for the drafts of {share.most_requests} requests, and pp "
            f"({pool.parallelism.pp}) requests must run at a time; draft less, or raise it"
        )
    if shape.replicas > 1:
        needed_tokens = pool.batching.max_num_seqs * (shape.depth + slots)
        if needed_tokens > budget:
            raise Infeasible(
                f"replicas verify a window of every sequence at a time, {needed_tokens} tokens with max_num_seqs "
                f"{pool.batching.max_num_seqs}, and max_num_batched_tokens is {budget}; raise it, or lower "
                "max_num_seqs or the scheme's tokens"
            )
        if pool.role != "mixed":
            raise Infeasible(
                f"pool {pool.name}: every replica of the target needs the prompt's keys and values, and a link brings "
                "them to one; make the role mixed, take one replica, or draft a chain"
            )
    if drafting.model is not None and drafting.model.max_position < max_model_len:
        raise Infeasible(
            f"draft model {drafting.model.name} takes {drafting.model.max_position} tokens, less than max_model_len "
            f"({max_model_len}); lower that, or take another draft model"
        )
