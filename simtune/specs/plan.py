"""Plan: a deployment with every knob set. `optimize` writes it, `simulate` and `validate` read it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from simtune.specs.base import Count, Name, Part, Seq, Spec

KvDtype = Literal["fp32", "bf16", "fp16", "fp8", "int8"]


class Parallelism(Part):
    """GPUs of one instance: tp * pp."""

    tp: Count = 1
    pp: Count = 1
    expert_parallel: bool = Field(False, description="whole experts on each of the tp ranks, instead of their slices")

    @property
    def devices(self) -> int:
        return self.tp * self.pp


class Batching(Part):
    """Continuous batching as vLLM names it."""

    policy: Literal["vllm-fcfs"] = "vllm-fcfs"
    max_num_seqs: Count
    max_num_batched_tokens: Count
    chunked_prefill: bool = True


class KvCache(Part):
    """The paged KV cache. `num_blocks` overrides what memory accounting would give, per pipeline rank."""

    dtype: KvDtype | None = Field(None, description="the model's own dtype unless given")
    block_size: Count = 16
    memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.92
    num_blocks: Count | None = None


class Pool(Part):
    """Identical instances with one role."""

    name: Name = "mixed"
    role: Literal["mixed"] = "mixed"
    hardware: str
    instances: Count
    parallelism: Parallelism = Parallelism()
    batching: Batching
    kv_cache: KvCache = KvCache()
    async_scheduling: bool = True
    cuda_graphs: bool = Field(True, description="false: every kernel is launched on its own, as enforce-eager does")
    max_model_len: Count | None = Field(None, description="longest prompt + output; the model's limit unless given")


class Router(Part):
    """How requests are spread over the instances."""

    kind: Literal["round_robin"] = "round_robin"


class Plan(Spec):
    """A deployment with every knob set."""

    KIND: ClassVar[str] = "plan"
    model: str
    pools: Annotated[Seq[Pool], Field(min_length=1, max_length=1, strict=False)]
    router: Router = Router()

    @property
    def num_devices(self) -> int:
        return sum(pool.instances * pool.parallelism.devices for pool in self.pools)
