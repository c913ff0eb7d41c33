"""docs/costs.md: formulas name code that exists, every operator has its rows, and its expressions are the code's."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest

from simtune.costs.operators import OPERATORS, Setting
from simtune.costs.operators.moe import DEALT, active_experts
from simtune.specs.base import DTYPE_BYTES
from simtune.specs.hardware import OperatorKind
from tests.docs import reading
from tests.docs.reading import DOCS

DOCUMENT = reading.text(DOCS / "costs.md")
TABLES = reading.tables(DOCUMENT)
WORK = {row["kind"]: row for table in TABLES for row in table if "flops" in row}
HELPERS = {row["helper"].strip("`"): row["is"].strip("`") for table in TABLES for row in table if "helper" in row}

LIKELY = {
    "m": (1, 3000), "n": (64, 9000), "k": (1, 9000), "b": (1, 300), "s": (1, 3000), "c": (3000, 9000), "q": (1, 9),
    "h": (8, 8), "g": (2, 2), "d": (64, 128), "w": (1, 9000), "y": (64, 192), "z": (64, 128), "l": (512, 512),
    "r": (64, 64), "H": (64, 7000), "I": (64, 7000), "E": (16, 64), "ep": (1, 8), "skew": (0, 1), "N": (2, 8),
    "B": (1, 10**9), "D": (1, 999), "R": (64, 9000),
    "qr": (64, 2000), "ih": (0, 64), "id": (64, 128), "kk": (1024, 4096),
    "rt": (1, 128), "ib": (100, 300), "pl": (1, 4), "bk": (1, 128), "wt": (1, 10**8), "ps": (1, 10**5),
}  # fmt: skip
"""Ranges that the letters of shapes are drawn from."""


def test_rows_with_code_name_what_exists() -> None:
    rows = [row for table in TABLES for row in table if "code" in row]
    assert len(rows) > 60
    for row in rows:
        names = reading.quoted(row["code"])
        assert names, row
        assert [name for name in names if name not in reading.defined()] == [], row


def test_every_operator_kind_has_its_rows() -> None:
    kinds = set(get_args(OperatorKind))
    assert set(OPERATORS) == kinds
    assert set(WORK) == kinds
    assert {row["kind"] for table in TABLES for row in table if "checked on" in row} == kinds
    for kind, operator in OPERATORS.items():
        assert reading.quoted(WORK[kind]["code"]) == [type(operator).__name__]
        assert len(WORK[kind]["shape"].split(",")) == len(operator.shape), kind


def said(expression: str, letters: dict[str, float], setting: Setting) -> float:
    """What an expression of the document comes to."""
    on_gpu = setting.processors > 1
    names: dict[str, Any] = letters | {
        "e": setting.dtype_bytes,
        "v": setting.kv_bytes,
        "a": setting.activation_bytes,
        "o": setting.out_bytes,
        "P": setting.processors,
        "X": 64 if on_gpu else 0,
        "T": 64 if on_gpu else 0,
        "S": 2 / 2 ** round(math.log2(setting.dtype_bytes)),
        "ceil": math.ceil,
        "min": min,
        "max": max,
        "active_experts": lambda *x: float(active_experts(*(np.array([float(value)]) for value in x))[0]),
    }
    for name, definition in HELPERS.items():
        if "(" in name:
            function, argument = name.rstrip(")").split("(")
            names[function] = eval(f"lambda {argument}: {definition}", names)
        elif letters.keys() >= {"E", "ep", "skew"}:
            names[name] = eval(definition, names)
    return float(eval(expression, names))


@pytest.mark.parametrize("processors", [132, 1], ids=["GPU", "CPU"])
@pytest.mark.parametrize("dtypes", [("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "fp8"), ("int4", "bf16")], ids="-".join)
@pytest.mark.parametrize("kind", sorted(WORK))
def test_expressions_are_those_of_the_code(kind: str, dtypes: tuple[str, str], processors: int) -> None:
    row, operator = WORK[kind], OPERATORS[kind]  # type: ignore[index]
    rng, setting = np.random.default_rng(0), Setting.of(processors, *dtypes)
    for _ in range(8):
        names = [name.strip() for name in row["shape"].split(",")]
        values = [float(rng.integers(LIKELY[name][0], LIKELY[name][1] + 1)) for name in names]
        letters = dict(zip(names, values, strict=True))
        if "skew" in letters:
            letters |= {
                "k": 2.0,
                "ep": 2.0 ** rng.integers(0, 4),
                "skew": DEALT if rng.random() < 0.5 else letters["skew"],
            }
        shape = {name: np.array([value]) for name, value in zip(operator.shape, letters.values(), strict=True)}
        terms = operator.terms(shape, setting)
        for term, column in (("flops", terms.flops), ("bytes", terms.bytes), ("blocks", terms.blocks)):
            (expression,) = reading.quoted(row[term])
            assert said(expression, letters, setting) == pytest.approx(float(column[0]), rel=1e-12), (term, letters)


def test_dtypes_of_the_test_are_real() -> None:
    assert {"bf16", "fp8", "int4"} <= set(DTYPE_BYTES)
