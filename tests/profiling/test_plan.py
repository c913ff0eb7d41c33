"""What is measured, in which order, and what a device cannot take."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.layers import attention_layer
from simtune.profiling.measurement_plan import (
    ROUNDS,
    Limits,
    MeasurementPlan,
    MeasurementTask,
    _round_of,
    plan,
    spread,
    work,
)
from simtune.specs.catalog import load_model
from simtune.specs.model import NoAttention, NoFeedForward
from tests.profiling.pretended import model

LIMITS = Limits(8e9, 0.05, 2.0**39, 2.0**38, 2.0**36)


def made(
    name: str = "llama-3.2-1b", tps: tuple[int, ...] = (1,), limits: Limits = LIMITS, seed: int = 0
) -> MeasurementPlan:
    return plan([load_model(name)], tps, limits, seed=seed)


def of(found: MeasurementPlan, kind: str, role: str = "fit", variant: str | None = None) -> list[MeasurementTask]:
    return [t for t in found.tasks if t.kind == kind and t.role == role and t.variant == variant]


def test_every_point_is_planned_once_and_validation_points_lie_apart() -> None:
    found = made(tps=(1, 2))
    assert max(Counter(t.key for t in found.tasks).values()) == 1
    shapes = {(t.operator, str(sorted(t.shape.items()))) for t in found.tasks if t.role == "fit"}
    checked = [t for t in found.tasks if t.role == "validation"]
    assert {t.kind for t in checked} == {"gemm", "decode_attention", "prefill_attention"}
    assert not [t for t in checked if (t.operator, str(sorted(t.shape.items()))) in shapes]


def test_validation_points_lie_inside_the_box() -> None:
    found = made()
    for kind in ("gemm", "decode_attention", "prefill_attention"):
        fitted = of(found, kind)
        for task in of(found, kind, "validation"):
            for name, value in task.shape.items():
                assert min(t.shape[name] for t in fitted) <= value <= max(t.shape[name] for t in fitted)


def test_matrix_products_have_the_models_own_shapes() -> None:
    spec = load_model("llama-3.2-1b")
    for tp in (1, 2):
        shapes = {(t.shape["n"], t.shape["k"]) for t in of(made(tps=(tp,)), "gemm")}
        own = attention_layer(spec, spec.layers[0].attention, tp).products
        assert shapes == {*own, (2 * 8192 // tp, 2048), (2048, 8192 // tp), (128256 // tp, 2048)}


def test_what_a_device_apart_does_beside_operators_is_planned_for_it_alone() -> None:
    spec = load_model("llama-3.2-1b")
    apart = plan([spec], (1, 2), LIMITS, ("in_memory", "to_device"))
    for tp in (1, 2):
        written = attention_layer(spec, spec.layers[0].attention, tp).written_width
        assert written in {t.shape["width"] for t in of(apart, "elementwise", variant="kv_write")}
    assert {t.shape["width"] for t in of(apart, "elementwise", variant="embedding")} == {3 * spec.hidden_size}
    assert not {"kv_write", "embedding"} & {t.variant for t in made().tasks}


def test_host_work_is_measured_first() -> None:
    assert {t.shape["sequences"] for t in made().rounds[0] if t.kind == "host"} == {1, 4, 16, 64}


def test_collectives_are_planned_for_several_devices_only() -> None:
    assert not of(made(), "all_reduce")
    assert {t.shape["devices"] for t in of(made(tps=(1, 2, 4)), "all_reduce")} == {2, 4}


def test_a_plan_is_the_same_every_time_and_told_apart_by_its_hash() -> None:
    assert made() == made()
    assert made().hash != made(seed=1).hash != made("llama-3.1-8b").hash


def test_early_rounds_have_a_part_of_everything() -> None:
    found = made()
    operators = {t.operator for t in found.tasks}
    assert {t.operator for t in found.rounds[0]} == operators
    sizes = [len(tasks) for tasks in found.rounds]
    assert sizes[2] < sizes[3]
    assert sum(sizes[:3]) < 1.3 * sizes[3]


@given(st.integers(1, 200))
def test_rounds_double(count: int) -> None:
    rounds = Counter(_round_of(at, count) for at in range(count))
    for last in range(ROUNDS):
        upto = sum(rounds[r] for r in range(last + 1))
        assert upto == -(-count // 2 ** (ROUNDS - 1 - last))


def test_corners_come_first_and_then_what_is_farthest() -> None:
    grid = [MeasurementTask("copy", "bf16", {"bytes": 2**i, "more": 2**j}) for i in range(5) for j in range(5)]
    first = [tuple(t.shape.values()) for t in spread(grid, 5)]
    assert set(first[:4]) == {(1, 1), (1, 16), (16, 1), (16, 16)}
    assert first[4] == (4, 4)


def test_no_call_takes_too_much_memory_or_time() -> None:
    small = Limits(1e9, 0.01, 2.0**39, 2.0**38, 2.0**36)
    found = made(limits=small)
    for task in found.tasks:
        if task.kind != "step":
            flops, moved = work(task)
            assert moved <= 0.2 * small.memory_bytes
            assert flops / small.flops_per_s <= small.call_s
    assert any("do not fit into 20% of the memory" in note for note in found.notes)


def test_of_a_model_too_large_for_the_memory_fewer_layers_are_built_and_that_is_said() -> None:
    found = made("llama-3.1-8b", limits=Limits(16e9, 0.5, 2.0**42, 2.0**41, 2.0**36))
    layers = {t.shape["layers"] for t in found.tasks if t.kind == "step"}
    assert len(layers) == 1
    assert 0 < layers.pop() < 32
    assert any("whole steps are of" in note for note in found.notes)
    assert not [
        t for t in made("llama-3.1-8b", limits=Limits(1e9, 0.5, 2.0**42, 2.0**41, 2.0**36)).tasks if t.kind == "step"
    ]


def test_what_torch_has_no_kernel_for_is_said() -> None:
    found = plan([load_model("deepseek-v3", ["weight_dtype=fp8"])], (1,), LIMITS)
    assert any("mla attention" in note for note in found.notes)
    assert of(found, "moe")
    assert of(found, "quantise")


def test_points_that_are_alike_are_taken_in_their_order_and_none_twice() -> None:
    alike = [MeasurementTask("copy", "bf16", {"bytes": 8.0}, variant=str(i)) for i in range(4)]
    assert spread(alike, 3) == alike[:3]
    two = [MeasurementTask("copy", "bf16", {"bytes": size}, variant=str(i)) for i, size in enumerate((1, 8, 1, 8))]
    assert [task.shape["bytes"] for task in spread(two, 4)] == [8, 1]


def test_layers_of_one_sublayer_are_measured_without_the_other() -> None:
    (whole,) = model().layers
    halves = (
        whole.model_copy(update={"feed_forward": NoFeedForward()}),
        whole.model_copy(update={"attention": NoAttention()}),
    )
    both = plan([model()], (1,), LIMITS)
    apart = plan([model().model_copy(update={"layers": halves})], (1,), LIMITS)
    for kind in ("gemm", "decode_attention", "prefill_attention"):
        assert {t.key for t in of(apart, kind)} == {t.key for t in of(both, kind)}
    assert not of(apart, "step")
    assert "tiny: no whole step is measured (its layers are not plain, or too large)" in apart.notes


def test_a_mixture_of_experts_is_measured_grouped() -> None:
    found = of(made("qwen3-30b-a3b"), "moe")
    assert {t.shape["experts"] for t in found} == {128}
    assert of(plan([model()], (1,), LIMITS), "moe") == []
