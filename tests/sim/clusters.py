"""Random small clusters: pipelines, prefill and decode apart, routers, and instances that come, fail and switch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import POLICIES, Scheduler
from simtune.sim.availability import Change
from simtune.sim.core import EngineCore, KvConnector, Stepping
from simtune.sim.link import TransferLink
from simtune.sim.outcome import Outcome
from simtune.sim.requests import RequestStream
from simtune.sim.router import ROUTERS, LoadAware, Router
from simtune.sim.stepping import Pipeline
from simtune.sim.world import World
from tests.sim.worlds import stream_of

BLOCK_BYTES = 1000
VLLM = ("vllm-fcfs", "vllm-priority")
WHOLE_PROMPTS = ("static", "orca")
SMALL = {"SHORT_TOKENS": 16, "LEVELS": 4, "PATIENCE": 60, "PROMPT_TOKENS_PER_ITERATION": 8, "PARTS": 3}
"""The policies' own constants, on the scale of small worlds."""


@dataclass(frozen=True)
class ImbalancedCosts(LinearCosts):
    """Steps take longer the further the longest context is above the mean."""

    balanced = False

    def imbalance(self, num_decodes: int, context_tokens: int, longest_context: int, with_chunks: bool) -> int:
        return (2 + with_chunks) * 10**6 * (longest_context * num_decodes - context_tokens)


@dataclass(frozen=True)
class Kind:
    """Instances of one pool."""

    instances: int
    pp: int
    blocks: int
    seqs: int
    budget: int
    step_s: float


@dataclass(frozen=True)
class Cluster:
    """A world of one mixed pool, or of a prefill and a decode pool."""

    front: Kind
    back: Kind | None
    block_size: int
    stream: RequestStream
    routing: str
    stale_s: float
    link: tuple[float, float, float, int, bool]
    """Bytes/s, setup seconds, seconds per block, layers, shared by all."""
    events: tuple[tuple[str, float, int, int, float], ...] = ()
    """(what, at, pool, instance, how long)."""
    async_scheduling: bool = False
    policy: str = "vllm-fcfs"
    options: dict[str, Any] = field(default_factory=dict)
    """Of its scheduler."""
    imbalanced: bool = False
    predicted_tokens: list[int] | None = None
    deadlines: list[float] | None = None
    cores: list[EngineCore] = field(default_factory=list)

    def run(self, *, single_steps: bool = False, record: bool = False) -> Outcome:
        front = self._cores(self.front, "front")
        back = [] if self.back is None else self._cores(self.back, "back")
        cores = front + back
        for number, core in enumerate(cores):
            core.number = number
        if back:
            bytes_per_s, setup_s, block_s, layers, shared = self.link
            links = [TransferLink(bytes_per_s, 0 if shared else i) for i in range(self.front.instances)]
            for core in front:
                connector = KvConnector(
                    links[0 if shared else core.instance],
                    BLOCK_BYTES,
                    round(setup_s * TICKS_PER_SECOND),
                    round(block_s * TICKS_PER_SECOND),
                    layers,
                )
                core.connector = connector
        changes = []
        for what, at_s, pool, instance, for_s in self.events:
            of_pool = (front, back)[pool] or front
            changed = [core for core in of_pool if core.instance == instance % (1 + max(x.instance for x in of_pool))]
            at, until = round(at_s * TICKS_PER_SECOND), round((at_s + for_s) * TICKS_PER_SECOND)
            if what == "start":
                for core in changed:
                    core.up = False
                changes.append(Change(until, changed, up=True))
            elif what == "failure":
                changes += [Change(at, changed, up=False, lost=True), Change(until, changed, up=True)]
            else:
                changes.append(Change(at, changed, up=False, then=changed, delay=until - at))
        outcome = World(
            cores,
            self.stream,
            router=self._router(front),
            decode_router=self._router(back) if back else None,
            changes=changes,
            predicted_tokens=self.predicted_tokens,
            deadlines=self.deadlines,
            single_steps=single_steps,
            record=record,
        ).run()
        self.cores[:] = cores
        return outcome

    def _cores(self, kind: Kind, pool: str) -> list[EngineCore]:
        costs = ImbalancedCosts if self.imbalanced else LinearCosts
        stepping = [Pipeline(kind.pp) if kind.pp > 1 else Stepping() for _ in range(kind.instances)]
        return [
            EngineCore(
                self._scheduler(kind, pool),
                costs(step_s=kind.step_s, per_token_s=2e-5, per_context_s=3e-7),
                instance,
                pool,
                stepping=stepping[instance],
                swap=round(1e-4 * TICKS_PER_SECOND),
            )
            for _ in range(kind.pp)
            for instance in range(kind.instances)
        ]

    def _scheduler(self, kind: Kind, pool: str) -> Scheduler:
        policy = self.policy if pool == "front" or self.policy != "static" else "vllm-fcfs"  # static: prompts only
        longest = kind.blocks * self.block_size
        options = self.options | ({"async_scheduling": self.async_scheduling} if policy in VLLM else {})
        return type("Small", (POLICIES[policy],), SMALL)(
            num_blocks=kind.blocks,
            block_size=self.block_size,
            max_num_seqs=kind.seqs,
            max_num_batched_tokens=max(kind.seqs, kind.budget, longest if policy in WHOLE_PROMPTS else 1),
            max_model_len=longest,
            **options,
        )

    def _router(self, cores: list[EngineCore]) -> Router:
        kind = ROUTERS[self.routing]
        needs: dict[str, Any] = {"seed": 3, "session": [i % 5 for i in range(len(self.stream))], "block_tokens": 16}
        options = {need: needs[need] for need in kind.needs}
        if issubclass(kind, LoadAware):
            options["stale_s"] = self.stale_s
        return kind(cores, **options)


def kinds(blocks: list[int], max_pp: int) -> st.SearchStrategy[Kind]:
    return st.builds(
        Kind,
        instances=st.integers(1, 3),
        pp=st.integers(1, max_pp),
        blocks=st.sampled_from(blocks),
        seqs=st.integers(1, 8),
        budget=st.sampled_from([4, 24, 200]),
        step_s=st.sampled_from([1e-3, 5e-3]),
    )


@st.composite
def clusters(draw: st.DrawFn, apart: bool, failing: bool, max_pp: int = 3) -> Cluster:
    block_size = draw(st.sampled_from([1, 4, 16]))
    blocks = [12, 30, 200]
    front = draw(kinds(blocks, max_pp))
    back = draw(kinds(blocks, max_pp)) if apart else None
    n = draw(st.integers(1, 30))
    longest = min(kind.blocks for kind in (front, back) if kind is not None) * block_size
    lengths = st.lists(st.integers(1, max(1, longest // 2)), min_size=n, max_size=n)
    prompt, output = draw(lengths), draw(lengths)
    gaps = draw(st.lists(st.sampled_from([0.0, 1e-3, 3.3e-3, 0.02]), min_size=n, max_size=n))
    closed = draw(st.booleans())
    stream = stream_of(
        None if closed else np.cumsum(gaps).tolist(), prompt, output, users=6 if closed else 0, think_s=1e-3
    )
    event = st.tuples(
        st.sampled_from(["start", "failure", "switch"]),
        st.sampled_from([0.0, 4e-3, 0.0211, 0.05]),
        st.integers(0, 1),
        st.integers(0, 2),
        st.sampled_from([1e-3, 0.03, 0.5]),
    )
    events = draw(st.lists(event, max_size=3, unique_by=lambda e: (e[2], e[3]))) if failing else []
    if not apart or back is None:
        events = [e for e in events if e[2] == 0]
    # One change per instance: their order is for the plan to check.
    seen: set[tuple[int, int]] = set()
    kept = []
    for e in events:
        of_pool = back if e[2] and back is not None else front
        key = (e[2], e[3] % of_pool.instances)
        if key not in seen:
            seen.add(key)
            kept.append(e)
    return Cluster(
        front,
        back,
        block_size,
        stream,
        draw(st.sampled_from(list(ROUTERS))),
        draw(st.sampled_from([0.0, 0.01])),
        (
            draw(st.sampled_from([1e6, 1e9])),
            draw(st.sampled_from([0.0, 2e-3])),
            draw(st.sampled_from([0.0, 1e-6])),
            draw(st.sampled_from([1, 4])),
            draw(st.booleans()),
        ),
        tuple(kept),
        draw(st.booleans()),
    )


@st.composite
def of_policy(draw: st.DrawFn, policy: str) -> Cluster:
    """Clusters of any kind under one policy, with all that it can do."""
    cluster = draw(clusters(apart=draw(st.booleans()), failing=draw(st.booleans()), max_pp=2))
    n, rng = len(cluster.stream), np.random.default_rng(draw(st.integers(0, 1000)))
    options: dict[str, Any] = {}
    if not policy.startswith("transformers"):
        options["watermark_blocks"] = draw(st.sampled_from([0, 2]))
    stream = replace(cluster.stream, priority=rng.integers(0, 3, n))
    if policy in VLLM:
        feature = draw(st.sampled_from(["plain", "prefix_caching", "swap"]))
        if feature == "swap":
            options["preemption"] = "swap"
        elif feature == "prefix_caching":
            size = cluster.block_size * draw(st.sampled_from([1, 2]))
            options |= {"prefix_caching": True, "hash_block_tokens": size}
            # What is shared: the longer or shorter beginning of one of two texts.
            shared = [rng.integers(0, 1 + prompt // size) for prompt in stream.prompt_tokens]
            texts = rng.integers(0, 2, n).tolist()
            stream = replace(
                stream,
                hash_ids=tuple(tuple(1000 * t + i for i in range(k)) for t, k in zip(texts, shared, strict=True)),
            )
    return replace(
        cluster,
        stream=stream,
        policy=policy,
        options=options,
        imbalanced=draw(st.booleans()),
        async_scheduling=cluster.async_scheduling and policy in VLLM,
        predicted_tokens=rng.integers(1, 50, n).tolist(),
        deadlines=rng.choice([0.01, 0.2, 9.0], n).tolist(),
        cores=[],
    )
