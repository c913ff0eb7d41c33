"""Instances whose experts are spread over fewer ranks than they began with: the pool that such an instance is, and the
time in which its experts are placed anew.

Engines keep the number of experts in the memory of each rank. With n of N ranks an instance so has n / N of its
places for experts, and replicas give way to experts that were lost. vLLM refuses fewer ranks than hold every expert
once (`prepare_elastic_ep` in vllm/v1/engine/core_client.py of 0.32); SGLang places as many experts on the ranks that
are there (srt/eplb/eplb_algorithms/elasticity_aware.py of 0.5.23).
"""

from __future__ import annotations

from collections.abc import Iterator

from simtune.costs.estimate import link_of
from simtune.costs.memory import routed_bytes
from simtune.errors import Infeasible
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model, MoeFeedForward
from simtune.specs.pool import Pool


def with_ranks(pool: Pool, model: Model, ranks: int) -> Pool:
    """Return the pool whose instances have `ranks` data-parallel ranks, with as many experts on each as before. Raise
    Infeasible if these have no room for all experts of a layer."""
    parallelism = pool.parallelism
    if ranks == parallelism.attention_dp:
        return pool
    replicas = []
    for _, feed_forward in _routed(model):
        places = _places(feed_forward, pool)
        replicas.append(places * parallelism.tp * ranks - feed_forward.experts)
        if replicas[-1] < 0:
            fewest = -(-feed_forward.experts // (parallelism.tp * ranks))
            enough = parallelism.tp * parallelism.attention_dp * fewest - feed_forward.experts
            raise Infeasible(
                f"pool {pool.name}: with {ranks} of {parallelism.attention_dp} data-parallel ranks an instance has "
                f"room for {places} experts of {model.name} on each GPU, and {fewest} are needed for all "
                f"{feed_forward.experts}; set parallelism.expert_replicas to at least {enough}, or let more ranks stay"
            )
    fewer = {"attention_dp": ranks, "expert_replicas": min(replicas)}
    return pool.model_copy(update={"parallelism": parallelism.model_copy(update=fewer)})


def placing_s(pool: Pool, model: Model, hardware: Hardware) -> float:
    """Return the seconds in which each rank of an instance receives the experts that it does not have, after they were
    placed anew over all its ranks.

    t = layers x bytes of a rank's experts x (1 - p / E) / (bytes per second of the link): of p places for E experts on
    a rank, p / E have an expert that the rank had before, as if the two placements did not depend on each other.
    Raises Infeasible if the hardware lacks the link.
    """
    parallelism = pool.parallelism
    ranks = parallelism.tp * parallelism.attention_dp
    name = "intra_node" if ranks <= hardware.device.devices_per_node else "inter_node"
    served = model.with_weights(pool.weight_dtype)
    moved = sum(
        count * routed_bytes(served, block, parallelism) * max(0.0, 1 - _places(block, pool) / block.experts)
        for count, block in _routed(served)
    )
    return moved / link_of(hardware, name).bytes_per_s


def _routed(model: Model) -> Iterator[tuple[int, MoeFeedForward]]:
    """Yield the number of equal layers and their block, of layers with routed experts."""
    for group in model.layers:
        if isinstance(group.feed_forward, MoeFeedForward):
            yield group.count, group.feed_forward


def _places(feed_forward: MoeFeedForward, pool: Pool) -> int:
    """Return the experts of a layer that each rank holds."""
    parallelism = pool.parallelism
    num_experts = feed_forward.experts + (parallelism.expert_replicas or 0)
    return -(-num_experts // (parallelism.tp * parallelism.attention_dp))
