"""Batching policies besides vLLM's and transformers' own."""

from simtune.engine.policies.iteration import Orca, Sarathi
from simtune.engine.policies.layers import PriorityLayers
from simtune.engine.policies.mlfq import SkipJoinMlfq
from simtune.engine.policies.order import DualQueue, EarliestDeadlineFirst, ShortestPredictedFirst
from simtune.engine.policies.static import StaticBatching

__all__ = [
    "DualQueue",
    "EarliestDeadlineFirst",
    "Orca",
    "PriorityLayers",
    "Sarathi",
    "ShortestPredictedFirst",
    "SkipJoinMlfq",
    "StaticBatching",
]
