"""Audio encoder of a model, and the tokens that its processor makes of a recording.

Sound becomes frames of a mel spectrogram, convolutions halve their number, and some of what remains is put together or
averaged to a token. Formulas are those of `_get_feat_extract_output_lengths` in
vllm/model_executor/models/qwen2_audio.py and qwen3_omni_moe_thinker.py, of
vllm/transformers_utils/processors/voxtral.py (release 0.32), of ultravox_processing.py of the checkpoints of Ultravox
(0.5), and of the encoders in transformers.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from simtune.specs.base import Count, Positive
from simtune.specs.tower import Markers, MediaShape, StemProduct, Tower


class Audio(Tower):
    """Transformer over sound in front of a language model, and what joins the two."""

    mel_bins: Annotated[int, Field(ge=1, le=4096)] = Field(128, description="values of one frame of sound")
    frames_per_s: Positive = Field(100.0, description="frames of one second of sound")
    chunk: Count = Field(description="frames that pass through the convolutions, and become patches, together")
    padded: bool = Field(False, description="the last chunk of a recording is filled up with silence")
    max_frames: Count | None = Field(
        None, description="frames after which a recording is cut off; none is, unless given"
    )
    halvings: Annotated[int, Field(ge=0, le=8)] = Field(1, description="convolutions that halve the number of frames")
    channels: Count | None = Field(
        None,
        description="channels of convolutions over frames and mel bins, joined by a product; over frames alone, as "
        "wide as the encoder, unless given",
    )
    whole_tokens: bool = Field(
        False,
        description="each chunk makes whole tokens, the last of them of fewer patches; chunks after the first are "
        "filled up with silence, which makes none",
    )
    pool: Annotated[int, Field(ge=1, le=1024)] = Field(1, description="patches that make one token of the prompt")
    pooled: bool = Field(False, description="these patches are averaged, not put beside one another")
    gated_projector: bool = Field(False, description="half of the columns of a product gate the other half")
    positions: Annotated[int, Field(ge=0, le=2**24)] = Field(0, description="rows of its table of positions")
    markers: Markers = Field(0, description="tokens around a recording")
    ranks: Literal["share", "share_if_even", "repeat"] = Field(
        "share",
        description="tp ranks share its layers; do so if its heads can be divided, else repeat it; or repeat it always",
    )
    reserved: Annotated[int, Field(ge=1, le=2**24)] | None = Field(
        None,
        description="embeddings of the recording for which engines keep room; as many as a prompt has tokens unless "
        "given",
    )

    @model_validator(mode="after")
    def _whole_chunks(self) -> Self:
        if self.padded and self.chunk_patches % self.pool:
            raise ValueError(f"a padded chunk has {self.chunk_patches} patches; pool ({self.pool}) must divide them")
        if self.padded and self.window is not None:
            raise ValueError("the patches of padded chunks attend to one another; remove window")
        if self.whole_tokens and (self.padded or self.window is not None or self.max_frames is not None):
            raise ValueError(
                "whole_tokens is of chunks that attend to themselves; remove padded, window and max_frames"
            )
        return self

    def patches_of(self, frames: int) -> int:
        """Return the patches that frames of one chunk make."""
        for _ in range(self.halvings):
            frames = -(-frames // 2)
        return frames

    @property
    def chunk_patches(self) -> int:
        """Patches of a whole chunk."""
        return self.patches_of(self.chunk)

    def shape(self, seconds: float) -> MediaShape:
        """Return the sizes of a recording. Raises ValueError if it is too short for a token."""
        frames = math.ceil(round(seconds * self.frames_per_s, 6))
        frames = frames if self.max_frames is None else min(frames, self.max_frames)
        chunks, tail = divmod(frames, self.chunk)
        if self.whole_tokens:
            return self._in_whole_tokens(chunks, tail)
        vectors = (chunks * self.chunk_patches + self.patches_of(tail)) // self.pool
        if self.padded and self.max_frames is None:
            # silence has tokens too, unless recordings are cut at one chunk
            vectors = -(-frames // self.chunk) * self.chunk_patches // self.pool
        if not vectors:
            raise ValueError(
                f"a recording of {seconds:g} s has {frames} frames, too few for a token of the prompt; raise seconds"
            )
        if self.padded:
            shape = MediaShape(-(-frames // self.chunk), self.chunk_patches, vectors, vectors)
        else:
            shape = MediaShape(1, chunks * self.chunk_patches + self.patches_of(tail), vectors, vectors)
        return shape._replace(tokens=vectors + self.markers)

    def _in_whole_tokens(self, chunks: int, tail: int) -> MediaShape:
        """Return the sizes of whole chunks and a last one of `tail` frames."""
        vectors = chunks * -(-self.chunk_patches // self.pool) + -(-self.patches_of(tail) // self.pool)
        sequences = chunks + (tail > 0)
        patches = self.chunk_patches if chunks else self.patches_of(tail)
        return MediaShape(sequences, patches, vectors, vectors + self.markers)

    def largest_recording(self, max_model_len: int) -> MediaShape:
        """Return the sizes of the recording for which engines keep room."""
        vectors = max_model_len if self.reserved is None else self.reserved
        of_chunk = -(-self.chunk_patches // self.pool)
        chunks = -(-vectors // of_chunk) if self.whole_tokens else -(-vectors * self.pool // self.chunk_patches)
        return MediaShape(chunks, self.chunk_patches, vectors, vectors + self.markers)

    @property
    def joined(self) -> int:
        """Values that the projector reads for each vector: those of all patches, unless these are averaged."""
        return self.hidden_size * (1 if self.pooled else self.pool)

    @property
    def projector_products(self) -> list[tuple[int, int]]:
        """(n, k) of the products of the projector."""
        products = super().projector_products
        if not self.gated_projector:
            return products
        return [products[0], *((n, k // 2) for n, k in products[1:])]

    @property
    def stem(self) -> list[StemProduct]:
        """Convolutions as products: three frames wide, and three mel bins high if they have channels."""
        hidden = self.hidden_size
        if self.channels is None:
            rows = 2.0**self.halvings
            first = StemProduct(rows, hidden, 3 * self.mel_bins)
            return [first, *(StemProduct(rows / 2 ** (i + 1), hidden, 3 * hidden) for i in range(self.halvings))]
        products, bins, frames = [], self.mel_bins, self.chunk
        for number in range(self.halvings):
            bins, frames = -(-bins // 2), -(-frames // 2)
            depth = 9 * (self.channels if number else 1)
            products.append(StemProduct(bins * frames / self.chunk_patches, self.channels, depth))
        return [*products, StemProduct(1, hidden, self.channels * bins)]

    @property
    def table_rows(self) -> int:
        """Rows of its table of positions."""
        return self.positions

    def sharing(self, tp: int) -> int | None:
        """Return how many of `tp` ranks share each layer, as `Tower.sharing` does."""
        even = self.heads % tp == 0
        if self.ranks == "repeat" or (self.ranks == "share_if_even" and not even):
            return 1
        return tp if even else None
