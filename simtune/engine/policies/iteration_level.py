"""Iteration-level scheduling: requests join and leave between any two steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Unpack

from simtune.engine.policies.listed import ScheduledTokens, StallFree
from simtune.engine.policy_traits import Feature, Settings
from simtune.engine.request import Request


class Orca(StallFree):
    """Whole prompts run in one iteration with those that decode, first come, first served (Orca, OSDI 2022).

    An admitted request has blocks for max_model_len tokens, so that none is ever preempted. Prompts come first in a
    step and are never cut, whatever `chunked_prefill` is; a long one makes the step long for all requests.
    """

    offers = StallFree.offers - {"swap"}
    lacks: ClassVar[Mapping[Feature, str]] = {"swap": "requests have blocks for max_model_len and are never preempted"}
    cuts_prompts = "never"
    first_come = True

    def __init__(self, **settings: Unpack[Settings]) -> None:
        settings["chunked_prefill"] = False
        super().__init__(**settings)

    def choose(self, preempted: list[Request]) -> ScheduledTokens:
        """Return prompts before those that decode."""
        scheduled = super().choose(preempted)
        return dict(sorted(scheduled.items(), key=lambda item: item[0].decoding))

    def reservation(self, request: Request) -> int:
        """Return the most tokens that the request could ever have."""
        return self.max_model_len


class Sarathi(StallFree):
    """Stall-free batching with chunked prefills (Sarathi-Serve, arXiv 2403.02310), first come, first served.

    Every step is filled up to `max_num_batched_tokens`: those that decode, then prompts in prefill, then new ones, the
    last of them cut. A long prompt is spread over steps of bounded length, and no request that decodes waits for it.
    """

    first_come = True
