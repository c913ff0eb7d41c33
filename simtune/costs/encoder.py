"""Time of the encoders of media: their products, attention and collectives, over the items of a step.

Items of one kind are encoded together, one kind after another (`group_and_batch_mm_kwargs` in
vllm/multimodal/utils.py). Products have a row for each patch of all items, as vLLM flattens them; each image, tile,
frame, stretch of sound or window attends to itself, so attention is a sum over the sizes of these, in one kernel. With
`tp_mode: weights` every rank has its share of heads and of the feed-forward block, and ranks add up twice a layer; with
`data` every rank encodes some of the images or videos whole (the next largest goes to the rank with the fewest patches:
`get_load_balance_assignment` in vllm/model_executor/models/vision.py), and all gather the result. Audio encoders are
not divided by items: every rank repeats what it cannot share. The encoder has no CUDA graph: its kernels take at least
what launching them takes, where a pool states that (`graph_sizes.launch_s`).

Left out: preprocessing of pixels and sound on the host, and rotary positions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simtune.arrays import Array, Ints
from simtune.costs.over_nodes import RankCollective
from simtune.costs.predict import Profile
from simtune.costs.remembered import RememberedProfile
from simtune.errors import Infeasible
from simtune.specs.base import DTYPE_BYTES, FloatDtype
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.pool import Pool
from simtune.specs.tower import MEDIA_KINDS, MediaKind, MediaShape, Tower

ENCODER = "encoder"
"""Kind of the times of encoders of media, beside the kinds of operators."""


class Work(NamedTuple):
    """Work of one item."""

    sequences: int
    """Parts that are encoded apart."""
    patches: int
    """Patches of each part."""
    vectors: int
    """Embeddings of the item."""
    kind: MediaKind = "image"

    @classmethod
    def of(cls, shape: MediaShape, kind: MediaKind) -> Work:
        """Return the work of an item of these sizes."""
        return cls(shape.sequences, shape.patches, shape.vectors, kind)


class EncoderCosts:
    """Seconds of a model's encoders on the tp ranks of one instance.

    Raises Infeasible if the heads of one cannot be divided over the ranks, or the device has no rate for its number
    format.
    """

    def __init__(
        self, model: Model, hardware: Hardware, pool: Pool, factor: float = 1.0, profile: Profile | None = None
    ) -> None:
        """`factor` multiplies all times, for a world in which they are off. `profile` replaces that of the hardware, to
        record which operators are used."""
        profile = profile or RememberedProfile.of(hardware)
        kinds = model.towers.kinds if pool.encoder is None else pool.encoder.kinds(model.towers)
        self._of_kind = {kind: self._tower_costs(model, profile, pool, kind) for kind in kinds}
        self._factor = factor
        self._seconds: dict[tuple[Work, ...], float] = {}

    @staticmethod
    def _tower_costs(model: Model, profile: Profile, pool: Pool, kind: MediaKind) -> TowerCosts:
        tower = model.towers.of(kind)
        assert tower is not None
        name = "audio" if kind == "audio" else "vision"
        if sharing_ranks(tower, pool) is None:
            remedy = "change tp" if kind == "audio" else "set encoder.tp_mode to data, or change tp"
            raise Infeasible(
                f"pool {pool.name}: the {tower.heads} heads of the {name} encoder of {model.name} cannot be divided "
                f"over tp ({pool.parallelism.tp}); {remedy}"
            )
        return TowerCosts(tower, model.dtype, profile, pool, by_item=kind != "audio" and _by_item(pool))

    @property
    def batches(self) -> list[tuple[Work, ...]]:
        """Items of each step so far, each combination once."""
        return list(self._seconds)

    def seconds(self, items: Sequence[Work]) -> float:
        """Return the seconds of encoding these items in one step; 0 without items. Their kinds are those that the pool
        takes."""
        if not items:
            return 0.0
        key = tuple(sorted(items))
        if key not in self._seconds:
            of_kinds = [(kind, [item for item in key if item.kind == kind]) for kind in MEDIA_KINDS]
            encoded_s = sum(self._of_kind[kind].seconds(of_kind) for kind, of_kind in of_kinds if of_kind)
            self._seconds[key] = self._factor * encoded_s
        return self._seconds[key]

    def least_seconds(self, items: Sequence[Work], most_vectors: int) -> Array:
        """Return seconds for each of these items, which add up to no more than the seconds of any step that encodes
        some of them and no others, with at most `most_vectors` embeddings."""
        seconds = np.zeros(len(items))
        for kind, costs in self._of_kind.items():
            at = [number for number, item in enumerate(items) if item.kind == kind]
            if at:
                seconds[at] = costs.least_seconds([items[number] for number in at], most_vectors)
        least: Array = self._factor * seconds
        return least


def _by_item(pool: Pool) -> bool:
    return pool.encoder is not None and pool.encoder.tp_mode == "data"


def sharing_ranks(tower: Tower, pool: Pool) -> int | None:
    """Return how many ranks of a pool share each layer of an encoder; None if its heads cannot be divided over them."""
    return 1 if _by_item(pool) else tower.sharing(pool.parallelism.tp)


class TowerCosts:
    """Seconds of one encoder over items of one kind."""

    def __init__(self, tower: Tower, dtype: FloatDtype, profile: Profile, pool: Pool, *, by_item: bool) -> None:
        """If `by_item`, every rank encodes some of the items."""
        shards = sharing_ranks(tower, pool)
        assert shards is not None
        self._tower, self._dtype, self._profile, self._shards = tower, dtype, profile, shards
        self._tp, self._by_item = pool.parallelism.tp, by_item
        launch_s = 0.0 if pool.graph_sizes is None else pool.graph_sizes.launch_s
        self._least_s = launch_s * tower.layers

    def seconds(self, items: Sequence[Work]) -> float:
        """Return the seconds of encoding these items together."""
        if not self._by_item or self._tp == 1:
            return max(self._on_rank_s(items), self._least_s)
        shares = balanced(items, self._tp)
        slowest_s = max(max(self._on_rank_s(share), self._least_s) for share in shares if share)
        vectors = sum(item.vectors for item in items)
        gather = RankCollective(self._profile, "all_gather", self._dtype, self._tp)
        return slowest_s + _one(gather.seconds(np.array([vectors * self._row_bytes])))

    def least_seconds(self, items: Sequence[Work], most_vectors: int) -> Array:
        """See `EncoderCosts.least_seconds`.

        Products of a step with P patches take at least p P, where p is the least of their time over P for all P that a
        step has room for. Attention is a sum over parts, each of which takes at least the least time of one of b such
        parts, less the start of the kernel. If ranks encode items whole, the slowest takes at least the mean of all.
        """
        patches = np.array([item.sequences * item.patches for item in items])
        most = int(max(n / max(1, item.vectors) for n, item in zip(patches, items, strict=True)) * most_vectors)
        # Patches of a step are a sum of those of items.
        unit = int(np.gcd.reduce(patches))
        rows = np.arange(unit, max(most, int(patches.max())) + 1, unit)
        of_patch_s = float(((self._of_patches_s(rows) + self._exchanged_s(rows)) / rows).min())
        parts = [self._parts(item.patches) for item in items]
        sizes = {size for of_layers in parts for _, of_size in of_layers for size in of_size}
        of_part_s = {size: self._least_part_s(size, int(rows[-1]) // size) for size in sizes}
        attention_s = [
            item.sequences
            * sum(layers * sum(n * of_part_s[size] for size, n in of_size.items()) for layers, of_size in of)
            for item, of in zip(items, parts, strict=True)
        ]
        seconds: Array = (patches * of_patch_s + np.array(attention_s)) / (self._tp if self._by_item else 1)
        return seconds

    def _parts(self, patches: int) -> list[tuple[int, Counter[int]]]:
        """Return layers, and the parts of a sequence that attend to themselves in each: their numbers by patches."""
        tower, sequence = self._tower, Counter({patches: 1})
        if tower.window is None:
            return [(tower.layers, sequence)]
        full, tail = divmod(patches, tower.window)
        windows = +Counter({tower.window: full}) + Counter({tail: 1} if tail else {})
        return [(tower.full_layers, sequence), (tower.layers - tower.full_layers, windows)]

    def _least_part_s(self, patches: int, most: int) -> float:
        """Least seconds of attention of one part among up to `most` equal ones, without the start of its kernel."""
        attention = self._profile.predictor("encoder_attention", self._dtype)
        number = np.arange(1, max(1, most) + 1)
        shape = {"heads": self._tower.heads // self._shards, "head_dim": self._tower.head_dim}
        seconds = np.asarray(attention.seconds(batch=number, tokens=patches, **shape))
        return max(0.0, float(((seconds - attention.overhead_s) / number).min()))

    @property
    def _row_bytes(self) -> float:
        return self._tower.width * DTYPE_BYTES[self._dtype]

    def _on_rank_s(self, items: Sequence[Work]) -> float:
        """Seconds of one rank, or of ranks that share each layer."""
        tower = self._tower
        patches = sum(item.sequences * item.patches for item in items)
        vectors = sum(item.vectors for item in items)
        alone = np.array([patches])
        layers = _one(self._of_patches_s(alone)) + self._attention_s(items) + _one(self._exchanged_s(alone))
        stem = sum(self._gemm_s(math.ceil(patches * rows), n, k) for rows, n, k in tower.stem)
        return layers + stem + tower.num_projectors * self._projector_s(tower.projected(patches, vectors))

    def _of_patches_s(self, patches: Ints) -> Array:
        """Seconds of all layers, without attention, for numbers of patches."""
        tower, shards = self._tower, self._shards
        qkv, out, up, down = tower.layer_products
        gemm = self._profile.predictor("gemm", self._dtype)
        products = sum(
            np.asarray(gemm.seconds(m=patches, n=-(-n // wide), k=-(-k // deep)))
            for (n, k), wide, deep in ((qkv, shards, 1), (out, 1, shards), (up, shards, 1), (down, 1, shards))
        )
        inner = tower.intermediate_size // shards
        norm, activation = (
            self._profile.predictor("elementwise", self._dtype, variant=variant) for variant in ("norm", "activation")
        )
        small = 2 * np.asarray(norm.seconds(rows=patches, width=4 * tower.hidden_size))
        small += np.asarray(activation.seconds(rows=patches, width=(2 + tower.gated) * inner))
        layers: Array = tower.layers * (products + small)
        return layers

    def _exchanged_s(self, patches: Ints) -> Array:
        """Seconds in which ranks that share each layer add up, in all layers, for numbers of patches."""
        if self._shards == 1:
            return np.zeros(len(patches))
        sizes: Array = np.asarray(patches * self._tower.hidden_size * DTYPE_BYTES[self._dtype], dtype=np.float64)
        all_reduce = RankCollective(self._profile, "all_reduce", self._dtype, self._tp)
        exchanged: Array = 2 * self._tower.layers * np.asarray(all_reduce.seconds(sizes))
        return exchanged

    def _projector_s(self, vectors: int) -> float:
        """Seconds of one projector: over ranks, products are divided by columns and by rows in turn."""
        shards, seconds = self._shards, 0.0
        for number, (n, k) in enumerate(self._tower.projector_products):
            wide, deep = (shards, 1) if number % 2 == 0 else (1, shards)
            seconds += self._gemm_s(vectors, -(-n // wide), -(-k // deep))
        if shards > 1:
            seconds += self._all_reduce_s(vectors * self._tower.projector[-1])
        return seconds

    def _attention_s(self, items: Sequence[Work]) -> float:
        """Seconds of attention in all layers: every part of an item attends to itself, in windows if a layer has
        them."""
        tower = self._tower
        sequences_of = Counter[int]()
        for item in items:
            sequences_of[item.patches] += item.sequences
        if tower.window is None:
            return tower.layers * self._attend_s(sequences_of)
        windows = Counter[int]()
        for patches, sequences in sequences_of.items():
            full, tail = divmod(patches, tower.window)
            windows[tower.window] += full * sequences
            if tail:
                windows[tail] += sequences
        full_layers = tower.full_layers
        full_s = full_layers * self._attend_s(sequences_of) if full_layers else 0.0
        return full_s + (tower.layers - full_layers) * self._attend_s(+windows)

    def _attend_s(self, sequences: Counter[int]) -> float:
        """Seconds of one kernel over sequences, their numbers by their patches."""
        attention = self._profile.predictor("encoder_attention", self._dtype)
        shape = {"heads": self._tower.heads // self._shards, "head_dim": self._tower.head_dim}
        each_s = [
            _one(attention.seconds(batch=number, tokens=patches, **shape)) for patches, number in sequences.items()
        ]
        # one kernel starts once, and cannot take less than its largest part
        return max(max(each_s), sum(each_s) - (len(each_s) - 1) * attention.overhead_s)

    def _gemm_s(self, rows: int, n: int, k: int) -> float:
        return _one(self._profile.predictor("gemm", self._dtype).seconds(m=rows, n=n, k=k))

    def _all_reduce_s(self, values: int) -> float:
        all_reduce = RankCollective(self._profile, "all_reduce", self._dtype, self._tp)
        return _one(all_reduce.seconds(np.array([values * DTYPE_BYTES[self._dtype]])))


def _one(seconds: object) -> float:
    return float(np.asarray(seconds).reshape(-1)[0])


def balanced(items: Sequence[Work], ranks: int) -> list[list[Work]]:
    """Return the items of each rank: the next largest goes to the rank with the fewest patches."""
    shares: list[list[Work]] = [[] for _ in range(ranks)]
    patches = [0] * ranks
    for item in sorted(items, key=lambda item: -item.sequences * item.patches):
        least = patches.index(min(patches))
        shares[least].append(item)
        patches[least] += item.sequences * item.patches
    return shares
