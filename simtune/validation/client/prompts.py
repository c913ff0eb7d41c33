"""Prompts of exact lengths, as token ids: shared prefixes of a workload have the same tokens, everything else
differs."""

from __future__ import annotations

import hashlib

import numpy as np

from simtune.errors import UsageError
from simtune.workload.requests import RequestStream

FIRST_TOKEN = 3
"""Ids below this one are commonly padding and the begin and end of a text."""


def prompt_seed(seed: int, run: str) -> int:
    """Return the seed of the prompts of a run, of 63 bits: runs with other names share no prompt with it."""
    return _digest(f"{seed} run {run}", 8) >> 1


def _digest(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big")


class Prompts:
    """Token ids of every request of a stream, drawn on demand: a function of seed and request alone.

    Block names (`hash_ids`) stand for blocks of the same tokens; tokens without a block name belong to one request
    alone. The outputs of earlier turns, which no client can know beforehand, are drawn like prompts.
    """

    def __init__(self, stream: RequestStream, vocab_size: int, seed: int = 0) -> None:
        """Raise UsageError if the vocabulary has no ids to draw from."""
        if vocab_size <= FIRST_TOKEN:
            raise UsageError(f"a vocabulary of {vocab_size} has no tokens to make prompts of")
        self._stream = stream
        self._vocab_size = vocab_size
        self._seed = seed

    def __getitem__(self, request: int) -> list[int]:
        """Return the prompt of a request, with the length in the stream."""
        stream = self._stream
        length = int(stream.prompt_tokens[request])
        tokens: list[int] = []
        for block in () if stream.hash_ids is None else stream.hash_ids[request]:
            if len(tokens) >= length:
                break
            tokens += self._drawn(f"block {block}", stream.block_tokens)
        tokens += self._drawn(f"request {request}", max(0, length - len(tokens)))
        return tokens[:length]

    def _drawn(self, name: str, count: int) -> list[int]:
        key = _digest(f"{self._seed} {name}", 16)
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
        ids: list[int] = generator.integers(FIRST_TOKEN, self._vocab_size, count).tolist()
        return ids
