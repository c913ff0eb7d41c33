"""Ranks that leave and join an instance with data-parallel attention, whose other ranks go on.

A rank is a core of its instance's group. At a change the step that is under way is lost on all ranks, since they
exchange tokens in it; requests of ranks that leave are computed again on others. Nothing is computed during the pause
in which experts are placed anew. Then the ranks that stay compute the same step again, at the costs of as many ranks
as there are now, and go on. SGLang does so after a failure (`_maybe_rebalance_after_rank_fault` in
srt/model_executor/model_runner.py of 0.5.23); vLLM lets the step end before its pause (`pause_scheduler_async` in
vllm/v1/engine/core_client.py of 0.32), which is at most one step earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from simtune.costs.compiled import CompiledCosts
from simtune.costs.drafting import CompiledRounds
from simtune.costs.elastic_experts import placing_s, with_ranks
from simtune.costs.protocol import ElasticCosts, StepCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.errors import Infeasible
from simtune.sim.availability import Change, Regroup
from simtune.sim.plan_parts import OwnCosts
from simtune.sim.stepping import DpGroup
from simtune.specs.plan_events import Event, rank_changes

if TYPE_CHECKING:
    from simtune.sim.core import EngineCore
    from simtune.specs.hardware import Hardware
    from simtune.specs.model import Model
    from simtune.specs.pool import Pool


class RankTerms(NamedTuple):
    """Terms on which an instance goes on with a number of ranks."""

    costs: StepCosts
    pause: int
    """Ticks in which experts are placed anew; 0 if every event states its pause."""


def terms_by_ranks(
    events: Sequence[Event],
    pool: Pool,
    model: Model,
    hardware: Hardware,
    costs: StepCosts,
    compiled: Callable[[Pool], StepCosts],
) -> dict[int, RankTerms]:
    """Return the terms of every number of ranks that events or autoscaling give instances of a pool. `costs` are those
    of all ranks, `compiled` returns the costs by operators of a pool.

    Raises Infeasible if the ranks that stay have no room for all experts, or if `costs` come from outside and are those
    of one number of ranks.
    """
    changes = rank_changes(events, pool)
    paused = {change.ranks for change in changes if change.pause_s is None}
    numbers = {change.ranks for change in changes}
    scaling, stated_s = pool.autoscaling, 0.0
    if scaling is not None and scaling.min_ranks is not None:
        numbers = {*range(scaling.min_ranks, pool.parallelism.attention_dp + 1)}
        stated_s = scaling.pause_s or 0.0
        paused = numbers if scaling.pause_s is None and len(numbers) > 1 else set()
    terms = {}
    for ranks in sorted(numbers):
        of_ranks = with_ranks(pool, model, ranks)
        if ranks == pool.parallelism.attention_dp:
            step_costs = costs
        elif isinstance(costs, (CompiledCosts, CompiledRounds)):
            step_costs = compiled(of_ranks)
        else:
            step_costs = _from_outside(costs, pool, ranks)
        pause_s = placing_s(of_ranks, model, hardware) if ranks in paused else stated_s
        terms[ranks] = RankTerms(step_costs, round(pause_s * TICKS_PER_SECOND))
    return terms


def _from_outside(costs: StepCosts, pool: Pool, ranks: int) -> StepCosts:
    """Return step costs from outside for a number of ranks."""
    outside = costs.own if isinstance(costs, OwnCosts) else costs
    if not isinstance(outside, ElasticCosts):
        raise Infeasible(
            f"pool {pool.name}: events or autoscaling change the number of ranks, and step costs from outside are "
            f"those of {pool.parallelism.attention_dp} ranks; use costs by operators, let yours have a method "
            "with_ranks, or remove the events or the autoscaling"
        )
    return OwnCosts(outside.with_ranks(ranks))


def changes_of_ranks(
    events: Sequence[Event], pool: Pool, terms: Mapping[int, RankTerms], cores: Sequence[EngineCore]
) -> Iterator[Change]:
    """Yield the changes of a pool's cores by events of its ranks: ranks that leave go at once, those that join accept
    requests after the pause."""
    coming: dict[EngineCore, tuple[int, list[EngineCore]]] = {}
    changes: list[Change] = []
    for change in rank_changes(events, pool):
        ranks = [core for core in cores if core.instance == change.instance]
        group, tick = ranks[0].stepping, round(change.at_s * TICKS_PER_SECOND)
        assert isinstance(group, DpGroup)
        pause = terms[change.ranks].pause if change.pause_s is None else round(change.pause_s * TICKS_PER_SECOND)
        leaving, joining = ([ranks[rank] for rank in numbers] for numbers in (change.leaving, change.joining))
        for core in leaving:
            # It leaves again before it was there.
            if core in coming and coming[core][0] > tick:
                coming.pop(core)[1].remove(core)
        regroup = Regroup(group, change.ranks, tick + pause, terms[change.ranks].costs)
        changes.append(Change(tick, leaving, up=False, lost=True, regroup=regroup))
        changes.append(Change(tick + pause, joining, up=True, regroup=regroup))
        coming |= dict.fromkeys(joining, (tick + pause, joining))
    yield from changes
