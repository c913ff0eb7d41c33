"""Images of a load: which ones a request has, their sizes, their tokens in its prompt, and what prompts share by them.

Image j of request i takes the uniform number i * most + j of each purpose, so it depends on the seed and on both
numbers alone. Images of the repeated set have sizes of their own, drawn by their number in the set.

Names of blocks. Images stand behind the prefix that prompts share, and before the rest of the text. A block is named by
the prefix before it and by all images up to its last token, as engines hash it, so a prompt finds the blocks of an
earlier one as far as prefix and images are the same. Behind the first new image nothing is shared, and no name is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.errors import UsageError
from simtune.specs.images import ImageSize, LoadImages, SideQuantiles
from simtune.specs.vision import ImageShape, Vision
from simtune.specs.workload import Workload
from simtune.workload.sampling import (
    IMAGE_COUNT,
    IMAGE_HEIGHT,
    IMAGE_IN_SET,
    IMAGE_REPEATS,
    IMAGE_SHARE,
    IMAGE_SIZE,
    IMAGE_WIDTH,
    SET_HEIGHT,
    SET_SIZE,
    SET_WIDTH,
    Span,
    drawn,
)

_NAMED = 1 << 62
"""Names of blocks with images are at least this; those of prefixes are smaller."""


class PromptImage(NamedTuple):
    """An image of a prompt."""

    start: int
    """Tokens of the prompt before it."""
    name: int
    """Identity: equal names, equal images."""
    shape: ImageShape


@dataclass(frozen=True, slots=True, eq=False)
class RequestImages:
    """Images of requests, one array item each, in order of requests and of their prompts.

    Without the facts of a model only sizes and names are known, and `sized` is false.
    """

    begin: Ints
    """Number of the first image of each request, and at the end the number of all."""
    name: Ints
    """Identity of each image: below `num_repeated` those of the set, all others once only."""
    width: Ints
    height: Ints
    start: Ints
    """Tokens of the prompt before each image; 0 unless sized."""
    shape: Ints
    """Columns of `ImageShape`: sequences, patches, vectors and tokens of each image; zeros unless sized."""
    num_repeated: int = 0
    sized: bool = False

    def __len__(self) -> int:
        return len(self.name)

    def of(self, request: int) -> list[PromptImage]:
        """Return the images of a request."""
        rows = slice(int(self.begin[request]), int(self.begin[request + 1]))
        columns = zip(self.start[rows].tolist(), self.name[rows].tolist(), self.shape[rows].tolist(), strict=True)
        return [PromptImage(start, name, ImageShape(*shape)) for start, name, shape in columns]

    @property
    def per_request(self) -> Ints:
        """Number of images of each request."""
        counts: Ints = np.diff(self.begin)
        return counts

    def rows(self, requests: Ints) -> RequestImages:
        """Return the images of some requests, in the order of these."""
        counts = self.per_request[requests]
        begin = np.concatenate([[0], np.cumsum(counts)])
        at = np.repeat(self.begin[requests] - begin[:-1], counts) + np.arange(begin[-1])
        return replace(
            self, begin=begin, name=self.name[at], width=self.width[at], height=self.height[at],
            start=self.start[at], shape=self.shape[at],
        )  # fmt: skip

    def kept(self, seen: NDArray[np.bool_]) -> RequestImages:
        """Return the images of the requests for which `seen` is true."""
        return self.rows(np.flatnonzero(seen))

    def added_tokens(self) -> Ints:
        """Return the tokens that images add to the prompt of each request."""
        sums = np.concatenate([[0], np.cumsum(self.shape[:, 3])])
        added: Ints = sums[self.begin[1:]] - sums[self.begin[:-1]]
        return added


def check_sees(vision: Vision | None, workload: Workload, model: str) -> None:
    """Raise UsageError if a load has images and the model has no encoder for them."""
    if workload.images is not None and vision is None:
        raise UsageError(
            f"workload {workload.name} has images, and model {model} states no vision encoder; add vision to the model "
            "spec, use a config.json of a family that is read (docs/inputs.md), or remove images"
        )


def draw_images(images: LoadImages, vision: Vision | None, seed: int, span: Span) -> RequestImages:
    """Return the images of a range of requests; sized if the facts of a model are given, except for `start`, which
    counts from the first image of each request."""
    counts = np.array(images.per_request, dtype=np.int64)
    pick = np.minimum((drawn(seed, IMAGE_COUNT, span) * len(counts)).astype(np.int64), len(counts) - 1)
    per_request = np.where(drawn(seed, IMAGE_SHARE, span) < images.share, counts[pick], 0)
    most, slots = images.most, Span(span.first * images.most, span.end * images.most)
    present = (np.arange(most) < per_request[:, None]).reshape(-1)
    name, sides = _names(images, seed, slots), np.stack(_sizes(images.sizes, seed, slots, _OF_IMAGES))
    num_repeated = 0
    if images.repeats is not None:
        num_repeated = images.repeats.images
        of_set = np.stack(_sizes(images.sizes, seed, Span(0, num_repeated), _OF_SET))
        repeats = name < num_repeated
        sides[:, repeats] = of_set[:, name[repeats]]
    width, height = sides[:, present]
    shape = np.zeros((len(width), 4), dtype=np.int64)
    if vision is not None:
        shape = np.array([_shape(vision, *pair) for pair in zip(width.tolist(), height.tolist(), strict=True)])
        shape = shape.reshape(-1, 4).astype(np.int64)
    begin: Ints = np.concatenate([[0], np.cumsum(per_request)])
    before = np.cumsum(shape[:, 3]) - shape[:, 3]
    first = np.repeat(begin[:-1], per_request)
    start = before - before[first] if len(before) else before
    return RequestImages(begin, name[present], width, height, start, shape, num_repeated, vision is not None)


_OF_IMAGES = (IMAGE_SIZE, IMAGE_WIDTH, IMAGE_HEIGHT)
_OF_SET = (SET_SIZE, SET_WIDTH, SET_HEIGHT)


@lru_cache(maxsize=1 << 14)
def _shape(vision: Vision, width: int, height: int) -> ImageShape:
    return vision.shape(width, height)


def _names(images: LoadImages, seed: int, slots: Span) -> Ints:
    """Return the identity of the image in each slot of a request: its number in the repeated set, or one of its own."""
    numbers = slots.numbers.astype(np.int64)
    repeats = images.repeats
    if repeats is None:
        return numbers
    weights = np.arange(1, repeats.images + 1, dtype=np.float64) ** -repeats.skew
    upper = np.cumsum(weights)
    chosen = np.searchsorted(upper, drawn(seed, IMAGE_IN_SET, slots) * upper[-1], side="right")
    in_set = drawn(seed, IMAGE_REPEATS, slots) < repeats.share
    names: Ints = np.where(in_set, np.minimum(chosen, repeats.images - 1), repeats.images + numbers)
    return names


def _sizes(sizes: Sequence[ImageSize], seed: int, slots: Span, purposes: tuple[int, int, int]) -> tuple[Ints, Ints]:
    """Return widths and heights of images in pixels."""
    of_size, of_width, of_height = purposes
    upper = np.cumsum([size.share for size in sizes])
    chosen = np.searchsorted(upper, drawn(seed, of_size, slots) * upper[-1], side="right")
    chosen = np.minimum(chosen, len(sizes) - 1)
    at, rows = drawn(seed, of_width, slots), np.arange(len(chosen))
    width = np.stack([_side(size.width, at) for size in sizes])[chosen, rows]
    at = drawn(seed, of_height, slots)
    height = np.stack([_side(size.height, at) for size in sizes])[chosen, rows]
    return width, height


def _side(side: SideQuantiles, levels: Array) -> Ints:
    return np.rint(np.interp(levels, side.levels, side.pixels)).astype(np.int64)


# --- in prompts -------------------------------------------------------------------------------------------


def placed(images: RequestImages, prefixes: Sequence[Sequence[int]] | None, block_tokens: int) -> RequestImages:
    """Return the images behind the blocks of the prefix that each request shares."""
    if prefixes is None:
        return images
    before = np.array([len(prefix) for prefix in prefixes], dtype=np.int64) * block_tokens
    return replace(images, start=images.start + np.repeat(before, images.per_request))


def named_blocks(
    images: RequestImages, prefixes: Sequence[tuple[int, ...]] | None, block_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Return the names of the blocks of each prompt: those of its prefix, and those up to its first new image."""
    rows = []
    for number in range(len(images.begin) - 1):
        prefix = () if prefixes is None else prefixes[number]
        rows.append(prefix + _names_of(images.of(number), images.num_repeated, prefix, block_tokens))
    return tuple(rows)


def _names_of(
    images: Sequence[PromptImage], num_repeated: int, prefix: Sequence[int], block_tokens: int
) -> tuple[int, ...]:
    names: list[int] = []
    before = f"{prefix[-1] if prefix else -1}"
    block = len(prefix)
    for image in images:
        if image.name >= num_repeated:
            break
        before += f",{image.name}"
        while (block + 1) * block_tokens <= image.start + image.shape.tokens:
            digest = blake2b(f"{before}:{block}".encode(), digest_size=7).digest()
            names.append(_NAMED | int.from_bytes(digest, "big"))
            block += 1
    return tuple(names)
