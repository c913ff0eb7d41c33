"""Settings of a pool that only published systems have: no engine can be given them, they are simulated alone."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from simtune.specs.base import DTYPE_BYTES, Count, ErrorAt, GpuCount, Part, Positive, Seconds

PositiveShare = Annotated[float, Field(gt=0, le=1)]


class Afd(Part):
    """Attention and feed-forward blocks on GPUs of their own (AFD): tokens go from one to the other in every layer."""

    ffn_devices: GpuCount = Field(description="GPUs that share the feed-forward blocks: whole experts on each")
    batches: Annotated[int, Field(ge=1, le=16)] = Field(
        3, description="parts of the batch that are under way at a time, so that neither side waits"
    )


class KvPolicy(Part):
    """Keys and values of a sequence that are stored and read once its prompt is computed. The effect on the output is
    not modelled.
    """

    kept: PositiveShare = Field(1.0, description="share of the tokens whose keys and values stay in the cache")
    bits: Annotated[float, Field(gt=0, le=32)] | None = Field(
        None, description="bits of a value in the cache, scales included; those of its dtype unless given"
    )
    decode_sparsity: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of what is in the cache that a decode does not read"
    )
    prefill_sparsity: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the attention of prompts that is left out"
    )

    def held(self, dtype: str) -> float:
        """Bytes in the cache over those of all keys and values in this dtype."""
        return self.kept * (1.0 if self.bits is None else self.bits / (8 * DTYPE_BYTES[dtype]))

    def read(self, dtype: str) -> float:
        """Bytes that a decode reads over those of all keys and values."""
        return self.held(dtype) * (1 - self.decode_sparsity)


class Runtime(Part):
    """Kernels that an engine other than vLLM launches: more and smaller ones than the operators of the cost model."""

    kernels_per_layer: Count
    kernel_floor_s: Seconds = Field(
        description="GPU seconds of each kernel beyond the time of its operator, with or without graphs"
    )
    launch_s: Seconds = Field(description="host seconds to launch each kernel without CUDA graphs")


class Offload(Part):
    """Weights and keys and values in the memory of the host, and the part that the processor computes there."""

    weights: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="share of the weights; in every step they are sent to the devices, but for those `computed`"
    )
    computed: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="share of these weights that the processor multiplies in host memory"
    )
    kv_cache: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the keys and values; the processor attends to them beside the devices"
    )
    bytes_per_s: Positive | None = Field(
        None, description="rate at which the processor reads the host's memory; needed if it computes or attends"
    )
    memory_gib: Positive | None = Field(None, description="host memory for keys and values; needed if some are there")

    @model_validator(mode="after")
    def _says_what_the_host_has(self) -> Self:
        if (self.computed or self.kv_cache) and self.bytes_per_s is None:
            raise ErrorAt("is required if the processor computes; state how fast it reads its memory", "bytes_per_s")
        if self.kv_cache and self.memory_gib is None:
            raise ErrorAt(
                "is required if keys and values are in the host's memory; state how much it has for them", "memory_gib"
            )
        if self.computed and not self.weights:
            raise ErrorAt("requires weights in the host's memory; give weights a share, or remove it", "computed")
        if self.bytes_per_s is not None and not (self.computed or self.kv_cache):
            raise ErrorAt(
                "has no effect if the processor reads nothing; give computed or kv_cache a share, or remove it",
                "bytes_per_s",
            )
        if self.memory_gib is not None and not self.kv_cache:
            raise ErrorAt(
                "has no effect without keys and values there; give kv_cache a share, or remove it", "memory_gib"
            )
        return self


class Research(Part):
    """Settings that no engine has, in one block, so that a plan which an engine can run is recognised at sight."""

    runtime: Runtime | None = Field(
        None, description="kernels of an engine other than vLLM; vLLM's kernels unless given"
    )
    kv_policy: KvPolicy | None = Field(
        None, description="part of the keys and values that is kept and read; all unless given"
    )
    offload: Offload | None = Field(
        None, description="parts of weights and KV cache in host memory; nothing unless given"
    )
    afd: Afd | None = Field(
        None, description="feed-forward blocks on GPUs of their own; on those of attention unless given"
    )
    expert_locality: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="share of the exchange between ranks for their experts that good placement saves"
    )
    cp_ring: Literal["one_way", "both_ways"] | None = Field(
        None, description="how keys and values are passed around the groups of cp; in one direction unless given"
    )

    def on_other_devices(self) -> Research:
        """Return the settings of the devices that `afd` adds: attention and sequences are not theirs."""
        # Runtime and offload are those of the engine, which runs on both kinds of devices.
        return self.model_copy(update={"afd": None, "cp_ring": None, "expert_locality": None})


IN_RESEARCH: dict[tuple[str, ...], str] = {
    ("runtime",): "runtime",
    ("offload",): "offload",
    ("kv_cache", "policy"): "kv_policy",
    ("parallelism", "afd"): "afd",
    ("parallelism", "cp_ring"): "cp_ring",
    ("parallelism", "expert_locality"): "expert_locality",
}
"""Keys of a pool at which these settings might be looked for, and their keys in the block."""
