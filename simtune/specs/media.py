"""Images, videos and recordings in the prompts of a load: how many, how large, how often the same ones come again."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from simtune.specs.base import BlockSize, Count, NonNegative, Part, Positive, Seq, Share, check_quantiles
from simtune.specs.one_or_more import OneOrMore, listed
from simtune.specs.tower import MediaKind
from simtune.specs.video import Clip
from simtune.specs.vision import MOST_PIXELS, Pixels

MOST_ITEMS = 1000
"""Most items of one kind in one request."""
MOST_SECONDS = 100_000
"""Longest video or recording."""
Length = Annotated[float, Field(gt=0, le=MOST_SECONDS)]
Items = Annotated[int, Field(ge=1, le=MOST_ITEMS)]


class SideQuantiles(Part):
    """Empirical sides: `pixels[i]` is the quantile at `levels[i]`, linear in between."""

    kind: Literal["quantiles"] = "quantiles"
    levels: Annotated[Seq[Share], Field(min_length=2, strict=False)]
    pixels: Annotated[Seq[Pixels], Field(min_length=2, strict=False)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        check_quantiles(self.levels, self.pixels, "pixels")
        return self


class SecondsQuantiles(Part):
    """Empirical lengths in time: `seconds[i]` is the quantile at `levels[i]`, linear in between."""

    kind: Literal["quantiles"] = "quantiles"
    levels: Annotated[Seq[Share], Field(min_length=2, strict=False)]
    seconds: Annotated[Seq[Length], Field(min_length=2, strict=False)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        check_quantiles(self.levels, self.seconds, "seconds")
        return self


class _OrNumber:
    """States in the schema that a distribution may be written as one number."""

    def __init__(self, **number: Any) -> None:
        self._number = number

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [self._number, handler(core_schema)]}


def _fixed(value: Any) -> Any:
    """Read a number as the distribution that has only this value."""
    if isinstance(value, (dict, SideQuantiles)):
        return value
    if type(value) is not int:
        raise ValueError(f"must be a number of pixels, or quantiles of it (found {value!r})")
    if not 1 <= value <= MOST_PIXELS:
        raise ValueError(f"must be from 1 to {MOST_PIXELS:,} pixels (found {value})")
    return {"levels": [0.0, 1.0], "pixels": [value, value]}


Side = Annotated[SideQuantiles, BeforeValidator(_fixed), _OrNumber(type="integer", minimum=1, maximum=MOST_PIXELS)]
"""A side in pixels: a number, or a distribution."""


def _fixed_seconds(value: Any) -> Any:
    """Read a number as the distribution that has only this value."""
    if isinstance(value, (dict, SecondsQuantiles)):
        return value
    if type(value) not in (int, float):
        raise ValueError(f"must be a number of seconds, or quantiles of it (found {value!r})")
    if not 0 < value <= MOST_SECONDS:
        raise ValueError(f"must be above 0 and at most {MOST_SECONDS:,} seconds (found {value:g})")
    return {"levels": [0.0, 1.0], "seconds": [float(value), float(value)]}


Duration = Annotated[
    SecondsQuantiles,
    BeforeValidator(_fixed_seconds),
    _OrNumber(type="number", exclusiveMinimum=0, maximum=MOST_SECONDS),
    Field(description="length in time of one item: a number, or quantiles"),
]
"""A length in time: a number of seconds, or a distribution."""


class ImageSize(Part):
    """Sizes of a part of the images or videos; both sides are drawn apart unless fixed."""

    width: Side
    height: Side
    share: Positive = Field(1.0, description="weight of these sizes among all")


class Repeated(Part):
    """Items that come again; subclasses have the number of the set."""

    share: Share = Field(description="probability that an item is one of a set, not a new one")
    skew: Annotated[NonNegative, Field(le=10)] = Field(
        0.0, description="Zipf exponent of how often each is chosen; 0: all equally often"
    )

    @property
    def number(self) -> int:
        """Items of the set."""
        raise NotImplementedError


class RepeatedImages(Repeated):
    """Images that come again: logos, pages of a document, frames of one scene."""

    images: Annotated[Count, Field(le=10**6)] = Field(description="images of the set")

    @property
    def number(self) -> int:
        """Items of the set."""
        return self.images


class RepeatedItems(Repeated):
    """Videos or recordings that come again."""

    items: Annotated[Count, Field(le=10**6)] = Field(description="videos or recordings of the set")

    @property
    def number(self) -> int:
        """Items of the set."""
        return self.items


PerRequest = Annotated[Seq[Items], Field(min_length=1, strict=False), BeforeValidator(listed), OneOrMore()]


class LoadMedia(Part):
    """Items of one kind in requests, behind the prefix that prompts share, if there is one, and before the rest of the
    text; images first, then videos, then recordings. In sessions whose turns follow answers, a turn adds items before
    the text that it adds, and later turns read them again.

    `prompt` of the workload counts text only.
    """

    kind: ClassVar[MediaKind]
    share: Share = Field(1.0, description="probability that a request has items of this kind")
    per_request: PerRequest = Field(
        (1,), description="items of a request that has some; a list: each of these numbers equally often"
    )
    block_tokens: BlockSize = Field(
        16, description="tokens of a block, in which what prompts share is counted, without a shared_prefix"
    )
    repeats: Repeated | None

    @property
    def most(self) -> int:
        """Most items of one request."""
        return max(self.per_request)


class LoadImages(LoadMedia):
    """Images of requests."""

    kind: ClassVar[MediaKind] = "image"
    sizes: Annotated[Seq[ImageSize], Field(min_length=1, strict=False)]
    repeats: RepeatedImages | None = Field(None, description="images that come again; every image is new unless given")


class LoadVideos(LoadMedia):
    """Videos of requests: files that the engine samples, or frames that clients send."""

    kind: ClassVar[MediaKind] = "video"
    sizes: Annotated[Seq[ImageSize], Field(min_length=1, strict=False)]
    seconds: Duration
    frame_rate: Annotated[Positive, Field(le=1000)] = Field(30.0, description="frames per second of the files")
    fps: Annotated[Positive, Field(le=1000)] | None = Field(
        None, description="frames per second that are sampled; those of the model's processor unless given"
    )
    frames: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        None,
        description="frames that clients send in place of a file, evenly spread over its seconds; none unless given",
    )
    sound: bool = Field(
        False,
        description="the sound of each video is read too, as a recording of its length (use_audio_in_video of Omni "
        "models)",
    )
    repeats: RepeatedItems | None = Field(None, description="videos that come again; every video is new unless given")

    @model_validator(mode="after")
    def _sampled_once(self) -> Self:
        if self.fps is not None and self.frames is not None:
            raise ValueError("frames that clients send are not sampled again; remove fps, or frames")
        return self

    def clip(self, width: int, height: int, seconds: float) -> Clip:
        """Return one video of the load."""
        return Clip(width, height, seconds, self.frame_rate, self.fps, self.frames)


class LoadAudio(LoadMedia):
    """Recordings of requests."""

    kind: ClassVar[MediaKind] = "audio"
    seconds: Duration
    repeats: RepeatedItems | None = Field(
        None, description="recordings that come again; every recording is new unless given"
    )
