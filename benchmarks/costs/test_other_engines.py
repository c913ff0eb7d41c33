"""How far are the kernels of one engine from another's on the same card?

    python -m pytest benchmarks/costs/test_other_engines.py -m benchmark_only -s

Shapes are drawn log-uniformly from the part of the measured boxes that two profiles of a card have in common; the
numbers are those of `simtune.costs.other_engines.OTHER_ENGINE_LOG_SD`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.arrays import Array
from simtune.costs.operators import OPERATORS, Chip
from simtune.costs.other_engines import OTHER_ENGINE_LOG_SD
from simtune.costs.predict import Z90, Predictor
from simtune.costs.software import engine_of
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Hardware, Operator

pytestmark = pytest.mark.benchmark_only

CARDS, ENGINES = ("h100-sxm", "h200-sxm", "b200"), ("", "-sglang", "-trtllm")
DRAWS, FEWEST = 20_000, 30
QUANTILE = 0.7
"""As of transfers between devices."""


def shapes(one: Operator, other: Operator) -> dict[str, Array] | None:
    """Shapes that both operators may have measured; None if their boxes do not meet."""
    rng, drawn = np.random.default_rng(0), {}
    for name in OPERATORS[one.kind].shape:
        low, high = max(one.box[name][0], other.box[name][0]), min(one.box[name][1], other.box[name][1])
        if low > high:
            return None
        values = np.exp(rng.uniform(np.log(max(low, 0.5)), np.log(max(high, 0.5)), DRAWS)) if low > 0 else None
        values = rng.uniform(low, high, DRAWS) if values is None else values
        drawn[name] = np.clip(np.round(values) if high > 2 else values, low, high)
    if one.families:
        rows = rng.integers(len(one.families), size=DRAWS)
        drawn |= {name: np.array([family[name] for family in one.families])[rows] for name in one.families[0]}
    return drawn


def log_sd(one: tuple[Hardware, Operator], other: tuple[Hardware, Operator]) -> float | None:
    """Of the ratio of two operators' times; None where few shapes are inside both."""
    drawn = shapes(one[1], other[1])
    if drawn is None:
        return None
    here, there = (Predictor(o, h.device.processors, h.arrays, Chip.of(h.device)) for h, o in (one, other))
    inside = here.inside(**drawn) & there.inside(**drawn)
    if inside.sum() < FEWEST:
        return None
    some = {name: values[inside] for name, values in drawn.items()}
    return float(np.quantile(np.abs(np.log(here.seconds(**some) / there.seconds(**some))), 0.9)) / Z90


def pairs() -> Iterator[tuple[str, float]]:
    """Every operator that profiles of two engines have measured on one card, with the log sd of their ratio."""
    for card in CARDS:
        for one, other in combinations([load_hardware(card + engine) for engine in ENGINES], 2):
            for key in sorted(one.operators.keys() & other.operators.keys()):
                mine, theirs = one.operators[key], other.operators[key]
                engines = {engine_of(o.provenance.software) for o in (mine, theirs)}
                if None in engines or len(engines) < 2:
                    continue
                found = log_sd((one, mine), (other, theirs))
                if found is not None:
                    yield mine.kind, found


def test_log_errors_of_other_engines(record: Recorder) -> None:
    by_kind: dict[str, list[float]] = defaultdict(list)
    for kind, found in pairs():
        by_kind[kind].append(found)
    quantiles = {kind: float(np.quantile(found, QUANTILE)) for kind, found in sorted(by_kind.items())}
    for kind, value in quantiles.items():
        record(kind, value, "log sd", "lower")
    assert quantiles == pytest.approx(OTHER_ENGINE_LOG_SD, abs=0.011)
