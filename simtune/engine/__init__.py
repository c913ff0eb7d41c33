"""Decisions of the serving engine: the requests of the next step, and the tokens of each.

Nothing here knows a clock or a cost. The simulator drives these objects with a cost model and simulated time;
a real executor drives the same objects with torch and the wall clock. A policy sees prompts, the tokens emitted so
far and the free KV blocks; it never reads `Request.output_tokens`.
"""

from simtune.engine.batch import Batch, DecodeBatch, Tally
from simtune.engine.drafting import AsyncDraftingBatch, DraftingBatch, DraftingTerms
from simtune.engine.kv import KvBlocks
from simtune.engine.policies import (
    DualQueue,
    EarliestDeadlineFirst,
    LayeredPrefill,
    Orca,
    PriorityLayers,
    Sarathi,
    SglangScheduler,
    ShortestPredictedFirst,
    SkipJoinMlfq,
    StaticBatching,
    TensorRtLlmScheduler,
    VllmV0,
)
from simtune.engine.prefix import PrefixCache, hit_rate
from simtune.engine.request import Request
from simtune.engine.scheduler import Scheduler
from simtune.engine.step import NO_PROGRESS, Chunk, Progress, Step
from simtune.engine.transformers_scheduler import TransformersFifo, TransformersPrefillFirst
from simtune.engine.vllm_scheduler import VllmFcfs, VllmPriority

POLICIES: dict[str, type[Scheduler]] = {
    "vllm-fcfs": VllmFcfs,
    "vllm-priority": VllmPriority,
    "vllm-v0": VllmV0,
    "sglang": SglangScheduler,
    "tensorrt-llm": TensorRtLlmScheduler,
    "transformers-fifo": TransformersFifo,
    "transformers-prefill-first": TransformersPrefillFirst,
    "static": StaticBatching,
    "orca": Orca,
    "sarathi": Sarathi,
    "shortest-predicted-first": ShortestPredictedFirst,
    "earliest-deadline-first": EarliestDeadlineFirst,
    "dual-queue": DualQueue,
    "skip-join-mlfq": SkipJoinMlfq,
    "priority-layers": PriorityLayers,
    "layered-prefill": LayeredPrefill,
}

__all__ = [
    "NO_PROGRESS",
    "POLICIES",
    "AsyncDraftingBatch",
    "Batch",
    "Chunk",
    "DecodeBatch",
    "DraftingBatch",
    "DraftingTerms",
    "DualQueue",
    "EarliestDeadlineFirst",
    "KvBlocks",
    "LayeredPrefill",
    "Orca",
    "PrefixCache",
    "PriorityLayers",
    "Progress",
    "Request",
    "Sarathi",
    "Scheduler",
    "SglangScheduler",
    "ShortestPredictedFirst",
    "SkipJoinMlfq",
    "StaticBatching",
    "Step",
    "Tally",
    "TensorRtLlmScheduler",
    "TransformersFifo",
    "TransformersPrefillFirst",
    "VllmFcfs",
    "VllmPriority",
    "VllmV0",
    "hit_rate",
]
