"""Prompts of data-parallel ranks in the same steps: TensorRT-LLM's `attention_dp_config.enable_balance`.

Ranks that share experts step together, so a prompt of one rank makes the step of all of them longer. With balance a
rank holds its prompts back until every rank has some, and then until `batching_wait_iters` more steps have gathered
others; after `timeout_iters` steps in which some rank had none, those that wait go on. Nothing is held back while a
rank decodes nothing. Steps are counted whether prompts wait or not, so a prompt waits for the rest of a timeout.

Facts: `_balance_adp_requests` in tensorrt_llm/_torch/pyexecutor/py_executor.py of TensorRT-LLM 1.2,
`_balance_adp_context_requests` of its scheduler later; defaults of `AttentionDpConfig` in
tensorrt_llm/llmapi/llm_args.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

TIMEOUT_ITERS = 50
BATCHING_WAIT_ITERS = 10


class RankLoad(NamedTuple):
    """Work of a rank before a step of its group."""

    has_prompts: bool
    """True if its next step has prompts unless they are held back."""
    num_decodes: int
    has_seat: bool
    """True if it decodes fewer requests than it has seats."""


class PromptBalance:
    """A rank of a group that may hold prompts back; the first one decides for all before each step of the group."""

    __slots__ = (
        "_batching_wait_iters",
        "_gathered",
        "_timeout_iters",
        "_waited",
        "enabled",
        "held",
        "in_group",
        "load",
    )

    def __init__(
        self,
        load: Callable[[], RankLoad],
        enabled: bool,
        timeout_iters: int = TIMEOUT_ITERS,
        batching_wait_iters: int = BATCHING_WAIT_ITERS,
    ) -> None:
        """Count steps from 0; `load` returns the work of this rank. Raises ValueError for negative numbers of steps."""
        if timeout_iters < 0 or batching_wait_iters < 0:
            raise ValueError(
                "attention_dp_timeout_iters and attention_dp_batching_wait_iters must be 0 or more, "
                f"not {timeout_iters} and {batching_wait_iters}"
            )
        self.load, self.enabled = load, enabled
        self._timeout_iters, self._batching_wait_iters = timeout_iters, batching_wait_iters
        self.in_group = False
        """True of a rank of a group that steps together."""
        self.held = False
        """True if the prompts of this rank are held back in the next step."""
        self.restart()

    def restart(self) -> None:
        """Forget the steps so far: the group is lost, and a new one begins."""
        self._waited = self._gathered = 0

    def decide(self, ranks: Sequence[PromptBalance]) -> None:
        """Tell the ranks of a group whether their prompts are held back in its next step."""
        waits = self.holds([rank.load() for rank in ranks])
        for rank in ranks:
            rank.held = waits

    def holds(self, ranks: Sequence[RankLoad]) -> bool:
        """Count a step of the group; True if its ranks hold their prompts back in it."""
        all_decode = all(rank.num_decodes for rank in ranks)
        if all(rank.has_seat for rank in ranks) and all(rank.has_prompts for rank in ranks):
            self._waited = 0
            if not all_decode:
                return False
            if self._gathered < self._batching_wait_iters:
                self._gathered += 1
                return True
            self._gathered = 0
            return False
        self._waited += 1
        if self._waited < self._timeout_iters and all_decode:
            return True
        self._waited = 0
        return False
