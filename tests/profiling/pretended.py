"""A device that only pretends: its times follow a formula, and every measurement moves a clock of its own.

    python pretended.py FOLDER

profiles it into a folder. `SLOWLY` in the environment lets real time pass too, so
that somebody can kill it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from simtune.costs.operators import OPERATORS, Setting
from simtune.costs.predict import base_seconds
from simtune.profiling import run
from simtune.profiling.measurement_plan import Limits, MeasurementTask
from simtune.profiling.timing import Measured
from simtune.specs.model import DenseFeedForward, FullAttention, LayerGroup, Model

BASE = {"flops_per_s": 1e12, "bytes_per_s": 1e11, "overhead_s": 5e-6, "block_s": 1e-7, "overlap_p": 3.0}
COST_S = 0.1
IMBALANCE_S = 4e-8
"""Seconds for each token by which the longest context exceeds the mean."""


def model(hidden: int = 1024, layers: int = 2) -> Model:
    group = LayerGroup(
        count=layers,
        attention=FullAttention(heads=16, kv_heads=4, head_dim=64),
        feed_forward=DenseFeedForward(intermediate_size=2048),
    )
    return Model(name="tiny", hidden_size=hidden, vocab_size=8192, max_position=8192, layers=(group,))


class PretendedRig:
    """Times of a smooth roofline, off by up to `noise`, the same for a shape whenever it is asked for."""

    warning: str | None = None
    copies = ("in_memory", "to_device")

    def __init__(self, *, name: str = "Pretended P1", memory_bytes: float = 2e9, noise: float = 0.01) -> None:
        self.name, self.memory_bytes, self.noise = name, memory_bytes, noise
        self.spent_s = 0.0
        self.measured: list[MeasurementTask] = []
        self.disturb: Callable[[MeasurementTask], float] = lambda task: 1.0

    def clock(self) -> float:
        return self.spent_s

    def describe(self) -> dict[str, Any]:
        told = {"device": self.name, "torch": "0.0", "processors": 4, "devices": 1, "architecture": "made-up"}
        return {**told, "memory_bytes": self.memory_bytes, "timer": "pretended", "clean": 0.97}

    def prepare(self, chosen: Mapping[str, str] | None = None) -> dict[str, str]:
        return dict(chosen or {"decode_attention.bf16": "matmul"})

    def limits(self, call_s: float, scale: float) -> Limits:
        return Limits(self.memory_bytes, 0.02, 2.0**39, 2.0**39, 2.0**36, 0.25 * scale)

    def condition(self) -> dict[str, float]:
        return {"clock_mhz": 1000.0}

    def seconds(self, task: MeasurementTask) -> float:
        if task.kind in OPERATORS:
            shape = {name: np.array([float(x)]) for name, x in task.shape.items()}
            terms = OPERATORS[task.kind].terms(shape, Setting.of(4, task.dtype, task.kv_dtype))
            exact = float(base_seconds(terms, **BASE)[0])
        elif task.kind == "step":
            exact = 1e-3 * (task.shape["decodes"] + task.shape["tokens"])
        else:
            exact = 1e-5 + task.shape.get("bytes", task.shape.get("sequences", 0.0)) / 5e10
        draw = int.from_bytes(hashlib.sha256(repr(sorted(task.shape.items())).encode()).digest()[:4]) / 2**32
        return exact * (1 + self.noise * (2 * draw - 1))

    def measure(self, task: MeasurementTask) -> Measured:
        if os.environ.get("SLOWLY"):
            time.sleep(0.004)
        self.spent_s += COST_S
        self.measured.append(task)
        seconds = self.seconds(task) * self.disturb(task)
        found = Measured(seconds, 0.001 * seconds, 0.99 * seconds, 1.01 * seconds, 5, 1.0, "pretended", None, "pretend")
        if task.kind == "decode_imbalance":
            excess_s = IMBALANCE_S * (task.shape["longest"] - task.shape["context"])
            return replace(found, seconds=seconds + excess_s, even_s=seconds)
        return found


def profile(rig: PretendedRig, out: Path, budget_s: float = 50.0, **more: Any) -> run.Profiled:
    """A run of the tiny model on the pretended clock."""
    return run.profile(rig, [more.pop("model", model())], out, budget_s=budget_s, clock=rig.clock, **more)


if __name__ == "__main__":
    profile(PretendedRig(), Path(sys.argv[1]), budget_s=45)
