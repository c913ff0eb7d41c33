"""Jumps of a simulation as columns of whole numbers: about a hundred bytes each, an eighth of what objects need."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from simtune.engine import Step


class StepRecord(NamedTuple):
    """A jump of one core, for timelines: `steps` equal steps from tick `start` to `end`."""

    core: int
    start: int
    end: int
    steps: int
    num_decodes: int
    prefill_tokens: int
    running: int
    waiting: int
    free_blocks: int
    draft_tokens: int = 0
    """Drafts verified by each of the steps."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(request, tokens) of the prompts that are computed."""
    preempted: tuple[int, ...] = ()
    """Requests that lost their seat when the step was scheduled."""


COUNTS = StepRecord._fields[:10]
"""Fields of StepRecord that are a single number."""


class RecordedSteps(Sequence[StepRecord]):
    """The jumps in the order in which they ended. Items are made on access; `column` is quicker."""

    def __init__(self) -> None:
        self._counts = array("q")
        self._chunks, self._preempted = array("q"), array("q")
        self._chunk_ends, self._preempted_ends = array("q"), array("q")

    def add(self, step: Step, core: int, span: tuple[int, int], steps: int, waiting: int, free: int) -> None:
        """Record `steps` repetitions of a step over the ticks of `span`."""
        chunks = step.chunks
        prefill = sum(chunk.tokens for chunk in chunks)
        running = step.num_decodes + len(chunks)
        self._counts.extend((core, *span, steps, step.num_decodes, prefill, running, waiting, free, step.draft_tokens))
        self._chunks.extend(chain.from_iterable((chunk.request.id, chunk.tokens) for chunk in chunks))
        self._preempted.extend(request.id for request in step.preempted)
        self._chunk_ends.append(len(self._chunks))
        self._preempted_ends.append(len(self._preempted))

    def __len__(self) -> int:
        return len(self._chunk_ends)

    @overload
    def __getitem__(self, at: int) -> StepRecord: ...
    @overload
    def __getitem__(self, at: slice) -> list[StepRecord]: ...
    def __getitem__(self, at: int | slice) -> StepRecord | list[StepRecord]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        i = range(len(self))[at]
        chunks = self._chunks[self._chunk_ends[i - 1] if i else 0 : self._chunk_ends[i]]
        preempted = self._preempted[self._preempted_ends[i - 1] if i else 0 : self._preempted_ends[i]]
        counted = StepRecord._make((*self.counts(i), (), ()))
        return counted._replace(chunks=tuple(zip(chunks[::2], chunks[1::2], strict=True)), preempted=tuple(preempted))

    def counts(self, at: int) -> array[int]:
        """Return the COUNTS of a jump."""
        return self._counts[at * len(COUNTS) : (at + 1) * len(COUNTS)]

    def column(self, name: str) -> NDArray[np.int64]:
        """Return one of the COUNTS of all jumps, without a copy; steps can not be added while it is held."""
        table = np.frombuffer(self._counts, dtype=np.int64) if len(self) else np.zeros(0, dtype=np.int64)
        return table.reshape(-1, len(COUNTS))[:, COUNTS.index(name)]

    def chunks(self) -> NDArray[np.int64]:
        """Return rows of (jump, request, tokens), one for each prompt that was computed in a jump."""
        return self._listed(self._chunks, self._chunk_ends, 2)

    def preempted(self) -> NDArray[np.int64]:
        """Return rows of (jump, request), one for each request that lost its seat before a jump."""
        return self._listed(self._preempted, self._preempted_ends, 1)

    @staticmethod
    def _listed(values: array[int], ends: array[int], width: int) -> NDArray[np.int64]:
        """Return rows of the lists of all jumps, each beginning with the jump's number."""
        rows = np.array(values, dtype=np.int64).reshape(-1, width)
        last = np.array([0, *ends], dtype=np.int64)
        lengths = (last[1:] - last[:-1]) // width
        return np.column_stack([np.repeat(np.arange(len(ends)), lengths), rows])
