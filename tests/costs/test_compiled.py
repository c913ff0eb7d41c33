"""Compiled costs: exact under jumps, close to what they were compiled from, and above their own bounds."""

from __future__ import annotations

import gc
import pickle
import weakref
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.arrays import Array
from simtune.costs.bounds import CostBounds, least_costs
from simtune.costs.compiled import CompiledCosts, LinearCosts, compile_costs
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.knots import whole_ticks
from simtune.costs.protocol import UNBOUNDED, StepCosts
from simtune.costs.residual import fit_process
from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
from simtune.errors import UsageError
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Arrays, Curve, Hardware
from simtune.specs.model import DenseFeedForward
from tests.costs.made_up import calibrated, hardware, mixing, model, pool

SEQS, BUDGET, LONGEST = 48, 700, 3000

# (window, overlap_p, host seconds per step and per sequence, asynchronous, kinds of steps that a log has corrected).
# The host matters never to always. In those with corrections decodes take another time beside a prefill chunk.
WORLDS: list[tuple[int | None, float, float, float, bool, dict[str, tuple[float, float]]]] = [
    (None, 1.0, 0.0, 0.0, True, {}),
    (None, 2.7, 1e-4, 8e-5, True, {}),
    (256, 1.3, 2e-4, 3e-6, True, {}),
    (None, 2.0, 1.0, 0.0, True, {}),
    (256, 5.0, 3e-4, 1e-6, False, {}),
    (None, 2.0, 1e-4, 8e-5, True, {"decode": (1.7, 2e-4), "prefill": (0.8, 0.0)}),
    (256, 1.5, 1e-4, 8e-5, True, {"prefill": (3.0, 1e-3)}),
]


@cache
def compiled(world: int) -> tuple[CompiledCosts, StepModel]:
    window, overlap_p, step_s, per_sequence_s, asynchronous, corrected = WORLDS[world % len(WORLDS)]
    device = hardware(host_step_s=step_s, host_per_sequence_s=per_sequence_s, overlap_p=overlap_p)
    if corrected:
        device = mixing(calibrated(device, **corrected))
    if world >= len(WORLDS):
        device = bent(device)
    plan = pool(tp=2, max_num_seqs=SEQS, budget=BUDGET, asynchronous=asynchronous)
    costs = compile_costs(model(window=window), device, plan, LONGEST)
    return costs, StepModel(model(window=window), device, plan)


def bent(device: Hardware) -> Hardware:
    """Every operator corrected by what may be measured: waves of 10 % along one or two sizes, with noise."""
    rng = np.random.default_rng(0)
    sizes = {
        "gemm": {"m": 700},
        "decode_attention": {"batch": 48, "context": 3000},
        "prefill_attention": {"tokens": 3000},
        "moe": {"tokens": 700},
    }
    operators = dict(device.operators)
    arrays: dict[str, Array] = {}
    for key, operator in device.operators.items():
        if operator.kind in sizes:
            logs = {name: rng.uniform(0, np.log2(most), 60) for name, most in sizes[operator.kind].items()}
            z = 0.1 * np.sum([np.sin(1.5 * x) for x in logs.values()], axis=0) + 0.03 * rng.standard_normal(60)
            process = fit_process(logs, z)
            assert process is not None
            residual, found = process.spec(key)
            operators[key] = operator.model_copy(update={"residual": residual})
            arrays |= found
        elif operator.kind == "all_reduce":
            line = Curve(at={"devices": 2.0}, x=(1e3, 1e4, 1e5), seconds=(2e-6, 5e-6, 3e-4))
            operators[key] = operator.model_copy(update={"curves": (line,)})
    return device.model_copy(update={"operators": operators}).with_arrays(Arrays(arrays))


worlds = st.integers(0, len(WORLDS) - 1) | st.sampled_from([len(WORLDS), len(WORLDS) + 2, len(WORLDS) + 4])
exact_worlds = st.integers(0, len(WORLDS) - 1)


@st.composite
def decodes(draw: st.DrawFn, least: int = 1) -> tuple[int, int]:
    """A number of decodes and their context tokens."""
    count = draw(st.integers(least, SEQS))
    return count, draw(st.integers(count, count * LONGEST)) if count else 0


@st.composite
def steps(draw: st.DrawFn) -> StepWork:
    """Any step within the limits: decodes, chunks, or both."""
    count, context = draw(decodes(least=0))
    chunks, room = [], BUDGET - count
    for _ in range(draw(st.integers(0 if count else 1, min(4, SEQS - count)) if count < SEQS else st.just(0))):
        new = draw(st.integers(1, max(1, room // 2)))
        chunks.append((draw(st.integers(0, LONGEST - new)), new))
        room -= new
    return StepWork(count, context, tuple(chunks), draw(st.integers(count, count + len(chunks))))


def ticks(costs: StepCosts, step: StepWork) -> int:
    return costs.mixed(step.num_decodes, step.context_tokens, step.chunks, step.num_samples)


def linear(world: int) -> LinearCosts:
    return LinearCosts(step_s=1e-3 * (world + 1), per_token_s=1e-6, per_context_s=1e-9 * world, per_pair_s=1e-12)


any_costs: st.SearchStrategy[StepCosts] = worlds.map(lambda world: compiled(world)[0]) | worlds.map(linear)


class TestLawsOfStepCosts:
    """What `simtune.costs.protocol.StepCosts` promises, for every cost model here."""

    @given(costs=any_costs, batch=decodes())
    def test_a_step_without_chunks_is_a_decode_step(self, costs: StepCosts, batch: tuple[int, int]) -> None:
        assert costs.mixed(*batch, [], batch[0]) == costs.decode(*batch)[0]

    @given(costs=any_costs, batch=decodes(), data=st.data())
    def test_a_jump_lands_where_single_steps_do(
        self, costs: StepCosts, batch: tuple[int, int], data: st.DataObject
    ) -> None:
        count, context = batch
        first, slope, span = costs.decode(count, context)
        assert span >= 1
        last = min(span, 5000) - 1
        for k in {0, last, data.draw(st.integers(0, last))}:
            assert costs.decode(count, context + k * count)[0] == first + k * slope

    @given(costs=any_costs, step=steps())
    def test_ticks_are_whole_and_work_takes_time(self, costs: StepCosts, step: StepWork) -> None:
        assert type(ticks(costs, step)) is int
        assert ticks(costs, step) > 0
        if step.num_decodes:
            assert {type(n) for n in costs.decode(step.num_decodes, step.context_tokens)} == {int}


class TestCompiledCosts:
    @given(world=exact_worlds, step=steps())
    def test_close_to_the_step_model(self, world: int, step: StepWork) -> None:
        costs, step_model = compiled(world)
        assert ticks(costs, step) / TICKS_PER_SECOND == pytest.approx(step_model.seconds(step), rel=1e-3)

    def test_corrections_between_knots_add_little(self) -> None:
        """0.3 % at the 90th percentile over the step model, decode steps and mixed ones."""
        costs, step_model = compiled(len(WORLDS))
        rng, off = np.random.default_rng(0), []
        for _ in range(300):
            count = int(rng.integers(1, SEQS))
            context = int(count * np.exp(rng.uniform(0, np.log(LONGEST))))
            new, past = int(rng.integers(1, BUDGET - count)), int(rng.integers(0, 2)) * 1000
            step = StepWork(count, context, ((past, new),) if rng.random() < 0.5 else (), count)
            off.append(abs(ticks(costs, step) / TICKS_PER_SECOND / step_model.seconds(step) - 1))
        assert np.quantile(off, 0.9) < 3e-3
        plain = compiled(0)[1]
        assert abs(step_model.seconds(step) / plain.seconds(step) - 1) > 0.01, "there is something to add"

    def test_a_prompt_never_gets_cheaper_with_its_length(self) -> None:
        device, plan = bent(hardware(overhead_s=1e-4)), pool(tp=2, max_num_seqs=SEQS, budget=BUDGET)
        costs, step_model = compile_costs(model(), device, plan, LONGEST), StepModel(model(), device, plan)
        lengths = np.arange(1, LONGEST + 1)
        assert (np.diff(step_model.attention.prefill(lengths.astype(float))) < 0).any(), "by its residual it would"
        assert (np.diff(CostBounds(costs.tables).prefill_cost_s(lengths)) >= 0).all()
        for past in range(0, LONGEST - 1, 97):
            assert costs.mixed(0, 0, [(past, 1)], 0) >= costs.mixed(0, 0, [(0, 1)], 0) - costs.tables.prefill[1]

    def test_factors_multiply_their_kinds(self) -> None:
        device, plan, step = hardware(), pool(tp=2), StepWork(3, 300, ((0, 50),), 4)
        parts = StepModel(model(), device, plan).breakdown(step)
        for kind in parts:
            slower = compile_costs(model(), device, plan, LONGEST, factors={kind: 2.0})
            seconds = ticks(slower, step) / TICKS_PER_SECOND
            assert seconds == pytest.approx(sum(parts.values()) + parts[kind], rel=1e-3), kind

    @pytest.mark.parametrize("world", [0, len(WORLDS)])
    def test_another_process_gets_the_same_costs(self, world: int) -> None:
        costs, _ = compiled(world)
        again = pickle.loads(pickle.dumps(costs))
        step = StepWork(7, 4321, ((100, 30), (0, 64)), 8)
        assert ticks(again, step) == ticks(costs, step)
        assert again.decode(7, 4321) == costs.decode(7, 4321)

    @given(world=worlds, step=steps())
    def test_never_below_its_bounds(self, world: int, step: StepWork) -> None:
        costs, _ = compiled(world)
        floor = max(c0 + c1 * step.num_tokens for c0, c1 in CostBounds(costs.tables).linear_minorants())
        floor += (
            CostBounds(costs.tables).context_cost_s() * step.context_tokens
            + CostBounds(costs.tables).head_cost_s() * step.num_samples
        )
        assert ticks(costs, step) / TICKS_PER_SECOND >= floor * (1 - 1e-9)

    def test_decodes_take_what_they_take_beside_a_chunk(self) -> None:
        """Between the knots of the chunk's length too, and at less cost the shorter the chunk."""
        plan = pool(max_num_seqs=SEQS, budget=BUDGET)
        costs, step_model = (
            compile_costs(model(), mixing(hardware()), plan, LONGEST),
            StepModel(model(), mixing(hardware()), plan),
        )
        without = compile_costs(model(), hardware(), plan, LONGEST)
        extra = []
        for chunk in (1, 16, 40, 128, 129, 300, 640):
            step = StepWork(20, 20 * 500, ((0, chunk), (0, 1)), 20)
            assert ticks(costs, step) / TICKS_PER_SECOND == pytest.approx(step_model.seconds(step), rel=2e-3)
            extra.append(ticks(costs, step) - ticks(without, step))
        assert extra == sorted(extra)
        assert extra[0] > 0
        assert costs.decode(20, 20 * 500) == without.decode(20, 20 * 500), "alone they take what they took"

    @given(count=st.integers(1, SEQS), mean=st.integers(1, 1000), excess=st.integers(0, 2000), chunk=st.booleans())
    def test_unequal_contexts_cost_the_excess_of_the_longest(
        self, count: int, mean: int, excess: int, chunk: bool
    ) -> None:
        plan, device, chunks = pool(max_num_seqs=SEQS, budget=BUDGET), mixing(hardware()), ((0, 9),) if chunk else ()
        costs, step_model = compile_costs(model(), device, plan, LONGEST), StepModel(model(), device, plan)
        context, longest = count * mean, mean + excess
        even, uneven = (
            step_model.gpu_s(StepWork(count, context, chunks, count, longest_context=most)) for most in (0, longest)
        )
        found = costs.imbalance(count, context, longest, chunk)
        assert found / TICKS_PER_SECOND == pytest.approx(uneven - even, rel=1e-6, abs=1e-9)
        assert costs.imbalance(count, context + 7 * count, longest + 7, chunk) == found, "the same along a jump"
        split = count * 2 < 0.8 * 2 * 8  # two KV heads, eight processors
        assert found == 0 if split and not chunk else (found > 0) == (excess > 0)

    @given(world=worlds, length=st.integers(1, LONGEST), data=st.data())
    def test_prompts_cost_at_least_their_bound_however_they_are_cut(
        self, world: int, length: int, data: st.DataObject
    ) -> None:
        costs, _ = compiled(world)
        lines, spent, past = CostBounds(costs.tables).linear_minorants(), 0.0, 0
        while past < length:
            new = data.draw(st.integers(1, min(BUDGET, length - past)))
            new = max(new, min(length - past, BUDGET // 3))  # not too many chunks
            alone = costs.mixed(0, 0, [(past, new)], 0) / TICKS_PER_SECOND
            spent += alone - max(c0 + c1 * new for c0, c1 in lines)
            past += new
        assert spent >= CostBounds(costs.tables).prefill_cost_s(np.array([length]))[0] * (1 - 1e-9) - 1e-15

    def test_the_context_bound_keeps_most_of_the_slope(self) -> None:
        """On a real device; where no call had any overhead, short contexts would bring it down."""
        large, device, plan = (
            load_model("llama-3.1-8b"),
            load_hardware("h100-sxm"),
            pool(max_num_seqs=SEQS, budget=4000),
        )
        low, high = StepModel(large, device, plan).decode(SEQS, np.array([LONGEST / 2, LONGEST]))
        slope = (high - low) / (SEQS * LONGEST / 2)
        assert (
            0.9 * slope < CostBounds(compile_costs(large, device, plan, LONGEST).tables).context_cost_s() < 1.5 * slope
        )

    def test_the_minorants_follow_a_convex_table(self) -> None:
        """Reading weights bounds small steps, computing bounds large ones: no single line does for both."""
        device = hardware(flops_per_s=1e14, bytes_per_s=1e12, overlap_p=6.0, overhead_s=1e-9)
        wide = DenseFeedForward(intermediate_size=8192)
        large, plan = model(hidden=2048, feed_forward=wide), pool(max_num_seqs=SEQS, budget=4000)
        lines = CostBounds(compile_costs(large, device, plan, LONGEST).tables).linear_minorants()
        assert 2 <= len(lines) < 100
        tokens = np.array([1, 1024, 4000])
        exact = np.sum(list(StepModel(large, device, plan).linear(tokens).values()), axis=0)
        best = [max(c0 + c1 * m for c0, c1 in lines) for m in tokens.tolist()]
        assert best == pytest.approx(exact.tolist(), rel=5e-3)
        for c0, c1 in lines:
            one_line = np.array([c0 + c1 * m for m in tokens.tolist()])
            assert (one_line < 0.9 * exact).any()

    @settings(deadline=None)
    @given(world=worlds, count=st.integers(1, SEQS))
    def test_longer_contexts_never_take_less(self, world: int, count: int) -> None:
        costs, _ = compiled(world)
        times = [costs.decode(count, count * mean)[0] for mean in range(1, LONGEST, 37)]
        assert times == sorted(times)

    @pytest.mark.parametrize("count", [1, 13, SEQS])
    def test_a_walk_by_jumps_is_the_walk_by_steps(self, count: int) -> None:
        """From one token of context to 3,000, over every knot and past where the GPU outgrows the host."""
        for world in range(2 * len(WORLDS)):
            costs, _ = compiled(world)
            jumps: list[int] = []
            while len(jumps) < LONGEST:
                first, slope, span = costs.decode(count, count * (len(jumps) + 1))
                jumps += [first + k * slope for k in range(min(span, LONGEST - len(jumps)))]
            assert jumps == [costs.decode(count, count * (k + 1))[0] for k in range(LONGEST)]
        hidden, grown = (compiled(1)[0].decode(count, count * mean)[1] for mean in (1, LONGEST))
        assert hidden == 0 < grown, "the host is in the way at first and not at last"

    def test_a_window_ends_the_growth_on_the_token(self) -> None:
        costs, _ = compiled(4)  # window 256, synchronous
        _, slope, span = costs.decode(10, 10 * 255)
        assert slope > 0
        assert span == 1, "the next step reads 256 tokens each"
        assert costs.decode(10, 10 * 256)[1] == 0


class TestLinearCosts:
    def test_by_hand(self) -> None:
        costs = LinearCosts(step_s=0.5, per_token_s=0.25, per_context_s=0.125, per_pair_s=0.0625)
        # 2 decodes over 7 tokens; chunks of 3 new after 4 cached (12 + 6 pairs) and 2 new (3 pairs)
        seconds = 0.5 + 0.25 * (2 + 3 + 2) + 0.125 * 7 + 0.0625 * (18 + 3)
        assert costs.mixed(2, 7, [(4, 3), (0, 2)], 3) == to_ticks(seconds)
        assert costs.decode(2, 7) == (to_ticks(0.5 + 0.5 + 0.875), to_ticks(0.25), UNBOUNDED)

    def test_time_does_not_run_backwards(self) -> None:
        with pytest.raises(ValueError, match="negative"):
            LinearCosts(step_s=1.0, per_token_s=-1e-9)


@pytest.mark.parametrize("seconds", [np.nan, np.inf, 1e7])
def test_times_that_no_step_takes_are_refused(seconds: float) -> None:
    """Rather than rounded to whatever fits a tick."""
    with pytest.raises(UsageError, match="the hardware profile gives a step"):
        whole_ticks(np.array([1.0, seconds]))


def test_bounds_do_not_keep_the_tables_that_they_were_read_off() -> None:
    """Tables take megabytes: a process that searches again and again must not gather those of all searches."""
    costs = compile_costs(model(), hardware(), pool(max_num_seqs=SEQS, budget=BUDGET), LONGEST)
    tables, least = weakref.ref(costs.tables), least_costs(costs)
    assert least is not None
    assert least is least_costs(costs)
    prompts = np.array([1, LONGEST, 2 * LONGEST])
    said = CostBounds(costs.tables).prefill_cost_s(prompts, 1)
    del costs
    gc.collect()
    assert tables() is None
    assert (least.prefill_s(prompts, np.array([1, 1, 1])) == said).all()
