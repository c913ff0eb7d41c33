"""LoRA adapters: the slots that a pool has for them, and the adapters for which the requests of a load ask."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from simtune.specs.base import ErrorAt, Part, Positive, Seats

LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
"""Ranks that vLLM allows as the largest one (0.33: MaxLoRARanks in vllm/config/lora.py)."""
LoraTargets = Literal["attention", "all"]
MOST_ADAPTERS = 10**6
NO_ADAPTER = -1
"""Number that stands for the base model."""


class Lora(Part):
    """Slots of a pool for LoRA adapters, those of each engine instance."""

    rank: LoraRank = Field(description="largest rank of an adapter: slots have its size, and so have the products")
    slots: Seats = Field(
        description="adapters on the devices, and most adapters of the requests that run (vLLM --max-loras, SGLang "
        "--max-loras-per-batch)"
    )
    host_slots: Seats | None = Field(
        None,
        description="adapters in host memory, those on the devices among them (vLLM --max-cpu-loras, SGLang "
        "--max-loaded-loras); as many as slots unless given",
    )
    targets: LoraTargets = Field(
        "all", description="matrices that adapters change: those of attention, or of feed-forward blocks as well"
    )
    storage_bytes_per_s: Positive | None = Field(
        None,
        description="rate at which an adapter that is not in host memory is read; unless given all adapters of a load "
        "must fit host_slots, and are there from the beginning",
    )

    @model_validator(mode="after")
    def _hosts_what_is_resident(self) -> Self:
        if self.host_slots is not None and self.host_slots < self.slots:
            raise ErrorAt(
                f"{self.host_slots} is less than slots ({self.slots}), whose adapters are in host memory too; raise it",
                "host_slots",
            )
        return self

    @property
    def in_host(self) -> int:
        """Adapters that host memory keeps."""
        return self.slots if self.host_slots is None else self.host_slots


class Adapters(Part):
    """LoRA adapters for which requests ask, drawn for each request, or for each session and family."""

    count: Annotated[int, Field(ge=1, le=MOST_ADAPTERS)] = Field(description="number of adapters")
    zipf: Annotated[float, Field(ge=0, le=20)] = Field(
        0.0,
        description="exponent of their popularity: adapter k is asked for k**-zipf as often as the first; 0: evenly",
    )
    base_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the requests that ask for no adapter"
    )
