"""Requests that hide their true output length from policies."""

from __future__ import annotations

import sys

from simtune.engine import Request


class Sealed(Request):
    """Request whose output length may be read when an engine detects an end, but not when a policy chooses."""

    __slots__ = ("_true",)
    MAY_READ = frozenset(
        {
            "Scheduler.outgrows",
            "DecodeBatch.join",
            "_end_chunks",
            "ListScheduler.remaining",
            "ListScheduler._repetitions",  # from Python 3.12 on, and before:
            "ListScheduler._repetitions.<locals>.<listcomp>",
            "ListScheduler.complete",
        }
    )
    CHOOSING = frozenset(
        {
            "choose", "key", "admit", "reservation", "steady_steps", "decode_all", "serve_prompts", "would_notice",
            "_schedule_running", "_schedule_one_by_one", "_schedule_waiting", "_victim",
        }
    )  # fmt: skip

    @property
    def output_tokens(self) -> int:
        """True output length, if the caller may read it."""
        frame = sys._getframe(1)
        assert frame.f_code.co_qualname in self.MAY_READ, f"{frame.f_code.co_qualname} reads the output length"
        while frame.f_back is not None:
            assert frame.f_code.co_name not in self.CHOOSING, f"{frame.f_code.co_qualname} goes by the output length"
            frame = frame.f_back
        return self._true

    @output_tokens.setter
    def output_tokens(self, tokens: int) -> None:
        self._true = tokens

    @property
    def true_tokens(self) -> int:
        """True output length, for the test itself."""
        return self._true

    def __repr__(self) -> str:
        return f"<{self.id}>"
