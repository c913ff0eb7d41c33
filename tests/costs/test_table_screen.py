"""What is wrong with tables: outliers, units, sizes and rates that cannot be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.fit import fit_base
from simtune.costs.operators import OPERATORS
from simtune.costs.tables import AICONFIGURATOR, Origin, Table, account
from simtune.costs.tables.screen import Sheet, above_launches, launches, screen
from simtune.errors import UsageError

SHEET = Sheet(processors=100, flops_per_s=1e14, bytes_per_s=1e12)
LAX = Sheet(processors=100, flops_per_s=1e16, bytes_per_s=1e14)
"""So fast that its times say nothing."""
LINK = Sheet(processors=100, flops_per_s=1e14, bytes_per_s=1e11)


def gemms() -> Table:
    """A device that computes 60 TFLOP/s and reads 0.8 TB/s after 3 us."""
    grid = np.meshgrid(2.0 ** np.arange(0, 13, 2), 2.0 ** np.arange(9, 14), 2.0 ** np.arange(9, 14))
    m, n, k = (x.ravel() for x in grid)
    seconds = 3e-6 + np.hypot(2 * m * n * k / 6e13, 2 * (m * k + n * k + m * n) / 8e11)
    return Table("gemm", "bf16", {"m": m, "n": n, "k": k}, seconds, AICONFIGURATOR, ("gemm.csv",))


def all_reduces(bytes_per_element: float) -> Table:
    """A link used to 80 %, its sizes counted in units of some bytes and read as elements of two."""
    devices, elements = (x.ravel() for x in np.meshgrid([2.0, 4.0, 8.0], 2.0 ** np.arange(8, 29)))
    sent = 2 * (devices - 1) / devices * elements * bytes_per_element
    shape = {"devices": devices, "bytes": 2 * elements}
    return Table("all_reduce", "bf16", shape, 5e-6 + sent / 8e10, AICONFIGURATOR, ("all_reduce.csv",))


def scaled(table: Table, rows: slice | int, by: float) -> Table:
    seconds = table.seconds.copy()
    seconds[rows] *= by
    return replace(table, seconds=seconds)


def test_a_clean_table_passes_whole() -> None:
    table = gemms()
    assert screen(table, SHEET) is table


@given(row=st.integers(0, len(gemms()) - 1), by=st.sampled_from([12.0, 65.0, 105.0]))
def test_a_single_row_that_is_off_is_left_out_and_counted(row: int, by: float) -> None:
    clean = screen(scaled(gemms(), row, by), SHEET)
    assert len(clean) == len(gemms()) - 1
    assert account(clean).endswith("1 left out: more than 8 times off the rows around them")
    kept = set(zip(*(clean.shape[name] for name in "mnk"), strict=True))
    assert tuple(gemms().shape[name][row] for name in "mnk") not in kept


@given(row=st.integers(0, len(gemms()) - 1), by=st.sampled_from([0.4, 2.0, 5.0]))
def test_what_a_kernel_switch_may_do_is_kept(row: int, by: float) -> None:
    assert len(screen(scaled(gemms(), row, by), SHEET)) == len(gemms())


@pytest.mark.parametrize(("by", "told"), [(1.29, 0), (1.5, 1), (0.5, 1)])
def test_a_product_out_of_order_is_named_and_left_out_only_when_asked(by: float, told: int) -> None:
    """The time of half a kernel: of two rows that contradict one another the one that all others contradict goes."""
    table = gemms()
    row = int(np.argmax((table.shape["m"] == 64) & (table.shape["n"] == 2048) & (table.shape["k"] == 2048)))
    wide = replace(table, seconds=np.full(len(table), 1e-3))  # a kernel that takes as long whatever its size
    named = screen(scaled(wide, row, by), LAX)
    assert (len(named), len(named.remarks)) == (len(wide), told)
    repaired = screen(scaled(wide, row, by), LAX, repair=True)
    assert len(repaired) == len(wide) - told
    if told:
        assert named.remarks == ("1 of 175 rows are more than 1.3 times off the order of sizes",)
        assert account(repaired).endswith("1 left out: more than 1.3 times off the order of sizes")
        kept = set(zip(*(repaired.shape[name] for name in "mnk"), strict=True))
        assert tuple(table.shape[name][row] for name in "mnk") not in kept


def test_kernels_that_take_turns_are_named_and_stay() -> None:
    turns = scaled(gemms(), slice(None, None, 3), 2.0)
    assert len(screen(turns, SHEET, repair=True)) == len(turns)
    assert "off the order of sizes" in screen(turns, SHEET, repair=True).remarks[0]


def test_two_units_in_one_table_are_refused() -> None:
    with pytest.raises(UsageError, match=r"gemm\.bf16: 60 of 175 rows .* two units of time mixed in gemm\.csv"):
        screen(scaled(gemms(), slice(0, 60), 1000), SHEET)


def test_a_table_in_a_smaller_unit_is_refused() -> None:
    table = scaled(gemms(), slice(None), 1000)
    shortest_ms = f"{1e3 * table.seconds.min():.3g}"
    words = rf"no row is shorter than {shortest_ms} ms .* gemm\.csv must be in a smaller unit"
    with pytest.raises(UsageError, match=words):
        screen(table, SHEET)


def test_times_the_device_cannot_reach_are_refused() -> None:
    with pytest.raises(UsageError, match=r"times faster than the data sheet allows; times in gemm\.csv"):
        screen(scaled(gemms(), slice(None), 1e-3), SHEET)


def test_one_impossible_row_is_left_out() -> None:
    clean = screen(scaled(gemms(), -1, 1e-2), SHEET)
    assert account(clean).endswith("1 left out: more than 3 times faster than the data sheet allows")


def test_what_fits_into_a_cache_may_pass_the_memory() -> None:
    rows, width = (x.ravel() for x in np.meshgrid(2.0 ** np.arange(4, 15), 2.0 ** np.arange(5, 14)))
    moved = 3 * rows * width
    seconds = 2e-6 + np.where(moved < 5e7, moved / 5e12, moved / 8e11)
    table = Table("quantise", "fp8", {"m": rows, "k": width}, seconds, AICONFIGURATOR, ("scale_matrix.csv",))
    assert screen(table, SHEET) is table


@pytest.mark.parametrize("heeded", [True, False])
def test_a_window_that_was_ignored_is_seen(heeded: bool) -> None:
    shapes = [(b, s, w) for b in (1, 2, 4, 8) for s in (2048, 4096, 8192, 16384, 32768) for w in (128, s)]
    batch, tokens, window = (np.array(x, dtype=np.float64) for x in zip(*shapes, strict=True))
    pairs = np.where((window < tokens) & heeded, window * tokens, tokens**2 / 2)
    shape = {"batch": batch, "tokens": tokens, "context": tokens, "window": window}
    shape |= {name: np.full(len(shapes), value) for name, value in (("heads", 8.0), ("kv_heads", 8.0))}
    shape["head_dim"] = np.full(len(shapes), 128.0)
    seconds = 6e-5 + 4 * batch * 8 * 128 * pairs / 5e13
    table = Table("prefill_attention", "bf16", shape, seconds, AICONFIGURATOR, ("attention.csv",), kv_dtype="bf16")
    if heeded:
        assert len(screen(table, SHEET)) == len(shapes)
        return
    with pytest.raises(
        UsageError, match=r"20 rows of a window .* take as long as without it; it must have been ignored"
    ):
        screen(table, SHEET)
    repaired = screen(table, SHEET, repair=True)
    assert (repaired.shape["window"] == repaired.shape["context"]).all()
    assert "20 left out: with a window, which was ignored" in account(repaired)


def test_times_of_launches_are_no_times_of_kernels() -> None:
    table = gemms()
    assert launches(table, SHEET) is None
    launched = replace(table, seconds=table.seconds + 50e-6)
    told = launches(launched, SHEET)
    assert told is not None
    assert told.startswith("gemm.bf16: no row is shorter than 54 us, where the data sheet allows ")
    assert told.endswith("gemm.csv must time launches")
    assert launches(scaled(launched, slice(None), 0.5), SHEET) is None, "25 us are a slow kernel"
    own = Origin("mine", None, "measured")
    assert launches(replace(launched, origin=own), SHEET) is None


def test_an_exchange_that_passes_its_link_is_refused() -> None:
    one = np.ones(100)
    shape = {"tokens": 1e4 * one, "row_bytes": 4096 * one, "experts_per_token": 22 * one, "experts": 512 * one}
    shape |= {"ep": 8 * one, "nodes": one}
    table = Table("moe_dispatch", "bf16", shape, 1e-4 * one, AICONFIGURATOR, ("a.csv",), variant="high_throughput")
    with pytest.raises(UsageError, match="times faster than the data sheet allows"):
        screen(table, LINK)


def blocks_of_launches(rows: int = 100) -> Table:
    """Blocks of one sequence of growing length that take 20 ns a token, or 2 ms to launch."""
    tokens = np.arange(1, rows + 1) * 4000.0
    one = np.ones(rows)
    parts = dict.fromkeys(OPERATORS["sparse_context_block"].shape, one)
    sizes = {"heads": 64 * one, "width": 256 * one, "cached": 128 * one, "topk": 2048 * one, "weights": 1e6 * one}
    shape = parts | sizes | {"tokens": tokens, "context": tokens, "window": 0 * one, "index_heads": 0 * one}
    seconds = np.maximum(2e-3, 20e-9 * tokens)
    return Table("sparse_context_block", "bf16", shape, seconds, AICONFIGURATOR, ("a.csv",), variant="msa")


def test_blocks_longer_than_their_launches_are_kept() -> None:
    table, sheet = blocks_of_launches(), replace(SHEET, flops_per_s=1e20, bytes_per_s=1e20)
    kept = above_launches(table, sheet)
    assert launches(table, sheet) is not None
    assert kept.launch_s == pytest.approx(2e-3)
    assert kept.seconds.min() >= 3e-3
    assert f"{100 - len(kept)} left out: less than 1.5 times the 2 ms in which the host launched" in account(kept)
    few = blocks_of_launches(80)
    assert above_launches(few, sheet) is few, "60 rows are needed"
    assert above_launches(gemms(), SHEET).launch_s is None


def test_a_fit_above_launches_starts_from_the_overhead_of_its_kind() -> None:
    table = replace(blocks_of_launches(), seconds=20e-9 * blocks_of_launches().shape["tokens"] + 3e-3)
    usual = fit_base(table, 132, 1e15, 1e12)
    assert fit_base(replace(table, launch_s=2e-3), 132, 1e15, 1e12).overhead_s < usual.overhead_s


def test_message_sizes_in_elements_are_believed() -> None:
    table = all_reduces(2)
    assert screen(table, LINK) is table


def test_message_sizes_in_bytes_are_repaired_and_told() -> None:
    """Read as elements, the sizes would need twice what the link was measured at, and more than it has."""
    table = all_reduces(1)
    with pytest.raises(UsageError, match=r"are bytes, not elements; give --repair"):
        screen(table, LINK)
    repaired = screen(table, LINK, repair=True)
    assert repaired.shape["bytes"].tolist() == (table.shape["bytes"] / 2).tolist()
    told = account(repaired).rsplit("; ", 1)[1]
    assert told.startswith("message sizes taken as bytes: as elements ")
    assert told.endswith(" rows would pass the rate of the link")


def test_message_sizes_no_unit_explains_are_refused() -> None:
    table = all_reduces(2)
    wrong = replace(table, shape={**table.shape, "bytes": 8 * table.shape["bytes"]})
    with pytest.raises(UsageError, match=r"message sizes in all_reduce\.csv must be in another unit"):
        screen(wrong, LINK)


def test_mixtures_of_kernels_everywhere_are_refused() -> None:
    with pytest.raises(UsageError, match=r"more than 8 times off their neighbours"):
        screen(scaled(gemms(), slice(0, None, 7), 20), SHEET)
