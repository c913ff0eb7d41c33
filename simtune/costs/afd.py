"""Attention and feed-forward blocks on different devices: a batch in parts that go back and forth between them.

Each of n parts of the batch passes through attention (A), over the link (C1), through the feed-forward block (F) and
back (C2), layer after layer, while the other parts are elsewhere on that path. A step waits for the busiest of the
four, or, if the parts are too few to keep them busy, for the path of one part:

    T = max(n max(A, F, C1, C2), A + F + C1 + C2)

with the times of one part over all layers (Step-3, arXiv 2507.19427; MegaScale-Infer, arXiv 2504.02263). Layers are
taken to be alike. Each device for feed-forward blocks has its share of the experts whole, and computes an equal share
of the tokens of every other block. A token crosses the link between nodes at most once for each node that has an expert
for it.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from simtune.arrays import Array
from simtune.costs.layers import AttentionCosts
from simtune.costs.memory import weights_bytes
from simtune.costs.predict import Profile
from simtune.costs.step_calls import StepCall, StepCalls, equal_layers
from simtune.errors import Infeasible
from simtune.specs.base import ACTIVATION_BYTES, DTYPE_BYTES
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model, MoeFeedForward, NoAttention
from simtune.specs.pool import Parallelism, Pool
from simtune.specs.research import Afd


class BatchPart(NamedTuple):
    """Seconds of one part of the batch, over all layers."""

    attention: Array
    feed_forward: Array
    there: Array
    back: Array

    def step_s(self, parts: int) -> Array:
        """Seconds of a step of `parts` parts; see the module."""
        busiest = np.maximum(np.maximum(self.attention, self.feed_forward), np.maximum(self.there, self.back))
        step: Array = np.maximum(parts * busiest, self.attention + self.feed_forward + self.there + self.back)
        return step


def attention_side(model: Model, pool: Pool) -> Model:
    """Return the part of a model on the attention devices: all of it, unless its feed-forward blocks are elsewhere."""
    return model if pool.studied.afd is None else model.without_feed_forward()


def feed_forward_pool(pool: Pool, devices: int) -> Pool:
    """Return a pool of the devices of the feed-forward blocks, as one group each, that share whole experts."""
    parallelism = Parallelism(attention_dp=devices, expert_parallel=True)
    return pool.model_copy(
        update={"parallelism": parallelism, "overlap": None, "research": pool.studied.on_other_devices()}
    )


def without_attention(model: Model) -> Model:
    """Return the part of a model on the devices of the feed-forward blocks."""
    layers = tuple(group.model_copy(update={"attention": NoAttention()}) for group in model.layers)
    return model.model_copy(update={"layers": layers})


class FeedForwardDevices:
    """Devices that compute the feed-forward blocks of a model for all attention devices of an instance, and the link
    between both. Raises Infeasible if the blocks' weights do not fit the devices."""

    @classmethod
    def of(cls, model: Model, hardware: Hardware, pool: Pool, profile: Profile) -> Self | None:
        """Return the devices of a pool; None if its feed-forward blocks are not on devices of their own."""
        afd = pool.studied.afd
        return None if afd is None else cls(afd, model, hardware, pool, profile)

    def __init__(self, afd: Afd, model: Model, hardware: Hardware, pool: Pool, profile: Profile) -> None:
        parallelism = pool.parallelism
        self.parts, self._devices = afd.batches, afd.ffn_devices
        self._groups, self._tp = parallelism.attention_dp, parallelism.tp
        blocks, blocks_pool = without_attention(model), feed_forward_pool(pool, self._devices)
        _check_weights(blocks, hardware, blocks_pool)
        layers = equal_layers(blocks, 1)
        nothing: list[tuple[int, AttentionCosts]] = [
            (equal.number, equal.attention.costs(profile, model.dtype, model.dtype)) for equal in layers
        ]
        calls = StepCalls(blocks, hardware, blocks_pool, profile, layers, nothing)
        self._calls: list[StepCall] = [*calls.linear(), *(call for call in calls.routed() if call.kind == "moe")]
        values = DTYPE_BYTES[model.dtype]
        nodes = -(-self._devices // hardware.device.devices_per_node)
        self._copies = [
            (group.count, min(nodes, group.feed_forward.experts_per_token))
            if isinstance(group.feed_forward, MoeFeedForward)
            else (group.count, 1)
            for group in model.layers
            if group.feed_forward.kind != "none"
        ]
        self._widths = (min(values, ACTIVATION_BYTES.get(model.dtype_of("experts"), values)), values)
        self._hidden = model.hidden_size
        self._send = profile.predictor("send_recv", model.dtype, variant="inter_node")

    def part(self, attention: Array, tokens: Array) -> BatchPart:
        """Return the times of a part with `tokens` tokens in each group of attention devices, given its attention's
        time."""
        everybodys = self._groups * tokens
        per_device = np.maximum(1.0, everybodys / self._devices)
        feed_forward: Array = np.sum([call.times * call.seconds(per_device) for call in self._calls], axis=0)
        forth, back = (self._way_s(tokens, everybodys, width) for width in self._widths)
        return BatchPart(attention, feed_forward, forth, back)

    def _way_s(self, tokens: Array, everybodys: Array, width: float) -> Array:
        """Seconds over the link of an attention device, or of a feed-forward device if that has more to carry."""
        rows = np.maximum(tokens / self._tp, everybodys / self._devices)
        total = np.zeros_like(rows)
        for layers, copies in self._copies:
            total += layers * self._send.seconds(bytes=copies * rows * self._hidden * width)
        return total


def _check_weights(blocks: Model, hardware: Hardware, pool: Pool) -> None:
    weights, room = weights_bytes(blocks, pool.parallelism, 0), hardware.device.memory_bytes
    if weights > pool.kv_cache.memory_utilization * room:
        raise Infeasible(
            f"model {blocks.name}: its feed-forward blocks take {weights / 2**30:.1f} GiB on each of "
            f"{pool.parallelism.attention_dp} devices; give afd.ffn_devices more"
        )
