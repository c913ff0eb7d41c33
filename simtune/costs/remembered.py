"""Operators that keep the times of their calls, for callers that ask for the same shapes again and again.

Encoders of media are asked step by step, and the plans of a search encode the same items: one prediction takes 0.1 ms,
a look-up a thousandth of that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from simtune.arrays import Array
from simtune.costs.operators import operator_key
from simtune.costs.predict import Predictor, Profile
from simtune.specs.hardware import Hardware, OperatorKind

MOST_CALLS = 100_000
"""Calls of one operator whose times are kept."""


class RememberedPredictor(Predictor):
    """A predictor that keeps the times of single calls; those of several shapes at once are predicted anew."""

    def __init__(self, predictor: Predictor, hardware: Hardware) -> None:
        super().__init__(predictor.operator, hardware.device.processors, hardware.arrays, predictor.chip)
        self._times: dict[tuple[tuple[str, float], ...], Array] = {}

    def seconds(self, **shape: ArrayLike) -> Array:
        """See `Predictor.seconds`; the times of single calls cannot be written to."""
        columns = {name: np.asarray(values, dtype=np.float64) for name, values in shape.items()}
        if any(column.size != 1 for column in columns.values()):
            return super().seconds(**shape)
        key = tuple((name, column.item()) for name, column in columns.items())
        if key not in self._times:
            if len(self._times) >= MOST_CALLS:
                self._times.clear()
            seconds = super().seconds(**shape)
            seconds.flags.writeable = False
            self._times[key] = seconds
        return self._times[key].reshape(max((column.shape for column in columns.values()), key=len))


class RememberedProfile(Profile):
    """A profile with one predictor for each operator, which keeps its times."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__(hardware)
        self._made: dict[str, RememberedPredictor] = {}

    @classmethod
    def of(cls, hardware: Hardware) -> RememberedProfile:
        """Return the profile of a device, the same for all who have the same hardware."""
        # by the object, which the profile keeps: copies under other links share their arrays with it
        shared, key = hardware.arrays.derived, (cls, id(hardware))
        if key not in shared:
            shared[key] = cls(hardware)
        profile: RememberedProfile = shared[key]
        return profile

    def predictor(
        self, kind: OperatorKind, dtype: str, *, kv_dtype: str | None = None, variant: str | None = None
    ) -> Predictor:
        """See `Profile.predictor`."""
        key = operator_key(kind, dtype, kv_dtype, variant)
        if key not in self._made:
            plain = super().predictor(kind, dtype, kv_dtype=kv_dtype, variant=variant)
            self._made[key] = RememberedPredictor(plain, self.hardware)
        return self._made[key]
