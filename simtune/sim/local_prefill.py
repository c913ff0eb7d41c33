"""Conditional disaggregation: prompts that decode instances compute themselves.

Dynamo's router (`lib/kv-router`, policies isl_bounding and isl_or_load) and llm-d's prefix-based decider choose the
decode instance first, and send a prompt to a prefill instance only if enough of it is to be computed.
"""

from __future__ import annotations

from simtune.engine import Request
from simtune.sim.core import EngineCore
from simtune.sim.router import Router
from simtune.specs.plan import LocalPrefill


class LocalPrefills:
    """Choice of the decode core that computes a prompt itself."""

    def __init__(self, rule: LocalPrefill, prefill: Router, decode: Router) -> None:
        self._rule, self._prefill, self._decode = rule, prefill, decode

    def core_for(self, now: int, request: Request) -> EngineCore | None:
        """Return the decode core that computes a request from the beginning; None if a prefill core is to compute its
        prompt, or no decode core is up."""
        rule = self._rule
        queued = rule.queue_above is not None and self._shortest_queue() > rule.queue_above
        if not (queued or rule.below_tokens):
            return None
        core = self._decode.choose(request, now)
        if core is not None and not (queued or self._stays(core, request)):
            # It comes back with its KV cache, and is routed then.
            self._decode.over(request, core, now)
            return None
        return core

    def _shortest_queue(self) -> float:
        """Return the requests that wait at the prefill core with the fewest; infinite if none is up."""
        return min((core.scheduler.num_waiting for core in self._prefill.cores if core.up), default=float("inf"))

    def _stays(self, core: EngineCore, request: Request) -> bool:
        """True if so little of a prompt is to be computed that the decode core does it."""
        kv, rule = core.scheduler.kv, self._rule
        to_compute = request.prompt_tokens
        if kv.caches:
            hit = kv.find(request)
            to_compute -= hit.blocks * kv.block_size + hit.copied_tokens
        if to_compute >= rule.below_tokens:
            return False
        return rule.below_share is None or to_compute < rule.below_share * request.prompt_tokens
