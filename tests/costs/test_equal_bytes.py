"""Tables in formats of equal bytes: one that takes much longer is refused, and what stands in for it spans both."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.costs.shipped import FEW_TOKENS, LEAST_ROWS, beside_others, spanning
from simtune.costs.predict import Z90, Profile
from simtune.costs.tables import Tables
from simtune.costs.tables.common import Dispute, Origin, Table
from simtune.costs.tables.equal_bytes import COMMON, UNLIKE, disputes
from simtune.specs.catalog import load_hardware, names

ORIGIN = Origin("a source", "a licence")


def table(dtype: str, slower: float, rows: int = 2 * COMMON, kind: str = "moe") -> Table:
    tokens = np.arange(1.0, rows + 1)
    shape = {"tokens": tokens, "hidden": np.full(rows, 4096.0)}
    return Table(kind, dtype, shape, 1e-4 * slower * (1 + tokens / rows), ORIGIN, ("a.csv",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slow", "found"),
    [
        (table("fp8", 1.1 * UNLIKE), True),
        (table("fp8", 0.9 * UNLIKE), False),
        (table("bf16", 4.0), False),  # twice the bytes
        (table("fp8", 4.0, rows=COMMON - 1), False),
        (table("fp8", 4.0, kind="decode_attention"), False),
    ],
)
def test_the_slower_of_two_formats_of_equal_bytes_is_disputed(slow: Table, found: bool) -> None:
    fast = table("fp8_block", 1.0)
    expected = {"moe.fp8"} if found else set()
    assert set(disputes({"moe.fp8": slow, "moe.fp8_block": fast})) == expected
    assert set(disputes({"moe.fp8_block": fast, "moe.fp8": slow})) == expected
    assert disputes({"moe.fp8": slow}) == {}


def test_the_ratio_is_that_of_common_shapes() -> None:
    slow, fast = table("fp8", 3.0), table("fp8_block", 1.0)
    shifted = replace(fast, shape={**fast.shape, "tokens": fast.shape["tokens"] + 10})
    (dispute,) = disputes({"moe.fp8": slow, "moe.fp8_block": shifted}).values()
    assert dispute.shapes == len(slow) - 10
    assert dispute.ratio > 3.0  # the other table's rows of these tokens are its shorter ones


def test_what_stands_in_has_an_interval_that_spans_both() -> None:
    hardware = load_hardware("h200-sxm-trtllm")
    key, ratio = "moe.fp8", 5.0
    wide = spanning(hardware, {key: Dispute(key, "moe.fp8_block", ratio, 99)}).operators[key]
    before = hardware.operators[key].interval
    assert wide.interval is not None
    carried = 0.0 if before is None else before.carried_log_sd
    assert wide.interval.carried_log_sd == pytest.approx(math.hypot(carried, math.log(ratio) / Z90), rel=1e-4)
    assert "takes 5 times as long" in (wide.provenance.note or "")


@pytest.mark.parametrize(
    ("slower", "tokens", "is_disputed"),
    [(2.4, 1.0, True), (1.9, 1.0, False), (0.4, 1.0, False), (2.4, 2.0 * FEW_TOKENS, False)],
)
def test_experts_slower_than_those_of_every_other_engine_span_them(
    slower: float, tokens: float, is_disputed: bool
) -> None:
    """Of b200's own experts in mxfp4, as if another engine took so many times as long."""
    hardware, key = load_hardware("b200"), "moe.mxfp4"
    few = np.geomspace(tokens, 64 * tokens, LEAST_ROWS)
    sizes = {
        "hidden": 2880.0,
        "intermediate": 2880.0,
        "experts_per_token": 4.0,
        "experts": 128.0,
        "ep": 1.0,
        "skew": 0.0,
    }
    shape = {"tokens": few} | {name: np.full(LEAST_ROWS, size) for name, size in sizes.items()}
    seconds = slower * Profile(hardware).predictor("moe", "mxfp4").seconds(**shape)
    tables = Tables({key: Table("moe", "mxfp4", shape, seconds, ORIGIN, ("a.csv",))})
    new = beside_others(hardware, tables, {"b200": hardware, "again": hardware}).operators[key]
    if not is_disputed:
        assert new == hardware.operators[key]
        assert beside_others(hardware, tables, {}).operators == hardware.operators
        return
    assert new.interval is not None
    assert new.interval.carried_log_sd == pytest.approx(math.log(slower) / Z90, rel=1e-4)
    assert "take 2.4 (b200) and 2.4 (again) times as long as other engines'" in (new.provenance.note or "")


def test_the_dispute_of_engines_on_mxfp4_is_in_the_shipped_profile() -> None:
    operator = load_hardware("b200-trtllm").operators["moe.mxfp4"]
    assert "disputed: 8 rows of at most 256 tokens take 2.3 (b200) and 2.4 (b200-sglang)" in (
        operator.provenance.note or ""
    )
    assert operator.interval is not None
    assert operator.interval.carried_log_sd > math.log(2) / Z90


@pytest.mark.parametrize(
    "name", [name for name in names("hardware") if name.startswith(("h", "b2", "gb2", "l40s", "mi"))]
)
def test_experts_of_equal_bytes_take_about_as_long_on_every_card(name: str) -> None:
    hardware = load_hardware(name)
    if not {"moe.fp8", "moe.fp8_block"} <= hardware.operators.keys():
        pytest.skip("the profile has only one of the formats")
    few = {"tokens": np.array([1.0, 8.0, 32.0, 128.0])}
    shape = few | {k: np.full(4, v) for k, v in {"hidden": 4096.0, "intermediate": 1536.0, "experts_per_token": 8.0,
                                                 "experts": 128.0, "ep": 1.0, "skew": 0.0}.items()}  # fmt: skip
    profile = Profile(hardware)
    times = [profile.predictor("moe", dtype).seconds(**shape) for dtype in ("fp8", "fp8_block")]
    assert np.median(times[0] / times[1]) < UNLIKE
    assert np.median(times[1] / times[0]) < UNLIKE
