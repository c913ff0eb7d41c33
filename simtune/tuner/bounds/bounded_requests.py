"""Requests of a stream in the form that bounds use."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.workload.requests import RequestStream


class BoundLoad:
    """Prompts, decodes and possible prefix cache hits; requests that are too long for a plan are left out."""

    def __init__(self, stream: RequestStream, longest: int) -> None:
        tokens = stream.prompt_tokens + stream.output_tokens
        self.stream = stream
        self.fits: NDArray[np.bool_] = tokens <= longest
        self.prompt: Array = stream.prompt_tokens.astype(np.float64)
        self.decodes: Array = (stream.output_tokens - 1).astype(np.float64)
        """Decode tokens: all output tokens after the first."""
        self.context: Array = self.decodes * self.prompt + self.decodes * (self.decodes + 1) / 2
        """Context tokens that the decode steps of each request read, added up."""

    def mean(self, values: Array) -> float:
        """Return the mean of a value per request, as if requests that do not fit or may be aborted had none."""
        return float(np.where(self.fits & self.stream.needed, values, 0.0).mean())

    @property
    def private(self) -> Array:
        """Context tokens that are not those of a prefix which a cache may share."""
        tokens: Array = np.maximum(self.context - self.decodes * self.could_share, 0.0)
        return tokens

    @cached_property
    def could_hit(self) -> Ints:
        """Upper bound on the prompt tokens found in a prefix cache: shared ones, and at most all but one of the
        prompt."""
        most: Ints = np.minimum(self.could_share, self.stream.prompt_tokens - 1)
        return most

    @cached_property
    def could_share(self) -> Ints:
        """Tokens with which the prompt or the output of another request, earlier or later, begins as well."""
        stream = self.stream
        if stream.hash_ids is None:
            return np.zeros(len(stream), dtype=np.int64)
        # The request of each block, or -1 if several requests have it.
        owners: dict[Hashable, int] = {}
        for request, blocks in enumerate(stream.hash_ids):
            for block in blocks:
                owners[block] = request if owners.get(block, request) == request else -1
        tokens = np.zeros(len(stream), dtype=np.int64)
        for request, blocks in enumerate(stream.hash_ids):
            shared = 0
            for block in blocks:
                if owners[block] >= 0:
                    break
                shared += 1
            tokens[request] = shared * stream.block_tokens
        return tokens
