"""Parts of costs against numbers worked out by hand: bytes of small kernels, tables of two cards, parts of steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simtune.costs.basis import StepBasis, WeightedStep
from simtune.costs.compiled import StepTables, compile_costs
from simtune.costs.drafting.passes import DraftPasses
from simtune.costs.hardware_profile import UNLIKE, _unlike
from simtune.costs.iteration import HOST, KINDS, StepModel, StepWork
from simtune.costs.layers import attention_layer
from simtune.costs.predict import Profile
from simtune.costs.tables.common import Origin, Table
from simtune.costs.tables.screen import Sheet
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.results.outcome import SampledStep
from simtune.sim.run_basis import _seconds_by_kind
from simtune.specs.catalog import load_model
from simtune.specs.drafters import Ngram
from simtune.specs.hardware import Hardware
from simtune.specs.model import CompressedAttention, FullAttention, SlidingAttention
from tests.costs.made_up import hardware, mixing, model, moe, pool
from tests.costs.test_shared_experts import reusing

# --- small kernels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_small_kernels_of_compressed_attention_move_these_bytes(tp: int) -> None:
    """DeepSeek V4 Pro in bf16: queries of 1,536 values and heads of 512, of which 64 are rotated; entries of 4 tokens
    are made of 2 x 2 x 512 columns, those of the indexer of 2 x 2 x 128."""
    target = load_model("deepseek-v4-pro")
    found = [group.attention for group in target.layers if isinstance(group.attention, CompressedAttention)]
    attention = next(item for item in found if item.index_topk)
    heads = 128 // tp
    assert attention_layer(target, attention, tp).small == [
        ("norm", 2 * (1536 + (heads + 1) * 512)),  # read and written: a value, and a key of all heads
        ("rope", 4 * (heads + 1) * 64),
        ("compress", 2 * (2048 + 512)),
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("changes", "beside", "small"),
    [
        # 8 query heads and 2 KV heads of 16 values; keys and values of a rank, at least one head of each.
        ({}, 0, []),
        ({"output_gate": True}, lambda heads: 16 * heads, ["activation"]),
        ({"head_gate": True}, lambda heads: heads, ["activation"]),
        ({"qk_norm": True}, 0, ["norm"]),
        ({"qk_norm": True, "output_gate": True}, lambda heads: 16 * heads, ["norm", "activation"]),
    ],
)
def test_parts_of_softmax_attention(tp: int, changes: dict[str, Any], beside: Any, small: list[str]) -> None:
    attention = FullAttention(heads=8, kv_heads=2, head_dim=16, **changes)
    layer = attention_layer(model(), attention, tp)
    heads, kv_heads = 8 // tp, max(1, 2 // tp)
    gates = beside(heads) if beside else 0
    assert layer.products == [(16 * heads + 2 * 16 * kv_heads + gates, 64), (64, 16 * heads)]
    rotated = 2 * 16 * (heads + kv_heads)  # read and written
    widths = {"norm": rotated, "activation": 3 * 16 * heads}  # the gate and the output are read, their product written
    assert layer.small == [("rope", rotated), *((name, widths[name]) for name in small)]
    assert (layer.output_width, layer.written_width, layer.values_per_token) == (
        16 * heads,
        2 * 2 * 16 * kv_heads,
        2 * 16 * kv_heads,
    )


def test_the_longest_context_costs_what_the_kernel_says() -> None:
    """Beside a chunk the kernel's own 30 ns a token; alone 20 ns once pairs of sequence and KV head fill eight
    processors, and nothing in windows."""
    attention, profile = FullAttention(heads=8, kv_heads=2, head_dim=16), Profile(mixing(hardware()))
    costs = attention_layer(model(), attention, 1).costs(profile, "bf16", "bf16")
    decodes = np.array([1.0, 40.0])
    assert costs.imbalance_s(decodes, True).tolist() == [3e-8, 3e-8]
    assert costs.imbalance_s(decodes, False).tolist() == [0.0, 2e-8]
    plain = attention_layer(model(), attention, 1).costs(Profile(hardware()), "bf16", "bf16")
    assert plain.imbalance_s(decodes, True).tolist() == plain.imbalance_s(decodes, False).tolist() == [0.0, 0.0]
    sliding = SlidingAttention(heads=8, kv_heads=2, head_dim=16, window=64)
    windowed = attention_layer(model(), sliding, 1).costs(profile, "bf16", "bf16")
    assert windowed.imbalance_s(decodes, True).tolist() == [0.0, 0.0]


def test_queries_of_low_rank_are_a_product_and_a_norm_more() -> None:
    attention = FullAttention(heads=8, kv_heads=2, head_dim=16, q_lora_rank=24)
    layer = attention_layer(model(), attention, 2)
    assert layer.products == [(24 + 2 * 16, 64), (16 * 4, 24), (64, 16 * 4)]
    assert layer.small == [("rope", 2 * 16 * 5), ("norm", 2 * 24)]


# --- tables of a card beside those of a sister card -----------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "flops", "bytes_per_s", "unlike"),
    [
        # Sheets are the same: three times as long, or a third, may be.
        (0.95 * UNLIKE, 1.0, 1.0, False),
        (1.05 * UNLIKE, 1.0, 1.0, True),
        (1.05 / UNLIKE, 1.0, 1.0, False),
        (0.95 / UNLIKE, 1.0, 1.0, True),
        # The card has 0.4 of the flops: 2.5 times that is allowed above, and no less below.
        (2.4 * UNLIKE, 0.4, 1.0, False),
        (2.6 * UNLIKE, 0.4, 1.0, True),
        (1.05 / UNLIKE, 0.4, 1.0, False),
        (0.95 / UNLIKE, 0.4, 1.0, True),
        # It has twice the bytes per second: half of that is allowed below, and no more above.
        (1.05 / 2 / UNLIKE, 1.0, 2.0, False),
        (0.95 / 2 / UNLIKE, 1.0, 2.0, True),
        (1.05 * UNLIKE, 1.0, 2.0, True),
    ],
)
def test_tables_may_differ_by_the_data_sheets_and_a_factor_of_three(
    factor: float, flops: float, bytes_per_s: float, unlike: bool
) -> None:
    sister = hardware()
    size = np.arange(1.0, 101.0)
    shape = {"m": size, "n": 0 * size + 256.0, "k": 0 * size + 128.0}
    seconds = factor * Profile(sister).predictor("gemm", "bf16").seconds(**shape)
    table = Table("gemm", "bf16", shape, seconds, Origin("a source", "a licence"), ("a.csv",))
    why = _unlike(table, Sheet(8, 1e12 * flops, 1e9 * bytes_per_s), sister)
    assert (why is not None) == unlike
    if why is not None:
        assert f"100 of 100 rows take {factor:.2g} times as long (median) as made-up's" in why
    few = np.where(size <= 5, seconds, seconds / factor)
    assert _unlike(replace(table, seconds=few), Sheet(8, 1e12 * flops, 1e9 * bytes_per_s), sister) is None, "5 %"


# --- parts of steps -------------------------------------------------------------------------------------------


def steep(device: Hardware) -> Hardware:
    """A device whose decodes take much longer beside a long chunk than beside a short one."""
    kernel = mixing(device).operators["mixed_attention.bf16"]
    base = kernel.base.model_copy(update={"block_s": 1e-3})
    kernels = {"mixed_attention.bf16": kernel.model_copy(update={"base": base})}
    return device.model_copy(update={"operators": device.operators | kernels})


def test_decodes_beside_a_chunk_take_as_long_as_between_the_two_nearest_lengths() -> None:
    """At a length that was compiled as the step model says, between two of them in proportion, below all as the first.

    Two devices are compared that differ in this alone.
    """
    plan = pool(max_num_seqs=48, budget=700)
    costs, without = (compile_costs(model(), device, plan, 3000) for device in (steep(hardware()), hardware()))
    step_model = StepModel(model(), steep(hardware()), plan)
    first, *middle, last = (table.chunk for table in costs.tables.beside)
    assert middle, "of a budget of 700 tokens"
    alone_s = StepModel(model(), hardware(), plan).decode(20, np.array([500.0]))[0]

    def longer(chunk: int) -> float:
        """Seconds by which decodes of 20 times 500 tokens take longer beside a chunk than alone."""
        ticks = [compiled.mixed(20, 20 * 500, [(0, chunk)], 21) for compiled in (costs, without)]
        return (ticks[0] - ticks[1]) / TICKS_PER_SECOND

    for chunk in (first, *middle):
        beside_s = step_model.decode(20, np.array([500.0]), chunk=chunk)[0]
        assert longer(chunk) == pytest.approx(beside_s - alone_s, rel=5e-4)
    assert longer(1) == longer(first // 2) == longer(first)
    assert longer(last - 20) > longer(middle[-1]) > longer(first)
    for low, high in pairwise((first, *middle, last - 20)):
        between = (2 * low + high) // 3
        share = (between - low) / (high - low)
        expected = longer(low) + share * (longer(high) - longer(low))
        assert longer(between) == pytest.approx(expected, rel=1e-6)


def steps_by_hand() -> list[SampledStep]:
    """Decodes alone, with drafts, beside prompts, and prompts alone; a step whose prompt goes on samples nothing."""
    return [
        SampledStep(1, 4, 400, 4, 4, ()),
        SampledStep(1, 3, 900, 12, 3, ()),
        SampledStep(1, 8, 80, 8, 9, ((0, 20),)),
        SampledStep(1, 0, 0, 0, 0, ((0, 30),)),
        SampledStep(1, 0, 0, 0, 2, ((100, 7), (0, 5))),
    ]


def test_steps_that_are_timed_together_take_what_each_takes_by_itself() -> None:
    """Experts of tokens that are verified together are shared where no prompt is in the step."""
    target = reusing(model(feed_forward=moe()), 0.6)
    plan = pool(max_num_seqs=32)
    step_model, steps = StepModel(target, hardware(), plan), steps_by_hand()
    assert step_model.sharing is not None
    columns = _seconds_by_kind(step_model, steps)
    assert set(columns) <= set(KINDS)
    width = round(sum(step.verify_tokens for step in steps) / sum(step.num_decodes for step in steps))
    for at, step in enumerate(steps):
        tokens = step.verify_tokens + sum(new for _, new in step.chunks)
        parts = {kind: float(x[0]) for kind, x in step_model.linear(np.array([float(tokens)])).items()}
        samples = step.num_samples + step.verify_tokens - step.num_decodes
        if samples:
            parts |= {kind: float(x[0]) for kind, x in step_model.head(np.array([float(samples)])).items()}
        if step.num_decodes:
            context = np.array([step.context_tokens / step.num_decodes])
            parts["decode_attention"] = float(step_model.decode(step.num_decodes, context, width)[0])
            if not step.chunks:
                verified = np.array([float(step.verify_tokens)])
                saved = step_model.sharing.saved_s(verified, np.array([float(step.num_decodes)]))[0]
                assert (saved > 0) == (step.verify_tokens > step.num_decodes)
                parts["moe"] -= float(saved)
        if step.chunks:
            past, new = np.array(step.chunks, dtype=np.float64).T
            attention = step_model.attention
            repeated = attention.past(past)
            until, before = attention.prompts(past + new), attention.prompts(past)
            alone, together = (end - start + repeated for end, start in zip(until, before, strict=True))
            parts["prefill_attention"] = max(float(alone.max()), float(together.sum())) + attention.prefill_call_s
        found = {kind: float(seconds[at]) for kind, seconds in columns.items() if seconds[at]}
        assert found == pytest.approx({kind: seconds for kind, seconds in parts.items() if seconds}), step


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_weight_of_a_step_is_divided_as_its_seconds_are(asynchronous: bool) -> None:
    """The host's part is what kernels do not account for, however small the weight."""
    device = hardware(host_step_s=1e-3, host_per_sequence_s=1e-5)
    plan = pool(max_num_seqs=32, asynchronous=asynchronous)
    works = [StepWork(4, 400, (), 4), StepWork(2, 900, ((0, 40),), 3)]
    step_model, weights = StepModel(model(), device, plan), [0.5, 0.25]
    expected: dict[str, float] = {}
    for work, weight in zip(works, weights, strict=True):
        total, parts = step_model.seconds(work), step_model.breakdown(work)
        assert total > sum(parts.values())
        for kind, seconds in (parts | {HOST: total - sum(parts.values())}).items():
            expected[kind] = expected.get(kind, 0.0) + weight * seconds / total
    steps = [WeightedStep(weight, work) for work, weight in zip(works, weights, strict=True)]
    found = StepBasis(model(), device, plan).of(steps)
    assert {kind: float(basis.seconds.sum()) for kind, basis in found.items()} == pytest.approx(expected)
    assert sum(expected.values()) == pytest.approx(sum(weights))
    quick = hardware(host_step_s=1e-9)
    assert HOST not in StepBasis(model(), quick, pool(max_num_seqs=32)).of(steps), "hidden behind the GPU"


@pytest.mark.parametrize(
    ("sequences", "chunks", "together", "without"),
    [
        # Three tokens of each of 4 sequences, and 20 of prompts; with 90 a step reads 100 at most.
        (4, [(0, 15), (10, 5)], 32, 12),
        (4, [(0, 90)], 100, 12),
        (40, [(0, 5)], 100, 100),
        (0, [(0, 7)], 7, 0),
    ],
)
@pytest.mark.parametrize("joins", [True, False])
def test_prompts_add_their_tokens_to_the_first_pass_of_a_drafter(
    sequences: int, chunks: list[tuple[int, int]], together: int, without: int, joins: bool
) -> None:
    linear, join = [3 * n * n for n in range(101)], [5 * n for n in range(101)]
    prefill, cached = [7 * n * n for n in range(101)], [2 * n for n in range(101)]
    tables: Any = SimpleNamespace(
        mixed=SimpleNamespace(linear=linear), among=prefill, cached_among=cached, prefill=prefill, cached=cached
    )
    tables.prefill_call, tables.prompts = 1000, partial(StepTables.prompts, tables)
    shape: Any = SimpleNamespace(overlapped=False)
    passes = DraftPasses(Ngram(lookup_max=3), shape, tables, None, join if joins else ())
    passes.tables = tables
    new = sum(tokens for _, tokens in chunks)
    expected = 1000 + 3 * (together**2 - without**2) + 5 * (together - without) * joins
    expected += sum(7 * (past + tokens) ** 2 - 2 * past for past, tokens in chunks)
    assert passes.chunks(sequences, 2, chunks, new) == expected
