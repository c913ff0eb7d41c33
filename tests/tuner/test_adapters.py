"""Searches over slots for LoRA adapters: each number of slots is simulated with its own memory and under its bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simtune.errors import UsageError
from simtune.specs.adapters import Adapters
from simtune.specs.hardware import Link
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.variant_gains import variant_gains
from tests.tuner.test_variants import DEVICE, pools, question

SLOTS = (1, 3, 6)
HOST = Link(bytes_per_s=25e9, latency_s=5e-6, source="made up")


def searched(*, served: bool = True) -> Question:
    fragments = [{"name": f"slots-{n}", "lora": {"rank": 8, "slots": n, "host_slots": 6}} for n in SLOTS]
    usual = question(*(fragments if served else ({}, *fragments)))
    device = DEVICE.model_copy(update={"links": {**DEVICE.links, "host": HOST}})
    load = usual.workload.model_copy(update={"adapters": Adapters(count=6, zipf=0.5)})
    return replace(usual, hardware=(device,), workload=load)


def test_each_number_of_slots_is_simulated_under_its_bound() -> None:
    """More slots serve more of the load here: nothing is short but slots."""
    asked = searched()
    slots = {label: None if pool.lora is None else pool.lora.slots for label, pool in pools(asked).items()}
    assert slots == {f"slots-{n}": n for n in SLOTS}
    tuned = optimize(asked, jobs=1)
    reached = {gain.variant: gain for gain in variant_gains(tuned)}
    for row in tuned.rows:
        assert row.simulations, row.candidate.name
    for gain in reached.values():
        assert gain.reached is not None
        assert gain.at_most is not None
        assert gain.reached <= gain.at_most * (1 + 1e-9)
    values = [reached[f"slots-{n}"].reached or 0.0 for n in SLOTS]
    assert values == sorted(values)
    assert values[0] < 0.7 * values[-1]
    blocks = {row.candidate.decoding.shape.variant: row.kv_blocks for row in tuned.rows}
    of_slots = [blocks[f"slots-{n}"] or 0 for n in SLOTS]
    assert of_slots == sorted(of_slots, reverse=True)
    assert len(set(of_slots)) == len(SLOTS)


def test_a_plan_without_slots_for_the_load_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="requests ask for LoRA adapters, and the pool has no slots for any; set lora"):
        optimize(searched(served=False), jobs=1)
