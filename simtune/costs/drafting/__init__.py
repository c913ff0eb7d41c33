"""Costs of drafting and verifying: seconds of a round, the same in integer tables, and the memory of a drafter."""

from simtune.costs.drafting.compiled_rounds import CompiledRounds
from simtune.costs.drafting.draft_memory import DraftMemory, draft_memory, drafting_pool
from simtune.costs.drafting.round_model import RoundModel

__all__ = ["CompiledRounds", "DraftMemory", "RoundModel", "draft_memory", "drafting_pool"]
