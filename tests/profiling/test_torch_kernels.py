"""What torch computes in the calls that are timed: the right thing, by every kernel."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any, cast

import pytest

torch: Any = pytest.importorskip("torch")

from simtune.profiling import kernels  # noqa: E402
from simtune.profiling.decoder import Decoder  # noqa: E402
from simtune.profiling.measurement_plan import Limits, MeasurementTask, plan  # noqa: E402
from simtune.profiling.operands import COLD, Operands  # noqa: E402
from simtune.profiling.rig import TorchRig  # noqa: E402
from tests.profiling.pretended import model  # noqa: E402

CPU = torch.device("cpu")
CACHE = 1 << 16


@pytest.fixture(scope="module")
def operands() -> Operands:
    return Operands(CPU, CACHE)


def softmax_attention(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """By the book: every query head with its own keys and values."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("name", ["sdpa", "sdpa_grouped", "matmul"])
@pytest.mark.parametrize(("tokens", "context", "window"), [(1, 17, 17), (5, 17, 17), (5, 17, 4), (9, 9, 9)])
def test_kernels_of_attention_agree_with_the_book(name: str, tokens: int, context: int, window: int) -> None:
    q, k, v = (torch.randn(2, h, n, 16) for h, n in ((8, tokens), (2, context), (2, context)))
    at = torch.arange(context)
    past = at[None, :] - at[context - tokens :, None]
    mask = kernels.sees(tokens, context, window, CPU)
    if mask == "causal" and name != "sdpa":
        pytest.skip("whole prompts go to torch's own attention only")
    found = kernels.ATTENTION[name](q, k, v, mask)
    assert torch.allclose(found, softmax_attention(q, k, v, (past <= 0) & (past > -window)), atol=1e-5)


@pytest.mark.parametrize("name", ["sdpa", "sdpa_grouped", "matmul"])
def test_sequences_apart_attend_as_together(name: str) -> None:
    q, k, v = (torch.randn(3, h, n, 16) for h, n in ((8, 1), (2, 17), (2, 17)))
    together = kernels.ATTENTION[name]
    assert torch.allclose(kernels.apart(together)(q, k, v, None), together(q, k, v, None), atol=1e-5)


def test_keys_and_values_are_kept_where_they_belong() -> None:
    cache, (k, v) = torch.zeros(2, 3, 2, 8, 4), torch.randn(2, 2, 2, 4)
    kernels.keep(cache, torch.tensor([2, 0]), torch.tensor([5, 1]), k, v)
    assert torch.equal(cache[0, 2, :, 5], k[0])
    assert torch.equal(cache[1, 0, :, 1], v[1])
    assert int((cache != 0).sum()) == k.numel() + v.numel()


def test_a_drafted_token_sees_the_context_and_its_ancestors() -> None:
    mask = kernels.tree_mask(5, 8, CPU)
    assert mask[:, :3].all()
    assert mask[:, 3:].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_grouped_experts_are_each_tokens_own_experts() -> None:
    x, chosen = torch.randn(6, 8), torch.tensor([[0, 2], [1, 2], [2, 3], [0, 1], [3, 0], [2, 0]])
    gate_up, down = torch.randn(4, 10, 8), torch.randn(4, 8, 5)
    wanted = torch.stack(
        [sum(kernels.activation(x[t] @ gate_up[e].T) @ down[e].T for e in chosen[t].tolist()) for t in range(6)]
    )
    assert torch.allclose(kernels.moe(x, chosen, gate_up, down), wanted, atol=1e-4)


def test_rope_keeps_lengths_and_norm_adds_the_residual() -> None:
    x, angle = torch.randn(3, 2, 8), torch.randn(3, 1, 4)
    assert torch.allclose(kernels.rope(x, angle.cos(), angle.sin()).norm(dim=-1), x.norm(dim=-1), atol=1e-5)
    a, residual = torch.randn(3, 8), torch.randn(3, 8)
    total = a + residual
    found = kernels.norm(a, residual, torch.ones(8))
    assert torch.equal(residual, total)
    assert torch.allclose(found.pow(2).mean(-1), torch.ones(3), atol=1e-3)


def test_rotating_operands_do_not_overlap_and_outgrow_the_cache(operands: Operands) -> None:
    views = operands.rotating((32, 64), "fp32")
    starts = sorted(view.data_ptr() for view in views)
    assert all(b - a >= 32 * 64 * 4 for a, b in itertools.pairwise(starts))
    assert len(views) * 32 * 64 * 4 >= COLD * CACHE
    assert abs(float(torch.stack(views).std()) - 1) < 0.05  # random normals: power and caches know zeros


def test_every_planned_kind_of_call_can_be_made(operands: Operands) -> None:
    spec = model(hidden=128, layers=1)
    small = Limits(1e8, 1e-4, 2.0**36, 2.0**36, 2.0**36)
    copies = ("in_memory", "to_device")
    operators = {t.operator: t for t in plan([spec], (1,), small, copies).tasks if t.kind != "step"}
    operators = {name: t for name, t in operators.items() if t.variant != "to_device"}  # from pinned memory
    assert len(operators) > 8
    for task in operators.values():
        calls = kernels.calls(task, operands, kernels.ATTENTION["sdpa"])
        assert calls
        for call in calls[:2] if task.kind != "decode_imbalance" else ():  # by a kernel of GPUs
            call()


def test_unequal_contexts_have_the_mean_of_equal_ones(operands: Operands) -> None:
    shape = {"batch": 8, "context": 20, "longest": 80, "heads": 4, "kv_heads": 2, "head_dim": 64}
    task = MeasurementTask("decode_imbalance", "bf16", shape, "bf16")
    imbalanced, even = (
        cast(Any, kernels.imbalanced_decodes(task, operands, evenly=evenly)[0]).args for evenly in (False, True)
    )
    assert imbalanced[3].lengths.tolist() == [80, *[11] * 7]
    assert even[3].lengths.tolist() == [20] * 8
    for q, k, _, spans in (imbalanced, even):
        assert len(q) == len(spans.lengths)
        assert len(k) == 8 * spans.longest


def test_writing_keys_and_values_writes_all_of_them(operands: Operands) -> None:
    task = MeasurementTask("elementwise", "bf16", {"rows": 5, "width": 4 * 3 * 64}, variant="kv_write")
    write = kernels.calls(task, operands, None)[0]
    assert isinstance(write, partial)
    cache, _, _, k, v = write.args
    assert k.shape == v.shape == (5, 3, 64)
    cache.zero_()
    write()
    assert torch.equal(cache[0, :, :, 0], k)
    assert torch.equal(cache[1, :, :, 0], v)


def test_a_kernel_that_reads_token_by_token_finds_caches_stored_so(operands: Operands) -> None:
    decoder = Decoder(model(hidden=128, layers=2), 2, operands)
    for cache in decoder._caches(kernels.ATTENTION["varlen"], (2, 3, 4, 20, 64)):
        assert cache.shape == (2, 3, 4, 20, 64)
        assert all(part.transpose(1, 2).flatten(0, 1).data_ptr() == part.data_ptr() for part in cache), "no copy"


@pytest.mark.parametrize("decode", ["sdpa_grouped", "matmul"])
def test_a_decoders_step_yields_a_token_for_each_sampled_row(operands: Operands, decode: str) -> None:
    decoder = Decoder(model(hidden=128, layers=2), 2, operands)
    shape = {"layers": 2, "decodes": 3, "context": 20, "past": 8, "tokens": 16, "samples": 4}
    step = decoder.step(shape, kernels.ATTENTION[decode], kernels.ATTENTION["sdpa"])
    tokens: Any = step()
    assert tokens.shape == (4, 1)
    assert int(tokens.max()) < 8192


def test_a_rig_measures_a_processor() -> None:
    rig = TorchRig("cpu", [model(hidden=128)])
    kernel_of = rig.prepare()
    assert kernel_of["prefill_attention.bf16"] == "sdpa"
    told = rig.describe()
    assert told["device"].endswith("one thread")
    assert told["processors"] == 1
    tasks = {t.kind: t for t in plan([model(hidden=128)], (1,), rig.limits(1e-3, 1.0)).tasks}
    for kind in ("host", "elementwise", "decode_attention", "sampling"):
        assert rig.measure(tasks[kind]).seconds > 0
    found = rig.measure(tasks["gemm"])
    assert found.seconds > 0
    assert found.kernel is not None
    assert found.kernel.startswith("aten.")


@pytest.mark.parametrize(("device", "words"), [("tpu", "write cpu, cuda"), ("meta", "only cpu and cuda")])
def test_a_device_that_cannot_be_measured_is_refused(device: str, words: str) -> None:
    from simtune.errors import UsageError

    with pytest.raises(UsageError, match=words):
        TorchRig(device, [model()])


@pytest.mark.slow
def test_collectives_among_two_processes() -> None:
    from simtune.profiling.collectives import Group
    from simtune.profiling.measurement_plan import MeasurementTask

    group = Group(2, "cpu")
    try:
        for task in (
            MeasurementTask("all_reduce", "fp32", {"devices": 2, "bytes": 4096}),
            MeasurementTask("all_gather", "fp32", {"devices": 2, "bytes": 4096}),
            MeasurementTask("send_recv", "fp32", {"bytes": 4096}),
        ):
            assert 0 < group.measure(task).seconds < 1
    finally:
        group.close()
