"""The serving engine's own decisions: which requests get how many tokens in the next step.

Nothing here knows a clock or a cost. The simulator drives these objects with a cost model and simulated time;
a real executor drives the same objects with torch and the wall clock. A policy sees prompts, the tokens emitted so
far and the free KV blocks; it never reads `Request.output_tokens`.
"""

from simtune.engine.batch import DecodeBatch
from simtune.engine.kv import KvBlocks
from simtune.engine.request import Request
from simtune.engine.scheduler import Chunk, Progress, Scheduler, Step
from simtune.engine.vllm import VllmFcfs

POLICIES: dict[str, type[Scheduler]] = {"vllm-fcfs": VllmFcfs}

__all__ = [
    "POLICIES",
    "Chunk",
    "DecodeBatch",
    "KvBlocks",
    "Progress",
    "Request",
    "Scheduler",
    "Step",
    "VllmFcfs",
]
