"""Costs of drafting and verifying: seconds of a round, the same in integer tables, and the memory of a drafter."""

from simtune.costs.drafting.compiled import CompiledRounds
from simtune.costs.drafting.memory import DraftMemory, draft_memory, drafting_pool
from simtune.costs.drafting.model import RoundModel

__all__ = ["CompiledRounds", "DraftMemory", "RoundModel", "draft_memory", "drafting_pool"]
