"""Random small clusters under the simulated clock: pipelines, separate prefill and decode, routers, and instances that
come, fail and switch; and the invariants of all their runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from hypothesis import event
from hypothesis import strategies as st
from numpy.typing import NDArray

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
from simtune.engine import Scheduler, VllmFcfs
from simtune.results.outcome import Outcome
from simtune.sim.availability import Change
from simtune.sim.core import EngineCore, KvConnector, Stepping
from simtune.sim.kv_links import ForkedConnector
from simtune.sim.link import TransferLink
from simtune.sim.role_controller import RoleController, RoleCores
from simtune.sim.router import ROUTERS, LoadAware, Need, Router
from simtune.sim.stepping import DpGroup, Pipeline
from simtune.sim.world import World
from simtune.specs.plan import FirstToken
from simtune.specs.role_control import Pressure
from simtune.workload.requests import RequestStream

BLOCK_BYTES = 1000
SESSIONS = 5
EVEN = 5040
LONGEST = 120
"""Most tokens of a prompt and of an answer: single steps take their time."""
COLUMNS = ("arrival", "scheduled", "first_token", "transferred", "finish", "core", "preemptions", "resent")
"""Columns of an outcome that jumps and single steps must agree on."""


def stream_of(
    arrival_s: Sequence[float] | NDArray[np.floating] | None,
    prompt: Sequence[int] | NDArray[np.integer],
    output: Sequence[int] | NDArray[np.integer],
    *,
    users: int = 0,
    think_s: float = 0.0,
) -> RequestStream:
    """Return requests of one class; without arrival times those of `users` users."""
    n = len(prompt)
    return RequestStream(
        arrival_s=None if arrival_s is None else np.array(arrival_s, dtype=np.float64),
        prompt_tokens=np.array(prompt, dtype=np.int64),
        output_tokens=np.array(output, dtype=np.int64),
        class_index=np.zeros(n, dtype=np.int64),
        priority=np.zeros(n, dtype=np.int64),
        class_names=("default",),
        slos=(None,),
        users=users or None,
        think_s=think_s,
    )


def even(seconds: float) -> float:
    """Return the nearest multiple of EVEN ticks, as seconds: stages of a pipeline and parts of a step divide it evenly,
    and so do its multiples."""
    return EVEN * round(to_ticks(seconds) / EVEN) / TICKS_PER_SECOND


@dataclass(frozen=True)
class ImbalancedCosts(LinearCosts):
    """Costs whose steps take longer the further the longest context is above the mean."""

    balanced = False

    def imbalance(self, num_decodes: int, context_tokens: int, longest_context: int, with_chunks: bool) -> int:
        """Ticks on top, as many for each token above the mean."""
        return (2 + with_chunks) * 10**6 * (longest_context * num_decodes - context_tokens)


@dataclass(frozen=True)
class SmallPool:
    """Instances of one pool."""

    instances: int
    pp: int
    blocks: int
    seqs: int
    budget: int
    step_s: float
    dp: int = 1
    """Cores of an instance that step together, if it has no pipeline."""

    def stepping(self) -> Stepping:
        """Return the rule by which the cores of an instance share its GPUs."""
        if self.pp > 1:
            return Pipeline(self.pp)
        return DpGroup() if self.dp > 1 else Stepping()


class Way(NamedTuple):
    """Transfer of KV caches from prefill to decode instances."""

    bytes_per_s: float
    setup_s: float
    block_s: float
    layers: int
    shared: bool
    forked: bool = False
    """Half of the decode instances are a pool with a separate link, twice as fast."""
    first_token: FirstToken = "prefill"
    """Source of the client's first token."""


class Incident(NamedTuple):
    """Event of an instance of the first or second pool, with a duration."""

    what: Literal["start", "failure", "switch"]
    at_s: float
    pool: int
    instance: int
    for_s: float


class Moves(NamedTuple):
    """Rule by which instances of the two pools, which are all equal, take each other's role."""

    prefill: Pressure
    decode: Pressure
    every_s: float
    patience: int
    delay_s: float


@dataclass(frozen=True)
class Cluster:
    """Mixed pool, or a prefill and a decode pool, under one load."""

    front: SmallPool
    back: SmallPool | None
    block_size: int
    stream: RequestStream
    router: type[Router]
    stale_s: float
    way: Way
    incidents: tuple[Incident, ...] = ()
    async_scheduling: bool = False
    policy: type[Scheduler] = VllmFcfs
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the scheduler."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the policy's class to replace by smaller values."""
    router_options: Mapping[str, Any] = field(default_factory=dict)
    named: bool = False
    """True if each instance of the first pool has its own pool name, `front-0` and so on."""
    imbalanced: bool = False
    slower: float = 1.0
    """Factor of the times of steps and swaps over those of the pools."""
    predicted_tokens: list[int] | None = None
    deadlines: list[float] | None = None
    moves: Moves | None = None
    cores: list[EngineCore] = field(default_factory=list)
    """Cores of the latest run."""

    def run(self, *, single_steps: bool = False, record: bool = False) -> Outcome:
        """Simulate the cluster from the beginning."""
        front = self._cores(self.front, "front")
        back = [] if self.back is None else self._cores(self.back, "back")
        control = self._control(front, back)
        self.cores[:] = front + back
        for number, core in enumerate(self.cores):
            core.number = number
        if back:
            for core in back[: len(back) // 2 if self.way.forked else 0]:
                core.pool = "near"
            self._connect(front)
        return World(
            self.cores,
            self.stream,
            router=self._router(front),
            decode_router=self._router(back) if back else None,
            changes=[change for incident in self.incidents for change in _changes(incident, front, back)],
            control=control,
            first_token=self.way.first_token,
            predicted_tokens=self.predicted_tokens,
            deadlines=self.deadlines,
            single_steps=single_steps,
            record=record,
        ).run()

    def _control(self, front: list[EngineCore], back: list[EngineCore]) -> RoleController | None:
        """Return the controller; with moves, half of each pool's instances belong to the other and serve in this
        role."""
        if self.moves is None or self.back is None:
            return None
        for pool, cores in ((self.front, front), (self.back, back)):
            for core in cores:
                core.up = core.instance < pool.instances // 2
        sides = [_by_instance(front, self.front.instances), _by_instance(back, self.back.instances)]
        half = self.back.instances // 2
        sides[1] = sides[1][half:] + sides[1][:half]
        return RoleController(
            RoleCores(self.moves.prefill, sides[0]),
            RoleCores(self.moves.decode, sides[1]),
            every=to_ticks(self.moves.every_s),
            patience=self.moves.patience,
            delay=to_ticks(self.moves.delay_s),
        )

    def _cores(self, pool: SmallPool, name: str) -> list[EngineCore]:
        costs = ImbalancedCosts if self.imbalanced else LinearCosts
        stepping = [pool.stepping() for _ in range(pool.instances)]
        return [
            EngineCore(
                self._scheduler(pool, name),
                costs(*(self.slower * even(s) for s in (pool.step_s, 2e-5, 3e-7))),
                instance,
                f"{name}-{instance}" if self.named and name == "front" else name,
                stepping=stepping[instance],
                swap=to_ticks(self.slower * even(1e-4)),
            )
            for _ in range(pool.pp * pool.dp)
            for instance in range(pool.instances)
        ]

    def _scheduler(self, pool: SmallPool, name: str) -> Scheduler:
        policy = self.policy if name == "front" or self.policy.takes_over else VllmFcfs
        longest = pool.blocks * self.block_size
        ahead = {"async_scheduling": self.async_scheduling} if "async_scheduling" in policy.offers else {}
        uncut = policy.cuts_prompts == "never"
        small = type(f"Small{policy.__name__}", (policy,), dict(self.constants))
        scheduler: Scheduler = small(
            num_blocks=pool.blocks,
            block_size=self.block_size,
            max_num_seqs=pool.seqs,
            max_num_batched_tokens=max(pool.seqs, pool.budget, longest if uncut else 1),
            max_model_len=longest,
            **(self.options if policy is self.policy else {}),
            **ahead,
        )
        return scheduler

    def _router(self, cores: list[EngineCore]) -> Router:
        inputs: dict[Need, object] = {
            "seed": 3,
            "session": [i % SESSIONS for i in range(len(self.stream))],
            "block_tokens": 16,
        }
        options = {need: inputs[need] for need in self.router.needs} | dict(self.router_options)
        if issubclass(self.router, LoadAware):
            options.setdefault("stale_s", self.stale_s)
        return self.router(cores, **options)

    def _connect(self, front: Sequence[EngineCore]) -> None:
        way = self.way
        links = [TransferLink(way.bytes_per_s, 0 if way.shared else i) for i in range(self.front.instances)]
        near = TransferLink(2 * way.bytes_per_s, len(links))
        setup, block = round(way.setup_s * TICKS_PER_SECOND), round(way.block_s * TICKS_PER_SECOND)
        for core in front:
            far = KvConnector(links[0 if way.shared else core.instance], BLOCK_BYTES, setup, block, way.layers)
            core.connector = far
            if way.forked:
                core.connector = ForkedConnector({"back": far, "near": KvConnector(near, BLOCK_BYTES, 0, block)})


def _by_instance(cores: Sequence[EngineCore], instances: int) -> list[list[EngineCore]]:
    return [[core for core in cores if core.instance == instance] for instance in range(instances)]


def _changes(incident: Incident, front: list[EngineCore], back: list[EngineCore]) -> list[Change]:
    pool = (front, back)[incident.pool] or front
    instance = incident.instance % (1 + max(core.instance for core in pool))
    cores = [core for core in pool if core.instance == instance]
    at, until = to_ticks(incident.at_s), to_ticks(incident.at_s + incident.for_s)
    if incident.what == "start":
        for core in cores:
            core.up = False
        return [Change(until, cores, up=True)]
    if incident.what == "failure":
        return [Change(at, cores, up=False, lost=True), Change(until, cores, up=True)]
    return [Change(at, cores, up=False, then=cores, delay=until - at)]


# --- drawn ------------------------------------------------------------------------------------------------


def small_pools(max_pp: int) -> st.SearchStrategy[SmallPool]:
    """Draw few instances with few seats; memory may be tight."""
    return st.builds(
        SmallPool,
        instances=st.integers(1, 3),
        pp=st.integers(1, max_pp),
        blocks=st.sampled_from([12, 24, 48]),
        seqs=st.integers(1, 8),
        budget=st.sampled_from([4, 24, 200]),
        step_s=st.sampled_from([1e-3, 5e-3]),
    )


@st.composite
def clusters(draw: st.DrawFn, apart: bool, failing: bool, max_pp: int = 3) -> Cluster:
    """Draw clusters under vLLM's first come, first served, with prefill and decode apart or not, failing or not."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    front = draw(small_pools(max_pp))
    back = draw(small_pools(max_pp)) if apart else None
    n = draw(st.integers(1, 30))
    longest = min(pool.blocks for pool in (front, back) if pool is not None) * block_size
    most = max(1, min(LONGEST, longest // 2))
    lengths = st.lists(st.integers(1, most), min_size=n, max_size=n)
    prompt, output = draw(lengths), draw(lengths)
    gaps = draw(st.lists(st.sampled_from([0.0, 1e-3, 3.3e-3, 0.02]), min_size=n, max_size=n))
    closed = draw(st.booleans())
    arrival_s = None if closed else np.cumsum(gaps).tolist()
    return Cluster(
        front,
        back,
        block_size,
        stream_of(arrival_s, prompt, output, users=6 if closed else 0, think_s=1e-3),
        incidents=draw(_incidents(front, back)) if failing else (),
        router=draw(st.sampled_from(list(ROUTERS.values()))),
        stale_s=draw(st.sampled_from([0.0, 0.01])),
        way=Way(
            draw(st.sampled_from([1e6, 1e9])),
            draw(st.sampled_from([0.0, 2e-3])),
            draw(st.sampled_from([0.0, 1e-6])),
            draw(st.sampled_from([1, 4])),
            draw(st.booleans()),
            draw(st.booleans()),
            draw(st.sampled_from(get_args(FirstToken))),
        ),
        async_scheduling=draw(st.booleans()),
    )


@st.composite
def _incidents(draw: st.DrawFn, front: SmallPool, back: SmallPool | None) -> tuple[Incident, ...]:
    """Draw at most one incident for each instance: their order is for the plan to check."""
    incident = st.builds(
        Incident,
        st.sampled_from(["start", "failure", "switch"]),
        st.sampled_from([0.0, 4e-3, 0.0211, 0.05]),
        st.integers(0, 0 if back is None else 1),
        st.integers(0, 2),
        st.sampled_from([1e-3, 0.03, 0.5]),
    )
    pools = [front, back or front]
    return tuple(
        draw(st.lists(incident, max_size=3, unique_by=lambda x: (x.pool, x.instance % pools[x.pool].instances)))
    )


@st.composite
def of_policy(
    draw: st.DrawFn,
    policy: type[Scheduler],
    options: Mapping[str, Any] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Cluster:
    """Draw clusters of any kind under one policy, with all features that it offers."""
    cluster = draw(clusters(apart=draw(st.booleans()), failing=draw(st.booleans()), max_pp=2))
    n, rng = len(cluster.stream), np.random.default_rng(draw(st.integers(0, 1000)))
    settings = dict(options or {})
    if "watermark" in policy.offers:
        settings["watermark_blocks"] = draw(st.sampled_from([0, 2]))
    stream = replace(cluster.stream, priority=rng.integers(0, 3, n))
    feature = draw(st.sampled_from(["plain", *sorted({"prefix_caching", "swap"} & policy.offers)]))
    if feature == "swap":
        settings["preemption"] = "swap"
    elif feature == "prefix_caching":
        size = cluster.block_size * draw(st.sampled_from([1, 2]))
        settings |= {"prefix_caching": True, "hash_block_tokens": size}
        # Shared prefix of each prompt: a longer or shorter beginning of one of two texts.
        shared = [rng.integers(0, 1 + prompt // size) for prompt in stream.prompt_tokens]
        texts = rng.integers(0, 2, n).tolist()
        stream = replace(
            stream, hash_ids=tuple(tuple(1000 * t + i for i in range(k)) for t, k in zip(texts, shared, strict=True))
        )
    return replace(
        cluster,
        stream=stream,
        policy=policy,
        options=settings,
        constants=constants or {},
        imbalanced=draw(st.booleans()),
        predicted_tokens=rng.integers(1, 50, n).tolist(),
        deadlines=rng.choice([0.01, 0.2, 9.0], n).tolist(),
        cores=[],
    )


@st.composite
def controlled(draw: st.DrawFn) -> Cluster:
    """Draw clusters with prefill and decode apart, and instances that take the other role."""
    cluster = draw(clusters(apart=True, failing=False, max_pp=2))
    assert cluster.back is not None
    instances = 2 * draw(st.integers(1, 3))
    pressures = st.builds(
        Pressure,
        watch=st.sampled_from(["waiting", "under_way"]),
        low=st.sampled_from([0.0, 1.0, 2.0]),
        high=st.sampled_from([2.5, 3.0, 6.0]),
        least=st.just(1),
    )
    return replace(
        cluster,
        front=replace(cluster.front, instances=instances),
        back=replace(cluster.back, instances=instances),
        moves=Moves(
            draw(pressures),
            draw(pressures),
            draw(st.sampled_from([1e-3, 3.3e-3, 0.017])),
            draw(st.integers(1, 3)),
            draw(st.sampled_from([0.0, 4e-3, 0.05])),
        ),
        cores=[],
    )


# --- what must hold ---------------------------------------------------------------------------------------


def check(cluster: Cluster) -> None:
    """Check that jumps equal single steps, all requests are answered, no state remains, and times are in order."""
    stepped, flown, jumped = cluster.run(single_steps=True), cluster.run(), cluster.run(record=True)
    _check_same(flown, stepped)
    _check_same(jumped, stepped)
    assert jumped.transferred_bytes == stepped.transferred_bytes
    assert (jumped.finish >= 0).all(), "a request is never answered, though all fit"
    check_nothing_is_left(cluster)
    assert (jumped.arrival <= jumped.scheduled).all(), "scheduled before it arrives"
    assert (jumped.scheduled < jumped.first_token).all(), "a first token before a step is over"
    assert (jumped.first_token <= jumped.finish).all(), "finished before its first token"
    _check_transfers(cluster, jumped)
    ends: dict[int, int] = {}
    for record in jumped.records:
        assert ends.get(record.core, 0) <= record.start < record.end, "steps of a core overlap"
        ends[record.core] = record.end
    event(f"resent: {min(3, int(jumped.resent.sum()))}+")
    event(f"preempted: {min(3, int(jumped.preemptions.sum()))}+")
    if cluster.moves is not None:
        assert jumped.role_switches == stepped.role_switches == flown.role_switches
        event(f"role switches: {min(3, jumped.role_switches or 0)}+")


def check_nothing_is_left(cluster: Cluster) -> None:
    """Check that no request, block or KV cache is left in the cores of the latest run."""
    for core in cluster.cores:
        assert core.scheduler.kv.free == core.scheduler.kv.total, "blocks are still taken after all requests have ended"
        assert not core.has_work, "work is left"
        assert not core.holding, "a KV cache is still held"


def _check_same(jumped: Outcome, stepped: Outcome) -> None:
    for name in COLUMNS:
        same = getattr(jumped, name).tolist() == getattr(stepped, name).tolist()
        assert same, f"{name} differs between jumps and single steps"
    assert jumped.steps == stepped.steps, "jumps and single steps differ in the number of steps"


def _check_transfers(cluster: Cluster, outcome: Outcome) -> None:
    sent = outcome.transferred >= 0
    if cluster.back is None:
        assert not sent.any(), "a KV cache was sent, and there is nowhere to send it"
        return
    sent_once = outcome.resent == 0
    least = 0 if cluster.way.first_token == "decode" else 1
    assert (sent == (cluster.stream.output_tokens > least))[sent_once].all(), (
        "KV caches are sent exactly if tokens remain"
    )
    assert (outcome.prompt_done[sent] <= outcome.transferred[sent]).all(), "sent before the prompt was done"
    if cluster.way.first_token != "prefill":
        first, came = outcome.first_token[sent & sent_once], outcome.transferred[sent & sent_once]
        assert (first >= came).all(), "the first token is delivered before the KV cache has come"
        assert cluster.way.first_token == "decode" or (first == came).all(), "a token that is sent along comes late"
    assert (outcome.transferred[sent & sent_once] < outcome.finish[sent & sent_once]).all(), (
        "finished before it was sent"
    )
    if sent_once.all() and cluster.moves is None and not any(i.what == "switch" for i in cluster.incidents):
        blocks = -(-cluster.stream.prompt_tokens[sent] // cluster.block_size)
        assert outcome.transferred_bytes == BLOCK_BYTES * int(blocks.sum()), "bytes are lost or doubled on the way"
