"""Vision encoder of a model: its layers, and the tokens that its processor makes of an image.

Formulas are those of the processors in Hugging Face transformers; each kind of sizing names its source. Sides are in
pixels, and a patch is a token of the encoder. The processors' limits stand in preprocessor_config.json, beside the
config; a reader of configs takes the published ones.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from simtune.specs.base import Part
from simtune.specs.tower import Markers, MediaShape, StemProduct, Tower
from simtune.specs.video import Clip, VideoSizing

MOST_PIXELS = 100_000
Pixels = Annotated[int, Field(ge=1, le=MOST_PIXELS)]
"""Side of an image."""
Area = Annotated[int, Field(ge=1, le=10**9)]


class NativeSizing(Part):
    """Images keep their resolution: sides are rounded to whole tokens, within limits on the area.

    `smart_resize` in transformers/models/qwen2_vl/image_processing_qwen2_vl.py (Qwen2-VL, Qwen2.5-VL, Qwen3-VL).
    """

    kind: Literal["native"] = "native"
    min_pixels: Area
    max_pixels: Area
    markers: Markers = Field(2, description="tokens around an image")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels ({self.min_pixels}) exceeds max_pixels ({self.max_pixels}); lower it")
        return self

    def grid(self, width: int, height: int, unit: int) -> tuple[int, int]:
        """Return the (columns, rows) of tokens of `unit` pixels a side."""
        columns, rows = (max(1, round(side / unit)) for side in (width, height))
        area, allowed = columns * rows * unit**2, (self.min_pixels, self.max_pixels)
        if area > allowed[1]:
            beta = math.sqrt(width * height / allowed[1])
            columns, rows = (max(1, math.floor(side / beta / unit)) for side in (width, height))
        elif area < allowed[0]:
            beta = math.sqrt(allowed[0] / (width * height))
            columns, rows = (math.ceil(side * beta / unit) for side in (width, height))
        return columns, rows

    def shape(self, width: int, height: int, patch: int, merge: int) -> MediaShape:
        """Return the sizes of an image."""
        columns, rows = self.grid(width, height, patch * merge)
        vectors = columns * rows
        return MediaShape(1, vectors * merge**2, vectors, vectors + self.markers)


class RowSizing(Part):
    """Images are shrunk until their longer side fits; every row of tokens ends with a token of its own.

    `get_resize_output_image_size` in transformers/models/pixtral/image_processing_pixtral.py and `replace_tokens` in
    processing_pixtral.py (Pixtral, Mistral Small 3.1).
    """

    kind: Literal["rows"] = "rows"
    longest_side: Pixels

    def shape(self, width: int, height: int, patch: int, merge: int) -> MediaShape:
        """Return the sizes of an image."""
        unit, ratio = patch * merge, max(width, height) / self.longest_side
        if ratio > 1:
            width, height = (max(1, math.floor(side / ratio)) for side in (width, height))
        columns, rows = (-(-side // unit) for side in (width, height))
        return MediaShape(1, columns * rows * merge**2, columns * rows, (columns + 1) * rows)


class FixedSizing(Part):
    """All images are scaled to one square.

    `Gemma3Processor` in transformers/models/gemma3/processing_gemma3.py: an image is 256 tokens between a token of
    beginning, one of end and two of line breaks.
    """

    kind: Literal["fixed"] = "fixed"
    side: Pixels
    markers: Markers = Field(0, description="tokens around an image")

    def shape(self, width: int, height: int, patch: int, merge: int) -> MediaShape:
        """Return the sizes of an image."""
        patches = (self.side // patch) ** 2
        vectors = (self.side // (patch * merge)) ** 2
        return MediaShape(1, patches, vectors, vectors + self.markers)


class TileSizing(Part):
    """Images are cut into square tiles, and a small copy of the image is one more.

    With `choice: ratio` the tiles have the nearest ratio of sides (`dynamic_preprocess` of InternVL). With `choice:
    scale` they are the fewest that need not shrink the image, or shrink it least (`get_best_fit` in
    transformers/models/llama4/image_processing_llama4_fast.py), and each tile is followed by a token
    (`_prompt_split_image` in processing_llama4.py).
    """

    kind: Literal["tiles"] = "tiles"
    side: Pixels
    max_tiles: Annotated[int, Field(ge=1, le=1024)]
    choice: Literal["ratio", "scale"] = "ratio"
    thumbnail: bool = Field(True, description="a small copy of an image of several tiles is encoded beside them")
    tile_markers: Markers = Field(0, description="tokens after each of several tiles")
    markers: Markers = Field(2, description="tokens around an image")

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the (columns, rows) of tiles of an image."""
        return self._by_ratio(width, height) if self.choice == "ratio" else self._by_scale(width, height)

    def grids(self) -> list[tuple[int, int]]:
        """Return the (columns, rows) of all ways to lay out tiles, the fewest tiles first."""
        most = self.max_tiles
        grids = {(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)}
        return sorted(grids, key=lambda grid: (grid[0] * grid[1], grid))

    def _by_ratio(self, width: int, height: int) -> tuple[int, int]:
        best, least = (1, 1), math.inf
        for columns, rows in self.grids():
            difference = abs(width / height - columns / rows)
            # of equal ratios the larger one, if the image fills more than half of it
            fills = width * height > 0.5 * self.side**2 * columns * rows
            if difference < least or (difference == least and fills):
                best, least = (columns, rows), difference
        return best

    def _by_scale(self, width: int, height: int) -> tuple[int, int]:
        scales = {grid: min(grid[0] * self.side / width, grid[1] * self.side / height) for grid in self.grids()}
        enlarging = [scale for scale in scales.values() if scale >= 1]
        chosen = min(enlarging) if enlarging else max(scales.values())
        return min((grid for grid in scales if scales[grid] == chosen), key=lambda grid: grid[0] * grid[1])

    def shape(self, width: int, height: int, patch: int, merge: int) -> MediaShape:
        """Return the sizes of an image."""
        columns, rows = self.grid(width, height)
        tiles = columns * rows
        parts = tiles + (self.thumbnail and tiles > 1)
        patches, vectors = (self.side // patch) ** 2, (self.side // (patch * merge)) ** 2
        after = self.tile_markers * tiles * (tiles > 1)
        return MediaShape(parts, patches, parts * vectors, parts * vectors + after + self.markers)


class PaddedSizing(Part):
    """Images keep their resolution up to a number of patches, and are padded to whole tokens.

    `rescale` in image_processing_kimi_vl.py of the checkpoint (Kimi-VL).
    """

    kind: Literal["padded"] = "padded"
    max_patches: Area
    markers: Markers = Field(0, description="tokens around an image")

    def shape(self, width: int, height: int, patch: int, merge: int) -> MediaShape:
        """Return the sizes of an image."""
        patches = (width // patch) * (height // patch)
        if patches > self.max_patches:
            scale = math.sqrt(self.max_patches / patches)
            width, height = (max(1, int(side * scale)) for side in (width, height))
        vectors = -(-width // (patch * merge)) * -(-height // (patch * merge))
        return MediaShape(1, vectors * merge**2, vectors, vectors + self.markers)


Sizing = Annotated[NativeSizing | RowSizing | PaddedSizing | FixedSizing | TileSizing, Field(discriminator="kind")]


class Vision(Tower):
    """Vision transformer in front of a language model, and what joins the two."""

    patch: Annotated[int, Field(ge=1, le=1024)] = Field(description="side of a patch in pixels")
    merge: Annotated[int, Field(ge=1, le=64)] = Field(1, description="patches a side that make one token of the prompt")
    frames: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="copies of an image that a patch is made of, in models that read videos"
    )
    positions: Annotated[int, Field(ge=0, le=2**24)] = Field(0, description="rows of its table of positions")
    pooled: bool = Field(False, description="merged patches are averaged, not put beside one another")
    projectors: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="projectors, each behind a layer of its own; their vectors are as wide together"
    )
    sizing: Sizing
    video: VideoSizing | None = Field(None, description="rules for videos; none of them are read unless given")

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.video is not None and self.video.max_frames < self.frames:
            raise ValueError(f"video.max_frames ({self.video.max_frames}) is below frames ({self.frames}); raise it")
        return self

    @property
    def patch_values(self) -> int:
        """Values of one patch as the first product reads it: three colours of every pixel."""
        return 3 * self.frames * self.patch**2

    @property
    def joined(self) -> int:
        """Values that the projector reads for each vector: those of merged patches, unless these are averaged."""
        return self.hidden_size * (1 if self.pooled else self.merge**2)

    @property
    def stem(self) -> list[StemProduct]:
        """Products that make patches: one of the pixels."""
        return [StemProduct(1, self.hidden_size, self.patch_values)]

    def projected(self, patches: int, vectors: int) -> int:
        """Return the rows of the projector: those of videos are dropped behind it."""
        return vectors if self.video is None or not self.video.pruning_rate else patches // self.merge**2

    @property
    def num_projectors(self) -> int:
        """Projectors, each behind a layer of its own."""
        return self.projectors

    @property
    def table_rows(self) -> int:
        """Rows of its table of positions."""
        return self.positions

    def shape(self, width: int, height: int) -> MediaShape:
        """Return the sizes of an image of `width` x `height` pixels."""
        return self.sizing.shape(width, height, self.patch, self.merge)

    def clip_shape(self, clip: Clip) -> MediaShape:
        """Return the sizes of a video, for a model that reads videos. Raises ValueError if it makes no frame."""
        assert self.video is not None
        return self.video.shape(clip, self.patch, self.merge, self.frames)

    def largest_video(self, max_model_len: int) -> MediaShape:
        """Return the sizes of the video for which engines keep room, for a model that reads videos."""
        assert self.video is not None
        of_image = self.largest.vectors
        vectors = self.video.most_vectors(of_image, self.patch * self.merge, self.frames, max_model_len)
        groups = max(1, vectors // of_image)
        return MediaShape(groups, vectors // groups * self.merge**2, vectors, vectors + self.video.markers)

    @property
    def largest(self) -> MediaShape:
        """Sizes of the image with the most vectors that the processor makes: a square at its limits."""
        sizing = self.sizing
        match sizing:
            case NativeSizing():
                sides = [(math.isqrt(sizing.max_pixels),) * 2]
            case PaddedSizing():
                sides = [(math.isqrt(sizing.max_patches) * self.patch,) * 2]
            case TileSizing():
                sides = [(sizing.side * columns, sizing.side * rows) for columns, rows in sizing.grids()]
            case RowSizing():
                sides = [(sizing.longest_side,) * 2]
            case FixedSizing():
                sides = [(sizing.side,) * 2]
        return max((self.shape(*pair) for pair in sides), key=lambda shape: shape.vectors)
