"""Cards with published tables, their fits, and how far off a fit of one is on the tables of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import permutations
from pathlib import Path
from typing import cast

import numpy as np

from simtune.arrays import Array
from simtune.costs.device_transfer import Pair, TransferError, TransferErrors, transfer
from simtune.costs.fit import fit_predictor
from simtune.costs.hardware_profile import data_sheet
from simtune.costs.operators import Chip
from simtune.costs.predict import Predictor
from simtune.costs.tables import Table, read_tables, take
from simtune.costs.tables.screen import launches, screen
from simtune.errors import UsageError
from simtune.specs.hardware import Arrays, Facts, Hardware, Host, Operator, Provenance

ROOT = Path(__file__).resolve().parents[2]
ROWS = 3000
FOUND_BY = "benchmarks/costs/test_transfer.py"
_TABLES = ("gemm", "context_attention", "generation_attention", "moe")


@dataclass(frozen=True)
class Card:
    """A card by the folder of its tables in `profiles/aiconfigurator_0.12` and the profile that has its facts."""

    folder: str
    profile: str
    name: str

    @cached_property
    def facts(self) -> Facts:
        """Of the data sheet."""
        facts = Facts.from_file(ROOT / "simtune/hwprofiles" / self.profile / "facts.yaml")
        return facts.model_copy(update={"name": self.name})

    def tables(self, data_dir: Path) -> dict[str, Table]:
        """Of vLLM's kernels."""
        folder = data_dir / "profiles/aiconfigurator_0.12" / self.folder
        found: dict[str, Table] = {}
        for table in _TABLES:
            for file in sorted(folder.glob(f"vllm_*_{table}_perf.parquet")):
                try:
                    found |= read_tables([file]).operators
                except UsageError:
                    continue  # without a row that can be used
        return found


CARDS = {
    card.name: card
    for card in (
        Card("a100_sxm", "a100-sxm-80g", "a100-sxm-80g"),
        Card("h100_sxm", "h100-sxm", "h100-sxm"),
        Card("h200_sxm", "h200-sxm", "h200-sxm"),
        Card("b200_sxm", "b200", "b200"),
        Card("gb200", "gb200", "gb200"),
        Card("l40s", "l40s", "l40s"),
        Card("rtx_pro_6000_server", "rtx-pro-6000", "rtx-pro-6000"),
    )
}

NOTHING_KNOWN = TransferErrors(
    name="none",
    pairs=(
        Pair(
            source="a",
            target="b",
            source_architecture="a",
            target_architecture="b",
            target_memory_bytes_per_s=1,
            source_memory_bytes_per_s=1,
            found_by="nobody",
            errors={"gemm.bf16": TransferError(median=0, p90=0)},
        ),
    ),
)
"""For predictions that are looked at without their intervals."""


@cache
def fitted(name: str, data_dir: Path) -> Hardware:
    """A profile of a card's tables, without what only whole models need."""
    card = CARDS[name]
    operators: dict[str, Operator] = {}
    arrays: dict[str, Array] = {}
    for key, table in clean_tables(name, data_dir).items():
        sheet = data_sheet(table, card.facts)
        predictor = fit_predictor(table, sheet.processors, sheet.flops_per_s, sheet.bytes_per_s, sheet.chip)
        published = Provenance(kind="published-tables", source="its tables", points=len(table))
        operators[key] = predictor.operator.model_copy(update={"provenance": published})
        arrays |= {array: cast(Array, predictor.arrays[array]) for array in predictor.arrays}
    none = Host(step_s=0.0, per_sequence_s=0.0, provenance=Provenance(kind="assumed", source="none"))
    facts = card.facts
    profile = Hardware(
        name=facts.name, engine=facts.engine, device=facts.device, links=facts.links, host=none, operators=operators
    )
    return profile.with_arrays(Arrays(arrays))


@cache
def clean_tables(name: str, data_dir: Path) -> dict[str, Table]:
    """A card's tables without outliers; those that cannot be of it are left out."""
    card, tables = CARDS[name], {}
    for key, table in card.tables(data_dir).items():
        if launches(table, data_sheet(table, card.facts)) is not None:
            continue
        try:
            tables[key] = screen(table, data_sheet(table, card.facts))
        except UsageError:
            continue
    return tables


def log_errors(
    profile: Hardware, tables: Mapping[str, Table], facts: Facts, known: TransferErrors = NOTHING_KNOWN
) -> dict[str, tuple[Array, Array]]:
    """(log of predicted over measured, log sd) by operator on up to 3,000 random rows, of a profile moved to a card."""
    moved = transfer(profile, facts, known)
    errors = {}
    for key in sorted(set(tables) & set(moved.operators)):
        rows = take(tables[key], np.random.default_rng(0).permutation(len(tables[key]))[:ROWS])
        predictor = Predictor(moved.operators[key], facts.device.processors, moved.arrays, Chip.of(facts.device))
        errors[key] = np.log(predictor.seconds(**rows.shape) / rows.seconds), predictor.log_sd(**rows.shape)
    return errors


def pair_of(source: Hardware, facts: Facts, errors: Mapping[str, Array]) -> Pair:
    """What the log errors of a transfer come to, for `hwprofiles/transfer.yaml`."""
    there = facts.device
    assert source.device.architecture is not None
    assert there.architecture is not None
    return Pair(
        source=source.name,
        target=facts.name,
        source_architecture=source.device.architecture,
        target_architecture=there.architecture,
        source_memory_bytes_per_s=source.device.memory_bytes_per_s,
        target_memory_bytes_per_s=there.memory_bytes_per_s,
        found_by=FOUND_BY,
        errors={key: _error(log) for key, log in errors.items()},
    )


def _error(log: Array) -> TransferError:
    off = np.abs(np.expm1(log))
    quantiles = {"median": np.median(off), "p90": np.quantile(off, 0.9), "max": off.max()}
    quantiles["log_p90"] = np.quantile(np.abs(log), 0.9)
    return TransferError(points=len(log), **{k: round(float(v), 3) for k, v in quantiles.items()})


@cache
def _pair(source: str, target: str, data_dir: Path) -> Pair:
    profile, facts = fitted(source, data_dir), CARDS[target].facts
    errors = log_errors(profile, clean_tables(target, data_dir), facts)
    return pair_of(profile, facts, {key: off for key, (off, _) in errors.items()})


def errors_of(names: Sequence[str], data_dir: Path) -> TransferErrors:
    """How far off transfers between these cards are."""
    pairs = (_pair(source, target, data_dir) for source, target in permutations(names, 2))
    return TransferErrors(name="some", pairs=tuple(pairs))


def moved_from(source: str, target: str, data_dir: Path, known: TransferErrors) -> dict[str, tuple[Array, Array]]:
    """(log error without its sign, log sd) by operator, of one card's fit on another's tables."""
    errors = log_errors(fitted(source, data_dir), clean_tables(target, data_dir), CARDS[target].facts, known)
    return {key: (np.abs(off), sd) for key, (off, sd) in errors.items()}
