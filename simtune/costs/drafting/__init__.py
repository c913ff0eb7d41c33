"""What drafting and verifying cost: seconds of a round, the same in integer tables, and the memory a drafter takes."""

from simtune.costs.drafting.compiled_rounds import CompiledRounds
from simtune.costs.drafting.draft_memory import DraftMemory, draft_memory, drafting_pool
from simtune.costs.drafting.round_model import RoundModel

__all__ = ["CompiledRounds", "DraftMemory", "RoundModel", "draft_memory", "drafting_pool"]
