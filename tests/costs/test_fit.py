"""Fits find what was planted, and hold-out errors are of rows the fit did not see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simtune.costs import fit as fit_module
from simtune.costs.fit import fit_base, fit_host, hold_out
from simtune.costs.operators import OPERATORS, Setting
from simtune.costs.predict import Predictor, base_seconds
from simtune.costs.tables import VIDUR, HostTable, Table, read_tables
from simtune.specs.hardware import OperatorKind
from tests.costs.made_up import operator

PROCESSORS, SHEET_FLOPS, SHEET_BYTES = 100, 8e14, 3e12

RANGES: dict[OperatorKind, dict[str, tuple[int, int]]] = {
    "gemm": {"m": (1, 8192), "n": (64, 16384), "k": (64, 16384)},
    "prefill_attention": {
        "batch": (1, 32), "tokens": (16, 8192), "heads": (8, 64), "kv_heads": (1, 8), "head_dim": (64, 128),
        "window": (128, 8192),
    },
    "decode_attention": {
        "batch": (1, 512), "context": (16, 8192), "heads": (8, 64), "kv_heads": (1, 8), "head_dim": (64, 128),
        "window": (128, 8192),
    },
    "moe": {
        "tokens": (1, 8192), "hidden": (1024, 8192), "intermediate": (512, 8192), "experts_per_token": (1, 8),
        "experts": (8, 256), "ep": (1, 4),
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
    return Table(kind=kind, dtype="bf16", shape=shape, seconds=exact * factor, origin=VIDUR, files=("planted",))


@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_planted_parameters_are_found(kind: OperatorKind, outliers: float) -> None:
    base = {"flops_per_s": 6e14, "bytes_per_s": 2.2e12, "overhead_s": 5e-6, "block_s": 2e-6, "overlap_p": 2.0}
    fit = fit_base(planted(kind, base, outliers=outliers), PROCESSORS, SHEET_FLOPS, SHEET_BYTES)
    found = fit.model_dump()
    tolerance = {"bytes_per_s": 0.05, "overhead_s": 0.05, "block_s": 0.2}
    if kind != "decode_attention":  # always bound by memory: nothing tells its flops, nor how they overlap
        tolerance |= {"flops_per_s": 0.05, "overlap_p": 0.3}
    for name, rel in tolerance.items():
        assert found[name] == pytest.approx(base[name], rel=rel), name


def test_the_data_sheet_carries_a_fit_on_a_dozen_points() -> None:
    """Twelve memory-bound points tell nothing about flops: the rate stays near 70 % of the data sheet."""
    base = {"flops_per_s": 6e14, "bytes_per_s": 2.2e12, "overhead_s": 5e-6, "block_s": 2e-6, "overlap_p": 2.0}
    table = planted("decode_attention", base, rows=12)
    fit = fit_base(table, PROCESSORS, SHEET_FLOPS, SHEET_BYTES)
    assert fit.flops_per_s == pytest.approx(0.7 * SHEET_FLOPS, rel=0.35)
    assert fit.bytes_per_s == pytest.approx(2.2e12, rel=0.25)


def test_rounded_times_count_for_less_where_they_are_short() -> None:
    """Times of 1-3 us rounded up to whole microseconds do not hide the true overhead."""
    rng = np.random.default_rng(3)
    rows, width = np.exp(rng.uniform(0, 9, 400)), np.full(400, 4096.0)
    exact = 1.4e-6 + 2 * rows * width / 2e12
    shape = {"rows": rows, "width": width}
    table = Table("elementwise", "bf16", shape, np.rint(exact * 1e6) / 1e6, VIDUR, ("x",), resolution_s=1e-6)
    fit = fit_base(table, PROCESSORS, SHEET_FLOPS, SHEET_BYTES)
    assert fit.bytes_per_s == pytest.approx(2e12, rel=0.05)
    assert fit.overhead_s == pytest.approx(1.4e-6, rel=0.35)


def test_hold_out_never_trains_on_what_it_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"flops_per_s": 6e14, "bytes_per_s": 2.2e12, "overhead_s": 5e-6, "block_s": 2e-6, "overlap_p": 2.0}
    table = planted("gemm", base, rows=500)
    trained: list[Table] = []
    monkeypatch.setattr(fit_module, "fit_base", lambda t, *a: (trained.append(t), fit_base(t, *a))[1])

    errors = hold_out(table, PROCESSORS, SHEET_FLOPS, SHEET_BYTES)
    assert (errors.split, errors.train_points, errors.test_points) == ("random", 200, 300)
    assert len(np.unique(trained[-1].seconds)) == 200
    assert errors.median == pytest.approx(0.03 * 0.674, rel=0.3), "the noise that was planted"

    whole = Table("gemm", "bf16", {**table.shape, "n": np.arange(500.0) % 20 + 64}, table.seconds, VIDUR, ("x",))
    errors = hold_out(whole, PROCESSORS, SHEET_FLOPS, SHEET_BYTES, unseen=("n",))
    assert (errors.split, errors.test_points) == ("unseen (n)", 4 * 25), "a fifth of the 20 values of n"
    assert len(np.unique(trained[-1].shape["n"])) == 16


def test_host_time_is_found_and_never_negative() -> None:
    seqs = np.tile(np.arange(8.0, 136, 8), 4)
    rng = np.random.default_rng(0)
    seconds = (1e-3 + 2e-5 * seqs) * np.exp(0.05 * rng.standard_normal(len(seqs)))
    seconds[::17] *= 4
    step_s, per_sequence_s = fit_host(HostTable(seqs, seconds, VIDUR, ("x",)))
    assert step_s == pytest.approx(1e-3, rel=0.1)
    assert per_sequence_s == pytest.approx(2e-5, rel=0.1)
    falling = HostTable(seqs, 2e-3 - 1e-6 * seqs, VIDUR, ("x",))
    assert fit_host(falling)[1] == pytest.approx(0, abs=1e-8)


def test_h100_gemm_from_two_hundred_points(data_dir: Path) -> None:
    """Any 200 random rows of the 35,742 predict the others: median <= 9 %, p90 <= 25 %."""
    path = data_dir / "profiles" / "aiconfigurator" / "h100_sxm" / "vllm_0.19.0_gemm_perf.csv.gz"
    table = read_tables([path]).operators["gemm.bf16"]
    for seed in range(3):
        errors = hold_out(table, 132, 989e12, 3.35e12, train_points=200, seed=seed)
        assert errors.train_points == 200
        assert errors.median <= 0.09
        assert errors.p90 <= 0.25


def test_predictors_broadcast_and_know_their_box() -> None:
    gemm = Predictor(operator("gemm").model_copy(update={"box": {"m": (1.0, 128.0), "n": (64.0, 64.0)}}), 8)
    seconds = gemm.seconds(m=np.array([1, 2, 3]), n=64, k=32)
    assert seconds.shape == (3,)
    assert seconds[0] == pytest.approx(1e-6 + 2 * 64 * 32 / 1e12 + 2 * (32 + 64 * 32 + 64) / 1e9, rel=1e-4)
    assert gemm.inside(m=np.array([1, 128, 129]), n=64, k=32).tolist() == [True, True, False]
    assert not gemm.inside(m=1, n=65, k=32)
