"""Time that an engine adds to its kernels: measured steps less the times of their kernels by a hardware profile.

    added = measured - sum of kernels = per step + per sequence x sequences

by least squares, separately for steps that decode only and for those with prompt tokens. It is the engine's host time
if its kernels are those of the profile; below zero, its kernels are faster than the profile's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simtune.costs.calibration import Kind, TimedStep
from simtune.costs.iteration import StepModel


class Added(NamedTuple):
    """Steps of one kind: mean seconds, measured and of their kernels, and the two fitted terms of the difference."""

    kind: Kind
    steps: int
    measured_s: float
    kernels_s: float
    per_step_s: float
    per_sequence_s: float

    @property
    def share(self) -> float:
        """Share of the measured time that kernels do not take."""
        return 1 - self.kernels_s / self.measured_s


def added(steps: Sequence[TimedStep], kernels: StepModel) -> list[Added]:
    """Return the time of steps beyond their kernels, by kind, without kinds that have no steps."""
    by_kind = []
    kinds: tuple[Kind, ...] = ("decode", "prefill")
    for kind in kinds:
        of_kind = [step for step in steps if step.kind == kind]
        if not of_kind:
            continue
        measured = np.array([step.seconds for step in of_kind])
        summed = np.array([sum(kernels.breakdown(step.batch).values()) for step in of_kind])
        sequences = np.array([step.batch.num_seqs for step in of_kind], dtype=np.float64)
        terms = np.column_stack([np.ones_like(sequences), sequences])
        (per_step, per_sequence), *_ = np.linalg.lstsq(terms, measured - summed, rcond=None)
        means = float(measured.mean()), float(summed.mean())
        by_kind.append(Added(kind, len(of_kind), *means, float(per_step), float(per_sequence)))
    return by_kind
