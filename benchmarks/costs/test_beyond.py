"""How often 90 % intervals hold what was measured beyond the largest values that a fit saw, by kind and parameter.

    python -m pytest benchmarks/costs/test_beyond.py -m benchmark_only -s

The tables are those of vLLM's kernels on eight cards: 200 rows below a limit predict those above it, three seeds. The
numbers are those of `simtune.costs.beyond`; a card is judged by what they are without it. Wanted are 80-97 % in
80 % of splits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.costs.test_sparse_blocks import tables
from benchmarks.results import Recorder
from simtune.arrays import Array
from simtune.costs.beyond import BEYOND, BEYOND_FP8_CACHE, COMMON_GROWTH
from simtune.costs.fit import fit_predictor, split_rows
from simtune.costs.operators.splits import above
from simtune.costs.predict import LEVEL, Z90, octaves
from simtune.costs.tables import take

pytestmark = pytest.mark.benchmark_only

CARDS = {
    "h100-sxm": "aiconfigurator_0.12/h100_sxm",
    "h200-sxm": "aiconfigurator_0.12/h200_sxm",
    "b200": "aiconfigurator_0.12/b200_sxm",
    "gb200": "aiconfigurator_0.12/gb200",
    "l40s": "aiconfigurator_0.12/l40s",
    "rtx-pro-6000": "aiconfigurator_0.12/rtx_pro_6000_server",
    "b300": "aisimulate_0.13/b300_sxm",
    "gb300": "aisimulate_0.13/gb300",
}
LIMITS: dict[str, dict[str, float]] = {
    "gemm": {"m": 2048, "n": 8192, "k": 8192},
    "prefill_attention": {"tokens": 4096, "batch": 8},
    "decode_attention": {"batch": 64, "context": 8192},
    "encoder_attention": {"tokens": 4096},
    "mla_products": {"tokens": 2048},
    "mla_context_block": {"tokens": 4096, "batch": 8},
    "mla_decode_block": {"batch": 64, "context": 8192},
    "dsa_context_block": {"tokens": 4096},
    "dsa_decode_block": {"batch": 64, "context": 8192},
    "sparse_context_block": {"tokens": 4096},
    "sparse_decode_block": {"batch": 64, "context": 8192},
    "delta_prefill": {"tokens": 4096},
    "moe": {"tokens": 4096},
    "moe_dispatch": {"tokens": 2048},
    "moe_combine": {"tokens": 2048},
}
SEEDS, POINTS, FEWEST = (0, 1, 2), 200, 15
LEVELS = (np.arange(60) + 0.5) / 60
"""Levels of the scores by which each fit counts."""
LOW, HIGH = 0.80, 0.97
ENOUGH = 0.8
"""Share of splits that are to be covered so often."""


class Beyond(NamedTuple):
    """A fit beyond the limit of one parameter: log errors in units of what an interval is wide without its quantile,
    and as many times as that today's interval is."""

    kind: str
    fp8_cache: bool
    parameter: str
    table: str
    seed: int
    scores: Array
    today: Array


@cache
def beyond(card: str, data_dir: Path) -> tuple[Beyond, ...]:
    """Fits of all tables of a card below each limit, on what is above."""
    found = []
    for key, (table, sheet) in tables(data_dir / "profiles" / CARDS[card], card, "vllm", tuple(LIMITS)).items():
        for parameter, limit in LIMITS.get(table.kind, {}).items():
            for seed in SEEDS:
                train, test = split_rows(table, above(parameter, limit, parameter), POINTS, seed)
                if min(len(train), len(test)) < FEWEST:
                    continue
                fitted = fit_predictor(
                    take(table, train), sheet.processors, sheet.flops_per_s, sheet.bytes_per_s, sheet.chip
                )
                rows = take(table, test[:1000])
                off = np.abs(np.log(fitted.seconds(**rows.shape) / rows.seconds))
                sd = fitted.log_sd(**rows.shape)
                alone = fitted.operator.model_copy(update={"box": {}, "joint_box": {}, "families": ()})
                interval = alone.interval
                assert interval is not None
                within = type(fitted)(alone, sheet.processors, fitted.arrays, sheet.chip).log_sd(**rows.shape)
                farther = octaves(rows.shape[parameter], fitted.operator.box[parameter][1])
                unit = within * Z90 / interval.quantile * (1 + farther) ** COMMON_GROWTH
                found.append(
                    Beyond(table.kind, table.kv_dtype == "fp8", parameter, key, seed, off / unit, Z90 * sd / unit)
                )
    return tuple(found)


def common(fits: Iterable[Beyond]) -> dict[tuple[str, bool, str], float]:
    """Quantile of the scores of each kind, width of the KV cache and parameter that holds 90 %, all tables and seeds
    with the same weight."""
    pooled: dict[tuple[str, bool, str], list[Array]] = defaultdict(list)
    for fit in fits:
        pooled[fit.kind, fit.fp8_cache, fit.parameter].append(np.quantile(fit.scores, LEVELS))
    return {key: float(np.quantile(np.concatenate(scores), LEVEL)) for key, scores in sorted(pooled.items())}


def coverage(
    fits: Iterable[Beyond], quantiles: dict[tuple[str, bool, str], float] | None
) -> dict[tuple[str, str], float]:
    """Share of rows in their interval, by table and parameter: by these quantiles, or by today's intervals."""
    covered: dict[tuple[str, str], list[float]] = defaultdict(list)
    for fit in fits:
        limit = fit.today if quantiles is None else quantiles.get((fit.kind, fit.fp8_cache, fit.parameter), np.nan)
        if np.all(np.isfinite(limit)):
            covered[fit.table, fit.parameter].append(float(np.mean(fit.scores <= limit)))
    return {key: float(np.mean(values)) for key, values in covered.items()}


def test_errors_beyond_are_those_of_the_package(data_dir: Path, record: Recorder) -> None:
    found = common(fit for card in CARDS for fit in beyond(card, data_dir))
    for fp8_cache, of_package in ((False, BEYOND), (True, BEYOND_FP8_CACHE)):
        nested: dict[str, dict[str, float]] = defaultdict(dict)
        for (kind, has_fp8_cache, parameter), quantile in found.items():
            if has_fp8_cache == fp8_cache:
                nested[kind][parameter] = round(quantile, 2)
                record(f"{kind}{' with an fp8 cache' * fp8_cache}, {parameter}", quantile, "sd", "lower")
        print(f"\n{dict(nested)}")
        assert {kind: pytest.approx(by_name, abs=0.02) for kind, by_name in of_package.items()} == dict(nested)


def test_a_card_is_covered_by_the_errors_of_the_others(data_dir: Path, record: Recorder) -> None:
    hits: list[bool] = []
    by_kind: dict[tuple[str, str], list[float]] = defaultdict(list)
    for card in CARDS:
        others = common(fit for other in CARDS if other != card for fit in beyond(other, data_dir))
        kind_of = {fit.table: fit.kind for fit in beyond(card, data_dir)}
        for (table, parameter), share in coverage(beyond(card, data_dir), others).items():
            hits.append(LOW <= share <= HIGH)
            by_kind[kind_of[table], parameter].append(share)
    for (kind, parameter), shares in sorted(by_kind.items()):
        within = np.mean([LOW <= share <= HIGH for share in shares])
        print(f"\n{kind}, {parameter}: {np.mean(shares):.0%} covered; 80-97 % in {within:.0%} of {len(shares)}", end="")
        record(f"{kind}, {parameter}, covered 80-97 %", 100 * float(within), "% of splits", "higher")
    print(f"\nall: 80-97 % in {np.mean(hits):.0%} of {len(hits)}")
    record("covered 80-97 %", 100 * float(np.mean(hits)), "% of splits", "higher")
    assert np.mean(hits) >= ENOUGH
