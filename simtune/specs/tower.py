"""Encoders of media in front of a language model: the transformer that they have in common, and sizes of one item."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from simtune.specs.base import Count, Part, Seq, Width

MediaKind = Literal["image", "video", "audio"]
MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")
"""Kinds of media, in the order in which a prompt has them."""
MEDIA_NAMES: Mapping[MediaKind, str] = {"image": "images", "video": "videos", "audio": "recordings"}
"""Kinds of media in words."""

Layers = Annotated[int, Field(ge=1, le=10_000)]
FullLayers = Annotated[int, Field(ge=0, le=10_000)]
Markers = Annotated[int, Field(ge=0, le=1000)]
Projector = Annotated[Seq[Width], Field(min_length=1, strict=False)]


class MediaShape(NamedTuple):
    """Sizes of one image, video or recording inside a model."""

    sequences: int
    """Parts that are encoded apart: tiles, frames, stretches of sound, or 1 for a whole item."""
    patches: int
    """Patches of each part: tokens of the encoder, before they are merged."""
    vectors: int
    """Embeddings that the encoder delivers for the item, of a video those that are not dropped again."""
    tokens: int
    """Tokens in the prompt: one for each vector, and those that mark the item, its rows, tiles or frames."""


class StemProduct(NamedTuple):
    """A product that makes patches of pixels or of sound, before the first layer."""

    rows: float
    """Rows for each patch."""
    n: int
    k: int


class Tower(Part):
    """Transformer that encodes media, and the projector that joins it to a language model.

    Subclasses have the fields; vLLM calls such an encoder a tower.
    """

    hidden_size: Width
    layers: Layers
    heads: Width
    intermediate_size: Width
    gated: bool = Field(False, description="its feed-forward blocks have three matrices, not two")
    window: Count | None = Field(None, description="patches that attend to one another, in layers with windows")
    full_layers: FullLayers = Field(0, description="layers with attention to all patches, if the others have windows")
    projector: Projector = Field(description="columns of the products between encoder and language model, in order")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size ({self.hidden_size}) must be a multiple of heads ({self.heads})")
        if self.full_layers and self.window is None:
            raise ValueError("full_layers requires a window for the other layers; set window, or remove it")
        if self.full_layers > self.layers:
            raise ValueError(f"full_layers ({self.full_layers}) exceeds layers ({self.layers}); lower it")
        return self

    @property
    def head_dim(self) -> int:
        """Values of one head."""
        return self.hidden_size // self.heads

    @property
    def layer_products(self) -> list[tuple[int, int]]:
        """(n, k) of the products of one layer: queries, keys and values, output, feed-forward block."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return [(3 * hidden, hidden), (hidden, hidden), ((1 + self.gated) * inner, hidden), (hidden, inner)]

    @property
    def joined(self) -> int:
        """Values that the projector reads for each vector."""
        raise NotImplementedError

    @property
    def stem(self) -> list[StemProduct]:
        """Products that make patches, in order."""
        raise NotImplementedError

    def projected(self, patches: int, vectors: int) -> int:
        """Return the rows of the projector for items of that number of patches and embeddings."""
        return vectors

    @property
    def num_projectors(self) -> int:
        """Projectors, each behind a layer of its own."""
        return 1

    @property
    def table_rows(self) -> int:
        """Rows of its table of positions."""
        return 0

    @property
    def projector_products(self) -> list[tuple[int, int]]:
        """(n, k) of the products of one projector."""
        return [*zip(self.projector, (self.joined, *self.projector[:-1]), strict=True)]

    @property
    def parameters(self) -> int:
        """Parameters of its matrices and its table of positions."""
        of_layers = self.layers * sum(n * k for n, k in self.layer_products)
        of_projectors = self.num_projectors * sum(n * k for n, k in self.projector_products)
        of_stem = sum(product.n * product.k for product in self.stem)
        return of_layers + of_projectors + of_stem + self.hidden_size * self.table_rows

    @property
    def width(self) -> int:
        """Values of one vector that the encoder delivers."""
        return self.num_projectors * self.projector[-1]

    def sharing(self, tp: int) -> int | None:
        """Return how many of `tp` ranks share each layer, 1 if every rank computes all of it; None if its heads cannot
        be divided."""
        return None if self.heads % tp else tp


def media_words(kinds: Iterable[MediaKind]) -> str:
    """Return kinds of media in words: `images and videos`."""
    *before, last = [MEDIA_NAMES[kind] for kind in kinds] or ["media"]
    return f"{', '.join(before)} and {last}" if before else last
