"""Selection and order of the points to measure.

For each operator of the models the corners of its box come first, then the points farthest from those chosen
(maximin). Matrix products are measured at the exact (n, k) of the models, over numbers of tokens half an octave apart:
exact shapes beat any fit. Validation points lie between, and no fit sees them. Whole steps are measured to be compared
with the sum of their operators, never to be fitted.

The points are divided into rounds: an eighth, a quarter, half and all of every operator's points, each round shuffled
with a fixed seed. Whenever a run stops, its points are a sample of everything; and the plan depends on nothing but the
header of the measurements.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from simtune.costs.layers import attention_layer
from simtune.costs.operators import OPERATORS, Setting, operator_key
from simtune.costs.tables.own import SHAPES, PointRole
from simtune.specs.base import DTYPE_BYTES, Dtype
from simtune.specs.model import (
    Attention,
    DenseFeedForward,
    FullAttention,
    LayerGroup,
    Model,
    MoeFeedForward,
    NoAttention,
    NoFeedForward,
)
from simtune.specs.model import SlidingAttention as Sliding

ROUNDS = 4
POOL_SHARE = 0.2
"""Share of the memory that the operands of one call may take."""

WEIGHTS_SHARE = 0.4
"""Share of the memory that the weights of a model built for whole steps may take."""

_TOKENS = (1, 2, *(n for i in range(1, 12) for n in (3 * 2 ** (i - 1), 2 ** (i + 1))), 6144, 8192)  # half octaves
# Quarter octaves: kernels work in blocks.
_PROMPTS = tuple(dict.fromkeys(round(2 ** (i / 4)) for i in range(61)))
_IMBALANCED = tuple((pairs, c, times * c) for pairs in (256, 512, 1024) for c in (256, 1024) for times in (2, 4))
"""Pairs of a sequence and a KV head, more than kernels split contexts of; their mean context, and the longest."""
_SAMPLED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_CONTEXTS = tuple(round(2 ** (i / 2)) for i in range(8, 35))  # 16 to 131,072, half an octave apart
_CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_WIDTHS = (2, 4, 8, 16, 32)
_MESSAGES = tuple(2**i for i in range(10, 27))
_COPIES = tuple(2**i for i in range(12, 29, 2))
_STEPS = {"batches": (1, 2, 4, 8, 16), "contexts": (128, 1024, 4096), "chunks": (64, 128, 256, 512)}
# And the longest chunk behind each: such steps take seconds on a processor.
_STEP_PASTS = {0: 512, 1024: 256}
_MIXED = ((4, 1024, 512, 128), (16, 512, 0, 256), (8, 4096, 1024, 64))  # decodes, context, past, tokens
# factor by which a whole step may take longer than the longest call of an operator
_STEP_CALLS = 10

# share of a call's limit for a decode: if it takes longer in one layer, no user would accept the speed
_EVERY_TOKEN = 0.1


@dataclass(frozen=True)
class MeasurementTask:
    """A point to measure."""

    kind: str
    dtype: Dtype
    shape: Mapping[str, float]
    kv_dtype: Dtype | None = None
    variant: str | None = None
    role: PointRole = "fit"

    @property
    def key(self) -> str:
        """Identity of the point in a plan."""
        shape = {name: float(value) for name, value in self.shape.items()}
        return json.dumps({**self.to_data(), "shape": shape}, sort_keys=True)

    @property
    def operator(self) -> str:
        """Key of the operator in a profile, or the kind with dtype and variant if it is not an operator."""
        return operator_key(self.kind, self.dtype, self.kv_dtype, self.variant)

    def to_data(self) -> dict[str, Any]:
        """Return the keys of a line of measurements.jsonl, those at their defaults omitted."""
        data = {name: getattr(self, name) for name in ("kind", "dtype", "kv_dtype", "variant")}
        data["shape"] = dict(self.shape)
        data["role"] = None if self.role == "fit" else self.role
        return {name: value for name, value in data.items() if value is not None}


@dataclass(frozen=True)
class Limits:
    """Capacity of a device. The rates are rough, powers of two, and measured before planning."""

    memory_bytes: float
    call_s: float
    """Seconds of the longest call worth a point."""
    flops_per_s: float
    attention_flops_per_s: float
    bytes_per_s: float
    scale: float = 1.0
    """Number of attention points, relative to that of a budget of minutes."""


@dataclass(frozen=True)
class MeasurementPlan:
    """Points of a run, round by round, and notes on the points left out."""

    rounds: tuple[tuple[MeasurementTask, ...], ...]
    sentinels: tuple[MeasurementTask, ...]
    notes: tuple[str, ...]
    hash: str

    @property
    def tasks(self) -> list[MeasurementTask]:
        """Points of all rounds, in their order."""
        return [task for tasks in self.rounds for task in tasks]


def plan(
    models: Sequence[Model], tps: Sequence[int], limits: Limits, copies: Sequence[str] = ("in_memory",), seed: int = 0
) -> MeasurementPlan:
    """Return the plan for these models, in their dtypes, as one of `tps` ranks runs them; `copies` are the
    directions."""
    planner = _Planner(limits, np.random.default_rng(seed), apart="to_device" in copies)
    for model in models:
        for tp in tps:
            planner.model(model, tp)
    for model in models:
        planner.steps(model)
    planner.device(models[0].dtype, copies)
    rounds = planner.rounds()
    sentinels = planner.sentinels(models[0].dtype)
    keys = [task.key for tasks in rounds for task in tasks]
    identity = json.dumps([[m.to_data() for m in models], list(tps), seed, keys], sort_keys=True)
    return MeasurementPlan(
        tuple(map(tuple, rounds)),
        tuple(sentinels),
        tuple(planner.notes()),
        hashlib.sha256(identity.encode()).hexdigest()[:16],
    )


def _round_of(at: int, count: int) -> int:
    """Return the round of a point: round r has the first count / 2^(3 - r) of a list, each point in its first round."""
    return next(r for r in range(ROUNDS) if at < np.ceil(count / 2 ** (ROUNDS - 1 - r)))


def spread(tasks: Sequence[MeasurementTask], count: int) -> list[MeasurementTask]:
    """Return `count` of the tasks: the corners of their shapes, then always the one farthest from those chosen."""
    x = np.log2(np.maximum([list(t.shape.values()) for t in tasks], 0.5))
    x = x[:, np.ptp(x, axis=0) > 0]
    if not x.size:
        return list(tasks)[:count]
    x = (x - x.mean(0)) / x.std(0)
    signs = np.array(np.meshgrid(*[(1, -1)] * x.shape[1])).reshape(x.shape[1], -1)
    chosen = list(dict.fromkeys((x @ signs).argmax(0).tolist()))[:count]
    nearest = np.min([((x - x[at]) ** 2).sum(1) for at in chosen], axis=0)
    while len(chosen) < min(count, len(tasks)):
        at = int(nearest.argmax())
        if not nearest[at]:
            break
        chosen.append(at)
        nearest = np.minimum(nearest, ((x - x[at]) ** 2).sum(1))
    return [tasks[at] for at in chosen]


def work(task: MeasurementTask) -> tuple[float, float]:
    """Return (flops, bytes) of a call of an operator; a copy and host work have no flops. Caches of unequal contexts
    have room for the longest in every row."""
    if task.kind == "decode_imbalance":
        s = task.shape
        row_bytes = 2 * s["kv_heads"] * s["head_dim"] * DTYPE_BYTES[task.dtype]
        return 0.0, s["batch"] * s["longest"] * row_bytes
    if task.kind not in OPERATORS:
        return 0.0, 2.0 * task.shape.get("bytes", 0)
    shape = {name: np.array([float(value)]) for name, value in task.shape.items()}
    terms = OPERATORS[cast(Any, task.kind)].terms(shape, Setting.of(1, task.dtype, task.kv_dtype))
    return float(terms.flops[0]), float(terms.bytes[0])


def products(model: Model, group: LayerGroup, tp: int) -> list[tuple[int, int]]:
    """Return (n, k) of the matrix products of one layer on one of tp ranks, without experts, in the order of a step."""
    hidden, attention = model.hidden_size, attention_layer(model, group.attention, tp).products
    feed_forward = group.feed_forward
    if isinstance(feed_forward, DenseFeedForward):
        width, gates = feed_forward.intermediate_size // tp, 1 + feed_forward.gated
        return [*attention, (gates * width, hidden), (hidden, width)]
    if isinstance(feed_forward, NoFeedForward):
        return attention
    shared, gates = feed_forward.shared_intermediate_size // tp, 1 + feed_forward.gated
    return [
        *attention,
        (feed_forward.experts, hidden),
        *([(gates * shared, hidden), (hidden, shared)] if shared else []),
    ]


def step_layers(model: Model, limits: Limits) -> int:
    """Return the number of layers of a model that are built to measure whole steps: all, or those that fit the
    memory."""
    if not _can_step(model):
        return 0
    layer = DTYPE_BYTES[model.dtype] * sum(n * k for n, k in products(model, model.layers[0], 1))
    ends = DTYPE_BYTES[model.dtype] * 2 * model.vocab_size * model.hidden_size
    return max(0, min(model.num_layers, int((WEIGHTS_SHARE * limits.memory_bytes - ends) / layer)))


def _can_step(model: Model) -> bool:
    group = model.layers[0]
    plain = isinstance(group.attention, FullAttention) and group.attention.measurable and model.residual is None
    dense = plain and isinstance(group.feed_forward, DenseFeedForward)
    return dense and len(model.layers) == 1 and model.weight_dtype == model.dtype


@dataclass(frozen=True)
class _AttentionCalls:
    """Attention calls of a model's layers on one of `tp` ranks."""

    model: Model
    attention: FullAttention
    tp: int

    @property
    def longest(self) -> int:
        """Most context tokens that a token attends to."""
        return self.attention.window if isinstance(self.attention, Sliding) else self.model.max_position

    @property
    def kv_heads(self) -> int:
        """KV heads of a rank."""
        return max(1, self.attention.kv_heads // self.tp)

    def decode(self, batch: int, context: int, variant: str | None = None) -> MeasurementTask:
        """Return a decode of one token for each of `batch` sequences."""
        return self._task("decode_attention", {"batch": batch, "context": context}, context, variant)

    def imbalanced(self, batch: int, context: int, longest: int) -> MeasurementTask:
        """Return a decode of sequences of mean `context`, one of which has `longest` tokens and the others less."""
        task = self._task("decode_imbalance", {"batch": batch, "context": context, "longest": longest}, longest)
        return replace(task, shape={name: task.shape[name] for name in SHAPES[task.kind]})

    def prefill(self, tokens: int, past: int = 0) -> MeasurementTask:
        """Return a prefill of `tokens` tokens of one prompt behind `past` cached ones."""
        context = tokens + past
        window = min(context, self.longest) if isinstance(self.attention, Sliding) else context
        return self._task("prefill_attention", {"batch": 1, "tokens": tokens, "context": context}, window)

    def chunk(self, tokens: int, context: int) -> MeasurementTask:
        """Return a prefill of `tokens` tokens that ends with a context of `context` tokens."""
        return self.prefill(tokens, max(1, context - tokens))

    def tree(self, batch: int, width: int, context: int) -> MeasurementTask:
        """Return a verification of `width` draft tokens for each of `batch` sequences."""
        return self._task("tree_attention", {"batch": batch, "width": width, "context": context}, context)

    def _task(self, kind: str, sizes: dict[str, float], window: int, variant: str | None = None) -> MeasurementTask:
        heads = {
            "heads": self.attention.heads // self.tp,
            "kv_heads": self.kv_heads,
            "head_dim": self.attention.head_dim,
        }
        dtype = self.model.dtype
        return MeasurementTask(kind, dtype, {**sizes, **heads, "window": window}, dtype, variant)


@dataclass
class _Planner:
    """Collector of lists of points, operator by operator, that are then divided into rounds."""

    limits: Limits
    rng: np.random.Generator
    apart: bool = False
    """True for a device apart from the host, where writing keys and values and looking up embeddings are kernels."""
    lists: list[list[MeasurementTask]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    too_large: dict[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        words = [
            f"{operator}: {count} shapes do not fit into {POOL_SHARE:.0%} of the memory; smaller ones are measured"
            for operator, count in sorted(self.too_large.items())
        ]
        return words + list(dict.fromkeys(self.remarks))

    def rounds(self) -> list[list[MeasurementTask]]:
        """Divide all points into rounds and shuffle them; whole steps last, as they take longest and are not fitted."""
        rounds: list[list[MeasurementTask]] = [[] for _ in range(ROUNDS)]
        for tasks in self.lists:
            for at, task in enumerate(tasks):
                # Both take no time to measure, and a line needs all of their few points.
                early = task.kind in ("host", "decode_imbalance")
                rounds[0 if early else _round_of(at, len(tasks))].append(task)
        for tasks in rounds:
            self.rng.shuffle(tasks)
            tasks.sort(key=lambda task: task.kind == "step")
        return rounds

    def sentinels(self, dtype: Dtype) -> list[MeasurementTask]:
        """Return the largest product and the largest copy that take negligible time."""
        wide = [
            MeasurementTask("gemm", dtype, {"m": m, "n": n, "k": n}) for n in (512, 1024, 2048, 4096) for m in (64, n)
        ]
        large = [MeasurementTask("copy", dtype, {"bytes": size}, variant="in_memory") for size in _COPIES]
        quick = [[task for task in tasks if self.fits(task, self.limits.call_s / 60)] for tasks in (wide, large)]
        return [replace(tasks[-1], role="sentinel") for tasks in quick if tasks]

    def fits(self, task: MeasurementTask, call_s: float | None = None) -> bool:
        """True if a call takes neither too much memory, which is noted, nor too long."""
        flops, moved = work(task)
        if moved > POOL_SHARE * self.limits.memory_bytes:
            self.too_large[task.operator] = self.too_large.get(task.operator, 0) + 1
            return False
        rate = self.limits.attention_flops_per_s if "attention" in task.kind else self.limits.flops_per_s
        share = _EVERY_TOKEN if task.kind in ("decode_attention", "tree_attention") else 1.0
        return max(flops / rate, moved / self.limits.bytes_per_s) <= share * (call_s or self.limits.call_s)

    def add(self, tasks: Iterable[MeasurementTask], count: int | None = None) -> list[MeasurementTask]:
        """Add a list of points, each new one that fits, corners first and then spread out, `count` at most."""
        possible = [t for t in tasks if t.key not in self.seen and self.fits(t)]
        chosen = spread(possible, len(possible) if count is None else count) if possible else []
        self.seen |= {t.key for t in chosen}
        self.lists.append(chosen)
        return chosen

    def check(
        self, chosen: Sequence[MeasurementTask], count: int, sizes: Sequence[str], make: Callable[..., MeasurementTask]
    ) -> None:
        """Add validation points between those chosen: `make` with the named sizes drawn between the smallest and the
        largest that each was chosen with.
        """
        between: list[MeasurementTask] = []
        # drawn points may repeat others or not fit: 20 tries for each
        for _ in range(20 * count if chosen else 0):
            arguments = []
            for name in sizes:
                low, high = np.log([f(t.shape[name] for t in chosen) for f in (min, max)])
                arguments.append(round(float(np.exp(self.rng.uniform(low, high)))))
            task = make(*arguments)
            if task.key not in self.seen and self.fits(task) and len(between) < count:
                self.seen.add(task.key)
                between.append(replace(task, role="validation"))
        self.lists.append(between)

    def device(self, dtype: Dtype, copies: Sequence[str]) -> None:
        """Add points of the device alone: copies in these directions, and host work."""
        for direction in copies:
            self.add([MeasurementTask("copy", dtype, {"bytes": size}, variant=direction) for size in _COPIES])
        self.add([MeasurementTask("host", dtype, {"sequences": n}) for n in (1, 4, 16, 64)])

    def model(self, model: Model, tp: int) -> None:
        """Add all operators of one of tp ranks."""
        for group in model.layers:
            for n, k in products(model, group, tp):
                self._gemm(model.weight_dtype, n, k, _TOKENS)
            self._attention(model, group.attention, tp)
            if isinstance(group.feed_forward, MoeFeedForward):
                self._moe(model, group.feed_forward, tp)
            if model.weight_dtype in ("fp8", "int8"):
                width = attention_layer(model, group.attention, tp).output_width
                self.add(MeasurementTask("quantise", model.weight_dtype, {"m": m, "k": width}) for m in _TOKENS[::2])
            layer = attention_layer(model, group.attention, tp)
            self._written_apart(model, layer.written_width)
            for variant, width in [*layer.small, *self._small(model, group, tp)]:
                shapes = [{"rows": m, "width": width} for m in _TOKENS[::2]]
                self.add(MeasurementTask("elementwise", model.dtype, shape, variant=variant) for shape in shapes)
        self._gemm(model.dtype, -(-model.vocab_size // tp), model.hidden_size, _SAMPLED)
        self.add([MeasurementTask("sampling", "fp32", {"rows": m, "vocab": model.vocab_size}) for m in _SAMPLED[:12:2]])
        for kind in ("all_reduce", "all_gather") if tp > 1 else ():
            self.add([MeasurementTask(kind, model.dtype, {"devices": tp, "bytes": size}) for size in _MESSAGES])
        if tp > 1:
            self.add([MeasurementTask("send_recv", model.dtype, {"bytes": size}) for size in _MESSAGES])

    def _written_apart(self, model: Model, kv_width: int) -> None:
        widths = (("kv_write", kv_width), ("embedding", 3 * model.hidden_size)) if self.apart else ()
        for variant, width in widths:
            shapes = [{"rows": m, "width": width} for m in _TOKENS if width]
            self.add(MeasurementTask("elementwise", model.dtype, shape, variant=variant) for shape in shapes)

    def _small(self, model: Model, group: LayerGroup, tp: int) -> list[tuple[str, int]]:
        hidden, feed_forward = model.hidden_size, group.feed_forward
        widths = [("norm", 4 * hidden), ("add", 3 * hidden)]
        if isinstance(feed_forward, DenseFeedForward):
            widths.append(("activation", (2 + feed_forward.gated) * feed_forward.intermediate_size // tp))
        return widths

    def _gemm(self, dtype: Dtype, n: int, k: int, rows: Sequence[int]) -> None:
        def make(m: int) -> MeasurementTask:
            return MeasurementTask("gemm", dtype, {"m": m, "n": n, "k": k})

        self.check(self.add(map(make, rows)), 3, ("m",), make)

    def _attention(self, model: Model, attention: Attention, tp: int) -> None:
        if isinstance(attention, NoAttention):
            return
        if not isinstance(attention, FullAttention) or not attention.measurable:
            self.remarks.append(f"{model.name}: torch has no kernel for its {attention.kind} attention; not measured")
            return
        calls = _AttentionCalls(model, attention, tp)
        contexts = [c for c in _CONTEXTS if c <= calls.longest]
        self._decodes(calls, contexts)
        self._prefills(calls, contexts)

    def _decodes(self, calls: _AttentionCalls, contexts: Sequence[int]) -> None:
        """Add decode attention by batch and context, of a contiguous cache and of a paged one, and that of draft
        trees."""
        grid = [(batch, context) for batch in _BATCHES for context in contexts]
        density = self.limits.scale
        chosen = self.add([calls.decode(b, c) for b, c in grid], round(90 * density))
        self.check(chosen, 14, ("batch", "context"), calls.decode)
        paged = [calls.decode(b, c, "paged") for b, c in grid if b <= 32 and c <= 8192]
        self.add(paged, round(12 * density))
        if self.apart and DTYPE_BYTES[calls.model.dtype] == 2:
            heads = calls.kv_heads
            self.add(
                calls.imbalanced(pairs // heads, *sizes) for pairs, *sizes in _IMBALANCED if sizes[1] <= calls.longest
            )
        trees = [calls.tree(b, width, c) for b, c in grid[::2] for width in _WIDTHS if c > width]
        self.add(trees, round(24 * density))

    def _prefills(self, calls: _AttentionCalls, contexts: Sequence[int]) -> None:
        """Add whole prompts, and chunks behind a past."""
        longest = calls.model.max_position
        prompts = self.add([calls.prefill(tokens) for tokens in _PROMPTS if tokens <= longest])
        self.check(prompts, 10, ("tokens",), calls.prefill)
        pasts = [c for c in contexts if c >= 64]
        chunks = [calls.prefill(tokens, past) for tokens in _CHUNKS for past in pasts if tokens + past <= longest]
        chosen = self.add(chunks, round(36 * self.limits.scale))
        self.check(chosen, 6, ("tokens", "context"), calls.chunk)

    def _moe(self, model: Model, experts: MoeFeedForward, tp: int) -> None:
        def make(tokens: int) -> MeasurementTask:
            shape = {
                "tokens": tokens,
                "hidden": model.hidden_size,
                "intermediate": experts.intermediate_size // tp,
                "experts_per_token": experts.experts_per_token,
                "experts": experts.experts,
                "ep": 1,
                "skew": experts.routing_skew,
            }
            return MeasurementTask("moe", model.weight_dtype, shape)

        self.check(self.add(map(make, _TOKENS)), 5, ("tokens",), make)

    def steps(self, model: Model) -> None:
        """Add whole steps of a model: decodes alone, chunks alone, and both."""
        layers = step_layers(model, self.limits)
        if not layers:
            self.remarks.append(f"{model.name}: no whole step is measured (its layers are not plain, or too large)")
            return
        if layers < model.num_layers:
            self.remarks.append(f"{model.name}: too large for the memory; whole steps are of {layers} of its layers")
        shapes = [(b, c, 0, 0) for b in _STEPS["batches"] for c in _STEPS["contexts"]]
        shapes += [(0, 0, past, m) for m in _STEPS["chunks"] for past, longest in _STEP_PASTS.items() if m <= longest]
        tasks = [
            MeasurementTask(
                "step",
                model.dtype,
                {"layers": layers, "decodes": b, "context": c, "past": p, "tokens": m, "samples": b + (m > 0)},
                variant=model.name,
            )
            for b, c, p, m in [*shapes, *_MIXED]
        ]
        weights = layers * sum(n * k for n, k in products(model, model.layers[0], 1))
        rate = self.limits.flops_per_s
        fitting = []
        for task in tasks:
            s = task.shape
            kv = 2 * s["decodes"] * s["context"] * _kv_values(model) * DTYPE_BYTES[model.dtype]
            seconds = 2 * weights * (s["decodes"] + s["tokens"]) / rate
            fits = kv <= POOL_SHARE * self.limits.memory_bytes and s["context"] + s["past"] <= model.max_position
            if fits and seconds <= _STEP_CALLS * self.limits.call_s:
                fitting.append(task)
        self.rng.shuffle(fitting)
        self.lists.append(fitting)


def _kv_values(model: Model) -> int:
    attention = model.layers[0].attention
    assert isinstance(attention, FullAttention)
    return attention.kv_heads * attention.head_dim
