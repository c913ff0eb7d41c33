"""Choice of the speculation: lengths of chains, shapes of trees, when to stop, when not to draft at all."""

from simtune.tuner.drafting.choose import Projection, RoundCost, Schedule, choose
from simtune.tuner.drafting.facts import described
from simtune.tuner.drafting.study_drafters import Draft, DraftContexts, DraftGrid, round_costs, schedule

__all__ = [
    "Draft",
    "DraftContexts",
    "DraftGrid",
    "Projection",
    "RoundCost",
    "Schedule",
    "choose",
    "described",
    "round_costs",
    "schedule",
]
