"""Fits find what was planted, and hold-out errors are of rows the fit did not see."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.arrays import Array
from simtune.costs.fit import (
    base_slopes,
    fit_base,
    fit_host,
    fit_imbalance,
    fit_operator,
    fit_predictor,
    hold_out,
    split_rows,
)
from simtune.costs.operators import OPERATORS, Setting, Terms
from simtune.costs.operators.moe import DEALT
from simtune.costs.operators.splits import EVERY_SECOND, RANDOM, unseen
from simtune.costs.predict import Predictor, base_seconds
from simtune.costs.tables import HostTable, ImbalanceTable, Origin, Table, read_tables, take
from simtune.specs.hardware import Arrays, OperatorKind
from tests.costs.made_up import ASSUMED, operator

PROCESSORS, SHEET_FLOPS, SHEET_BYTES = 100, 8e14, 3e12
PUBLISHED = Origin("somebody", "MIT")
ALONE, BESIDE = OPERATORS["decode_attention"], OPERATORS["mixed_attention"]  # and a prefill chunk in one kernel
OWN = Origin("this machine", None, "measured")
BASE = {"flops_per_s": 6e14, "bytes_per_s": 2.2e12, "overhead_s": 5e-6, "block_s": 2e-6, "overlap_p": 2.0}

RANGES: dict[OperatorKind, dict[str, tuple[int, int]]] = {
    "gemm": {"m": (1, 8192), "n": (64, 16384), "k": (64, 16384)},
    "prefill_attention": {
        "batch": (1, 32), "tokens": (16, 8192), "context": (8192, 16384), "heads": (8, 64), "kv_heads": (1, 8),
        "head_dim": (64, 128), "window": (128, 8192),
    },
    "decode_attention": {
        "batch": (1, 512), "context": (16, 8192), "heads": (8, 64), "kv_heads": (1, 8), "head_dim": (64, 128),
        "window": (128, 8192),
    },
    "moe": {
        "tokens": (1, 8192), "hidden": (1024, 8192), "intermediate": (512, 8192), "experts_per_token": (1, 8),
        "experts": (8, 256), "ep": (1, 4), "skew": (1, 1),
    },
}  # fmt: skip


def planted(
    kind: OperatorKind, base: dict[str, float], *, rows: int = 800, noise: float = 0.03, outliers: float = 0.0
) -> Table:
    """A table that follows the base form, with log-normal noise and a share of times that are ten times too
    long.
    """
    rng = np.random.default_rng(1)
    shape = {
        name: np.rint(np.exp(rng.uniform(np.log(low), np.log(high), rows)))
        for name, (low, high) in RANGES[kind].items()
    }
    exact = base_seconds(OPERATORS[kind].terms(shape, Setting.of(PROCESSORS, "bf16", None)), **base)
    factor = np.exp(noise * rng.standard_normal(rows)) * np.where(rng.random(rows) < outliers, 10.0, 1.0)
    return Table(kind=kind, dtype="bf16", shape=shape, seconds=exact * factor, origin=PUBLISHED, files=("planted",))


@settings(max_examples=40)
@given(
    theta=st.tuples(*(st.floats(-3, 3),) * 5),
    ahead=st.sampled_from([(), (np.log(1e-11),)]),
    share=st.sampled_from([1e-9, 0.3, 1.0, 1e9]),
)
def test_slopes_are_those_of_finite_differences(
    theta: tuple[float, ...], ahead: tuple[float, ...], share: float
) -> None:
    """Where either of compute and memory rules, and where they balance."""
    middle = np.log([SHEET_FLOPS, SHEET_BYTES, 5e-6, 1e-6, 2.0])
    at = np.array([*(middle + theta), *ahead])
    bytes_ = np.array([1e3, 1e6, 1e9])
    flops = share * bytes_ * np.exp(at[0] - at[1])
    terms = Terms(flops=flops, bytes=bytes_, blocks=np.array([0.0, 3.0, 100.0]), ahead=np.array([0.0, 1e4, 1e6]))

    def seconds(theta: Array) -> Array:
        flops_per_s, bytes_per_s, overhead_s, block_s, overlap, *ahead_s = np.exp(theta)
        return base_seconds(terms, flops_per_s, bytes_per_s, overhead_s, block_s, 1 + overlap, *ahead_s)

    step = 1e-5
    slopes = base_slopes(terms, at)
    for i, unit in enumerate(np.eye(len(at))):
        numeric = (seconds(at + step * unit) - seconds(at - step * unit)) / (2 * step)
        rounding = 1e-9 * float(seconds(at).max())
        assert slopes[:, i] == pytest.approx(numeric, rel=1e-4, abs=rounding)


@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_planted_parameters_are_found(kind: OperatorKind, outliers: float) -> None:
    fit = fit_base(planted(kind, BASE, outliers=outliers), PROCESSORS, SHEET_FLOPS, SHEET_BYTES)
    found = fit.model_dump()
    tolerance = {"bytes_per_s": 0.05, "overhead_s": 0.05, "block_s": 0.2}
    if kind != "decode_attention":  # always bound by memory: nothing tells its flops, nor how they overlap
        tolerance |= {"flops_per_s": 0.05, "overlap_p": 0.3}
    for name, rel in tolerance.items():
        assert found[name] == pytest.approx(BASE[name], rel=rel), name


def test_the_data_sheet_carries_a_fit_on_a_dozen_points() -> None:
    """Twelve memory-bound points tell nothing about flops: the rate stays near 70 % of the data sheet."""
    table = planted("decode_attention", BASE, rows=12)
    fit = fit_base(table, PROCESSORS, SHEET_FLOPS, SHEET_BYTES)
    assert fit.flops_per_s == pytest.approx(0.7 * SHEET_FLOPS, rel=0.35)
    assert fit.bytes_per_s == pytest.approx(2.2e12, rel=0.25)


def test_what_a_wave_of_decodes_takes_is_known_where_there_is_one_wave() -> None:
    """On a GPU batches of one wave leave it at 4 us; on a CPU, where it is another thing, a few rows tell otherwise."""
    table = planted("decode_attention", BASE | {"block_s": 0.5e-6}, rows=40)
    waves = np.ceil(table.shape["batch"] * table.shape["kv_heads"] / PROCESSORS)
    small = take(table, np.flatnonzero(waves == 1))
    assert len(small) > 5
    assert fit_base(small, PROCESSORS, SHEET_FLOPS, SHEET_BYTES).block_s == pytest.approx(4e-6, rel=0.05)
    lone = replace(table, seconds=_seconds_on_one(table))
    assert fit_base(lone, 1, SHEET_FLOPS, SHEET_BYTES).block_s == pytest.approx(0.5e-6, rel=0.2)


def _seconds_on_one(table: Table) -> np.ndarray:
    terms = OPERATORS["decode_attention"].terms(table.shape, Setting.of(1, "bf16", None))
    return base_seconds(terms, **BASE | {"block_s": 0.5e-6})


def test_rounded_times_count_for_less_where_they_are_short() -> None:
    """Times of 1-3 us rounded up to whole microseconds do not hide the true overhead."""
    rng = np.random.default_rng(3)
    rows, width = np.exp(rng.uniform(0, 9, 400)), np.full(400, 4096.0)
    exact = 1.4e-6 + 2 * rows * width / 2e12
    shape = {"rows": rows, "width": width}
    table = Table("elementwise", "bf16", shape, np.rint(exact * 1e6) / 1e6, PUBLISHED, ("x",), resolution_s=1e-6)
    fit = fit_base(table, PROCESSORS, SHEET_FLOPS, SHEET_BYTES)
    assert fit.bytes_per_s == pytest.approx(2e12, rel=0.05)
    assert fit.overhead_s == pytest.approx(1.4e-6, rel=0.35)


@pytest.mark.parametrize("kind", [kind for kind, form in OPERATORS.items() if form.splits != (RANDOM,)])
def test_no_split_trains_on_what_it_tests(kind: OperatorKind) -> None:
    rng = np.random.default_rng(0)
    shape = {name: 2.0 ** rng.integers(0, 18, 400).astype(np.float64) for name in OPERATORS[kind].shape}
    if "devices" in shape:
        shape["devices"] = rng.choice([2.0, 4.0, 8.0], 400)
    table = Table(kind, "bf16", shape, np.ones(400), PUBLISHED, ("x",))
    for split in OPERATORS[kind].splits:
        train, test = split_rows(table, split)
        assert len(train) > 0, split.name
        assert len(test) > 0, split.name
        assert not set(train.tolist()) & set(test.tolist()), split.name
        if split.held is not None:
            held = split.held(table.shape, np.random.default_rng(0))
            names = split.name.removeprefix("unseen (").removesuffix(")").split(", ")
            if split.name.startswith("unseen"):
                combinations = np.column_stack([shape[name] for name in names])
                assert not {tuple(x) for x in combinations[train]} & {tuple(x) for x in combinations[test]}
            elif split is not EVERY_SECOND:
                assert held.sum() == len(test), "all rows beyond the limit are tested"


def test_every_second_size_keeps_the_ends() -> None:
    shape = {"devices": np.repeat([2.0, 8.0], 6), "bytes": np.tile(2.0 ** np.arange(6), 2)}
    table = Table("all_reduce", "bf16", shape, np.ones(12), PUBLISHED, ("x",))
    train, test = split_rows(table, EVERY_SECOND)
    assert sorted(shape["bytes"][train].tolist()) == [1, 1, 4, 4, 16, 16, 32, 32]
    assert sorted(shape["bytes"][test].tolist()) == [2, 2, 8, 8]


def test_hold_out_says_how_far_off_and_how_often_it_said_so() -> None:
    table = planted("gemm", BASE, rows=500)
    errors = hold_out(table, PROCESSORS, SHEET_FLOPS, SHEET_BYTES)
    assert errors is not None
    assert (errors.split, errors.train_points, errors.test_points) == ("random", 200, 300)
    assert errors.median == pytest.approx(0.03 * 0.674, rel=0.3), "the noise that was planted"
    assert errors.coverage == pytest.approx(0.9, abs=0.07)
    few = replace(table, shape={**table.shape, "n": np.arange(500.0) % 20 + 64})
    errors = hold_out(few, PROCESSORS, SHEET_FLOPS, SHEET_BYTES, unseen("n"))
    assert errors is not None
    assert (errors.split, errors.test_points) == ("unseen (n)", 4 * 25), "a fifth of the 20 values of n"
    assert hold_out(take(table, np.arange(20)), PROCESSORS, SHEET_FLOPS, SHEET_BYTES) is None


def test_a_residual_finds_what_the_base_does_not_know() -> None:
    """Every m from 65 to 128 takes 30 % longer than the base form can say."""
    table = planted("gemm", BASE)
    slow = np.where((table.shape["m"] > 64) & (table.shape["m"] <= 128), 1.3, 1.0)
    operator, arrays = fit_operator(
        replace(table, seconds=table.seconds * slow), PROCESSORS, SHEET_FLOPS, SHEET_BYTES, ASSUMED
    )
    gemm = Predictor(operator, PROCESSORS, Arrays(arrays))
    plain = Predictor(operator.model_copy(update={"residual": None}), PROCESSORS)
    m = np.array([16.0, 96.0, 512.0])
    ratio = gemm.seconds(m=m, n=4096, k=4096) / plain.seconds(m=m, n=4096, k=4096)
    assert ratio[1] / np.sqrt(ratio[0] * ratio[2]) == pytest.approx(1.3, abs=0.12)
    assert operator.residual is not None
    assert 300 < operator.residual.points <= 500
    assert operator.interval is not None
    assert operator.interval.method == "split"
    assert operator.interval.coverage == operator.hold_out[0].coverage
    assert [errors.split for errors in operator.hold_out] == [split.name for split in OPERATORS["gemm"].splits]


def test_only_the_users_own_points_are_kept_as_they_are() -> None:
    """Of published tables no time is in the profile: their curves are fitted, with fewer knots than rows."""
    kinds: dict[OperatorKind, tuple[str, ...]] = {"gemm": ("n", "k"), "all_reduce": ("devices",)}
    for kind, names in kinds.items():
        size = "m" if kind == "gemm" else "bytes"
        shape = {size: np.tile(2.0 ** np.arange(4, 24), 3), **{name: np.repeat([2.0, 4.0, 8.0], 20) for name in names}}
        seconds = base_seconds(OPERATORS[kind].terms(shape, Setting.of(PROCESSORS, "bf16", None)), **BASE)
        seconds = seconds * np.exp(0.03 * np.random.default_rng(0).standard_normal(60))
        published = Table(kind, "bf16", shape, seconds, PUBLISHED, ("x",))
        theirs, _ = fit_operator(published, PROCESSORS, SHEET_FLOPS, SHEET_BYTES, ASSUMED)
        assert not {t for line in theirs.curves for t in line.seconds} & set(seconds.tolist())
        assert len(theirs.curves) == (0 if kind == "gemm" else 3)
        own, arrays = fit_operator(replace(published, origin=OWN), PROCESSORS, SHEET_FLOPS, SHEET_BYTES, ASSUMED)
        predicted = Predictor(own, PROCESSORS, Arrays(arrays)).seconds(**shape)
        assert predicted == pytest.approx(seconds, rel=1e-9), "an exactly measured shape takes what was measured"


@pytest.mark.parametrize(("rows", "theirs", "own"), [(60, 45, 60), (400, 300, 400), (700, 420, 420)])
def test_the_residual_of_other_peoples_rows_has_fewer_points_than_rows(rows: int, theirs: int, own: int) -> None:
    """Three quarters at most, and all of a user's own. Of 700 a fifth calibrates the interval, whosever they are."""
    table = planted("gemm", BASE, rows=rows)
    for origin, most in ((PUBLISHED, theirs), (OWN, own)):
        operator, arrays = fit_operator(replace(table, origin=origin), PROCESSORS, SHEET_FLOPS, SHEET_BYTES, ASSUMED)
        assert operator.residual is not None
        assert 0.9 * most <= operator.residual.points <= most
        assert len(arrays["gemm.bf16.points"]) == len(arrays["gemm.bf16.weights"]) == operator.residual.points


def test_host_time_is_found_and_never_negative() -> None:
    seqs = np.tile(np.arange(8.0, 136, 8), 4)
    rng = np.random.default_rng(0)
    seconds = (1e-3 + 2e-5 * seqs) * np.exp(0.05 * rng.standard_normal(len(seqs)))
    seconds[::17] *= 4
    step_s, per_sequence_s = fit_host(HostTable(seqs, seconds, PUBLISHED, ("x",)))
    assert step_s == pytest.approx(1e-3, rel=0.1)
    assert per_sequence_s == pytest.approx(2e-5, rel=0.1)
    falling = HostTable(seqs, 2e-3 - 1e-6 * seqs, PUBLISHED, ("x",))
    assert fit_host(falling)[1] == pytest.approx(0, abs=1e-8)


def test_unequal_contexts_cost_what_unsplit_batches_show() -> None:
    """13 ns a token where 100 processors are full, 17 beside a chunk, and nothing where contexts are split."""
    rng = np.random.default_rng(0)
    mixed, blocks, excess = rng.random(300) < 0.5, rng.choice([64.0, 512.0], 300), rng.uniform(100, 4000, 300)
    even = rng.uniform(1e-4, 1e-3, 300)
    slope = np.where(mixed, 17e-9, np.where(blocks == 512, 13e-9, 0.0))
    uneven = (even + slope * excess) * np.exp(rng.normal(0, 0.005, 300))
    table = ImbalanceTable(mixed, blocks, excess, even, uneven, PUBLISHED, ("x",), None)
    assert fit_imbalance(table, ALONE, 100) == pytest.approx(13e-9, rel=0.05)
    assert fit_imbalance(table, BESIDE, 100) == pytest.approx(17e-9, rel=0.05)
    assert fit_imbalance(table, ALONE, 1000) is None, "no batch of the table fills 1,000 processors"
    faster = replace(table, imbalanced_s=even * 0.9)
    assert fit_imbalance(faster, ALONE, 100) is None


@pytest.mark.parametrize("where", ["profiles/llmservingsim/rtx4090", "validation/llmservingsim_rtxpro6000_llama31_8b"])
def test_unequal_contexts_in_published_tables(where: str, data_dir: Path) -> None:
    """One number explains most of what unequal contexts cost: the error at the 90th percentile falls by two thirds."""
    table = read_tables(sorted((data_dir / where).glob("*_[as]*.csv.gz"))).imbalance
    assert table is not None
    processors = {"rtx4090": 128}.get(Path(where).name, 188)
    uneven_s = fit_imbalance(table, ALONE, processors)
    assert uneven_s is not None
    rows = ~table.mixed & (table.blocks >= 1.6 * processors)
    alike, longest = (
        np.abs((table.balanced_s + s * table.excess_tokens)[rows] / table.imbalanced_s[rows] - 1) for s in (0, uneven_s)
    )
    assert np.quantile(alike, 0.9) > 0.1
    assert np.quantile(longest, 0.9) < np.quantile(alike, 0.9) / 3


def test_h100_gemm_from_two_hundred_points(data_dir: Path) -> None:
    """Any 200 random rows of the 35,742 predict the others: median <= 5 %, p90 <= 15 %, as intervals say."""
    path = data_dir / "profiles" / "aiconfigurator" / "h100_sxm" / "vllm_0.19.0_gemm_perf.csv.gz"
    table = read_tables([path]).operators["gemm.bf16"]
    for seed in range(3):
        errors = hold_out(table, 132, 989e12, 3.35e12, train_points=200, seed=seed)
        assert errors is not None
        assert errors.train_points == 200
        assert errors.median <= 0.05
        assert errors.p90 <= 0.15
        assert errors.coverage is not None
        assert 0.82 < errors.coverage < 0.975


def test_the_base_alone_predicts_h100_gemm(data_dir: Path) -> None:
    """Five parameters from 200 random rows, without residual: median <= 9 %, p90 <= 25 % on 3,000 others."""
    path = data_dir / "profiles" / "aiconfigurator" / "h100_sxm" / "vllm_0.19.0_gemm_perf.csv.gz"
    table = read_tables([path]).operators["gemm.bf16"]
    for seed in range(3):
        train, test = split_rows(table, RANDOM, 200, seed)
        base = fit_base(take(table, train), 132, 989e12, 3.35e12)
        held = take(table, test)
        terms = OPERATORS["gemm"].terms(held.shape, Setting.of(132, "bf16", None))
        error = np.abs(base_seconds(terms, **base.model_dump()) / held.seconds - 1)
        assert len(error) == 3000
        assert np.median(error) <= 0.09
        assert np.quantile(error, 0.9) <= 0.25


def test_tables_of_tokens_dealt_out_tell_of_tokens_routed_by_chance() -> None:
    """Chance wakes fewer experts, and that is all there is to it; skewed routing was not measured."""
    table = planted("moe", BASE, noise=0.0)
    dealt = replace(table, shape={**table.shape, "skew": np.full(len(table), DEALT)})
    exact = base_seconds(OPERATORS["moe"].terms(dealt.shape, Setting.of(PROCESSORS, "bf16", None)), **BASE)
    fitted = fit_predictor(replace(dealt, seconds=exact), PROCESSORS, SHEET_FLOPS, SHEET_BYTES)
    few = {"hidden": 4096, "intermediate": 1024, "experts_per_token": 4, "experts": 128, "ep": 1}
    by_skew = [fitted.seconds(tokens=32, skew=skew, **few) for skew in (DEALT, 0.0, 1.0)]
    assert by_skew[1] / by_skew[0] == pytest.approx(1 - np.exp(-1), abs=0.1)
    assert by_skew[2] < by_skew[1]
    assert [bool(fitted.inside(tokens=32, skew=skew, **few)) for skew in (DEALT, 0.0, 1.0)] == [True, True, False]


def test_predictors_broadcast_and_know_their_box() -> None:
    gemm = Predictor(operator("gemm").model_copy(update={"box": {"m": (1.0, 128.0), "n": (64.0, 64.0)}}), 8)
    seconds = gemm.seconds(m=np.array([1, 2, 3]), n=64, k=32)
    assert seconds.shape == (3,)
    assert seconds[0] == pytest.approx(1e-6 + 2 * 64 * 32 / 1e12 + 2 * (32 + 64 * 32 + 64) / 1e9, rel=1e-4)
    assert gemm.inside(m=np.array([1, 128, 129]), n=64, k=32).tolist() == [True, True, False]
    assert not gemm.inside(m=1, n=65, k=32)
