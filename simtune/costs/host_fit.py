"""Host time of an engine that schedules step by step, fitted to its own log of steps."""

from __future__ import annotations

import numpy as np

from simtune.arrays import Array
from simtune.costs.calibration import FEWEST, Log
from simtune.costs.iteration import StepModel
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.pool import HostTimes, Pool

_DIGITS = 3


def fit_host_times(model: Model, hardware: Hardware, pool: Pool, log: Log) -> HostTimes | None:
    """Return `step_s` and `per_sequence_s` of what steps of decodes take beyond their kernels, with its error.

    None if nothing follows from the log: the engine hides its host behind the devices, there are fewer than FEWEST such
    steps, or all of them have equally many sequences.
    """
    plain = StepModel(model, hardware.model_copy(update={"calibration": None}), pool)
    steps = [step for step in log.steps if step.kind == "decode"]
    num_seqs = np.array([step.batch.num_seqs for step in steps], dtype=np.float64)
    if pool.hides_host or len(steps) < FEWEST or len(set(num_seqs.tolist())) < 2:
        return None
    beyond_s = np.array([step.seconds - plain.gpu_s(step.batch) for step in steps])
    step_s, per_sequence_s = _line(num_seqs, beyond_s)
    fitted_s = step_s + per_sequence_s * num_seqs
    if not fitted_s.any():
        return None
    off = float(np.median(np.abs(beyond_s / fitted_s - 1)))
    # of a normal distribution half lies within 0.67 standard deviations
    return HostTimes(
        step_s=_short(step_s),
        per_sequence_s=_short(per_sequence_s),
        log_sd=_short(min(off / 0.67, 3.0)),
        origin="measured",
    )


def _line(num_seqs: Array, seconds: Array) -> tuple[float, float]:
    """Fit a line with neither end below zero, by a soft-L1 loss."""
    from scipy.optimize import least_squares

    scale = max(float(np.median(np.abs(seconds))), 1e-9)

    def off(theta: Array) -> Array:
        difference: Array = theta[0] + theta[1] * num_seqs / num_seqs.max() - seconds / scale
        return difference

    fit = least_squares(off, [0.5, 0.5], bounds=(0, np.inf), loss="soft_l1", f_scale=0.1)
    return float(fit.x[0] * scale), float(fit.x[1] * scale / num_seqs.max())


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
