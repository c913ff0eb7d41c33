"""Images in the prompts of a load: how many, how large, and how often the same ones come again."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from simtune.specs.base import BlockSize, Count, NonNegative, Part, Positive, Seq, Share
from simtune.specs.one_or_more import OneOrMore, listed
from simtune.specs.vision import MOST_PIXELS, Pixels

MOST_IMAGES = 1000
"""Most images of one request."""
Images = Annotated[int, Field(ge=1, le=MOST_IMAGES)]


class SideQuantiles(Part):
    """Empirical sides: `pixels[i]` is the quantile at `levels[i]`, linear in between."""

    kind: Literal["quantiles"] = "quantiles"
    levels: Annotated[Seq[Share], Field(min_length=2, strict=False)]
    pixels: Annotated[Seq[Pixels], Field(min_length=2, strict=False)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if len(self.levels) != len(self.pixels):
            raise ValueError(f"{len(self.levels)} levels but {len(self.pixels)} pixels; give as many of both")
        if self.levels[0] != 0 or self.levels[-1] != 1 or sorted(set(self.levels)) != list(self.levels):
            raise ValueError("levels must rise strictly from 0 to 1")
        if sorted(self.pixels) != list(self.pixels):
            raise ValueError("pixels must not fall")
        return self


class _OrNumber:
    """States in the schema that a side may be written as one number."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        drawn_sides = handler(core_schema)
        return {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_PIXELS}, drawn_sides]}


def _fixed(value: Any) -> Any:
    """Read a number as the distribution that has only this value."""
    if isinstance(value, (dict, SideQuantiles)):
        return value
    if type(value) is not int:
        raise ValueError(f"must be a number of pixels, or quantiles of it (found {value!r})")
    if not 1 <= value <= MOST_PIXELS:
        raise ValueError(f"must be from 1 to {MOST_PIXELS:,} pixels (found {value})")
    return {"levels": [0.0, 1.0], "pixels": [value, value]}


Side = Annotated[SideQuantiles, BeforeValidator(_fixed), _OrNumber()]
"""A side in pixels: a number, or a distribution."""


class ImageSize(Part):
    """Sizes of a part of the images; both sides are drawn apart unless fixed."""

    width: Side
    height: Side
    share: Positive = Field(1.0, description="weight of these sizes among all")


class RepeatedImages(Part):
    """Images that come again: logos, pages of a document, frames of one scene."""

    share: Share = Field(description="probability that an image is one of a set, not a new one")
    images: Annotated[Count, Field(le=10**6)] = Field(description="images of the set")
    skew: Annotated[NonNegative, Field(le=10)] = Field(
        0.0, description="Zipf exponent of how often each is chosen; 0: all equally often"
    )


class LoadImages(Part):
    """Images of requests, behind the prefix that prompts share, if there is one, and before the rest of the text.

    `prompt` of the workload counts text only.
    """

    share: Share = Field(1.0, description="probability that a request has images")
    per_request: Annotated[Seq[Images], Field(min_length=1, strict=False), BeforeValidator(listed), OneOrMore()] = (
        Field((1,), description="images of a request that has some; a list: each of these numbers equally often")
    )
    sizes: Annotated[Seq[ImageSize], Field(min_length=1, strict=False)]
    repeats: RepeatedImages | None = Field(None, description="images that come again; every image is new unless given")
    block_tokens: BlockSize = Field(
        16, description="tokens of a block, in which what prompts share is counted, without a shared_prefix"
    )

    @property
    def most(self) -> int:
        """Most images of one request."""
        return max(self.per_request)
