"""Products that LoRA adapters change in latent attention, in experts and in stages: against sums by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.adapted_products import AdaptedProduct, adapted_products
from simtune.costs.adapters import AdapterCosts, slots_bytes
from simtune.costs.memory import kv_capacity, stage_layers
from simtune.errors import Infeasible
from simtune.sim.feasibility import check
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.model import DenseFeedForward, Model
from simtune.specs.pool import Pool

HARDWARE = load_hardware("h100-sxm")
DENSE, EXPERTS, LATENT, SPARSE = (
    load_model(name) for name in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "deepseek-v3.2")
)
RANK = 16


def pool(targets: str = "all", *, policy: str = "vllm-fcfs", **parallelism: Any) -> Pool:
    fields = {
        "hardware": "h100-sxm",
        "instances": 1,
        "parallelism": parallelism,
        "batching": {"policy": policy, "max_num_seqs": 8, "max_num_batched_tokens": 512},
        "max_model_len": 2048,
        "lora": {"rank": RANK, "slots": 4, "targets": targets},
    }
    return Pool.model_validate(fields, strict=False)


def parameters(model: Model, of_pool: Pool) -> float:
    return sum(count * product.weights(RANK) for product, count in adapted_products(model, of_pool).items())


def costs_of(model: Model, of_pool: Pool) -> AdapterCosts:
    costs = AdapterCosts.of(model, of_pool, HARDWARE)
    assert costs is not None
    return costs


def test_an_adapter_of_latent_attention_has_five_pairs_of_matrices() -> None:
    """DeepSeek-V3: 128 heads of 128 + 64 and 128, latents of 1536 and 512, hidden size 7168, 61 layers."""
    into = (7168 + 1536) + (7168 + 512 + 64)
    out_of = (1536 + 128 * 192) + (512 + 128 * 256) + (128 * 128 + 7168)
    assert parameters(LATENT, pool("attention")) == RANK * 61 * (into + out_of)
    # Products into the latents are whole on each rank; of the others one side is divided.
    divided = (1536 + 16 * 192) + (512 + 16 * 256) + (16 * 128 + 7168)
    assert parameters(LATENT, pool("attention", tp=8)) == RANK * 61 * (into + divided)


def test_the_product_that_expands_keys_and_values_has_room_and_no_time() -> None:
    costs = costs_of(LATENT, pool("attention", tp=8))
    times = {product.inputs: costs.product_s(product, 100, 2) for product in costs.products if product.slices == 1}
    assert times.pop(512) == 0
    assert set(times) == {1536, 16 * 128}
    assert all(times.values())


@pytest.mark.parametrize(("ranks", "experts", "width"), [
    ({}, 128, 768), ({"tp": 4}, 128, 192), ({"tp": 4, "expert_parallel": True}, 32, 768),
])  # fmt: skip
def test_an_adapter_of_experts_has_matrices_for_each_expert_of_the_rank(
    ranks: dict[str, Any], experts: int, width: int
) -> None:
    """Qwen3-30B-A3B: 128 experts of 768, hidden size 2048, 48 layers; and the router."""
    of_experts = experts * (2 * (2048 + width) + (width + 2048)) + (2048 + 128)
    more = parameters(EXPERTS, pool(**ranks)) - parameters(EXPERTS, pool("attention", **ranks))
    assert more == RANK * 48 * of_experts


@given(st.integers(1, 3000), st.integers(1, 8))
def test_pairs_of_adapter_and_expert_are_no_more_than_rows_and_than_there_are(tokens: int, adapters: int) -> None:
    product = AdaptedProduct(2 * 768, 2048, 2, copies=128, rows=8)
    adapters = min(adapters, tokens)
    pairs = product.visited(tokens, adapters)
    assert 0 < pairs <= min(8 * tokens, 128 * adapters) * (1 + 1e-12)
    assert product.visited(10**7, adapters) == pytest.approx(128 * adapters)
    assert product._replace(copies=1, rows=1).visited(tokens, adapters) == adapters


@given(st.integers(1, 20_000), st.integers(1, 8))
def test_one_expert_that_all_visit_is_a_dense_block(tokens: int, adapters: int) -> None:
    """But for the router, which is a product of its own."""
    block = EXPERTS.layers[0].feed_forward
    assert block.kind == "moe"
    single = block.model_copy(update={"experts": 1, "experts_per_token": 1})
    dense = DenseFeedForward(intermediate_size=block.intermediate_size)
    of_experts, of_dense = (costs_of(_with(EXPERTS, feed_forward), pool("all")) for feed_forward in (single, dense))
    router = AdaptedProduct(1, EXPERTS.hidden_size, 1)
    assert of_experts.products == {**of_dense.products, router: 48}
    more = of_experts.ticks(tokens, min(tokens, adapters)) - of_dense.ticks(tokens, min(tokens, adapters))
    in_ticks = 48 * of_experts.product_s(router, tokens, min(tokens, adapters)) * 2**40
    assert more == pytest.approx(in_ticks, abs=2)


def _with(model: Model, feed_forward: Any) -> Model:
    layers = tuple(group.model_copy(update={"feed_forward": feed_forward}) for group in model.layers)
    return model.model_copy(update={"layers": layers})


def test_experts_read_the_weights_of_the_pairs_that_rows_visit() -> None:
    """One token of one adapter reads 8 of 128 experts' matrices; 4 tokens of 4 adapters about four times as many."""
    costs = costs_of(EXPERTS, pool("all"))
    (product,) = [x for x in costs.products if x.copies == 128 and x.slices == 2]
    rate = 0.7 * HARDWARE.device.memory_bytes_per_s
    pairs = 128 * (1 - (127 / 128) ** 8)
    assert 7.7 < pairs < 8
    weights_s = 2 * RANK * pairs * (2 * 2048 + 2 * 768) / rate
    seconds = costs.product_s(product, 1, 1)
    assert 2 * 4e-6 + weights_s < seconds < 2 * 4e-6 + 1.3 * weights_s
    of_four = costs.product_s(product, 4, 4)
    assert of_four - 2 * 4e-6 == pytest.approx(4 * (seconds - 2 * 4e-6), rel=0.02)


@pytest.mark.parametrize(("model", "targets", "ranks"), [
    (DENSE, "all", {}), (DENSE, "attention", {"tp": 2}), (EXPERTS, "all", {"tp": 2}), (LATENT, "all", {"tp": 8}),
])  # fmt: skip
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_have_slots_for_their_own_layers(model: Model, targets: str, ranks: dict[str, Any], stages: int) -> None:
    whole, divided = pool(targets, **ranks), pool(targets, pp=stages, **ranks)
    of_stages = [slots_bytes(model, divided, layers) for layers in stage_layers(model, stages)]
    assert sum(of_stages) == pytest.approx(slots_bytes(model, whole, stage_layers(model, 1)[0]))
    if model is not LATENT:
        plain = kv_capacity(model, HARDWARE, divided.model_copy(update={"lora": None}))
        assert kv_capacity(model, HARDWARE, divided).weights_bytes - plain.weights_bytes in [
            pytest.approx(of_stage) for of_stage in of_stages
        ]
    # A step passes all stages: it loads all layers of an adapter, and runs all products.
    assert costs_of(model, whole).load_ticks(1, 0) == costs_of(model, divided).load_ticks(1, 0)
    assert costs_of(model, whole).ticks(100, 3) == costs_of(model, divided).ticks(100, 3)


@pytest.mark.parametrize(("model", "of_pool", "words"), [
    (SPARSE, pool("attention", tp=8), "without an indexer in all layers"),
    (LATENT, pool("attention", policy="sglang", tp=8), "adapters of latent attention are modelled as in vLLM alone"),
    (EXPERTS, pool(policy="sglang"), "adapters of experts are modelled as in vLLM alone, and the policy is sglang"),
    (EXPERTS, pool(attention_dp=2, expert_parallel=True), r"parallelism\.attention_dp do not go together"),
])  # fmt: skip
def test_other_layers_and_ranks_are_refused(model: Model, of_pool: Pool, words: str) -> None:
    with pytest.raises(Infeasible, match=words):
        check(of_pool, model, HARDWARE)
