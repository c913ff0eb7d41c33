"""Random small worlds, and a plain clock over the plain engine to compare the simulator with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.costs.protocol import UNBOUNDED, StepCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import VllmFcfs
from simtune.results.outcome import Outcome
from simtune.sim.core import EngineCore, Stepping
from simtune.sim.world import World
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream
from tests.engine.plain import PlainEngine, PlainRequest

LONGEST_OUTPUT = 250
"""Most output tokens of a request."""


@dataclass(frozen=True)
class Kinked:
    """Costs that are affine only in pieces: a kink at every `every` context tokens, as in compiled tables."""

    base: LinearCosts
    every: int

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        first, slope, _ = self.base.decode(num_decodes, context_tokens)
        piece = context_tokens // self.every
        span = -(-((piece + 1) * self.every - context_tokens) // num_decodes)
        return first + 1000 * piece * piece, slope, min(span, UNBOUNDED)

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        kinks = (context_tokens // self.every) ** 2 if num_decodes else 0
        return self.base.mixed(num_decodes, context_tokens, chunks, num_samples) + 1000 * kinks


@dataclass(frozen=True)
class ByRanks:
    """Costs that are longer by a share of a step, the fewer ranks an instance has."""

    base: LinearCosts | Kinked
    ticks: int = 0

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        first, slope, span = self.base.decode(num_decodes, context_tokens)
        return first + self.ticks, slope, span

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        return self.base.mixed(num_decodes, context_tokens, chunks, num_samples) + self.ticks

    def round(self, *step: Any) -> int:
        assert isinstance(self.base, LinearCosts)
        return self.base.round(*step) + self.ticks

    def rounds(self, *step: Any) -> list[int]:
        assert isinstance(self.base, LinearCosts)
        return [end + n * self.ticks for n, end in enumerate(self.base.rounds(*step), 1)]

    def with_ranks(self, ranks: int) -> ByRanks:
        return ByRanks(self.base, TICKS_PER_SECOND // (500 * ranks))


@dataclass(frozen=True)
class Setting:
    """One world: engine settings, costs, cores and a stream."""

    blocks: int
    block_size: int
    seqs: int
    budget: int
    cores: int
    costs: StepCosts
    stream: RequestStream

    def make_cores(self, stepping: Stepping | None = None) -> list[EngineCore]:
        """Fresh cores, each an instance of its own unless they share what `stepping` says."""
        return [
            EngineCore(
                VllmFcfs(
                    num_blocks=self.blocks,
                    block_size=self.block_size,
                    max_num_seqs=self.seqs,
                    max_num_batched_tokens=self.budget,
                    max_model_len=self.blocks * self.block_size,
                ),
                self.costs,
                stepping=stepping or Stepping(),
            )
            for _ in range(self.cores)
        ]

    def run(self, *, single_steps: bool = False, record: bool = False) -> Outcome:
        return World(self.make_cores(), self.stream, single_steps=single_steps, record=record).run()

    def run_plainly(self) -> dict[str, list[int]]:
        """Open loop only: every core on its own, one engine step after the other."""
        n = len(self.stream)
        assert self.stream.arrival_s is not None
        arrival = np.rint(self.stream.arrival_s * TICKS_PER_SECOND).astype(np.int64).tolist()
        out = {name: [-1] * n for name in ("scheduled", "first_token", "finish")} | {"preemptions": [0] * n}
        for core in range(self.cores):
            coming = [
                PlainRequest(i, int(self.stream.prompt_tokens[i]), int(self.stream.output_tokens[i]))
                for i in range(core, n, self.cores)
                if self.stream.prompt_tokens[i] + self.stream.output_tokens[i] <= self.blocks * self.block_size
            ]
            everyone = {r.id: r for r in coming}
            engine, now = PlainEngine(self.blocks, self.block_size, self.seqs, self.budget), 0
            while coming or engine.waiting or engine.running:
                if not (engine.waiting or engine.running):
                    now = max(now, arrival[coming[0].id])
                while coming and arrival[coming[0].id] <= now:
                    engine.add(coming.pop(0))
                step = engine.step()
                for i in step.scheduled:
                    if out["scheduled"][i] < 0:
                        out["scheduled"][i] = now
                decodes = set(step.decodes)
                chunks = [(step.past[i], t) for i, t in step.scheduled.items() if i not in decodes]
                context = sum(step.past[i] + 1 for i in decodes)
                sampled = len(decodes) + sum(
                    step.past[i] + t == everyone[i].known - (i in step.first or everyone[i].decoding)
                    for i, t in step.scheduled.items()
                    if i not in decodes
                )
                now += self.costs.mixed(len(decodes), context, chunks, sampled)
                for i in step.first:
                    out["first_token"][i] = now
                for i in step.finished:
                    out["finish"][i] = now
            for r in everyone.values():
                out["preemptions"][r.id] = r.preemptions
        return out


@st.composite
def settings(draw: st.DrawFn, closed: bool = False) -> Setting:
    """Tight memory is common, so that preemptions happen; arrivals often coincide with one another."""
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    blocks = draw(st.sampled_from([8, 12, 20, 40, 80]))
    seqs = draw(st.integers(1, 12))
    budget = max(seqs, draw(st.sampled_from([1, 8, 24, 64, 512])))
    n = draw(st.integers(1, 40))
    longest = blocks * block_size
    prompt = draw(st.lists(st.integers(1, max(1, longest // 2)), min_size=n, max_size=n))
    # Longer answers make longer jumps and no other ones; they took seven tenths of the steps of all worlds.
    most = min(LONGEST_OUTPUT, max(1, longest // 2))
    output = draw(st.lists(st.integers(1, most), min_size=n, max_size=n))
    base = LinearCosts(
        step_s=draw(st.sampled_from([1e-3, 7e-3])),
        per_token_s=draw(st.sampled_from([0.0, 2e-5])),
        per_context_s=draw(st.sampled_from([0.0, 3e-7, 1e-5])),
        per_pair_s=draw(st.sampled_from([0.0, 1e-8])),
    )
    costs: StepCosts = base if draw(st.booleans()) else Kinked(base, draw(st.sampled_from([7, 64])))
    cores = draw(st.integers(1, 3))
    if closed:
        users = draw(st.integers(1, 8))
        stream = stream_of(None, prompt, output, users=users, think_s=draw(st.sampled_from([0.0, 0.004])))
    else:
        gaps = draw(st.lists(st.sampled_from([0.0, 1e-3, 3.3e-3, 0.02, 0.3]), min_size=n, max_size=n))
        stream = stream_of(np.cumsum(gaps).tolist(), prompt, output)
    return Setting(blocks, block_size, seqs, budget, cores, costs, stream)
