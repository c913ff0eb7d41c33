"""Time saved where the tokens that a sequence verifies visit experts in common.

A token visits each expert of its layer with probability p = k / E. Tokens of different sequences choose
independently. With `neighbour_reuse` r a token keeps the choice of the token before it with probability r, and chooses
anew otherwise, so w neighbouring tokens all miss an expert with probability (1 - p) (1 - (1 - r) p)^(w - 1). They wake
as many experts as

    1 + (w - 1) log(1 - (1 - r) p) / log(1 - p)

independent tokens. With r = 0 these are w tokens, as everywhere else; with r = 1 one.
"""

from __future__ import annotations

import numpy as np

from simtune.arrays import Array, Ints
from simtune.costs.experts import SharingLayers
from simtune.costs.iteration import StepModel
from simtune.costs.ticks import TICKS_PER_SECOND


class SharedExperts:
    """Ticks by which verifications are faster than passes over as many tokens of different sequences.

    Steps with prefill chunks save nothing: their prompts wake most experts.
    """

    def __init__(self, sharing: SharingLayers, scale: float, width: int) -> None:
        self._sharing, self._scale, self._width = sharing, scale, width
        self._saved: dict[tuple[int, int], int] = {}

    @classmethod
    def of(cls, model: StepModel, scale: float, width: int) -> SharedExperts | None:
        """Return the ticks that verifications of up to `width` tokens a sequence save; None if they save nothing."""
        return None if model.sharing is None or width == 1 else cls(model.sharing, scale, width)

    def ticks(self, num_decodes: int, verify_tokens: int) -> int:
        """Ticks saved by `num_decodes` sequences that verify `verify_tokens` tokens between them."""
        if verify_tokens <= num_decodes:
            return 0
        key = (num_decodes, verify_tokens)
        if key not in self._saved:
            saved = self._sharing.saved_s(np.array([float(verify_tokens)]), np.array([float(num_decodes)]))
            self._saved[key] = int(self._scale * saved[0] * TICKS_PER_SECOND)
        return self._saved[key]

    def most(self, tokens: Array) -> Ints:
        """Ticks that a verification of these tokens saves at most: of sequences with `width` tokens each, and any
        fewer."""
        widths = range(1, self._width + 1)
        saved = [self._sharing.saved_s(tokens, np.maximum(1.0, tokens / width)) for width in widths]
        most: Ints = np.ceil(self._scale * np.max(saved, axis=0) * TICKS_PER_SECOND).astype(np.int64)
        return most
