"""Facts that follow from a model spec, in words."""

from __future__ import annotations

from simtune.costs.memory import kv_bytes_per_token, kv_capacity, weights_bytes
from simtune.errors import Infeasible
from simtune.sim.deployment import vllm_batching
from simtune.specs.catalog import load_hardware, names
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.pool import Parallelism, Pool


def facts(model: Model) -> list[tuple[str, str]]:
    """(what, how much) of a model as a whole: parameters, layers, KV cache, number formats."""
    return [
        ("parameters", _parameters(model)),
        ("layers", _layers(model)),
        ("KV cache", _kv_cache(model)),
        ("formats", _formats(model)),
    ]


def weights(model: Model) -> str:
    """Return the size of the whole model's weights in memory, in GiB."""
    return f"{weights_bytes(model, Parallelism(), 0) / 2**30:.1f} GiB"


def fits_on(model: Model) -> list[tuple[str, str]]:
    """(card, on how many of them the model fits at least, and what KV cache is left), of every built-in card."""
    cards: dict[str, str] = {}
    for name in names("hardware"):
        hardware = load_hardware(name)
        cards.setdefault(hardware.device.name, _fewest(model, hardware))
    return list(cards.items())


def _fewest(model: Model, hardware: Hardware) -> str:
    """Return the fewest GPUs of one node on which the model fits by tensor parallelism, with vLLM's batching."""
    tp = 1
    while tp <= hardware.device.devices_per_node:
        pool = Pool(
            hardware=hardware.name, instances=1, parallelism=Parallelism(tp=tp), batching=vllm_batching(hardware)
        )
        try:
            memory = kv_capacity(model, hardware, pool)
        except Infeasible:
            tp *= 2
            continue
        return f"{tp} x, {memory.num_blocks * pool.kv_cache.block_size:,} tokens of KV cache"
    return f"not on {tp // 2} of one node"


def _parameters(model: Model) -> str:
    total, active = model.parameters, model.active_parameters
    # Where all are active, only tables of embeddings and what stands beside matrices make the difference.
    sparse = any(group.feed_forward.kind == "moe" for group in model.layers)
    return f"{total / 1e9:.2f}B" + (f", {active / 1e9:.2f}B active" if sparse else "")


def _layers(model: Model) -> str:
    counts: dict[str, int] = {}
    for group in model.layers:
        blocks = [block.kind for block in (group.attention, group.feed_forward) if block.kind != "none"]
        kind = " + ".join(blocks)
        counts[kind] = counts.get(kind, 0) + group.count
    return f"{model.num_layers}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _kv_cache(model: Model) -> str:
    dtype = model.kv_dtype or model.dtype
    kib = kv_bytes_per_token(model, Parallelism(), 0, dtype) / 1024
    return f"{kib:.1f} KiB per token in {dtype}"


def _formats(model: Model) -> str:
    modules = {
        "attention": model.attention_dtype,
        "experts": model.expert_dtype,
        "shared": model.shared_dtype,
        "head": model.head_dtype,
    }
    if model.weight_dtype != model.dtype:
        modules["activations"] = model.dtype
    words = [f"{module} {dtype}" for module, dtype in modules.items() if dtype]
    of_groups: dict[str, int] = {}
    for group in model.layers:
        if group.attention_dtype is not None:
            of_groups[group.attention_dtype] = of_groups.get(group.attention_dtype, 0) + group.count
    words += [f"attention of {count} layers {dtype}" for dtype, count in of_groups.items()]
    return ", ".join([model.weight_dtype, *words])
