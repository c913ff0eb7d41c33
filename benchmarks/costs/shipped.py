"""Fit the shipped profiles again, as hwprofiles/recipes.yaml says.

python benchmarks/costs/shipped.py ../shared/data [NAME...]

Names none: all, in the order of the recipes. What is written replaces what is there.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.costs.filling import filled
from simtune.cli.fit import COMMENT
from simtune.cli.output import write_profile
from simtune.costs.device_transfer import transfer, wider
from simtune.costs.hardware_profile import build, usable
from simtune.costs.predict import Z90, Profile
from simtune.costs.software import release_of_software
from simtune.costs.tables import Tables, read_tables
from simtune.costs.tables.common import Dispute
from simtune.costs.tables.equal_bytes import UNLIKE
from simtune.specs import yamlfile
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Facts, Hardware
from simtune.specs.input_files import read_text

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ROOT / "simtune/hwprofiles"
RELEASES = PROFILES / "releases"
FEW_TOKENS = 256
"""Tokens of a step of decodes, in which experts do little besides reading weights."""
LEAST_ROWS = 5
"""Rows of so few tokens that a table must have to dispute others."""


def recipes() -> dict[str, dict[str, Any]]:
    """The recipe of each profile, by name."""
    path = PROFILES / "recipes.yaml"
    found: dict[str, dict[str, Any]] = yamlfile.parse(read_text(path), str(path)).data
    return found


def fitted(name: str, recipe: dict[str, Any], data_dir: Path) -> Hardware:
    """A profile by its recipe; those that it builds on are read from `hwprofiles`."""
    facts = Facts.from_file(PROFILES / recipe.get("facts", name) / "facts.yaml")
    moved = transfer(load_hardware(recipe["transfer"]), facts) if "transfer" in recipe else None
    if "sources" not in recipe:
        assert moved is not None, f"{name}: neither sources nor transfer"
        return moved
    sources = [data_dir / "profiles" / source for source in recipe["sources"]]
    tables, repair = read_tables(sources, recipe.get("kernels")), recipe.get("repair", False)
    wanted = {key: table for key, table in tables.operators.items() if key not in recipe.get("without", ())}
    own = usable(replace(tables, operators=wanted), facts, repair=repair)
    if "newer" in recipe:
        own = newer_than(load_hardware(recipe["newer"]), own)
    hardware = build(own, facts, repair=repair)
    hardware = beside_others(hardware, own, {other: load_hardware(other) for other in recipe.get("beside", ())})
    for kernels, keys in recipe.get("borrow", {}).items():
        tables = usable(read_tables(sources, kernels), facts)
        wanted = {key: tables.operators[key] for key in keys if key not in hardware.operators}
        borrowed = build(replace(tables, operators=wanted, host=None, imbalance=None), facts)
        hardware = filled(hardware, spanning(borrowed, own.disputes))
    for profile, keys in recipe.get("carry", {}).items():
        carried = transfer(load_hardware(profile), facts)
        hardware = filled(hardware, carried.model_copy(update={"operators": {k: carried.operators[k] for k in keys}}))
    for other in (*map(load_hardware, recipe.get("fill", ())), *([] if moved is None else [moved])):
        hardware = filled(hardware, other)
    return hardware.model_copy(update={"name": name, "engine": recipe["engine"]}).with_arrays(hardware.arrays)


def newer_than(profile: Hardware, tables: Tables) -> Tables:
    """Return the tables of an engine's kernels that the profile was not fitted on."""
    fitted_on = {key: operator.provenance.software for key, operator in profile.operators.items()}
    operators = {
        key: table
        for key, table in tables.operators.items()
        if table.engine is not None and release_of_software(table.software) and table.software != fitted_on.get(key)
    }
    return replace(tables, operators=operators, host=None, imbalance=None)


def spanning(hardware: Hardware, disputed: Mapping[str, Dispute]) -> Hardware:
    """Return a profile whose operators stand in for refused tables with intervals of 90 % that span both, and note
    it."""
    operators = dict(hardware.operators)
    for key in operators.keys() & disputed.keys():
        operator, dispute = operators[key], disputed[key]
        note = "; ".join(filter(None, (operator.provenance.note, f"stands in for a table that {dispute.words}")))
        operators[key] = operator.model_copy(
            update={
                "interval": wider(operator, math.log(dispute.ratio) / Z90),
                "provenance": operator.provenance.model_copy(update={"note": note}),
            }
        )
    return hardware.model_copy(update={"operators": operators}).with_arrays(hardware.arrays)


def beside_others(hardware: Hardware, tables: Tables, rivals: Mapping[str, Hardware]) -> Hardware:
    """Return a profile whose experts have intervals of 90 % that span the kernels of all rivals on the card, and note
    it, if few tokens take at least `UNLIKE` times as long as with each of them."""
    operators = dict(hardware.operators)
    for key, operator in hardware.operators.items():
        table = tables.operators.get(key)
        if (
            operator.kind != "moe"
            or table is None
            or not rivals
            or any(key not in r.operators for r in rivals.values())
        ):
            continue
        rows, ratios = table.shape["tokens"] <= FEW_TOKENS, []
        if rows.sum() < LEAST_ROWS:
            continue
        few = {name: values[rows] for name, values in table.shape.items()}
        for rival in rivals.values():
            predictor = Profile(rival).predictor("moe", operator.dtype, variant=operator.variant)
            ratios.append(float(np.median(table.seconds[rows] / predictor.seconds(**few))))
        if min(ratios) < UNLIKE:
            continue
        of_each = " and ".join(f"{ratio:.2g} ({name})" for name, ratio in zip(rivals, ratios, strict=True))
        note = (
            f"disputed: {rows.sum()} rows of at most {FEW_TOKENS} tokens take {of_each} times as long as other engines'"
        )
        operators[key] = operator.model_copy(
            update={
                "interval": wider(operator, math.log(max(ratios)) / Z90),
                "provenance": operator.provenance.model_copy(
                    update={"note": "; ".join(filter(None, (operator.provenance.note, note)))}
                ),
            }
        )
    return hardware.model_copy(update={"operators": operators}).with_arrays(hardware.arrays)


def main(data_dir: Path, names: list[str]) -> None:
    """Write the profiles of these names, or all."""
    for name, recipe in recipes().items():
        if (names and name not in names) or "carried" in recipe:
            continue
        start = time.process_time()
        hardware = fitted(name, recipe, data_dir)
        folder = (RELEASES if "newer" in recipe else PROFILES) / name
        write_profile(folder, hardware, COMMENT)
        size = sum(file.stat().st_size for file in folder.iterdir())
        cpu_s = time.process_time() - start
        print(
            f"{name:18} {len(hardware.operators):3} operators  {cpu_s:6.1f} CPU-s  {size / 1024:7.0f} KiB", flush=True
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
