"""Service stages of a plan: what requests go through before their prompt is computed, or beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from simtune.errors import suggest
from simtune.specs.base import Count, ErrorAt, Name, NonNegative, Part, Positive, Seconds, Seq
from simtune.specs.encoder import EncoderTpMode


class Stage(Part):
    """A service with servers of its own: it encodes media, compresses prompts, retrieves documents, ranks answers."""

    name: Name
    pool: Name = Field(description="the pool whose requests it serves")
    place: Literal["before", "beside"] = Field(
        "before", description="before a request is routed; or beside it: no token comes before both are done"
    )
    after: Annotated[Seq[Name], Field(strict=False)] = Field((), description="stages whose work it goes on with")
    instances: Count = Field(
        1, description="servers; each has one part of a request at a time, first come first served"
    )
    devices: Annotated[int, Field(ge=0, le=100_000)] = Field(0, description="GPUs of each")
    seconds: Seconds = Field(0.0, description="seconds for each request")
    seconds_per_token: NonNegative = Field(0.0, description="additional seconds for each token of its prompt")
    encoder: EncoderTpMode | None = Field(
        None,
        description="encodes the media of requests by the model's encoders, on GPUs of the pool's kind, "
        "`devices` for each server: these share its weights, or the images and videos of a request (data); none unless "
        "given",
    )
    bytes_per_s: Positive | None = Field(
        None,
        description="with encoder: rate at which embeddings go to the pool; that of the hardware's link between nodes "
        "unless given",
    )
    parts: Annotated[int, Field(ge=1, le=4096)] = Field(
        1, description="equal parts of a request; a stage that continues this one gets each part as soon as it is done"
    )


def check_stages(stages: Sequence[Stage], pools: Sequence[tuple[str, str]]) -> None:
    """Raise ErrorAt for a stage whose pool (name and role) does not exist or takes no new requests, that continues a
    stage that does not exist or is listed later, or that has another number of parts than the stage it continues.
    """
    taking = [name for name, role in pools if role != "decode"]
    by_name: dict[str, Stage] = {}
    for i, stage in enumerate(stages):
        if stage.name in by_name:
            raise ErrorAt(f"two stages are called {stage.name}; give one another name", "stages", i, "name")
        if stage.pool not in taking:
            hint = suggest(stage.pool, taking) or f"; those that take new requests: {', '.join(taking)}"
            raise ErrorAt(f"stage {stage.name} serves no pool: there is no {stage.pool!r}{hint}", "stages", i, "pool")
        for name in stage.after:
            if name not in by_name:
                raise ErrorAt(f"{stage.name} goes on with {name!r}, which is no earlier stage", "stages", i, "after")
            if by_name[name].parts != stage.parts:
                raise ErrorAt(
                    f"{name} has {by_name[name].parts} parts; give {stage.name} as many", "stages", i, "parts"
                )
        _check_encoder(stage, i)
        by_name[stage.name] = stage
    if stages and len(taking) > 1:
        raise ErrorAt(f"stages require exactly one pool that takes requests; there are {len(taking)}", "stages")


def _check_encoder(stage: Stage, number: int) -> None:
    """Raise ErrorAt for a stage that encodes images without GPUs or beside the engines, or has its link alone."""
    if stage.encoder is None:
        if stage.bytes_per_s is not None:
            raise ErrorAt("is of stages that encode images; set encoder, or remove it", "stages", number, "bytes_per_s")
        return
    if not stage.devices:
        raise ErrorAt(f"{stage.name} encodes on GPUs; give each server 1 or more", "stages", number, "devices")
    if stage.place != "before" or stage.parts > 1:
        key = "parts" if stage.place == "before" else "place"
        raise ErrorAt(f"{stage.name} encodes images whole, before the prompt is computed", "stages", number, key)
