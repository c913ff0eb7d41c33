"""The numpy arrays that signatures name. Contents and shape of an array are documented where it is used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
"""True for the rows that are meant."""
