"""Time of a vision encoder: its products, its attention and its collectives, over the images of a step.

The images of a step are encoded together. Products have a row for each patch of all images, as vLLM flattens them; each
image, tile or window attends to itself, so attention is a sum over the sizes of these, in one kernel. With `tp_mode:
weights` every rank has its share of heads and of the feed-forward block, and ranks add up twice a layer; with `data`
every rank encodes some of the images whole (the next largest goes to the rank with the fewest patches:
`get_load_balance_assignment` in vllm/model_executor/models/vision.py), and all gather the result. The encoder has no
CUDA graph: its kernels take at least what launching them takes, where a pool states that (`graph_sizes.launch_s`).

Left out: preprocessing of pixels on the host, and rotary positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from simtune.costs.over_nodes import RankCollective
from simtune.costs.predict import Profile
from simtune.errors import Infeasible
from simtune.specs.base import DTYPE_BYTES
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.pool import Pool

ENCODER = "encoder"
"""Kind of the times of a vision encoder, beside the kinds of operators."""
Work = tuple[int, int, int]
"""Sequences that are encoded apart, patches of each, and embeddings of one image."""


class EncoderCosts:
    """Seconds of a model's vision encoder on the tp ranks of one instance.

    Raises Infeasible if its heads cannot be divided over the ranks, or the device has no rate for its number format.
    """

    def __init__(
        self, model: Model, hardware: Hardware, pool: Pool, factor: float = 1.0, profile: Profile | None = None
    ) -> None:
        """`factor` multiplies all times, for a world in which they are off. `profile` replaces that of the hardware, to
        record which operators are used."""
        assert model.vision is not None
        self._vision, self._dtype, self._factor = model.vision, model.dtype, factor
        self._profile = profile or Profile(hardware)
        self._tp = pool.parallelism.tp
        self._by_weights = pool.encoder is None or pool.encoder.tp_mode == "weights"
        launch_s = 0.0 if pool.graph_sizes is None else pool.graph_sizes.launch_s
        self._least_s = launch_s * self._vision.layers
        if self._shards > 1 and self._vision.heads % self._shards:
            raise Infeasible(
                f"pool {pool.name}: the {self._vision.heads} heads of the vision encoder of {model.name} cannot be "
                f"divided over tp ({self._tp}); set encoder.tp_mode to data, or change tp"
            )
        self._seconds: dict[tuple[Work, ...], float] = {}

    @property
    def batches(self) -> list[tuple[Work, ...]]:
        """Images of each step so far, each combination once."""
        return list(self._seconds)

    @property
    def _shards(self) -> int:
        """Ranks that share each layer."""
        return self._tp if self._by_weights else 1

    def seconds(self, images: Sequence[Work]) -> float:
        """Return the seconds of encoding these images in one step; 0 without images."""
        if not images:
            return 0.0
        key = tuple(sorted(images))
        if key not in self._seconds:
            self._seconds[key] = self._factor * self._encoded_s(key)
        return self._seconds[key]

    def _encoded_s(self, images: Sequence[Work]) -> float:
        if self._by_weights or self._tp == 1:
            return max(self._on_rank_s(images), self._least_s)
        shares = balanced(images, self._tp)
        slowest_s = max(max(self._on_rank_s(share), self._least_s) for share in shares if share)
        vectors = sum(vectors for _, _, vectors in images)
        gather = RankCollective(self._profile, "all_gather", self._dtype, self._tp)
        return slowest_s + _one(gather.seconds(np.array([vectors * self._row_bytes])))

    @property
    def _row_bytes(self) -> float:
        return self._vision.width * DTYPE_BYTES[self._dtype]

    def _on_rank_s(self, images: Sequence[Work]) -> float:
        """Seconds of one rank, or of ranks that share each layer."""
        vision, shards = self._vision, self._shards
        patches = sum(sequences * per_sequence for sequences, per_sequence, _ in images)
        vectors = sum(vectors for _, _, vectors in images)
        qkv, out, up, down = vision.layer_products
        products = sum(
            self._gemm_s(patches, -(-n // wide), -(-k // deep))
            for (n, k), wide, deep in ((qkv, shards, 1), (out, 1, shards), (up, shards, 1), (down, 1, shards))
        )
        inner = vision.intermediate_size // shards
        small = 2 * self._elementwise_s("norm", patches, 4 * vision.hidden_size)
        small += self._elementwise_s("activation", patches, (2 + vision.gated) * inner)
        layers = vision.layers * (products + small) + self._attention_s(images)
        if shards > 1:
            layers += 2 * vision.layers * self._all_reduce_s(patches * vision.hidden_size)
        embedding = self._gemm_s(patches, vision.hidden_size, vision.patch_values)
        return layers + embedding + vision.projectors * self._projector_s(vectors)

    def _projector_s(self, vectors: int) -> float:
        """Seconds of one projector: over ranks, products are divided by columns and by rows in turn."""
        shards, seconds = self._shards, 0.0
        for number, (n, k) in enumerate(self._vision.projector_products):
            wide, deep = (shards, 1) if number % 2 == 0 else (1, shards)
            seconds += self._gemm_s(vectors, -(-n // wide), -(-k // deep))
        if shards > 1:
            seconds += self._all_reduce_s(vectors * self._vision.projector[-1])
        return seconds

    def _attention_s(self, images: Sequence[Work]) -> float:
        """Seconds of attention in all layers: every part of an image attends to itself, in windows if a layer has
        them."""
        vision = self._vision
        sequences_of = Counter[int]()
        for sequences, patches, _ in images:
            sequences_of[patches] += sequences
        if vision.window is None:
            return vision.layers * self._attend_s(sequences_of)
        windows = Counter[int]()
        for patches, sequences in sequences_of.items():
            full, tail = divmod(patches, vision.window)
            windows[vision.window] += full * sequences
            if tail:
                windows[tail] += sequences
        full_layers = vision.full_layers
        return full_layers * self._attend_s(sequences_of) + (vision.layers - full_layers) * self._attend_s(+windows)

    def _attend_s(self, sequences: Counter[int]) -> float:
        """Seconds of one kernel over sequences, their numbers by their patches."""
        attention = self._profile.predictor("encoder_attention", self._dtype)
        shape = {"heads": self._vision.heads // self._shards, "head_dim": self._vision.head_dim}
        each_s = [
            _one(attention.seconds(batch=number, tokens=patches, **shape)) for patches, number in sequences.items()
        ]
        # one kernel starts once, and cannot take less than its largest part
        return max(max(each_s), sum(each_s) - (len(each_s) - 1) * attention.overhead_s)

    def _gemm_s(self, rows: int, n: int, k: int) -> float:
        return _one(self._profile.predictor("gemm", self._dtype).seconds(m=rows, n=n, k=k))

    def _elementwise_s(self, variant: str, rows: int, width: int) -> float:
        operator = self._profile.predictor("elementwise", self._dtype, variant=variant)
        return _one(operator.seconds(rows=rows, width=width))

    def _all_reduce_s(self, values: int) -> float:
        all_reduce = RankCollective(self._profile, "all_reduce", self._dtype, self._tp)
        return _one(all_reduce.seconds(np.array([values * DTYPE_BYTES[self._dtype]])))


def _one(seconds: object) -> float:
    return float(np.asarray(seconds).reshape(-1)[0])


def balanced(images: Sequence[Work], ranks: int) -> list[list[Work]]:
    """Return the images of each rank: the next largest goes to the rank with the fewest patches."""
    shares: list[list[Work]] = [[] for _ in range(ranks)]
    patches = [0] * ranks
    for image in sorted(images, key=lambda image: -image[0] * image[1]):
        least = patches.index(min(patches))
        shares[least].append(image)
        patches[least] += image[0] * image[1]
    return shares
