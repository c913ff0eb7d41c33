"""Batches whose members decode with drafts."""

from simtune.engine.drafting.asynchronous import AsyncDraftingBatch
from simtune.engine.drafting.drafting_batch import DraftingBatch
from simtune.engine.drafting.needs import DraftNeeds
from simtune.engine.drafting.terms import DraftingTerms

__all__ = ["AsyncDraftingBatch", "DraftNeeds", "DraftingBatch", "DraftingTerms"]
