"""Batching policies besides vLLM's and transformers' own."""

from simtune.engine.policies.iteration_level import Orca, Sarathi
from simtune.engine.policies.layer_preemption import PriorityLayers
from simtune.engine.policies.layered import LayeredPrefill
from simtune.engine.policies.mlfq import SkipJoinMlfq
from simtune.engine.policies.order import DualQueue, EarliestDeadlineFirst, ShortestPredictedFirst
from simtune.engine.policies.sglang import SglangScheduler
from simtune.engine.policies.static import StaticBatching
from simtune.engine.policies.tensorrt_llm import TensorRtLlmScheduler
from simtune.engine.policies.vllm_v0 import VllmV0

__all__ = [
    "DualQueue",
    "EarliestDeadlineFirst",
    "LayeredPrefill",
    "Orca",
    "PriorityLayers",
    "Sarathi",
    "SglangScheduler",
    "ShortestPredictedFirst",
    "SkipJoinMlfq",
    "StaticBatching",
    "TensorRtLlmScheduler",
    "VllmV0",
]
