"""Costs of steps in which the beginning that all contexts share is attended to once: cascade attention.

Two kernels attend for each layer: the queries of all decodes, as one batch, to the shared tokens, like a chunk of a
prompt, and each decode to the rest of its context: decode(B, c - P) + prefill(P + B) - prefill(P) + overhead, as in
`StepModel.breakdown`. Formula and checks: docs/costs.md (Hydragen, arXiv 2402.05099).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simtune.costs.compiled import AttentionRow, CompiledCosts, DecodeRow, DecodeTable
from simtune.costs.protocol import UNBOUNDED
from simtune.costs.ticks import to_ticks


@dataclass(eq=False)
class _Shifted:
    """Decode attention beside prefill, of contexts of which `shared_tokens` are attended to once."""

    table: DecodeTable
    costs: SharedPrefixCosts
    chunk: int = field(init=False)

    def __post_init__(self) -> None:
        self.chunk = self.table.chunk

    def ticks(self, num_decodes: int, context_tokens: int) -> int:
        own_tokens = context_tokens - num_decodes * self.costs.shared_tokens
        return self.table.ticks(num_decodes, own_tokens) + self.costs.shared_ticks(num_decodes, mixed=True)


class SharedPrefixCosts(CompiledCosts):
    """Step costs of decodes whose contexts all begin with the same tokens, made of the tables of others."""

    def __init__(self, costs: CompiledCosts, shared_tokens: int) -> None:
        vars(self).update(vars(costs))
        self.shared_tokens = shared_tokens
        self._steps = [None] * (self.tables.max_num_seqs + 1)
        self._beside = tuple(_Shifted(table, self) for table in self.tables.beside)  # type: ignore[misc]
        self._shared: dict[tuple[int, bool], int] = {}

    def shared_ticks(self, num_decodes: int, *, mixed: bool) -> int:
        """Return the ticks in which all decodes attend to the shared tokens, in a step with or without chunks."""
        key = num_decodes, mixed
        if key not in self._shared:
            seconds = self.tables.model.attention.shared_s(self.shared_tokens, num_decodes)
            self._shared[key] = to_ticks(self.tables.scale(mixed) * max(0.0, seconds))
        return self._shared[key]

    def _make_step(self, num_decodes: int) -> DecodeRow:
        starts, values, slopes, floor, after = super()._make_step(num_decodes)
        shared, once = num_decodes * self.shared_tokens, self.shared_ticks(num_decodes, mixed=False)
        attention: AttentionRow = (
            [*(start + shared for start in starts[:-1]), UNBOUNDED * num_decodes],
            [ticks + once for ticks in values],
            slopes,
        )
        row = self._steps[num_decodes] = (*attention, floor, after)
        return row
